"""`cases.toml` tells the truth: each case it lists is covered by tests that exist and run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LISTED: dict[str, list[dict[str, Any]]] = tomllib.loads((ROOT / "tests" / "cases.toml").read_text())
CASES, OPEN = LISTED["case"], LISTED["open"]
FIELDS = {"number": int, "area": str, "says": str, "tests": list}
OPEN_FIELDS = {"number": int, "area": str, "says": str, "waits_for": str}


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bool]:
    """Each test id of the files that the cases name, and whether that test is switched off."""
    written = tmp_path_factory.mktemp("cases") / "ids.json"
    files = sorted({test.partition("::")[0] for case in CASES for test in case["tests"]})
    command = [sys.executable, "-m", "pytest", "-p", "support.case_ids", "--collect-only", "-q", "--full"]
    run = subprocess.run(
        [*command, f"--write-ids={written}", *files],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    found: dict[str, bool] = json.loads(written.read_text())
    return found


def matching(test: str, ids: dict[str, bool]) -> list[str]:
    """The collected ids that a name in cases.toml stands for: a test, or all parameters of one."""
    return [found for found in ids if found == test or found.startswith(f"{test}[")]


@pytest.mark.parametrize("case", CASES + OPEN, ids=lambda case: str(case.get("number")))
def test_an_entry_is_complete(case: dict[str, Any]) -> None:
    fields = OPEN_FIELDS if case in OPEN else FIELDS
    assert case.keys() == fields.keys()
    for name, kind in fields.items():
        assert isinstance(case[name], kind) and case[name], name
    assert "\n" not in case["says"]


def test_numbers_are_listed_once_and_in_order() -> None:
    numbers = [case["number"] for case in CASES]
    assert [number for number, times in Counter(numbers).items() if times > 1] == []
    assert numbers == sorted(numbers)
    assert not {case["number"] for case in OPEN} & set(numbers), "what is open is not listed as covered"


def test_every_named_test_exists(collected: dict[str, bool]) -> None:
    missing = [(case["number"], test) for case in CASES for test in case["tests"] if not matching(test, collected)]
    assert missing == []


def test_no_named_test_is_switched_off(collected: dict[str, bool]) -> None:
    named = {found for case in CASES for test in case["tests"] for found in matching(test, collected)}
    assert [found for found in sorted(named) if collected[found]] == []
