-- End a job by its owner: its terminal entry, under the same conditions as any entry, and the removal of the job.
-- ARGV: id, token, expected id, entry id, type, data, then reason and attempts of its dead letter or nothing.
-- Answers 'ok', 'fenced' or 'moved'.

local id, entry_id, kind, data = ARGV[3], ARGV[6], ARGV[7], ARGV[8]
local reason, attempts = ARGV[9], ARGV[10]
local outcome = check_append(id, ARGV[4], ARGV[5], entry_id, kind, data)
if outcome == 'append' then
    -- Taking away comes first: a full server refuses a script that begins by appending.
    if reason then
        bury(id, reason, attempts)
    end
    remove_job(id, MODEL)
    append(id, entry_id, kind, data, RESULT_TTL_MS)
    outcome = 'ok'
end
return outcome
