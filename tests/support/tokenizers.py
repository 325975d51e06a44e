"""Small real tokenizers, one of each kind that models come with, made by the `tokenizers` library itself.

Each is trained on the same few lines, so that it is the same wherever it is made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = (
    "The quick brown fox jumps over the lazy dog. It is so, is it not?",
    "Daenerys is the Khaleesi. It is so.",
    "def main():\n    return {'alpha': 1, \"beta\": [2, 3]}\n\n",
    "alpha beta gamma delta ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "system user assistant tool: please answer as well as you can, thank you",
    "ďábelské ódy, crème brûlée, naïve Übergröße, don't, do n't, isn't",
)
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
METASPACE = "\u2581"


def byte_level() -> Tokenizer:
    """Byte-level BPE with ChatML's special tokens first, as in SmolLM2, and two added tokens that are not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(CHATML),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool>", "snow \u2603 man"])
    return tokenizer


def sentencepiece(*, legacy: bool = True) -> Tokenizer:
    """BPE with byte fallback, as in Llama 2 (`legacy`: spaces are made by the normalizer) or in Mistral."""
    normalizer = normalizers.Sequence([normalizers.Prepend(METASPACE), normalizers.Replace(" ", METASPACE)])
    pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    pieces = _trained_pieces()
    specials = ["<unk>", "<s>", "</s>"]
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), METASPACE, *pieces["alphabet"]]
    vocab = {token: number for number, token in enumerate(dict.fromkeys([*tokens, *pieces["merged"]]))}
    model = models.BPE(vocab, pieces["merges"], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    if legacy:
        tokenizer.normalizer = normalizer
    else:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return tokenizer


def word_piece() -> Tokenizer:
    """WordPiece with its decoder's clean-up, as in BERT."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    specials = ["[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=specials, show_progress=False)
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """Unigram with the Metaspace decoder, as in T5."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def suffixed() -> Tokenizer:
    """BPE whose words end in a suffix, as in GPT-1."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def undecorated() -> Tokenizer:
    """Whole words and no decoder: tokens are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=["[UNK]"], show_progress=False))
    return tokenizer


def _trained_pieces() -> dict[str, Any]:
    """Alphabet, merges and merged pieces of a BPE over text whose spaces are U+2581."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    lines = [line for text in CORPUS[:5] for line in text.splitlines()]  # a newline is a byte token, as in Llama 2
    trained.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    alphabet = [token for token in model["vocab"] if len(token) == 1]
    return {"alphabet": alphabet, "merges": merges, "merged": ["".join(merge) for merge in merges]}


def write_folder(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    config: dict[str, Any] | None = None,
    template: str | None = None,
) -> Path:
    """A model's text folder: tokenizer.json, tokenizer_config.json, and chat_template.jinja if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **(config or {})})
    )
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
