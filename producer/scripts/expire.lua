-- End what has no live lease and is past its deadline or cancelled, so that no reader waits for a worker to come.
-- ARGV: limit, id or ''. Looks at that one job, else at up to `limit` that are due and `limit` lapsed leases.
-- Answers the ids of the jobs that this call ended.

local limit, only = tonumber(ARGV[3]), ARGV[4]
local now = now_us()
local now_ms = whole(math.floor(now / 1000))
local ended = {}

-- End the job if it has to end. Answers the job if it goes on and nobody runs it, else nil.
local function settle(id)
    local job = load_job(id)
    if job == nil or redis.call('EXISTS', lease_key(id)) == 1 then
        return nil
    end
    local kind, data
    if is_cancelled(id, job) then
        kind, data = finished('cancelled')
    elseif is_past_deadline(job, now) then
        kind, data = finished('deadline')
    else
        return job
    end
    if end_job(id, job.model, now, kind, data) then
        ended[#ended + 1] = id
    end
end

if only ~= '' then
    settle(only)
    return ended
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', DEADLINES, '-inf', now_ms, 'LIMIT', 0, limit)) do
    local job = settle(id)
    if redis.call('HGET', key(id, 'job'), 'model') ~= MODEL then
        redis.call('ZREM', DEADLINES, id)
    elseif job then
        -- It was due for its reader, and that has come again.
        watch(id, job, now)
    end
end
local lapsed = redis.call('ZRANGEBYSCORE', RUNNING, '-inf', now_ms, 'LIMIT', 0, limit)
local left = 0
for _, id in ipairs(lapsed) do
    left = left + (settle(id) and 1 or 0)
end
if left > 0 then
    -- An idle worker takes them over at once, however seldom it looks. A full server would refuse, and loses nothing.
    pcall(ring)
end
return ended
