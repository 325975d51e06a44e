-- A worker's sign of life: its model's card, its own state, its place on the list of workers.
-- ARGV: worker, card, state, ttl_ms.

local worker, ttl_ms = ARGV[3], tonumber(ARGV[6])
local card, state, workers = key(MODEL, 'card'), PREFIX .. ':worker:' .. worker, PREFIX .. ':workers'
local now = now_us()

-- PEXPIRE comes first: a full server refuses a script that begins with SET, and a healthy worker would look dead.
redis.call('PEXPIRE', card, ttl_ms)
redis.call('SET', card, ARGV[4], 'PX', ttl_ms)
redis.call('SET', state, ARGV[5], 'PX', ttl_ms)
redis.call('ZADD', workers, whole(now / 1000), worker)
redis.call('ZREMRANGEBYSCORE', workers, '-inf', whole(now / 1000 - ttl_ms))
