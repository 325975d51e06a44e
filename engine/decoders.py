"""Token ids to text, one at a time, without ever taking back a character.

Joined, what a decoder gives is what `tokenizers` gives for all the ids at once; its own DecodeStream is not that
exact: it fails once an invalid byte follows whole characters of a byte-fallback run, keeps a true U+FFFD at the end
for itself, and decodes a run of invalid bytes again for each. Which of three decoders fits is read from the
tokenizer's own description of its decoder. Knows nothing of stop strings and requests.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from typing import Any, Final, Protocol

from tokenizers import Tokenizer

from .byte_fallback import REPLACEMENT, ByteFallbackDecoder, ByteFallbackTable

MAX_UNIT_TOKENS: Final = 16
MAX_CHARACTER_TOKENS: Final = 4  # the longest character of UTF-8 has 4 bytes


class IncrementalDecoder(Protocol):
    """One output's way from ids to text."""

    def push(self, token_id: int) -> str:
        """The text that stands from now on, whatever follows."""

    def pending(self) -> str:
        """Whole characters after it that stand if the output ends here, but that a later token may change."""

    def finish(self) -> str:
        """All that is left at the end, with U+FFFD for what did not become a character."""


def decoder_factory(tokenizer: Tokenizer) -> Callable[[bool], IncrementalDecoder]:
    """A function from `skip_special_tokens` to a new decoder. It shares its tables among all outputs."""
    hidden = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    steps = _decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps if step["type"] != "Fuse"]
    if kinds == ["ByteLevel"]:
        table = _ByteLevelTable(tokenizer)
        return lambda skip: ByteLevelDecoder(table, hidden if skip else frozenset())
    if (fallback := ByteFallbackTable.of(tokenizer, steps)) is not None:
        return lambda skip: ByteFallbackDecoder(fallback, hidden if skip else frozenset())
    partial = not {"ByteLevel", "ByteFallback"}.isdisjoint(kinds)
    return lambda skip: ContextDecoder(tokenizer, hidden if skip else frozenset(), partial_characters=partial)


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The steps of the tokenizer's decoder, in order; none where it has no decoder."""
    if tokenizer.decoder is None:
        return []
    description = json.loads(tokenizer.decoder.__getstate__())
    return list(description["decoders"]) if description["type"] == "Sequence" else [description]


class _ByteLevelTable(dict[int, bytes]):
    """The bytes of a token, worked out when it is first met."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._token_of = tokenizer.id_to_token
        self._byte_of = _byte_of_char()

    def __missing__(self, token_id: int) -> bytes:
        token = self._token_of(token_id) or ""
        try:
            value = bytes(self._byte_of[char] for char in token)
        except KeyError:  # an added token that was never mapped: it stands for itself
            value = token.encode()
        self[token_id] = value
        return value


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


class ByteLevelDecoder:
    """For vocabularies of bytes: the text is their UTF-8 with one U+FFFD for each maximal part that is none.

    Python's decoder and Rust's lossy one divide invalid bytes alike (Unicode 15, section 3.9, "U+FFFD Substitution
    of Maximal Subparts"), and Python's holds back only what may still become a character: 3 bytes at most.
    """

    def __init__(self, table: _ByteLevelTable, hidden: frozenset[int]) -> None:
        self._table = table
        self._hidden = hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return "" if token_id in self._hidden else self._utf8.decode(self._table[token_id])

    def pending(self) -> str:
        return ""

    def finish(self) -> str:
        return self._utf8.decode(b"", True)


class ContextDecoder:
    """For every other decoder: the text of a token is what it adds behind the token before it.

    Exact where a token's text depends on no more than that: Metaspace, WordPiece, BPE with a suffix, no decoder at
    all. With `partial_characters` a token may end within a character: tokens are then taken together as long as their
    text ends in U+FFFD. At MAX_UNIT_TOKENS (a run of true U+FFFD, or of bytes that are no UTF-8) all but the last
    character is given out.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], *, partial_characters: bool) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._max_unit = MAX_UNIT_TOKENS if partial_characters else 1
        self._before: list[int] = []
        self._unit: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._hidden or self._tokenizer.id_to_token(token_id) is None:
            return ""
        self._unit.append(token_id)
        if self._max_unit > 1 and self._text().endswith(REPLACEMENT):
            return self._give(self._last_character_at()) if len(self._unit) == self._max_unit else ""
        return self._give(len(self._unit))

    def pending(self) -> str:
        return ""

    def finish(self) -> str:
        return self._text() if self._unit else ""

    def _give(self, num_tokens: int) -> str:
        held, self._unit = self._unit[num_tokens:], self._unit[:num_tokens]
        text = self._text()
        self._before, self._unit = self._unit, held
        return text

    def _last_character_at(self) -> int:
        """Where in the unit its last character begins: cut anywhere within one, the halves show a U+FFFD too many."""
        whole = self._decode(self._unit)
        for at in range(len(self._unit) - 1, len(self._unit) - 1 - MAX_CHARACTER_TOKENS, -1):
            if self._decode(self._unit[:at]) + self._decode(self._unit[at:]) == whole:
                return at
        return len(self._unit)

    def _text(self) -> str:
        before = self._decode(self._before) if self._before else ""
        return self._decode(self._before + self._unit)[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text
