-- What the worker's scripts share: how somebody becomes the owner of a job, what an owner may append, dead letters.

-- Entries of a stream that are read at once on the way back from its end.
local WALK = 16

-- Say to `learn` what an entry tells of how many tokens a choice has. Raises for data that is none of ours.
local function read_counts(kind, data, learn)
    if kind == 'delta' then
        local delta = cjson.decode(data)
        learn((delta.choice or 0) + 1, delta.index + #delta.token_ids)
    elseif kind == 'started' then
        for choice, count in ipairs(cjson.decode(data).resumed_tokens) do
            learn(choice, count + 0)
        end
    end
end

-- How many tokens of each choice the stream holds. A choice's deltas follow each other without a gap, so that its last
-- one tells; for a choice without a delta in the last epoch, that epoch's `started` does.
local function published_tokens(id, num_choices)
    local counts, missing, from = {}, num_choices, '+'
    local function learn(choice, count)
        if choice <= num_choices and not counts[choice] and count >= 0 and count <= MAX_EPOCH then
            counts[choice] = count
            missing = missing - 1
        end
    end
    while missing > 0 and from do
        local entries = redis.call('XREVRANGE', key(id, 'events'), from, '-', 'COUNT', WALK)
        for _, entry in ipairs(entries) do
            pcall(read_counts, entry[2][2], entry[2][4], learn)
        end
        from = #entries == WALK and '(' .. entries[WALK][1]
    end
    for choice = 1, num_choices do
        counts[choice] = counts[choice] or 0
    end
    return counts
end

-- Make somebody the job's owner, in a new epoch that begins with `started`. The first write is one that a full server
-- refuses. `owner` has worker, token and lease_ms. Answers the epoch, the tokens that each choice has, and whether
-- anybody has had the job before.
local function give(id, job, owner, now)
    redis.call('SET', lease_key(id), owner.token, 'PX', owner.lease_ms)
    redis.call('ZREM', QUEUE, id)
    redis.call('ZADD', RUNNING, whole(now / 1000 + owner.lease_ms), id)
    if not job.queue_ms then
        job.queue_ms = string.format('%.3f', math.max(0, now / 1000 - job.enqueued_at_ms))
        redis.call('HSET', key(id, 'job'), 'queue_ms', job.queue_ms)
    end
    local last = last_entry(id)
    local epoch, resumed = next_epoch(last, now), last ~= nil and last[2][2] ~= 'queued'
    local counts = published_tokens(id, job.choices)
    local data = '{"attempt":%d,"worker":%s,"resumed_tokens":[%s],"queue_ms":%s}'
    data = string.format(data, job.attempts + 1, cjson.encode(owner.worker), table.concat(counts, ','), job.queue_ms)
    append(id, epoch .. '-0', 'started', data, JOB_TTL_MS)
    renew_lifetimes(id)
    return epoch, counts, resumed
end

-- Whether the owner may append: 'append', or what to answer instead. An entry that stands there already is the
-- owner's own repeat, whose first reply was lost.
local function check_append(id, token, expected_id, entry_id, kind, data)
    local holds = redis.call('GET', lease_key(id)) == token
    local last = last_entry(id)
    if holds and last and last[1] == expected_id then
        return 'append'
    end
    local there = redis.call('XRANGE', key(id, 'events'), entry_id, entry_id)[1]
    if there and there[2][2] == kind and there[2][4] == data then
        return 'ok'
    end
    return holds and 'moved' or 'fenced'
end

-- Keep what can be looked into, and sent again, of a job that failed: its payload, which moves out of the way of a new
-- job of that id. RENAME comes first, since a full server refuses a script that begins by appending. Where `dead` takes
-- no letter, whatever somebody has made of it, the job ends without one.
local function bury(id, reason, attempts)
    if redis.call('EXISTS', payload_key(id)) == 1 then
        redis.call('RENAME', payload_key(id), key(id, 'dead_payload'))
        redis.call('PEXPIRE', key(id, 'dead_payload'), DEAD_TTL_MS)
    end
    redis.call('DEL', payload_key(id))
    local signature = redis.call('HGET', key(id, 'job'), 'signature')
    redis.pcall('XADD', key(MODEL, 'dead'), 'MAXLEN', '~', DEAD_LENGTH, '*', 'id', id, 'reason', reason,
        'attempts', attempts, unpack(signature and {'signature', signature} or {}))
end
