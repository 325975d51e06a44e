"""A Llama of a given shape with random weights, made where it will run: no file is read, nothing is downloaded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from inferq.engine.model import LoadedModel

from .shapes import ModelShape

NAME: Final = "random-llama"


def build_model(shape: ModelShape, *, max_context: int, device: torch.device, dtype: torch.dtype, seed: int) -> Any:
    """The same weights for the same seed on the same device."""
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_position_embeddings=max_context,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    return model.eval()


def loaded(model: Any, shape: ModelShape, *, max_context: int) -> LoadedModel:
    """As if it had come from a folder; there is no tokenizer, and nobody here asks for text."""
    return LoadedModel(
        model=model,
        name=NAME,
        text_dir=Path(),
        eos_token_ids=[],
        vocab_size=shape.vocabulary,
        context_length=max_context,
        dtype=model.dtype,
        device=model.device,
    )


def random_prompts(count: int, tokens: int, vocabulary: int, *, seed: int) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(vocabulary) for _ in range(tokens)] for _ in range(count)]
