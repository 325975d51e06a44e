"""Set-up finds a Python or says what to install, repairs what was left half-made, and is done once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from support.tree import ROOT

FIND = ROOT / "tools" / "find_python.sh"


def find_python(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", str(FIND)], env={"PATH": str(folder), **environment}, capture_output=True, text=True, timeout=30
    )


def fake_python(path: Path, *, version: str, ensurepip: bool) -> None:
    """A program that answers find_python.sh's questions as a Python of that version would."""
    major, minor = version.split(".")[:2]
    path.write_text(
        f"""#!{sys.executable}
import sys
code = sys.argv[2]
if "platform" in code:
    print("{version}")
elif "ensurepip" in code:
    sys.exit({0 if ensurepip else 1})
elif "version_info >=" in code:
    sys.exit(0 if ({major}, {minor}) >= (3, 11) else 3)
else:
    print("python{major}.{minor}")
"""
    )
    path.chmod(0o755)


def test_the_first_fitting_python_is_taken(tmp_path: Path) -> None:
    fake_python(tmp_path / "python3", version="3.9.2", ensurepip=True)
    fake_python(tmp_path / "python3.12", version="3.12.1", ensurepip=True)
    assert find_python(tmp_path).stdout.strip() == str(tmp_path / "python3.12")


def test_a_named_python_is_the_only_one_tried(tmp_path: Path) -> None:
    fake_python(tmp_path / "python3.11", version="3.11.7", ensurepip=True)
    fake_python(tmp_path / "mine", version="3.13.0", ensurepip=True)
    assert find_python(tmp_path, PYTHON="mine").stdout.strip() == str(tmp_path / "mine")
    refused = find_python(tmp_path, PYTHON="other")
    assert refused.returncode == 1
    assert "PYTHON=other" in refused.stderr


@pytest.mark.parametrize(
    ("version", "ensurepip", "advice"),
    [
        (None, True, "apt-get install python3 python3-venv"),
        ("3.9.2", True, "found only: 3.9.2"),
        ("3.12.3", False, "apt-get install python3.12-venv"),
    ],
)
def test_what_is_missing_is_said_in_one_line(tmp_path: Path, version: str | None, ensurepip: bool, advice: str) -> None:
    if version:
        fake_python(tmp_path / "python3", version=version, ensurepip=ensurepip)
    found = find_python(tmp_path)
    assert (found.returncode, found.stdout) == (1, "")
    assert len(found.stderr.splitlines()) == 1
    assert advice in found.stderr


@pytest.fixture
def set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/set_up.py on a project of its own, with a record in the place of the downloads: `set_up.installed`."""
    spec = importlib.util.spec_from_file_location("set_up", ROOT / "tools" / "set_up.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    for name in ("VENV", "PYTHON", "UNFINISHED", "LOG", "WHEELS", "SDISTS"):
        monkeypatch.setattr(module, name, tmp_path / getattr(module, name).relative_to(module.ROOT))
    monkeypatch.setattr(module, "ROOT", tmp_path)
    module.installed = []
    monkeypatch.setattr(module, "install", module.installed.append)
    return module


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, extra: str) -> int:
    monkeypatch.setattr(sys, "argv", ["set_up.py", extra])
    status: int = module.main()
    return status


def test_the_second_time_nothing_is_installed(set_up: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(set_up, monkeypatch, "dev") == 0
    assert run(set_up, monkeypatch, "dev") == 0
    assert run(set_up, monkeypatch, "demo") == 0, "dev contains what the demo needs"
    assert set_up.installed == ["dev"]


def test_changed_pins_are_installed(set_up: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(set_up, monkeypatch, "demo") == 0
    with (set_up.ROOT / "constraints.txt").open("a") as file:
        file.write("one-more==1.0\n")
    assert run(set_up, monkeypatch, "demo") == 0
    assert set_up.installed == ["demo", "demo"]


@pytest.mark.slow
def test_an_interrupted_set_up_is_made_anew(set_up: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(extra: str) -> None:
        (set_up.VENV / "half-made").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(set_up, "install", interrupted)
        assert run(set_up, patch, "demo") == 130
    assert run(set_up, monkeypatch, "demo") == 0
    assert set_up.installed == ["demo"]
    assert not (set_up.VENV / "half-made").exists()


@pytest.mark.slow
def test_a_broken_environment_is_made_anew(set_up: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(set_up, monkeypatch, "demo") == 0
    set_up.PYTHON.unlink()
    assert run(set_up, monkeypatch, "demo") == 0
    assert set_up.venv_version() is not None


def test_a_failed_step_says_why(
    set_up: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(extra: str) -> None:
        set_up.run("fetching", sys.executable, "-c", "import sys; print('no such package'); sys.exit(1)")

    monkeypatch.setattr(set_up, "install", failing)
    assert run(set_up, monkeypatch, "demo") == 1
    assert "no such package" in capsys.readouterr().err
    assert not set_up.is_set_up("demo")


def test_two_at_once_install_once(set_up: ModuleType) -> None:
    """The second waits for the lock, and then finds that nothing is left to do."""
    waiting = threading.Event()
    set_up.say = lambda text: waiting.set() if "waiting" in text else None

    def guarded() -> None:
        with set_up.only_one():
            if not set_up.is_set_up("demo"):
                set_up.set_up("demo")

    def first_install(extra: str) -> None:
        set_up.installed.append(extra)
        second.start()
        assert waiting.wait(timeout=30)

    second = threading.Thread(target=guarded)
    set_up.install = first_install
    guarded()
    second.join(timeout=60)
    assert not second.is_alive()
    assert set_up.installed == ["demo"]


@pytest.mark.parametrize("there", [True, False])
def test_the_source_of_flash_attn_is_kept_where_it_can_be_had(
    set_up: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], there: bool
) -> None:
    """It is read by a test and by nothing else: without it set-up is as good."""
    commands: list[tuple[str, ...]] = []

    def run(what: str, *command: str | Path) -> None:
        commands.append(tuple(map(str, command)))
        if "download" in command and not there:
            raise set_up.SetUpError("no such package")

    monkeypatch.setattr(set_up, "run", run)
    set_up.SDISTS.mkdir(parents=True)
    set_up.keep_flash_source()
    install, download = commands
    assert install[-1] == "wheel"
    assert download[-3:] == ("-d", str(set_up.SDISTS), set_up.FLASH_SDIST)
    assert {"--no-deps", "--no-build-isolation", "FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE"} <= set(download)
    assert not set_up.SDISTS.exists(), "an earlier version would be taken for this one"
    assert ("no such package" in capsys.readouterr().out) is not there


def test_the_source_of_flash_attn_is_of_a_version_that_the_extra_allows(set_up: ModuleType) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (allowed,) = (Requirement(text) for text in extras["flash"])
    name, _, version = set_up.FLASH_SDIST.partition("==")
    assert allowed.name == name and version in allowed.specifier


def test_every_pin_is_exact_and_covers_the_extras() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [pin for pin in pins if "==" not in pin or "+" in pin] == []
    assert "torch==2.13.0" in pins and "transformers==5.24.0" in pins


def test_what_runs_here_is_what_is_pinned() -> None:
    """The environment has each pinned version, so that the tests speak for them."""
    from importlib.metadata import version

    pins = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    wrong = [pin for pin in pins if version(pin.partition("==")[0]).partition("+")[0] != pin.partition("==")[2]]
    assert wrong == []


def test_make_knows_the_targets() -> None:
    run = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=30, env=os.environ)
    targets = {line.split()[1] for line in run.stdout.splitlines() if line.startswith("  make ")}
    assert {"demo", "test", "test-all", "check", "clean", "help"} <= targets
