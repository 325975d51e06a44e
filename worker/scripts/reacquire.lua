-- Get a job back by the owner whose lease has ended, or whose stream does not end where it thought: in the same
-- attempt, but in a new epoch. In the old one it would write behind the cursor of a reader who has seen an epoch that
-- a failover undid.
-- ARGV: id, token, generation, epoch, worker, lease_ms.
-- Answers {epoch, {tokens of each choice}}, or nothing: drop the request.

local function reacquire(id, token, generation, epoch)
    local job, holder, last = load_job(id), redis.call('GET', lease_key(id)), last_entry(id)
    if job == nil or job.model ~= MODEL or is_terminal(last) or (holder and holder ~= token) then
        return false
    end
    -- A failover may have brought an earlier job of the id back, or made room for a later one.
    if job.generation ~= generation then
        return false
    end
    -- While the lease is the caller's own, a later epoch is the one that this very call took: its first reply was lost.
    if not holder and last and tonumber(string.match(last[1], '^%d+')) > epoch then
        return false
    end
    local owner = {token = token, worker = ARGV[7], lease_ms = tonumber(ARGV[8])}
    local new_epoch, counts = give(id, job, owner, now_us())
    redis.call('HDEL', key(id, 'job'), 'handed_back_by')
    return {new_epoch, counts}
end

return isolated(false, reacquire, ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6]))
