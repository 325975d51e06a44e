-- Accept a job: payload, `:job`, a stream that begins with `queued`, a place in the queue, a deadline, the bell.
-- ARGV: id, payload, submission, deadline_ms or '', priority, tenant, trace or '', fingerprint, estimate, max_backlog,
--   weight, cost, choices, idempotent, cancel_on_disconnect, id and entry id of the dead letter that it comes from or '',
--   signature or ''.
-- Answers {'ok' or 'existing', generation, position, entry id}, {'duplicate'}, {'conflict'}, {'gone'}, {'unusable'} or
-- {'full', backlog, ms that its head has waited}. Whether the id can be used is read before the first write.

local id, payload, submission = ARGV[3], ARGV[4], ARGV[5]
local deadline_ms, priority, tenant, trace = ARGV[6], tonumber(ARGV[7]), ARGV[8], ARGV[9]
local fingerprint, estimate, max_backlog = ARGV[10], ARGV[11], tonumber(ARGV[12])
local weight, cost, choices = tonumber(ARGV[13]), tonumber(ARGV[14]), ARGV[15]
local idempotent, cancel_on_disconnect = ARGV[16] == '1', ARGV[17] == '1'
local dead_id, dead_entry_id, signature = ARGV[18], ARGV[19], ARGV[20]

local function accepted(answer, generation)
    return {answer, generation, redis.call('ZRANK', QUEUE, id) or 0, generation .. '-0'}
end

local now = now_us()

-- The generation and the fingerprint of the job whose stream begins with that entry, ended or not.
local function streamed(first)
    local readable, data = pcall(cjson.decode, first[2][4])
    return string.match(first[1], '^%d+'), readable and type(data) == 'table' and data.fingerprint
end

-- The answer if the id is taken, or was by this very submission (the first reply was lost, and the job may have ended
-- since); else nil and the new job's generation.
local function look()
    local job = redis.call('HMGET', key(id, 'job'), 'submission', 'generation', 'fingerprint')
    if job[1] == submission then
        return accepted('ok', job[2])
    end
    local lives = redis.call('EXISTS', key(id, 'job'), payload_key(id), lease_key(id)) > 0
    local first = redis.call('XRANGE', key(id, 'events'), '-', '+', 'COUNT', 1)[1]
    if first and not lives and first[2][5] == 's' and first[2][6] == submission then
        return accepted('ok', string.match(first[1], '^%d+'))
    end
    if idempotent and (job[2] or first) then
        local known_as, fingerprinted = job[2], job[3]
        if not known_as then
            known_as, fingerprinted = streamed(first)
        end
        number_of(known_as)
        return fingerprinted == fingerprint and accepted('existing', known_as) or {'conflict'}
    elseif lives then
        return {'duplicate'}
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
if dead_id ~= '' and redis.call('EXISTS', key(dead_id, 'dead_payload')) == 0 then
    return {'gone'}
end

-- First of all the write that a full server refuses: until here nothing of an older job of this id is gone.
redis.call('SET', payload_key(id), payload, 'PX', JOB_TTL_MS)

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
if signature ~= '' then
    add('signature', signature)
end
if cancel_on_disconnect then
    add('cancel_on_disconnect', 'asked')
end
write_job(id, generation, enqueued_at_ms, fields)
begin_stream(id, generation, enqueued_at_ms, {trace = trace, fingerprint = idempotent and fingerprint}, 's', submission)
redis.call('ZADD', QUEUE, order, id)
if dead_id ~= '' then
    redis.call('DEL', key(dead_id, 'dead_payload'))
    redis.call('XDEL', key(MODEL, 'dead'), dead_entry_id)
end
ring()
return accepted('ok', generation)
