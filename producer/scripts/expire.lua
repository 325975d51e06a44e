-- End what has no live lease and is past its deadline or cancelled, so that no reader waits for a worker to come.
-- ARGV: limit, id or ''. Looks at that one job, else at up to `limit` that are due and `limit` lapsed leases.
-- Answers the ids of the jobs that this call ended.

local limit, only = tonumber(ARGV[3]), ARGV[4]
local now = now_us()
local now_ms = whole(math.floor(now / 1000))
local ended = {}

-- End the job if it has to end, and answer true. Answers the job if it goes on and nobody runs it, else nil.
local function settle(id)
    local job = load_job(id)
    if job == nil or job.model ~= MODEL then
        redis.call('ZREM', DEADLINES, id)
    end
    if job == nil or is_leased(id) then
        return nil
    elseif is_cancelled(id, job) then
        return end_job(id, job.model, now, finished('cancelled')) or nil
    elseif is_past_deadline(job, now) then
        return end_job(id, job.model, now, finished('deadline')) or nil
    end
    return job
end

-- The jobs of `ids` that go on and that nobody runs.
local function settle_each(ids)
    local left = {}
    for _, id in ipairs(ids) do
        local answer = isolated(true, settle, id)
        if answer == true then
            ended[#ended + 1] = id
        elseif answer then
            left[#left + 1] = {id, answer}
        end
    end
    return left
end

if only ~= '' then
    settle_each({only})
    return ended
end

for _, job in ipairs(settle_each(redis.call('ZRANGEBYSCORE', DEADLINES, '-inf', now_ms, 'LIMIT', 0, limit))) do
    -- It was due for its reader, and that has come again.
    isolated(nil, watch, job[1], job[2], now)
end
if #settle_each(redis.call('ZRANGEBYSCORE', RUNNING, '-inf', now_ms, 'LIMIT', 0, limit)) > 0 then
    -- An idle worker takes them over at once, however seldom it looks. A full server would refuse, and loses nothing.
    pcall(ring)
end
return ended
