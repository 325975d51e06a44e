"""The demo model is what its GGUF file says: weights, logits, tokenizer, template, end of sequence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import regex
import torch
from safetensors.torch import load_file
from support.generation import reference_model
from support.gguf_llama import GgufLlama
from tokenizers import Tokenizer

from inferq.engine.convert import _gguf_file

#: GGUF's name for a tensor of a block, and transformers'.
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: llama.cpp's pre-tokenizer of the name `smollm`: single digits first, then GPT-2's pieces.
PIECES = (
    r"\p{N}",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
)
TEXTS = (
    "Hello world, it's 12345 degrees; isn't it?",
    "a  1   22    x\t3\n\n 4",
    "def f(x):\n    return x**2  # 10 %\n",
    "Über 3½ Ⅷ ② ďábelské ódy 🦙🦙 漢字 \uff11\uff12",
    "   leading and trailing   ",
    "",
)


@pytest.fixture(scope="module")
def oracle() -> GgufLlama:
    return GgufLlama(_gguf_file())


@pytest.fixture(scope="module")
def tokenizer(demo_model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))


def halves_from_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from GGML's order, pairs side by side, to transformers': first halves, then second."""
    rows = weight.view(heads, -1, *weight.shape[1:])
    return torch.cat([rows[:, 0::2], rows[:, 1::2]], 1).view(weight.shape)


def test_every_weight_is_the_files(demo_model_dir: Path, oracle: GgufLlama) -> None:
    weights = load_file(demo_model_dir / "model.safetensors")
    assert torch.equal(weights.pop("model.embed_tokens.weight"), oracle.tensors["token_embd.weight"])
    assert torch.equal(weights.pop("model.norm.weight"), oracle.tensors["output_norm.weight"])
    for block in range(oracle.blocks):
        for theirs, ours in NAMES.items():
            expected = oracle.tensors[f"blk.{block}.{theirs}.weight"]
            if theirs in ("attn_q", "attn_k"):
                expected = halves_from_pairs(expected, oracle.heads if theirs == "attn_q" else oracle.kv_heads)
            found = weights.pop(f"model.layers.{block}.{ours}.weight")
            assert found.dtype == torch.float32
            assert torch.equal(found, expected), (block, theirs)
    assert not weights


@pytest.mark.parametrize("length", [1, 8, 201])
def test_logits_are_those_of_the_file(
    demo_model_dir: Path, oracle: GgufLlama, tokenizer: Tokenizer, length: int
) -> None:
    text = "The sea is wide and the ship is small, but the crew of 12 knows every star by its name. " * 12
    token_ids = tokenizer.encode(text).ids[:length]
    assert len(token_ids) == length
    with torch.inference_mode():
        found = reference_model(demo_model_dir)(torch.tensor([token_ids]), use_cache=False).logits[0, -1]
        expected = oracle.last_logits(token_ids)
    assert float(torch.cosine_similarity(found, expected, dim=0)) > 0.99999
    assert int(found.argmax()) == int(expected.argmax())


@pytest.fixture(scope="module")
def ranks(oracle: GgufLlama) -> dict[tuple[str, str], int]:
    """Of the pairs that are joined: the best first."""
    merges = oracle.value("tokenizer.ggml.merges")
    return {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}


@pytest.fixture(scope="module")
def vocabulary(oracle: GgufLlama) -> dict[str, int]:
    return {token: index for index, token in enumerate(oracle.value("tokenizer.ggml.tokens"))}


def byte_characters() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def split(text: str) -> list[str]:
    pieces = [text]
    for pattern in PIECES:
        pieces = [part for piece in pieces for part in regex.split(f"({pattern})", piece) if part]
    return pieces


def merged(piece: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Byte-pair encoding as it was first written: join the best-ranked pair until there is none."""
    characters = byte_characters()
    symbols = [characters[byte] for byte in piece.encode()]
    while len(symbols) > 1:
        place = min(range(len(symbols) - 1), key=lambda i: ranks.get((symbols[i], symbols[i + 1]), len(ranks)))
        if (symbols[place], symbols[place + 1]) not in ranks:
            break
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    return symbols


@pytest.mark.parametrize("text", TEXTS)
def test_the_tokenizer_is_the_one_that_the_file_describes(
    tokenizer: Tokenizer, vocabulary: dict[str, int], ranks: dict[tuple[str, str], int], text: str
) -> None:
    found = tokenizer.encode(text)
    assert found.ids == [vocabulary[symbol] for piece in split(text) for symbol in merged(piece, ranks)]
    assert tokenizer.decode(found.ids) == text


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a  1").tokens == ["a", "ĠĠ", "1"]


def test_end_of_sequence_and_template(demo_model_dir: Path, tokenizer: Tokenizer, oracle: GgufLlama) -> None:
    config = json.loads((demo_model_dir / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert (
        config["eos_token_id"]
        == oracle.value("tokenizer.ggml.eos_token_id")
        == tokenizer.token_to_id("<|im_end|>")
        == 2
    )
    assert "quantization_config" not in config
    template = (demo_model_dir / "chat_template.jinja").read_text()
    assert template == oracle.value("tokenizer.chat_template")
    assert "<|im_start|>" in template
    assert tokenizer.encode("Hi").ids == tokenizer.encode("Hi", add_special_tokens=False).ids
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 49152
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    assert {"<|endoftext|>", "<|im_start|>", "<|im_end|>"} <= special
