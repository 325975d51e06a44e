"""A model's text folder, read as transformers reads it: tokenizer, named special tokens and chat templates.

The files say some things twice, for the sake of older versions; which of them counts is written down here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What the folder holds. `special_tokens` are those with a name, as templates see them (`bos_token`, ...)."""

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    templates: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path) -> TokenizerFiles:
        """Raises FileNotFoundError without tokenizer.json, ValueError for a file that is not what it should be."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer.json")
        config = _read_json(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:
            config |= _read_json(folder / "special_tokens_map.json")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as exc:  # what the library raises is a plain Exception
            raise ValueError(f"{path} is not a tokenizer: {exc}") from exc
        try:
            named = _named_tokens(config)
            _complete(tokenizer, config, [*named.values(), *_extra_tokens(config)])
            templates = _read_templates(folder, config)
        except UnicodeDecodeError as exc:
            raise ValueError(f"a chat template in {folder} is not UTF-8: {exc}") from exc
        except (AttributeError, KeyError, TypeError) as exc:
            raise ValueError(f"the tokenizer configuration in {folder} is not as it should be: {exc!r}") from exc
        return cls(tokenizer, {name: str(token) for name, token in named.items()}, templates)


def _read_json(path: Path) -> dict[str, Any]:
    """An empty object where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ValueError(f"{path} is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def _complete(tokenizer: Tokenizer, config: Mapping[str, Any], special: list[str | AddedToken]) -> None:
    """What the tokenizer gets from the other files: more tokens, never a limit of length or padding."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    listed = config.get("added_tokens_decoder") or {}
    tokenizer.add_tokens([_token(listed[number]) for number in sorted(listed, key=int)])
    tokenizer.add_special_tokens(special)
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens", False))


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str | AddedToken]:
    """The special tokens that have a name: the usual ones first, then the model's own."""
    own = [key for key, value in config.items() if key.endswith("_token") and _is_token(value) and key not in _NAMED]
    named = {key: _token(config[key]) for key in (*_NAMED, *own) if config.get(key) is not None}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        named |= {key: _token(value) for key, value in extra.items()}
    return named


def _extra_tokens(config: Mapping[str, Any]) -> list[str | AddedToken]:
    """The special tokens that have none."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    return [] if isinstance(extra, dict) else [_token(value) for value in extra]


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and "content" in value)


def _token(value: Any) -> str | AddedToken:
    """A token as the files write it: its text, or an object with its flags. Raises ValueError for anything else."""
    if isinstance(value, str):
        return value
    if not _is_token(value):
        raise ValueError(f"{value!r} in a tokenizer's files is no token")
    flags = {name: bool(value[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in value}
    return AddedToken(value["content"], special=bool(value.get("special", False)), **flags)


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files of their own count; else what the configuration holds, one template or a list of named ones."""
    extra = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files = {path.stem: path for path in extra}
    if (path := folder / "chat_template.jinja").is_file():
        files["default"] = path
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    template = config.get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, dict):
        return dict(template)
    return {entry["name"]: entry["template"] for entry in template}
