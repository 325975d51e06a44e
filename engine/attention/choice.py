"""Which attention backend serves a model: the one that is asked for, or the fastest of those that can.

What is fastest depends on the card, on the shape of the model's heads and on the versions of the kernels, so `auto`
measures the decode of each kind of layer with each candidate, on the device itself.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

import torch

from inferq.cuda.graph import BrokenDeviceError
from inferq.cuda.synchronize import synchronize
from inferq.engine.assets import first_line
from inferq.engine.batch import StepBatch
from inferq.engine.decode_graphs import Capture
from inferq.engine.errors import ModelLoadError
from inferq.engine.sequence import Scheduled, Sequence, SequenceSampling

from .interface import AttentionBackend, LayerProbe, LayerShape

#: The step that is measured: so many sequences, or as many as there can be, with a context of so many tokens.
_ROWS: Final = 32
_CONTEXT: Final = 1024
_WARM_UPS: Final = 3
_RUNS: Final = 11
#: Layers in a run, so that waiting for the device is a small part of it.
_REPEATS: Final = 10


@dataclass(frozen=True, slots=True)
class Workload:
    """What a backend is chosen for: the model's layers, and the limits of a step."""

    layers: Seq[LayerProbe]
    max_seqs: int
    max_context: int
    dtype: torch.dtype
    device: torch.device

    @property
    def shapes(self) -> list[LayerShape]:
        return [layer.shape for layer in self.layers]

    @property
    def size(self) -> tuple[int, int]:
        """Rows and context of the step that is measured."""
        return min(_ROWS, self.max_seqs), min(_CONTEXT, self.max_context)


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend, and in one line why it is that one."""

    backend: AttentionBackend
    reason: str


def by_speed(
    candidates: Mapping[str, Callable[[], AttentionBackend]],
    workload: Workload,
    measure: Callable[[AttentionBackend, Workload], float],
) -> list[Choice]:
    """The candidates by their `measure` in seconds, the smallest first, without those that fail in it.

    Raises ModelLoadError if all do, and for a failure after which no other can be tried in this process.
    """
    seconds: dict[str, tuple[float, AttentionBackend]] = {}
    notes: list[str] = []
    for name, make in candidates.items():
        try:
            backend = make()
            seconds[name] = measure(backend, workload), backend
        except BrokenDeviceError as exc:
            raise broken_by_recording(name, exc) from exc
        except ModelLoadError as exc:
            notes.append(f"{name}: {exc}")
        except Exception as exc:  # a compiler that is missing, a card that a kernel does not fit: others may do
            notes.append(f"{name}: {type(exc).__name__}: {first_line(exc)}")
    if not seconds:
        raise ModelLoadError(f"no attention backend can serve this model: {'; '.join(notes)}")
    rows, context = workload.size
    measured = ", ".join(f"{name} {value * 1e6:.0f} us" for name, (value, _) in seconds.items())
    reason = "; ".join([f"decode of {rows} sequences of {context} tokens, all layers: {measured}", *notes])
    return [Choice(backend, reason) for _, backend in sorted(seconds.values(), key=lambda each: each[0])]


def broken_by_recording(attention: str, error: BrokenDeviceError) -> ModelLoadError:
    """What a user is told where recording a backend's launches has broken the device for this process."""
    cause = error.__cause__
    why = "" if not isinstance(cause, Exception) else f": {type(cause).__name__}: {first_line(cause)}"
    otherwise = "" if attention == "triton" else " or --attention triton"
    return ModelLoadError(
        f"recording a CUDA graph with attention {attention!r} failed, after which torch {torch.__version__} cannot use "
        f"the device in this process: start with --enforce-eager{otherwise}{why}"
    )


def measure_decode(capture: Capture | None, backend: AttentionBackend, workload: Workload) -> float:
    """Seconds that the attention of all layers takes in a decode step; leaves `backend` with a small cache.

    Each kind of layer is measured once, as the median of some runs: as a graph where it will be one, so that the time
    of its launches counts only where there is none.
    """
    rows, context = workload.size
    blocks = -(-context // backend.block_size)
    # Tables as wide as they will be: flash-attn goes by their width.
    batch = StepBatch(
        max_tokens=rows,
        max_seqs=rows,
        max_model_len=workload.max_context,
        block_size=backend.block_size,
        device=workload.device,
    )
    batch.fill([_decoding(row, context, blocks) for row in range(rows)])
    kinds = Counter(layer.kind for layer in workload.layers)
    examples = {layer.kind: layer for layer in workload.layers}
    total = 0.0
    for kind, count in kinds.items():
        backend.allocate([examples[kind].shape], rows * blocks, dtype=workload.dtype, device=workload.device)
        backend.prepare(batch)
        run = _attend_again_and_again(backend, examples[kind], rows, workload)
        if capture is not None and backend.graph_safe:
            run = capture(run)
        total += count * _median(run, workload.device) / _REPEATS
    return total


def _attend_again_and_again(
    backend: AttentionBackend, layer: LayerProbe, rows: int, workload: Workload
) -> Callable[[], None]:
    zeros = layer.zeros(rows, dtype=workload.dtype, device=workload.device)

    def run() -> None:
        for _ in range(_REPEATS):
            backend.attend(0, **zeros, params=layer.params)

    return run


def _median(run: Callable[[], None], device: torch.device) -> float:
    times = []
    for _ in range(_WARM_UPS + _RUNS):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[_WARM_UPS:])


def _decoding(row: int, context: int, blocks: int) -> Scheduled:
    table = list(range(row * blocks, (row + 1) * blocks))
    sequence = Sequence(
        row, [0] * context, context, SequenceSampling(max_tokens=1), num_computed_tokens=context - 1, block_table=table
    )
    return Scheduled(sequence, 1)
