"""What must hold: of every world that can be reached, of every step, and of the ways on from there.

Each property is a function that says whether it is violated, by its name; `violations` asks them all.
"""

from __future__ import annotations

from collections.abc import Iterator

from model import reader as readers
from model.actions import Config, Step
from model.owner import HELD, UNKNOWN
from model.scripts import is_cancelled
from model.state import (
    CANCELLED,
    DEADLINE,
    DELTA,
    EXHAUSTED,
    NO_DEADLINE,
    PAST,
    STARTED,
    STOP,
    TERMINAL,
    Job,
    State,
    World,
)

ONE_TERMINAL = "one terminal entry, the last of its stream"
IDS_GROW = "entry ids grow"
TOKENS = "the stream's tokens follow each other, from the first one on, and an answer that stopped has all of them"
CONSISTENT = "queue, running, deadlines and lease are what :job says"
CANCEL_KEY = "a cancel key is a live job's, of its generation, and nothing else ends a job that somebody cancelled"
ATTEMPTS = "attempts and takeovers are bounded"
ONE_OWNER = "no two owners share an epoch, and the lease's holder has claimed this very job"
HAS_ALL = "an owner that may write has what its stream holds"
READER = "a reader gets each token once, in order, and all of them; it is told of a loss only where there was one"
APPEND_ONLY = "nothing that stands in a stream changes"
FENCED = "nothing that an owner does without the lease is seen"
LEFT_ALONE = "nobody but its owner ends or takes a leased job"
CHARGED = "a takeover outside the time of grace costs one attempt, and nothing else costs any"
NOT_STARTED = "what has to end is not started, and not given back to the queue"
DROPPED = "an owner is told to drop a request only if that is another's or has ended, and is told so then"
END_IN_REACH = "an end stays within reach of work alone, for the job and for its reader"


def violations(state: State, config: Config) -> Iterator[str]:
    for world in state.worlds:
        yield from _of_stream(world.job, config)
        yield from _of_job(world.job, config)
        yield from _of_owners(world)
        if world.reader.status in (readers.WRONG, readers.SHORT):
            yield READER


def _of_stream(job: Job, config: Config) -> Iterator[str]:
    stream, tokens, before, over = job.stream, 0, (0, -1), False
    for entry in stream:
        if entry[:2] <= before:
            yield IDS_GROW
        before = entry[:2]
        if entry.kind == DELTA:
            if entry.index != tokens or over or entry.count + bool(entry.reason) < 1:
                yield TOKENS
            tokens, over = entry.index + entry.count, bool(entry.reason)
        elif entry.kind == STARTED and entry.index != tokens:
            yield TOKENS
        elif entry.kind in TERMINAL and entry is not stream[-1]:
            yield ONE_TERMINAL
    if tokens > config.tokens or (stream and stream[-1].kind == STOP and tokens != config.tokens):
        yield TOKENS
    if stream and job.lives == job.ended:
        yield ONE_TERMINAL


def _of_job(job: Job, config: Config) -> Iterator[str]:
    if job.cancel and job.cancel != job.generation:
        yield CANCEL_KEY
    if not job.lives:
        if job.queue or job.running or job.deadlines or job.lease:
            yield CONSISTENT
        return
    if job.queue == job.running or (job.lease and not job.running) or not job.stream:
        yield CONSISTENT
    if job.deadlines != (job.deadline != NO_DEADLINE):
        yield CONSISTENT
    limits = config.limits
    if job.attempts >= limits.max_attempts or job.losses > limits.max_attempts - 1 + limits.free_losses:
        yield ATTEMPTS


def _of_owners(world: World) -> Iterator[str]:
    present = [owner for owner in world.owners if owner is not None and owner.hold != UNKNOWN]
    if len({owner.epoch for owner in present}) != len(present):
        yield ONE_OWNER
    job = world.job
    for owner in present:
        if owner.token != job.lease:
            continue
        if owner.generation != job.generation:
            yield ONE_OWNER
        writes = owner.hold == HELD and bool(job.stream) and job.stream[-1].epoch == owner.epoch
        tokens = sum(entry.count for entry in job.stream if entry.kind == DELTA)
        if writes and 0 <= owner.made < tokens:
            yield HAS_ALL


def step_violations(step: Step, config: Config) -> Iterator[str]:
    before, after = step.before.job, step.after.job
    if step.number < 0 or (before is after and step.name not in ("drop", "look", "read", "read one")):
        return
    action = step.name.partition(",")[0]
    if after is not before:
        if action != "enqueue" and after.stream[: len(before.stream)] != before.stream:
            yield APPEND_ONLY
        yield from _of_writer(step, action)
        yield from _of_attempts(step, action, config)
        yield from _of_ends(before, after, action)
    if action in ("drop", "reacquire"):
        yield from _of_drops(step, action)
    if step.reply == readers.LOST and before.stream and action in ("look", "read", "read one"):
        yield READER


def _of_writer(step: Step, action: str) -> Iterator[str]:
    before, after = step.before.job, step.after.job
    if action in ("publish", "finish", "hand back", "return", "late"):
        late = step.before.late
        owner = step.before.owners[step.who] if step.who >= 0 else None
        token = owner.token if owner is not None else late.token if late is not None else 0
        if before.lease != token and after != before:
            yield FENCED
    elif before.lease and action in ("cancel", "expire", "claim", "claim in grace"):
        if after._replace(cancel=before.cancel) != before:
            yield LEFT_ALONE


def _of_attempts(step: Step, action: str, config: Config) -> Iterator[str]:
    before, after = step.before.job, step.after.job
    if action == "enqueue":
        return
    takes_over = action in ("claim", "claim in grace") and not before.queue
    free = action == "claim in grace" and before.losses < config.limits.free_losses
    cost = int(takes_over and not free)
    exhausted = bool(after.stream) and after.stream[-1].kind == EXHAUSTED and not before.ended
    if exhausted and before.attempts + cost < config.limits.max_attempts:
        yield CHARGED
    if after.lives and after.attempts != before.attempts + cost:
        yield CHARGED


def _of_ends(before: Job, after: Job, action: str) -> Iterator[str]:
    has_to_end = is_cancelled(before) or before.deadline == PAST
    goes_on = action in ("claim", "claim in grace", "hand back", "return") and after.lives
    if has_to_end and goes_on and not (before.lease and after.lease):
        yield NOT_STARTED
    if not after.lives and before.lives and action in ("claim", "claim in grace", "expire", "hand back", "return"):
        kind = after.stream[-1].kind if after.stream else ""
        if kind == CANCELLED and before.cancel != before.generation:
            yield CANCEL_KEY
        if kind == DEADLINE and before.deadline != PAST:
            yield NOT_STARTED


def _of_drops(step: Step, action: str) -> Iterator[str]:
    job, owner = step.before.job, step.before.owners[step.who]
    if owner is None:
        return
    holds = job.lease == owner.token
    superseded = bool(job.stream) and job.stream[-1].epoch > owner.epoch
    anothers = (
        job.generation != owner.generation or job.ended or (job.lease and not holds) or (superseded and not holds)
    )
    if bool(anothers) != (action == "drop"):
        yield DROPPED


def is_goal(state: State) -> bool:
    """Nothing is left to be done: each job has ended, or was lost with its server, and so have its readers."""
    return all(not world.job.lives and world.reader.status != readers.READING for world in state.worlds)
