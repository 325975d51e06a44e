"""Keeps the text of messages from becoming control tokens.

A user who writes `<|im_end|>` must not end a turn. While a chat is rendered, a stand-in character takes the place of
each control token's text in the messages, so that the only control tokens in the result are the template's own; the
stretches between those that have a stand-in are then tokenized as mere text. Where no message holds the text of a
control token, nothing is changed. Knows the tokenizer and plain values, not the template.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from tokenizers import AddedToken, Encoding, Tokenizer

from .errors import InvalidRequestError

#: Egyptian hieroglyphs and cuneiform: letters without case, which `repr`, JSON and every filter leave as they are.
_STAND_INS: Final = range(0x13000, 0x1342F), range(0x12000, 0x1239A)
#: So much text is given at once to what keeps the interpreter's lock: a few milliseconds.
BATCH_CHARS: Final = 64 * 1024
#: Tokens of this form are control tokens even where the tokenizer does not call them special.
_BRACKETED: Final = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)  # noqa: RUF001


class StandIns:
    """The stand-ins of one chat, whose values and template hold none of them: which character stands for which text."""

    def __init__(self, *avoid: Any) -> None:
        self._free = _absent_characters(avoid)
        self._by_text: dict[str, str] = {}
        self._chars: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._by_text)

    def stand_in(self, text: str) -> str:
        """The character that stands for `text`. Raises InvalidRequestError when there are no more."""
        char = self._by_text.get(text) or next(self._free, None)
        if char is None:
            raise InvalidRequestError("the messages hold too many different control tokens")
        self._by_text[text] = char
        self._chars.add(char)
        return char

    def appear_in(self, text: str) -> bool:
        return not self._chars.isdisjoint(text)

    def restore(self, text: str) -> str:
        """`text` with what the stand-ins stand for."""
        table = {ord(char): text for text, char in self._by_text.items()}
        parts = (text[begin : begin + BATCH_CHARS] for begin in range(0, len(text), BATCH_CHARS))
        return "".join(part.translate(table) for part in parts)

    def unescape(self, rendered: str) -> str:
        """Undo what JSON in ASCII makes of a stand-in."""
        if not self._chars or "\\u" not in rendered:
            return rendered
        escaped = {json.dumps(char)[1:-1]: char for char in self._chars}
        return re.sub("|".join(map(re.escape, escaped)), lambda found: escaped[found[0]], rendered)


def _absent_characters(values: Any) -> Iterator[str]:
    try:
        taken = set(json.dumps(values, ensure_ascii=False, check_circular=False, default=str))
    except (TypeError, ValueError) as exc:
        raise InvalidRequestError("messages hold a key or a value that is not JSON") from exc
    for code in itertools.chain(*_STAND_INS):
        if chr(code) not in taken:
            yield chr(code)


class ControlTokens:
    """The control tokens of a tokenizer. Safe to use from many threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        control = {i: t for i, t in added.items() if t.special or _BRACKETED.fullmatch(t.content)}
        self._tokenizer = tokenizer
        self._texts = {token_id: token.content for token_id, token in control.items()}
        texts = list(self._texts.values())
        self._pattern = _pattern_of(texts)
        self._beginnings = frozenset(text[:n] for text in texts for n in range(1, len(text)) if not text[0].isalnum())
        self._max_beginning = max(map(len, self._beginnings), default=0)
        # Knows no control token, but one token of its own that nobody can guess: what is encoded behind it is
        # encoded as it would be behind a control token, without the space that some tokenizers put at the beginning.
        self._plain = Tokenizer.from_str(tokenizer.to_str())
        self._plain.add_special_tokens(list(control.values()))
        self._plain.encode_special_tokens = True
        self._anchor = f"\uffff{secrets.token_hex(16)}\uffff"
        normalized = any(token.normalized for token in control.values())
        self._plain.add_tokens([AddedToken(self._anchor, normalized=normalized)])

    def mark(self, value: Any, stand_ins: StandIns) -> Any:
        """`value` as plain values (dict, list, str, int, float, bool, None), with stand-ins in all its strings.

        Raises InvalidRequestError for a value of any other kind.
        """
        if isinstance(value, str):
            return self._mark_text(str.__str__(value), stand_ins)
        if value is None or type(value) in (bool, int, float):
            return value
        if isinstance(value, Mapping):
            if not all(isinstance(key, str | int | float | None) for key in value):
                raise InvalidRequestError("messages hold a key that is not JSON")
            return {self.mark(key, stand_ins): self.mark(item, stand_ins) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, stand_ins) for item in value]
        raise InvalidRequestError(f"messages hold a value of type {type(value).__name__}, which is not JSON")

    def _mark_text(self, text: str, stand_ins: StandIns) -> str:
        text = self._pattern.sub(lambda found: stand_ins.stand_in(found[0]), text)
        # What only begins a control token could be completed by the next string, if the template joins the two.
        end = len(text.rstrip())
        for start in range(max(0, end - self._max_beginning), end):
            if text[start:end] in self._beginnings:
                return text[:start] + stand_ins.stand_in(text[start:end]) + text[end:]
        return text

    def encode(self, rendered: str, stand_ins: StandIns) -> list[int]:
        """The ids of a rendered chat: the template's control tokens, and all else as text.

        Raises TypeError for text that is not valid Unicode.
        """
        # Unlike `encode`, these let go of the interpreter's lock, so that a long chat stops no other thread.
        if not stand_ins:
            return list(self._tokenizer.encode_batch_fast([rendered], add_special_tokens=False)[0].ids)
        encoding = self._tokenizer.encode_batch([rendered], add_special_tokens=False)[0]
        all_ids: list[int] = encoding.ids
        ids: list[int] = []
        marked: list[str] = []  # the stretches that hold a stand-in, and in `places` where in `ids` their own ids go
        places: list[int] = []
        first, begin = 0, 0  # of the stretch since the last control token: its first token, its first character
        for n, start, end in [*self._found(rendered, all_ids, encoding), (len(all_ids), len(rendered), 0)]:
            stretch = rendered[begin:start]
            if stand_ins.appear_in(stretch):
                marked.append((self._anchor if begin else "") + stand_ins.restore(stretch))
                places.append(len(ids))
            else:
                ids += all_ids[first:n]
            ids += all_ids[n : n + 1]
            first, begin = n + 1, end
        return _inserted(ids, places, list(self._encode_plain(marked)))

    def _encode_plain(self, texts: list[str]) -> Iterator[list[int]]:
        """The ids of each text, as mere text."""
        # Many at once: one call for each would take longer than all else in a chat of thousands of messages. Not all
        # at once: what a call returns is freed in one go, and no other thread runs meanwhile.
        for batch in _batches(texts):
            encoded = self._plain.encode_batch_fast(batch, add_special_tokens=False)
            for encoding, text in zip(encoded, batch, strict=True):
                yield encoding.ids[text.startswith(self._anchor) :]

    def _found(self, rendered: str, ids: list[int], encoding: Encoding) -> Iterator[tuple[int, int, int]]:
        """The control tokens of a text: their places among its tokens, and where they begin and end in it."""
        for n, token_id in enumerate(ids):
            if token_id in self._texts:
                # The offsets of all tokens would be made in one go, which stops every other thread for long.
                span = encoding.token_to_chars(n)
                assert span is not None, "it is one of the encoding's own tokens"
                start, end = span
                # The unknown token is a control token too, but may be what the tokenizer makes of other text.
                if rendered[start:end].strip() == self._texts[token_id].strip():
                    yield n, start, end


def _batches(texts: list[str]) -> Iterator[list[str]]:
    """The texts in order, so many at once that they have BATCH_CHARS characters, or one that has more."""
    batch: list[str] = []
    num_chars = 0
    for text in texts:
        if batch and num_chars + len(text) > BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
        batch.append(text)
        num_chars += len(text)
    if batch:
        yield batch


def _inserted(ids: list[int], places: list[int], parts: list[list[int]]) -> list[int]:
    """`ids` with each part before the place that it belongs to."""
    result: list[int] = []
    begin = 0
    for place, part in zip(places, parts, strict=True):
        result += ids[begin:place]
        result += part
        begin = place
    return result + ids[begin:]


def _pattern_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern of the longest text that stands at a place, by their common beginnings: fast for thousands of them."""
    trie: dict[str, Any] = {}
    for text in texts:
        node = trie
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_alternatives(trie) or r"(?!)")


def _alternatives(trie: dict[str, Any]) -> str:
    branches = [re.escape(char) + _alternatives(child) for char, child in trie.items() if char]
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{joined})?" if "" in trie else joined
