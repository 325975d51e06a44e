"""All parts of the GPU benchmark in their order: what each measures is printed when it is there, and kept for the end.

A part that fails takes nothing from the others. A guard ends the process in time if a call into the driver does not
come back, with what was measured until then.
"""

from __future__ import annotations

import argparse
import math
import os
import secrets
import sys
import traceback
from functools import cached_property
from typing import Any, Final, NoReturn

from figures import CANNOT_MEASURE, OVER_BUDGET, Figure, figures_table, report

from inferq.cuda.flash import Flash, FlashUnsupportedError, load_flash
from inferq.engine.runner import ModelRunner

from . import bandwidth, decode, prefill
from .broken import device_is_broken
from .budget import TimeBudget, end_after
from .card import Card
from .checks import Check
from .correctness import checks_table, max_error, run_checks, worst
from .engine import Generated, KeptGraphs, fits, free, generate, make_runner
from .flash_checks import flash_cases
from .graphs import graph_figures, measure_graph
from .memory import memory_shortage
from .model import build_model, random_prompts
from .peer import PeerError, attentions, run_peer
from .plan import Plan
from .versions import versions

#: Of the time, what is kept for each part.
SHARES: Final = {"kernels": 0.25, "bandwidth": 0.19, "prefill": 0.05, "engine": 0.3, "generate_batch": 0.21}
#: The part that is not ours: that it takes too long is no fault of ours.
PEER: Final = "generate_batch"
#: What has to be left for these to begin: guesses on the safe side. A pool of random numbers and one case;
BANDWIDTH_SECONDS: Final = 10.0
#: the model and its graphs; the model again, and `generate_batch` until it has generated.
ENGINE_SECONDS: Final = 30.0
PEER_SECONDS: Final = 30.0


class Run:
    """One run of the benchmark. `seconds` are left for it."""

    def __init__(self, card: Card, plan: Plan, *, seconds: float) -> None:
        self._card = card
        self._plan = plan
        self._budget = TimeBudget(seconds, {part: share * seconds for part, share in SHARES.items()})
        self._seed = secrets.randbelow(2**31)
        self._ceilings: decode.Ceilings | None = None
        self._generated: Generated | None = None
        self.keys: dict[str, Any] = {"seed": self._seed, "versions": versions()}
        self.figures: list[Figure] = []
        self.wrong: list[str] = []  #: what makes the exit code 1, whatever was asked for

    def guarded(self, args: argparse.Namespace, *, hard_seconds: float) -> NoReturn:
        """Runs all parts and ends the process: with its code, after `hard_seconds` at the latest."""

        def expire() -> None:
            if self._budget.part == PEER:
                self._budget.skip("the rest", "out of time")
            else:
                self.wrong.append(f"{self._budget.part}: out of time")
            code = self.finish(args)
            sys.stdout.flush()
            os._exit(code)

        guard = end_after(hard_seconds, expire)
        self.measure()
        guard.cancel()
        raise SystemExit(self.finish(args))

    def measure(self) -> None:
        for part, measure in {
            "kernels": self._kernels,
            "bandwidth": self._bandwidth,
            "prefill": self._prefill,
            "engine": self._engine,
            PEER: self._peer,
        }.items():
            self._budget.begin(part)
            print(f"\n{part} ({self._budget.left:.0f} s)", flush=True)
            try:
                free(self._card)  # what the part before held
                measure()
            except Exception as exc:
                if (lack := memory_shortage(exc)) is not None:
                    self._budget.skip("the rest of it", f"no memory for it: {lack}")
                    continue
                print(traceback.format_exc(), flush=True)
                self.wrong.append(f"{part}: failed")
                if device_is_broken(exc):
                    self._budget.skip("the rest", "a recording failed, and the device cannot be used after it")
                    return

    @property
    def skipped(self) -> list[str]:
        """What was left out, and why."""
        return self._budget.skipped

    def finish(self, args: argparse.Namespace) -> int:
        """Prints what there is at the end; the exit code."""
        bounded = [figure for figure in self.figures if figure.budget is not None]
        print(f"\n{figures_table(self.figures)}")
        lines = [*(f"skipped: {line}" for line in self.skipped), *(f"WRONG: {line}" for line in self.wrong)]
        print("\n".join(["", *lines]), flush=True)
        keys = {**self.keys, "skipped": self.skipped, "wrong": self.wrong}
        try:
            report(args, keys, self.figures)
        except SystemExit as ended:
            return int(ended.code or 0)
        if self.wrong:
            return OVER_BUDGET
        missing = self._wanted_bounds() - len(bounded)
        if args.check and missing > 0:
            print(f"{missing} figures that have a bound were not measured", file=sys.stderr)
            return CANNOT_MEASURE
        return 0

    def _wanted_bounds(self) -> int:
        """How many figures with a bound a whole run has: of bandwidth, and the overhead of a graph."""
        cases = ((batch, context) for batch in self._plan.batches for context in self._plan.contexts)
        return sum(bandwidth.has_bound(*case) for case in cases) + 1

    @cached_property
    def _flash(self) -> Flash | None:
        """The first part that asks for it says why there is none."""
        try:
            return load_flash(self._card.device)
        except FlashUnsupportedError as exc:
            self._budget.skip("flash-attn", str(exc))
            return None

    def _kernels(self) -> None:
        plan = self._plan
        cases = [*plan.cases, *(flash_cases(self._flash, plan.flash_shapes) if self._flash is not None else [])]
        checks = run_checks(cases, self._budget, device=self._card.device, dtype=plan.dtype, seed=self._seed)
        print(checks_table(checks))
        self.keys["max_error"] = finite(max_error(checks))
        self.keys["errors"] = {k: {"error": finite(c.error), "bound": c.bound} for k, c in worst(checks).items()}
        self.wrong += [_said(check) for check in checks if not check.holds]

    def _bandwidth(self) -> None:
        plan, card = self._plan, self._card
        if not self._budget.allows("all of it", BANDWIDTH_SECONDS):
            return
        copied, spread = card.copy_bandwidth()
        self._ceilings = decode.Ceilings(copied, card.matrix_rate(plan.dtype))
        self.figures += [
            Figure(f"copy on the device (spread {spread.spread:.1%})", copied / 1e9, "GB/s", digits=0),
            Figure("matrix product", self._ceilings.flop_per_s / 1e12, "TFLOP/s", digits=0),
        ]
        self.keys |= {"copy_gb_s": copied / 1e9, "matrix_tflop_s": self._ceilings.flop_per_s / 1e12}
        found = bandwidth.kernels(plan.shape, card, self._flash, max_context=plan.max_context)
        measured = bandwidth.measure_all(
            found, plan.shape, card, self._budget, dtype=plan.dtype, batches=plan.batches, contexts=plan.contexts
        )
        print(bandwidth.bandwidth_table(measured, copied))
        self.figures += bandwidth.share_figures(measured, copied)
        self.keys["bandwidth_share"] = bandwidth.shares(measured, copied)
        self.keys["bandwidth_share_of"] = {
            kernel.name: bandwidth.shares(measured, copied, kernel.name) for kernel in found
        }

    def _prefill(self) -> None:
        plan = self._plan
        if self._ceilings is None:
            self._budget.skip("all of it", "the device's matrix product was not measured")
            return
        found = prefill.kernels(self._flash)
        measured = prefill.measure_all(
            found, plan.shape, self._card, self._budget, dtype=plan.dtype, cases=plan.prefills
        )
        right = [each for each in measured if each.holds]
        for each in measured:
            if not each.holds and each.kernel == prefill.TORCH:
                self._budget.skip(f"prefill of {each.case}, {each.kernel}", f"its error is {each.error:.1e}")
            elif not each.holds:
                self.wrong.append(f"prefill of {each.case}, {each.kernel}: error {each.error:.1e}")
        print(prefill.prefill_table(right, self._ceilings.flop_per_s))
        self.figures += prefill.prefill_figures(right)
        self.keys["prefill"] = prefill.as_keys(right, self._ceilings.flop_per_s)

    def _engine(self) -> None:
        plan = self._plan
        if self._ceilings is None:
            self._budget.skip("all of it", "the device's bandwidth was not measured")
            return
        if not self._budget.allows("all of it", ENGINE_SECONDS) or not self._has_room():
            return
        context = plan.prompt_tokens + plan.new_tokens
        model = self._model(context)
        graphs = KeptGraphs(self._card.recorder(), model, plan.graph_rows)
        runner = make_runner(model, plan.shape, max_context=context, max_seqs=max(plan.decode_batches), capture=graphs)
        self._decode(runner, self._ceilings)
        self._graph(runner, graphs)
        if self._budget.allows("the prompts that generate_batch gets", PEER_SECONDS / 2):
            self._generated = run = generate(runner, self._peer_prompts(), plan.new_tokens)
            self.keys["engine_tok_s"] = run.tokens_per_s
            self.figures.append(Figure(f"engine, {self._peer_work()}", run.tokens_per_s, "tokens/s", digits=0))

    def _decode(self, runner: ModelRunner, ceilings: decode.Ceilings) -> None:
        plan = self._plan
        results = decode.measure_batches(
            runner,
            plan.shape,
            ceilings,
            self._budget,
            batches=plan.decode_batches,
            prompt_tokens=plan.prompt_tokens,
            new_tokens=plan.new_tokens,
            seed=self._seed,
        )
        print(decode.decode_table(results), flush=True)
        self.keys["decode"] = {str(r.batch): decode.as_keys(r) for r in results}

    def _graph(self, runner: ModelRunner, graphs: KeptGraphs) -> None:
        plan = self._plan
        if not fits(runner, rows=plan.graph_rows, context=plan.prompt_tokens):
            what = f"a decode step of {plan.graph_rows} sequences of {plan.prompt_tokens} tokens as a graph"
            self._budget.skip(what, "the KV cache is too small")
            return
        result = measure_graph(runner, graphs, self._card, rows=plan.graph_rows, context=plan.prompt_tokens)
        if result is None:
            self.wrong.append(f"no graph of {plan.graph_rows} rows was recorded")
            return
        if result.overhead is None:
            self._budget.skip("graph overhead", "the profiler saw no kernels")
        if not result.equal:
            self.wrong.append("the logits of a replayed decode step are not those of the same step run eagerly")
        self.figures += graph_figures(result)
        self.keys |= {"graph_overhead": result.overhead, "graph_equal": result.equal}

    def _peer(self) -> None:
        plan = self._plan
        if not self._budget.allows("all of it", PEER_SECONDS) or not self._has_room():
            return
        print(f"{self._peer_work()}; settings {dict(plan.peer_settings) or 'as they come'}", flush=True)
        model = self._model(plan.prompt_tokens + plan.new_tokens)
        results: dict[str, float] = {}
        for attention in attentions():
            if not self._budget.allows(attention, PEER_SECONDS):
                continue
            try:
                run = run_peer(model, self._peer_prompts(), plan.new_tokens, attention, **plan.peer_settings)
            except PeerError as exc:
                self._budget.skip(attention, str(exc))
                continue
            results[attention] = run.tokens_per_s
            self.figures.append(Figure(f"generate_batch, {attention}", run.tokens_per_s, "tokens/s", digits=0))
            if self._generated is not None:
                ratio = self._generated.tokens_per_s / run.tokens_per_s
                self.figures.append(Figure(f"engine against generate_batch, {attention}", ratio, "x"))
        self.keys["generate_batch_tok_s"] = results

    def _has_room(self) -> bool:
        """Whether the weights fit into the device's memory; if not, that is said."""
        weights, there = self._plan.shape.all_weight_bytes, self._card.free_bytes()
        if weights > there:
            sizes = f"{weights / 2**30:.1f} GiB of weights, {there / 2**30:.1f} GiB free"
            self._budget.skip("all of it", f"no memory for it: {sizes}")
        return weights <= there

    def _model(self, context: int) -> Any:
        """The same one for whoever generates."""
        return build_model(
            self._plan.shape, max_context=context, device=self._card.device, dtype=self._plan.dtype, seed=self._seed
        )

    def _peer_prompts(self) -> list[list[int]]:
        plan = self._plan
        return random_prompts(plan.peer_requests, plan.peer_prompt_tokens, plan.shape.vocabulary, seed=self._seed)

    def _peer_work(self) -> str:
        plan = self._plan
        return f"{plan.peer_requests} prompts of {plan.peer_prompt_tokens} tokens, {plan.new_tokens} new ones each"


def finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _said(check: Check) -> str:
    return f"{check.kernel} ({check.case}): error {check.error:.1e}, bound {check.bound:.1e}"
