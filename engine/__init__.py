"""The asynchronous engine: requests in, token deltas out, usable without Redis. Importing this loads no torch."""

from .async_engine import AsyncInferenceEngine
from .config import EngineConfig
from .errors import (
    DuplicateRequestError,
    EngineCrashedError,
    EngineDeadError,
    EngineError,
    EngineOverloadedError,
    InvalidRequestError,
    RequestFailedError,
    SettingError,
)
from .request import Completion, Delta, FinishReason, SamplingParams
from .restart import RestartPolicy
from .stream import AsyncStream, Sink, StreamClosedError
from .tracker import RequestTracker

__all__ = [
    "AsyncInferenceEngine",
    "AsyncStream",
    "Completion",
    "Delta",
    "DuplicateRequestError",
    "EngineConfig",
    "EngineCrashedError",
    "EngineDeadError",
    "EngineError",
    "EngineOverloadedError",
    "FinishReason",
    "InvalidRequestError",
    "RequestFailedError",
    "RequestTracker",
    "RestartPolicy",
    "SamplingParams",
    "SettingError",
    "Sink",
    "StreamClosedError",
]
