"""Which failures of a start are a setting's fault, and that the parent learns it from the child."""

from __future__ import annotations

import errno
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


def raising(error: Exception) -> Callable[..., object]:
    def fails(*_: object, **__: object) -> object:
        raise error

    return fails


def unknown_type(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "never_heard_of"}')


def no_type(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("damage", "fields", "setting"),
    [
        (lambda folder: shutil.rmtree(folder), {}, "model"),
        (remove("config.json"), {}, "model"),
        (remove("model.safetensors"), {}, "model"),
        (unknown_type, {}, "model"),
        (no_type, {}, "model"),
        (lambda folder: None, {"model": "~nosuchuser/model"}, "model"),
        (lambda folder: None, {"model": "a" * 5000}, "model"),
        (lambda folder: None, {"cache_dir": "~nosuchuser/cache"}, "cache_dir"),
        (lambda folder: None, {"device": "cuda:99"}, "device"),
        (lambda folder: None, {"device": "toaster"}, "device"),
        (lambda folder: None, {"dtype": "int3"}, "dtype"),
    ],
)
def test_what_is_a_settings_fault_names_it(
    folder: Path, damage: Callable[[Path], object], fields: dict[str, str], setting: str
) -> None:
    damage(folder)
    error = failure_of(**({"model": folder} | fields))
    assert isinstance(error, SettingError)
    assert error.setting == setting
    assert "\n" not in str(error) and len(str(error)) < 500


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer_config.json", "tokenizer.json"])
def test_a_damaged_file_is_no_settings_fault(folder: Path, name: str) -> None:
    damaged = folder / name
    content = damaged.read_bytes()
    damaged.write_bytes(content[: len(content) // 2])
    assert type(failure_of(folder)) is ModelLoadError


@pytest.mark.parametrize(
    "content", [b"[]", b"\xff\xfe", b"[" * 100_000, b'{"model_type": "llama", "num_attention_heads": "many"}', b""]
)
def test_a_configuration_that_is_none_is_no_settings_fault(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    assert type(failure_of(folder)) is ModelLoadError


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyError("rope")])
def test_a_configuration_of_a_known_model_that_cannot_be_read_is_no_settings_fault(
    folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inferq.engine.model.AutoConfig.from_pretrained", raising(error))
    assert type(failure_of(folder)) is ModelLoadError


@pytest.mark.parametrize("reader", ["AutoConfig.from_pretrained", "safe_open"])
def test_a_process_without_memory_is_not_taken_for_a_model_that_is_wrong(
    folder: Path, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"inferq.engine.model.{reader}", raising(MemoryError()))
    with pytest.raises(MemoryError):
        failure_of(folder)


class TestCacheFolder:
    """It is needed by a model that has no tokenizer.json."""

    @pytest.fixture
    def needy(self, folder: Path) -> Path:
        (folder / "tokenizer.json").rename(folder / "elsewhere")
        return folder

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        (tmp_path / "file").touch()
        return tmp_path / "file"

    @pytest.mark.parametrize("below", ["", "cache"])
    def test_one_that_cannot_be_made_is_a_settings_fault(self, needy: Path, file: Path, below: str) -> None:
        error = failure_of(needy, cache_dir=str(file / below))
        assert isinstance(error, SettingError)
        assert error.setting == "cache_dir"
        assert str(error) == f"{file / below} is no folder that can be written: " + (
            "Not a directory" if below else "File exists"
        )

    def test_one_that_is_not_needed_need_not_be_there(self, folder: Path, file: Path) -> None:
        config = EngineConfig(model=str(folder), device="cpu", dtype="float32", cache_dir=str(file))
        assert load_model(config, lambda *_, **__: None).text_dir == folder

    def test_a_disk_that_is_full_is_none(self, needy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        full = raising(OSError(errno.ENOSPC, "No space left on device"))
        monkeypatch.setattr("inferq.engine.cache.tempfile.mkdtemp", full)
        monkeypatch.setattr("inferq.engine.assets.TemporaryFile", full)
        error = failure_of(needy, cache_dir=str(tmp_path / "cache"))
        assert type(error) is ModelLoadError and "No space left" in str(error)

    def test_nobodys_home_is_a_settings_fault(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr("inferq.engine.cache.Path.home", raising(RuntimeError("Could not determine home")))
        error = failure_of(folder)
        assert isinstance(error, SettingError)
        assert error.setting == "cache_dir"


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
