"""Finding and loading a model: what it takes from a folder, and the one line it says where it cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import save_tiny_model
from transformers import AutoConfig

from inferq.engine import model as loading
from inferq.engine.assembly import load_runner
from inferq.engine.config import EngineConfig
from inferq.engine.errors import ModelLoadError
from inferq.engine.model import LoadedModel, choose_device, choose_dtype, load_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that the test may spoil."""
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def load(model: Path | str, **fields: Any) -> LoadedModel:
    config = EngineConfig(model=str(model), **({"device": "cpu", "dtype": "float32"} | fields))
    return load_model(config, lambda *_, **__: None)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(model: Path | str, **fields: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(model, **fields)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder(folder: Path) -> None:
    loaded = load(folder)
    assert (loaded.name, loaded.text_dir, loaded.vocab_size, loaded.context_length) == ("tiny", folder, 320, 256)
    assert loaded.eos_token_ids == [2]
    assert loaded.model.dtype == loaded.dtype == torch.float32
    assert not loaded.model.training


def test_weights_are_cast_to_what_was_asked_for(folder: Path) -> None:
    assert load(folder, dtype="bfloat16").model.dtype == torch.bfloat16


def test_eos_is_what_generation_config_and_tokenizer_say(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[7, 9])
    assert load(folder).eos_token_ids == [2, 7, 9]
    edit(folder / "tokenizer_config.json", eos_token={"content": "<s>", "__type": "AddedToken"})
    assert load(folder).eos_token_ids == [1, 7, 9]
    edit(folder / "tokenizer_config.json", eos_token=None)
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=5)
    assert load(folder).eos_token_ids == [5]


def test_a_folder_without_tokenizer_json_gets_one_in_the_cache(folder: Path, tmp_path: Path) -> None:
    """A GPT-2 style vocab.json and merges.txt, which only transformers reads."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer.json").unlink()
    edit(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    loaded = load(folder, cache_dir=str(tmp_path / "cache"))
    assert loaded.text_dir.parent == tmp_path / "cache" / "text"
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= {
        path.name for path in loaded.text_dir.iterdir()
    }
    assert load(folder, cache_dir=str(tmp_path / "cache")).text_dir == loaded.text_dir


def test_a_folder_without_any_tokenizer(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert "has no tokenizer that transformers can load" in refused(folder, cache_dir=str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./missing", "~/missing-model", "a/b/c"])
def test_a_missing_folder(name: str) -> None:
    assert refused(name) == f"there is no folder {name}"


def test_a_hub_id_is_asked_of_the_hub_alone(monkeypatch: pytest.MonkeyPatch, original: Path) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo_id: str, **fields: Any) -> str:
        asked.update(repo_id=repo_id, **fields)
        return str(original)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert load("some-owner/some-model", revision="v1").name == "some-model"
    assert (asked["repo_id"], asked["revision"]) == ("some-owner/some-model", "v1")
    assert "*.safetensors" in asked["allow_patterns"]
    assert not {"*.bin", "*.py", "*.pt", "*.gguf"} & set(asked["allow_patterns"])


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, **fields: Any) -> str:
        raise OSError("no route to host\nand much more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert refused("demmo") == (
        "'demmo' is neither `demo` nor a folder here, and Hugging Face did not give it: no route to host"
    )


def test_an_unknown_architecture(folder: Path) -> None:
    edit(folder / "config.json", model_type="never_heard_of")
    assert "holds no model that transformers knows" in refused(folder)


def test_a_model_that_generates_no_text(folder: Path) -> None:
    edit(folder / "config.json", model_type="vit", architectures=["ViTModel"])
    assert refused(folder).startswith(f"vit model in {folder}: ")


def test_weights_in_another_format(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert refused(folder) == f"{folder} has no .safetensors file: weights in other formats are not loaded"


def test_weights_that_were_cut_short(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert refused(folder).startswith(f"{weights} is not a whole safetensors file")


def test_weights_that_do_not_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "host_available_bytes", lambda: 1000)
    assert refused(folder).startswith("not enough memory: the weights of tiny take")


def test_devices() -> None:
    assert choose_device("cpu") == CPU
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("gpu", "meta", "mps"):
        with pytest.raises(ModelLoadError, match="device must be auto, cpu, cuda or cuda:N"):
            choose_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none() -> None:
    with pytest.raises(ModelLoadError, match="device cuda was asked for, and torch finds no CUDA device here"):
        choose_device("cuda")


def test_a_card_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert choose_device("cuda:0") == torch.device("cuda:0")
    # A number always: torch.cuda.set_device takes no device without one.
    assert choose_device("cuda") == choose_device("auto") == torch.device("cuda:1")
    with pytest.raises(ModelLoadError, match="device cuda:2 was asked for, and there are 2, from cuda:0 on"):
        choose_device("cuda:2")


def test_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("llama", dtype="float16")
    assert choose_dtype("float16", CPU, config) == torch.float16
    assert choose_dtype("auto", torch.device("cuda"), config) == torch.float16
    for flags, expected in (
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"avx2": True}, torch.float32),
        ({}, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda flags=flags: flags, raising=False)
        assert choose_dtype("auto", CPU, config) == expected
    with pytest.raises(ModelLoadError, match=r"dtype must be auto, float32, bfloat16, float16, not 'int8'"):
        choose_dtype("int8", CPU, config)


def rewrite(folder: Path, change: Any) -> None:
    """Put other weights into the folder: what `change` makes of them."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


class TestTensors:
    """Never a random number in place of a weight."""

    def test_missing_ones_are_named_five_at_most(self, folder: Path) -> None:
        rewrite(folder, lambda weights: {name: w for name, w in weights.items() if "layers.1." not in name})
        message = refused(folder)
        assert message.startswith(f"the weights in {folder} lack 9 of the model's tensors: model.layers.1.")
        assert message.count("model.layers.1.") == 5
        assert message.endswith(", ...")

    def test_all_are_missing(self, folder: Path) -> None:
        rewrite(folder, lambda weights: {f"other.{name}": w for name, w in weights.items()})
        assert "lack" in refused(folder)

    def test_one_of_another_shape_is_named(self, folder: Path) -> None:
        name = "model.layers.0.mlp.down_proj.weight"
        rewrite(folder, lambda weights: weights | {name: weights[name][:, :50].clone()})
        assert refused(folder) == f"the weights in {folder} have in another shape 1 of the model's tensors: {name}"

    def test_more_than_the_model_has_are_logged(self, folder: Path) -> None:
        rewrite(folder, lambda weights: weights | {"model.extra.weight": torch.zeros(2)})
        lines: list[tuple[str, str, dict[str, Any]]] = []
        config = EngineConfig(model=str(folder), device="cpu", dtype="float32")
        load_model(config, lambda level, event, **details: lines.append((level, event, details)))
        assert lines == [("warning", "tensors that the model does not use", {"tensors": "model.extra.weight"})]

    def test_tied_ones_need_not_be_there(self, tmp_path: Path) -> None:
        folder = save_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
        assert "lm_head.weight" not in load_file(folder / "model.safetensors")
        load(folder)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer_config.json", b'{"eos_token": '),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"\xff\xfe"),
        ("generation_config.json", b"{"),
        ("generation_config.json", b'{"eos_token_id": "x"}'),
        ("generation_config.json", b'{"eos_token_id": [2, true]}'),
        ("config.json", b'{"model_type": "llama"'),
    ],
)
def test_a_broken_file_is_named(folder: Path, file: str, content: bytes) -> None:
    (folder / file).write_bytes(content)
    message = refused(folder)
    assert str(folder / file) in message or (file == "config.json" and str(folder) in message)


def test_a_template_that_is_not_utf_8(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refused(folder)


def test_an_eos_of_the_configuration_that_is_no_id(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id="x")
    refused(folder)


def test_no_name_at_all() -> None:
    assert refused("") == "model must be `demo`, a folder or a Hugging Face id, not empty"


def test_a_cache_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    assert str(tmp_path / "cache") in refused(folder, cache_dir=str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_blocks": 10**12}, "not enough memory for num_blocks 1000000000000"),
        ({"num_blocks": 16, "max_num_batched_tokens": 10**13}, "not enough memory for max_num_batched_tokens"),
    ],
)
def test_more_than_the_memory_can_be(original: Path, fields: dict[str, Any], says: str) -> None:
    config = EngineConfig(model=str(original), device="cpu", dtype="float32", threads=1, **fields)
    with pytest.raises(ModelLoadError, match=says) as caught:
        load_runner(config, lambda *_, **__: None)
    assert "\n" not in str(caught.value)
