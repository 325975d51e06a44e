"""One request's output: text by the step, stop strings, and how it ends."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tokenizers as made
from tokenizers import Tokenizer

from inferq.engine.decoders import decoder_factory
from inferq.engine.detokenizer import OutputText, Piece
from inferq.engine.request import FinishReason
from inferq.engine.stop_strings import StopMatcher, StopStrings

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP
KINDS = {"byte_level": made.byte_level, "llama": made.sentencepiece, "word_piece": made.word_piece}


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind]()


def output(
    kind: str = "byte_level",
    stop: Sequence[str] = (),
    *,
    include: bool = False,
    skip: bool = True,
    stop_token_texts: dict[int, str] | None = None,
) -> OutputText:
    return OutputText(
        decoder_factory(tokenizer_of(kind))(skip),
        StopMatcher(StopStrings(stop), include=include),
        include_stop=include,
        stop_token_texts=stop_token_texts or {},
    )


def encode(text: str, kind: str = "byte_level") -> list[int]:
    return tokenizer_of(kind).encode(text, add_special_tokens=False).ids


def run(out: OutputText, token_ids: Sequence[int], sizes: Sequence[int], reason: FinishReason) -> list[Piece]:
    """The pieces of pushes of these sizes, and of what is then left, until one ends the output."""
    pieces, begin = [], 0
    for size in [*sizes, len(token_ids)]:
        end = min(begin + size, len(token_ids))
        last = end == len(token_ids)
        pieces.append(out.push(token_ids[begin:end], reason if last else None))
        if pieces[-1].finish_reason is not None:
            return pieces
        begin = end
    raise AssertionError("the last push ends it")


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def ids_of(pieces: Sequence[Piece]) -> list[int]:
    return [token_id for piece in pieces for token_id in piece.token_ids]


def expected(kind: str, token_ids: list[int], stop: Sequence[str], *, include: bool, skip: bool) -> tuple[str, int]:
    """By decoding the whole after each token: the text up to the first stop string, and how many tokens that took."""
    decode = functools.partial(tokenizer_of(kind).decode, skip_special_tokens=skip)
    for num_used in [*range(1, len(token_ids)), len(token_ids)]:
        text = decode(token_ids[:num_used])
        if num_used < len(token_ids):  # what is not yet sure to stay is no match before the end
            text = text.rstrip("\ufffd")
        for end in range(1, len(text) + 1):
            starts = [end - len(one) for one in stop if text[:end].endswith(one)]
            if starts:
                return text[: end if include else min(starts)], num_used
    return decode(token_ids), len(token_ids)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_joined_the_pieces_are_the_whole_up_to_the_first_stop_string(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    random_ids = st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), min_size=1, max_size=25)
    real_ids = st.sampled_from(made.CORPUS).map(lambda text: encode(text, kind))
    token_ids = data.draw(random_ids | real_ids)
    skip, include = data.draw(st.booleans()), data.draw(st.booleans())
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip).replace("\ufffd", "") or "x"
    parts = st.tuples(st.integers(0, len(whole) - 1), st.integers(1, 8)).map(lambda at: whole[at[0] : sum(at)])
    stop = data.draw(st.lists(parts | st.text("abc ", min_size=1, max_size=3), max_size=3))
    sizes = data.draw(st.lists(st.integers(0, 8), max_size=30))

    pieces = run(output(kind, stop, include=include, skip=skip), token_ids, sizes, LENGTH)

    text, num_used = expected(kind, token_ids, stop, include=include, skip=skip)
    assert text_of(pieces) == text
    assert ids_of(pieces) == token_ids[:num_used]
    one_by_one = run(output(kind, stop, include=include, skip=skip), token_ids, [1] * len(token_ids), LENGTH)
    assert text_of(one_by_one) == text
    assert pieces[-1].finish_reason == one_by_one[-1].finish_reason


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_spaces_stand_where_the_whole_has_them(kind: str, size: int) -> None:
    text = "Daenerys is the Khaleesi. It is so."
    token_ids = encode(text, kind)
    pieces = run(output(kind), token_ids, [size] * len(token_ids), LENGTH)
    assert text_of(pieces) == tokenizer_of(kind).decode(token_ids) == text


@pytest.mark.parametrize("text", ["🦙" * 6, "ťukání žlučí"])
def test_no_piece_holds_half_a_character(text: str) -> None:
    token_ids = encode(text)
    pieces = run(output(), token_ids, [1] * len(token_ids), LENGTH)
    assert all("\ufffd" not in piece.text for piece in pieces)
    assert text_of(pieces) == text
    assert len(token_ids) > len(text)


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_a_limit_inside_a_character_shows_what_the_whole_shows(kind: str) -> None:
    token_ids = encode("🦙🦙", kind)
    for length in range(1, len(token_ids)):
        pieces = run(output(kind), token_ids[:length], [1] * length, LENGTH)
        assert text_of(pieces) == tokenizer_of(kind).decode(token_ids[:length])
        assert ids_of(pieces) == token_ids[:length]
        assert pieces[-1].finish_reason is LENGTH
        text_of(pieces).encode()


def test_a_true_replacement_character_before_the_end_is_shown_and_counted() -> None:
    eos = tokenizer_of("byte_level").token_to_id("<|im_end|>")
    token_ids = [*encode("a\ufffd"), eos]
    pieces = run(output(), token_ids, [1] * len(token_ids), STOP)
    assert text_of(pieces) == "a\ufffd"
    assert ids_of(pieces) == token_ids


class TestStopTokens:
    """The token that ended the request is used, but not seen."""

    eos = property(lambda _: tokenizer_of("byte_level").token_to_id("<|im_end|>"))

    @pytest.mark.parametrize("skip", [True, False])
    def test_it_is_hidden_and_nothing_before_it_is_cut(self, skip: bool) -> None:
        token_ids = [*encode("harm or injury"), self.eos]
        pieces = run(output(skip=skip), token_ids, [1] * len(token_ids), STOP)
        assert text_of(pieces) == "harm or injury"
        assert ids_of(pieces) == token_ids
        assert pieces[-1].finish_reason is STOP

    def test_an_ordinary_token_that_stops_is_hidden_too(self) -> None:
        token_ids = encode("alpha beta")
        piece = output().push(token_ids, STOP)
        assert piece.text == tokenizer_of("byte_level").decode(token_ids[:-1])

    def test_included_it_shows_as_any_token_does(self) -> None:
        token_ids = [*encode("so"), self.eos]
        assert output(include=True).push(token_ids, STOP).text == "so"
        assert output(include=True, skip=False).push(token_ids, STOP).text == "so<|im_end|>"
        assert output(include=True).push(encode("so it"), STOP).text == "so it"

    def test_a_stop_string_that_is_a_special_token_is_included_once(self) -> None:
        token_ids = [*encode("so"), self.eos]
        fields = {"stop": ["<|im_end|>"], "stop_token_texts": {self.eos: "<|im_end|>"}}
        assert output(include=True, **fields).push(token_ids, STOP).text == "so<|im_end|>"
        assert output(include=True, skip=False, stop=["<|im_end|>"]).push(token_ids, STOP).text == "so<|im_end|>"
        assert output(**fields).push(token_ids, STOP).text == "so"

    def test_special_tokens_that_end_nothing_are_skipped_or_shown(self) -> None:
        token_ids = [*encode("so"), self.eos, *encode(" it")]
        assert output().push(token_ids, LENGTH).text == "so it"
        assert output(skip=False).push(token_ids, LENGTH).text == "so<|im_end|> it"

    def test_half_a_character_before_it_is_not_lost(self) -> None:
        token_ids = [*encode("a🦙")[:3], self.eos]
        assert output().push(token_ids, STOP).text == "a\ufffd"

    def test_an_end_without_a_token_hides_nothing(self) -> None:
        out = output(stop=["so far"])
        assert out.push(encode("is so"), None).text == "is "
        assert out.push((), STOP) == Piece("so", (), STOP)


class TestStopStrings:
    def test_it_ends_the_output_at_the_token_that_completes_it(self) -> None:
        token_ids = encode("alpha beta gamma delta")
        piece = output(stop=["a gam"]).push(token_ids, None)
        assert piece.text == "alpha bet"
        assert piece.finish_reason is STOP
        assert 0 < len(piece.token_ids) < len(token_ids)
        assert "a gam" in tokenizer_of("byte_level").decode(piece.token_ids)
        assert "a gam" not in tokenizer_of("byte_level").decode(piece.token_ids[:-1])

    def test_it_wins_over_a_limit_in_the_same_push(self) -> None:
        assert output(stop=["lazy"]).push(encode("the lazy dog"), LENGTH).finish_reason is STOP

    def test_what_was_held_for_it_comes_with_the_end(self) -> None:
        eos = tokenizer_of("byte_level").token_to_id("<|im_end|>")
        out = output(stop=["as far"])
        assert out.push(encode("ple"), None).text == "ple"
        assert out.push(encode("as"), None) == Piece("", tuple(encode("as")), None)
        assert out.push([eos], STOP) == Piece("as", (eos,), STOP)

    def test_token_ids_are_never_held(self) -> None:
        out = output(stop=["🦙!"])
        for token_id in encode("🦙"):
            assert out.push([token_id], None) == Piece("", (token_id,), None)

    def test_one_that_ends_in_a_byte_token_is_found_with_that_token(self) -> None:
        """In Llama's vocabulary a newline is a byte token, whose run may go on."""
        newline = tokenizer_of("llama").token_to_id("<0x0A>")
        out = output("llama", stop=["\n\n"])
        assert out.push([*encode("so.", "llama"), newline], None).finish_reason is None
        assert out.push([newline], None) == Piece("", (newline,), STOP)

    def test_one_that_the_end_completes_counts(self) -> None:
        out = output(stop=["so\ufffd"])
        assert out.push(encode("it is so"), None).text == "it is "
        half = encode("🦙")[:1]
        assert out.push(half, LENGTH) == Piece("", tuple(half), STOP)

    def test_included_it_is_shown_once(self) -> None:
        piece = output(stop=["lazy", "dog"], include=True).push(encode("the lazy dog"), LENGTH)
        assert piece.text == "the lazy"


class TestFlush:
    """An abort ends the output where it stands."""

    def test_it_gives_out_what_a_stop_string_held(self) -> None:
        out = output(stop=["as far"])
        assert out.push(encode("please as"), None).text == "please "
        assert out.flush() == "as"

    def test_it_gives_out_whole_characters_only(self) -> None:
        out = output()
        assert out.push(encode("a🦙")[:-1], None).text == "a"
        assert out.flush() == ""

    def test_it_gives_out_the_characters_of_a_byte_run(self) -> None:
        out = output("llama", stop=["€!"])
        assert out.push(encode("a€€", "llama")[:-1], None).text == "a"
        assert out.flush() == "€"

    def test_it_is_empty_when_nothing_was_held(self) -> None:
        out = output(stop=["zz"])
        out.push(encode("alpha"), None)
        assert out.flush() == ""
