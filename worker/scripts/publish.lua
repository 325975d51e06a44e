-- Append entries, each to the stream of its request, each only by the lease's holder and only behind the entry that
-- the holder knows as the last.
-- ARGV: id, token, expected id, entry id, type, data of each. Answers 'ok', 'fenced' or 'moved' for each.

local outcomes = {}
for i = 3, #ARGV, 6 do
    local id, entry_id, kind, data = ARGV[i], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5]
    local outcome = check_append(id, ARGV[i + 1], ARGV[i + 2], entry_id, kind, data)
    if outcome == 'append' then
        -- The stream has its lifetime from its first entry on.
        redis.call('XADD', key(id, 'events'), entry_id, 't', kind, 'd', data)
        outcome = 'ok'
    end
    outcomes[#outcomes + 1] = outcome
end
return outcomes
