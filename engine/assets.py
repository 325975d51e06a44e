"""What of a model's folder is about text: where tokenizer and template are, and which tokens end a sequence.

The parent tokenizes without transformers, so it needs a tokenizer.json; a folder that has none gets one in the cache,
through transformers' own conversion.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

from tokenizers import Tokenizer

from .cache import build_once, cache_root
from .errors import ModelLoadError, SettingError
from .tokenizer_files import TokenizerFiles

#: What the system says of a path that names nothing usable.
_OF_THE_PATH: Final = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)
_TOKENIZER_FILES: Final = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")


def in_cache(cache_dir: str | None, find: Callable[[Path], Path]) -> Path:
    """What `find` returns for the cache folder, which it may make.

    Raises SettingError where that folder cannot be had or not be written, and what `find` raises.
    """
    try:
        root = cache_root(cache_dir)
    except RuntimeError as exc:
        where = "nobody is at home here" if cache_dir is None else f"nobody here has the home of {cache_dir}"
        raise SettingError("cache_dir", f"there is no cache folder: {where}") from exc
    try:
        return find(root)
    except OSError:
        _check_writable(root)  # only now: a cache that has everything may be read-only
        raise


def _check_writable(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=root):
            pass
    except OSError as exc:
        if is_lasting(exc):
            raise SettingError("cache_dir", f"{root} is no folder that can be written: {exc.strerror}") from exc


def is_lasting(error: OSError) -> bool:
    """Whether the path itself is at fault, and not a disk that is full or broken."""
    return error.errno in _OF_THE_PATH


def text_dir(folder: Path, cache: Path, *, trust_remote_code: bool) -> Path:
    """A folder with tokenizer.json and, where the model has them, tokenizer_config.json and chat_template.jinja.

    Raises ModelLoadError for a folder without a tokenizer that can be had as tokenizer.json.
    """
    if (folder / "tokenizer.json").is_file():
        return folder
    files = sorted({file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)})
    stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.sha256(repr((str(folder.resolve()), stamps)).encode()).hexdigest()[:12]

    def build(target: Path) -> None:
        _save_tokenizer(folder, target, trust_remote_code=trust_remote_code)

    return build_once(cache / "text" / f"{folder.name}-{key}", build)


def _save_tokenizer(folder: Path, target: Path, *, trust_remote_code: bool) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        tokenizer.save_pretrained(target)
    except MemoryError:
        raise
    except Exception as exc:
        raise ModelLoadError(f"{folder} has no tokenizer that transformers can load: {first_line(exc)}") from exc
    if not (target / "tokenizer.json").is_file():
        raise ModelLoadError(f"the tokenizer of {folder} cannot be had as a tokenizer.json")


def check_text(text_folder: Path) -> None:
    """Raises ModelLoadError for files that the parent could not read: here there is one line that says so."""
    try:
        TokenizerFiles.read(text_folder)
    except (OSError, ValueError) as exc:
        raise ModelLoadError(first_line(exc)) from exc


def eos_token_ids(generation_ids: int | Iterable[int] | None, text_folder: Path) -> list[int]:
    """Every id that ends a sequence: the generation config's, and the tokenizer's own. Sorted.

    Chat models often name the end of a turn in only one of the two places.
    """
    ids = {generation_ids} if isinstance(generation_ids, int) else set(generation_ids or ())
    if not all(type(i) is int for i in ids):
        raise ModelLoadError(f"config.json: eos_token_id must be a token id or a list of them, not {generation_ids!r}")
    own = _tokenizer_eos(text_folder)
    return sorted(ids if own is None else ids | {own})


def _tokenizer_eos(text_folder: Path) -> int | None:
    token = read_settings(text_folder / "tokenizer_config.json").get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str):
        return None
    path = text_folder / "tokenizer.json"
    found: int | None = Tokenizer.from_file(str(path)).token_to_id(token)
    return found


def read_settings(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is no such file. Raises ModelLoadError."""
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as exc:
        raise ModelLoadError(f"{path} is not JSON: {exc}") from exc
    if not isinstance(settings, dict):
        raise ModelLoadError(f"{path} holds no JSON object")
    return settings


def first_line(error: Exception) -> str:
    """What an error says, for a message of one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
