"""The binding to flash-attn: which interface it takes, what it refuses, and what it asks of the functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import pytest
import torch
from support.ragged import Ragged
from support.strict_flash import flash_attn_interface_module, flash_attn_module

from inferq.cuda import flash
from inferq.cuda.flash import FlashParams, FlashUnsupportedError, Prompts, check_heads, check_layer, load_flash

#: install(capability, module, ...)
Install = Callable[..., None]
CARD = torch.device("cuda")
SCALE = 0.2


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes it a card of that capability, with these modules of flash-attn and no other ones."""

    def install(capability: tuple[int, int], *modules: ModuleType) -> None:
        monkeypatch.setattr(flash, "compute_capability", lambda device: capability)
        for name in ("flash_attn", "flash_attn_interface"):
            monkeypatch.setitem(sys.modules, name, None)
        for module in modules:
            monkeypatch.setitem(sys.modules, module.__name__, module)

    return install


@pytest.mark.parametrize(
    ("capability", "modules", "name"),
    [
        ((9, 0), [flash_attn_module, flash_attn_interface_module], "flash-attn-3"),
        ((9, 0), [flash_attn_module], "flash-attn 2.8.3.post2"),
        ((8, 0), [flash_attn_module, flash_attn_interface_module], "flash-attn 2.8.3.post2"),
        ((8, 9), [flash_attn_module], "flash-attn 2.8.3.post2"),
        ((12, 0), [flash_attn_module, flash_attn_interface_module], "flash-attn 2.8.3.post2"),
    ],
)
def test_the_third_version_is_for_hopper(
    install: Install, capability: tuple[int, int], modules: Sequence[Callable[[], ModuleType]], name: str
) -> None:
    install(capability, *(make() for make in modules))
    assert load_flash(CARD).name == name


def test_what_is_not_installed_is_named_with_what_to_do(install: Install) -> None:
    install((9, 0))
    with pytest.raises(FlashUnsupportedError) as refused:
        load_flash(CARD)
    message = str(refused.value)
    assert "flash_attn_interface" in message and "import of flash_attn " in message
    assert "pip install flash-attn --no-build-isolation" in message
    assert len(message.splitlines()) == 1


def test_a_namespace_without_the_functions_is_not_flash_attn(install: Install) -> None:
    """FlashAttention-4 alone leaves a `flash_attn` that has nothing in it."""
    install((8, 0), ModuleType("flash_attn"))
    with pytest.raises(FlashUnsupportedError, match="cannot be loaded"):
        load_flash(CARD)


def test_an_old_card_is_refused(install: Install) -> None:
    install((7, 5), flash_attn_module())
    with pytest.raises(FlashUnsupportedError, match=r"8\.0 .* this one has 7\.5"):
        load_flash(CARD)


def test_another_device_is_refused() -> None:
    with pytest.raises(FlashUnsupportedError, match="not on cpu"):
        load_flash(torch.device("cpu"))


GOOD = {"dtype": torch.bfloat16, "block_size": 256, "key_dim": 128, "value_dim": 128}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": torch.float16},
        {"block_size": 512},
        {"key_dim": 256, "value_dim": 256},
        {"key_dim": 80, "value_dim": 80},
    ],
)
def test_what_fits_is_accepted(change: dict[str, object]) -> None:
    check_layer(**{**GOOD, **change})


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        ({"dtype": torch.float32}, "not in float32"),
        ({"dtype": torch.float8_e4m3fn}, "not in float8_e4m3fn"),
        ({"block_size": 64}, "multiples of 256 tokens, not of 64"),
        ({"block_size": 384}, "multiples of 256 tokens, not of 384"),
        ({"key_dim": 264, "value_dim": 264}, "at most 256"),
        ({"key_dim": 100, "value_dim": 100}, "steps of 8"),
        ({"key_dim": 192, "value_dim": 128}, "not of 192 and 128"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_limit(change: dict[str, object], limit: str) -> None:
    with pytest.raises(FlashUnsupportedError, match=limit) as refused:
        check_layer(**{**GOOD, **change})
    assert "choose another attention backend" in str(refused.value)


def test_heads_that_cannot_share_and_sinks_are_refused() -> None:
    check_heads(num_heads=9, num_kv_heads=3, sinks=False)
    with pytest.raises(FlashUnsupportedError, match="here 2 and 9"):
        check_heads(num_heads=9, num_kv_heads=2, sinks=False)
    with pytest.raises(FlashUnsupportedError, match="no attention sinks"):
        check_heads(num_heads=9, num_kv_heads=3, sinks=True)


@pytest.mark.parametrize(
    ("version", "graph_safe"),
    [("2.8.3", True), ("2.8.3.post2", True), ("2.8.3+cu12torch2.9", True), ("2.8.4", False), ("2.10.0", False)],
)
def test_a_version_that_reads_lengths_on_the_host_is_not_for_graphs(
    install: Install, version: str, graph_safe: bool
) -> None:
    install((8, 0), flash_attn_module(version))
    assert load_flash(CARD).graph_safe is graph_safe


def test_only_a_window_that_can_be_outgrown_is_passed() -> None:
    assert FlashParams(1.0).arguments(512)["window_size"] == (-1, -1)
    assert FlashParams(1.0, window=512).arguments(512)["window_size"] == (-1, -1)
    assert FlashParams(1.0, window=511).arguments(512)["window_size"] == (510, 0)


PARAMS = [
    FlashParams(SCALE),
    FlashParams(SCALE, window=1),
    FlashParams(SCALE, window=100),
    FlashParams(SCALE, window=100_000),
    FlashParams(SCALE, softcap=2.0),
    FlashParams(SCALE, window=7, softcap=2.0),
]
PARAM_IDS = ["plain", "window 1", "window 100", "window of everything", "softcap", "window and softcap"]
CARDS = pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["FlashAttention-2", "FlashAttention-3"])


@CARDS
@pytest.mark.parametrize("params", PARAMS, ids=PARAM_IDS)
def test_a_decode_is_the_attention_of_each_last_token(
    install: Install, capability: tuple[int, int], params: FlashParams
) -> None:
    install(capability, flash_attn_module(), flash_attn_interface_module())
    lengths = [1, 255, 256, 0, 257, 600]
    ragged = Ragged([1] * len(lengths), lengths)
    found = load_flash(CARD).decode(
        ragged.query, ragged.key_cache, ragged.value_cache, ragged.block_tables, ragged.seq_lens, params
    )
    expected = ragged.expected(params.scale, params.window, params.softcap)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


@CARDS
@pytest.mark.parametrize("params", PARAMS, ids=PARAM_IDS)
def test_a_prefill_is_causal_and_aligned_at_the_end(
    install: Install, capability: tuple[int, int], params: FlashParams
) -> None:
    install(capability, flash_attn_module(), flash_attn_interface_module())
    query_lens, seq_lens = [5, 1, 40, 20, 3], [5, 300, 296, 256, 259]
    ragged = Ragged(query_lens, seq_lens)
    loaded = load_flash(CARD)
    values = ragged.value_cache.nan_to_num() if loaded.reads_past_end else ragged.value_cache
    prompts = Prompts(ragged.block_tables, ragged.query_starts, ragged.seq_lens, max(query_lens), max(seq_lens))
    found = loaded.prefill(ragged.query, ragged.key_cache, values, prompts, params)
    expected = ragged.expected(params.scale, params.window, params.softcap)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)


@CARDS
def test_the_cache_is_handed_over_in_place(
    install: Install, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of it would cost more than the attention."""
    handed_over: list[tuple[int, int]] = []

    def record(
        query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, *_: object, **__: object
    ) -> torch.Tensor:
        handed_over.append((key_cache.data_ptr(), value_cache.data_ptr()))
        return query

    modules = [flash_attn_module(), flash_attn_interface_module()]
    for module in modules:
        for name in ("flash_attn_with_kvcache", "flash_attn_varlen_func"):
            monkeypatch.setattr(module, name, record, raising=False)
    install(capability, *modules)
    loaded = load_flash(CARD)
    ragged = Ragged([1, 1], [3, 256])
    caches = ragged.key_cache, ragged.value_cache
    loaded.decode(ragged.query, *caches, ragged.block_tables, ragged.seq_lens, FlashParams(SCALE))
    prompts = Prompts(ragged.block_tables, ragged.query_starts, ragged.seq_lens, 1, 256)
    loaded.prefill(ragged.query, *caches, prompts, FlashParams(SCALE))
    assert handed_over == [tuple(cache.data_ptr() for cache in caches)] * 2


@CARDS
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 80), (9, 3, 64), (8, 1, 256), (8, 2, 96)])
def test_heads_of_each_kind_in_bfloat16(
    install: Install, capability: tuple[int, int], heads: int, kv_heads: int, dim: int
) -> None:
    install(capability, flash_attn_module(), flash_attn_interface_module())
    ragged = Ragged([1, 1, 1], [3, 256, 300], heads=heads, kv_heads=kv_heads, dim=dim, dtype=torch.bfloat16)
    params = FlashParams(dim**-0.5)
    # As transformers hands it over: the heads of a token are not behind one another.
    query = ragged.query.transpose(0, 1).contiguous().transpose(0, 1)
    found = load_flash(CARD).decode(
        query, ragged.key_cache, ragged.value_cache, ragged.block_tables, ragged.seq_lens, params
    )
    torch.testing.assert_close(found.double(), ragged.expected(params.scale), rtol=8e-3, atol=4e-3)
