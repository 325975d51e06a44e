"""What a web app gets: a pure wheel that carries every file, installs by itself and submits without torch."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import redis
from support.tree import LAYERS, package_files

from inferq.producer.contract import Keys

SUBMIT = """
import asyncio, importlib.util, sys
from inferq.producer import InferenceClient

async def main():
    async with InferenceClient.from_url(sys.argv[1], model="tiny") as client:
        print(await client.submit("Hello", request_id="from-the-wheel"))

asyncio.run(main())
loaded = {name.partition(".")[0] for name in sys.modules}
assert not loaded & {"torch", "transformers", "tokenizers", "numpy"}, loaded
assert importlib.util.find_spec("torch") is None
"""


def wheel_files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_is_pure_python(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    files = wheel_files(wheel)
    (metadata,) = [data for name, data in files.items() if name.endswith(".dist-info/WHEEL")]
    assert b"Root-Is-Purelib: true" in metadata
    assert [name for name in files if name.endswith((".so", ".pth", ".pyc"))] == []


def test_the_wheel_holds_the_tree_and_nothing_else(wheel: Path) -> None:
    carried = {name: data for name, data in wheel_files(wheel).items() if ".dist-info/" not in name}
    expected = package_files()
    assert carried.keys() == expected.keys()
    assert [name for name, path in expected.items() if carried[name] != path.read_bytes()] == []


def test_every_layer_lua_and_typing_mark_is_carried(wheel: Path) -> None:
    names = wheel_files(wheel).keys()
    for folder in LAYERS:
        assert f"inferq/{folder}/py.typed" in names
    for script in ("producer/scripts/enqueue", "worker/scripts/claim"):
        assert f"inferq/{script}.lua" in names


def test_neither_the_namespace_nor_cuda_is_a_regular_package(wheel: Path) -> None:
    names = wheel_files(wheel).keys()
    assert "inferq/__init__.py" not in names
    assert "inferq/cuda/__init__.py" not in names


def test_the_base_dependencies_are_those_of_a_web_app(wheel: Path) -> None:
    files = wheel_files(wheel)
    (metadata,) = [data.decode() for name, data in files.items() if name.endswith(".dist-info/METADATA")]
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    names = {line.split()[1].partition("[")[0].split("=")[0].split("<")[0].split(">")[0] for line in required}
    assert names == {"arq", "redis", "pydantic", "structlog"}
    assert "License-Expression: Apache-2.0" in metadata


@pytest.fixture(scope="module")
def empty_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel and its base dependencies, installed without a network."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    wheels = Path(sys.prefix) / "wheels"
    assert wheels.is_dir(), f"{wheels} is filled by set-up: run `make test`"
    pip = [sys.executable, "-m", "pip", "--isolated", "--python", str(folder / "bin" / "python"), "install", "-q"]
    command = [*pip, "--no-index", "--find-links", str(wheels), str(wheel)]
    subprocess.run(command, check=True, timeout=100)
    return folder / "bin" / "python"


def test_the_wheel_alone_submits_to_a_real_server(empty_environment: Path, redis_url: str, tmp_path: Path) -> None:
    program = [str(empty_environment), "-c", SUBMIT, redis_url]
    run = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "from-the-wheel"
    keys = Keys("tiny")
    with redis.Redis.from_url(redis_url) as client:
        assert client.zrange(keys.queue, 0, -1) == [b"from-the-wheel"]
        assert client.exists(keys.job("from-the-wheel"), keys.payload("from-the-wheel")) == 2


def test_the_command_line_comes_with_the_wheel(empty_environment: Path, tmp_path: Path) -> None:
    program = [str(empty_environment.parent / "inferq"), "--help"]
    run = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    for command in ("generate", "cancel", "status"):
        assert command in run.stdout
