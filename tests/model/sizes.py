"""What is searched: small worlds, each with other accidents, and how many states each has at the least."""

from __future__ import annotations

from typing import NamedTuple

from model.actions import Config
from model.scripts import Limits
from model.state import Budget


class Size(NamedTuple):
    at_least: int  #: states; fewer mean that something cannot happen any more
    config: Config


ONE, TWO = {"workers": 1, "tokens": 1}, {"workers": 2, "tokens": 1}
SIZES = {
    "a worker dies": Size(600, Config(**TWO, budget=Budget(crashes=1))),
    "workers die": Size(800, Config(**TWO, cancels=False, budget=Budget(crashes=3))),
    "a worker sleeps": Size(2_800, Config(**TWO, budget=Budget(pauses=1))),
    "two tokens": Size(12_000, Config(budget=Budget(pauses=1))),
    "three tokens": Size(18_000, Config(tokens=3, cancels=False, budget=Budget(pauses=1))),
    "three workers": Size(38_000, Config(workers=3, tokens=1, budget=Budget(pauses=2))),
    "three attempts": Size(
        18_000, Config(**TWO, cancels=False, limits=Limits(3, 1), budget=Budget(crashes=2, pauses=1))
    ),
    "two jobs, one worker": Size(11_000, Config(**ONE, jobs=2, cancels=False, budget=Budget(crashes=1))),
    "two jobs": Size(17_000, Config(**TWO, jobs=2, cancels=False, budget=Budget(crashes=1))),
    "a deadline": Size(8_000, Config(**TWO, deadline=True, budget=Budget(pauses=1))),
    "a worker dies, another sleeps": Size(65_000, Config(budget=Budget(crashes=1, pauses=1))),
    "a reply is lost": Size(2_300, Config(workers=1, budget=Budget(losses=1))),
    "a reply is lost, a worker sleeps": Size(140_000, Config(budget=Budget(losses=1, pauses=1))),
    "a reply is lost, the server fails over": Size(80_000, Config(workers=1, budget=Budget(losses=1, failovers=1))),
    "a worker drains": Size(250, Config(**TWO, budget=Budget(drains=1))),
    "a worker drains and sleeps": Size(12_000, Config(**TWO, budget=Budget(drains=1, pauses=1))),
    "the id is used again": Size(12_000, Config(**TWO, budget=Budget(resubmissions=1, pauses=1))),
    "the server fails over": Size(9_000, Config(workers=1, budget=Budget(failovers=1))),
    "it fails over, a worker dies": Size(47_000, Config(**TWO, budget=Budget(failovers=1, crashes=1))),
    "it fails over, a worker sleeps": Size(130_000, Config(**TWO, budget=Budget(failovers=1, pauses=1))),
    "its clock goes back": Size(2_500, Config(**ONE, clock_back=True, budget=Budget(failovers=1))),
    "its clock goes back, a worker dies": Size(
        40_000, Config(**TWO, clock_back=True, budget=Budget(failovers=1, crashes=1))
    ),
    "its clock goes back, a worker sleeps": Size(
        200_000, Config(**TWO, clock_back=True, budget=Budget(failovers=1, pauses=1))
    ),
    "its clock goes back, two tokens": Size(
        40_000, Config(cancels=False, clock_back=True, budget=Budget(failovers=1, crashes=1))
    ),
    "it loses the job": Size(14_000, Config(**ONE, lost_enqueue=True, budget=Budget(failovers=1, resubmissions=1))),
    "it loses the job, and its clock goes back": Size(
        84_000, Config(**TWO, lost_enqueue=True, clock_back=True, budget=Budget(failovers=1, resubmissions=1))
    ),
    "a reader resumes": Size(9_500, Config(**ONE, budget=Budget(failovers=1, resumes=1))),
    "a reader gets one entry at a time": Size(9_000, Config(workers=1, read_by_one=True, budget=Budget(failovers=1))),
}
