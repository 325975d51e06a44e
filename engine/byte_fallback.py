"""Byte-fallback vocabularies, as SentencePiece makes them: pieces of text, and a token for each byte.

A character without a piece comes as a run of byte tokens, whose text is only sure when the run has ended.
"""

from __future__ import annotations

import codecs
import re
from typing import Any, Final

from tokenizers import Tokenizer

REPLACEMENT: Final = "\ufffd"
#: Byte-fallback runs are held back up to here: 32 emoji.
MAX_RUN_BYTES: Final = 128
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ByteFallbackTable(dict[int, int | str | None]):
    """The byte of a byte token, the text of any other, None for an id of no token; worked out when first met."""

    def __init__(self, tokenizer: Tokenizer, replacements: list[tuple[str, str]], lead: tuple[str, int]) -> None:
        super().__init__()
        self._token_of = tokenizer.id_to_token
        self._replacements = replacements
        self.lead = lead  #: a character, and how many of it are cut off at the beginning of the text

    @classmethod
    def of(cls, tokenizer: Tokenizer, steps: list[dict[str, Any]]) -> ByteFallbackTable | None:
        """None unless the steps are Replace ..., ByteFallback, Fuse and perhaps a Strip on the left."""
        lead = (" ", 0)
        if steps and steps[-1]["type"] == "Strip" and steps[-1]["stop"] == 0:
            lead = (steps[-1]["content"], steps[-1]["start"])
            steps = steps[:-1]
        if [step["type"] for step in steps[-2:]] != ["ByteFallback", "Fuse"]:
            return None
        replacements = []
        for step in steps[:-2]:
            if step["type"] != "Replace" or "String" not in step["pattern"]:
                return None
            replacements.append((step["pattern"]["String"], step["content"]))
        return cls(tokenizer, replacements, lead)

    def __missing__(self, token_id: int) -> int | str | None:
        token = self._token_of(token_id)
        self[token_id] = value = None if token is None else self._piece(token)
        return value

    def _piece(self, token: str) -> int | str:
        for old, new in self._replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token)
        return int(byte[1], 16) if byte else token


class ByteFallbackDecoder:
    """For SentencePiece-like vocabularies: a run of byte tokens is UTF-8 as a whole, or each byte of it is U+FFFD.

    So whole characters stay pending until their run ends. A run of more than MAX_RUN_BYTES is given out as it comes:
    a stream must not stall for the sake of an invalid byte that hardly ever follows, and which then costs only the
    characters after it, where `tokenizers` would replace the whole run.
    """

    def __init__(self, table: ByteFallbackTable, hidden: frozenset[int]) -> None:
        self._table = table
        self._hidden = hidden
        self._lead, self._num_lead = table.lead
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._run = ""  #: its characters that are not given out
        self._num_bytes = 0  #: of the run that are not given out
        self._broken = False
        self._long = False

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        piece = self._table[token_id]
        if isinstance(piece, int):
            return self._strip(self._push_byte(piece))
        return "" if piece is None else self._strip(self._end_run() + piece)

    def pending(self) -> str:
        return self._without_lead(self._run)

    def finish(self) -> str:
        return self._strip(self._end_run())

    def _push_byte(self, byte: int) -> str:
        self._num_bytes += 1
        if not self._broken:
            try:
                self._run += self._utf8.decode(bytes((byte,)))
            except UnicodeDecodeError:
                self._broken = True
        if self._broken:
            self._run = ""
            num_bytes, self._num_bytes = self._num_bytes, 0
            return REPLACEMENT * num_bytes
        self._long = self._long or self._num_bytes > MAX_RUN_BYTES
        if not self._long:
            return ""
        text, self._run = self._run, ""
        self._num_bytes = len(self._utf8.getstate()[0])
        return text

    def _end_run(self) -> str:
        incomplete = self._utf8.getstate()[0]
        text = REPLACEMENT * self._num_bytes if incomplete or self._broken else self._run
        self._utf8.reset()
        self._run, self._num_bytes = "", 0
        self._broken = self._long = False
        return text

    def _strip(self, text: str) -> str:
        rest = self._without_lead(text)
        if text:
            self._num_lead = 0 if rest else self._num_lead - len(text)
        return rest

    def _without_lead(self, text: str) -> str:
        num_stripped = 0
        while num_stripped < self._num_lead and text[num_stripped : num_stripped + 1] == self._lead:
            num_stripped += 1
        return text[num_stripped:]
