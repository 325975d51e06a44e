"""Launches of the attention kernels at the shapes of real models, on a card that need not be there."""

from __future__ import annotations

from typing import Any

import torch

from inferq.cuda.paged_decode import DecodeWorkspace, paged_decode
from inferq.cuda.paged_prefill import paged_prefill
from support.compiled import SM_80, SM_89, SM_90, Launch, absent, launches

KV_HEADS = 8
#: Entries of a row of the block tables.
TABLE_WIDTH = 2048

#: What a case has, and the values that the matrix of cases takes.
VALUES: dict[str, list[Any]] = {
    "card": [SM_80, SM_89, SM_90],
    "dtype": [torch.float16, torch.bfloat16, torch.float32],
    "dims": [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128)],  # of a key, of a value
    "group": [1, 3, 8, 71],  # query heads a KV head
    "block": [16, 64, 256],
    "window": [None, 1024],
    "softcap": [None, 30.0],
    "sinks": [False, True],
}
#: The attention of most models of today.
PLAIN: dict[str, Any] = {
    "card": SM_90,
    "dtype": torch.bfloat16,
    "dims": (128, 128),
    "group": 4,
    "block": 64,
    "window": None,
    "softcap": None,
    "sinks": False,
}
#: All that the kernels can do at once, on the oldest card.
SPECIAL: dict[str, Any] = {
    "card": SM_80,
    "dtype": torch.float16,
    "dims": (80, 80),
    "group": 3,
    "block": 16,
    "window": 1024,
    "softcap": 30.0,
    "sinks": True,
}
#: The widest heads, on a card with the least shared memory.
WIDE = PLAIN | {"card": SM_89, "dims": (256, 256)}


def decode(case: dict[str, Any], *, rows: int = 32) -> list[Launch]:
    """`case` also has its number of splits."""
    key_dim, value_dim = case["dims"]
    heads, splits = case["group"] * KV_HEADS, case["splits"]
    workspace = DecodeWorkspace.allocate(rows, heads, splits, value_dim, torch.device("meta"))
    with launches(case["card"]) as launched:
        paged_decode(
            absent(rows, heads, key_dim, dtype=case["dtype"]),
            *_caches(case),
            absent(rows, TABLE_WIDTH, dtype=torch.int32),
            absent(rows, dtype=torch.int32),
            absent(rows, heads, value_dim, dtype=case["dtype"]),
            splits=splits,
            workspace=workspace,
            **_extras(case),
        )
    return launched


def prefill(case: dict[str, Any], *, rows: int = 4, tokens: int = 8192) -> list[Launch]:
    """`tokens` of all sequences together, of which one may have them all."""
    key_dim, value_dim = case["dims"]
    heads = case["group"] * KV_HEADS
    with launches(case["card"]) as launched:
        paged_prefill(
            absent(tokens, heads, key_dim, dtype=case["dtype"]),
            *_caches(case),
            absent(rows, TABLE_WIDTH, dtype=torch.int32),
            absent(rows + 1, dtype=torch.int32),
            absent(rows, dtype=torch.int32),
            absent(tokens, heads, value_dim, dtype=case["dtype"]),
            max_query_len=tokens,
            **_extras(case),
        )
    return launched


def _caches(case: dict[str, Any]) -> list[torch.Tensor]:
    """With more elements than 32 bits count."""
    return [absent(600_000, KV_HEADS, case["block"], dim, dtype=case["dtype"]) for dim in case["dims"]]


def _extras(case: dict[str, Any]) -> dict[str, Any]:
    sinks = absent(case["group"] * KV_HEADS, dtype=case["dtype"]) if case["sinks"] else None
    return {"scale": 0.1, "window": case["window"], "softcap": case["softcap"], "sinks": sinks}
