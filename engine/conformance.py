"""The gate that a model passes before it serves: does this architecture give the right answer on a flat batch?

Several sequences behind one another, without a mask and without a cache object, are computed right only by a model
whose layers mix tokens nowhere but in the attention function. transformers raises nothing for the others: their
output is merely wrong. So each model is measured at load, with its own weights, the attention that will serve it, and
whatever was rewritten in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

import torch

from inferq.cuda.memory import is_shortage
from inferq.cuda.synchronize import synchronize

from .assets import first_line
from .attention import AttentionBackend, AttentionParams, LayerShape
from .attention.hook import IMPLEMENTATION, ZeroAttention, attending
from .attention.interface import LayerProbe
from .batch import StepBatch
from .errors import ModelLoadError
from .sequence import Scheduled, Sequence, SequenceSampling

_KNOWN_LAYERS: Final = {"full_attention", "sliding_attention"}
_LENGTHS: Final = (9, 13, 5)
#: The last tokens of each sequence come one a step, as while decoding: backends have a kernel of their own for that.
_DECODED: Final = 2
#: The error allowed, relative to the norm of a token's logits. In float32 for each token; else for the median token of
#: each prompt, and of all that are decoded, since rounding can turn a router of experts the other way for single ones.
_TOLERANCES: Final = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class Gate:
    """Holds what a model computes before anything is changed in it, and how each of its `layers` attends.

    Made of a model as it was loaded, which then uses our attention. Then `check` may be asked as often as something
    was changed: modules rewritten, another backend chosen. All raise ModelLoadError, naming the architecture.
    """

    layers: tuple[LayerProbe, ...]  #: by layer index

    def __init__(self, model: Any) -> None:
        self._model = model
        self._check_layer_types()
        self._prompts = _prompts(model)
        with self._refusing_failures(), torch.inference_mode():
            model.set_attn_implementation("eager")
            self._expected = [model(_on_device(prompt, model), use_cache=False).logits[0] for prompt in self._prompts]
            model.set_attn_implementation(IMPLEMENTATION)
            self.layers = self._probe()

    def check(self, backend: AttentionBackend) -> None:
        """Refuses a model that computes something else with `backend`, which is left with a small cache."""
        with self._refusing_failures(f" with attention {backend.name!r}"), torch.inference_mode():
            error = _error(self._paged_logits(backend), self._expected, self._model.dtype)
        tolerance = _TOLERANCES[self._model.dtype]
        if not error <= tolerance:
            raise self._refusal(f"on a flat batch its logits are off by {error:.1e}, more than {tolerance:.0e}")

    def _refusal(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"the architecture {self._model.config.model_type!r} is not supported: {reason}")

    @contextmanager
    def _refusing_failures(self, what: str = "") -> Iterator[None]:
        try:
            yield
        except ModelLoadError:
            raise
        except Exception as exc:
            if is_shortage(exc):
                raise ModelLoadError(
                    f"not enough memory to compute {sum(_LENGTHS)} tokens beside the weights: free the device, or take "
                    f"a smaller model or dtype: {first_line(exc)}"
                ) from exc
            reason = f"its forward pass fails on a flat batch{what} ({type(exc).__name__}: {first_line(exc)})"
            raise self._refusal(reason) from exc

    def _check_layer_types(self) -> None:
        types = getattr(self._model.config.get_text_config(), "layer_types", None) or ()
        if unknown := set(types) - _KNOWN_LAYERS:
            raise self._refusal(f"it has layers of type {', '.join(sorted(unknown))}")

    def _probe(self) -> tuple[LayerProbe, ...]:
        ids, notes = _on_device(chain(*self._prompts), self._model), _Notes()
        with attending(notes):
            self._model(ids, position_ids=torch.zeros_like(ids), use_cache=False)
        called = [layer for layer, _ in notes.calls]
        layers = self._model.config.get_text_config().num_hidden_layers
        if sorted(called) != list(range(layers)):
            using = len(set(called))
            raise self._refusal(
                f"of its {layers} layers {using} use transformers' attention interface, in {len(called)} calls"
            )
        return tuple(layer for _, layer in sorted(notes.calls, key=lambda call: call[0]))

    def _paged_logits(self, backend: AttentionBackend) -> list[torch.Tensor]:
        """Logits [tokens, vocabulary] of each sequence: all prompts in one step, then some steps of one token each."""
        size, device = backend.block_size, self._model.device
        sequences = _sequences(self._prompts, size)
        num_blocks = sum(len(sequence.block_table) for sequence in sequences)
        batch = StepBatch(
            max_tokens=sum(_LENGTHS),
            max_seqs=len(_LENGTHS),
            max_model_len=max(_LENGTHS),
            block_size=size,
            device=device,
        )
        shapes = [layer.shape for layer in self.layers]
        backend.allocate(shapes, num_blocks, dtype=self._model.dtype, device=device)
        steps = [[length - _DECODED for length in _LENGTHS], *[[1] * len(_LENGTHS)] * _DECODED]
        parts = []
        for counts in steps:
            for sequence, prompt, count in zip(sequences, self._prompts, counts, strict=True):
                # As far as they are known: a step of one token is a decode.
                sequence.token_ids = prompt[: sequence.num_computed_tokens + count]
            batch.fill([Scheduled(sequence, count) for sequence, count in zip(sequences, counts, strict=True)])
            backend.prepare(batch)
            with attending(backend):
                parts.append(torch.split(flat_forward(self._model, batch), counts))
            for sequence, count in zip(sequences, counts, strict=True):
                sequence.num_computed_tokens += count
            synchronize(device)  # the batch is filled a third time
        return [torch.cat(of_sequence) for of_sequence in zip(*parts, strict=True)]


def flat_forward(model: Any, batch: StepBatch, **options: Any) -> torch.Tensor:
    """Logits [rows, vocabulary] of a batch, whose attention is already prepared; in the caller's `attending`."""
    output = model(batch.input_ids.unsqueeze(0), position_ids=batch.positions.unsqueeze(0), use_cache=False, **options)
    logits: torch.Tensor = output.logits[0]
    return logits


def _prompts(model: Any) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in _LENGTHS]


def _on_device(ids: Iterable[int], model: Any) -> torch.Tensor:
    """int64 [1, tokens]."""
    return torch.tensor([list(ids)], device=model.device)


class _Notes(ZeroAttention):
    """Notes which layers ask, and for what."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, LayerProbe]] = []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        shape = LayerShape(key.shape[1], key.shape[2], value.shape[2])
        self.calls.append((layer, LayerProbe(shape, query.shape[1], params)))
        return super().attend(layer, query, key, value, params)


def _sequences(prompts: Seq[list[int]], block_size: int) -> list[Sequence]:
    """With blocks that are not in order."""
    counts = [-(-len(prompt) // block_size) for prompt in prompts]
    blocks = list(range(sum(counts)))
    return [
        Sequence(
            key,
            prompt,
            len(prompt),
            SequenceSampling(max_tokens=1),
            block_table=[blocks.pop() for _ in range(count)],
        )
        for key, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
    ]


def _error(logits: Seq[torch.Tensor], expected: Seq[torch.Tensor], dtype: torch.dtype) -> float:
    """The largest relative error of a token, or of a median token where numbers are short."""
    errors = [
        (actual.float() - right.float()).norm(dim=-1) / right.float().norm(dim=-1)
        for actual, right in zip(logits, expected, strict=True)
    ]
    if dtype == torch.float32:
        return float(torch.cat(errors).max())
    prompts, decoded = zip(*(part.tensor_split([-_DECODED]) for part in errors), strict=True)
    return max(float(part.median()) for part in (*prompts, torch.cat(decoded)))
