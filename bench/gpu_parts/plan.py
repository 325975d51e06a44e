"""How much a run of the benchmark measures: all of it, or with `--quick` fewer sizes of the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from . import bandwidth, decode, prefill
from .attention_checks import SHAPES, Shape, attention_cases
from .checks import Case
from .layer_checks import layer_cases
from .shapes import LLAMA_8B, ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much of what is measured."""

    shape: ModelShape
    cases: tuple[Case, ...]
    flash_shapes: tuple[Shape, ...] = SHAPES  #: of which flash-attn is checked with those that it serves
    dtype: torch.dtype = torch.bfloat16
    batches: tuple[int, ...] = bandwidth.BATCHES
    contexts: tuple[int, ...] = bandwidth.CONTEXTS
    max_context: int = bandwidth.MAX_CONTEXT
    prefills: tuple[prefill.PrefillCase, ...] = prefill.CASES
    decode_batches: tuple[int, ...] = decode.BATCHES
    prompt_tokens: int = decode.PROMPT_TOKENS
    new_tokens: int = decode.NEW_TOKENS
    graph_rows: int = 64
    peer_requests: int = 64
    peer_prompt_tokens: int = 256
    peer_settings: Mapping[str, Any] = field(default_factory=dict)


FULL: Final = Plan(shape=LLAMA_8B, cases=(*layer_cases(), *attention_cases()))
QUICK: Final = replace(
    FULL,
    batches=bandwidth.QUICK_BATCHES,
    contexts=bandwidth.QUICK_CONTEXTS,
    decode_batches=decode.QUICK_BATCHES,
)
