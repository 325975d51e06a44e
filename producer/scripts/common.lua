-- What all scripts share: key names, time, epochs, and the one way in which a job ends. It stands before each
-- script's own text, behind the lifetimes and bounds that the loader writes (JOB_TTL_MS, MAX_PAYLOAD_BYTES, ...).
--
-- Every script gets the fixed keys of the caller's model, and ARGV[1] the key prefix, ARGV[2] the model's name.
-- A full server refuses a script at its first write, if that write could need memory, and never after it. So a script
-- that takes something on begins with such a write, and one that ends something begins by deleting.
--
-- What a script does to one job it does by `isolated`: anybody may write to Redis, and what is wrong with one job's
-- keys ends that job alone.

local QUEUE, RUNNING, DEADLINES, BELL = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local PREFIX, MODEL = ARGV[1], ARGV[2]
-- The error that a script raises itself; numbers beyond the second one have no exact successor.
local BROKEN = 'what Redis holds of this job is broken'
local MAX_EPOCH = 9007199254740991
local MAX_CHOICES = 128
-- A job's place, whoever gave it, stays below every clock in ms; a plain arq producer's score is such a clock.
local FIRST_CLOCK_MS = 100000000000

-- The key `part` of a request or of a model.
local function key(name, part)
    return PREFIX .. ':' .. name .. ':' .. part
end

-- arq's own names.
local function payload_key(id)
    return 'arq:job:' .. id
end

local function lease_key(id)
    return 'arq:in-progress:' .. id
end

-- Lua itself prints a number of 16 digits with 14 of them.
local function whole(number)
    return string.format('%.0f', number)
end

local function now_us()
    local time = redis.call('TIME')
    return time[1] * 1000000 + time[2]
end

-- The last entry of the request's stream as {entry id, {'t', type, 'd', data}}, or nil.
local function last_entry(id)
    return redis.call('XREVRANGE', key(id, 'events'), '+', '-', 'COUNT', 1)[1]
end

local function is_terminal(entry)
    return entry ~= nil and (entry[2][2] == 'finished' or entry[2][2] == 'failed')
end

-- A new epoch: above every epoch of the stream, also when a failover has set the clock or a counter back.
local function next_epoch(last, now)
    local epoch = last and tonumber(string.match(last[1], '^%d+')) or 0
    if epoch >= MAX_EPOCH then
        error(BROKEN, 0)
    end
    return whole(math.max(now, epoch + 1))
end

-- `...` are further fields of the entry and their values.
local function append(id, entry_id, kind, data, ttl_ms, ...)
    redis.call('XADD', key(id, 'events'), entry_id, 't', kind, 'd', data, ...)
    redis.call('PEXPIRE', key(id, 'events'), ttl_ms)
end

-- Whether somebody runs the job. A lease has its end: a key without one was not written by an owner.
local function is_leased(id)
    return redis.call('GET', lease_key(id)) and redis.call('PTTL', lease_key(id)) >= 0
end

-- A field of `:job` that holds a count or a time.
local function number_of(field)
    if not field or #field > 16 or not string.match(field, '^%d+$') then
        error(BROKEN, 0)
    end
    return tonumber(field)
end

-- A field of `:job` that holds any number nearer to 0 than `bound`, or the default where there is none.
local function real_of(field, default, bound)
    local number = field and tonumber(field) or default
    if field and not (tonumber(field) and math.abs(number) < (bound or math.huge)) then
        error(BROKEN, 0)
    end
    return number
end

-- The fields of `:job` that scripts decide by, or nil when there is no such job.
local function load_job(id)
    local values = redis.call('HMGET', key(id, 'job'), 'model', 'generation', 'attempts', 'enqueued_at_ms',
        'expires_at_ms', 'cancel_on_disconnect', 'order', 'priority', 'estimate', 'choices', 'losses', 'queue_ms')
    if not values[2] then
        return nil
    elseif not values[1] then
        error(BROKEN, 0)
    end
    number_of(values[2])
    return {
        model = values[1],
        generation = values[2],
        attempts = number_of(values[3]),
        enqueued_at_ms = number_of(values[4]),
        expires_at_ms = values[5] and number_of(values[5]) or nil,
        cancel_on_disconnect = values[6],
        order = real_of(values[7], 0, FIRST_CLOCK_MS),
        priority = real_of(values[8], 0),
        estimate = math.max(real_of(values[9], 0), 0),
        choices = math.min(math.max(real_of(values[10], 1), 1), MAX_CHOICES),
        losses = values[11] and number_of(values[11]) or 0,
        queue_ms = values[12] and string.format('%.3f', real_of(values[12])),
    }
end

-- By a cancel key, which is meant for one generation so that it never hits a later job of the same id; or by a reader
-- that was there and has gone, where the request asked for that.
local function is_cancelled(id, job)
    if redis.call('GET', key(id, 'cancel')) == job.generation then
        return true
    end
    return job.cancel_on_disconnect == 'armed' and redis.call('EXISTS', key(id, 'reader')) == 0
end

local function is_past_deadline(job, now)
    return job.expires_at_ms ~= nil and job.expires_at_ms * 1000 <= now
end

-- Note when somebody has to look whether the job must be ended: at its deadline, or when its reader's presence ends.
local function watch(id, job, now)
    local due_ms = job.expires_at_ms
    if redis.call('EXISTS', key(id, 'reader')) == 1 then
        local gone_ms = math.ceil(now / 1000) + redis.call('PTTL', key(id, 'reader'))
        due_ms = math.min(due_ms or gone_ms, gone_ms)
    end
    -- Deleting comes first, so that a full server takes it too.
    redis.call('ZREM', key(job.model, 'deadlines'), id)
    if due_ms then
        redis.call('ZADD', key(job.model, 'deadlines'), whole(due_ms), id)
    end
end

local function renew_lifetimes(id)
    for _, name in ipairs({key(id, 'job'), payload_key(id), key(id, 'events'), key(id, 'cancel')}) do
        redis.call('PEXPIRE', name, JOB_TTL_MS)
    end
end

local function ring()
    redis.call('LPUSH', BELL, 1)
    redis.call('LTRIM', BELL, 0, BELL_LENGTH - 1)
    redis.call('EXPIRE', BELL, BELL_TTL_S)
end

-- Fair queueing. A job's place is its virtual finish: behind the virtual time and its tenant's last job, by its cost
-- over the tenant's weight, less its priority's boost. Costs are thousands of tokens, so that places stay far below
-- FIRST_CLOCK_MS, whatever is served.
local TOKENS_PER_COST, PRIORITY_BOOST = 1000, 10000
-- The member of `vtime` that is the virtual time; tenants' names have a prefix.
local VIRTUAL_TIME = 'now'

local function tenant_member(tenant)
    return 'tenant:' .. tenant
end

-- Give a new job its place. Answers its order, and what its tenant was charged for it, as fields of `:job`.
local function next_place(tenant, tokens, weight, priority)
    local vtime = key(MODEL, 'vtime')
    local virtual_time = tonumber(redis.call('ZSCORE', vtime, VIRTUAL_TIME) or 0)
    local last = tonumber(redis.call('ZSCORE', vtime, tenant_member(tenant)) or virtual_time)
    local charge = math.max(tokens, 1) / TOKENS_PER_COST / weight
    local finish = math.max(virtual_time, last) + charge
    redis.call('ZADD', vtime, string.format('%.6f', finish), tenant_member(tenant))
    return string.format('%.6f', finish - priority * PRIORITY_BOOST), string.format('%.6f', charge)
end

-- A job that leaves the queue unserved costs its tenant nothing. Whatever stands in its fields, its end goes on.
local function refund(model, tenant, charge)
    if tenant and tonumber(charge) then
        redis.pcall('ZADD', key(model, 'vtime'), 'XX', 'INCR', '-' .. charge, tenant_member(tenant))
    end
end

-- Write `:job`. `fields` are further fields and their values.
local function write_job(id, generation, enqueued_at_ms, fields)
    redis.call('DEL', key(id, 'job'), key(id, 'cancel'), key(id, 'reader'))
    redis.call('HSET', key(id, 'job'), 'model', MODEL, 'generation', generation, 'enqueued_at_ms', enqueued_at_ms,
        'attempts', 0, unpack(fields))
    redis.call('PEXPIRE', key(id, 'job'), JOB_TTL_MS)
end

-- Begin the stream of a job in place of an older job's. The epoch of its first entry is the job's generation.
-- `extra` has what else its data may hold: `trace`, and the `fingerprint` by which a repeat is told from another request.
-- `...` are further fields of that entry and their values.
local function begin_stream(id, generation, enqueued_at_ms, extra, ...)
    local data = '{"v":' .. WIRE_VERSION .. ',"generation":' .. generation .. ',"enqueued_at_ms":' .. enqueued_at_ms
    for _, name in ipairs({'trace', 'fingerprint'}) do
        if extra[name] and extra[name] ~= '' then
            data = data .. ',"' .. name .. '":' .. cjson.encode(extra[name])
        end
    end
    redis.call('DEL', key(id, 'events'))
    append(id, generation .. '-0', 'queued', data .. '}', JOB_TTL_MS, ...)
end

-- Make a job of ours of a plain arq producer's, whose score is the time of its enqueue in ms by that producer's clock.
-- A stream that has not ended is this job's own: `:job` was lost, not the job. `fields` are further fields of `:job`.
local function adopt(id, score, last, now, fields)
    local now_ms = math.floor(now / 1000)
    local plausible = score <= now_ms and score >= now_ms - JOB_TTL_MS
    local enqueued_at_ms = whole(plausible and score or now_ms)
    local generation = next_epoch(last, now)
    write_job(id, generation, enqueued_at_ms, fields)
    if last == nil or is_terminal(last) then
        begin_stream(id, generation, enqueued_at_ms, {})
    end
    return load_job(id)
end

local function finished(reason)
    return 'finished', '{"finish_reasons":["' .. reason .. '"]}'
end

local function failed(code, message, attempts)
    return 'failed', '{"code":"' .. code .. '","message":' .. cjson.encode(message) .. ',"attempts":' .. attempts .. '}'
end

-- Take everything of a job away but its stream. `model` is the job's own, which need not be the caller's.
local function remove_job(id, model)
    redis.call('DEL', payload_key(id), lease_key(id), key(id, 'job'), key(id, 'cancel'), key(id, 'reader'))
    for _, name in ipairs({'queue', 'running', 'deadlines'}) do
        redis.call('ZREM', key(model, name), id)
    end
    -- With no job left, nobody is ahead of anybody.
    if redis.call('EXISTS', key(model, 'queue'), key(model, 'running')) == 0 then
        redis.call('DEL', key(model, 'vtime'))
    end
end

-- End a job that nobody runs, by somebody who is not its owner: with a new epoch, and never behind a terminal entry.
-- Says whether this call ended it.
local function end_job(id, model, now, kind, data)
    local last = last_entry(id)
    local account = redis.pcall('HMGET', key(id, 'job'), 'tenant', 'charge')
    local was_waiting = redis.call('ZSCORE', key(model, 'queue'), id)
    remove_job(id, model)
    if was_waiting then
        refund(model, account[1], account[2])
    end
    if is_terminal(last) then
        return false
    end
    append(id, next_epoch(last, now) .. '-0', kind, data, RESULT_TTL_MS)
    return true
end

-- Whether an error is of one job's own keys: a key of another type, a field that is no number, a stream that takes no
-- entry. Any other is the server's (it is full, it is a replica, it refuses the user, whom it may name), and concerns
-- everybody.
local function is_of_one_job(fault)
    for _, sign in ipairs({BROKEN, 'WRONGTYPE', 'target stream top item', 'The stream has exhausted'}) do
        if string.find(fault, sign, 1, true) then
            return true
        end
    end
    return false
end

-- Raise what `pcall` has caught, as a command's own error.
local function raise(fault)
    error({err = fault}, 0)
end

-- Do `part(id, ...)`. If that job's keys are broken the job ends, in a new stream if the old one takes no entry, and
-- `instead` is the answer.
local function isolated(instead, part, id, ...)
    local fine, answer = pcall(part, id, ...)
    if fine then
        return answer
    elseif not is_of_one_job(answer) then
        raise(answer)
    end
    local now, kind, data = now_us(), failed('internal', BROKEN, 0)
    if not pcall(end_job, id, MODEL, now, kind, data) then
        redis.call('DEL', key(id, 'events'))
        end_job(id, MODEL, now, kind, data)
    end
    return instead
end
