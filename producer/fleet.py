"""Who serves what: the workers that show signs of life, and the card of each model that says what `submit` may check.

Reads what workers write with each heartbeat; a field that an older worker lacks is not checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, computed_field

from .contract import Keys
from .errors import InvalidRequest, UnknownModel
from .requests import GenerateRequest

if TYPE_CHECKING:
    from arq.connections import ArqRedis

_MAX_NAMED_MODELS: Final = 20
#: A sign of life is overdue after so many heartbeats: a busy machine may be half of one late.
_OVERDUE: Final = 1.5


class _Heartbeat(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")


class Card(_Heartbeat):
    """What a served model can take."""

    model: str
    vocab_size: int | None = None
    max_model_len: int | None = None
    max_backlog: int | None = None

    def check(self, request: GenerateRequest) -> None:
        """Raises InvalidRequest for what no worker of this model could serve."""
        if self.vocab_size is not None:
            _check_ids("prompt_token_ids", request.prompt_token_ids or (), self.vocab_size)
            _check_ids("sampling.stop_token_ids", request.sampling.stop_token_ids, self.vocab_size)
        if self.max_model_len is not None:
            num_prompt = len(request.prompt_token_ids or (0,))  # of a text only its tokenizer can tell: at least one
            num_new = request.sampling.max_tokens or 1
            if num_prompt + num_new > self.max_model_len:
                raise InvalidRequest(
                    f"the model's context has {self.max_model_len} tokens (max_model_len), fewer than the "
                    f"{num_prompt} or more of the prompt and the {num_new} to generate"
                )


class WorkerInfo(_Heartbeat):
    """What a worker last said of itself, and how long ago, by Redis' clock.

    One that ends in good order leaves the list at once. Any other stays for three heartbeats, and is `silent` by then.
    """

    worker: str
    model: str
    running: int = 0
    slots: int = 0
    heartbeat_ms: int = 5000  #: between two signs of life; older workers do not say it, and this is the default
    last_seen_seconds: float = 0.0

    @computed_field  # type: ignore[prop-decorator]  # mypy knows no decorator above a property
    @property
    def silent(self) -> bool:
        """Whether its sign of life is overdue: it was killed, it hangs, or it has lost Redis."""
        return self.last_seen_seconds * 1000 > _OVERDUE * self.heartbeat_ms


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One served model: its waiting and running jobs, and its card while a worker serves it."""

    model: str
    waiting: int
    running: int
    card: Card | None


@dataclass(frozen=True, slots=True)
class Fleet:
    models: tuple[ModelInfo, ...]
    workers: tuple[WorkerInfo, ...]


async def read_card(redis: ArqRedis, keys: Keys) -> Card | None:
    return _parse(Card, await redis.get(keys.card))


async def read_workers(redis: ArqRedis, keys: Keys) -> tuple[WorkerInfo, ...]:
    """Every worker that has shown itself within its last three heartbeats, of whatever model."""
    async with redis.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.zrange(keys.workers, 0, -1, withscores=True)
        (seconds, micros), beats = await pipe.execute()
    now_s = seconds + micros / 1e6
    reports = await redis.mget([keys.worker(name.decode()) for name, _ in beats]) if beats else []
    return tuple(
        worker.model_copy(update={"last_seen_seconds": round(max(0.0, now_s - seen_ms / 1000), 3)})
        for report, (_, seen_ms) in zip(reports, beats, strict=True)
        if (worker := _parse(WorkerInfo, report))
    )


async def read_fleet(redis: ArqRedis, keys: Keys, named: Iterable[str] = ()) -> Fleet:
    """The workers, every model that one of them serves, and the `named` models whoever serves them."""
    workers = await read_workers(redis, keys)
    models = sorted({worker.model for worker in workers} | set(named))
    async with redis.pipeline(transaction=False) as pipe:
        for model in models:
            own = Keys(model, keys.prefix)
            pipe.zcard(own.queue)
            pipe.zcard(own.running)
            pipe.get(own.card)
        answers = await pipe.execute()
    per_model = zip(models, answers[::3], answers[1::3], answers[2::3], strict=True)
    return Fleet(
        tuple(ModelInfo(model, waiting, running, _parse(Card, card)) for model, waiting, running, card in per_model),
        workers,
    )


async def only_model(redis: ArqRedis, keys: Keys) -> str:
    """The one model that is served now. Raises UnknownModel, with the names, when there is not exactly one."""
    fleet = await read_fleet(redis, keys)
    names = [model.model for model in fleet.models if model.card]
    if len(names) == 1:
        return names[0]
    if not names:
        raise UnknownModel(
            "no worker is serving a model now: start one, or name the model (model=, or INFERQ_MODEL) and the job waits"
        )
    listed = ", ".join(names[:_MAX_NAMED_MODELS]) + (", ..." if len(names) > _MAX_NAMED_MODELS else "")
    raise UnknownModel(f"name one of the {len(names)} models that are served: {listed}")


_H = TypeVar("_H", bound=_Heartbeat)


def _parse(kind: type[_H], report: Any) -> _H | None:
    """A report that cannot be read is as good as none: it is a worker's, and the job is not the worse for it."""
    try:
        return kind.model_validate_json(report) if report else None
    except ValidationError:
        return None


def _check_ids(field: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        raise InvalidRequest(f"{field} has an id outside of the model's vocabulary of {vocab_size} tokens")
