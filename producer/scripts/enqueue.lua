-- Accept a job: payload, `:job`, a stream that begins with `queued`, a place in the queue, a deadline, the bell.
-- ARGV: id, payload, submission, deadline_ms or '', priority, tenant, trace or '', fingerprint, estimate, max_backlog.
-- Answers {'ok', generation, position, entry id}, {'duplicate'}, {'full', backlog, ms that its head has waited} or
-- {'unusable'}. All that is read is read before the first write.

local id, payload, submission = ARGV[3], ARGV[4], ARGV[5]
local deadline_ms, priority, tenant, trace = ARGV[6], ARGV[7], ARGV[8], ARGV[9]
local fingerprint, estimate, max_backlog = ARGV[10], ARGV[11], tonumber(ARGV[12])

local function accepted(generation)
    return {'ok', generation, redis.call('ZRANK', QUEUE, id) or 0, generation .. '-0'}
end

local now = now_us()

-- The answer if the id is taken, or was by this very submission (the first reply was lost, and the job may have ended
-- since); else nil and the new job's generation.
local function look()
    if redis.call('EXISTS', key(id, 'job'), payload_key(id), lease_key(id)) > 0 then
        local first = redis.call('HMGET', key(id, 'job'), 'submission', 'generation')
        return first[1] == submission and accepted(first[2]) or {'duplicate'}
    end
    local first = redis.call('XRANGE', key(id, 'events'), '-', '+', 'COUNT', 1)[1]
    if first and first[2][5] == 's' and first[2][6] == submission then
        return accepted(string.match(first[1], '^%d+'))
    end
    return nil, next_epoch(last_entry(id), now)
end

local fine, answer, generation = pcall(look)
if not fine then
    return is_of_one_job(answer) and {'unusable'} or raise(answer)
elseif answer then
    return answer
end

local backlog = redis.call('ZCARD', QUEUE)
if backlog >= max_backlog then
    local head = redis.call('ZRANGE', QUEUE, 0, 0)[1]
    local since_ms = head and redis.pcall('HGET', key(head, 'job'), 'enqueued_at_ms')
    since_ms = type(since_ms) == 'string' and tonumber(since_ms) or now / 1000
    return {'full', backlog, math.floor(math.max(0, now / 1000 - since_ms))}
end

-- First of all the write that a full server refuses: until here nothing of an older job of this id is gone.
redis.call('SET', payload_key(id), payload, 'PX', JOB_TTL_MS)

local enqueued_at_ms = whole(math.floor(now / 1000))
local order = string.format('%.3f', now / 1000)
local fields = {
    'order', order, 'tenant', tenant, 'priority', priority, 'estimate', estimate, 'fingerprint', fingerprint,
    'submission', submission,
}
-- What an older job of this id may have left behind when its keys expired.
redis.call('ZREM', RUNNING, id)
redis.call('ZREM', DEADLINES, id)
if deadline_ms ~= '' then
    local expires_at_ms = whole(enqueued_at_ms + deadline_ms)
    fields[#fields + 1] = 'expires_at_ms'
    fields[#fields + 1] = expires_at_ms
    redis.call('ZADD', DEADLINES, expires_at_ms, id)
end
write_job(id, generation, enqueued_at_ms, fields)
begin_stream(id, generation, enqueued_at_ms, trace, 's', submission)
redis.call('ZADD', QUEUE, order, id)
ring()
return accepted(generation)
