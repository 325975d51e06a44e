"""A request as the child sees it: token ids, how far its KV cache has come, and the blocks that hold it.

State carries its own arithmetic: no other file repeats what a property here says. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

#: Below this temperature a choice is greedy: a gap of 0.001 between two logits is already e**100 to 1.
GREEDY_BELOW: Final = 1e-5


class SequenceState(Enum):
    WAITING = auto()  #: holds no block
    RUNNING = auto()  #: holds blocks, and takes part in steps
    PAUSED = auto()  #: takes part in no step until it is resumed; keeps its blocks unless others need them
    ENDED = auto()  #: holds blocks only as long as steps that were launched still use them


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSampling:
    """What the child decides by: the parent's SamplingParams without what needs text.

    `stop_token_ids` has the model's end-of-sequence ids in it unless they are ignored.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is chosen, of several the first."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1


@dataclass(slots=True, eq=False)
class Sequence:
    """One running or waiting request.

    `token_ids` is the prompt and all that is known of the output. Behind them come `num_pending_tokens` that steps on
    their way sample. The KV entries of the first `num_computed_tokens` of all these are in the blocks of `block_table`,
    in order, or will be when the steps on their way have run.
    """

    key: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SequenceSampling
    state: SequenceState = SequenceState.WAITING
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    num_steps_in_flight: int = 0  #: launched and not booked, whether they sample for it or not
    block_table: list[int] = field(default_factory=list)
    arrival: int = 0  #: the place in the order of arrival; the scheduler gives it

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV entries are still to be computed: 1 while decoding, more during prefill."""
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def awaits_its_last_token(self) -> bool:
        """True if the steps on their way sample all that it may still get: there is nothing to compute."""
        return (
            self.num_pending_tokens > 0 and self.num_output_tokens + self.num_pending_tokens >= self.sampling.max_tokens
        )

    @property
    def reached_max_tokens(self) -> bool:
        return self.num_output_tokens >= self.sampling.max_tokens

    @property
    def max_num_tokens(self) -> int:
        """How long prompt and output become at most."""
        return self.num_prompt_tokens + self.sampling.max_tokens

    def blocks_to_finish(self, block_size: int) -> int:
        """How many more blocks the table can come to need. The last token's KV entry is never computed."""
        return self.blocks_needed(self.max_num_tokens - 1 - self.num_computed_tokens, block_size)

    def blocks_needed(self, num_query_tokens: int, block_size: int) -> int:
        """How many more blocks the table needs before `num_query_tokens` further tokens can be computed."""
        total = -(-(self.num_computed_tokens + num_query_tokens) // block_size)
        return max(0, total - len(self.block_table))


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One sequence's part in a step: `num_query_tokens` tokens from `start` on are computed.

    `start` and `samples` are as the sequence was when it was scheduled; `samples` is true if the last token that it has
    is computed, so that the next one can be sampled.
    """

    sequence: Sequence
    num_query_tokens: int
    start: int = field(init=False)
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", self.sequence.num_computed_tokens)
        object.__setattr__(self, "samples", self.num_query_tokens == self.sequence.num_uncomputed_tokens)

    @property
    def decodes(self) -> bool:
        """True for one token whose successor is sampled."""
        return self.samples and self.num_query_tokens == 1
