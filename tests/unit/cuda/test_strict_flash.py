"""The stand-in for flash-attn has the real functions' signatures, and refuses what they refuse."""

from __future__ import annotations

import ast
import inspect
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ragged import Ragged
from support.strict_flash import varlen_func_2, with_kvcache_2, with_kvcache_3

#: Where set-up puts flash-attn's source, which is read here and never built.
SOURCES = Path(sys.prefix) / "sdists"


def parameters_in_source(file: str, function: str) -> list[tuple[str, Any]]:
    """(name, default) of each parameter; `inspect.Parameter.empty` where it has none. Nothing is imported."""
    archives = sorted(SOURCES.glob("flash_attn-*.tar.gz"))
    if not archives:
        pytest.skip(f"the source of flash-attn is not in {SOURCES}: set-up could not download it")
    (archive,) = archives
    with tarfile.open(archive) as tar:
        (member,) = [name for name in tar.getnames() if name.partition("/")[2] == file]
        extracted = tar.extractfile(member)
        assert extracted
        tree = ast.parse(extracted.read())
    (found,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    names = [argument.arg for argument in found.args.args]
    defaults = [ast.literal_eval(default) for default in found.args.defaults]
    assert not found.args.kwonlyargs and not found.args.vararg and not found.args.kwarg
    return list(zip(names, [inspect.Parameter.empty] * (len(names) - len(defaults)) + defaults, strict=True))


@pytest.mark.parametrize(
    ("stand_in", "file", "function"),
    [
        (with_kvcache_2, "flash_attn/flash_attn_interface.py", "flash_attn_with_kvcache"),
        (varlen_func_2, "flash_attn/flash_attn_interface.py", "flash_attn_varlen_func"),
        (with_kvcache_3, "hopper/flash_attn_interface.py", "flash_attn_with_kvcache"),
    ],
    ids=["FlashAttention-2 with_kvcache", "FlashAttention-2 varlen", "FlashAttention-3 with_kvcache"],
)
def test_the_signatures_are_the_real_ones(stand_in: Callable[..., Any], file: str, function: str) -> None:
    ours = [(name, parameter.default) for name, parameter in inspect.signature(stand_in).parameters.items()]
    assert ours == parameters_in_source(file, function)


def decode_arguments(**changes: Any) -> dict[str, Any]:
    ragged = Ragged([1, 1], [300, 10])
    return {
        "q": ragged.query.unsqueeze(1),
        "k_cache": ragged.key_cache.transpose(1, 2),
        "v_cache": ragged.value_cache.transpose(1, 2),
        "cache_seqlens": ragged.seq_lens,
        "block_table": ragged.block_tables,
        "softmax_scale": 0.1,
        **changes,
    }


def varlen_arguments(**changes: Any) -> dict[str, Any]:
    ragged = Ragged([3, 2], [300, 10])
    return {
        "q": ragged.query,
        "k": ragged.key_cache.transpose(1, 2),
        "v": ragged.value_cache.transpose(1, 2),
        "cu_seqlens_q": ragged.query_starts,
        "cu_seqlens_k": torch.tensor([0, 300, 310], dtype=torch.int32),
        "max_seqlen_q": 3,
        "max_seqlen_k": 300,
        "block_table": ragged.block_tables,
        "softmax_scale": 0.1,
        "causal": True,
        **changes,
    }


def test_good_arguments_pass() -> None:
    assert not with_kvcache_2(**decode_arguments()).isnan().any()
    assert not varlen_func_2(**varlen_arguments()).isnan().any()


def pages(*, size: int = 256, kv_heads: int = 2, dim: int = 64, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(5, size, kv_heads, dim, dtype=dtype)


BAD_DECODES = {
    "float32": {"q": torch.zeros(2, 1, 6, 64)},
    "another dtype of the cache": {"k_cache": pages(dtype=torch.bfloat16), "v_cache": pages(dtype=torch.bfloat16)},
    "block of 128": {"k_cache": pages(size=128), "v_cache": pages(size=128)},
    "heads that cannot share": {"k_cache": pages(kv_heads=4), "v_cache": pages(kv_heads=4)},
    "values of another size": {"v_cache": pages(dim=32)},
    "heads too large": {"q": torch.zeros(2, 1, 6, 264, dtype=torch.float16)},
    "rows in steps": {"q": torch.zeros(2, 1, 6, 128, dtype=torch.float16)[..., ::2]},
    "long lengths": {"cache_seqlens": torch.tensor([300, 10])},
    "lengths in steps": {"cache_seqlens": torch.tensor([300, 0, 10, 0], dtype=torch.int32)[::2]},
    "too few lengths": {"cache_seqlens": torch.tensor([300], dtype=torch.int32)},
    "no lengths": {"cache_seqlens": None},
    "a long table": {"block_table": torch.zeros(2, 3, dtype=torch.int64)},
    "a table in steps": {"block_table": torch.zeros(2, 6, dtype=torch.int32)[:, ::2]},
    "no table": {"block_table": None},
    "no such block": {"block_table": torch.full((2, 3), 99, dtype=torch.int32)},
    "a table too short": {"block_table": torch.zeros(2, 1, dtype=torch.int32)},
    "batch indices with pages": {"cache_batch_idx": torch.zeros(2, dtype=torch.int32)},
    "left padding with pages": {"cache_leftpad": torch.zeros(2, dtype=torch.int32)},
    "too many splits": {"num_splits": 129},
    "no scale": {"softmax_scale": None},
}


@pytest.mark.parametrize("change", BAD_DECODES.values(), ids=BAD_DECODES.keys())
def test_bad_decodes_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError):
        with_kvcache_2(**decode_arguments(**change))


BAD_PREFILLS = {
    "a longer query": {"max_seqlen_q": 2},
    "a longer sequence": {"max_seqlen_k": 299},
    "a length on the device": {"max_seqlen_k": torch.tensor(300)},
    "long starts": {"cu_seqlens_q": torch.tensor([0, 3, 5])},
    "starts of another batch": {"cu_seqlens_k": torch.tensor([0, 300], dtype=torch.int32)},
    "block of 64": {"k": pages(size=64), "v": pages(size=64)},
    "dropout": {"dropout_p": 0.1},
    "ALiBi": {"alibi_slopes": torch.zeros(6)},
}


@pytest.mark.parametrize("change", BAD_PREFILLS.values(), ids=BAD_PREFILLS.keys())
def test_bad_prefills_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError):
        varlen_func_2(**varlen_arguments(**change))


def test_what_lies_past_the_end_reaches_a_prefill_of_the_third_version_alone() -> None:
    common = {key: value for key, value in decode_arguments().items() if key not in ("q", "block_table")}
    ragged = Ragged([3, 2], [300, 10])
    common.update(page_table=ragged.block_tables, causal=True)
    prefilled = with_kvcache_3(ragged.query, cu_seqlens_q=ragged.query_starts, max_seqlen_q=3, **common)
    assert prefilled.isnan().all()
    assert not with_kvcache_3(ragged.query[:2].unsqueeze(1), **common).isnan().any()
