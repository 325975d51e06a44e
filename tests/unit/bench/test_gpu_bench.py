"""The GPU benchmark where there is no GPU: its tables, its verdicts, and how its parts fail.

That its parts run is tested beside the kernels (tests/kernels/test_gpu_bench.py).
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.gpu_bench import Runner, loading
from support.tree import ROOT

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
from gpu_parts import plan as gpu_plan
from gpu_parts import prefill as gpu_prefill
from gpu_parts import run as gpu_run
from gpu_parts import versions as gpu_versions
from gpu_parts.checks import Check
from gpu_parts.shapes import ModelShape

from inferq.cuda.memory import MemoryShortageError

BENCH = ROOT / "bench"


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
