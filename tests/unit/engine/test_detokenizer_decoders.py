"""Incremental decoders against `tokenizers`' own decoding of the whole, for each kind of tokenizer there is."""

from __future__ import annotations

import functools

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from support import tokenizers as made
from tokenizers import Tokenizer, decoders

from inferq.engine.byte_fallback import MAX_RUN_BYTES, ByteFallbackDecoder
from inferq.engine.decoders import ByteLevelDecoder, ContextDecoder, IncrementalDecoder, decoder_factory


def gemma_like() -> Tokenizer:
    tokenizer = made.sentencepiece()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(made.METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def strips_two_spaces() -> Tokenizer:
    tokenizer = made.sentencepiece()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(made.METASPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 0)]
    )
    return tokenizer


def drops_letters() -> Tokenizer:
    """Tokens without any text, which yet end a run of bytes."""
    tokenizer = made.sentencepiece()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("a", ""), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def byte_level_in_a_sequence() -> Tokenizer:
    tokenizer = made.byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return tokenizer


def byte_level_with_more() -> Tokenizer:
    tokenizer = made.byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("zz", "z"), decoders.ByteLevel()])
    return tokenizer


KINDS = {
    "byte_level": (made.byte_level, ByteLevelDecoder),
    "byte_level_in_a_sequence": (byte_level_in_a_sequence, ByteLevelDecoder),
    "llama": (made.sentencepiece, ByteFallbackDecoder),
    "mistral": (functools.partial(made.sentencepiece, legacy=False), ByteFallbackDecoder),
    "gemma": (gemma_like, ByteFallbackDecoder),
    "drops_letters": (drops_letters, ByteFallbackDecoder),
    "strips_two_spaces": (strips_two_spaces, ByteFallbackDecoder),
    "word_piece": (made.word_piece, ContextDecoder),
    "metaspace": (made.metaspace, ContextDecoder),
    "suffixed": (made.suffixed, ContextDecoder),
    "undecorated": (made.undecorated, ContextDecoder),
}
#: In byte-level and byte-fallback vocabularies these make characters, halves of them, and bytes that are none.
_BYTES = st.sampled_from([*"a €é🦙\ufffd\n".encode(), 0x80, 0xC0, 0xE0, 0xED, 0xF4, 0xFF])


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind][0]()


def decoder_of(tokenizer: Tokenizer, *, skip: bool = True) -> IncrementalDecoder:
    return decoder_factory(tokenizer)(skip)


def decode(decoder: IncrementalDecoder, token_ids: list[int]) -> str:
    return "".join([decoder.push(token_id) for token_id in token_ids]) + decoder.finish()


@functools.cache
def byte_ids(kind: str) -> dict[int, int]:
    """The token of each byte."""
    tokenizer = tokenizer_of(kind)
    if KINDS[kind][1] is ByteFallbackDecoder:
        return {byte: tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}
    return {byte: tokenizer.token_to_id(char) for byte, char in chars.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_decoder_fits_the_tokenizer(kind: str) -> None:
    assert type(decoder_of(tokenizer_of(kind))) is KINDS[kind][1]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_decode_to_what_they_decode_to_together(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = tokenizer_of(kind)
    # Two past the vocabulary: a model's logits may be padded to more tokens than its tokenizer has.
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 1), max_size=30))
    text = decode(decoder_of(tokenizer, skip=skip), token_ids)
    assert text == tokenizer.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    "kind", ["byte_level", "byte_level_in_a_sequence", "llama", "mistral", "gemma", "drops_letters"]
)
@given(data=st.data(), skip=st.booleans())
def test_any_bytes_decode_to_what_they_decode_to_together(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = tokenizer_of(kind)
    tokens = st.one_of(_BYTES.map(byte_ids(kind).__getitem__), st.integers(0, tokenizer.get_vocab_size() - 1))
    token_ids = data.draw(st.lists(tokens, max_size=30))
    text = decode(decoder_of(tokenizer, skip=skip), token_ids)
    assert text == tokenizer.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@given(texts=st.lists(st.sampled_from([*made.CORPUS, "🦙", "ď €", " \ufffd", "\n"]), max_size=4))
def test_real_text_decodes_to_what_it_decodes_to_together(kind: str, texts: list[str]) -> None:
    tokenizer = tokenizer_of(kind)
    token_ids = tokenizer.encode("".join(texts)).ids
    assert decode(decoder_of(tokenizer), token_ids) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_what_was_given_out_stands_whatever_follows(kind: str, data: st.DataObject) -> None:
    """With what is pending it is the whole text so far, as long as no character is incomplete."""
    tokenizer = tokenizer_of(kind)
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=30))
    decoder = decoder_of(tokenizer)
    shown = ""
    for n, token_id in enumerate(token_ids, 1):
        shown += decoder.push(token_id)
        now = tokenizer.decode(token_ids[:n])
        assert now.startswith(shown)
        assert now.startswith(shown + decoder.pending()) or now.endswith("\ufffd")
    assert tokenizer.decode(token_ids).startswith(shown)


def test_an_emoji_comes_whole() -> None:
    tokenizer = tokenizer_of("byte_level")
    decoder = decoder_of(tokenizer)
    token_ids = tokenizer.encode("🦙" * 3).ids
    assert len(token_ids) == 12
    assert [decoder.push(token_id) for token_id in token_ids] == ["", "", "", "🦙"] * 3
    assert decoder.finish() == ""


def test_a_true_replacement_character_at_the_end_is_not_lost() -> None:
    for kind in ("byte_level", "llama"):
        tokenizer = tokenizer_of(kind)
        token_ids = tokenizer.encode("a\ufffd").ids
        assert decode(decoder_of(tokenizer), token_ids) == "a\ufffd"


def test_half_a_character_at_the_end_shows_as_the_whole_decodes_it() -> None:
    for kind in ("byte_level", "llama"):
        tokenizer = tokenizer_of(kind)
        token_ids = tokenizer.encode("a🦙").ids
        for length in range(len(token_ids) + 1):
            text = decode(decoder_of(tokenizer), token_ids[:length])
            assert text == tokenizer.decode(token_ids[:length])


def test_bytes_that_can_become_nothing_are_given_out_at_once() -> None:
    """Held back until a character follows, a run of them would cost the square of its length."""
    for kind in ("byte_level", "llama"):
        decoder = decoder_of(tokenizer_of(kind))
        shown = [decoder.push(byte_ids(kind)[0xFF]) for _ in range(100)]
        assert shown == ["\ufffd"] * 100


def test_characters_of_a_byte_run_are_pending_until_it_ends() -> None:
    tokenizer = tokenizer_of("llama")
    of_byte = byte_ids("llama")
    decoder = decoder_of(tokenizer)
    assert [decoder.push(of_byte[byte]) for byte in "€".encode()] == ["", "", ""]
    assert decoder.pending() == "€"
    assert decoder.push(of_byte[0xFF]) == "\ufffd" * 4, "as a whole the run is not UTF-8"
    assert decoder.pending() == ""

    decoder = decoder_of(tokenizer)
    assert [decoder.push(of_byte[byte]) for byte in "€".encode()] == ["", "", ""]
    assert decoder.push(tokenizer.token_to_id("a")) == "€a"


@given(num_characters=st.integers(MAX_RUN_BYTES // 3 + 1, 100), rest=st.lists(_BYTES, max_size=6))
def test_a_long_byte_run_is_given_out_as_it_comes(num_characters: int, rest: list[int]) -> None:
    """An invalid byte costs only what has not been given out, where the whole would lose every character."""
    of_byte = byte_ids("llama")
    decoder = decoder_of(tokenizer_of("llama"))
    shown = "".join([decoder.push(of_byte[byte]) for byte in ("€" * num_characters).encode()])
    assert shown == "€" * num_characters
    num_valid = max(n for n in range(len(rest) + 1) if is_utf8(rest[:n]))
    text = decode(decoder, [of_byte[byte] for byte in rest])
    assert text == bytes(rest[:num_valid]).decode() + "\ufffd" * (len(rest) - num_valid)


def is_utf8(values: list[int]) -> bool:
    try:
        bytes(values).decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize(("kind", "num_cut"), [("gemma", 0), ("llama", 1), ("strips_two_spaces", 2)])
def test_only_spaces_at_the_beginning_of_the_text_are_cut(kind: str, num_cut: int) -> None:
    tokenizer = tokenizer_of(kind)
    space, letter = tokenizer.token_to_id(made.METASPACE), tokenizer.token_to_id("a")
    for num_spaces in range(5):
        token_ids = [1, *[space] * num_spaces, letter, 1, space, space]
        text = decode(decoder_of(tokenizer), token_ids)
        assert text == " " * (num_spaces - num_cut) + "a  " == tokenizer.decode(token_ids)


@given(texts=st.lists(st.sampled_from(["a", "é", "€", "🦙", "\ufffd", "\ufffd" * 5, " z", "zz"]), max_size=16))
@example(texts=["\ufffd"] * 5 + ["€"])
@example(texts=["\ufffd"] * 14 + ["🦙"])
def test_an_unknown_decoder_that_splits_characters_is_right_for_valid_text(texts: list[str]) -> None:
    tokenizer = byte_level_with_more()
    decoder = decoder_of(tokenizer)
    assert type(decoder) is ContextDecoder
    token_ids = tokenizer.encode("".join(texts)).ids
    assume(token_ids)
    shown = [decoder.push(token_id) for token_id in token_ids]
    assert "".join(shown) + decoder.finish() == tokenizer.decode(token_ids)
    assert "".join(shown).count("\ufffd") <= "".join(texts).count("\ufffd")


@given(values=st.lists(_BYTES, min_size=1, max_size=60))
def test_an_unknown_decoder_shows_bytes_that_are_no_utf8_as_the_whole_does(values: list[int]) -> None:
    tokenizer = byte_level_with_more()
    token_ids = [byte_ids("byte_level")[value] for value in values]
    assert decode(decoder_of(tokenizer), token_ids) == tokenizer.decode(token_ids)
