"""What a start says of what fails in it: in one line, and before anything is asked of a service."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.generation import Lines
from support.models import save_tiny_model, tiny_model
from support.torch_ops import TORCH_OPS
from transformers import LlamaConfig

from inferq.cuda.memory import is_shortage
from inferq.engine import computation
from inferq.engine.assembly import assemble
from inferq.engine.attention.choice import Choice
from inferq.engine.attention.reference import ReferenceAttention
from inferq.engine.batch import StepBatch
from inferq.engine.config import EngineConfig
from inferq.engine.conformance import Gate
from inferq.engine.errors import ModelLoadError, SettingError
from inferq.engine.kernels import Kernels
from inferq.engine.model import LoadedModel, choose_dtype, load_model
from inferq.engine.runner import ModelRunner, sample_on_host

COMPILER = "out of resource: shared memory\nCompilationError at 12:8\n    tl.load(x)"
FIRST = "out of resource: shared memory"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", std=0.3)


def loaded_and_config(folder: Path, dtype: str = "float32") -> tuple[LoadedModel, EngineConfig]:
    config = EngineConfig(model=str(folder), dtype=dtype, device="cpu", num_blocks=32, max_num_seqs=2)
    return load_model(config, Lines()), config


def assembled(folder: Path, lines: Lines, kernels: Kernels, *, dtype: str = "float32") -> ModelRunner:
    loaded, config = loaded_and_config(folder, dtype)
    choice = Choice(ReferenceAttention(16), "the test's")
    return assemble(loaded, config, lines, choose=lambda _: [choice], kernels=kernels, capture=None)


def test_a_kernel_that_does_not_compile_is_told_in_one_line(folder: Path) -> None:
    def rms_norm(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError(COMPILER)

    lines = Lines()
    assembled(folder, lines, Kernels(replace(TORCH_OPS, rms_norm=rms_norm), sample))
    assert lines.details("modules are not fused")["reason"] == f"RuntimeError: {FIRST}"


def test_an_attention_that_does_not_compile_is_told_in_one_line() -> None:
    class Failing(ReferenceAttention):
        def attend(self, layer: int, query: Any, key: Any, value: Any, params: Any) -> torch.Tensor:
            raise RuntimeError(COMPILER)

    gate = Gate(tiny_model("llama"))
    with pytest.raises(ModelLoadError) as caught:
        gate.check(Failing(16))
    assert str(caught.value).endswith(f"with attention 'torch' (RuntimeError: {FIRST})")


def test_a_file_that_cannot_be_read_is_told_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError("no space left\non this device")

    monkeypatch.setattr("inferq.engine.model.choose_dtype", full)
    with pytest.raises(ModelLoadError, match=r"cannot be loaded: no space left$"):
        loaded_and_config(folder)


def sample(logits: torch.Tensor, batch: StepBatch) -> None:
    sample_on_host(logits, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sampler_is_tried_on_such_logits_as_the_model_has(folder: Path, dtype: torch.dtype) -> None:
    tried: list[tuple[torch.dtype, int]] = []

    def noting(logits: torch.Tensor, batch: StepBatch) -> None:
        tried.append((logits.dtype, logits.shape[1]))
        sample_on_host(logits, batch)

    name = str(dtype).removeprefix("torch.")
    runner = assembled(folder, Lines(), Kernels(TORCH_OPS, noting), dtype=name)
    assert tried[0] == (dtype, runner.facts.vocab_size)
    assert set(tried) == {tried[0]}  # of those that serve, too


def test_a_sampler_that_fails_once_it_runs_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a launch does: it has returned by then."""
    launched: list[str] = []

    def sampler(logits: torch.Tensor, batch: StepBatch) -> None:
        launched.append("sampler")

    def synchronize(device: torch.device) -> None:
        if launched:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore of it")

    monkeypatch.setattr(computation, "synchronize", synchronize)
    lines = Lines()
    assembled(folder, lines, Kernels(TORCH_OPS, sampler))
    reason = lines.details("tokens are sampled by the host")["reason"]
    assert reason == "RuntimeError: CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.int8])
def test_a_type_that_nothing_computes_in_is_refused_by_its_name(dtype: torch.dtype, device: str) -> None:
    config = LlamaConfig(dtype=dtype)
    if device == "cpu":  # which has a type of its own
        assert choose_dtype("auto", torch.device(device), config) in (torch.float32, torch.bfloat16)
        return
    says = f"the checkpoint is in {dtype}: set dtype to one of float32, bfloat16, float16"
    with pytest.raises(SettingError, match=says):
        choose_dtype("auto", torch.device(device), config)


def test_triton_may_have_been_installed_under_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    from inferq.engine.attention import triton as backend

    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    spec = importlib.util.spec_from_file_location(f"{backend.__package__}.again", backend.__file__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.TritonAttention.kernels == f"triton {triton.__version__}"


@pytest.mark.parametrize(
    "says",
    [
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUSOLVER_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: out of memory",
    ],
)
def test_a_library_that_finds_no_memory_says_so_in_its_own_way(says: str) -> None:
    assert is_shortage(RuntimeError(says))
    assert not is_shortage(RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"))
