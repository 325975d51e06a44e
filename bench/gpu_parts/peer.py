"""Part 6: transformers' own continuous batching, `generate_batch`, on the same model, prompts and number of tokens."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.utils import is_flash_attn_2_available


class PeerError(Exception):
    """It did not generate what it was asked for."""


class PeerRun(NamedTuple):
    """`seconds` from when the first request was made, all graphs captured, until the last token was there."""

    attention: str
    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def attentions() -> list[str]:
    """What `generate_batch` can attend with here."""
    return ["sdpa", "flash_attention_2"] if is_flash_attn_2_available() else ["sdpa"]


def run_peer(model: Any, prompts: list[list[int]], new_tokens: int, attention: str, **settings: Any) -> PeerRun:
    """`settings` are fields of ContinuousBatchingConfig; its own defaults otherwise. Raises PeerError."""
    # Told which attention to take, it must not choose another: by a setting, or in older versions by the name.
    if any(field.name == "auto_switch_to_flash" for field in fields(ContinuousBatchingConfig)):
        settings["auto_switch_to_flash"] = False
        model.set_attn_implementation(attention)
    else:
        model.set_attn_implementation(f"paged|{attention}")
    # -1: no token ends a request.
    options = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1)
    outputs = model.generate_batch(
        prompts,
        generation_config=options,
        continuous_batching_config=ContinuousBatchingConfig(**settings),
        record_timestamps=True,
        progress_bar=False,
    ).values()
    counts = [len(output.generated_tokens) for output in outputs]
    if counts != [new_tokens] * len(prompts):
        errors = {str(output.error) for output in outputs if output.error is not None}
        raise PeerError(f"{sum(counts)} of {new_tokens * len(prompts)} tokens came: {'; '.join(sorted(errors))}")
    begin = min(output.created_time for output in outputs)
    end = max(output.timestamps[-1] for output in outputs)
    return PeerRun(attention, sum(counts), end - begin)
