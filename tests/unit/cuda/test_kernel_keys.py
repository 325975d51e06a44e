"""No step of a service compiles a kernel: whatever its requests are, what it launches was launched before it was ready.

The service is the real one, on real arrays; only the kernels do nothing, so that what it says is nonsense.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compiled import SM_90, absent
from support.generation import Lines
from support.kernel_keys import compilations
from support.models import save_tiny_model
from support.torch_ops import TORCH_OPS

from inferq.cuda.activation import Activation, gated
from inferq.cuda.norm import add_rms_norm, rms_norm
from inferq.cuda.paged_decode import DecodeWorkspace, paged_decode
from inferq.cuda.paged_prefill import paged_prefill
from inferq.cuda.sampling import sample
from inferq.engine import conformance
from inferq.engine.assembly import assemble
from inferq.engine.attention.choice import Choice
from inferq.engine.attention.triton import TritonAttention
from inferq.engine.batch import StepBatch
from inferq.engine.config import EngineConfig
from inferq.engine.fusion import Ops
from inferq.engine.kernels import Kernels, load_kernels
from inferq.engine.model import load_model
from inferq.engine.runner import ModelRunner
from inferq.engine.sequence import Scheduled, Sequence, SequenceSampling

BLOCK = 64
BLOCKS = 640
MAX_SEQS = 21  #: no number of rows that steps are padded to
MAX_TOKENS = 96
WIDTHS = (1, 18, 32, 640)  #: of block tables
VOCABULARIES = (49152, 128256, 151936)
#: So that the alignment of what has them as a factor follows from the number of tokens.
ODD = {"vocab_size": 50257, "hidden_size": 72, "intermediate_size": 100, "head_dim": 18}


def launched_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0) -> torch.Tensor:
    return rms_norm(x, weight, eps, offset=offset).copy_(TORCH_OPS.rms_norm(x, weight, eps, offset=offset))


def launched_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0
) -> torch.Tensor:
    output = add_rms_norm(x, residual, weight, eps, offset=offset)
    return output.copy_(TORCH_OPS.add_rms_norm(x, residual, weight, eps, offset=offset))


def launched_gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    return gated(gate_up, activation).copy_(TORCH_OPS.gated(gate_up, activation))


#: Launched, and right: else no module would be recognised.
OPS = Ops(rms_norm=launched_rms_norm, add_rms_norm=launched_add_rms_norm, gated=launched_gated)


def service(folder: Path, width: int, *, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[ModelRunner, Lines]:
    monkeypatch.setattr(conformance, "_error", lambda *_: 0.0)
    config = EngineConfig(
        model=str(folder),
        dtype="bfloat16",
        device="cpu",
        num_blocks=BLOCKS,
        max_model_len=width * BLOCK,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
    )

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        run()
        return lambda: None

    def choose(workload: Any) -> list[Choice]:
        limits = {"max_seqs": workload.max_seqs, "max_context": workload.max_context}
        return [Choice(TritonAttention(**limits, multiprocessors=132), "the test's")]

    lines = Lines()
    runner = assemble(
        load_model(config, lines),
        config,
        lines,
        choose=choose,
        kernels=Kernels(OPS, load_kernels().sampler),
        capture=capture if graphs else None,
    )
    return runner, lines


def sequence(key: int, length: int, computed: int, width: int, draw: random.Random) -> Sequence:
    blocks = [draw.randrange(BLOCKS) for _ in range(-(-length // BLOCK))]
    sampling = SequenceSampling(max_tokens=1, temperature=draw.choice([0.0, 1.0]), top_k=draw.choice([0, 1, 40]))
    return Sequence(key, [0] * length, length, sampling, num_computed_tokens=computed, block_table=blocks)


def step(decodes: int, prompts: int, width: int, draw: random.Random) -> list[Scheduled]:
    scheduled = []
    for key in range(decodes):
        length = draw.randint(1, width * BLOCK)
        scheduled.append(Scheduled(sequence(key, length, length - 1, width, draw), 1))
    for key in range(decodes, decodes + prompts):
        tokens = draw.choice([1, 2, 15, 16, 17])
        computed = draw.randint(0, width * BLOCK - tokens - 1)
        unsampled = draw.randint(0, 1)
        scheduled.append(Scheduled(sequence(key, computed + tokens + unsampled, computed, width, draw), tokens))
    return scheduled


def tiny(folder: Path, **fields: Any) -> Path:
    return save_tiny_model(folder, max_position_embeddings=640 * BLOCK, num_hidden_layers=1, **fields)


@pytest.mark.parametrize(
    ("width", "graphs", "fields"),
    [
        pytest.param(1, False, {"vocab_size": 49152}, id="one block, eager"),
        pytest.param(18, False, {"vocab_size": 151936}, id="18 blocks, eager"),
        pytest.param(18, True, {"vocab_size": 151936}, id="18 blocks, graphs"),
        pytest.param(32, False, {"vocab_size": 128256}, id="32 blocks, eager"),
        pytest.param(640, False, {"vocab_size": 151936}, id="640 blocks, eager"),
        pytest.param(18, False, ODD, id="no multiples of 16"),
    ],
)
def test_no_served_step_compiles(
    width: int, graphs: bool, fields: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny(tmp_path / "model", **fields)
    draw = random.Random(width)
    with compilations(SM_90) as compiled, torch.inference_mode():
        runner, lines = service(folder, width, graphs=graphs, monkeypatch=monkeypatch)
        fused = lines.details("modules fused")
        assert fused["norms"] and fused["mlps"] and fused["rotations"], fused
        before = len(compiled)
        assert {name for name, _ in compiled} >= {"_split_kernel", "_prefill_kernel", "pick_kernel", "rms_norm_kernel"}
        for decodes in range(6):
            for prompts in range(decodes == 0, 3):
                runner.launch(step(decodes, prompts, width, draw)).tokens()
        for decodes in (7, 8, 9, 16, 17, MAX_SEQS):
            runner.launch(step(decodes, 0, width, draw)).tokens()
    assert compiled[before:] == []


def one_key_each(compiled: list[tuple[str, str]]) -> bool:
    names = [name for name, _ in compiled]
    return bool(names) and len(names) == len(set(names))


def real_batch(width: int) -> StepBatch:
    return StepBatch(
        max_tokens=MAX_TOKENS,
        max_seqs=MAX_SEQS,
        max_model_len=width * BLOCK,
        block_size=BLOCK,
        device=torch.device("cpu"),
    )


def test_attention_is_compiled_once_wherever_its_sequences_begin_and_however_wide_tables_are() -> None:
    cache = absent(BLOCKS, 2, BLOCK, 64, dtype=torch.bfloat16)
    plain: dict[str, Any] = {"scale": 0.1, "window": None, "softcap": None, "sinks": None}
    with compilations(SM_90) as compiled:
        for width in WIDTHS:
            batch = real_batch(width)
            for decodes in range(1, 6):
                batch.fill(step(decodes, 2, width, random.Random(width)))
                query = absent(batch.num_tokens, 4, 64, dtype=torch.bfloat16)
                tables, lengths, starts = batch.block_tables, batch.seq_lens, batch.query_starts
                paged_decode(
                    query[:decodes],
                    *(cache, cache),
                    tables[:decodes],
                    lengths[:decodes],
                    query,
                    splits=4,
                    workspace=DecodeWorkspace.allocate(decodes, 4, 4, 64, torch.device("meta")),
                    **plain,
                )
                rest = (tables[decodes:], starts[decodes:], lengths[decodes:])
                paged_prefill(query, *(cache, cache), *rest, query, max_query_len=17, **plain)
    assert one_key_each(compiled) and len(compiled) == 3


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_the_sampler_is_compiled_once_for_whatever_number_of_rows(vocabulary: int) -> None:
    types = (torch.float32, torch.int64, torch.float64, torch.int64, torch.int64, torch.int64)
    with compilations(SM_90) as compiled:
        for rows in (1, 2, 3, 4, 5, 16, 33):
            limits = (absent(rows, dtype=dtype) for dtype in types)
            sample(absent(rows, vocabulary, dtype=torch.bfloat16), *limits)
    names = [name for name, _ in compiled]
    assert sorted(names) == ["finish_kernel", "maximum_kernel", "narrow_kernel", "narrow_kernel", "pick_kernel"]
