"""The compose file and the Dockerfile say what a fleet needs: scaling, durability, and time to drain."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from support.tree import ROOT

from inferq.worker.settings import WorkerSettings

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
WORKERS = ["worker", "gpu-worker"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def seconds(duration: str) -> float:
    match = re.fullmatch(r"(\d+)s", duration)
    assert match, duration
    return float(match[1])


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


def test_signals_reach_the_worker_and_it_is_not_root() -> None:
    assert re.search(r'^ENTRYPOINT \["inferq-worker"\]$', DOCKERFILE, re.MULTILINE)
    instructions = re.findall(r"^(USER|ENTRYPOINT|HEALTHCHECK) .*$", DOCKERFILE, re.MULTILINE)
    assert instructions.index("USER") < instructions.index("ENTRYPOINT")
    assert "HEALTHCHECK" in instructions


def test_everything_the_image_copies_passes_the_ignore_file() -> None:
    allowed = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    copied = [
        line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ") and "--from" not in line
    ]
    assert {name for names in copied for name in names} == allowed
