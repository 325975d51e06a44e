"""Everything about a worker that can be set: one frozen value, read once from flags and `INFERQ_*` variables.

Knows names, limits and defaults; knows nothing of how they are used. What follows from a setting is a property here,
so that no other file derives it again.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import secrets
import shlex
import shutil
import socket
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, CliSuppress, SettingsConfigDict, SettingsError

from inferq.engine.config import EngineConfig
from inferq.engine.restart import RestartPolicy
from inferq.producer.contract import MODEL_PATTERN, Keys, served_name
from inferq.producer.signing import SigningKeys, read_keys

PROGRAM = "inferq-worker"
#: Variables that hold a secret, or may.
SECRETS = ("INFERQ_REDIS_URL", "INFERQ_SIGNING_KEY")
_KEY_FLAG = "--signing-key"


class InvalidSettings(Exception):
    """A flag or variable is unknown or out of its range; the message is one line that names it and its limit."""


def _new_worker_id() -> str:
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64]
    return f"{host}-{os.getpid()}-{secrets.token_hex(3)}"


class WorkerSettings(BaseSettings):
    """Take generation jobs from Redis and run them on one model.

    Each flag is also an environment variable: --max-num-seqs is INFERQ_MAX_NUM_SEQS. A flag wins. INFERQ_SIGNING_KEY
    has none, since flags can be read by everybody on the machine.
    """

    model_config = SettingsConfigDict(
        env_prefix="INFERQ_",
        env_ignore_empty=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        cli_prog_name=PROGRAM,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_exit_on_error=False,
        cli_avoid_json=True,
        cli_hide_none_type=True,
    )

    # What is served
    model: str = Field("demo", min_length=1, description="demo, a folder, or a Hugging Face id")
    served_model_name: str | None = Field(
        None, pattern=MODEL_PATTERN, description="name that producers ask for; default: the last part of --model"
    )
    revision: str | None = Field(None, description="revision of the Hugging Face repository")
    trust_remote_code: bool = Field(False, description="run code that comes with the model")
    cache_dir: str | None = Field(None, description="folder for converted models; default: the user's cache folder")

    # The engine
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="type that is computed in")
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, or a CUDA device such as cuda:0"
    )
    attention: Literal["auto", "flash", "triton", "torch"] = Field("auto", description="attention backend")
    enforce_eager: bool = Field(False, description="no CUDA graphs")
    async_scheduling: bool | None = Field(
        None, description="plan a step while the one before it runs; default: on a CUDA device"
    )
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads of the engine; default: all CPUs but one")
    max_model_len: int | None = Field(
        None, ge=1, description="longest prompt + output, in tokens; default: the model's"
    )
    max_num_seqs: int = Field(64, ge=1, le=4096, description="requests that run at once: the worker's slots")
    max_num_batched_tokens: int = Field(2048, ge=1, description="tokens that one engine step computes at most")
    max_waiting: int = Field(1024, ge=1, description="requests that may wait inside the engine")
    kv_cache_bytes: ByteSize | None = Field(None, ge=1, description="memory of the KV cache, as in 4GiB")
    num_blocks: int | None = Field(None, ge=1, description="blocks of the KV cache; overrides its bytes")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="part of the GPU's memory that may be used")
    step_timeout_seconds: float = Field(
        120.0, gt=0, le=86_400, description="silence after which a step of the engine counts as hung"
    )
    max_engine_restarts: int = Field(
        6, ge=0, le=1000, description="restarts without a token, within ten minutes, before the worker gives up"
    )
    engine_command: str | None = Field(None, min_length=1, description="command of the engine's process")

    # Redis
    redis_url: str = Field(
        "redis://localhost:6379",
        pattern=r"^(rediss?(\+sentinel)?|unix)://",
        repr=False,
        description="redis, rediss or unix URL, or redis+sentinel://host:port,host:port/service",
    )
    prefix: str = Field("inferq", pattern=MODEL_PATTERN, description="first part of every key's name")
    embedded: bool = Field(False, description="start a Valkey server for as long as this worker lives")
    embedded_dir: Path | None = Field(
        None, description="folder of the embedded server's data; default: a temporary one"
    )

    # Who may submit
    signing_key: CliSuppress[SecretStr | None] = Field(None, description="keyid:secret of who may submit jobs")
    signing_key_file: Path | None = Field(
        None, description="file of keyid:secret lines; then only jobs that one of these keys has signed are taken"
    )

    # The queue
    accept_plain_jobs: bool = Field(True, description="take jobs that were enqueued with arq alone")
    max_backlog: int = Field(10_000, ge=1, description="waiting jobs that producers may pile up")
    max_attempts: int = Field(3, ge=1, le=100, description="workers that a job may lose before it is given up")
    lease_seconds: float = Field(
        5.0, ge=0.5, le=300, description="after this time others go on with a dead worker's jobs"
    )
    poll_seconds: float | None = Field(
        None, ge=0.05, le=60, description="fallback poll; default: 0.5, or 2 without plain jobs"
    )
    heartbeat_seconds: float = Field(5.0, ge=0.1, le=60, description="between two signs of life")
    drain_seconds: float = Field(
        30.0, ge=0, le=3600, description="running requests may finish after SIGTERM; then they go to another worker"
    )
    max_unsent_tokens: int = Field(1024, ge=1, description="tokens of one request that may wait for Redis")
    worker_id: str = Field(
        default_factory=_new_worker_id,
        pattern=MODEL_PATTERN,
        description="name of this worker; default: host, pid and a random part",
    )

    # The log
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is printed")
    log_format: Literal["json", "console"] = Field("json", description="json for machines, console for people")

    @field_validator("engine_command")
    @classmethod
    def _names_a_program(cls, value: str | None) -> str | None:
        if value is not None:
            arguments = shlex.split(value)
            if not arguments or shutil.which(arguments[0]) is None:
                raise ValueError("its first word is no program that can be run here")
        return value

    @model_validator(mode="after")
    def _one_server(self) -> WorkerSettings:
        if self.embedded_dir is not None and not self.embedded:
            raise ValueError("--embedded-dir needs --embedded")
        return self

    @model_validator(mode="after")
    def _readable_keys(self) -> WorkerSettings:
        _ = self.signing_keys
        return self

    @cached_property
    def signing_keys(self) -> SigningKeys | None:
        """The keys of which one must have signed a job; None takes every job."""
        text = None if self.signing_key is None else self.signing_key.get_secret_value()
        return read_keys(text, self.signing_key_file)

    @property
    def keys(self) -> Keys:
        return Keys(self.served_model_name or served_name(self.model), self.prefix)

    @property
    def lease_ms(self) -> int:
        return int(self.lease_seconds * 1000)

    @property
    def renew_seconds(self) -> float:
        """Two renewals may fail before a lease lapses."""
        return self.lease_seconds / 3

    @property
    def claim_seconds(self) -> float:
        """Between two looks at the queue when no bell rings; plain arq producers ring none."""
        if self.poll_seconds is not None:
            return self.poll_seconds
        return 0.5 if self.accept_plain_jobs else 2.0

    @property
    def heartbeat_ms(self) -> int:
        return int(self.heartbeat_seconds * 1000)

    @property
    def heartbeat_ttl_ms(self) -> int:
        """So long a worker that was killed stays on the list."""
        return 3 * self.heartbeat_ms

    @property
    def engine_arguments(self) -> tuple[str, ...] | None:
        """The engine's command, split as a shell would; None is the engine's own."""
        return None if self.engine_command is None else tuple(shlex.split(self.engine_command))

    @property
    def restart_policy(self) -> RestartPolicy:
        """How the engine's process is started again."""
        return RestartPolicy(max_restarts=self.max_engine_restarts, step_timeout_seconds=self.step_timeout_seconds)

    def engine_config(self) -> EngineConfig:
        return EngineConfig(**{field.name: getattr(self, field.name) for field in fields(EngineConfig)})


def read_settings(argv: Sequence[str]) -> WorkerSettings:
    """The settings of flags, environment and defaults. `--embedded` wins over an INFERQ_REDIS_URL.

    Raises InvalidSettings; SystemExit(0) after `--help`.
    """
    if any(argument.partition("=")[0].replace("_", "-") == _KEY_FLAG for argument in argv):
        raise InvalidSettings(
            f"{_KEY_FLAG}: a flag can be read by everybody on the machine: set INFERQ_SIGNING_KEY, or give "
            "--signing-key-file"
        )
    try:
        source = CliSettingsSource[WorkerSettings](WorkerSettings, formatter_class=_Help)
        settings = CliApp.run(WorkerSettings, cli_args=list(argv), cli_settings_source=source)
    except ValidationError as exc:
        raise InvalidSettings("; ".join(_line(error) for error in exc.errors(include_url=False))) from None
    except SettingsError as exc:
        raise InvalidSettings(_without_values(str(exc).removeprefix("error parsing CLI: "))) from None
    if settings.embedded and any(argument.partition("=")[0] == "--redis-url" for argument in argv):
        raise InvalidSettings("give --embedded or --redis-url, not both")
    return settings


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help without the defaults that say nothing to a reader."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return super()._fill_text(inspect.cleandoc(text), width, indent)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return re.sub(r" \(default: None\)| \(default factory: \w+\)", "", action.help or "")


def _without_values(message: str) -> str:
    """Of flags that nobody knows, the names alone: a value may be a password behind a misspelled flag."""
    text, separator, arguments = message.partition("unrecognized arguments: ")
    names = [word.partition("=")[0] for word in arguments.split() if word.startswith("--")]
    return text + separator + (" ".join(names) or "words without a flag") if separator else message


def _line(error: Any) -> str:
    """A flag and what is wrong with it, never its value: that may be a password."""
    names = [flag_of(str(part)) for part in error["loc"][:1]]
    return ": ".join([*names, error["msg"].removeprefix("Value error, ")])
