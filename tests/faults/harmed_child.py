"""The engine's real child with one fault in it: a step with the token INFERQ_TEST_POISON dies, or never comes back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any


def main() -> None:
    from inferq.engine import process
    from inferq.engine.runner import ModelRunner
    from inferq.engine.sequence import Scheduled

    compute, poison = ModelRunner.launch, int(os.environ["INFERQ_TEST_POISON"])

    def launch(self: ModelRunner, scheduled: Sequence[Scheduled]) -> Any:
        if any(poison in item.sequence.token_ids for item in scheduled):
            if os.environ["INFERQ_TEST_HARM"] == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1e6)
        return compute(self, scheduled)

    ModelRunner.launch = launch  # type: ignore[method-assign]
    process.main()


if __name__ == "__main__":
    main()
