"""A tracker over a child that is up, and answers when a test has it answer."""

from __future__ import annotations

from inferq.engine.request import FinishReason
from inferq.engine.tracker import RequestTracker
from support.fake_engine import ChildModel, ListSink, admitted


class Setup:
    def __init__(self, max_requests: int = 8) -> None:
        self.child = ChildModel()
        self.tracker = RequestTracker(self.child.send, max_requests=max_requests)
        self.tracker.child_ready()

    def add(self, request_id: str, sink: ListSink | None = None, *, stop: str = "", fail_at: str = "") -> ListSink:
        sink = sink or ListSink()
        key = self.tracker.new_key()
        self.tracker.reserve(key, request_id, sink)
        self.tracker.launch(key, admitted(stop, fail_at))
        return sink

    def key(self, request_id: str) -> int:
        key = self.tracker.key_of(request_id)
        assert key is not None
        return key

    def step(self, *outputs: tuple[int, str, FinishReason | None]) -> None:
        for answer in self.child.drain():
            self.tracker.on_message(answer)
        self.tracker.on_step(self.child.step(list(outputs)))
        while self.child.ends:
            self.tracker.on_message(self.child.ends.pop(0))

    def settle(self) -> None:
        for answer in self.child.drain():
            self.tracker.on_message(answer)
