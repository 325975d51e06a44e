"""Faults that can be planted in the model. Each stands for a line of the wire that somebody might leave out."""

from __future__ import annotations

from enum import Enum


class Mutation(Enum):
    # What an owner may write.
    NO_COMPARE = "publish does not look at the stream's last entry"
    NO_OWNER_IN_PUBLISH = "publish does not look at the lease"
    NO_OWNER_IN_FINISH = "finish does not look at the lease"
    NO_OWNER_IN_HANDBACK = "hand-back does not look at the lease"
    REPEAT_IS_APPENDED = "an entry that stands already is appended once more"
    RETRY_WITH_OTHER_BYTES = "what is sent again after a lost reply holds what was generated meanwhile"
    FINISH_LEAVES_RUNNING = "finish leaves the job in `running`"
    FINISH_LEAVES_CANCEL = "finish leaves the cancel key"
    # Epochs.
    SAME_EPOCH = "re-acquire goes on in the old epoch"
    COUNTED_EPOCHS = "epochs are a counter, not a time"
    ANY_EPOCH = "re-acquire does not look whether a later owner has begun"
    # Re-acquire and hand-back.
    ANY_JOB = "re-acquire does not look whether it is the same job"
    REACQUIRE_LEAVES_QUEUE = "re-acquire leaves the job in `queue`"
    REACQUIRE_THE_DEAD = "re-acquire does not look whether there is a job"
    REACQUIRE_THE_LEASED = "re-acquire does not look who holds the lease"
    BACK_LEAVES_LEASE = "hand-back leaves the lease"
    BACK_COSTS_AN_ATTEMPT = "hand-back costs an attempt"
    BACK_FORGETS_CANCEL = "hand-back does not look whether the job is cancelled"
    # Takeover.
    TOKENS_FROM_ZERO = "the next owner begins at the first token"
    OWNER_TRUSTS_ITSELF = "an owner that has its stream back does not look at what that holds"
    GOES_ON_BEHIND_THE_END = "an owner that has its stream back goes on behind another one's last delta"
    NO_TAKEOVER = "a job whose owner is gone is left alone"
    CLAIM_IGNORES_CANCEL = "a claim starts what is cancelled"
    CLAIM_TAKES_LEASED = "a claim takes what somebody holds"
    GRACE_COSTS = "a takeover in the time of grace costs an attempt"
    GRACE_FOR_EVER = "takeovers in the time of grace are free for ever"
    LOSSES_ARE_FREE = "takeovers cost no attempt"
    # Cancel and expiry.
    CANCEL_THE_DEAD = "cancel writes its key for a job that is none"
    CANCEL_ENDS_LEASED = "cancel ends what somebody runs"
    EXPIRE_ENDS_LEASED = "expiry ends what somebody runs"
    # Readers.
    READER_IGNORES_EPOCHS = "a reader goes on at another epoch"
    READER_YIELDS_WHOLE = "a reader yields the whole of a delta that it has in part"
    READER_SKIPS_PARTS = "a reader skips a delta that it has in part"
    READER_NEVER_LOOKS = "a reader does not look at the stream's end"


NONE: frozenset[Mutation] = frozenset()
