-- Give a job back by its owner: it waits again at its old place, and what it has published stays. It costs no attempt.
-- A job that is cancelled or past its deadline is ended instead.
-- ARGV: id, token, expected id. Answers 'ok' (also for a repeat), 'fenced' or 'moved'.

local function hand_back(id, token, expected_id)
    local now = now_us()
    local job = load_job(id)
    if redis.call('GET', lease_key(id)) ~= token then
        return redis.call('HGET', key(id, 'job'), 'handed_back_by') == token and 'ok' or 'fenced'
    elseif job == nil then
        -- Nobody knows its place any more: whoever finds that its lease has ended makes a job of it again.
        redis.call('DEL', lease_key(id))
        redis.call('ZADD', RUNNING, 'XX', 0, id)
        return 'ok'
    end
    local last = last_entry(id)
    if last == nil or last[1] ~= expected_id then
        return 'moved'
    elseif is_cancelled(id, job) then
        end_job(id, MODEL, now, finished('cancelled'))
    elseif is_past_deadline(job, now) then
        end_job(id, MODEL, now, finished('deadline'))
    else
        -- Deleting comes first, so that a full server takes it too.
        redis.call('DEL', lease_key(id))
        redis.call('HSET', key(id, 'job'), 'handed_back_by', token)
        redis.call('ZREM', RUNNING, id)
        redis.call('ZADD', QUEUE, string.format('%.6f', job.order), id)
        renew_lifetimes(id)
        ring()
    end
    return 'ok'
end

return isolated('fenced', hand_back, ARGV[3], ARGV[4], ARGV[5])
