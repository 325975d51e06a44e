"""The gate that a model passes before it serves: does this architecture give the right answer on a flat batch?

Several sequences behind one another, without a mask and without a cache object, are computed right only by a model
whose layers mix tokens nowhere but in the attention function. transformers raises nothing for the others: their
output is merely wrong. So each model is measured at load, with its own weights and the attention that will serve it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Final

import torch

from .attention import AttentionBackend, AttentionParams, LayerShape
from .attention.hook import IMPLEMENTATION, ZeroAttention, attending
from .batch import StepBatch
from .errors import ModelLoadError
from .sequence import Scheduled, Sequence, SequenceSampling

_KNOWN_LAYERS: Final = {"full_attention", "sliding_attention"}
_LENGTHS: Final = (7, 11, 3)
#: The error allowed, relative to the norm of a token's logits. In float32 for each token; else for the median token of
#: each sequence, since rounding can turn a router of experts the other way for single ones.
_TOLERANCES: Final = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def check_conformance(model: Any, backend: AttentionBackend) -> tuple[LayerShape, ...]:
    """What each layer keeps for a token, by layer index; the model then uses our attention.

    Leaves `backend` with a small cache. Raises ModelLoadError, naming the architecture, for a model that is not
    computed right.
    """
    name = model.config.model_type
    _check_layer_types(name, model.config.get_text_config())
    prompts = _prompts(model)
    with torch.inference_mode():
        try:
            model.set_attn_implementation("eager")
            expected = torch.cat([model(ids.unsqueeze(0), use_cache=False).logits[0] for ids in prompts])
            model.set_attn_implementation(IMPLEMENTATION)
            shapes = _probe(model, name, prompts)
            error = _error(_paged_logits(model, backend, shapes, prompts), expected, model.dtype)
        except ModelLoadError:
            raise
        except Exception as exc:
            raise _refusal(name, f"its forward pass fails on a flat batch ({type(exc).__name__}: {exc})") from exc
    tolerance = _TOLERANCES[model.dtype]
    if not error <= tolerance:
        raise _refusal(name, f"on a flat batch its logits are off by {error:.1e}, more than {tolerance:.0e}")
    return shapes


def flat_forward(model: Any, batch: StepBatch, **options: Any) -> torch.Tensor:
    """Logits [rows, vocabulary] of a batch, whose attention is already prepared; in the caller's `attending`."""
    output = model(batch.input_ids.unsqueeze(0), position_ids=batch.positions.unsqueeze(0), use_cache=False, **options)
    logits: torch.Tensor = output.logits[0]
    return logits


def _refusal(name: str, reason: str) -> ModelLoadError:
    return ModelLoadError(f"the architecture {name!r} is not supported: {reason}")


def _check_layer_types(name: str, text_config: Any) -> None:
    unknown = set(getattr(text_config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if unknown:
        raise _refusal(name, f"it has layers of type {', '.join(sorted(unknown))}")


def _prompts(model: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return [torch.randint(vocabulary, (length,), generator=generator).to(model.device) for length in _LENGTHS]


class _Probe(ZeroAttention):
    """Notes which layers ask, and with what shapes."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, LayerShape]] = []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        self.calls.append((layer, LayerShape(key.shape[1], key.shape[2], value.shape[2])))
        return super().attend(layer, query, key, value, params)


def _probe(model: Any, name: str, prompts: Seq[torch.Tensor]) -> tuple[LayerShape, ...]:
    ids = torch.cat(list(prompts)).unsqueeze(0)
    probe = _Probe()
    with attending(probe):
        model(ids, position_ids=torch.zeros_like(ids), use_cache=False)
    called = [layer for layer, _ in probe.calls]
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(called) != list(range(layers)):
        raise _refusal(
            name,
            f"of its {layers} layers {len(set(called))} use transformers' attention interface, in {len(called)} calls",
        )
    return tuple(shape for _, shape in sorted(probe.calls, key=lambda call: call[0]))


def _paged_logits(
    model: Any, backend: AttentionBackend, shapes: Seq[LayerShape], prompts: Seq[torch.Tensor]
) -> torch.Tensor:
    size = backend.block_size
    counts = [-(-len(prompt) // size) for prompt in prompts]
    blocks = list(range(sum(counts)))
    scheduled = []
    for key, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        table = [blocks.pop() for _ in range(count)]
        sequence = Sequence(key, prompt.tolist(), len(prompt), SequenceSampling(max_tokens=1), block_table=table)
        scheduled.append(Scheduled(sequence, len(prompt)))
    batch = StepBatch(
        max_tokens=sum(_LENGTHS),
        max_seqs=len(_LENGTHS),
        max_model_len=max(_LENGTHS),
        block_size=size,
        device=model.device,
    )
    batch.fill(scheduled)
    backend.allocate(shapes, sum(counts), dtype=model.dtype, device=model.device)
    backend.prepare(batch)
    with attending(backend):
        return flat_forward(model, batch)


def _error(logits: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> float:
    """The largest relative error of a token, or of a sequence's median token where numbers are short."""
    errors = (logits.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    if dtype == torch.float32:
        return float(errors.max())
    return max(float(part.median()) for part in errors.split(list(_LENGTHS)))
