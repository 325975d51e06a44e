"""Signatures: what they cover, which keys count, and that no message or repr holds a secret."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferq.producer import SigningKeys
from inferq.producer.errors import InferqError, InvalidSigningKey, Unsigned
from inferq.producer.signing import keys_of_environment, read_keys

OLD = "old:" + "0123456789abcdef" * 2
NEW = "new:" + "fedcba9876543210" * 4
KEYS = SigningKeys.parse(NEW)
JOB = {"queue": "inferq:tiny:queue", "payload": b'{"f":"generate"}'}
texts = st.text(st.characters(codec="utf-8"), max_size=20)


def hmac_sha256(secret: bytes, message: bytes) -> str:
    """RFC 2104, written out."""
    block = (hashlib.sha256(secret).digest() if len(secret) > 64 else secret).ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block) + message).digest()
    return hashlib.sha256(bytes(byte ^ 0x5C for byte in block) + inner).hexdigest()


class TestSignature:
    def test_it_is_the_documented_one(self) -> None:
        """The example of docs/security.md, which a client in another language may test itself by."""
        signature = SigningKeys.parse(OLD).sign("job-1", **JOB)
        message = b'5:job-1,8:generate,17:inferq:tiny:queue,16:{"f":"generate"},'
        assert signature == "old." + hmac_sha256(b"0123456789abcdef0123456789abcdef", message)
        assert signature == "old.5a6e41315cb1baad3094eb5ffd1f0b12da1443579486484b9d15cdfd8ff40191"

    @given(texts, texts, st.binary(max_size=50))
    def test_what_was_signed_verifies(self, request_id: str, queue: str, payload: bytes) -> None:
        signature = KEYS.sign(request_id, queue=queue, payload=payload)
        KEYS.verify(signature, request_id, queue=queue, payload=payload)

    @given(texts, texts, texts, texts, texts, texts)
    def test_no_two_jobs_share_one(self, a: str, b: str, c: str, d: str, e: str, f: str) -> None:
        first = KEYS.sign(a, queue=b, payload=c.encode())
        second = KEYS.sign(d, queue=e, payload=f.encode())
        assert (first == second) == ((a, b, c) == (d, e, f))

    @given(st.lists(st.sampled_from([b"1", b":", b",", b"a", b"1:a,"]), max_size=6).map(b"".join), st.data())
    def test_no_byte_can_be_moved_into_another_field(self, whole: bytes, data: st.DataObject) -> None:
        def cut() -> tuple[str, str, bytes]:
            first, second = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
            return whole[:first].decode(), whole[first:second].decode(), whole[second:]

        one, other = cut(), cut()
        signature = KEYS.sign(one[0], queue=one[1], payload=one[2])
        if one == other:
            return
        with pytest.raises(Unsigned, match="does not match"):
            KEYS.verify(signature, other[0], queue=other[1], payload=other[2])

    @given(st.integers(0, 7), st.integers(0, len(JOB["payload"]) - 1))
    def test_one_flipped_bit_is_noticed(self, bit: int, at: int) -> None:
        payload = bytearray(JOB["payload"])
        payload[at] ^= 1 << bit
        with pytest.raises(Unsigned, match="does not match"):
            KEYS.verify(KEYS.sign("a", **JOB), "a", queue=JOB["queue"], payload=bytes(payload))

    def test_each_digit_of_it_counts(self) -> None:
        signature = KEYS.sign("a", **JOB)
        for at in range(len("new."), len(signature)):
            other = "0" if signature[at] != "0" else "1"
            with pytest.raises(Unsigned, match="does not match"):
                KEYS.verify(signature[:at] + other + signature[at + 1 :], "a", **JOB)

    @pytest.mark.parametrize(
        "altered",
        [
            str.upper,
            lambda good: good + "0",
            lambda good: good[:-1],
            lambda good: good + "\n",
            lambda good: " " + good,
            lambda good: good.replace(".", ":"),
            lambda good: good.removeprefix("new"),
            lambda good: good.removeprefix("new."),
            lambda good: "new." + "\N{ARABIC-INDIC DIGIT ONE}" * 64,
            lambda good: "\ufffd" * 69,
        ],
    )
    def test_what_is_none_is_refused(self, altered: Callable[[str], str]) -> None:
        with pytest.raises(Unsigned, match="none"):
            KEYS.verify(altered(KEYS.sign("a", **JOB)), "a", **JOB)

    def test_the_message_says_why(self) -> None:
        with pytest.raises(Unsigned, match="no signature"):
            KEYS.verify("", "a", **JOB)
        with pytest.raises(Unsigned, match="not known here: 'old'"):
            KEYS.verify(SigningKeys.parse(OLD).sign("a", **JOB), "a", **JOB)
        with pytest.raises(Unsigned, match="key 'new' does not match"):
            KEYS.verify(SigningKeys.parse("new:" + "x" * 32).sign("a", **JOB), "a", **JOB)


class TestRotation:
    def test_the_first_key_signs_and_all_verify(self) -> None:
        old, both, new = (SigningKeys.parse(text) for text in (OLD, f"{NEW},{OLD}", NEW))
        assert both.sign("a", **JOB) == new.sign("a", **JOB)
        both.verify(old.sign("a", **JOB), "a", **JOB)
        both.verify(new.sign("a", **JOB), "a", **JOB)
        with pytest.raises(Unsigned, match="not known"):
            new.verify(old.sign("a", **JOB), "a", **JOB)

    def test_one_keys_signature_is_not_anothers(self) -> None:
        both = SigningKeys.parse(f"{NEW},{OLD}")
        moved = both.sign("a", **JOB).replace("new.", "old.")
        with pytest.raises(Unsigned, match="key 'old' does not match"):
            both.verify(moved, "a", **JOB)


class TestKeys:
    @pytest.mark.parametrize("between", [",", " ", "\n", ", ", "\r\n", ",,", " ,\t"])
    def test_entries_stand_apart(self, between: str) -> None:
        keys = SigningKeys.parse(f"{between}{NEW}{between}{OLD}{between}")
        assert repr(keys) == "<SigningKeys new old>"

    def test_a_secret_may_have_a_colon(self) -> None:
        with_colon = SigningKeys.parse("a:" + "x:y=/+" * 6)
        with_colon.verify(with_colon.sign("a", **JOB), "a", **JOB)
        assert repr(with_colon) == "<SigningKeys a>"

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("", "without an id"),
            (" , ", "without an id"),
            ("hushhushhushhushhushhushhushhush", "signing key 1 is a secret without an id"),
            (f"{NEW},hushhushhushhushhushhushhushhush", "signing key 2 is a secret without an id"),
            (":hushhushhushhushhushhushhushhush", "the id of signing key 1 must have 1 to 32"),
            ("hush hush:hushhushhushhushhushhushhushhush", "without an id"),
            ("hu.sh:hushhushhushhushhushhushhushhush", "the id of signing key 1"),
            ("hush" * 9 + ":hushhushhushhushhushhushhushhush", "the id of signing key 1"),
            (f"{NEW} a:hush", "the secret of signing key 2 has 4 characters; it must have 32 to 1024"),
            ("a:" + "hush" * 257, "has 1028 characters"),
            ("a:", "has 0 characters"),
            ("hush:" + "hush\N{LATIN SMALL LETTER E WITH ACUTE}" * 8, "printable ASCII"),
            ("hush:" + "hush\0" * 8, "printable ASCII"),
            (f"{NEW},{OLD},new:hushhushhushhushhushhushhushhush", "signing key 3 has the id of an earlier one"),
        ],
    )
    def test_what_is_wrong_is_said_without_the_secret(self, text: str, problem: str) -> None:
        with pytest.raises(InvalidSigningKey, match=problem) as caught:
            SigningKeys.parse(text)
        assert isinstance(caught.value, InferqError) and isinstance(caught.value, ValueError)
        assert "hush" not in str(caught.value)
        assert caught.value.__cause__ is None

    def test_a_mapping_is_checked_too(self) -> None:
        with pytest.raises(InvalidSigningKey, match="there is no signing key"):
            SigningKeys({})
        with pytest.raises(InvalidSigningKey, match="has 5 characters"):
            SigningKeys({"a": "short"})
        with pytest.raises(InvalidSigningKey, match="commas"):
            SigningKeys({"a": "x,y" * 20})

    def test_no_way_to_print_them_shows_a_secret(self) -> None:
        keys = SigningKeys.parse(f"{NEW},{OLD}")
        shown = [repr(keys), str(keys), f"{keys}", f"{keys!r:>80}", repr([keys]), repr(copy.copy(keys))]
        assert not any("0123" in text or "fedc" in text for text in shown)
        assert not hasattr(keys, "__dict__")


class TestSources:
    def test_a_text_or_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        file.write_text(f"{NEW}\n{OLD}\n")
        assert repr(read_keys(None, file)) == "<SigningKeys new old>"
        assert repr(read_keys(OLD, None)) == "<SigningKeys old>"
        assert read_keys(None, None) is None
        assert read_keys("", None) is None
        with pytest.raises(InvalidSigningKey, match="not both"):
            read_keys(OLD, file)

    def test_a_file_that_holds_nothing_is_no_way_to_go_unsigned(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        for content in (b"", b"\n", b"\xff\xfe"):
            file.write_bytes(content)
            with pytest.raises(InvalidSigningKey):
                read_keys(None, file)
        with pytest.raises(InvalidSigningKey, match="cannot be read: No such file"):
            read_keys(None, tmp_path / "absent")
        with pytest.raises(InvalidSigningKey):
            read_keys(" ", None)

    def test_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("INFERQ_SIGNING_KEY", raising=False)
        monkeypatch.delenv("INFERQ_SIGNING_KEY_FILE", raising=False)
        assert keys_of_environment() is None
        monkeypatch.setenv("INFERQ_SIGNING_KEY", OLD)
        assert repr(keys_of_environment()) == "<SigningKeys old>"
        monkeypatch.setenv("INFERQ_SIGNING_KEY_FILE", "")
        assert repr(keys_of_environment()) == "<SigningKeys old>"
        (tmp_path / "keys").write_text(NEW)
        monkeypatch.setenv("INFERQ_SIGNING_KEY_FILE", str(tmp_path / "keys"))
        with pytest.raises(InvalidSigningKey, match="not both"):
            keys_of_environment()
        monkeypatch.setenv("INFERQ_SIGNING_KEY", "")
        assert repr(keys_of_environment()) == "<SigningKeys new>"
