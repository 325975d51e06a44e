"""The compose file and the Dockerfile say what a fleet needs: scaling, durability, and time to drain."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from support.tree import ROOT

from inferq.worker.settings import WorkerSettings

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
WORKERS = ["worker", "gpu-worker"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
#: A worker's images: what is built where no target is named, and the one for NVIDIA GPUs.
TARGETS = ["default", "cuda"]


def seconds(duration: str) -> float:
    match = re.fullmatch(r"(\d+)s", duration)
    assert match, duration
    return float(match[1])


def instructions_of(target: str) -> list[tuple[str, str]]:
    """(instruction, the rest) of all that makes up an image: its own stage and those that it is built upon."""
    text = re.sub(r"\\\n|^#.*\n", "", DOCKERFILE, flags=re.MULTILINE)
    instructions = [(first, rest.strip()) for first, _, rest in (line.partition(" ") for line in text.splitlines())]
    starts = [index for index, (first, _) in enumerate(instructions) if first == "FROM"]
    stages = {}
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        base, _, name = instructions[start][1].partition(" AS ")
        stages[name or "default"] = [*stages.get(base, []), *instructions[start:end]]
    return [instruction for instruction in stages[target] if instruction[0]]


def pins(name: str) -> dict[str, str]:
    lines = (line for line in (ROOT / name).read_text().splitlines() if "==" in line and not line.startswith("#"))
    return dict(line.split("==") for line in lines)


def test_redis_keeps_what_it_accepted() -> None:
    command = COMPOSE["services"]["redis"]["command"]
    assert command[command.index("--appendonly") + 1] == "yes"
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    assert any(volume.endswith(":/data") for volume in COMPOSE["services"]["redis"]["volumes"])
    assert COMPOSE["services"]["redis"]["healthcheck"]["test"][-2:] == ["redis-cli", "ping"]


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_can_be_scaled(name: str) -> None:
    service = COMPOSE["services"][name]
    assert "container_name" not in service
    assert "ports" not in service
    assert "hostname" not in service


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_has_the_time_to_drain(name: str) -> None:
    service = COMPOSE["services"][name]
    drain = float(service["environment"]["INFERQ_DRAIN_SECONDS"])
    assert seconds(service["stop_grace_period"]) > drain + 5
    assert service["init"] is True


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_waits_for_redis_and_keeps_its_models(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["depends_on"] == {"redis": {"condition": "service_healthy"}}
    (volume,) = service["volumes"]
    cache, _, folder = volume.partition(":")
    assert cache in COMPOSE["volumes"]
    assert f"VOLUME {folder}" in DOCKERFILE


@pytest.mark.parametrize("name", WORKERS)
def test_the_environment_is_the_workers_own(name: str) -> None:
    """Each INFERQ_ variable of the compose file and of the image is a setting."""
    variables = {*COMPOSE["services"][name]["environment"], *re.findall(r"\b(INFERQ_\w+)=", DOCKERFILE)}
    fields = {variable.removeprefix("INFERQ_").lower() for variable in variables}
    assert fields <= set(WorkerSettings.model_fields)


def test_only_the_gpu_worker_asks_for_a_device() -> None:
    assert "deploy" not in COMPOSE["services"]["worker"]
    gpu = COMPOSE["services"]["gpu-worker"]
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and device["capabilities"] == ["gpu"]
    assert gpu["profiles"] == ["gpu"]


@pytest.mark.parametrize("target", TARGETS)
def test_signals_reach_the_worker_and_it_is_not_root(target: str) -> None:
    instructions = instructions_of(target)
    assert [rest for first, rest in instructions if first == "ENTRYPOINT"] == ['["inferq-worker"]']
    assert [rest for first, rest in instructions if first == "USER"] == ["inferq"]
    assert instructions[-1][0] == "USER", "what follows it could not be installed"
    assert "HEALTHCHECK" in dict(instructions)


def test_the_image_without_a_target_is_the_last_one() -> None:
    assert re.findall(r"^FROM \S+(.*)$", DOCKERFILE, re.MULTILINE)[-1] == ""


def test_the_worker_on_a_gpu_is_of_the_image_for_it() -> None:
    assert COMPOSE["services"]["gpu-worker"]["build"] == {"context": ".", "target": "cuda"}
    assert "target" not in COMPOSE["services"]["worker"]["build"]


def test_triton_has_a_compiler_on_a_gpu() -> None:
    runs = " ".join(rest for first, rest in instructions_of("cuda") if first == "RUN")
    (packages,) = re.findall(r"apt-get install -y --no-install-recommends ([\w -]+?) *&&", runs)
    assert {"gcc", "libc6-dev"} <= set(packages.split())


def test_flash_attn_comes_as_a_wheel() -> None:
    """A source would be built for hours, or fail late: there is no CUDA compiler in the image."""
    (install,) = [rest for first, rest in instructions_of("cuda") if first == "RUN" and "flash-attn" in rest]
    for option in ("--only-binary :all:", "--no-deps", "-c /tmp/constraints-cuda.txt"):
        assert option in install
    assert "flash-attn-3" in pins("constraints-cuda.txt")


def test_the_pins_for_a_gpu_take_the_place_of_the_others() -> None:
    """pip refuses two pins of one package: what both files name is taken out of the general one."""
    (taken_out,) = re.findall(r"grep -v -E '\^\(([^)]*)\)==' /tmp/constraints\.txt", DOCKERFILE)
    general, gpu = pins("constraints.txt"), pins("constraints-cuda.txt")
    assert set(taken_out.split("|")) == set(general) & set(gpu)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    ranges = [Requirement(text) for text in [*extras["worker"], *extras["dev"]]]
    assert all(gpu[each.name] in each.specifier for each in ranges if each.name in gpu)


def test_everything_the_image_copies_passes_the_ignore_file() -> None:
    allowed = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    copied = [
        line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ") and "--from" not in line
    ]
    assert {name for names in copied for name in names} == allowed
