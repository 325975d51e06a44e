"""Puts a runner together: a model, the attention that serves it, its kernels, its memory, its graphs.

The order is that of what depends on what. The model's own answers come first, as the gate's measure; then its layers
are looked at, a backend is chosen for them, and its modules are fused; the gate judges the whole; what memory is left
becomes the cache. Every way in which this can fail for the user is a ModelLoadError.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from inferq.cuda.support import triton_runs_on

from .attention import AttentionBackend
from .attention.backends import choose_backend
from .attention.choice import Choice, Workload
from .attention.hook import ZeroAttention, attending
from .batch import StepBatch
from .config import EngineConfig
from .conformance import Gate, flat_forward
from .decode_graphs import LARGEST_BUCKET, Capture, decode_buckets
from .errors import ModelLoadError
from .fusion import fuse
from .kernels import Kernels, load_kernels
from .model import LoadedModel, Log, load_model
from .pipe import Ready
from .pool import memory_for, pool_blocks
from .rope import freeze_rotary_frequencies
from .runner import ModelRunner, Sampler, picks_rows, sample_on_host
from .sequence import Scheduled, Sequence, SequenceSampling

Choose = Callable[[Workload], Choice]


def load_runner(config: EngineConfig, log: Log) -> ModelRunner:
    """Loads what `config` names, measures it, and gives it a KV cache. Raises ModelLoadError."""
    torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) - 1))
    loaded = load_model(config, log)
    if loaded.device.type == "cuda":
        torch.cuda.set_device(loaded.device)  # kernels are launched on the current one, wherever their tensors are
    capture = None if config.enforce_eager else _capture(loaded.device)
    kernels = load_kernels() if triton_runs_on(loaded.device) else None
    choose = partial(choose_backend, config.attention, capture)
    return assemble(loaded, config, log, choose=choose, kernels=kernels, capture=capture)


def assemble(
    loaded: LoadedModel,
    config: EngineConfig,
    log: Log,
    *,
    choose: Choose,
    kernels: Kernels | None,
    capture: Capture | None,
) -> ModelRunner:
    """A runner for a loaded model.

    `choose` gives the attention backend. With `kernels` the model is rewritten in place to compute by them, and they
    sample; then `capture` records decode steps, if the backend allows it. Raises ModelLoadError for a model that the
    gate refuses, or that leaves too little memory.
    """
    device, dtype, model = loaded.device, loaded.dtype, loaded.model
    context = _context(loaded, config, log)
    gate = Gate(model)
    choice = choose(Workload(gate.layers, config.max_num_seqs, context, dtype, device))
    backend = choice.backend
    log("info", "attention chosen", backend=backend.name, reason=choice.reason)
    _pass_gate(gate, model, backend, kernels, log)
    sampler = sample_on_host if kernels is None else kernels.sampler

    shapes = [layer.shape for layer in gate.layers]
    num_blocks = pool_blocks(
        shapes,
        config,
        block_size=backend.block_size,
        context=context,
        dtype=dtype,
        device=device,
        largest_steps=[partial(_run_largest_step, model, sampler, *size) for size in _largest_steps(config, capture)],
    )
    max_model_len = min(context, num_blocks * backend.block_size)
    if max_model_len < context:
        log("warning", "context cut to the KV cache", wanted=context, max_model_len=max_model_len)
    if freeze_rotary_frequencies(model, max_model_len):
        log("info", "rotary frequencies fixed for the longest sequence", max_model_len=max_model_len)
    with memory_for(f"num_blocks {num_blocks} of {backend.block_size} tokens"):
        backend.allocate(shapes, num_blocks, dtype=dtype, device=device)
    with memory_for(f"max_num_batched_tokens {config.max_num_batched_tokens} and max_num_seqs {config.max_num_seqs}"):
        batch = StepBatch(
            max_tokens=config.max_num_batched_tokens,
            max_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            block_size=backend.block_size,
            device=device,
        )
        asynchronous = device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
        facts = _facts(loaded, config, backend, num_blocks, max_model_len)
        runner = ModelRunner(model, backend, batch, sampler, facts, lookahead=int(asynchronous))
    if capture is not None and backend.graph_safe and kernels is not None:
        _record(runner, capture, config, log)
    return runner


def _capture(device: torch.device) -> Capture | None:
    if device.type != "cuda":
        return None
    from inferq.cuda.graph import GraphRecorder

    return GraphRecorder(device)


def _pass_gate(gate: Gate, model: Any, backend: AttentionBackend, kernels: Kernels | None, log: Log) -> None:
    """With fused modules if the model is right with them, else without. Raises ModelLoadError."""
    if kernels is not None:
        for rotary in (True, False) if hasattr(backend, "attend_rotary") else (False,):
            if _fuses(gate, model, backend, kernels, log, rotary=rotary):
                return
    gate.check(backend)


def _fuses(gate: Gate, model: Any, backend: AttentionBackend, kernels: Kernels, log: Log, *, rotary: bool) -> bool:
    """False, with the model as it was, where the gate refuses it or a kernel fails."""
    fusion = None
    try:
        fusion = fuse(model, kernels.ops, rotary=rotary)
        gate.check(backend)
    except Exception as exc:
        if fusion is not None:
            fusion.undo()
        log("warning", "modules are not fused", rotary=rotary, reason=f"{type(exc).__name__}: {exc}")
        return False
    log("info", "modules fused", **fusion.report)
    return True


def _largest_steps(config: EngineConfig, capture: Capture | None) -> list[tuple[int, int]]:
    """Tokens and samples of the largest steps: of prompts, and of decodes where a graph keeps memory for itself."""
    tokens, seqs = config.max_num_batched_tokens, min(config.max_num_seqs, config.max_num_batched_tokens)
    return [(tokens, seqs)] + ([(min(seqs, LARGEST_BUCKET),) * 2] if capture is not None else [])


@torch.inference_mode()
def _run_largest_step(model: Any, sampler: Sampler, tokens: int, samples: int) -> None:
    """A step's forward pass but for its attention, which keeps nothing besides the cache, and its sampling."""
    batch = StepBatch(max_tokens=tokens, max_seqs=samples, max_model_len=tokens, block_size=tokens, device=model.device)
    lengths = [1] * (samples - 1) + [tokens - samples + 1]
    sampling = SequenceSampling(max_tokens=1, top_p=0.5)
    sequences = [Sequence(key, [0] * n, n, sampling, block_table=[0]) for key, n in enumerate(lengths)]
    batch.fill([Scheduled(sequence, n) for sequence, n in zip(sequences, lengths, strict=True)])
    options = {"logits_to_keep": batch.sample_rows} if picks_rows(model) else {}
    with attending(ZeroAttention()):
        logits = flat_forward(model, batch, **options)
    sampler(logits if options else logits[batch.sample_rows], batch)


def _record(runner: ModelRunner, capture: Capture, config: EngineConfig, log: Log) -> None:
    buckets = decode_buckets(config.max_num_seqs)
    start = time.monotonic()
    with memory_for("CUDA graphs: lower max_num_seqs or gpu_memory_utilization, or set enforce_eager"):
        runner.record_graphs(buckets, capture)
    log("info", "decode graphs recorded", graphs=len(buckets), largest=buckets[-1], seconds=time.monotonic() - start)


def _context(loaded: LoadedModel, config: EngineConfig, log: Log) -> int:
    """The longest sequence that is wanted and that the model can have, in tokens."""
    wanted, longest = config.max_model_len, loaded.context_length
    if wanted is None and longest is None:
        raise ModelLoadError(f"{loaded.name} does not say how long its context is: set max_model_len")
    if wanted is not None and longest is not None and wanted > longest:
        log("warning", "max_model_len cut to the model's context", wanted=wanted, context=longest)
    return min(length for length in (wanted, longest) if length is not None)


def _facts(
    loaded: LoadedModel, config: EngineConfig, backend: AttentionBackend, num_blocks: int, max_model_len: int
) -> Ready:
    return Ready(
        model=loaded.name,
        text_dir=str(loaded.text_dir),
        eos_token_ids=loaded.eos_token_ids,
        vocab_size=loaded.vocab_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=backend.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        attention=backend.name,
    )
