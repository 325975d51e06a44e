"""Puts a runner together: a model, the attention that serves it, its kernels, its memory, its graphs.

The order is that of what depends on what. The model's own answers come first, as the gate's measure; then its layers
are looked at, a backend is chosen for them, and its modules are fused; the gate judges the whole; what memory is left
becomes the cache. Every way in which this can fail for the user is a ModelLoadError.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import torch

from inferq.cuda.availability import why_no_triton
from inferq.cuda.graph import GraphRecorder

from .attention import AttentionBackend, LayerShape
from .attention.backends import choose_backends
from .attention.choice import Choice, Workload
from .attention.hook import ZeroAttention, attending
from .attention.longest import attend_to_longest
from .batch import StepBatch
from .computation import first_to_pass, sampler_that_works
from .config import EngineConfig
from .conformance import Gate, flat_forward
from .decode_graphs import LARGEST_BUCKET, Capture, decode_buckets
from .errors import SettingError
from .kernels import Kernels, load_kernels
from .model import LoadedModel, Log, load_model
from .pipe import Ready
from .pool import memory_for, pool_blocks
from .recording import record
from .rope import freeze_rotary_frequencies
from .runner import ModelRunner, Sampler, picks_rows, sample_on_host
from .sequence import Scheduled, Sequence, SequenceSampling
from .warm_up import run_each_form

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
    # What is measured is recorded apart: its graphs are gone before those that serve are made.
    choose = partial(choose_backends, config.attention, None if config.enforce_eager else _capture(loaded.device))
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
    gate = Gate(loaded.model)
    max_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    workload = Workload(gate.layers, max_rows, _context(loaded, config, log), loaded.dtype, loaded.device)
    backend = first_to_pass(gate, loaded.model, choose(workload), kernels, log)
    sampler = sample_on_host if kernels is None else sampler_that_works(kernels, loaded, log)
    if capture is not None and (sampler is sample_on_host or not backend.graph_safe):
        log("warning", "decode steps run without graphs", attention=backend.kernels)
        capture = None

    rows = min(max_rows, LARGEST_BUCKET)
    decodes = partial(_run_largest_step, loaded.model, sampler, rows, rows)
    largest_steps = [partial(_run_largest_step, loaded.model, sampler, config.max_num_batched_tokens, max_rows)]
    if backend.copies_contexts:  # our kernels and flash-attn's take little beside the cache
        largest_steps.append(partial(attend_to_longest, backend, workload, config.max_num_batched_tokens))
    if capture is not None:  # what a graph takes is its own
        largest_steps.append(decodes)
    num_blocks = pool_blocks(
        workload.shapes,
        config,
        block_size=backend.block_size,
        context=workload.max_context,
        dtype=loaded.dtype,
        device=loaded.device,
        largest_steps=largest_steps,
    )
    longest = _cut_context(loaded.model, workload.max_context, num_blocks * backend.block_size, log)
    facts = _facts(loaded, config, backend, num_blocks, longest)
    runner = _build(loaded, config, backend, sampler, workload.shapes, facts)

    if capture is not None:
        record(runner, capture, decode_buckets(max_rows), decodes, log)
    if kernels is not None:
        run_each_form(runner, log)
    return runner


def _cut_context(model: Any, context: int, room: int, log: Log) -> int:
    """The tokens of the longest sequence that there can be, in a cache of `room` tokens."""
    longest = min(context, room)
    if longest < context:
        log("warning", "context cut to the KV cache", wanted=context, max_model_len=longest)
    if freeze_rotary_frequencies(model, longest):
        log("info", "rotary frequencies fixed for the longest sequence", max_model_len=longest)
    return longest


def _build(
    loaded: LoadedModel,
    config: EngineConfig,
    backend: AttentionBackend,
    sampler: Sampler,
    layers: Seq[LayerShape],
    facts: Ready,
) -> ModelRunner:
    """With its cache and its arrays. Raises ModelLoadError where there is no memory for them."""
    device = loaded.device
    with memory_for(f"num_blocks {facts.num_blocks} of {facts.block_size} tokens"):
        backend.allocate(layers, facts.num_blocks, dtype=loaded.dtype, device=device)
    with memory_for(f"max_num_batched_tokens {config.max_num_batched_tokens} and max_num_seqs {config.max_num_seqs}"):
        batch = StepBatch(
            max_tokens=config.max_num_batched_tokens,
            max_seqs=config.max_num_seqs,
            max_model_len=facts.max_model_len,
            block_size=facts.block_size,
            device=device,
        )
        asynchronous = device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
        return ModelRunner(loaded.model, backend, batch, sampler, facts, lookahead=int(asynchronous))


def _capture(device: torch.device) -> Capture | None:
    return GraphRecorder(device) if device.type == "cuda" else None


@torch.inference_mode()
def _run_largest_step(model: Any, sampler: Sampler, tokens: int, samples: int) -> None:
    """A step's forward pass and sampling, but for its attention."""
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


def _context(loaded: LoadedModel, config: EngineConfig, log: Log) -> int:
    """The longest sequence that is wanted and that the model can have, in tokens."""
    wanted, longest = config.max_model_len, loaded.context_length
    if wanted is None and longest is None:
        raise SettingError("max_model_len", f"{loaded.name} does not say how long its context is: set max_model_len")
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
