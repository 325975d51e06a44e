-- Renew the leases that the caller still holds, and the lifetimes of those jobs' keys.
-- ARGV: lease_ms, then id and token of each. Answers {ids that are cancelled, ids whose lease is not the caller's}.

local lease_ms = tonumber(ARGV[3])
local lease_end_ms = whole(now_us() / 1000 + lease_ms)
local cancelled, lost = {}, {}

for i = 4, #ARGV, 2 do
    local id, token = ARGV[i], ARGV[i + 1]
    if redis.call('GET', lease_key(id)) == token then
        -- PEXPIRE comes first: a full server refuses a script that begins with ZADD.
        redis.call('PEXPIRE', lease_key(id), lease_ms)
        redis.call('ZADD', RUNNING, 'XX', lease_end_ms, id)
        renew_lifetimes(id)
        local job = load_job(id)
        if job and is_cancelled(id, job) then
            cancelled[#cancelled + 1] = id
        end
    else
        lost[#lost + 1] = id
    end
end
return {cancelled, lost}
