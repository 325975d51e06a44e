"""Every kernel that the GPU benchmark launches compiles for a card that is not there, at the sizes it launches it with.

A check makes its numbers on the host; what it calls gets tensors of the same shapes and strides without contents.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.compiled import SM_80, SM_90, fresh_cache, launches

sys.path.append(str(Path(__file__).parents[3] / "bench"))

from gpu_parts import attention_checks as gpu_attention_checks
from gpu_parts import bandwidth as gpu_bandwidth
from gpu_parts import layer_checks as gpu_layer_checks
from gpu_parts import plan as gpu_plan
from gpu_parts import prefill as gpu_prefill
from gpu_parts.checks import Case, Draw
from gpu_parts.shapes import LLAMA_8B

META = torch.device("meta")
PLACES = {
    "paged_decode": gpu_attention_checks,
    "paged_prefill": gpu_attention_checks,
    "kv_write": gpu_layer_checks,
    "rope_kv_write": gpu_layer_checks,
    "rms_norm": gpu_layer_checks,
    "add_rms_norm": gpu_layer_checks,
    "gated": gpu_layer_checks,
    "sample": gpu_layer_checks,
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with fresh_cache(tmp_path_factory.mktemp("triton")):
        yield


class LaunchedError(Exception):
    """In the place of a result: without contents there is none."""


def absent(value: Any) -> Any:
    """A tensor, or the tensors of a workspace, without contents; whatever else, as it is."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    if hasattr(value, "partial"):
        return type(value)(absent(value.partial), absent(value.lse))
    return value


def launching(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def launch(*values: Any, **options: Any) -> None:
        kernel(*map(absent, values), **{name: absent(value) for name, value in options.items()})
        raise LaunchedError

    return launch


@pytest.mark.slow(family="gpu bench launches", share=0.1)
@pytest.mark.parametrize("card", [SM_80, SM_90], ids=str)
@pytest.mark.parametrize("case", gpu_plan.FULL.cases, ids=lambda case: f"{case.kernel}-{case.case}")
def test_a_check_launches(case: Case, card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    place = PLACES[case.kernel]
    monkeypatch.setattr(place, case.kernel, launching(getattr(place, case.kernel)))
    with launches(card) as made, pytest.raises(LaunchedError):
        case.run(Draw.on(torch.device("cpu"), torch.bfloat16, 1))
    assert made


@pytest.mark.parametrize("card", [SM_80, SM_90], ids=str)
@pytest.mark.parametrize("batch", gpu_bandwidth.BATCHES)
def test_decode_is_launched_for_every_batch(batch: int, card: Any) -> None:
    stand_in: Any = SimpleNamespace(device=META, multiprocessors=132)
    kernel = gpu_bandwidth.triton_kernel(LLAMA_8B, stand_in, max_context=gpu_bandwidth.MAX_CONTEXT)
    pool = gpu_bandwidth.Pool.of(batch * max(gpu_bandwidth.CONTEXTS), LLAMA_8B, META, torch.bfloat16)
    keys, values = pool.blocks(kernel.block)
    tables = torch.empty(batch, len(keys) // batch, dtype=torch.int32, device=META)
    lengths = torch.empty(batch, dtype=torch.int32, device=META)
    query = torch.empty(batch, LLAMA_8B.heads, LLAMA_8B.head_dim, dtype=torch.bfloat16, device=META)
    with launches(card) as made:
        output: Any = kernel.launch(batch)(query, keys, values, tables, lengths)
    assert output.shape == query.shape
    assert len(made) == 2  # splits, and what joins them


@pytest.mark.parametrize("card", [SM_80, SM_90], ids=str)
@pytest.mark.parametrize("case", gpu_prefill.CASES, ids=str)
def test_prefill_is_launched(case: Any, card: Any) -> None:
    kernel = gpu_prefill.kernels(None)[0]
    pool = gpu_bandwidth.Pool.of(case.seq_len, LLAMA_8B, META, torch.bfloat16)
    prompt = gpu_prefill.Prompt.of(case, pool, kernel.block, LLAMA_8B)
    with launches(card) as made:
        output = kernel.prepare(prompt)()
    assert output.shape == prompt.query.shape
    assert len(made) == 1
