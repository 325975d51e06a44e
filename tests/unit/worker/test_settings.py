"""Flags and variables: one frozen value, and one clear line for what is wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from inferq.engine.config import EngineConfig
from inferq.producer.contract import Keys
from inferq.worker.settings import InvalidSettings, WorkerSettings, read_settings

NO_PROGRAM = "--engine-command: its first word is no program that can be run here"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WorkerSettings.model_fields:
        monkeypatch.delenv(f"INFERQ_{name.upper()}", raising=False)


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERQ_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("INFERQ_PREFIX", "other")
    settings = read_settings(["--max-num-seqs", "9"])
    assert settings.max_num_seqs == 9
    assert settings.keys == Keys("demo", "other")


def test_an_empty_variable_is_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERQ_MODEL", "")
    monkeypatch.setenv("INFERQ_THREADS", "")
    assert read_settings([]).model == "demo"


def test_every_field_of_the_engine_is_set_from_here() -> None:
    flags = [
        "--model",
        "a/b",
        "--dtype",
        "float32",
        "--kv-cache-bytes",
        "2GiB",
        "--threads",
        "1",
        "--max-model-len",
        "9",
    ]
    assert read_settings(flags).engine_config() == EngineConfig(
        model="a/b", dtype="float32", kv_cache_bytes=2 * 1024**3, threads=1, max_model_len=9
    )


def test_derived_values() -> None:
    settings = read_settings(["--model", "HuggingFaceTB/SmolLM2-135M-Instruct", "--lease-seconds", "3"])
    assert settings.keys.model == "SmolLM2-135M-Instruct"
    assert settings.lease_ms == 3000
    assert settings.renew_seconds == 1.0
    assert settings.claim_seconds == 0.5
    assert read_settings(["--no-accept-plain-jobs"]).claim_seconds == 2.0
    assert read_settings(["--no-accept-plain-jobs", "--poll-seconds", "0.1"]).claim_seconds == 0.1
    command = f"{sys.executable} 'a b.py' --x"
    assert read_settings(["--engine-command", command]).engine_arguments == (sys.executable, "a b.py", "--x")
    assert settings.engine_arguments is None


def test_settings_are_frozen_and_named_by_process() -> None:
    settings = read_settings([])
    assert settings.worker_id != read_settings([]).worker_id
    with pytest.raises(ValidationError, match="frozen"):
        settings.max_num_seqs = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--lease-seconds", "0"], "--lease-seconds: Input should be greater than or equal to 0.5"),
        (["--lease-seconds", "nan"], "--lease-seconds: Input should be a finite number"),
        (["--max-num-seqs", "0"], "--max-num-seqs: Input should be greater than or equal to 1"),
        (["--dtype", "int4"], "--dtype: Input should be 'auto', 'float32', 'bfloat16' or 'float16'"),
        (["--device", "gpu"], "--device: String should match pattern '^(auto|cpu|cuda("),
        (["--device", "cuda:-1"], "--device: "),
        (["--attention", "xformers"], "--attention: Input should be 'auto', 'flash', 'triton' or 'torch'"),
        (["--served-model-name", "a b"], "--served-model-name: String should match pattern"),
        (["--bogus", "1"], "unrecognized arguments: --bogus"),
        (["positional"], "unrecognized arguments: words without a flag"),
        (["--model"], "argument --model: expected one argument"),
        (["--embedded-dir", "/tmp"], "--embedded-dir needs --embedded"),
        (["--embedded", "--redis-url", "redis://h"], "give --embedded or --redis-url, not both"),
        (["--engine-command", "a 'b"], "--engine-command: No closing quotation"),
        (["--engine-command", "/no/such/program --x"], NO_PROGRAM),
        (["--engine-command", "/tmp"], NO_PROGRAM),
        (["--engine-command", __file__], NO_PROGRAM),
        (["--engine-command", "no-such-program-anywhere"], NO_PROGRAM),
        (["--engine-command", "''"], NO_PROGRAM),
        (["--engine-command", " "], NO_PROGRAM),
        (["--threads", "100000"], "--threads: Input should be less than or equal to 1024"),
        (["--threads", "x", "--num-blocks", "0"], "--threads: "),
    ],
)
def test_what_is_wrong_is_named_in_one_line(flags: list[str], line: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        read_settings(flags)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_no_error_and_no_repr_shows_a_password() -> None:
    with pytest.raises(InvalidSettings) as caught:
        read_settings(["--redis-url", "http://:hunter2@host"])
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(read_settings(["--redis-url", "redis://:hunter2@host"]))


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "inferq.worker.main", *flags], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_bad_flag_ends_the_worker_with_2_and_one_line() -> None:
    done = run("--max-num-seqs", "0")
    assert done.returncode == 2
    assert done.stderr == "inferq-worker: --max-num-seqs: Input should be greater than or equal to 1\n"
    assert done.stdout == ""


def test_help_lists_every_flag() -> None:
    done = run("--help")
    assert done.returncode == 0
    for name in WorkerSettings.model_fields:
        assert f"--{name.replace('_', '-')}" in done.stdout
    assert "None" not in done.stdout
