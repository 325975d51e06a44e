-- Renew the leases that the caller still holds, and the lifetimes of those jobs' keys.
-- ARGV: lease_ms, then id and token of each. Answers {ids that are cancelled, ids whose lease is not the caller's}.

local lease_ms = tonumber(ARGV[3])
local lease_end_ms = whole(now_us() / 1000 + lease_ms)
local found = {held = {}, cancelled = {}, lost = {}}

local function renew(id, token)
    if redis.call('GET', lease_key(id)) ~= token then
        return 'lost'
    end
    -- PEXPIRE comes first: a full server refuses a script that begins with ZADD.
    redis.call('PEXPIRE', lease_key(id), lease_ms)
    redis.call('ZADD', RUNNING, 'XX', lease_end_ms, id)
    renew_lifetimes(id)
    local job = load_job(id)
    return job and is_cancelled(id, job) and 'cancelled' or 'held'
end

for i = 4, #ARGV, 2 do
    local ids = found[isolated('lost', renew, ARGV[i], ARGV[i + 1])]
    ids[#ids + 1] = ARGV[i]
end
return {found.cancelled, found.lost}
