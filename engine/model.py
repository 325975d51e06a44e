"""Finds a model and loads it: `demo`, a folder, or a Hugging Face id, which alone is ever downloaded.

Every way in which this can fail for the user ends as one ModelLoadError. Knows transformers; knows neither requests
nor the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from inferq.cuda.memory import host_available_bytes

from .assets import check_text, eos_token_ids, first_line, in_cache, is_lasting, read_settings, text_dir
from .config import EngineConfig
from .convert import NAME as DEMO_NAME
from .convert import demo_model_dir
from .errors import ModelLoadError, SettingError

#: Takes a level, an event and its details.
Log = Callable[..., None]

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WANTED: Final = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")
#: The same weights again, in other formats.
_UNWANTED: Final = ("original/*", "onnx/*", "consolidated*")
#: Where Linux shows NVIDIA's driver that it has a card.
_NVIDIA_DEVICE: Final = Path("/dev/nvidia0")
#: How many tensors a message names.
_MAX_NAMES: Final = 5
#: Characters of a path that a message shows.
_MAX_SHOWN: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A causal language model in memory, and the facts about it that are not about attention."""

    model: PreTrainedModel
    name: str
    text_dir: Path
    eos_token_ids: list[int]
    vocab_size: int  #: token ids are below this
    context_length: int | None  #: tokens; None where the model does not say
    dtype: torch.dtype
    device: torch.device


def load_model(config: EngineConfig, log: Log) -> LoadedModel:
    """Raises ModelLoadError with one line that says what is wrong."""
    try:
        return _load_model(config, log)
    except (OSError, SafetensorError) as exc:  # a disk that is full, a cache that cannot be written
        raise ModelLoadError(f"{config.model or 'the model'} cannot be loaded: {first_line(exc)}") from exc


def _load_model(config: EngineConfig, log: Log) -> LoadedModel:
    transformers_logging.disable_progress_bar()
    device = choose_device(config.device)
    if config.device == "auto" and device.type == "cpu" and _NVIDIA_DEVICE.exists():
        log("warning", "a GPU is here that torch cannot use: it may need another driver or another build of torch")
    name, folder = _find(config, log)
    model_config = _read_config(folder, config.trust_remote_code)
    dtype = choose_dtype(config.dtype, device, model_config)
    _check_memory(folder, dtype, device)
    _check_generation_config(folder)
    find_text = partial(text_dir, folder, trust_remote_code=config.trust_remote_code)
    text_folder = in_cache(config.cache_dir, find_text)
    check_text(text_folder)
    model = _read_weights(folder, model_config, dtype, device, log, trust_remote_code=config.trust_remote_code)
    return LoadedModel(
        model=model,
        name=name,
        text_dir=text_folder,
        eos_token_ids=eos_token_ids(_configured_eos(model), text_folder),
        vocab_size=model.get_input_embeddings().weight.shape[0],
        context_length=_context_length(model_config),
        dtype=dtype,
        device=device,
    )


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is a device, else the CPU; CUDA without a number is the current device.

    Raises ModelLoadError for what is not there.
    """
    wanted = f"device must be auto, cpu, cuda or cuda:N, not {name!r}"
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise SettingError("device", wanted) from exc
    if device.type not in ("cpu", "cuda"):
        raise SettingError("device", wanted)
    return device if device.type == "cpu" else _cuda_device(name, device.index)


def _cuda_device(name: str, index: int | None) -> torch.device:
    if not torch.cuda.is_available():
        raise SettingError("device", f"device {name} was asked for, and torch finds no CUDA device here")
    if index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if index >= torch.cuda.device_count():
        raise SettingError(
            "device", f"device {name} was asked for, and there are {torch.cuda.device_count()}, from cuda:0 on"
        )
    return torch.device("cuda", index)


def choose_dtype(name: str, device: torch.device, model_config: PreTrainedConfig) -> torch.dtype:
    """What to compute in.

    `auto` on CUDA is the checkpoint's type. On a CPU it is bfloat16 where the CPU multiplies it in hardware (AVX-512
    BF16 or AMX: it was measured 1.5 times as fast as float32 at one sequence and 3 times at 64), else float32.

    Raises SettingError for a type that is none of _DTYPES.
    """
    if name == "auto":
        if device.type == "cpu":
            return torch.bfloat16 if _multiplies_bfloat16() else torch.float32
        own = getattr(model_config, "dtype", None) or getattr(model_config.get_text_config(), "dtype", None)
        own = own if isinstance(own, torch.dtype) else torch.bfloat16
        if own not in _DTYPES.values():
            raise SettingError("dtype", f"the checkpoint is in {own}: set dtype to one of {', '.join(_DTYPES)}")
        return own
    if name not in _DTYPES:
        raise SettingError("dtype", f"dtype must be auto, {', '.join(_DTYPES)}, not {name!r}")
    return _DTYPES[name]


def _multiplies_bfloat16() -> bool:
    ask = getattr(torch.cpu, "get_capabilities", dict)  # not in torch 2.10
    capabilities: dict[str, Any] = ask()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _find(config: EngineConfig, log: Log) -> tuple[str, Path]:
    """The model's name and its folder."""
    if not config.model:
        raise SettingError("model", "model must be `demo`, a folder or a Hugging Face id, not empty")
    if config.model == "demo":
        return DEMO_NAME, in_cache(config.cache_dir, partial(demo_model_dir, log=log))
    try:
        folder = Path(config.model).expanduser()
    except RuntimeError as exc:
        raise SettingError("model", f"there is no folder {config.model}: nobody here has that home") from exc
    try:
        is_folder = folder.is_dir()
    except OSError as exc:
        if is_lasting(exc):
            raise SettingError("model", f"{config.model[:_MAX_SHOWN]} cannot be read: {exc.strerror}") from exc
        raise
    if is_folder:
        return folder.resolve().name, folder
    if folder.is_absolute() or config.model.startswith(("~", ".")) or config.model.count("/") > 1:
        raise SettingError("model", f"there is no folder {config.model}")
    return config.model.rsplit("/", 1)[-1], _download(config, log)


def _download(config: EngineConfig, log: Log) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    log("info", "fetching from Hugging Face", model=config.model, revision=config.revision)
    wanted = [*_WANTED, "*.py"] if config.trust_remote_code else list(_WANTED)
    try:
        return Path(
            snapshot_download(
                config.model, revision=config.revision, allow_patterns=wanted, ignore_patterns=list(_UNWANTED)
            )
        )
    except RevisionNotFoundError as exc:
        raise SettingError("revision", f"{config.model!r} has no revision {config.revision!r}") from exc
    except (HFValidationError, RepositoryNotFoundError) as exc:
        raise SettingError("model", _not_given(config, exc)) from exc
    except OSError as exc:  # of the network, which may be there at the next start
        raise ModelLoadError(_not_given(config, exc)) from exc


def _not_given(config: EngineConfig, exc: Exception) -> str:
    return f"{config.model!r} is neither `demo` nor a folder here, and Hugging Face did not give it: {first_line(exc)}"


def _read_config(folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """Raises SettingError where it names no model that is known here, ModelLoadError where it is damaged."""
    path = folder / "config.json"
    if not path.is_file():
        raise SettingError("model", f"{folder} holds no model that transformers knows: it has no config.json")
    settings = read_settings(path)
    runs_code = trust_remote_code and "auto_map" in settings
    is_known = settings.get("model_type") in list(CONFIG_MAPPING.keys())
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except (MemoryError, OSError):
        raise
    except Exception as exc:
        if is_known or runs_code:
            raise ModelLoadError(f"{path}: {first_line(exc)}") from exc
        raise SettingError("model", f"{folder} holds no model that transformers knows: {first_line(exc)}") from exc


def _check_generation_config(folder: Path) -> None:
    """transformers passes over a broken one without a word, and the model would not stop where it should."""
    path = folder / "generation_config.json"
    ids = read_settings(path).get("eos_token_id")
    if not all(type(i) is int for i in (ids if isinstance(ids, list) else [ids]) if i is not None):
        raise ModelLoadError(f"{path}: eos_token_id must be a token id or a list of them, not {ids!r}")


def _check_memory(folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise SettingError("model", f"{folder} has no .safetensors file: weights in other formats are not loaded")
    needed = sum(_num_parameters(file) for file in files) * dtype.itemsize
    available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_available_bytes()
    if needed > available:
        raise ModelLoadError(
            f"not enough memory: the weights of {folder.name} take {needed / 2**30:.1f} GiB as "
            f"{str(dtype).removeprefix('torch.')}, and {available / 2**30:.1f} GiB are available on {device}"
        )


def _num_parameters(file: Path) -> int:
    try:
        with safe_open(file, framework="pt") as tensors:
            return sum(torch.Size(tensors.get_slice(name).get_shape()).numel() for name in tensors.keys())
    except MemoryError:
        raise
    except Exception as exc:
        raise ModelLoadError(f"{file} is not a whole safetensors file: {first_line(exc)}") from exc


def _read_weights(
    folder: Path,
    model_config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    log: Log,
    *,
    trust_remote_code: bool,
) -> PreTrainedModel:
    options: dict[str, Any] = {
        "local_files_only": True,
        "use_safetensors": True,
        "attn_implementation": "eager",
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # told by `_check_tensors`, by name
        "trust_remote_code": trust_remote_code,
    }
    try:
        model, found = AutoModelForCausalLM.from_pretrained(folder, config=model_config, dtype=dtype, **options)
        _check_tensors(folder, found, log)
        placed: PreTrainedModel = model.to(device).eval()
    except (MemoryError, torch.OutOfMemoryError) as exc:
        raise ModelLoadError(f"not enough memory for {folder.name} on {device}: {first_line(exc)}") from exc
    except (ValueError, KeyError, OSError, RuntimeError, ImportError) as exc:
        raise ModelLoadError(f"{model_config.model_type} model in {folder}: {first_line(exc)}") from exc
    return placed


def _check_tensors(folder: Path, found: Mapping[str, Any], log: Log) -> None:
    """What was not read would be filled with random numbers, and the model would talk nonsense."""
    mismatched = [name for name, *_ in found["mismatched_keys"]]
    for what, names in (("lack", found["missing_keys"]), ("have in another shape", mismatched)):
        if names:
            raise ModelLoadError(f"the weights in {folder} {what} {len(names)} of the model's tensors: {_some(names)}")
    if found["unexpected_keys"]:
        log("warning", "tensors that the model does not use", tensors=_some(found["unexpected_keys"]))


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:_MAX_NAMES]) + (", ..." if len(ordered) > _MAX_NAMES else "")


def _configured_eos(model: PreTrainedModel) -> int | list[int] | None:
    generation = getattr(model.generation_config, "eos_token_id", None)
    ids: int | list[int] | None = model.config.get_text_config().eos_token_id if generation is None else generation
    return ids


def _context_length(model_config: PreTrainedConfig) -> int | None:
    length = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    return length if isinstance(length, int) else None
