"""Who may have killed the child: the rule by which one request ends for it and nobody else does.

Whoever may have been in a step when the child died is a suspect. Suspects then run one at a time, alone. One that gets
so far as SAFE_TOKENS is cleared; one that was alone at two deaths is guilty. Plain policy over keys: knows neither
requests nor the child.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

#: So many tokens, generated alone, clear a suspect.
SAFE_TOKENS: Final = 32
#: One death can come from outside. A request that was alone at two is taken for their cause.
GUILTY_DEATHS: Final = 2


@dataclass(slots=True)
class _Record:
    deaths_alone: int = 0
    num_tokens: int = 0  #: generated since it was last accused


class Suspects:
    """The suspects by key; empty, and true to nobody's disadvantage, until a child dies."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[int]:
        return iter(self._records)

    def accuse(self, present: Collection[int], *, alone: bool) -> int | None:
        """The child has died, and each of `present` may have been in its step; `alone` if there was but that one.

        Returns the one that is guilty, which is no suspect any more, or None.
        """
        for key in present:
            record = self._records.setdefault(key, _Record())
            record.num_tokens = 0
            record.deaths_alone += alone
            if record.deaths_alone >= GUILTY_DEATHS:
                del self._records[key]
                return key
        return None

    def credit(self, key: int, num_tokens: int) -> bool:
        """Tokens were generated for that request. True if they have cleared it."""
        if (record := self._records.get(key)) is None:
            return False
        record.num_tokens += num_tokens
        if record.num_tokens < SAFE_TOKENS:
            return False
        del self._records[key]
        return True

    def forget(self, key: int) -> bool:
        """The request has ended, and no step has it. False if it was no suspect."""
        return self._records.pop(key, None) is not None

    def next(self, is_able: Callable[[int], bool]) -> int | None:
        """Who of those that are able to run is to run alone: first the one with a death against it, then by age."""
        able = filter(is_able, self._records)
        return min(able, key=lambda key: (-self._records[key].deaths_alone, key), default=None)
