"""The part of torch.cuda that records graphs, for a machine without a card: it notes what happens on which stream.

`torch.cuda.graph` is torch's own, over these. As with torch, a pool of which all graphs are gone cannot be opened
again, and what is not allowed while a stream records ends the recording with an error of its own. In `breaks` versions
of torch a failed recording is believed to go on: from then on the allocator refuses to empty its cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


class Stream:
    """One by name."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda = cuda
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        self._cuda.happens(f"{self.name} waits for {other.name}")


class Graph:
    """A CUDAGraph: what is launched between begin and end is kept, and not run."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._launches: list[str] = []

    def capture_begin(self, pool: tuple[int, int], **_: Any) -> None:
        cuda = self._cuda
        users = cuda.pools.setdefault(pool, [])
        if users and not any(user() for user in users):
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        users.append(weakref.ref(self))
        cuda.happens(f"recording on {cuda.current.name}")
        cuda.recording, cuda.is_valid = self._launches, True

    def capture_end(self) -> None:
        cuda = self._cuda
        cuda.recording = None
        if not cuda.is_valid:
            cuda.believes_in_recording = cuda.breaks
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        cuda.happens("recorded")

    def replay(self) -> None:
        for launch in self._launches:
            self._cuda.launch(launch)


class FakeCuda:
    """`log` is all that happened, in order; a launch stands in it with its stream."""

    def __init__(self, *, breaks: bool = False) -> None:
        self.breaks = breaks
        self.default = Stream(self, "default")
        self.current = self.default
        self.log: list[str] = []
        self.pools: dict[tuple[int, int], list[weakref.ref[Graph]]] = {}
        self.recording: list[str] | None = None
        self.is_valid = True
        self.refusal: Exception = RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self.believes_in_recording = False
        self._sides = 0
        self._handles = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        stand_ins = {
            "CUDAGraph": lambda: Graph(self),
            "Stream": self._side_stream,
            "current_stream": lambda device: self.current,
            "set_stream": self._set_stream,
            "stream": self._on,
            "graph_pool_handle": self._handle,
            "empty_cache": self._empty_cache,
            "synchronize": lambda *_: self.happens("synchronize"),
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        return self

    def happens(self, what: str) -> None:
        self.log.append(what)

    def launch(self, name: str) -> None:
        if self.recording is None:
            self.happens(f"{name} on {self.current.name}")
        else:
            self.recording.append(name)

    def wait(self) -> None:
        """What the host does to read a result: not allowed while a stream records."""
        if self.recording is not None:
            self.is_valid = False
            raise self.refusal

    def _side_stream(self, device: torch.device) -> Stream:
        self._sides += 1
        return Stream(self, f"side {self._sides}")

    def _set_stream(self, stream: Stream) -> None:
        self.current = stream

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _handle(self) -> tuple[int, int]:
        self._handles += 1
        return (0, self._handles)

    def _empty_cache(self) -> None:
        if self.believes_in_recording:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
