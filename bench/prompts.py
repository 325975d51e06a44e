"""The 64 prompts of the engine's benchmarks: fixed, so that figures of different days and of peers can be compared.

They are chats of one user turn, 43 tokens on average in SmolLM2's template (its system turn included).
"""

from __future__ import annotations

from typing import Final

_SUBJECTS: Final = (
    "a lighthouse keeper",
    "the tides of the sea",
    "a slow train at night",
    "bread baked in a village",
    "the roots of an old oak",
    "a map with no names",
    "the first snow of a year",
    "a market by the river",
    "bees in a walled garden",
    "the sound of a cello",
    "a clock that runs backwards",
    "the light of distant stars",
    "a bridge made of stone",
    "salt carried over mountains",
    "a letter that came late",
    "the smell of rain on dust",
)
_TASKS: Final = (
    "Write two sentences about {}.",
    "Explain to a child what is special about {}.",
    "Name three things that go with {}, and why.",
    "Tell a short story that begins with {}.",
)

#: One user turn each.
PROMPTS: Final[tuple[str, ...]] = tuple(task.format(subject) for task in _TASKS for subject in _SUBJECTS)


def chats() -> list[list[dict[str, str]]]:
    """The prompts as lists of messages."""
    return [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
