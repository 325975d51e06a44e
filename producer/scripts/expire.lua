-- End what has no live lease and is past its deadline or cancelled, so that no reader waits for a worker to come.
-- ARGV: limit, id or ''. Looks at that one job, else at up to `limit` deadlines and `limit` lapsed leases.
-- Answers the ids of the jobs that this call ended.

local limit, only = tonumber(ARGV[3]), ARGV[4]
local now = now_us()
local now_ms = whole(math.floor(now / 1000))
local ended = {}

-- Says whether this call ended the job.
local function settle(id)
    local job = load_job(id)
    if job == nil or job.model ~= MODEL then
        redis.call('ZREM', DEADLINES, id)
    end
    if job == nil or is_leased(id) then
        return false
    elseif is_cancelled(id, job.generation) then
        return end_job(id, job.model, now, finished('cancelled'))
    elseif is_past_deadline(job, now) then
        return end_job(id, job.model, now, finished('deadline'))
    end
    return false
end

local function settle_each(ids)
    for _, id in ipairs(ids) do
        if isolated(true, settle, id) then
            ended[#ended + 1] = id
        end
    end
end

if only ~= '' then
    settle_each({only})
    return ended
end
settle_each(redis.call('ZRANGEBYSCORE', DEADLINES, '-inf', now_ms, 'LIMIT', 0, limit))
settle_each(redis.call('ZRANGEBYSCORE', RUNNING, '-inf', now_ms, 'LIMIT', 0, limit))
return ended
