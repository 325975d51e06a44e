-- End a job by its owner: what it has not published yet, the terminal entry, and the removal of the job.
-- ARGV: reason and attempts of its dead letter or '' twice, then id, token, expected id, entry id, type, data of each
-- entry, all of one job; the last one is terminal.
-- Answers 'ok', 'fenced' or 'moved'. Entries that stand there already are passed by.

local function finish(id, reason, attempts)
    local removed = false
    for i = 5, #ARGV, 6 do
        local entry_id, kind, data = ARGV[i + 3], ARGV[i + 4], ARGV[i + 5]
        local outcome = removed and 'append' or check_append(id, ARGV[i + 1], ARGV[i + 2], entry_id, kind, data)
        if outcome == 'append' then
            if not removed then
                -- Taking away comes first: a full server refuses a script that begins by appending.
                if reason ~= '' then
                    bury(id, reason, attempts)
                end
                remove_job(id, MODEL)
                removed = true
            end
            append(id, entry_id, kind, data, RESULT_TTL_MS)
        elseif outcome ~= 'ok' then
            return outcome
        end
    end
    return 'ok'
end

return isolated('moved', finish, ARGV[5], ARGV[3], ARGV[4])
