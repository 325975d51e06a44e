"""The GPU benchmark with a stand-in for the device: everything of it runs here but what asks CUDA itself.

Sizes are tiny, and the stand-in's figures mean nothing: what is tested is that each part runs to its end, judges
rightly, and names what it leaves out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.strict_flash import flash_attn_interface_module, flash_attn_module

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from figures import CANNOT_MEASURE, OVER_BUDGET, arguments
from gpu_parts import attention_checks as gpu_attention_checks
from gpu_parts import bandwidth as gpu_bandwidth
from gpu_parts import layer_checks as gpu_layer_checks
from gpu_parts import prefill as gpu_prefill
from gpu_parts import run as gpu_run
from gpu_parts.budget import TimeBudget
from gpu_parts.card import Timing
from gpu_parts.checks import Case
from gpu_parts.correctness import run_checks
from gpu_parts.decode import Ceilings
from gpu_parts.flash_checks import flash_cases
from gpu_parts.peer import PeerError, PeerRun
from gpu_parts.plan import Plan
from gpu_parts.prefill import PrefillCase
from gpu_parts.shapes import ModelShape

from inferq.cuda import flash as cuda_flash
from inferq.cuda.flash import Flash

#: Quick each, and many: a small run takes a share.
pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SHAPE = ModelShape(layers=1, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=16, vocabulary=64, itemsize=4)
PLAN = Plan(
    shape=SHAPE,
    cases=(),
    dtype=torch.float32,
    batches=(1, 3),
    contexts=(64, 128),
    max_context=128,
    prefills=(PrefillCase(70, 70), PrefillCase(20, 90)),
    decode_batches=(2, 1),
    prompt_tokens=6,
    new_tokens=4,
    graph_rows=2,
    peer_requests=3,
    peer_prompt_tokens=5,
    peer_settings={"num_blocks": 8, "max_batch_tokens": 64},
)
LENGTHS = (0, 1, 33, 70)
CHUNKS = ((1, 1), (0, 0), (20, 40))


class HostCard:
    """In the place of a Card: the processor, whose work is done when a call returns."""

    device = CPU
    multiprocessors = 1
    l2_bytes = 2**15
    memory = 2**24

    def __init__(self) -> None:
        self.kernel_time: float | None = 1e6  #: what the profiler is to say

    def free_bytes(self) -> int:
        return self.memory

    def synchronize(self) -> None:
        pass

    def time(self, run: Callable[[], object], repeats: int) -> Timing:
        begin = time.perf_counter()
        run()
        return Timing.of([time.perf_counter() - begin])

    def recorder(self) -> Callable[[Callable[[], None]], Callable[[], None]]:
        def record(run: Callable[[], None]) -> Callable[[], None]:
            seen.clear()
            run()
            recorded = seen[-1:]

            def replay() -> None:
                """Leaves its logits where they were when it was recorded, as a graph does."""
                run()
                for logits in recorded:
                    logits.copy_(seen[-1])

            return replay

        return record

    def kernel_seconds(self, run: Callable[[], object]) -> float | None:
        return self.kernel_time

    def copy_bandwidth(self) -> tuple[float, Timing]:
        return 1e9, Timing(1.0, 0.9, 1.1)

    def matrix_rate(self, dtype: torch.dtype) -> float:
        return 1e9


#: The logits of all forward passes of a test.
seen: list[torch.Tensor] = []


#: Takes seconds: of all these in this folder a small run takes a few.
LONG = pytest.mark.slow(family="interpreted", share=0.15)


@pytest.fixture(autouse=True)
def logits_seen() -> Iterator[None]:
    def see(module: object, given: object, output: object) -> None:
        if (logits := getattr(output, "logits", None)) is not None:
            seen.append(logits)

    handle = torch.nn.modules.module.register_module_forward_hook(see)
    yield
    handle.remove()
    seen.clear()


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """In the place of `generate_batch`, which is tested by itself; what it was asked for."""
    asked: list[dict[str, Any]] = []

    def run_peer(model: Any, prompts: list[list[int]], new: int, attention: str, **settings: Any) -> PeerRun:
        asked.append({"prompts": prompts, "new": new, "attention": attention, **settings})
        return PeerRun(attention, len(prompts) * new, 1.0)

    monkeypatch.setattr(gpu_run, "run_peer", run_peer)
    return asked


def checked(cases: list[Case], dtype: torch.dtype) -> list[str]:
    """The cases that do not hold."""
    budget = TimeBudget(1000.0, {"kernels": 1000.0})
    budget.begin("kernels")
    checks = run_checks(cases, budget, device=CPU, dtype=dtype, seed=int(time.time()))
    assert len(checks) == len(cases)
    return [f"{check.kernel} ({check.case}): {check.error}" for check in checks if not check.holds]


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=LONG)])
def test_the_kernels_pass_its_checks(dtype: torch.dtype) -> None:
    shapes = tuple(replace(shape, kv_heads=1) for shape in gpu_attention_checks.SHAPES)
    cases = [
        *gpu_layer_checks.layer_cases(rows=12, hidden=96, intermediate=80, vocabulary=200),
        *gpu_attention_checks.attention_cases(shapes, contexts=LENGTHS, chunks=CHUNKS),
    ]
    assert checked(cases, dtype) == []


@pytest.mark.parametrize(
    ("place", "kernel"),
    [
        (gpu_attention_checks, "paged_decode"),
        (gpu_attention_checks, "paged_prefill"),
        (gpu_layer_checks, "kv_write"),
        (gpu_layer_checks, "rope_kv_write"),
        (gpu_layer_checks, "rms_norm"),
        (gpu_layer_checks, "add_rms_norm"),
        (gpu_layer_checks, "gated"),
        (gpu_layer_checks, "sample"),
    ],
)
@pytest.mark.parametrize("fault", ["does nothing", "raises"])
def test_a_kernel_that_is_wrong_is_seen(place: Any, kernel: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(first: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("a fault")
        return first[..., : first.shape[-1] // 2] if kernel == "gated" else first

    shapes = gpu_attention_checks.SHAPES[:1]
    cases = [
        *gpu_layer_checks.layer_cases(rows=12, hidden=96, intermediate=80, vocabulary=200),
        *gpu_attention_checks.attention_cases(shapes, contexts=LENGTHS, chunks=CHUNKS),
    ]
    monkeypatch.setattr(place, kernel, wrong)
    cases = [case for case in cases if case.kernel == kernel]
    assert len(checked(cases, torch.float32)) == len(cases) > 0


@pytest.fixture
def flash(capability: tuple[int, int], make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> Flash:
    """The binding to a stand-in for flash-attn, on a card of that capability."""
    module = make()
    monkeypatch.setattr(cuda_flash, "compute_capability", lambda device: capability)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return cuda_flash.load_flash(CPU)


BOTH_FLASH = pytest.mark.parametrize(
    ("capability", "make"),
    [((8, 0), flash_attn_module), ((9, 0), flash_attn_interface_module)],
    ids=["FlashAttention-2", "FlashAttention-3"],
)


@BOTH_FLASH
def test_flash_attn_passes_its_checks(flash: Flash) -> None:
    cases = flash_cases(flash, contexts=LENGTHS, chunks=CHUNKS)
    assert {case.kernel for case in cases} == {"flash decode", "flash prefill"}
    assert not any("sinks" in case.case or "value dim" in case.case for case in cases)
    assert any("window" in case.case for case in cases)
    assert checked(cases, torch.float16) == []


@BOTH_FLASH
@pytest.mark.parametrize("function", ["decode", "prefill"])
def test_a_wrong_flash_attn_is_seen(flash: Flash, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, function, lambda query, *_: query)
    cases = flash_cases(flash, contexts=LENGTHS, chunks=CHUNKS)
    assert len(checked(cases, torch.float16)) == len(cases) / 2


def prefilled(flash: Flash | None = None) -> gpu_run.Run:
    """After the part that measures prefill."""
    run = gpu_run.Run(HostCard(), replace(PLAN, dtype=torch.float16), seconds=1000.0)
    run.__dict__["_flash"] = flash
    run._ceilings = Ceilings(1e9, 1e9)
    run._budget.begin("prefill")
    run._prefill()
    return run


@BOTH_FLASH
def test_prefill_is_measured_with_what_there_is(flash: Flash) -> None:
    run = prefilled(flash)
    assert (run.wrong, run.skipped) == ([], [])
    for of in run.keys["prefill"].values():
        assert set(of) == {"triton", flash.name, gpu_prefill.TORCH}


@pytest.mark.parametrize(("kernel", "named"), [("by_triton", "wrong"), ("by_torch", "skipped")])
def test_a_wrong_prefill_has_no_figure(kernel: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(gpu_prefill, kernel)

    def all_but_the_last_token(prompt: Any) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            output: torch.Tensor = right(prompt)().clone()
            output[-1] *= 1.1
            return output

        return run

    monkeypatch.setattr(gpu_prefill, kernel, all_but_the_last_token)
    run = prefilled()
    assert [len(getattr(run, each)) for each in (named, "wrong", "skipped")].count(2) == 2
    assert [len(of) for of in run.keys["prefill"].values()] == [1, 1]
    assert len(run.figures) == 2


@LONG
def test_all_parts_run_to_their_end(peer: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    run = gpu_run.Run(HostCard(), PLAN, seconds=1000.0)
    run.measure()
    code = run.finish(arguments("").parse_args(["--json"]))
    said = capsys.readouterr().out
    assert code == 0, said
    keys = json.loads(said.splitlines()[-1])
    assert set(keys["bandwidth_share"]) == {"1x64", "1x128", "3x64", "3x128"}
    assert set(keys["prefill"]) == {"70", "20 onto 70"}
    assert all(set(of) == {"triton", gpu_prefill.TORCH} for of in keys["prefill"].values())
    assert set(keys["decode"]) == {"1", "2"}
    assert keys["graph_equal"] is True
    assert keys["graph_overhead"] < 0
    assert keys["generate_batch_tok_s"] == {"sdpa": 12.0}
    assert keys["engine_tok_s"] > 0
    assert [line.split(":")[:2] for line in keys["skipped"]] == [["kernels", " flash-attn"]]
    assert [(len(each["prompts"]), each["new"], each["num_blocks"]) for each in peer] == [(3, 4, 8)]
    assert "auto would try" in said
    assert "decode graphs recorded" in said


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the longest, and once is enough."""
    monkeypatch.setattr(gpu_run.Run, "_engine", lambda run: None)


@pytest.mark.usefixtures("no_engine")
def test_what_is_not_measured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    card = HostCard()
    card.memory = 300 * SHAPE.layer_token_bytes  # of which the caches may have a part

    def fails(*_: Any, **__: Any) -> PeerRun:
        raise PeerError("0 of 12 tokens came")

    monkeypatch.setattr(gpu_run, "run_peer", fails)
    run = gpu_run.Run(card, PLAN, seconds=1000.0)
    run.measure()
    assert run.wrong == []
    assert any("contexts of more than" in line for line in run.skipped)
    assert any("decode 3 x 128: does not fit" in line for line in run.skipped)
    assert any("sdpa: 0 of 12 tokens came" in line for line in run.skipped)
    assert "3x128" not in run.keys["bandwidth_share"]


def test_without_time_every_part_is_named_and_nothing_is_run(
    peer: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    cases = tuple(gpu_layer_checks.layer_cases(rows=12, hidden=96, intermediate=80, vocabulary=200))
    run = gpu_run.Run(HostCard(), replace(PLAN, cases=cases), seconds=0.0)
    run.measure()
    assert run.wrong == []
    assert peer == []
    assert {line.split(":")[0] for line in run.skipped} == set(gpu_run.SHARES)
    assert sum(line.startswith("kernels") for line in run.skipped) == len(cases) + 1  # and flash-attn
    assert capsys.readouterr().out.count("skipped: ") == len(run.skipped)
    assert run.finish(arguments("").parse_args(["--check"])) == CANNOT_MEASURE


@pytest.mark.usefixtures("peer", "no_engine")
def test_a_share_under_its_bound_is_over_budget_with_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bandwidth, "BOUND_BATCH", 3)
    monkeypatch.setattr(gpu_bandwidth, "BOUND_CONTEXT", 128)
    card = HostCard()
    monkeypatch.setattr(card, "copy_bandwidth", lambda: (1e15, Timing(1.0, 0.9, 1.1)))
    run = gpu_run.Run(card, PLAN, seconds=1000.0)
    run.measure()
    assert run.finish(arguments("").parse_args([])) == 0
    assert run.finish(arguments("").parse_args(["--check"])) == OVER_BUDGET
