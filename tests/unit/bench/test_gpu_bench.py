"""The GPU benchmark where there is no GPU: its arithmetic, its time, its verdicts, and what it needs to be importable.

That its parts run is tested beside the kernels (tests/kernels/test_gpu_bench.py).
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

sys.path.append(str(Path(__file__).parents[3] / "bench"))

import torch
from figures import CANNOT_MEASURE, OVER_BUDGET, Figure, arguments
from gpu_parts import bandwidth as gpu_bandwidth
from gpu_parts import budget as gpu_budget
from gpu_parts import card as gpu_card
from gpu_parts import correctness as gpu_correctness
from gpu_parts import decode as gpu_decode
from gpu_parts import engine as gpu_engine
from gpu_parts import graphs as gpu_graphs
from gpu_parts import oracle as gpu_oracle
from gpu_parts import plan as gpu_plan
from gpu_parts import prefill as gpu_prefill
from gpu_parts import run as gpu_run
from gpu_parts import versions as gpu_versions
from gpu_parts.checks import Check
from gpu_parts.memory import memory_shortage
from gpu_parts.shapes import LLAMA_8B, ModelShape, attention_bytes, prefill_flop, roofline_seconds

from inferq.cuda.memory import MemoryShortageError
from inferq.engine.errors import ModelLoadError

ROOT = Path(__file__).parents[3]
BENCH = ROOT / "bench"
#: What the benchmark may ask for, besides Python.
ALLOWED = ("torch", "triton", "transformers", "numpy")
#: What only some versions of these require, for their commands.
NOT_NEEDED = ("pydantic",)


# ---- arithmetic ----


def test_the_8b_shape_is_llamas() -> None:
    assert LLAMA_8B.parameters == 8_030_261_248
    assert LLAMA_8B.weight_bytes == 2 * (8_030_261_248 - 128_256 * 4096)
    assert LLAMA_8B.token_bytes == 131_072
    assert LLAMA_8B.layer_token_bytes == 4096


def test_decoding_reads_k_and_v_of_every_token_once() -> None:
    assert attention_bytes(LLAMA_8B, [2048] * 64) == 64 * 2048 * 8 * 128 * 2 * 2
    assert attention_bytes(LLAMA_8B, [1, 2, 4]) == 7 * 4096


def test_a_step_is_bound_by_memory_or_by_arithmetic() -> None:
    shape = ModelShape(layers=1, hidden=4, intermediate=8, heads=2, kv_heads=1, head_dim=2, vocabulary=10)
    parameters = 4 * 2 * (2 * 2 + 2) + 3 * 4 * 8 + 2 * 4 + 4 + 4 * 10
    assert shape.step_parameters == parameters
    assert shape.parameters == parameters + 4 * 10
    contexts = [3, 5]
    memory = (2 * parameters + 8 * 2 * 2 * 2) / 100.0
    assert roofline_seconds(shape, contexts, bytes_per_s=100.0, flop_per_s=1e9) == pytest.approx(memory)
    arithmetic = 2 * parameters * 2 / 50.0
    assert roofline_seconds(shape, contexts, bytes_per_s=1e9, flop_per_s=50.0) == pytest.approx(arithmetic)


def test_the_roofline_of_8b_on_a_card_of_4_tb_a_second() -> None:
    seconds = roofline_seconds(LLAMA_8B, [1024] * 64, bytes_per_s=4.3e12, flop_per_s=790e12)
    assert seconds == pytest.approx((15.01e9 + 64 * 1024 * 131_072) / 4.3e12, rel=1e-3)
    # So many sequences, of so short a context, that the matrix products take longer.
    many = roofline_seconds(LLAMA_8B, [1] * 512, bytes_per_s=4.3e12, flop_per_s=790e12)
    assert many == pytest.approx(2 * LLAMA_8B.step_parameters * 512 / 790e12)


def test_prefill_computes_two_products_for_each_token_that_another_one_sees() -> None:
    shape = ModelShape(layers=1, hidden=4, intermediate=8, heads=3, kv_heads=1, head_dim=2, vocabulary=10)
    assert prefill_flop(shape, 3, 3) == 2 * 2 * 3 * 2 * (1 + 2 + 3)
    assert prefill_flop(shape, 2, 5) == 2 * 2 * 3 * 2 * (4 + 5)
    chunks = [prefill_flop(LLAMA_8B, 2048, length) for length in (2048, 4096, 6144, 8192)]
    assert sum(chunks) == prefill_flop(LLAMA_8B, 8192, 8192)


def test_a_quick_run_decodes_as_a_full_one_does() -> None:
    assert gpu_plan.QUICK.max_context == gpu_plan.FULL.max_context >= max(gpu_plan.FULL.contexts)
    assert set(gpu_plan.QUICK.batches) <= set(gpu_plan.FULL.batches)


# ---- errors ----


def test_an_error_is_the_worst_rows() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]])
    result = expected.clone()
    assert gpu_oracle.row_error(result, expected) == 0
    result[0, 0] += 0.5
    assert gpu_oracle.row_error(result, expected) == pytest.approx(0.1)
    result[1, 1] = 1e-9  # a row that has to be zeros
    assert gpu_oracle.row_error(result, expected) == math.inf
    result[1, 1] = math.nan
    assert gpu_oracle.row_error(result, expected) == math.inf


def test_nan_holds_no_bound() -> None:
    assert Check("k", "c", 0.0, 0.0).holds
    assert not Check("k", "c", math.nan, 1.0).holds
    assert not Check("k", "c", math.inf, 1.0).holds


def test_the_oracle_is_torchs_attention() -> None:
    generator = torch.Generator().manual_seed(5)
    query, key, value = (
        torch.randn(n, heads, 8, dtype=torch.float64, generator=generator) for n, heads in ((9, 4), (9, 2), (9, 2))
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1) for t in (query, key, value)), is_causal=True, enable_gqa=True
    ).transpose(0, 1)
    options: dict[str, Any] = {"scale": 8**-0.5, "window": None, "softcap": None, "sinks": None}
    whole = gpu_oracle.attention(query, key, value, **options)
    torch.testing.assert_close(whole, expected)
    # The last tokens of a longer sequence.
    torch.testing.assert_close(gpu_oracle.attention(query[6:], key, value, **options), expected[6:])
    # A window of one token sees itself alone.
    alone = gpu_oracle.attention(query, key, value, **{**options, "window": 1})
    torch.testing.assert_close(alone, value.repeat_interleave(2, dim=1))
    # A sink without end takes everything.
    drowned = gpu_oracle.attention(query, key, value, **{**options, "sinks": torch.full((4,), 1e4)})
    torch.testing.assert_close(drowned, torch.zeros_like(expected))


# ---- time ----


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_part_may_use_what_is_left_but_not_what_is_kept_for_others(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    budget = gpu_budget.TimeBudget(100.0, {"first": 20.0, "second": 30.0, "third": 40.0}, clock=clock)
    budget.begin("first")
    assert budget.left == 30.0  # 10 of them were kept for nobody
    clock.now += 5
    assert budget.allows("a case", 25.0)
    assert capsys.readouterr().out == ""
    budget.begin("second")
    assert budget.left == 55.0
    clock.now += 50
    assert not budget.allows("a long case", 6.0)
    said = capsys.readouterr().out
    assert said.startswith("skipped: second: a long case: no time left")
    assert budget.allows("a short case", 5.0)
    budget.begin("third")
    assert budget.left == 45.0
    clock.now += 60
    assert not budget.allows("anything", 0.0)
    assert [line.split(":")[0] for line in budget.skipped] == ["second", "third"]


def test_the_guard_ends_a_run_that_hangs() -> None:
    program = """
import argparse, sys, time
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from gpu_parts import run as gpu_run
from gpu_parts.plan import FULL
class Hangs:
    def copy_bandwidth(self): raise RuntimeError("no device")
class Run(gpu_run.Run):
    def measure(self):
        self._budget.begin("bandwidth")
        self.keys["copy_gb_s"] = 7
        time.sleep(60)
args = argparse.Namespace(json=True, check=False)
Run(Hangs(), FULL, seconds=100).guarded(args, hard_seconds=0.2)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program, str(BENCH), str(ROOT / ".typecheck")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == OVER_BUDGET, ended.stderr
    said = json.loads(ended.stdout.splitlines()[-1])
    assert said["wrong"] == ["bandwidth: out of time"]
    assert said["copy_gb_s"] == 7


# ---- tables and verdicts ----


def test_the_shares_with_a_bound_are_those_of_batch_64_from_2048_on() -> None:
    timing = gpu_card.Timing(1.0, 0.9, 1.2)
    measured = [
        gpu_bandwidth.Measured(kernel, batch, context, timing, rate)
        for kernel, batch, context, rate in (
            ("triton", 64, 512, 50.0),
            ("triton", 64, 2048, 90.0),
            ("triton", 64, 8192, 80.0),
            ("triton", 8, 8192, 10.0),
            ("flash", 64, 2048, 10.0),
        )
    ]
    assert gpu_bandwidth.shares(measured, 100.0) == {"64x512": 0.5, "64x2048": 0.9, "64x8192": 0.8, "8x8192": 0.1}
    assert [figure.holds for figure in gpu_bandwidth.share_figures(measured, 100.0)] == [True, False]
    lines = gpu_bandwidth.bandwidth_table(measured, 100.0).splitlines()
    assert lines[3].split()[:3] == ["triton", "64", "2048"]
    assert lines[3].split()[-1] == "0.90"


def test_the_overhead_of_a_graph_is_what_its_kernels_do_not_explain() -> None:
    timing = gpu_card.Timing(1.03, 1.0, 1.1)
    result = gpu_graphs.GraphResult(True, timing, timing, 1.0)
    assert result.overhead == pytest.approx(0.03)
    over = gpu_graphs.GraphResult(True, gpu_card.Timing(1.04, 1.0, 1.1), timing, 1.0)
    assert [figure.what for figure in gpu_graphs.graph_figures(over) if not figure.holds] == ["graph overhead"]
    unknown = gpu_graphs.GraphResult(True, timing, timing, None)
    assert unknown.overhead is None
    assert all(figure.budget is None for figure in gpu_graphs.graph_figures(unknown))


@pytest.mark.parametrize(
    ("eager", "replayed", "equal"),
    [((1.0, 2.0), (1.0, 2.0), True), ((1.0, 2.0), (1.0, 2.0 + 2e-7), False), ((1.0, math.nan), (1.0, math.nan), True)],
)
def test_a_replay_has_to_leave_the_bits_of_the_eager_step(
    eager: tuple[float, ...], replayed: tuple[float, ...], equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[int, int]] = []
    monkeypatch.setattr(gpu_graphs, "launch_decode", lambda runner, *, rows, context: launched.append((rows, context)))
    left = torch.zeros(2)

    def replay() -> None:
        assert bool((left == gpu_graphs.UNWRITTEN).all())  # so that a graph that does nothing shows
        left.copy_(torch.tensor(replayed))

    timing = gpu_card.Timing(1.0, 1.0, 1.0)
    card: Any = SimpleNamespace(synchronize=lambda: None, time=lambda run, n: timing, kernel_seconds=lambda run: 1.0)
    recorded = gpu_engine.Recorded(lambda: None, replay, left)
    graphs: Any = SimpleNamespace(kept=recorded, last_logits=torch.tensor(eager))
    runner: Any = None
    result = gpu_graphs.measure_graph(runner, graphs, card, rows=2, context=5)
    assert result is not None and result.equal is equal
    assert launched == [(2, 5)]
    graphs.kept = None
    assert gpu_graphs.measure_graph(runner, graphs, card, rows=2, context=5) is None


def test_prefill_says_its_rate_beside_that_of_a_matrix_product() -> None:
    timing = gpu_card.Timing(0.002, 0.001, 0.003)
    case = gpu_prefill.PrefillCase(2048, 8192)
    measured = [gpu_prefill.MeasuredPrefill("triton", case, timing, 50e12, 1e-3, 2e-3)]
    assert measured[0].holds
    assert not measured[0]._replace(error=math.nan).holds
    expected = {"ms": 2.0, "tflop_s": 50.0, "matrix_share": 0.5}
    assert gpu_prefill.as_keys(measured, 100e12) == {"2048 onto 6144": {"triton": expected}}
    line = gpu_prefill.prefill_table(measured, 100e12).splitlines()[-1].split()
    assert line == ["triton", "2048", "onto", "6144", "2.000", "1.000", "to", "3.000", "50", "0.50", "1.0e-03"]
    (figure,) = gpu_prefill.prefill_figures(measured)
    assert (figure.measured, figure.unit, figure.budget) == (50.0, "TFLOP/s", None)


# ---- memory ----


def loading(cause: Exception) -> ModelLoadError:
    """As the engine raises it."""
    try:
        raise ModelLoadError("not enough") from cause
    except ModelLoadError as exc:
        return exc


@pytest.mark.parametrize(
    ("exc", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"), "Tried to allocate 2 GiB"),
        (RuntimeError("CUDA error: out of memory"), "CUDA error: out of memory"),
        (loading(MemoryShortageError("0 blocks")), "not enough"),
        (loading(torch.OutOfMemoryError("CUDA out of memory")), "not enough"),
        (RuntimeError("an illegal memory access"), None),
        (loading(RuntimeError("out of resources: shared memory")), None),
        (ModelLoadError("the gate refuses it"), None),
    ],
    ids=repr,
)
def test_a_lack_of_memory_is_told_from_a_fault(exc: Exception, said: str | None) -> None:
    found = memory_shortage(exc)
    assert found is None if said is None else found is not None and found.endswith(said)


class Runner:
    """Of a runner what its cache is asked for."""

    def __init__(self, num_blocks: int) -> None:
        self.facts = SimpleNamespace(num_blocks=num_blocks, block_size=64, vocab_size=10)
        self.launched: list[Any] = []

    def launch(self, scheduled: list[Any]) -> SimpleNamespace:
        self.launched = scheduled
        return SimpleNamespace(tokens=lambda: [0] * len(scheduled))


def test_a_step_names_no_block_that_the_cache_does_not_have() -> None:
    runner: Any = Runner(num_blocks=1023)
    with pytest.raises(ValueError, match="1023 blocks do not hold 64 sequences of 1024 tokens"):
        gpu_engine.launch_decode(runner, rows=64, context=1024)
    assert runner.launched == []
    runner = Runner(num_blocks=1024)
    assert len(gpu_engine.launch_decode(runner, rows=64, context=1024)) == 64
    blocks = [block for item in runner.launched for block in item.sequence.block_table]
    assert sorted(blocks) == list(range(1024))


def test_decode_steps_are_those_in_which_every_request_decodes() -> None:
    answers = [
        gpu_engine.Answer(at, keys)
        for at, keys in ((1.0, (0,)), (2.0, (0, 1)), (3.0, (0, 1)), (3.5, (0, 1)), (3.75, (1,)))
    ]
    run = gpu_engine.Generated(10, 4, 0.5, answers, {0: [1] * 4, 1: [1] * 4})
    # The second answer has the first token of request 1, so that the step prefilled; the third comes after it.
    assert run.decode_steps() == [(1.0, [12, 11]), (0.5, [13, 12])]
    assert run.first_token_seconds == 1.5
    assert run.tokens_per_s == 8 / 3.25
    shape = ModelShape(layers=1, hidden=4, intermediate=8, heads=2, kv_heads=1, head_dim=2, vocabulary=10)
    summary = gpu_decode.summary(run, shape, gpu_decode.Ceilings(1e3, 1e9))
    assert (summary.batch, summary.steps, summary.context) == (2, 2, 12.0)
    assert summary.step_seconds == 0.75
    assert summary.tokens_per_s == pytest.approx(2 / 0.75)
    assert summary.share == pytest.approx(summary.roofline_seconds / 0.75)
    assert gpu_decode.decode_table([summary]).splitlines()[-1].split()[0] == "2"


def test_the_worst_case_of_each_kernel_stands_beside_its_bound() -> None:
    checks = [Check("a", "one", 1e-3, 2e-3), Check("a", "two", 3e-3, 2e-3), Check("sample", "all", 0.5, 1.0)]
    lines = gpu_correctness.checks_table(checks).splitlines()
    assert lines[2].split() == ["a", "2", "3.0e-03", "2.0e-03", "NO", "two"]
    assert lines[3].split()[-2:] == ["yes", "all"]
    assert gpu_correctness.max_error(checks) == 3e-3  # a share of rows is no rounding error


def ended(run: gpu_run.Run, *flags: str) -> int:
    return run.finish(arguments("").parse_args(list(flags)))


@pytest.fixture
def run() -> gpu_run.Run:
    return gpu_run.Run(SimpleNamespace(device=None), gpu_plan.FULL, seconds=100.0)  # type: ignore[arg-type]


def test_only_check_asks_for_the_bounds(run: gpu_run.Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(run) == 0
    assert ended(run, "--check") == CANNOT_MEASURE
    assert "4 figures that have a bound were not measured" in capsys.readouterr().err
    run.figures += [Figure(f"share {n}", 0.9, "", 0.85, at_least=True) for n in range(3)]
    run.figures.append(Figure("graph overhead", 0.01, "", 0.03))
    assert ended(run, "--check") == 0
    run.figures[0] = Figure("share 0", 0.8, "", 0.85, at_least=True)
    assert ended(run) == 0
    assert ended(run, "--check") == OVER_BUDGET


def test_a_wrong_kernel_is_an_error_without_check(run: gpu_run.Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.wrong.append("paged_decode (dim 128): error 1.0e+00, bound 7.8e-03")
    assert ended(run, "--json") == OVER_BUDGET
    said = capsys.readouterr().out
    assert "WRONG: paged_decode" in said
    assert json.loads(said.splitlines()[-1])["wrong"] == run.wrong


def test_a_part_that_fails_takes_nothing_from_the_others(
    run: gpu_run.Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: gpu_run.Run) -> None:
        raise RuntimeError("an illegal memory access")

    seen: list[str] = []
    monkeypatch.setattr(gpu_run, "free", lambda card: None)
    monkeypatch.setattr(gpu_run.Run, "_kernels", fail)
    for part in ("_bandwidth", "_prefill", "_engine", "_peer"):
        monkeypatch.setattr(gpu_run.Run, part, lambda self, part=part: seen.append(part))
    run.measure()
    assert seen == ["_bandwidth", "_prefill", "_engine", "_peer"]
    assert run.wrong == ["kernels: failed"]
    assert "an illegal memory access" in capsys.readouterr().out


def test_without_room_for_the_graphs_step_there_is_none(run: gpu_run.Run, capsys: pytest.CaptureFixture[str]) -> None:
    runner: Any = Runner(num_blocks=570)
    graphs: Any = SimpleNamespace(kept=None)
    run._budget.begin("engine")
    run._graph(runner, graphs)
    assert (run.wrong, runner.launched) == ([], [])
    said = "engine: a decode step of 64 sequences of 1024 tokens as a graph: the KV cache is too small"
    assert run.skipped == [said]


@pytest.mark.parametrize("part", ["_engine", "_peer"])
def test_a_model_that_does_not_fit_is_not_made(
    part: str, run: gpu_run.Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a card of 16 GB."""
    monkeypatch.setattr(gpu_run, "build_model", lambda *_, **__: pytest.fail("it was made"))
    monkeypatch.setattr(run._card, "free_bytes", lambda: 15 * 10**9, raising=False)
    run._ceilings = gpu_decode.Ceilings(1e9, 1e9)
    run._budget = gpu_budget.TimeBudget(100.0, {part: 100.0})
    run._budget.begin(part)
    getattr(run, part)()
    assert run.skipped == [f"{part}: all of it: no memory for it: 15.0 GiB of weights, 14.0 GiB free"]
    assert run.wrong == []


def test_a_part_that_runs_out_of_memory_is_left_out(
    run: gpu_run.Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: gpu_run.Run) -> None:
        raise loading(MemoryShortageError("0 blocks"))

    monkeypatch.setattr(gpu_run, "free", lambda card: None)
    monkeypatch.setattr(gpu_run.Run, "_engine", fail)
    for part in ("_kernels", "_bandwidth", "_prefill", "_peer"):
        monkeypatch.setattr(gpu_run.Run, part, lambda self: None)
    run.measure()
    assert run.wrong == []
    assert run.skipped == ["engine: the rest of it: no memory for it: not enough"]


def test_the_versions_are_those_of_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"triton": "3.6.0", "flash-attn-3": "3.0.0"}
    monkeypatch.setattr(gpu_versions, "_version", there.get)
    said = gpu_versions.versions()
    assert "triton 3.6.0, flash-attn-3 3.0.0" in said
    assert "transformers" not in said


# ---- the card ----


class FakeCuda:
    """What of torch.cuda a Card asks for; an event says the milliseconds since the one before."""

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            pass

        def elapsed_time(self, end: FakeCuda.Event) -> float:
            return 2.0

    @staticmethod
    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(
            name="A card", major=9, minor=0, multi_processor_count=132, total_memory=2**37, L2_cache_size=60 * 2**20
        )


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[gpu_card.Card]:
    for name, value in {
        "Event": FakeCuda.Event,
        "get_device_properties": FakeCuda.properties,
        "current_device": lambda: 0,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (2**20, 2**37),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    yield gpu_card.Card()


def test_a_card_says_what_it_is(card: gpu_card.Card) -> None:
    assert card.describe() == "A card, sm_90, 132 SMs, 128 GiB, L2 60 MiB"
    assert (card.multiprocessors, card.l2_bytes) == (132, 60 * 2**20)
    assert card.free_bytes() == 2**20


def test_a_card_times_by_events_and_counts_what_is_read_and_written(
    card: gpu_card.Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    timing = card.time(lambda: calls.append(1), 5)
    assert (timing.median, len(calls)) == (0.002, 6)
    assert timing.per(2).median == 0.001
    card.device = torch.device("cpu")
    monkeypatch.setattr(gpu_card, "COPY_BYTES", 2**12)
    monkeypatch.setattr(gpu_card, "MATRIX", 8)
    bandwidth, _ = card.copy_bandwidth()
    assert bandwidth == 2 * 2**12 / 0.002
    assert card.matrix_rate(torch.float32) == 2 * 8**3 / 0.002


def test_the_times_of_kernels_are_added_up(card: gpu_card.Card, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[SimpleNamespace] = []

    @contextmanager
    def profile(activities: list[Any]) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(key_averages=lambda: events)

    monkeypatch.setattr(gpu_card, "profile", profile)
    runs: list[int] = []
    assert card.kernel_seconds(lambda: runs.append(1)) is None  # the profiler saw no device
    assert len(runs) == 2
    events += [SimpleNamespace(self_device_time_total=microseconds) for microseconds in (1500.0, 0.0, 500.0)]
    assert card.kernel_seconds(lambda: None) == 0.002


# ---- the peer ----


@pytest.mark.slow
def test_generate_batch_gives_every_request_its_tokens() -> None:
    """In a process of its own: it starts threads, and warns as its versions please."""
    program = f"""
import sys
sys.path[:0] = [{str(BENCH)!r}, {str(ROOT / ".typecheck")!r}]
import torch
from gpu_parts.model import build_model, random_prompts
from gpu_parts.peer import PeerError, run_peer
from gpu_parts.shapes import ModelShape
shape = ModelShape(layers=1, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=16, vocabulary=64)
model = build_model(shape, max_context=64, device=torch.device("cpu"), dtype=torch.float32, seed=1)
assert sum(p.numel() for p in model.parameters()) == shape.parameters
prompts = random_prompts(3, 5, shape.vocabulary, seed=2)
run = run_peer(model, prompts, 4, "sdpa", num_blocks=8, max_batch_tokens=64)
assert run.tokens == 12 and 0 < run.tokens_per_s, run
model.generate_batch = lambda *a, **k: {{}}
try:
    run_peer(model, prompts, 4, "sdpa")
except PeerError as exc:
    print(exc)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("0 of 12 tokens came")


# ---- a bare checkout ----


def closure(names: tuple[str, ...]) -> set[importlib.metadata.Distribution]:
    """The distributions of that name and all that they require, without extras."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found or name in NOT_NEEDED:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # what torch's CUDA builds have besides
        wanted = map(Requirement, found[name].requires or ())
        waiting += [each.name.lower() for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    return set(found.values())


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a Python for which nothing is installed but ALLOWED and what these require."""
    site = tmp_path_factory.mktemp("site")
    for distribution in closure(ALLOWED):
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))))
    return {"PYTHONPATH": str(site), "PATH": os.environ["PATH"], "HOME": str(site)}


def python(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Without the site module: nothing but the environment's path and Python's own library can be imported."""
    return subprocess.run(
        [sys.executable, "-S", "-s", *arguments], env=environment, cwd="/", capture_output=True, text=True, timeout=100
    )


def test_without_a_device_it_says_so_and_prints_no_figure(bare: dict[str, str]) -> None:
    ended = python({**bare, "CUDA_VISIBLE_DEVICES": ""}, str(BENCH / "gpu.py"), "--json", "--check")
    assert ended.returncode == CANNOT_MEASURE, ended.stderr
    assert ended.stdout == ""
    assert ended.stderr == "cannot measure: torch finds no CUDA device here\n"


@pytest.mark.parametrize(
    ("capability", "lacks", "said"),
    [((7, 5), "", "A card has compute capability 7.5, and 8.0 is needed"), ((8, 0), "transformers", "transformers")],
)
def test_what_it_cannot_do_without_is_named(capability: tuple[int, int], lacks: str, said: str) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(BENCH)!r})
sys.argv = ["gpu.py"]
import gpu
import torch
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda device: {capability}
torch.cuda.get_device_name = lambda device: "A card"
if {lacks!r}:
    sys.modules[{lacks!r}] = None
gpu.main()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ended.returncode == CANNOT_MEASURE, ended.stderr
    assert (ended.stdout, ended.stderr.count("\n")) == ("", 1)
    assert ended.stderr.startswith("cannot measure: ")
    assert said in ended.stderr


def test_it_needs_nothing_but_torch_triton_transformers_and_numpy(bare: dict[str, str]) -> None:
    program = f"""
import importlib.util, sys
sys.path.insert(0, {str(BENCH)!r})
assert importlib.util.find_spec("inferq") is None
for name in ("pydantic", "redis", "structlog", "arq", "accelerate", "pytest"):
    assert importlib.util.find_spec(name) is None, name
import gpu
gpu.see_checkout()
from gpu_parts import card, run
from gpu_parts.versions import versions
import inferq.engine.assembly as assembly
assert assembly.__file__.startswith({str(ROOT)!r}), assembly.__file__
assert {str(ROOT)!r} not in sys.path
print(versions())
"""
    ended = python(bare, "-c", program)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("torch ")
