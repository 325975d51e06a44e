"""Puts a runner together: a model, the attention that serves it, its kernels, its memory, its graphs.

The order is that of what depends on what. The model's own answers come first, as the gate's measure; then its layers
are looked at, a backend is chosen for them, and its modules are fused; the gate judges the whole; what memory is left
becomes the cache. Every way in which this can fail for the user is a ModelLoadError.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import torch

from inferq.cuda.availability import why_no_triton

from .assets import first_line
from .attention import AttentionBackend
from .attention.backends import choose_backends
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

#: The backends that may serve, in the order in which they are tried.
Choose = Callable[[Workload], Seq[Choice]]


def load_runner(config: EngineConfig, log: Log) -> ModelRunner:
    """Loads what `config` names, measures it, and gives it a KV cache. Raises ModelLoadError."""
    torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) - 1))
    loaded = load_model(config, log)
    if loaded.device.type == "cuda":
        torch.cuda.set_device(loaded.device)  # kernels are launched on the current one, wherever their tensors are
    capture = None if config.enforce_eager else _capture(loaded.device)
    # Who asks for plain torch may have trouble with kernels.
    wants_kernels = config.attention != "torch" and why_no_triton(loaded.device) is None
    kernels = load_kernels() if wants_kernels else None
    choose = partial(choose_backends, config.attention, capture)
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

    `choose` gives the attention backends, of which the first that the gate lets pass serves. With `kernels` the model
    is rewritten in place to compute by them, and they sample; then `capture` records decode steps, if the backend
    allows. Raises ModelLoadError for a model that the gate refuses, or that leaves too little memory.
    """
    device, dtype, model = loaded.device, loaded.dtype, loaded.model
    context = _context(loaded, config, log)
    gate = Gate(model)
    max_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    backend = _first_to_pass(gate, model, choose(Workload(gate.layers, max_rows, context, dtype, device)), kernels, log)
    sampler = sample_on_host if kernels is None else _sampler_that_works(kernels, device, log)
    if capture is not None and (sampler is sample_on_host or not backend.graph_safe):
        log("warning", "decode steps run without graphs", attention=backend.kernels)
        capture = None

    shapes = [layer.shape for layer in gate.layers]
    rows = min(max_rows, LARGEST_BUCKET)
    num_blocks = pool_blocks(
        shapes,
        config,
        block_size=backend.block_size,
        context=context,
        dtype=dtype,
        device=device,
        largest_steps=[
            partial(_run_largest_step, model, sampler, config.max_num_batched_tokens, max_rows),
            # What a graph takes is its own.
            *([partial(_run_largest_step, model, sampler, rows, rows)] if capture is not None else []),
        ],
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
    if capture is not None:
        _record(runner, capture, decode_buckets(max_rows), log)
    return runner


def _capture(device: torch.device) -> Capture | None:
    if device.type != "cuda":
        return None
    from inferq.cuda.graph import GraphRecorder

    return GraphRecorder(device)


def _first_to_pass(gate: Gate, model: Any, choices: Seq[Choice], kernels: Kernels | None, log: Log) -> AttentionBackend:
    """Raises ModelLoadError, that of the last one, if the gate refuses the model with all of them."""
    *others, last = choices
    for choice in others:
        try:
            _pass_gate(gate, model, choice.backend, kernels, log)
        except ModelLoadError as exc:
            log("warning", "attention passed over", backend=choice.backend.name, reason=str(exc))
        else:
            return _chosen(choice, log)
    _pass_gate(gate, model, last.backend, kernels, log)
    return _chosen(last, log)


def _chosen(choice: Choice, log: Log) -> AttentionBackend:
    backend = choice.backend
    log("info", "attention chosen", backend=backend.name, kernels=backend.kernels, reason=choice.reason)
    return backend


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


def _sampler_that_works(kernels: Kernels, device: torch.device, log: Log) -> Sampler:
    """The kernels' own, tried on one row, or the host's."""
    batch = StepBatch(max_tokens=1, max_seqs=1, max_model_len=1, block_size=1, device=device)
    batch.fill([], rows=1)
    try:
        kernels.sampler(torch.zeros(1, 8, device=device), batch)
    except Exception as exc:
        log("warning", "tokens are sampled by the host", reason=f"{type(exc).__name__}: {first_line(exc)}")
        return sample_on_host
    return kernels.sampler


@torch.inference_mode()
def _run_largest_step(model: Any, sampler: Sampler, tokens: int, samples: int) -> None:
    """A step's forward pass and sampling.

    Not its attention: our kernels and flash-attn's take little beside the cache. What plain torch gathers is as large
    as the contexts, and counted nowhere.
    """
    batch = StepBatch(max_tokens=tokens, max_seqs=samples, max_model_len=tokens, block_size=tokens, device=model.device)
    lengths = [1] * (samples - 1) + [tokens - samples + 1]
    sampling = SequenceSampling(max_tokens=1, top_p=0.5)
    sequences = [Sequence(key, [0] * n, n, sampling, block_table=[0]) for key, n in enumerate(lengths)]
    batch.fill([Scheduled(sequence, n) for sequence, n in zip(sequences, lengths, strict=True)])
    # Some models have no further positions, and others would change their frequencies for them.
    batch.positions.zero_()
    options = {"logits_to_keep": batch.sample_rows} if picks_rows(model) else {}
    with attending(ZeroAttention()):
        logits = flat_forward(model, batch, **options)
    sampler(logits if options else logits[batch.sample_rows], batch)


def _record(runner: ModelRunner, capture: Capture, buckets: Seq[int], log: Log) -> None:
    """Where something in the forward pass cannot be recorded, decode steps go without. Raises ModelLoadError."""
    start = time.monotonic()
    try:
        with memory_for("CUDA graphs: lower max_num_seqs or gpu_memory_utilization, or set enforce_eager"):
            runner.record_graphs(buckets, capture)
    except ModelLoadError:
        raise
    except Exception as exc:
        log("warning", "decode steps run without graphs", reason=f"{type(exc).__name__}: {first_line(exc)}")
    else:
        seconds = round(time.monotonic() - start, 1)
        log("info", "decode graphs recorded", graphs=len(buckets), largest=buckets[-1], seconds=seconds)


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
