"""The model is the wire: random walks of the real scripts, outboxes and readers, each step repeated in the model."""

from __future__ import annotations

import pytest
import redis.asyncio
from support.sampling import sample_seed
from support.wire import Wire

from model.mutations import Mutation
from model.state import CANCELLED, STARTED
from model.walk import Mismatch, Walk

#: A full run does ten thousand steps in all.
WALKS, STEPS, FEW_STEPS = 8, 1_300, 60
#: What a walk has to come by, or it shows little.
TO_BE_MET = {
    *((name, answer) for name in ("publish", "finish", "hand back") for answer in ("ok", "fenced")),
    *((name, "moved") for name in ("publish", "finish")),
    *((f"{name}, reply lost", "ok") for name in ("publish", "finish", "hand back")),
    *((name, answer) for name in ("claim", "claim in grace", "take back") for answer in (STARTED, None)),
    *(("look", answer) for answer in ("reading", "done", "replaced")),
    *(("renew", answer) for answer in ("lost", CANCELLED)),
    *(("late", answer) for answer in ("ok", "fenced")),
    *(("cancel", answer) for answer in ("requested", CANCELLED)),
    ("reacquire", "an epoch"),
    ("reacquire, reply lost", "an epoch"),
    ("drop", None),
    ("failover", None),
    ("expire", True),
}
SEEN_IN_A_WALK = (
    Mutation.NO_OWNER_IN_PUBLISH,
    Mutation.TOKENS_FROM_ZERO,
    Mutation.COUNTED_EPOCHS,
    Mutation.ANY_JOB,
    Mutation.REACQUIRE_THE_LEASED,
    Mutation.CLAIM_IGNORES_CANCEL,
    Mutation.LOSSES_ARE_FREE,
    Mutation.READER_IGNORES_EPOCHS,
)


@pytest.mark.sized
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(WALKS))
async def test_the_real_wire_does_what_the_model_does(
    client: redis.asyncio.Redis, number: int, request: pytest.FixtureRequest
) -> None:
    num_steps = STEPS if request.config.getoption("--full") else FEW_STEPS
    walk = Walk(sample_seed(request.config) * WALKS + number, Wire(client))
    await walk.run(num_steps)
    assert len(walk.trail) == num_steps


@pytest.mark.slow
async def test_walks_come_by_everything(client: redis.asyncio.Redis) -> None:
    met: set[tuple[str, object]] = set()
    for seed in range(WALKS):
        await client.flushdb()
        walk = Walk(seed, Wire(client))
        await walk.run(STEPS)
        met |= walk.met
    assert met >= TO_BE_MET, TO_BE_MET - met


@pytest.mark.parametrize("mutation", SEEN_IN_A_WALK, ids=lambda mutation: mutation.name.lower())
async def test_a_model_that_is_wrong_is_told_from_the_wire(client: redis.asyncio.Redis, mutation: Mutation) -> None:
    with pytest.raises(Mismatch, match=r"seed .*, after .* steps"):
        for seed in range(WALKS):
            await client.flushdb()
            await Walk(seed, Wire(client), frozenset({mutation})).run(STEPS)
