"""`inferq.producer.__all__` is the entire promise to web apps, and importing it is cheap."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from types import ModuleType

import pytest

import inferq.producer
from inferq.producer import errors, events, fleet, requests, results

MODEL_LIBRARIES = {"torch", "transformers", "tokenizers", "jinja2", "numpy", "safetensors", "pydantic_settings"}


def test_every_name_is_exported_and_none_is_missing() -> None:
    public = {
        name
        for name, value in vars(inferq.producer).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public == set(inferq.producer.__all__)


def test_the_list_is_sorted() -> None:
    assert inferq.producer.__all__ == sorted(inferq.producer.__all__)


@pytest.mark.parametrize("module", [errors, events, fleet, requests, results], ids=lambda module: module.__name__)
def test_what_a_caller_meets_can_be_imported(module: ModuleType) -> None:
    """Errors are caught, events and results are matched on: all of them, also the ones that come later."""
    met = {
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }
    assert met - set(inferq.producer.__all__) <= {"ResultBuilder"}


def test_every_error_is_an_inferq_error() -> None:
    found = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]
    assert all(issubclass(error, errors.InferqError) for error in found)
    for error in found:
        assert error.__doc__
        assert error.__name__ in errors.__doc__, "the drawn tree lacks it"


def test_importing_it_loads_no_model_library() -> None:
    program = "import sys, json, inferq.producer, inferq.producer.cli; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & MODEL_LIBRARIES
    assert "redis" in loaded
    assert len(json.loads(done.stdout)) < 700, "imports have grown: a web app pays for them at each start"
