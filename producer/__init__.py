"""inferq for web apps: enqueue generation jobs, stream their tokens, cancel them.

What stands in `__all__` is the whole promise. Importing it loads no model library.
"""

from .client import InferenceClient
from .commands import CancelOutcome
from .connection import connect
from .contract import Keys, decode_json, encode_json, new_request_id
from .dead_letters import DeadLetter
from .errors import (
    DuplicateRequest,
    EngineFailure,
    IdempotencyConflict,
    InferqError,
    InvalidRequest,
    InvalidSigningKey,
    JobLost,
    NotDurable,
    QueueFull,
    RedisUnavailable,
    RequestFailed,
    RequestRefused,
    RequestReplaced,
    UnknownModel,
    UnknownRequest,
    Unsigned,
    UnsuitableConnection,
)
from .events import (
    Delta,
    ErrorCode,
    Event,
    Failed,
    Finished,
    FinishReason,
    NoWorker,
    Prompt,
    Queued,
    Started,
    StreamEvent,
    Timings,
    Usage,
    decode_event,
)
from .fleet import Card, Fleet, ModelInfo, WorkerInfo
from .requests import GenerateRequest, Message, Sampling
from .results import Choice, Result, State, Status
from .signing import SigningKeys
from .stream import EventStream
from .sync import SyncEventStream, SyncInferenceClient

__all__ = [
    "CancelOutcome",
    "Card",
    "Choice",
    "DeadLetter",
    "Delta",
    "DuplicateRequest",
    "EngineFailure",
    "ErrorCode",
    "Event",
    "EventStream",
    "Failed",
    "FinishReason",
    "Finished",
    "Fleet",
    "GenerateRequest",
    "IdempotencyConflict",
    "InferenceClient",
    "InferqError",
    "InvalidRequest",
    "InvalidSigningKey",
    "JobLost",
    "Keys",
    "Message",
    "ModelInfo",
    "NoWorker",
    "NotDurable",
    "Prompt",
    "QueueFull",
    "Queued",
    "RedisUnavailable",
    "RequestFailed",
    "RequestRefused",
    "RequestReplaced",
    "Result",
    "Sampling",
    "SigningKeys",
    "Started",
    "State",
    "Status",
    "StreamEvent",
    "SyncEventStream",
    "SyncInferenceClient",
    "Timings",
    "UnknownModel",
    "UnknownRequest",
    "Unsigned",
    "UnsuitableConnection",
    "Usage",
    "WorkerInfo",
    "connect",
    "decode_event",
    "decode_json",
    "encode_json",
    "new_request_id",
]
