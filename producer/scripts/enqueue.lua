-- Accept a job: payload, `:job`, a stream that begins with `queued`, a place in the queue, a deadline, the bell.
-- ARGV: id, payload, submission, deadline_ms or '', priority, tenant, trace or '', fingerprint, estimate, max_backlog,
--   weight, cost, choices, idempotent, cancel_on_disconnect, id and entry id of the dead letter that it comes from or ''.
-- Answers {'ok' or 'existing', generation, position, entry id}, {'duplicate'}, {'conflict'}, {'gone'}, or
-- {'full', backlog, ms that its head has waited}.

local id, payload, submission = ARGV[3], ARGV[4], ARGV[5]
local deadline_ms, priority, tenant, trace = ARGV[6], tonumber(ARGV[7]), ARGV[8], ARGV[9]
local fingerprint, estimate, max_backlog = ARGV[10], ARGV[11], tonumber(ARGV[12])
local weight, cost, choices = tonumber(ARGV[13]), tonumber(ARGV[14]), ARGV[15]
local idempotent, cancel_on_disconnect = ARGV[16] == '1', ARGV[17] == '1'
local dead_id, dead_entry_id = ARGV[18], ARGV[19]

local function accepted(answer, generation)
    return {answer, generation, redis.call('ZRANK', QUEUE, id) or 0, generation .. '-0'}
end

-- The generation and the fingerprint of the job whose stream stands under this id, ended or not.
local function streamed()
    local first = redis.call('XRANGE', key(id, 'events'), '-', '+', 'COUNT', 1)[1]
    local readable, data = pcall(cjson.decode, first and first[2][4] or '{}')
    return first and string.match(first[1], '^%d+'), readable and data.fingerprint
end

-- What to answer if the id is taken, else nil.
local function taken()
    local job = redis.call('HMGET', key(id, 'job'), 'submission', 'generation', 'fingerprint')
    if job[1] == submission then
        return accepted('ok', job[2])
    end
    local lives = redis.call('EXISTS', key(id, 'job'), payload_key(id), lease_key(id)) > 0
    if not idempotent then
        return lives and {'duplicate'} or nil
    end
    local generation, known = job[2], job[3]
    if not generation then
        generation, known = streamed()
    end
    if not generation then
        return lives and {'duplicate'} or nil
    end
    return known == fingerprint and accepted('existing', generation) or {'conflict'}
end

local answer = taken()
if answer then
    return answer
end

local now = now_us()
local backlog = redis.call('ZCARD', QUEUE)
if backlog >= max_backlog then
    local head = redis.call('ZRANGE', QUEUE, 0, 0)[1]
    local since_ms = head and redis.call('HGET', key(head, 'job'), 'enqueued_at_ms') or now / 1000
    return {'full', backlog, math.floor(math.max(0, now / 1000 - since_ms))}
end
if dead_id ~= '' and redis.call('EXISTS', key(dead_id, 'dead_payload')) == 0 then
    return {'gone'}
end

-- First of all the write that a full server refuses: until here nothing of an older job of this id is gone.
redis.call('SET', payload_key(id), payload, 'PX', JOB_TTL_MS)

local generation = next_epoch(last_entry(id), now)
local enqueued_at_ms = whole(math.floor(now / 1000))
local order, charge = next_place(tenant, cost, weight, priority)
local fields = {
    'order', order, 'charge', charge, 'tenant', tenant, 'priority', priority, 'estimate', estimate,
    'fingerprint', fingerprint, 'submission', submission, 'choices', choices,
}
local function add(name, value)
    fields[#fields + 1] = name
    fields[#fields + 1] = value
end
-- What an older job of this id may have left behind when its keys expired.
redis.call('ZREM', RUNNING, id)
redis.call('ZREM', DEADLINES, id)
if deadline_ms ~= '' then
    local expires_at_ms = whole(enqueued_at_ms + deadline_ms)
    add('expires_at_ms', expires_at_ms)
    redis.call('ZADD', DEADLINES, expires_at_ms, id)
end
if cancel_on_disconnect then
    add('cancel_on_disconnect', 'asked')
end
write_job(id, generation, enqueued_at_ms, fields)
begin_stream(id, generation, enqueued_at_ms, {trace = trace, fingerprint = idempotent and fingerprint})
redis.call('ZADD', QUEUE, order, id)
if dead_id ~= '' then
    redis.call('DEL', key(dead_id, 'dead_payload'))
    redis.call('XDEL', key(MODEL, 'dead'), dead_entry_id)
end
ring()
return accepted('ok', generation)
