-- Take jobs: first those whose lease has ended, then waiting ones in order, up to the free slots and blocks. Each is
-- leased, moved to `running`, and gets a new epoch with `started`; what must not run any more is ended instead.
-- ARGV: worker, token, lease_ms, slots, free_blocks or '', block_size, running_here, takeover, grace_end_ms,
--   max_attempts, accept_plain, ids to pass by...
-- Answers a list of {id, epoch, generation, attempt, payload, queue_ms, expires_at_ms or '', resumed, {tokens}}.

local owner = {worker = ARGV[3], token = ARGV[4], lease_ms = tonumber(ARGV[5])}
-- One call blocks the server for so many jobs at most; a bell rings for the others.
local MAX_CLAIMS, SPARE_LOOKS = 128, 100
local slots = math.min(tonumber(ARGV[6]), MAX_CLAIMS)
local free_blocks, block_size, running_here = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local takeover, grace_end_ms = ARGV[10] == '1', tonumber(ARGV[11])
local max_attempts, accept_plain = tonumber(ARGV[12]), ARGV[13] == '1'
local excluded = {}
for i = 14, #ARGV do
    excluded[ARGV[i]] = true
end

-- So many takeovers of a job are free at most, so that no job lives for ever.
local FREE_LOSSES = 10
-- Of a plain arq producer's payload, roughly.
local BYTES_PER_TOKEN = 4
local now = now_us()
local now_ms = now / 1000
local claimed, looked, settled, blocked = {}, 0, 0, false
local virtual_time

local function finish_off(id, kind, data)
    end_job(id, MODEL, now, kind, data)
    settled = settled + 1
end

-- How a job that nobody runs has to end, whoever comes for it: type and data of its terminal entry, or nil.
local function ending(id, job, last, payload)
    if is_cancelled(id, job) then
        return finished('cancelled')
    elseif is_past_deadline(job, now) then
        return finished('deadline')
    elseif not payload then
        local begun = job.attempts + (job.queue_ms and 1 or 0)
        return failed('payload_lost', 'the payload of the job is gone from Redis', begun)
    elseif is_terminal(last) then
        return last[2][2], last[2][4]
    end
end

-- Why a plain arq producer's job is refused, or nil.
local function refusal(id)
    if #id > 64 or not string.match(id, '^[%w_-]+$') then
        return 'the job id must match [A-Za-z0-9_-]{1,64}'
    elseif not accept_plain then
        return 'jobs of plain arq producers are refused here: submit through the client of inferq'
    end
end

-- Take a slot for the job, and blocks for what it may come to, if there are any. Nobody overtakes a job that does not
-- fit, and where nothing runs one job always does.
local function reserve(job)
    local blocks = math.ceil(job.estimate / block_size)
    if blocked or #claimed >= slots then
        return false
    elseif free_blocks and blocks > free_blocks and running_here + #claimed > 0 then
        blocked = true
        return false
    end
    free_blocks = free_blocks and free_blocks - blocks
    return true
end

local function start(id, job, payload)
    local epoch, counts, resumed = give(id, job, owner, now)
    local expires_at_ms = job.expires_at_ms and whole(job.expires_at_ms) or ''
    claimed[#claimed + 1] = {
        id, epoch, job.generation, job.attempts + 1, payload, job.queue_ms, expires_at_ms, resumed and 1 or 0, counts,
    }
end

-- The id of a job whose hash is gone, or never was: made a job of ours, or ended. Answers the job, or nil.
local function admit(id, score)
    local size, last = redis.call('STRLEN', payload_key(id)), last_entry(id)
    if size == 0 then
        finish_off(id, failed('payload_lost', 'the payload of the job is gone from Redis', 0))
        return nil
    end
    local reason = refusal(id)
    if reason then
        adopt(id, score, last, now, {})
        finish_off(id, failed('bad_payload', reason, 0))
        return nil
    end
    local tokens, order, charge = size / BYTES_PER_TOKEN, string.format('%.6f', score), '0'
    if score >= FIRST_CLOCK_MS then
        order, charge = next_place('', tokens, 1, 0)
    end
    -- The first write of a claim, if that gives no place: a full server refuses it.
    redis.call('ZADD', QUEUE, 'XX', order, id)
    return adopt(id, score, last, now, {'tenant', '', 'order', order, 'charge', charge, 'estimate', math.ceil(tokens)})
end

-- A lease that ended without `finish` or a hand-back: its worker died or lost touch. It costs an attempt, but not if it
-- ended while this worker could not have heard of renewals either.
local function take_over(id, lease_end_ms)
    local job, payload = load_job(id), redis.call('GET', payload_key(id))
    if not job and payload then
        -- The first write of a claim: a full server refuses it, and everything stays as it was.
        redis.call('ZADD', RUNNING, 'XX', lease_end_ms, id)
        job = adopt(id, 0, last_entry(id), now, {'order', 0})
    elseif not job then
        return finish_off(id, failed('payload_lost', 'the payload of the job is gone from Redis', 0))
    end
    local kind, data = ending(id, job, last_entry(id), payload)
    if kind then
        return finish_off(id, kind, data)
    end
    local costs = lease_end_ms >= grace_end_ms or job.losses >= FREE_LOSSES
    local attempts = job.attempts + (costs and 1 or 0)
    if attempts >= max_attempts then
        bury(id, 'attempts_exhausted', attempts)
        finish_off(id, failed('attempts_exhausted', 'its workers were lost, and it has no attempt left', attempts))
    elseif reserve(job) then
        job.attempts = attempts
        start(id, job, payload)
        redis.call('HSET', key(id, 'job'), 'attempts', attempts, 'losses', job.losses + 1)
    end
end

local function take_lapsed()
    local bound = slots + SPARE_LOOKS
    local lapsed = redis.call('ZRANGEBYSCORE', RUNNING, '-inf', whole(now_ms), 'WITHSCORES', 'LIMIT', 0, bound)
    for i = 1, #lapsed, 2 do
        local id = lapsed[i]
        looked = looked + 1
        local model, lease_left_ms = redis.call('HGET', key(id, 'job'), 'model'), redis.call('PTTL', lease_key(id))
        if model and model ~= MODEL then
            redis.call('ZREM', RUNNING, id)
        elseif lease_left_ms ~= NO_KEY then
            redis.call('ZADD', RUNNING, 'XX', whole(now_ms + math.max(lease_left_ms, 0)), id)
        elseif not excluded[id] then
            take_over(id, tonumber(lapsed[i + 1]))
        end
    end
end

-- Plain arq producers' scores are times, behind all places: give such jobs their place when they are first seen.
local function place_plain()
    local upto = string.format('%.3f', now_ms)
    local found = redis.call('ZRANGEBYSCORE', QUEUE, FIRST_CLOCK_MS, upto, 'WITHSCORES', 'LIMIT', 0, SPARE_LOOKS)
    for i = 1, #found, 2 do
        local id = found[i]
        if redis.call('EXISTS', key(id, 'job'), lease_key(id)) == 0 then
            admit(id, tonumber(found[i + 1]))
        end
    end
end

-- Deal with one waiting job. Says whether it has left the queue.
local function take(id, score)
    local job = load_job(id)
    if job and job.model ~= MODEL then
        return redis.call('ZREM', QUEUE, id) == 1
    end
    -- A plain producer's score in the future is arq's way to defer a job.
    local deferred = not job and score > now_ms
    if excluded[id] or deferred or redis.call('EXISTS', lease_key(id)) == 1 then
        return false
    end
    job = job or admit(id, score)
    if not job then
        return true
    end
    local payload = redis.call('GET', payload_key(id))
    local kind, data = ending(id, job, last_entry(id), payload)
    if kind then
        finish_off(id, kind, data)
    elseif not reserve(job) then
        return false
    else
        start(id, job, payload)
        virtual_time = math.max(virtual_time or -math.huge, job.order + math.min(job.priority, 0) * PRIORITY_BOOST)
    end
    return true
end

local function take_waiting()
    local passed_by = 0
    while #claimed < slots and not blocked and looked < slots + SPARE_LOOKS do
        local batch = redis.call('ZRANGE', QUEUE, passed_by, passed_by + slots - #claimed - 1, 'WITHSCORES')
        if #batch == 0 then
            return
        end
        for i = 1, #batch, 2 do
            looked = looked + 1
            if not take(batch[i], tonumber(batch[i + 1])) then
                passed_by = passed_by + 1
            end
        end
    end
end

-- The virtual time is the farthest place that was served; what tenants have behind it is worth nothing any more.
local function advance_virtual_time()
    local vtime = key(MODEL, 'vtime')
    local before = tonumber(redis.call('ZSCORE', vtime, VIRTUAL_TIME)) or 0
    local after = string.format('%.6f', math.max(before, virtual_time))
    redis.call('ZREMRANGEBYSCORE', vtime, '-inf', after)
    redis.call('ZADD', vtime, after, VIRTUAL_TIME)
end

if takeover then
    take_lapsed()
end
place_plain()
take_waiting()
if virtual_time then
    advance_virtual_time()
end

-- Others are woken only if this call got on: a queue of jobs to pass by must not keep the bell ringing.
if redis.call('ZCARD', QUEUE) == 0 then
    redis.call('DEL', BELL)
elseif #claimed + settled > 0 and (#claimed == slots or blocked or looked >= slots + SPARE_LOOKS) then
    ring()
end
return claimed
