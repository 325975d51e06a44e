-- A reader says that it is there. Only a job that is cancelled when its readers go takes note of it.
-- ARGV: id. Answers 1 if this has to be said again within READER_TTL_MS, else 0.

local function touch(id)
    local job = load_job(id)
    if job == nil or not job.cancel_on_disconnect then
        return 0
    end
    -- DEL comes first, so that a full server takes note too.
    redis.call('DEL', key(id, 'reader'))
    redis.call('SET', key(id, 'reader'), 1, 'PX', READER_TTL_MS)
    redis.call('HSET', key(id, 'job'), 'cancel_on_disconnect', 'armed')
    watch(id, job, now_us())
    return 1
end

return isolated(0, touch, ARGV[3])
