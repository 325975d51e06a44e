"""Models that choose their rotary frequencies by the length of a sequence: a long neighbour changes nobody's text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.generation import assert_same_tokens, greedy, make_runner, reference_model, run, transformers_greedy
from support.models import VOCABULARY, save_tiny_model

ORIGINAL = 32
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0 + index for index in range(8)],
    "original_max_position_embeddings": ORIGINAL,
    "factor": 8.0,
}
SHORT = [random.Random(1).randrange(3, VOCABULARY) for _ in range(10)]
LONG = [random.Random(2).randrange(3, VOCABULARY) for _ in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(
        tmp_path_factory.mktemp("models") / "longrope",
        "phi3",
        std=0.2,
        rope_parameters=LONGROPE,
        original_max_position_embeddings=ORIGINAL,
    )


def test_a_long_neighbour_changes_nothing(folder: Path) -> None:
    runner = make_runner(folder)
    alone = run(runner, [SHORT, LONG], [greedy(12)] * 2, together=False)
    assert run(runner, [SHORT, LONG], [greedy(12)] * 2).outputs == alone.outputs


def test_long_sequences_equal_transformers(folder: Path) -> None:
    reference = reference_model(folder)
    output = run(make_runner(folder), [LONG], [greedy(12)]).outputs[0]
    assert_same_tokens(reference, LONG, transformers_greedy(reference, LONG, 12), output)


def test_within_the_original_context_short_sequences_equal_transformers(folder: Path) -> None:
    reference = reference_model(folder)
    output = run(make_runner(folder, max_model_len=ORIGINAL), [SHORT], [greedy(12)]).outputs[0]
    assert_same_tokens(reference, SHORT, transformers_greedy(reference, SHORT, 12), output)
