"""The Lua scripts as functions: what the server holds of one job, and the answer.

`epoch` is the one that the script takes if it appends for anybody but the owner: above the stream's last one.
`broken` are the mutations; what is planted where, `mutations` says.
"""

from __future__ import annotations

from typing import NamedTuple

from model.mutations import NONE, Mutation
from model.state import (
    AHEAD,
    CANCELLED,
    DEADLINE,
    DELTA,
    EXHAUSTED,
    NO_DEADLINE,
    PAST,
    QUEUED,
    STARTED,
    TERMINAL,
    Entry,
    EntryId,
    Job,
)

Broken = frozenset[Mutation]
#: The answer 'append' of the shared check is no answer of a script.
OK, FENCED, MOVED, APPEND = "ok", "fenced", "moved", "append"


class Limits(NamedTuple):
    max_attempts: int = 3
    free_losses: int = 10


def published(stream: tuple[Entry, ...]) -> int:
    """How many tokens the stream holds, as the claim reads it: from the end."""
    for entry in reversed(stream):
        if entry[2] == DELTA:
            return entry.index + entry.count
        if entry[2] == STARTED:
            return entry.index
    return 0


def is_cancelled(job: Job) -> bool:
    return job.cancel != 0 and job.cancel == job.generation


def _why_it_ends(job: Job) -> str | None:
    if is_cancelled(job):
        return CANCELLED
    return DEADLINE if job.deadline == PAST else None


def _removed(job: Job) -> Job:
    return Job(stream=job.stream)


def _appended(job: Job, entry: Entry) -> Job:
    return job._replace(stream=(*job.stream, entry))


def end(job: Job, epoch: int, kind: str) -> Job:
    """By somebody who is not its owner."""
    if job.ended:
        return _removed(job)
    return _appended(_removed(job), Entry(epoch, 0, kind))


def enqueue(job: Job, epoch: int, *, deadline: bool) -> tuple[str, Job]:
    if job.lives or job.lease:
        return "duplicate", job
    return OK, Job(
        generation=epoch,
        deadline=AHEAD if deadline else NO_DEADLINE,
        deadlines=deadline,
        queue=True,
        stream=(Entry(epoch, 0, QUEUED),),
    )


def can_be_claimed(job: Job, broken: Broken = NONE) -> bool:
    if not job.lives or (job.lease and Mutation.CLAIM_TAKES_LEASED not in broken):
        return False
    return job.queue or (job.running and Mutation.NO_TAKEOVER not in broken)


def take_back(job: Job, lost_token: int, token: int, epoch: int, broken: Broken = NONE) -> tuple[str | None, Job]:
    """The part of a claim for what an earlier call of the same worker has taken, whose reply was lost."""
    if job.lease != lost_token or not job.lives:
        return None, job
    kind = _why_it_ends(job)
    if kind:
        return None, end(job, epoch, kind)
    return STARTED, _given(job, token, epoch, broken)


def claim(
    job: Job, token: int, epoch: int, *, grace: bool, limits: Limits, broken: Broken = NONE
) -> tuple[str | None, Job]:
    """Of a job that can be claimed. Answers 'started', or None if it ended instead."""
    kind = _why_it_ends(job)
    if kind and Mutation.CLAIM_IGNORES_CANCEL not in broken:
        return None, end(job, epoch, kind)
    attempts, losses = job.attempts, job.losses
    if not job.queue:
        free = grace and (losses < limits.free_losses or Mutation.GRACE_FOR_EVER in broken)
        free = (free and Mutation.GRACE_COSTS not in broken) or Mutation.LOSSES_ARE_FREE in broken
        attempts, losses = attempts + (not free), losses + 1
        if attempts >= limits.max_attempts:
            return None, end(job, epoch, EXHAUSTED)
    return STARTED, _given(job._replace(attempts=attempts, losses=losses), token, epoch, broken)


def _given(job: Job, token: int, epoch: int, broken: Broken) -> Job:
    tokens = 0 if Mutation.TOKENS_FROM_ZERO in broken else published(job.stream)
    started = Entry(epoch, 0, STARTED, tokens, job.attempts + 1)
    return job._replace(lease=token, queue=False, running=True, stream=(*job.stream, started))


def _check(job: Job, token: int, entry: Entry, broken: Broken) -> str:
    """Behind the entry before it, by its number; `entry` stands there already if this is a repeat."""
    holds = job.lease == token or Mutation.NO_OWNER_IN_PUBLISH in broken
    last = job.stream[-1] if job.stream else None
    if Mutation.NO_COMPARE in broken:
        follows = last is not None and last.id < entry.id  # Redis itself refuses a lower id
    else:
        follows = last is not None and last.id == (entry.epoch, entry.number - 1)
    if holds and follows:
        return APPEND
    if entry in job.stream:
        return APPEND if holds and Mutation.REPEAT_IS_APPENDED in broken else OK
    return MOVED if holds else FENCED


def publish(job: Job, token: int, entry: Entry, broken: Broken = NONE) -> tuple[str, Job]:
    outcome = _check(job, token, entry, broken)
    if outcome != APPEND:
        return outcome, job
    return OK, _appended(job, entry)


def finish(job: Job, token: int, entries: tuple[Entry, ...], broken: Broken = NONE) -> tuple[str, Job]:
    """What is left and the terminal entry. Entries that stand there already are passed by."""
    if Mutation.NO_OWNER_IN_FINISH in broken:
        broken = broken | {Mutation.NO_OWNER_IN_PUBLISH}
    after, removed = job, False
    for entry in entries:
        outcome = APPEND if removed else _check(job, token, entry, broken)
        if outcome == APPEND:
            after, removed = _appended(after if removed else _removed(job), entry), True
        elif outcome != OK:
            return outcome, job
    if removed and Mutation.FINISH_LEAVES_RUNNING in broken:
        after = after._replace(running=job.running)
    if removed and Mutation.FINISH_LEAVES_CANCEL in broken:
        after = after._replace(cancel=job.cancel)
    return OK, after


def send(job: Job, token: int, entries: tuple[Entry, ...], broken: Broken = NONE) -> tuple[str, Job]:
    """By the script that the last of the entries is for."""
    if entries[-1].kind in TERMINAL:
        return finish(job, token, entries, broken)
    return publish(job, token, entries[0], broken)


def hand_back(job: Job, token: int, expected: EntryId, epoch: int, broken: Broken = NONE) -> tuple[str, Job]:
    if job.lease != token and not (job.lease and Mutation.NO_OWNER_IN_HANDBACK in broken):
        return OK if job.lives and job.handed_back_by == token else FENCED, job
    if job.stream[-1].id != expected and Mutation.NO_OWNER_IN_HANDBACK not in broken:
        return MOVED, job
    kind = None if Mutation.BACK_FORGETS_CANCEL in broken else _why_it_ends(job)
    if kind:
        return OK, end(job, epoch, kind)
    return OK, job._replace(
        lease=job.lease if Mutation.BACK_LEAVES_LEASE in broken else 0,
        handed_back_by=token,
        running=False,
        queue=True,
        attempts=job.attempts + (Mutation.BACK_COSTS_AN_ATTEMPT in broken),
    )


def may_reacquire(job: Job, token: int, generation: int, owner_epoch: int, broken: Broken = NONE) -> bool:
    if (not job.lives and Mutation.REACQUIRE_THE_DEAD not in broken) or job.ended:
        return False
    if job.lives and job.generation != generation and Mutation.ANY_JOB not in broken:
        return False
    if job.lease and job.lease != token and Mutation.REACQUIRE_THE_LEASED not in broken:
        return False
    # While the lease is the caller's own, a later epoch is the one that this very call took: its reply was lost.
    later = bool(job.stream) and job.stream[-1].epoch > owner_epoch
    return bool(job.lease) or not later or Mutation.ANY_EPOCH in broken


def reacquire(
    job: Job, token: int, generation: int, owner_epoch: int, epoch: int, broken: Broken = NONE
) -> tuple[int | None, Job]:
    """Answers the new epoch, or None: drop the request."""
    if not may_reacquire(job, token, generation, owner_epoch, broken):
        return None, job
    if Mutation.SAME_EPOCH in broken:
        return owner_epoch, job._replace(lease=token, queue=False, running=True, handed_back_by=0)
    after = _given(job, token, epoch, broken)._replace(handed_back_by=0)
    return epoch, after._replace(queue=job.queue) if Mutation.REACQUIRE_LEAVES_QUEUE in broken else after


def renew(job: Job, token: int) -> str:
    if job.lease != token:
        return "lost"
    return CANCELLED if job.lives and is_cancelled(job) else "held"


def cancel(job: Job, epoch: int, broken: Broken = NONE) -> tuple[str, Job]:
    if not job.lives:
        if Mutation.CANCEL_THE_DEAD in broken and job.stream:
            return "finished", job._replace(cancel=job.stream[0].epoch)
        return "finished" if job.ended else "unknown", job
    if not job.lease or Mutation.CANCEL_ENDS_LEASED in broken:
        return CANCELLED, end(job, epoch, CANCELLED)
    return "requested", job._replace(cancel=job.generation)


def expire(job: Job, epoch: int, broken: Broken = NONE) -> tuple[bool, Job]:
    """Answers whether this call ended the job."""
    kind = _why_it_ends(job) if job.lives else None
    if kind is None or (job.lease and Mutation.EXPIRE_ENDS_LEASED not in broken):
        return False, job
    return True, end(job, epoch, kind)
