"""The waits between tries."""

from __future__ import annotations

from inferq.producer.backoff import Backoff


def test_it_doubles_up_to_its_bound_with_jitter() -> None:
    backoff = Backoff(first=0.1, bound=0.4)
    for step in (0.1, 0.2, 0.4, 0.4):
        assert step / 2 <= backoff.next() <= step
    backoff.reset()
    assert 0.05 <= backoff.next() <= 0.1
