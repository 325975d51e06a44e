"""The command `inferq-worker` on a base install, as a web app has it."""

from __future__ import annotations

import subprocess
import sys


def test_missing_packages_are_one_line_that_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['pydantic_settings'] = None; sys.argv = ['inferq-worker', '--help']; "
        "from inferq.worker.entry import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "inferq-worker: pydantic_settings is not installed: pip install 'inferq[worker]'\n"


def test_the_command_runs_the_worker() -> None:
    program = "import sys; sys.argv = ['inferq-worker', '--help']; from inferq.worker.entry import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "--max-num-seqs" in done.stdout
