"""Stop strings: the first match to end counts, what may begin one is held back, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferq.engine.stop_strings import StopMatcher, StopStrings

# A small alphabet, so that stop strings overlap, nest and repeat.
_STOPS = st.lists(st.text("ab€", min_size=1, max_size=5), max_size=4)
_CHUNKS = st.lists(st.text("ab€", max_size=6), max_size=12)


def run(stops: list[str], chunks: list[str], *, include: bool = False) -> tuple[list[str], bool]:
    """What each chunk lets through, the end of the output included, and whether a stop string was found."""
    matcher = StopMatcher(StopStrings(stops), include=include)
    shown = []
    for chunk in chunks:
        text, stopped = matcher.feed(chunk)
        shown.append(text)
        if stopped:
            return shown, True
    return [*shown, matcher.release()], False


def first_match(stops: list[str], text: str) -> tuple[int, int] | None:
    """By looking everywhere: start and end of the match that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts), end
    return None


@given(stops=_STOPS, chunks=_CHUNKS, include=st.booleans())
def test_the_text_is_cut_at_the_first_match_however_it_comes(
    stops: list[str], chunks: list[str], include: bool
) -> None:
    text = "".join(chunks)
    match = first_match(stops, text)
    shown, stopped = run(stops, chunks, include=include)
    assert stopped is (match is not None)
    assert "".join(shown) == (text if match is None else text[: match[1] if include else match[0]])


@given(stops=_STOPS, chunks=_CHUNKS)
def test_exactly_the_longest_possible_beginning_is_held_back(stops: list[str], chunks: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops), include=False)
    text = shown = ""
    for chunk in chunks:
        more, stopped = matcher.feed(chunk)
        if stopped:
            return
        text, shown = text + chunk, shown + more
        beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
        held = next((text[n:] for n in range(len(text)) if text[n:] in beginnings), "")
        assert shown + held == text


@given(stops=_STOPS, chunks=_CHUNKS, ahead=st.text("ab€", max_size=6))
def test_looking_ahead_changes_nothing(stops: list[str], chunks: list[str], ahead: str) -> None:
    matcher = StopMatcher(StopStrings(stops), include=False)
    text = ""
    for chunk in chunks:
        text += chunk
        if matcher.feed(chunk)[1]:
            return
        assert matcher.would_match(ahead) is (first_match(stops, text + ahead) is not None)


@pytest.mark.parametrize(
    ("stop", "pieces", "text"),
    [
        ("DEFGHIJ", ["ABC", "D", "EF", "GHI", "J", "K"], "ABC"),
        ("own fox", ["The", " quick", " brown", " fox", " jumps"], "The quick br"),
        ("beta gamma", ["alpha", " beta", " gam", "ma", " delta"], "alpha "),
    ],
)
def test_nothing_of_a_stop_string_across_pieces_is_shown(stop: str, pieces: list[str], text: str) -> None:
    shown, stopped = run([stop], pieces)
    assert stopped
    assert "".join(shown) == text


@pytest.mark.parametrize(("stop", "text"), [("Pari", "I love "), ("is", "I love Par"), ("lo", "I "), ("e P", "I lov")])
def test_a_stop_string_inside_a_piece_cuts_it(stop: str, text: str) -> None:
    shown, stopped = run([stop], ["I", " love", " Paris", "."])
    assert stopped
    assert "".join(shown) == text


def test_a_beginning_that_is_not_completed_is_given_out() -> None:
    assert run(["as far"], ["ple", "as"]) == (["ple", "", "as"], False)
    assert run(["as far"], ["ple", "as", " f", "or me"]) == (["ple", "", "", "as for me", ""], False)


def test_of_matches_that_end_together_the_longest_is_cut() -> None:
    assert run(["bc", "abc"], ["x", "ab", "c"]) == (["x", "", ""], True)


def test_a_match_that_ends_first_wins_over_one_that_began_first() -> None:
    assert run(["abcd", "bc"], ["ab", "cd"]) == (["", "a"], True)


def test_included_it_stands_once_at_the_end() -> None:
    shown, stopped = run(["END"], ["the E", "N", "D of it END"], include=True)
    assert stopped
    assert "".join(shown) == "the END"


def test_the_same_strings_serve_many_outputs() -> None:
    strings = StopStrings(["stop"])
    one, other = StopMatcher(strings, include=False), StopMatcher(strings, include=False)
    assert one.feed("st") == ("", False)
    assert other.feed("op") == ("op", False)
    assert one.feed("op") == ("", True)
