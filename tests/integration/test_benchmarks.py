"""The benchmarks and examples that people run: they end well and print the keys that others read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEYS = {
    "engine.py": {"tok_s", "step_ms", "ttft_ms"},
    "cancel.py": {"freed_p99_ms", "step_ms", "terminal_p99_ms"},
    "fleet.py": {"efficiency", "makespan_ratio"},
    "pickup.py": {"p50_ms", "p99_ms", "idle_cpu_percent", "idle_round_trips_s"},
    "recovery.py": {"max_s", "lease_s", "token_exact", "runs"},
    "streaming.py": {"p50_ms", "p99_ms", "worker_us_per_token", "ratio", "ratio_all_cores"},
}


#: Those that load the model, most of them several times.
LONG = ("engine.py", "recovery.py", "streaming.py")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            script, marks=pytest.mark.slow(family=f"benchmarks {script in LONG}", share=0.25 * (script not in LONG))
        )
        for script in KEYS
    ],
)
def test_a_benchmark_prints_its_figures(script: str) -> None:
    command = [sys.executable, str(ROOT / "bench" / script), "--quick", "--json", "--busy"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert KEYS[script] <= figures.keys()
    measured = [
        v for key in KEYS[script] for v in (figures[key].values() if isinstance(figures[key], dict) else [figures[key]])
    ]
    assert all(value > 0 for value in measured)


def test_a_busy_machine_is_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    probe = (
        "import os; os.getloadavg = lambda: (99.0, 99.0, 99.0); import runpy, sys; sys.argv = sys.argv[1:]; "
        "sys.path.insert(0, os.path.dirname(sys.argv[0])); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", probe, str(ROOT / "bench" / "pickup.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "not quiet" in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_the_engine_without_redis_streams_two_answers() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "engine_only.py")], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
