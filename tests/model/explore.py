"""Every state that can be reached, breadth first; the first one that is wrong, and the shortest way to it."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from model.actions import Config, Model, Step
from model.mutations import NONE
from model.properties import END_IN_REACH, is_goal, step_violations, violations
from model.scripts import Broken
from model.state import Entry, State


@dataclass
class Search:
    """What was found. `trace` is the way to the violation, or to the state from which no end is within reach."""

    num_states: int
    num_steps: int
    complete: bool
    violated: str | None = None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        size = f"{self.num_states} states, {self.num_steps} steps{'' if self.complete else ', cut off'}"
        if self.violated is None:
            return size
        return "\n".join([f"violated: {self.violated} ({size})", *self.trace])


class _Graph:
    """States by number, in the order in which they were found, and the steps of work between them."""

    def __init__(self, first: State) -> None:
        self.numbers = {first: 0}
        self.states: list[State] = [first]
        self.parents = array("l", [-1])
        self.sources, self.targets = array("l"), array("l")

    def add(self, state: State, parent: int) -> tuple[int, bool]:
        number = self.numbers.setdefault(state, len(self.states))
        if number < len(self.states):
            return number, False
        self.states.append(state)
        self.parents.append(parent)
        return number, True

    def stuck(self) -> int | None:
        """The first state from which work leads to no end."""
        before: list[list[int]] = [[] for _ in self.states]
        for source, target in zip(self.sources, self.targets, strict=True):
            before[target].append(source)
        good = bytearray(len(self.states))
        todo = [number for number, state in enumerate(self.states) if is_goal(state)]
        for number in todo:
            good[number] = 1
        while todo:
            for number in before[todo.pop()]:
                if not good[number]:
                    good[number] = 1
                    todo.append(number)
        number = good.find(0)
        return None if number < 0 else number


@contextmanager
def _without_collector() -> Iterator[None]:
    """States are tuples without cycles, and going through all of them again and again takes most of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def explore(config: Config, broken: Broken = NONE, *, max_states: int = 10_000_000) -> Search:
    with _without_collector():
        return _explore(Model(config, broken), max_states)


def _explore(model: Model, max_states: int) -> Search:
    config = model.config
    graph = _Graph(model.initial())
    done = num_steps = 0

    def found(what: str, number: int, last: Step | None = None) -> Search:
        return Search(len(graph.states), num_steps, False, what, _trace(model, graph, number, last))

    while done < len(graph.states) < max_states:
        state = graph.states[done]
        for step, after in model.steps(state):
            num_steps += 1
            for what in step_violations(step, config):
                return found(what, done, step)
            number, is_new = graph.add(after, done)
            if step.works:
                graph.sources.append(done)
                graph.targets.append(number)
            if is_new:
                for what in violations(after, config):
                    return found(what, number)
        done += 1
    if done < len(graph.states):
        return Search(len(graph.states), num_steps, complete=False)
    stuck = graph.stuck()
    if stuck is not None:
        return found(END_IN_REACH, stuck)
    return Search(len(graph.states), num_steps, complete=True)


def _trace(model: Model, graph: _Graph, number: int, last: Step | None) -> tuple[str, ...]:
    path = []
    while number >= 0:
        path.append(graph.states[number])
        number = graph.parents[number]
    path.reverse()
    lines = [f"at first    {_shown(path[0])}"]
    for before, after in pairwise(path):
        step = next(step for step, reached in model.steps(before) if reached == after)
        lines.append(f"{_named(step)}\n            {_shown(after)}")
    if last is not None:
        lines.append(f"{_named(last)}\n            {_told(last.after)}")
    return tuple(lines)


def _named(step: Step) -> str:
    who = f" by worker {step.who}" if step.who >= 0 else ""
    answer = f": {step.reply}" if step.reply is not None else ""
    return f"-> job {step.number}: {step.name}{who}{answer}"


def _shown(state: State) -> str:
    return "\n            ".join(map(_told, state.worlds))


def _told(value: object) -> str:
    """Of a named tuple, what is not as it was made."""
    if isinstance(value, Entry):
        return f"{value.epoch}-{value.number} {value.kind} {value.index}+{value.count}"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        defaults = type(value)._field_defaults
        fields = value._asdict().items()
        shown = ", ".join(f"{name}={_told(each)}" for name, each in fields if each != defaults.get(name, ...))
        return f"{type(value).__name__}({shown})"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_told, value))}]"
    return str(value)
