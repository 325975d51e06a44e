-- Cancel a job: ended at once if nobody runs it, else its owner is told by the cancel key and its doorbell.
-- ARGV: id. Answers 'unknown', 'finished', 'cancelled' or 'requested'.

local function cancel(id)
    local now = now_us()
    local job = load_job(id)

    if job == nil then
        local score = redis.call('ZSCORE', QUEUE, id) or redis.call('ZSCORE', RUNNING, id)
        if score and redis.call('EXISTS', payload_key(id)) == 1 then
            job = adopt(id, tonumber(score), last_entry(id), now, {'order', 0})
        end
    end

    if job == nil then
        local last = last_entry(id)
        return is_terminal(last) and 'finished' or 'unknown'
    end

    if not is_leased(id) then
        return end_job(id, job.model, now, finished('cancelled')) and 'cancelled' or 'finished'
    end

    -- Renewing comes first, so that a full server takes the key too: a cancellation is what makes room there.
    renew_lifetimes(id)
    redis.call('SET', key(id, 'cancel'), job.generation, 'PX', JOB_TTL_MS)
    redis.call('PUBLISH', key(job.model, 'control'), id)
    return 'requested'
end

return isolated('cancelled', cancel, ARGV[3])
