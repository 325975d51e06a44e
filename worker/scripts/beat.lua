-- A worker's sign of life: its model's card, its own state, its place on the list of workers.
-- ARGV: worker, card, state, ttl_ms.

-- So many other workers are looked at, so that a call stays short.
local LOOKS = 100
local worker, ttl_ms = ARGV[3], tonumber(ARGV[6])
local card, state, workers = key(MODEL, 'card'), PREFIX .. ':worker:' .. worker, PREFIX .. ':workers'
local now = now_us()

-- PEXPIRE comes first: a full server refuses a script that begins with SET, and a healthy worker would look dead.
-- GT, since another worker of the model may show itself less often than this one, and serves on when this one has gone.
redis.call('PEXPIRE', card, ttl_ms, 'GT')
redis.call('SET', card, ARGV[4], 'KEEPTTL')
redis.call('PEXPIRE', card, ttl_ms, 'NX')
redis.call('SET', state, ARGV[5], 'PX', ttl_ms)
redis.call('ZADD', workers, whole(now / 1000), worker)
-- Whose state has run out is gone. By its own time: another worker may show itself less often than this one.
for _, other in ipairs(redis.call('ZRANGEBYSCORE', workers, '-inf', whole(now / 1000 - ttl_ms), 'LIMIT', 0, LOOKS)) do
    if redis.call('EXISTS', PREFIX .. ':worker:' .. other) == 0 then
        redis.call('ZREM', workers, other)
    end
end
