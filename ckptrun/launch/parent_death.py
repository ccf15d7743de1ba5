"""How does a process end when its parent does, and how are signals kept from it until it can take them?

The kernel is asked to kill it, and the parent is looked at after asking.
"""

from __future__ import annotations

import ctypes
import os
import signal

from ckptrun.stop import STOP_SIGNALS

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_HELD = (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Get ``signum`` when the parent ends; it is not inherited, so each fork asks again.

    Where the parent has ended in between, end now: nobody would tell.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans(adopting: bool = True) -> None:
    """Descendants whose parent ends become children of this process, so that they can still be found and ended."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopting), 0, 0, 0)


def hold_signals() -> None:
    """Let stop and save signals wait; children inherit it. One that is blocked is kept, also where it is ignored."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)


def release_signals() -> None:
    """Take the signals that have waited."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)
