-- End a job by its owner: its terminal entry, under the same conditions as any entry, and the removal of the job.
-- ARGV: id, token, expected id, entry id, type, data. Answers 'ok', 'fenced' or 'moved'.

local id, entry_id, kind, data = ARGV[3], ARGV[6], ARGV[7], ARGV[8]
local outcome = check_append(id, ARGV[4], ARGV[5], entry_id, kind, data)
if outcome == 'append' then
    -- Deleting comes first: a full server refuses a script that begins by appending.
    remove_job(id, MODEL)
    append(id, entry_id, kind, data, RESULT_TTL_MS)
    outcome = 'ok'
end
return outcome
