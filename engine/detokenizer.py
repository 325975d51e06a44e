"""One request's output on its way from token ids to text that may be shown.

Half a character and a possible beginning of a stop string are held back; token ids never are. Knows tokens and text
of one request, and nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .decoders import IncrementalDecoder
from .request import FinishReason
from .stop_strings import StopMatcher


@dataclass(frozen=True, slots=True)
class Piece:
    """What one push added. `token_ids` are those used: a stop string drops the tokens after the one it ends in."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Replayed:
    """What tokens of an earlier run come to: the text that they had released, and how the output ends, if it has."""

    num_chars: int
    end: Piece | None


class OutputText:
    """Incremental detokenization and stop strings of one request; nothing may follow the piece that ends it.

    `stop_token_texts` holds the stop strings that are special tokens: with `include_stop`, they are shown although
    special tokens are not.
    """

    def __init__(
        self,
        decoder: IncrementalDecoder,
        matcher: StopMatcher,
        *,
        include_stop: bool,
        stop_token_texts: Mapping[int, str],
    ) -> None:
        self._decoder = decoder
        self._matcher = matcher
        self._include_stop = include_stop
        self._stop_token_texts = stop_token_texts

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> Piece:
        """Take the tokens of a step. A `finish_reason` of STOP means that the last of them is what stopped it.

        The piece has a finish reason if the output has ended: then it has all that was held back.
        """
        by_token = finish_reason is FinishReason.STOP
        num_shown = len(token_ids) - (by_token and not self._include_stop)
        parts = []
        for num_used, token_id in enumerate(token_ids[: max(num_shown, 0)], 1):
            text, stopped = self._next(self._decoder.push(token_id))
            parts.append(text)
            if stopped:
                return Piece("".join(parts), tuple(token_ids[:num_used]), FinishReason.STOP)
        if finish_reason is not None:
            text, stopped = self._matcher.feed(self._decoder.finish())
            parts += [text, self._matcher.release()]
            if by_token and self._include_stop and not stopped:
                parts.append(self._stop_token_texts.get(token_ids[-1], "") if token_ids else "")
            finish_reason = FinishReason.STOP if stopped else finish_reason
        return Piece("".join(parts), tuple(token_ids), finish_reason)

    def replay(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> Replayed:
        """Come to the state after `token_ids`, which were pushed before, in another process perhaps.

        A `finish_reason` means that they ended the output; a stop string in them does, too. The end that follows then
        has no tokens, and of the text what those had not released.
        """
        by_token = finish_reason is FinishReason.STOP
        shown = self.push(token_ids[:-1] if by_token else token_ids, None)
        if shown.finish_reason is not None:
            return Replayed(len(shown.text), Piece("", (), shown.finish_reason))
        if finish_reason is None:
            return Replayed(len(shown.text), None)
        end = self.push(token_ids[-1:] if by_token else (), finish_reason)
        return Replayed(len(shown.text), Piece(end.text, (), end.finish_reason))

    def flush(self) -> str:
        """End the output here, as an abort does: what was held back, without the beginning of a character."""
        return self._matcher.release() + self._decoder.pending()

    def _next(self, text: str) -> tuple[str, bool]:
        shown, stopped = self._matcher.feed(text)
        if stopped or not (pending := self._decoder.pending()) or not self._matcher.would_match(pending):
            return shown, stopped
        # The output ends with this match, so nothing can change the pending characters any more.
        more, stopped = self._matcher.feed(pending)
        return shown + more, stopped
