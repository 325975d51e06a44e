"""A random walk of the real wire beside the model: the same step in both, and a look at all that can be seen.

The model says what could happen next, and one of that is chosen. The scripts run on a real server; owners have the
worker's real Outbox, readers the real StreamReader. After each step the answer, the server's keys, the owner's outbox
and the reader's place must be what the model says.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from support.wire import Wire

from model.actions import Config, Model, Step
from model.mutations import NONE
from model.people import Owners, Readers
from model.scripts import Broken, Limits
from model.server import DEADLINE_MS, Names, Replica, look
from model.state import PAST, Budget, State, World

MANY = Budget(*([10**9] * len(Budget._fields)))
CONFIG = Config(
    jobs=2,
    workers=2,
    tokens=4,
    slots=2,
    limits=Limits(),
    budget=MANY,
    deadline=True,
    read_by_one=True,
    lost_enqueue=True,
)
#: How often each of what could happen next is chosen, beside the others. Accidents and whatever is lost have 1.
WEIGHTS = {"enqueue": 12, "claim": 6, "generate": 12, "publish": 12, "finish": 6, "hand back": 6, "read it again": 12}
ACCIDENTS = ("crash", "failover", "cancel", "deadline", "lapse", "drain", "reader begins", "reader resumes")
OTHERS = 3


def weight(name: str) -> int:
    return 1 if "," in name or name in ACCIDENTS else WEIGHTS.get(name, OTHERS)


class Mismatch(AssertionError):
    """The real wire has done something else than the model."""


class _Plain(Model):
    """Numbers stay as they are, so that they stand for the same things all along a walk."""

    def canonical(self, state: State) -> State:
        return state


@dataclass
class Walk:
    """`seed` repeats it. `trail` names the steps that were taken: the last one is the first that went wrong."""

    seed: int
    wire: Wire
    broken: Broken = NONE  #: with a fault in the model, to show that the difference is seen
    trail: list[str] = field(default_factory=list)
    met: set[tuple[str, object]] = field(default_factory=set)  #: steps and their answers

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._model = _Plain(CONFIG, self.broken)
        self._ids = [f"job-{number}" for number in range(CONFIG.jobs)]
        self._names = [Names() for _ in self._ids]
        self._owners = Owners(self.wire, self._ids, self._names, CONFIG)
        self._readers = Readers(self.wire, self._ids, self._names)
        self._replica = Replica(self.wire)

    async def run(self, num_steps: int) -> None:
        """Raises Mismatch, which tells the whole way to it."""
        state = self._model.initial()
        try:
            for number, world in enumerate(state.worlds):
                await self._enqueue(number)
                await self._compare(number, world)
            for _ in range(num_steps):
                state = await self._step(state)
        except Exception as exc:
            way = "\n".join(f"{number:4} {name}" for number, name in enumerate(self.trail, 1))
            raise Mismatch(f"seed {self.seed}, after {len(self.trail)} steps: {exc!r}\n{way}") from exc

    async def _step(self, state: State) -> State:
        choices = list(self._model.steps(state))
        weights = [weight(step.name) for step, _ in choices]
        ((step, after),) = self._random.choices(choices, weights)
        who = f" by worker {step.who}" if step.who >= 0 else ""
        self.met.add((step.name, "an epoch" if type(step.reply) is int else step.reply))
        self.trail.append(f"job {step.number}: {step.name}{who}, expecting {step.reply}")
        answer = await self._do(step, after)
        if answer != step.reply:
            raise AssertionError(f"the answer was {answer!r}")
        for number, world in enumerate(after.worlds):
            await self._compare(number, world)
        return after

    async def _do(self, step: Step, after: State) -> object:
        action = step.name.partition(",")[0]
        if step.number < 0:
            return await self._accident(step, after)
        request_id = self._ids[step.number]
        match action:
            case "enqueue":
                return await self._enqueue(step.number)
            case "cancel":
                return (await self.wire.producer.cancel(request_id)).value
            case "expire":
                return await self.wire.producer.expire(request_id=request_id) == [request_id]
            case "deadline":
                return await self.wire.pass_deadline(request_id)
            case "lapse":
                return await self.wire.lapse(request_id)
        if step.who < 0 and action != "late":
            return await self._readers.do(step, action)
        return await self._owners.do(step, action)

    async def _enqueue(self, number: int) -> str:
        await self.wire.enqueue(self._ids[number], deadline_ms=DEADLINE_MS)
        return "ok"

    async def _accident(self, step: Step, after: State) -> None:
        if step.name == "crash":
            self._owners.crash(step.who)
        elif step.name == "replicate":
            await self._replica.follow()
        else:
            await self._replica.take_over()
            self._owners.connections_are_lost()
            for request_id, world in zip(self._ids, after.worlds, strict=True):
                # A lease's end and a deadline are times: they pass on the replica as well.
                if not world.job.lease and await self.wire.redis.exists(self.wire.keys.lease(request_id)):
                    await self.wire.lapse(request_id)
                if world.job.deadline == PAST:
                    await self.wire.pass_deadline(request_id)

    async def _compare(self, number: int, world: World) -> None:
        expected = world.job
        found = await look(self.wire, self._ids[number], self._names[number], expected)
        differing = [name for name in found._fields if getattr(found, name) != getattr(expected, name)]
        if differing:
            pairs = [f"{name}: {getattr(found, name)}, not {getattr(expected, name)}" for name in differing]
            raise AssertionError("the server has " + "; ".join(pairs))
        self._owners.compare(number, world.owners)
        self._readers.compare(number, world.reader)
