"""Starting a process that does not outlive the one that started it.

Knows sessions and Linux's parent-death signal; knows nothing of what it starts. Elsewhere than on Linux, and for a
child started from another thread than the main one, a child must watch for its parent's end itself: the engine's
child does, by the end of its pipe.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO, Any, Final

_PR_SET_PDEATHSIG: Final = 1
#: Looked up on import: between fork and exec nothing may be loaded.
_prctl: Final[Any] = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

_Stream = int | IO[Any] | None


def spawn_bound(
    args: Sequence[str],
    *,
    pass_fds: Collection[int] = (),
    env: Mapping[str, str] | None = None,
    stdin: _Stream = subprocess.DEVNULL,
    stdout: _Stream = None,
    stderr: _Stream = None,
) -> subprocess.Popen[bytes]:
    """Start `args` in a session of its own (Ctrl-C does not reach it), killed by the kernel when its parent dies.

    The signal comes when the thread that forked ends, so it is asked for only from the main thread.
    Raises OSError where the program cannot be started.
    """
    bound = _prctl is not None and threading.current_thread() is threading.main_thread()
    with warnings.catch_warnings():
        # Python 3.12 and later warn of a fork beside threads. What runs in between here is two system calls.
        warnings.simplefilter("ignore", DeprecationWarning)
        return subprocess.Popen(
            args,
            pass_fds=tuple(pass_fds),
            env=env,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()) if bound else None,
        )


def _die_with(parent: int) -> Callable[[], None]:
    kill = int(signal.SIGKILL)

    def ask_for_the_signal() -> None:
        _prctl(_PR_SET_PDEATHSIG, kill, 0, 0, 0)
        if os.getppid() != parent:  # it died before the signal was asked for
            os._exit(1)

    return ask_for_the_signal
