"""Signatures of jobs, by keys that producers and workers share and Redis never sees.

A signature says that whoever submitted the job has the key: HMAC-SHA256 over the request id, the function, the queue
and the exact bytes of the payload. It stands in `:job` as `keyid.hexdigest`. Knows keys and signatures; what becomes
of a job that has none is the worker's business.
"""

from __future__ import annotations

import hmac
import os
import re
from pathlib import Path
from typing import Final, Self

from .contract import FUNCTION
from .errors import InvalidSigningKey, Unsigned

MIN_SECRET_CHARS: Final = 32
MAX_SECRET_CHARS: Final = 1024
_KEY_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,32}\Z")
_SECRET: Final = re.compile(r"[!-+\--~]+\Z")
_BETWEEN: Final = re.compile(r"[\s,]+")
_SIGNATURE: Final = re.compile(r"([A-Za-z0-9_-]{1,32})\.([0-9a-f]{64})\Z")
_HOW: Final = "each key is keyid:secret, and several stand with commas or white space between them"


class SigningKeys:
    """Keys by their ids. The first one signs; all of them verify, so that keys can be changed while jobs wait."""

    __slots__ = ("_secrets", "_signer")

    def __init__(self, secrets: dict[str, str]) -> None:
        """Raises InvalidSigningKey, which repeats no secret."""
        if not secrets:
            raise InvalidSigningKey(f"there is no signing key: {_HOW}")
        for number, (key_id, secret) in enumerate(secrets.items(), start=1):
            _check(f"signing key {number}", key_id, secret)
        self._secrets = {key_id: secret.encode() for key_id, secret in secrets.items()}
        self._signer = next(iter(self._secrets))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Keys as `new:secret,old:secret`. Raises InvalidSigningKey, which repeats nothing of the text."""
        secrets: dict[str, str] = {}
        for number, entry in enumerate(_BETWEEN.sub(" ", text).strip().split(" "), start=1):
            key_id, separator, secret = entry.partition(":")
            if not separator:
                raise InvalidSigningKey(f"signing key {number} is a secret without an id: {_HOW}")
            if key_id in secrets:
                raise InvalidSigningKey(f"signing key {number} has the id of an earlier one")
            secrets[key_id] = secret
        return cls(secrets)

    def __repr__(self) -> str:
        return f"<SigningKeys {' '.join(self._secrets)}>"

    def sign(self, request_id: str, *, queue: str, payload: bytes) -> str:
        """The signature of a job of that id, in the queue of that name."""
        return f"{self._signer}.{_digest(self._secrets[self._signer], request_id, queue, payload)}"

    def verify(self, signature: str, request_id: str, *, queue: str, payload: bytes) -> None:
        """Raises Unsigned, whose message says why, unless the signature is this job's by one of the keys."""
        if not signature:
            raise Unsigned("the job has no signature, and only signed jobs are taken here")
        match = _SIGNATURE.match(signature)
        if match is None:
            raise Unsigned("what the job has as its signature is none (keyid.hexdigest)")
        key_id, digest = match.groups()
        if key_id not in self._secrets:
            raise Unsigned(f"the job is signed by a key that is not known here: {key_id!r}")
        if not hmac.compare_digest(digest, _digest(self._secrets[key_id], request_id, queue, payload)):
            raise Unsigned(
                f"the signature by the key {key_id!r} does not match: the job's id, queue or payload is another than "
                "what was signed, or the key's secret is"
            )


def read_keys(text: str | None, file: Path | None) -> SigningKeys | None:
    """The keys of a text or of a file; None if neither is given. Raises InvalidSigningKey."""
    if text and file:
        raise InvalidSigningKey("give INFERQ_SIGNING_KEY or INFERQ_SIGNING_KEY_FILE, not both")
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as exc:
            raise InvalidSigningKey(f"INFERQ_SIGNING_KEY_FILE: {file} cannot be read: {exc.strerror}") from None
        except UnicodeDecodeError:
            raise InvalidSigningKey(f"INFERQ_SIGNING_KEY_FILE: {file} is not a text") from None
        return SigningKeys.parse(text)
    return SigningKeys.parse(text) if text else None


def keys_of_environment() -> SigningKeys | None:
    """Those of $INFERQ_SIGNING_KEY, or of the file $INFERQ_SIGNING_KEY_FILE. Raises InvalidSigningKey."""
    file = os.environ.get("INFERQ_SIGNING_KEY_FILE")
    return read_keys(os.environ.get("INFERQ_SIGNING_KEY"), Path(file) if file else None)


def _check(name: str, key_id: str, secret: str) -> None:
    """What is wrong is told by the key's place: an id may be a part of a secret that was given without one."""
    if not _KEY_ID.match(key_id):
        raise InvalidSigningKey(
            f"the id of {name} must have 1 to 32 characters, each a letter, a digit, _ or -: {_HOW}"
        )
    if not MIN_SECRET_CHARS <= len(secret) <= MAX_SECRET_CHARS:
        raise InvalidSigningKey(
            f"the secret of {name} has {len(secret)} characters; it must have {MIN_SECRET_CHARS} to "
            f"{MAX_SECRET_CHARS}, such as `openssl rand -hex 32` gives"
        )
    if not _SECRET.match(secret):
        raise InvalidSigningKey(f"the secret of {name} must be printable ASCII without spaces and commas")


def _digest(secret: bytes, request_id: str, queue: str, payload: bytes) -> str:
    """Each part is a netstring, so that no part's end can pass for another's beginning."""
    mac = hmac.new(secret, digestmod="sha256")
    for part in (request_id.encode(), FUNCTION.encode(), queue.encode(), payload):
        mac.update(b"%d:" % len(part))
        mac.update(part)
        mac.update(b",")
    return mac.hexdigest()
