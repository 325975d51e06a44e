"""Tiny random models of real architectures, made on the spot: no weights are downloaded or kept in the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 320
_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOW = {"sliding_window": 5}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
#: What an architecture needs besides _TINY; None leaves a field of _TINY out.
_SPECIAL: dict[str, dict[str, Any]] = {
    "mistral": _WINDOW,
    "gemma2": _WINDOW,
    "gemma3_text": _WINDOW,
    "cohere2": _WINDOW,
    "exaone4": _WINDOW,
    "mixtral": _EXPERTS,
    "gpt_oss": _WINDOW | _EXPERTS,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 2, "n_head": 4},
    "mamba": {"state_size": 8, "num_key_value_heads": None, "head_dim": None},
}
_OWN_NAMES = {"gpt2": ("vocab_size", "bos_token_id", "eos_token_id"), "bloom": ("hidden_size", "vocab_size")}


def tiny_model(
    architecture: str = "llama", *, seed: int = 0, std: float | None = None, **fields: Any
) -> PreTrainedModel:
    """A random model in float32 with eager attention; a larger `std` makes attention matter more."""
    common = {name: _TINY[name] for name in _OWN_NAMES.get(architecture, tuple(_TINY))}
    values = {**common, **_SPECIAL.get(architecture, {}), **fields}
    config = AutoConfig.for_model(architecture, **{name: value for name, value in values.items() if value is not None})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    if std is not None:
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=std)
            elif "sinks" in name:
                torch.nn.init.normal_(parameter)
    return model


def tiny_tokenizer(vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Byte-level without merges: <pad>, <s>, </s>, then one token a byte, then names for the rest."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<s>", "</s>", *alphabet]
    tokens += [f"<extra_{index}>" for index in range(vocabulary - len(tokens))]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast


def save_tiny_model(folder: Path, architecture: str = "llama", **fields: Any) -> Path:
    """A folder such as a user would name: weights, configuration, tokenizer and template."""
    model = tiny_model(architecture, **fields)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
