"""Stop strings, found in text as it comes.

The automaton is the one of Aho and Corasick ("Efficient string matching", 1975): each character is looked at once,
however many stop strings there are, and its state is the longest suffix of the text that begins one of them, which
is exactly what must be held back. Knows text only, no tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator


class StopStrings:
    """The automaton of some stop strings; a state is a number, 0 where nothing has begun. Immutable once built."""

    def __init__(self, strings: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail: list[int] = [0]
        self.depth: list[int] = [0]  #: of a state: how many characters of some stop string have been seen
        self.match: list[int] = [0]  #: of a state: the length of the longest stop string that ends here, or 0
        for text in strings:
            self._insert(text)
        self._link()
        self._first = frozenset(self._next[0])

    def _insert(self, text: str) -> None:
        state = 0
        for char in text:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(0)
            state = self._next[state][char]
        self.match[state] = len(text)

    def _link(self) -> None:
        """Give each state the longest proper suffix of it that is a state too, shorter ones first."""
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            self.match[state] = self.match[state] or self.match[self._fail[state]]
            for char, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], char)
                states.append(child)

    def step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def can_skip(self, state: int, text: str) -> bool:
        """True when `text` leaves the state at 0 all along: the usual case, without a Python step a character."""
        return not state and self._first.isdisjoint(text)

    def walk(self, state: int, text: str) -> Iterator[int]:
        """The state after each character of `text`."""
        for char in text:
            state = self.step(state, char)
            yield state


class StopMatcher:
    """Goes over one output's text and lets through what can no longer be part of a stop string.

    The match that ends first counts; of several that end together, the longest. So the result depends on the text
    alone, not on how it was cut into pieces.
    """

    def __init__(self, strings: StopStrings, *, include: bool) -> None:
        self._strings = strings
        self._include = include
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """What may be shown now, and whether a stop string ended in `text`, which ends the output."""
        strings = self._strings
        if strings.can_skip(self._state, text):
            return text, False
        text = self._held + text
        num_held = len(self._held)
        for end, state in enumerate(strings.walk(self._state, text[num_held:]), num_held + 1):
            if strings.match[state]:
                self._state, self._held = 0, ""
                return text[: end if self._include else end - strings.match[state]], True
            self._state = state
        shown = len(text) - strings.depth[self._state]
        self._held = text[shown:]
        return text[:shown], False

    def would_match(self, text: str) -> bool:
        """Whether a stop string would end in `text` if that came next."""
        strings = self._strings
        if strings.can_skip(self._state, text):
            return False
        return any(strings.match[state] for state in strings.walk(self._state, text))

    def release(self) -> str:
        """What was held back: nothing follows, so it is no stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
