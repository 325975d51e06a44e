"""Which failures of a start are a setting's fault, and that the parent learns it from the child."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from support.models import save_tiny_model

from inferq.engine import AsyncInferenceEngine, EngineConfig, EngineDeadError, RestartPolicy, SettingError
from inferq.engine.attention.backends import choose_backends
from inferq.engine.attention.choice import Workload
from inferq.engine.errors import ModelLoadError
from inferq.engine.model import load_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that may be damaged."""
    return save_tiny_model(tmp_path / "tiny")


def failure_of(model: object, **fields: str) -> ModelLoadError:
    config = EngineConfig(model=str(model), **({"device": "cpu", "dtype": "float32"} | fields))
    with pytest.raises(ModelLoadError) as caught:
        load_model(config, lambda *_, **__: None)
    return caught.value


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("damage", "fields", "setting"),
    [
        (lambda folder: shutil.rmtree(folder), {}, "model"),
        (remove("config.json"), {}, "model"),
        (remove("model.safetensors"), {}, "model"),
        (lambda folder: None, {"device": "cuda:99"}, "device"),
        (lambda folder: None, {"device": "toaster"}, "device"),
        (lambda folder: None, {"dtype": "int3"}, "dtype"),
    ],
)
def test_what_is_a_settings_fault_names_it(
    folder: Path, damage: Callable[[Path], object], fields: dict[str, str], setting: str
) -> None:
    damage(folder)
    error = failure_of(folder, **fields)
    assert isinstance(error, SettingError)
    assert error.setting == setting


def test_a_damaged_file_is_no_settings_fault(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert type(failure_of(folder)) is ModelLoadError


def test_too_little_memory_is_no_settings_fault(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inferq.engine.model.host_available_bytes", lambda: 1)
    error = failure_of(folder)
    assert type(error) is ModelLoadError and "not enough memory" in str(error)


@pytest.mark.parametrize(
    ("raised", "is_setting"),
    [
        (HFValidationError("no such id"), True),
        (RepositoryNotFoundError.__new__(RepositoryNotFoundError), True),
        (LocalEntryNotFoundError("no network"), False),
        (ConnectionError("no network"), False),
    ],
)
def test_a_model_that_the_hub_does_not_know_is_a_settings_fault_and_a_hub_that_is_away_is_not(
    raised: Exception, is_setting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise raised

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert isinstance(failure_of("some-owner/some-model"), SettingError) == is_setting


@pytest.mark.parametrize("name", ["flash", "triton", "xformers"])
def test_an_attention_that_cannot_be_had_names_it(name: str) -> None:
    workload = Workload([], 1, 64, torch.float32, torch.device("cpu"))
    with pytest.raises(SettingError) as caught:
        choose_backends(name, None, workload)
    assert caught.value.setting == "attention"


@pytest.mark.parametrize("restart", [None, RestartPolicy()])
async def test_the_parent_raises_what_the_child_found(restart: RestartPolicy | None) -> None:
    engine = AsyncInferenceEngine(EngineConfig(model="/nowhere/at/all", device="cpu"), restart=restart)
    with pytest.raises(SettingError, match=r"^there is no folder /nowhere/at/all$") as caught:
        await engine.start_engine_loop()
    assert caught.value.setting == "model"
    assert not engine.is_running
    await engine.stop()


async def test_any_other_last_word_is_a_death() -> None:
    child = (
        "import socket, sys; from inferq.engine.pipe import Fatal, encode; fd = int(sys.argv[2]); "
        "socket.socket(fileno=fd).sendall(encode(Fatal('not enough memory')))"
    )
    engine = AsyncInferenceEngine(EngineConfig(model="any"), command=(sys.executable, "-c", child))
    with pytest.raises(EngineDeadError, match="not enough memory"):
        await engine.start_engine_loop()
    await engine.stop()
