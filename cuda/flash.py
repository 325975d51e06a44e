"""The binding to flash-attn: paged decode and paged prefill by FlashAttention-3 on Hopper, else by FlashAttention-2.

flash-attn is optional and is loaded when it is asked for. What it cannot serve is refused before anything runs, with
the limit and what to do about it. The limits and what is said here of its kernels were read in the sources of
flash-attn 2.8.3 (csrc/flash_attn/flash_api.cpp) and of flash-attn-3 3.0.0 (hopper/flash_api.cpp).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

#: A page of FlashAttention-2 is a multiple of this many tokens; FlashAttention-3 takes these too.
PAGE_TOKENS: Final = 256
MAX_HEAD_DIM: Final = 256
HEAD_DIM_STEP: Final = 8
#: The major compute capability that FlashAttention-3 is made for.
HOPPER: Final = 9
#: From this version on FlashAttention-2 reads the longest sequence's length on the host before it decodes.
HOST_LENGTHS_SINCE: Final = (2, 8, 4)
_OTHERWISE: Final = "choose another attention backend"
_INSTALL: Final = (
    "install it for the torch that is here, by `pip install flash-attn --no-build-isolation` or for Hopper "
    f"flash-attn-3 from PyTorch's package index, or {_OTHERWISE}"
)


class FlashUnsupportedError(Exception):
    """flash-attn is not there or cannot serve this; the message is one line that names the limit and what to do."""


@dataclass(frozen=True, slots=True)
class FlashParams:
    """`window` W lets a token see itself and the W - 1 before it; `softcap` c turns a score s into c tanh(s / c)."""

    scale: float
    window: int | None = None
    softcap: float | None = None

    def arguments(self, capacity: int) -> dict[str, Any]:
        """As keywords of flash-attn's functions; `capacity` is the most tokens that a block table has room for."""
        # flash-attn computes the query heads of a KV head together only where there is no window: one that no sequence
        # can outgrow is left out.
        window = None if self.window is None or self.window >= capacity else self.window
        return {
            "softmax_scale": self.scale,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "softcap": self.softcap or 0.0,
        }


@dataclass(frozen=True, slots=True)
class Prompts:
    """The sequences of a prefill, or of a part of one, whose query tokens lie behind one another.

    `block_tables` int32 [sequences, blocks], `query_starts` int32 [sequences + 1], `seq_lens` int32 [sequences]; the
    longest query and the longest sequence are known on the host.
    """

    block_tables: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int


class Flash(ABC):
    """One of flash-attn's interfaces. The caches are [blocks, kv_heads, block_size, dim], here as everywhere."""

    #: With its version, as a log shows it.
    name: str
    #: Whether a CUDA graph can hold `decode`: it takes each length from device memory alone.
    graph_safe: bool
    #: Whether `prefill` multiplies what lies behind a sequence's end in its last block, by zeros: NaN stays NaN.
    reads_past_end: bool
    _table_keyword: str

    def __init__(self, with_kvcache: Callable[..., Any]) -> None:
        self._with_kvcache = with_kvcache

    def decode(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        params: FlashParams,
    ) -> torch.Tensor:
        """query [sequences, heads, dim], one token each -> the same shape; zeros where seq_lens int32 is 0."""
        output: torch.Tensor = self._with_kvcache(
            query.unsqueeze(1),
            _tokens_first(key_cache),
            _tokens_first(value_cache),
            cache_seqlens=seq_lens,
            **{self._table_keyword: block_tables},
            **params.arguments(block_tables.shape[1] * key_cache.shape[2]),
        )
        return output.squeeze(1)

    @abstractmethod
    def prefill(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        prompts: Prompts,
        params: FlashParams,
    ) -> torch.Tensor:
        """query [tokens, heads, dim] -> the same shape; causal, aligned at the end of each sequence."""


class Flash2(Flash):
    """FlashAttention-2, for cards of compute capability 8.0 and up."""

    # The last tile's values are cleared behind the end of the sequence (Clear_OOB_MN in flash_fwd_kernel.h).
    reads_past_end = False
    _table_keyword = "block_table"

    def __init__(self, with_kvcache: Callable[..., Any], varlen: Callable[..., Any], version: str) -> None:
        super().__init__(with_kvcache)
        self.name = f"flash-attn {version}"
        self.graph_safe = tuple(int(number) for number in re.findall(r"\d+", version)[:3]) < HOST_LENGTHS_SINCE
        self._varlen = varlen

    def prefill(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        prompts: Prompts,
        params: FlashParams,
    ) -> torch.Tensor:
        output: torch.Tensor = self._varlen(
            query,
            _tokens_first(key_cache),
            _tokens_first(value_cache),
            prompts.query_starts,
            torch.nn.functional.pad(prompts.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            prompts.max_query_len,
            prompts.max_seq_len,
            block_table=prompts.block_tables,
            **params.arguments(prompts.max_seq_len),
        )
        return output


class Flash3(Flash):
    """FlashAttention-3, for Hopper."""

    name = "flash-attn-3"
    graph_safe = True
    # A whole tile of a page is copied at once where the queries fill a tile of their own (get_pagedkv_tma).
    reads_past_end = True
    _table_keyword = "page_table"

    def prefill(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        prompts: Prompts,
        params: FlashParams,
    ) -> torch.Tensor:
        output: torch.Tensor = self._with_kvcache(
            query,
            _tokens_first(key_cache),
            _tokens_first(value_cache),
            cache_seqlens=prompts.seq_lens,
            page_table=prompts.block_tables,
            cu_seqlens_q=prompts.query_starts,
            max_seqlen_q=prompts.max_query_len,
            **params.arguments(prompts.max_seq_len),
        )
        return output


def load_flash(device: torch.device) -> Flash:
    """The best interface that is installed for this card. Raises FlashUnsupportedError."""
    capability = compute_capability(device)
    if capability < (8, 0):
        raise FlashUnsupportedError(
            f"flash-attn needs a card of compute capability 8.0 (Ampere) or newer, this one has "
            f"{capability[0]}.{capability[1]}: {_OTHERWISE}"
        )
    reasons = []
    for load in (_load_flash3, _load_flash2) if capability[0] == HOPPER else (_load_flash2,):
        try:
            return load()
        except ImportError as exc:
            reasons += str(exc).splitlines()[:1]
    raise FlashUnsupportedError(f"flash-attn cannot be loaded ({'; '.join(reasons)}): {_INSTALL}")


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Of a CUDA device. Raises FlashUnsupportedError for another one."""
    if device.type != "cuda":
        raise FlashUnsupportedError(f"flash-attn runs on CUDA devices, not on {device.type}: {_OTHERWISE}")
    return torch.cuda.get_device_capability(device)


def check_layer(*, dtype: torch.dtype, block_size: int, key_dim: int, value_dim: int) -> None:
    """Raises FlashUnsupportedError if flash-attn cannot attend over such a cache."""
    if dtype not in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        raise FlashUnsupportedError(
            f"flash-attn computes in float16 and bfloat16, not in {name}: set the dtype, or {_OTHERWISE}"
        )
    if block_size % PAGE_TOKENS:
        raise FlashUnsupportedError(
            f"flash-attn's blocks are multiples of {PAGE_TOKENS} tokens, not of {block_size}: {_OTHERWISE}"
        )
    if key_dim != value_dim:
        raise FlashUnsupportedError(
            f"flash-attn needs keys and values of one size, not of {key_dim} and {value_dim}: {_OTHERWISE}"
        )
    if key_dim > MAX_HEAD_DIM or key_dim % HEAD_DIM_STEP:
        raise FlashUnsupportedError(
            f"flash-attn's heads have at most {MAX_HEAD_DIM} dimensions, in steps of {HEAD_DIM_STEP}; this model's "
            f"have {key_dim}: {_OTHERWISE}"
        )


def check_heads(*, num_heads: int, num_kv_heads: int, sinks: bool) -> None:
    """Raises FlashUnsupportedError if flash-attn has no such attention."""
    if sinks:
        raise FlashUnsupportedError(f"flash-attn has no attention sinks, which this model uses: {_OTHERWISE}")
    if num_heads % num_kv_heads:
        raise FlashUnsupportedError(
            f"flash-attn needs a multiple of the KV heads as query heads, here {num_kv_heads} and {num_heads}: "
            + _OTHERWISE
        )


def _load_flash2() -> Flash2:
    from flash_attn import __version__, flash_attn_varlen_func, flash_attn_with_kvcache

    return Flash2(flash_attn_with_kvcache, flash_attn_varlen_func, __version__)


def _load_flash3() -> Flash3:
    from flash_attn_interface import flash_attn_with_kvcache

    return Flash3(flash_attn_with_kvcache)


def _tokens_first(cache: torch.Tensor) -> torch.Tensor:
    """[blocks, kv_heads, block_size, dim] as flash-attn's [blocks, block_size, kv_heads, dim], in place."""
    return cache.transpose(1, 2)
