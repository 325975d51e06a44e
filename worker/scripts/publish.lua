-- Append entries, each to the stream of its request, each only by the lease's holder and only behind the entry that
-- the holder knows as the last.
-- ARGV: id, token, expected id, entry id, type, data of each. Answers 'ok', 'fenced' or 'moved' for each.

local function publish(id, token, expected_id, entry_id, kind, data)
    local outcome = check_append(id, token, expected_id, entry_id, kind, data)
    if outcome ~= 'append' then
        return outcome
    end
    -- The stream has its lifetime from its first entry on.
    redis.call('XADD', key(id, 'events'), entry_id, 't', kind, 'd', data)
    return 'ok'
end

local outcomes = {}
for i = 3, #ARGV, 6 do
    outcomes[#outcomes + 1] = isolated('moved', publish, unpack(ARGV, i, i + 5))
end
return outcomes
