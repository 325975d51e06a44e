"""How an engine is set up: one frozen value, given to the child process as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine's process needs to know to load a model and to run it.

    `model` is `demo`, a folder or a Hugging Face id. `dtype` is `auto` (the checkpoint's on CUDA, float32 or bfloat16
    as the CPU computes faster), `float32`, `bfloat16` or `float16`. `kv_cache_bytes` None means: from the memory found
    free, of which `gpu_memory_utilization` may be used on CUDA. `num_blocks` overrides both. `max_model_len` None means
    the model's own context. `attention` is `auto` (on CUDA the fastest that can serve the model, measured at the start;
    else `torch`), `flash`, `triton` or `torch`. `enforce_eager` runs decode steps without CUDA graphs.
    `async_scheduling` plans a step while the one before it runs; None means: on CUDA. `threads` None means every CPU
    that the process may use but one: that one is for whoever feeds the engine, since threads of one step that wait for
    each other are slow when one of them is preempted.
    """

    model: str = "demo"
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_waiting: int = 1024
    kv_cache_bytes: int | None = None
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    attention: str = "auto"
    enforce_eager: bool = False
    async_scheduling: bool | None = None
    threads: int | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("max_model_len", "kv_cache_bytes", "num_blocks", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, not {self.gpu_memory_utilization}")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineConfig:
        """Raises TypeError for an unknown field, ValueError for a value out of its range."""
        return cls(**json.loads(text))
