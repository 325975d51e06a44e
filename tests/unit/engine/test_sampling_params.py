"""Sampling parameters of another type than they should be: refused by name, or held as Python's own numbers."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from inferq.engine.errors import InvalidRequestError
from inferq.engine.request import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 2.0),
        ("max_tokens", True),
        ("top_k", "4"),
        ("top_k", True),
        ("seed", 1.5),
        ("seed", None),
        ("temperature", "a"),
        ("temperature", "0.5"),
        ("temperature", None),
        ("temperature", True),
        ("temperature", 10**400),
        ("stop_token_ids", (object(),)),
        ("top_p", None),
        ("top_p", [1.0]),
        ("stop", "END"),
        ("stop", (1,)),
        ("stop", 5),
        ("stop", None),
        ("stop_token_ids", (1.0,)),
        ("stop_token_ids", ("1",)),
        ("stop_token_ids", (True,)),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
        ("skip_special_tokens", "yes"),
        ("include_stop_str_in_output", None),
    ],
)
def test_another_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name} must be"):
        SamplingParams(**{name: value})


def test_numbers_of_numpy_become_pythons_own() -> None:
    sampling = SamplingParams(
        max_tokens=np.int64(4),
        temperature=np.float32(0.5),
        top_k=np.int16(3),
        top_p=1,
        seed=np.uint8(7),
        stop_token_ids=[np.int64(5)],  # type: ignore[arg-type]
        stop=["a"],  # type: ignore[arg-type]
    )
    expected = SamplingParams(
        max_tokens=4, temperature=0.5, top_k=3, top_p=1.0, seed=7, stop_token_ids=(5,), stop=("a",)
    )
    assert sampling == expected
    assert hash(sampling) == hash(expected)
    assert json.dumps(asdict(sampling)) == json.dumps(asdict(expected))


@pytest.mark.parametrize("name", ["max_tokens", "top_k", "seed", "temperature", "top_p"])
def test_a_number_that_python_does_not_even_print_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name} "):
        SamplingParams(**{name: 10**5000})
    with pytest.raises(InvalidRequestError, match=r"^stop_token_ids "):
        SamplingParams(stop_token_ids=(10**5000,))
