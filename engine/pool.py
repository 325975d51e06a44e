"""How many blocks the KV cache has, from what is asked for and from the memory that is there.

On a CUDA device: what is free once the model is loaded, less what the largest step takes beside weights and cache,
which is measured. Every way in which memory does not suffice is a ModelLoadError that says what to lower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Final

import torch

from inferq.cuda.memory import (
    MemoryShortageError,
    cuda_kv_bytes,
    host_kv_bytes,
    is_shortage,
    num_blocks_for,
    peak_bytes,
)

from .assets import first_line
from .attention import LayerShape, block_bytes
from .config import EngineConfig
from .errors import ModelLoadError, SettingError

#: A pool found from free memory holds a sequence of this many tokens at least, or of the model's context.
MIN_POOL_TOKENS: Final = 256


def pool_blocks(
    layers: Seq[LayerShape],
    config: EngineConfig,
    *,
    block_size: int,
    context: int,
    dtype: torch.dtype,
    device: torch.device,
    largest_steps: Seq[Callable[[], None]],
) -> int:
    """How many blocks of `block_size` tokens the cache has.

    `largest_steps` each run what takes memory of its own in a step of the largest size that there can be.

    Raises ModelLoadError where the cache would hold too little; SettingError if its size was set.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache_bytes is not None:
        budget, advice = config.kv_cache_bytes, "raise kv_cache_bytes"
    elif device.type == "cuda":
        activations = sum(_peak_bytes(step, config, device) for step in largest_steps)
        budget = cuda_kv_bytes(device, config.gpu_memory_utilization, activation_bytes=activations)
        advice = "raise gpu_memory_utilization, or lower max_num_batched_tokens, max_num_seqs or max_model_len"
    else:
        budget, advice = host_kv_bytes(), "free memory, or take a smaller model or dtype"
    try:
        return num_blocks_for(
            budget,
            block_bytes(layers, block_size, dtype),
            min_blocks=-(-min(context, MIN_POOL_TOKENS) // block_size),
            max_blocks=config.max_num_seqs * -(-context // block_size),
            advice=advice,
        )
    except MemoryShortageError as exc:
        if config.kv_cache_bytes is not None:
            raise SettingError("kv_cache_bytes", str(exc)) from exc
        raise ModelLoadError(str(exc)) from exc


def _peak_bytes(step: Callable[[], None], config: EngineConfig, device: torch.device) -> int:
    with memory_for(
        f"a step: lower max_num_batched_tokens {config.max_num_batched_tokens}, max_num_seqs {config.max_num_seqs} "
        "or max_model_len"
    ):
        return peak_bytes(step, device)


@contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Turns the failure of an allocation into a ModelLoadError."""
    try:
        yield
    except (MemoryError, RuntimeError) as exc:
        if not is_shortage(exc):
            raise
        raise ModelLoadError(f"not enough memory for {what}: {first_line(exc)}") from exc
