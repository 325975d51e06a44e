-- Take waiting jobs: lease, move to `running`, new epoch, `started`. What must not run any more is ended instead.
-- ARGV: worker, token, lease_ms, slots, sweep, accept_plain, ids to pass by...
-- Answers a list of {id, epoch, generation, attempt, payload, queue_ms, expires_at_ms or ''}.

local worker, token = ARGV[3], ARGV[4]
local lease_ms, slots = tonumber(ARGV[5]), tonumber(ARGV[6])
local sweep, accept_plain = ARGV[7] == '1', ARGV[8] == '1'
local excluded = {}
for i = 9, #ARGV do
    excluded[ARGV[i]] = true
end

-- One call blocks the server for so many jobs at most.
local SPARE_LOOKS = 100
local now = now_us()
local claimed, claimed_bytes, looked, settled = {}, 0, 0, 0

local function may_go_on()
    return #claimed < slots and looked < slots + SPARE_LOOKS and claimed_bytes < MAX_CLAIM_BYTES
end

local function finish_off(id, kind, data)
    end_job(id, MODEL, now, kind, data)
    settled = settled + 1
end

-- How a job that nobody runs has to end, whoever comes for it: type and data of its terminal entry, or nil.
local function ending(id, job, last, has_payload, attempts)
    if is_cancelled(id, job and job.generation) then
        return finished('cancelled')
    elseif job and is_past_deadline(job, now) then
        return finished('deadline')
    elseif not has_payload then
        return failed('payload_lost', 'the payload of the job is gone from Redis', attempts)
    elseif job and is_terminal(last) then
        return last[2][2], last[2][4]
    end
end

-- Why a waiting job is refused, or nil.
local function refusal(id, job, payload_bytes)
    if #id > 64 or not string.match(id, '^[%w_-]+$') then
        return 'the job id must match [A-Za-z0-9_-]{1,64}'
    elseif payload_bytes > MAX_PAYLOAD_BYTES then
        return string.format('the payload has %d bytes; %d are allowed', payload_bytes, MAX_PAYLOAD_BYTES)
    elseif job == nil and not accept_plain then
        return 'jobs of plain arq producers are refused here: submit through the client of inferq'
    end
end

-- Deal with a lease that ended without a `finish`: its worker died or lost touch. One attempt is all that a job has.
local function sweep_one(id)
    local job = load_job(id)
    if job and job.model ~= MODEL then
        redis.call('ZREM', RUNNING, id)
    elseif is_leased(id) then
        redis.call('ZADD', RUNNING, 'XX', whole(now / 1000 + redis.call('PTTL', lease_key(id))), id)
    elseif not excluded[id] then
        local attempts = (job and job.attempts or 0) + 1
        local has_payload = redis.call('EXISTS', payload_key(id)) == 1
        local kind, data = ending(id, job, last_entry(id), has_payload, attempts)
        if kind == nil then
            kind, data = failed('attempts_exhausted', 'its worker was lost, and it has no attempt left', attempts)
        end
        finish_off(id, kind, data)
    end
end

local function sweep_lapsed()
    local lapsed = redis.call('ZRANGEBYSCORE', RUNNING, '-inf', whole(now / 1000), 'LIMIT', 0, slots + SPARE_LOOKS)
    for _, id in ipairs(lapsed) do
        looked = looked + 1
        isolated(nil, sweep_one, id)
    end
end

local function start(id, job, payload)
    local epoch = next_epoch(last_entry(id), now)
    local queue_ms = string.format('%.3f', math.max(0, now / 1000 - job.enqueued_at_ms))
    local data = '{"attempt":%d,"worker":%s,"resumed_tokens":[0],"queue_ms":%s}'
    local attempt = job.attempts + 1
    redis.call('ZREM', QUEUE, id)
    redis.call('ZADD', RUNNING, whole(now / 1000 + lease_ms), id)
    append(id, epoch .. '-0', 'started', string.format(data, attempt, cjson.encode(worker), queue_ms), JOB_TTL_MS)
    renew_lifetimes(id)
    local expires_at_ms = job.expires_at_ms and whole(job.expires_at_ms) or ''
    claimed_bytes = claimed_bytes + #payload
    claimed[#claimed + 1] = {id, epoch, job.generation, attempt, payload, queue_ms, expires_at_ms}
end

-- Deal with one waiting job. Says whether it has left the queue.
local function take(id, score)
    local job = load_job(id)
    if job and job.model ~= MODEL then
        return redis.call('ZREM', QUEUE, id) == 1
    end
    -- A plain producer's score in the future is arq's way to defer a job.
    local deferred = job == nil and score > now / 1000
    if excluded[id] or deferred or is_leased(id) then
        return false
    end
    local last, payload_bytes = last_entry(id), redis.call('STRLEN', payload_key(id))
    local has_payload = payload_bytes > 0 or redis.call('EXISTS', payload_key(id)) == 1
    local kind, data = ending(id, job, last, has_payload, job and job.attempts or 0)
    local reason = kind == nil and refusal(id, job, payload_bytes)
    if reason then
        kind, data = failed('bad_payload', reason, 0)
    elseif kind == nil then
        -- The first write of a claim: a full server refuses it, and the job goes on waiting.
        redis.call('SET', lease_key(id), token, 'PX', lease_ms)
    end
    if job == nil and has_payload then
        adopt(id, score, last, now)
        job = load_job(id)
    end
    if kind then
        finish_off(id, kind, data)
    else
        start(id, job, redis.call('GET', payload_key(id)))
    end
    return true
end

local function take_waiting()
    local passed_by = 0
    while may_go_on() do
        local batch = redis.call('ZRANGE', QUEUE, passed_by, passed_by + slots - #claimed - 1, 'WITHSCORES')
        if #batch == 0 then
            return
        end
        for i = 1, #batch, 2 do
            looked = looked + 1
            local left = isolated('broken', take, batch[i], tonumber(batch[i + 1]))
            if left == 'broken' then
                settled = settled + 1
            elseif not left then
                passed_by = passed_by + 1
            end
            if claimed_bytes >= MAX_CLAIM_BYTES then
                return
            end
        end
    end
end

if sweep then
    sweep_lapsed()
end
take_waiting()

-- Others are woken only if this call got on: a queue of jobs to pass by must not keep the bell ringing.
if redis.call('ZCARD', QUEUE) == 0 then
    redis.call('DEL', BELL)
elseif #claimed + settled > 0 and not may_go_on() then
    ring()
end
return claimed
