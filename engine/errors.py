"""Every error that a user of the engine can meet, as one tree.

EngineError
├── ModelLoadError        the model, or memory for it, cannot be had; the engine never became ready
│   └── SettingError      because a setting asks for what there is not here
├── EngineDeadError       the engine's process or loop has ended for good; every consumer gets it
├── EngineCrashedError    this request killed the engine's process, twice while it ran alone; nobody else is touched
├── EngineOverloadedError the bound on waiting requests is reached
├── DuplicateRequestError a request of that id is in the engine
├── InvalidRequestError   this request cannot be served; nobody else is touched
│   └── SlowTemplateError the chat template takes too long over it
└── RequestFailedError    this request failed inside the engine; nobody else is touched
"""

from __future__ import annotations


class EngineError(Exception):
    """The root of everything that the engine raises to its user."""


class ModelLoadError(EngineError):
    """The model cannot be loaded, or does not fit; the message is one line that says what to change."""


class SettingError(ModelLoadError):
    """A setting asks for what there is not here. `setting` is its name in EngineConfig.

    It fails in the same way at each start, until somebody changes the setting or provides what it names. A device that
    is out of memory, a file that is damaged or a network that is down are none of these.
    """

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(message)
        self.setting = setting


class EngineDeadError(EngineError):
    """The engine's process or its loop has ended, and is not started again; what was in flight is lost."""


class EngineCrashedError(EngineError):
    """The engine's process died twice while this request alone ran in it."""


class EngineOverloadedError(EngineError):
    """As many requests are in the engine as it accepts."""


class DuplicateRequestError(EngineError):
    """A request of that id is in the engine."""


class InvalidRequestError(EngineError, ValueError):
    """This request cannot be served: the message names the field or the limit."""


class SlowTemplateError(InvalidRequestError):
    """The model's chat template takes too long over this request's messages."""


class RequestFailedError(EngineError):
    """This request failed inside the engine, by a fault of the engine's."""
