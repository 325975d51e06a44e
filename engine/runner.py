"""Runs a model over the paged KV cache: a step of scheduled sequences in, one token id for each that samples out.

Sampling is in here, so that it can come to share a kernel or a graph with the model. Knows neither which sequence is
whose, nor why it was scheduled.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any, Final

import torch

from inferq.cuda.memory import MemoryShortageError, cuda_kv_bytes, host_kv_bytes, num_blocks_for

from .assets import first_line
from .attention import AttentionBackend, LayerShape, block_bytes, make_backend
from .attention.hook import ZeroAttention, attending
from .batch import StepBatch
from .config import EngineConfig
from .conformance import check_conformance, flat_forward
from .errors import ModelLoadError
from .model import LoadedModel, Log, load_model
from .pipe import Ready
from .rope import freeze_rotary_frequencies
from .sampler import sample
from .sequence import Scheduled, SequenceSampling

#: A pool found from free memory holds a sequence of this many tokens at least, or of the model's context.
MIN_POOL_TOKENS: Final = 256


def load_runner(config: EngineConfig, log: Log) -> ModelRunner:
    """Loads what `config` names, measures it, and gives it a KV cache. Raises ModelLoadError."""
    torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) - 1))
    try:
        backend = make_backend(config.attention)
    except ValueError as exc:
        raise ModelLoadError(str(exc)) from exc
    return ModelRunner(load_model(config, log), backend, config, log)


class ModelRunner:
    """One loaded model, its KV cache behind `backend`, and the arrays that its steps reuse."""

    def __init__(self, loaded: LoadedModel, backend: AttentionBackend, config: EngineConfig, log: Log) -> None:
        """Raises ModelLoadError for a model that the gate refuses, or that leaves too little memory."""
        self._model: Any = loaded.model
        self._backend = backend
        # Some architectures compute the logits of every token whatever they are asked for.
        self._picks_rows = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        layers = check_conformance(loaded.model, backend)
        context = _context(loaded, config, log)
        self.block_size = backend.block_size
        self.num_blocks = self._size_pool(layers, loaded, config, context)
        max_model_len = min(context, self.num_blocks * self.block_size)
        if max_model_len < context:
            log("warning", "context cut to the KV cache", wanted=context, max_model_len=max_model_len)
        if freeze_rotary_frequencies(loaded.model, max_model_len):
            log("info", "rotary frequencies fixed for the longest sequence", max_model_len=max_model_len)
        with _memory_for(f"num_blocks {self.num_blocks} of {self.block_size} tokens"):
            backend.allocate(layers, self.num_blocks, dtype=loaded.dtype, device=loaded.device)
        with _memory_for(
            f"max_num_batched_tokens {config.max_num_batched_tokens} and max_num_seqs {config.max_num_seqs}"
        ):
            self._batch = StepBatch(
                max_tokens=config.max_num_batched_tokens,
                max_seqs=config.max_num_seqs,
                max_model_len=max_model_len,
                block_size=self.block_size,
                device=loaded.device,
            )
        self.facts = Ready(
            model=loaded.name,
            text_dir=str(loaded.text_dir),
            eos_token_ids=loaded.eos_token_ids,
            vocab_size=loaded.vocab_size,
            max_model_len=max_model_len,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            dtype=str(loaded.dtype).removeprefix("torch."),
            device=str(loaded.device),
            attention=backend.name,
        )

    @torch.inference_mode()
    def step(self, scheduled: Seq[Scheduled]) -> list[int]:
        """Computes the scheduled tokens; one sampled token id for each of `scheduled` that `samples`, in order."""
        self._batch.fill(scheduled)
        self._backend.prepare(self._batch)
        with attending(self._backend):
            logits = self._logits(self._batch)
        sampling = [item.sequence for item in scheduled if item.samples]
        if not sampling:
            return []
        return sample(logits, [s.sampling for s in sampling], [len(s.token_ids) for s in sampling])

    def _logits(self, batch: StepBatch) -> torch.Tensor:
        """[samples, vocabulary], of the rows after which a token is sampled."""
        if self._picks_rows:
            return flat_forward(self._model, batch, logits_to_keep=batch.sample_rows)
        return flat_forward(self._model, batch)[batch.sample_rows]

    def _size_pool(self, layers: Seq[LayerShape], loaded: LoadedModel, config: EngineConfig, context: int) -> int:
        """How many blocks the cache has."""
        if config.num_blocks is not None:
            return config.num_blocks
        size = self.block_size
        if config.kv_cache_bytes is not None:
            budget, advice = config.kv_cache_bytes, "raise kv_cache_bytes"
        elif loaded.device.type == "cuda":
            activations = self._activation_bytes(config, loaded.device)
            budget = cuda_kv_bytes(loaded.device, config.gpu_memory_utilization, activation_bytes=activations)
            advice = "raise gpu_memory_utilization, or lower max_num_batched_tokens or max_num_seqs"
        else:
            budget, advice = host_kv_bytes(), "free memory, or take a smaller model or dtype"
        try:
            return num_blocks_for(
                budget,
                block_bytes(layers, size, loaded.dtype),
                min_blocks=-(-min(context, MIN_POOL_TOKENS) // size),
                max_blocks=config.max_num_seqs * -(-context // size),
                advice=advice,
            )
        except MemoryShortageError as exc:
            raise ModelLoadError(str(exc)) from exc

    @torch.inference_mode()
    def _activation_bytes(self, config: EngineConfig, device: torch.device) -> int:
        """What the largest step takes on the CUDA device besides weights and cache, measured."""
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        tokens, rows = config.max_num_batched_tokens, min(config.max_num_seqs, config.max_num_batched_tokens)
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
        options = {"logits_to_keep": rows} if self._picks_rows else {}
        with attending(ZeroAttention()):
            logits = self._model(ids, position_ids=torch.zeros_like(ids), use_cache=False, **options).logits[0, -rows:]
        sample(logits, [SequenceSampling(max_tokens=1)] * rows, [0] * rows)
        return torch.cuda.max_memory_allocated(device) - before


@contextmanager
def _memory_for(what: str) -> Iterator[None]:
    """Turns the failure of an allocation, which torch tells in several ways, into a ModelLoadError."""
    try:
        yield
    except (MemoryError, RuntimeError) as exc:
        raise ModelLoadError(f"not enough memory for {what}: {first_line(exc)}") from exc


def _context(loaded: LoadedModel, config: EngineConfig, log: Log) -> int:
    """The longest sequence that is wanted and that the model can have, in tokens."""
    wanted, longest = config.max_model_len, loaded.context_length
    if wanted is None and longest is None:
        raise ModelLoadError(f"{loaded.name} does not say how long its context is: set max_model_len")
    if wanted is not None and longest is not None and wanted > longest:
        log("warning", "max_model_len cut to the model's context", wanted=wanted, context=longest)
    return min(length for length in (wanted, longest) if length is not None)
