-- Take jobs: first those whose lease has ended, then waiting ones in order, up to the free slots and blocks. Each is
-- leased, moved to `running`, and gets a new epoch with `started`; what must not run any more is ended instead.
-- ARGV: worker, token, lease_ms, slots, free_blocks or '', block_size, largest request in tokens or '', running_here,
--   takeover, grace_end_ms, asked_at_ms or '', max_attempts, accept_plain,
--   tokens of earlier calls whose replies were lost with commas between, ids to pass by...
-- Answers a list of {id, epoch, generation, attempt, payload, queue_ms, expires_at_ms or '', resumed, {tokens},
--   signature or '', estimate in tokens}.

local owner = {worker = ARGV[3], token = ARGV[4], lease_ms = tonumber(ARGV[5])}
-- One call blocks the server for so many jobs at most; a bell rings for the others.
local MAX_CLAIMS, SPARE_LOOKS = 128, 100
local slots = math.min(tonumber(ARGV[6]), MAX_CLAIMS)
local free_blocks, block_size = tonumber(ARGV[7]), tonumber(ARGV[8])
local largest_request, running_here = tonumber(ARGV[9]) or math.huge, tonumber(ARGV[10])
local takeover, grace_end_ms, asked_at_ms = ARGV[11] == '1', tonumber(ARGV[12]), tonumber(ARGV[13])
local max_attempts, accept_plain = tonumber(ARGV[14]), ARGV[15] == '1'
local lost_tokens, excluded = {}, {}
for token in string.gmatch(ARGV[16], '[^,]+') do
    lost_tokens[token] = true
end
for i = 17, #ARGV do
    excluded[ARGV[i]] = true
end

-- So many takeovers of a job are free at most, so that no job lives for ever.
local FREE_LOSSES = 10
-- Of a plain arq producer's payload, roughly.
local BYTES_PER_TOKEN = 4
local now = now_us()
local now_ms = now / 1000
local claimed, claimed_bytes, looked, settled, blocked = {}, 0, 0, 0, false
local virtual_time

local function may_go_on()
    return #claimed < slots and looked < slots + SPARE_LOOKS and claimed_bytes < MAX_CLAIM_BYTES and not blocked
end

local function finish_off(id, kind, data)
    end_job(id, MODEL, now, kind, data)
    settled = settled + 1
end

-- Bytes of the job's payload, or nil if there is none.
local function payload_size(id)
    local size = redis.call('STRLEN', payload_key(id))
    return (size > 0 or redis.call('EXISTS', payload_key(id)) == 1) and size or nil
end

-- Why a job is refused, whoever sent it, or nil.
local function refusal(id, size)
    if #id > 64 or not string.match(id, '^[%w_-]+$') then
        return 'the job id must match [A-Za-z0-9_-]{1,64}'
    elseif size > MAX_PAYLOAD_BYTES then
        return string.format('the payload has %d bytes; %d are allowed', size, MAX_PAYLOAD_BYTES)
    end
end

-- How a job that nobody runs has to end, whoever comes for it: type and data of its terminal entry, or nil.
local function ending(id, job)
    local last, size = last_entry(id), payload_size(id)
    local begun = job.attempts + (job.queue_ms and 1 or 0)
    if is_cancelled(id, job) then
        return finished('cancelled')
    elseif is_past_deadline(job, now) then
        return finished('deadline')
    elseif size == nil then
        return failed('payload_lost', 'the payload of the job is gone from Redis', begun)
    elseif is_terminal(last) then
        return last[2][2], last[2][4]
    end
    local reason = refusal(id, size)
    if reason then
        return failed('bad_payload', reason, begun)
    end
end

-- How many blocks a job may come to. No request has more tokens than the largest.
local function blocks_of(job)
    return math.ceil(math.min(job.estimate, largest_request) / block_size)
end

-- How many blocks a job waits for. Where the estimate is over the largest request, either it is wrong or the job will be
-- refused, which its tokens alone can tell: that is not worth an empty engine. Once taken, such a job has the blocks of
-- the largest request until its tokens are known, so that a flood of them cannot get in on one block each.
local function awaited_blocks(job)
    return job.estimate > largest_request and 1 or blocks_of(job)
end

-- Whether there is a slot for the job, and blocks for what it may come to. Nobody overtakes a job that does not fit, and
-- where nothing runs one job always does.
local function fits(job)
    if may_go_on() and free_blocks and awaited_blocks(job) > free_blocks and running_here + #claimed > 0 then
        blocked = true
    end
    return may_go_on()
end

local function start(id, job)
    free_blocks = free_blocks and free_blocks - blocks_of(job)
    local epoch, counts, resumed = give(id, job, owner, now)
    local payload, signature = redis.call('GET', payload_key(id)), redis.call('HGET', key(id, 'job'), 'signature')
    local expires_at_ms = job.expires_at_ms and whole(job.expires_at_ms) or ''
    claimed_bytes = claimed_bytes + #payload
    claimed[#claimed + 1] = {
        id, epoch, job.generation, job.attempts + 1, payload, job.queue_ms, expires_at_ms, resumed and 1 or 0, counts,
        signature or '', whole(math.ceil(job.estimate)),
    }
end

-- The id of a job whose hash is gone, or never was: made a job of ours, or ended. Answers the job, or nil.
local function admit(id, score)
    local size, last = payload_size(id), last_entry(id)
    if size == nil then
        finish_off(id, failed('payload_lost', 'the payload of the job is gone from Redis', 0))
        return nil
    end
    local reason = refusal(id, size)
    if not reason and not accept_plain then
        reason = 'jobs of plain arq producers are refused here: submit through the client of inferq'
    end
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

-- What a call of this worker took whose reply was lost is this one's, in the same attempt.
local function take_back(id)
    local job = lost_tokens[redis.call('GET', lease_key(id))] and load_job(id)
    if job and not excluded[id] then
        local kind, data = ending(id, job)
        if kind then
            finish_off(id, kind, data)
        else
            start(id, job)
        end
    end
end

-- A lease that ended without `finish` or a hand-back: its worker died or lost touch. It costs an attempt, but not if it
-- ended while this worker could not have heard of renewals either.
local function take_over(id, lease_end_ms)
    local job = load_job(id)
    if job and job.model ~= MODEL then
        redis.call('ZREM', RUNNING, id)
        return
    elseif is_leased(id) then
        redis.call('ZADD', RUNNING, 'XX', whole(now_ms + redis.call('PTTL', lease_key(id))), id)
        return
    elseif excluded[id] then
        return
    elseif not job and payload_size(id) then
        -- The first write of a claim: a full server refuses it, and everything stays as it was.
        redis.call('ZADD', RUNNING, 'XX', lease_end_ms, id)
        job = adopt(id, 0, last_entry(id), now, {'order', 0})
    elseif not job then
        return finish_off(id, failed('payload_lost', 'the payload of the job is gone from Redis', 0))
    end
    local kind, data = ending(id, job)
    if kind then
        return finish_off(id, kind, data)
    end
    local costs = lease_end_ms >= grace_end_ms or job.losses >= FREE_LOSSES
    local attempts = job.attempts + (costs and 1 or 0)
    if attempts >= max_attempts then
        bury(id, 'attempts_exhausted', attempts)
        finish_off(id, failed('attempts_exhausted', 'its workers were lost, and it has no attempt left', attempts))
    elseif fits(job) then
        job.attempts = attempts
        start(id, job)
        redis.call('HSET', key(id, 'job'), 'attempts', attempts, 'losses', job.losses + 1)
    end
end

local function take_lapsed()
    local bound = slots + SPARE_LOOKS
    local lapsed = redis.call('ZRANGEBYSCORE', RUNNING, '-inf', whole(now_ms), 'WITHSCORES', 'LIMIT', 0, bound)
    for i = 1, #lapsed, 2 do
        looked = looked + 1
        isolated(nil, take_over, lapsed[i], tonumber(lapsed[i + 1]))
    end
end

-- Plain arq producers' scores are times, behind all places: give such jobs their place when they are first seen.
local function place(id, score)
    if redis.call('EXISTS', key(id, 'job')) == 0 and not is_leased(id) then
        admit(id, score)
    end
end

local function place_plain()
    local upto = string.format('%.3f', now_ms)
    local found = redis.call('ZRANGEBYSCORE', QUEUE, FIRST_CLOCK_MS, upto, 'WITHSCORES', 'LIMIT', 0, SPARE_LOOKS)
    for i = 1, #found, 2 do
        isolated(nil, place, found[i], tonumber(found[i + 1]))
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
    if excluded[id] or deferred or is_leased(id) then
        return false
    end
    job = job or admit(id, score)
    if not job then
        return true
    end
    local kind, data = ending(id, job)
    if kind then
        finish_off(id, kind, data)
    elseif not fits(job) then
        return false
    else
        start(id, job)
        virtual_time = math.max(virtual_time or -math.huge, job.order + math.min(job.priority, 0) * PRIORITY_BOOST)
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
            if not may_go_on() then
                return
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

if next(lost_tokens) then
    for _, id in ipairs(redis.call('ZRANGE', RUNNING, 0, -1)) do
        isolated(nil, take_back, id)
    end
end
-- A call that has waited for a server that was stalled comes before the renewals that have waited as well: what has
-- lapsed meanwhile is its owners'.
local is_late = asked_at_ms and now_ms - asked_at_ms > owner.lease_ms / 2
if takeover and not is_late then
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
elseif #claimed + settled > 0 and not may_go_on() then
    ring()
end
return claimed
