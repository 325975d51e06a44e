"""The log: one JSON object a line, the request's id bound, and never what a user wrote."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from structlog.contextvars import bound_contextvars

from inferq.worker import log

CANARY = "canary-91b2"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    log.setup("info", "json", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("inferq", "arq"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    structlog.reset_defaults()


def parsed(stream: io.StringIO) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_the_request_is_bound(lines: io.StringIO) -> None:
    logger = log.get_logger("queue")
    with bound_contextvars(request_id="r1"):
        logger.info("request.finished", tokens=3)
    logger.info("worker.ready")
    logger.debug("too fine")
    first, second = parsed(lines)
    assert (first["event"], first["request_id"], first["tokens"], first["role"]) == (
        "request.finished",
        "r1",
        3,
        "queue",
    )
    assert "request_id" not in second
    assert first["level"] == "info"
    assert first["timestamp"].endswith("Z")


def test_an_exception_is_logged_by_type_and_place(lines: io.StringIO) -> None:
    try:
        raise ValueError(CANARY)
    except ValueError as exc:
        log.get_logger("queue").error("request.raised", **log.cause(exc))
        logging.getLogger("somebody").error("it failed", exc_info=exc)
        logging.getLogger("somebody").exception("it failed again")
    assert CANARY not in lines.getvalue()
    assert [line["error"] for line in parsed(lines)] == ["ValueError"] * 3
    assert parsed(lines)[0]["raised_at"][-1].startswith("test_log.py:")


def test_arq_prints_no_arguments(lines: io.StringIO) -> None:
    for level in (logging.INFO, logging.ERROR):
        logging.getLogger("arq.worker").log(level, "%s(%r)", "generate", CANARY)
    assert lines.getvalue() == ""


def test_lines_for_people(lines: io.StringIO) -> None:
    stream = io.StringIO()
    log.setup("warning", "console", stream=stream)
    log.get_logger("queue").warning("redis.lost", error="ConnectionError")
    log.get_logger("queue").info("worker.ready")
    assert "redis.lost" in stream.getvalue()
    assert "worker.ready" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
