"""Runs a model over the paged KV cache: a step of scheduled sequences in, one token id for each that samples out.

A step is launched and its tokens are asked for later, so that a device computes while its host prepares what comes
next. Sampling is in here, so that a graph holds it together with the model. Knows neither which sequence is whose, nor
why it was scheduled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import cycle
from typing import Any

import torch

from inferq.cuda.synchronize import synchronize

from .attention import AttentionBackend
from .attention.hook import attending
from .batch import StepBatch
from .conformance import flat_forward
from .decode_graphs import Capture, DecodeGraphs
from .pipe import Ready
from .sampler import sample
from .sequence import Scheduled

#: Chooses a token for each row of logits [samples, vocabulary] of a batch, and puts it into the batch's `sampled`.
Sampler = Callable[[torch.Tensor, StepBatch], None]


class ModelRunner:
    """One loaded model, its KV cache behind `backend`, and the arrays that its steps reuse."""

    def __init__(
        self,
        model: Any,
        backend: AttentionBackend,
        batch: StepBatch,
        sampler: Sampler,
        facts: Ready,
        *,
        lookahead: int,
    ) -> None:
        self.facts = facts
        self.lookahead = lookahead
        self._model = model
        self._backend = backend
        self._batch = batch
        self._sampler = sampler
        self._picks_rows = picks_rows(model)
        self._graphs: DecodeGraphs | None = None
        self._results = cycle([_Result(batch) for _ in range(lookahead + 1)])

    @torch.inference_mode()
    def record_graphs(self, buckets: Seq[int], capture: Capture) -> None:
        """Have decode steps of as many rows, or fewer, padded to one of `buckets` and replayed."""
        graphs = DecodeGraphs(buckets)
        graphs.record(capture, self._prepare_padding, self._compute)
        self._graphs = graphs

    @torch.inference_mode()
    def launch(self, scheduled: Seq[Scheduled]) -> _Result:
        """Begins to compute the scheduled tokens. As many steps may be on their way as `lookahead`, and one more."""
        graphs = self._graphs
        bucket = None
        if graphs is not None and all(item.decodes for item in scheduled):
            bucket = graphs.bucket_for(len(scheduled))
        self._batch.fill(scheduled, rows=bucket)
        self._backend.prepare(self._batch)
        if graphs is not None and bucket is not None:
            graphs.replay(bucket)
        else:
            self._compute()
        result = next(self._results)
        result.take(sum(item.samples for item in scheduled))
        return result

    def _prepare_padding(self, rows: int) -> None:
        synchronize(self._batch.device)  # one recording after the other fills the batch
        self._batch.fill([], rows=rows)
        self._backend.prepare(self._batch)

    def _compute(self) -> None:
        """The forward pass and the sampling of the batch as it stands, from and into its tensors."""
        with attending(self._backend):
            logits = self._logits(self._batch)
        if self._batch.num_samples:
            self._sampler(logits, self._batch)

    def _logits(self, batch: StepBatch) -> torch.Tensor:
        """[samples, vocabulary], of the rows after which a token is sampled."""
        if batch.num_samples == batch.num_tokens:
            return flat_forward(self._model, batch)
        if self._picks_rows:
            return flat_forward(self._model, batch, logits_to_keep=batch.sample_rows)
        return flat_forward(self._model, batch)[batch.sample_rows]


def sample_on_host(logits: torch.Tensor, batch: StepBatch) -> None:
    """A Sampler in plain torch, for any device. It waits for the device."""
    batch.sampled.copy_(sample(logits, batch.samplings, batch.host_sample_positions))


def picks_rows(model: Any) -> bool:
    """False for an architecture that computes the logits of every token whatever it is asked for."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


class _Result:
    """The tokens that a launched step samples, on their way to the host."""

    def __init__(self, batch: StepBatch) -> None:
        self._batch = batch
        self._on_device = batch.device.type == "cuda"
        self._host = torch.zeros(batch.max_seqs, dtype=torch.int64, pin_memory=self._on_device)
        # torch gives its events no types.
        self._event = torch.cuda.Event() if self._on_device else None  # type: ignore[no-untyped-call]
        self._count = 0

    def take(self, count: int) -> None:
        """Copies the first `count` tokens that the batch holds when the step has run."""
        self._count = count
        self._host[:count].copy_(self._batch.sampled[:count], non_blocking=True)
        if self._event is not None:
            self._event.record()

    def tokens(self) -> list[int]:
        """Waits for the step; one token id for each of its sequences that samples."""
        if self._event is not None:
            self._event.synchronize()
        return [int(token) for token in self._host[: self._count].tolist()]
