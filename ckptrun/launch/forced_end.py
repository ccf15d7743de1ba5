"""How does an evaluation end that does not end by itself? At once, and saying why.

A fit has a :class:`~ckptrun.launch.supervisor.Supervisor` for that, which writes the run's files too. Decision: an
evaluation has nothing of the run's to write, so all that is left of it is one line and, where it hung, its stacks in
its own folder. Turned down: ending it without a word, which looks like a crash.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable

from ckptrun.stop import StopListener, StopRequest, end_now

_SAID_S = 0.5  # stderr may be in the hands of a thread that hangs


def end_evaluation_by_force(listener: StopListener, folder: str | None, say: Callable[[str], None]) -> None:
    """Have ``listener`` end an evaluation by a second Ctrl-C or after the grace period.

    Args:
        folder: the evaluation's own folder; None for nowhere.
        say: shows one line.
    """

    def forced(request: StopRequest) -> None:
        end(request, "forced by a second Ctrl-C")

    def grace_over(request: StopRequest) -> None:
        why = f"the work did not end within the grace period of {listener.grace_s:g} s"
        stacks = None if folder is None else os.path.join(folder, "stacks.log")
        if stacks is not None and _dump_stacks(stacks):
            why += f"; its stacks are in {stacks}"
        end(request, why)

    def end(request: StopRequest, why: str) -> None:
        said = threading.Thread(target=say, args=(why,), daemon=True)
        said.start()
        said.join(_SAID_S)
        end_now(request)

    listener.on_force, listener.on_grace_over = forced, grace_over


def _dump_stacks(path: str) -> bool:
    try:
        with open(path, "w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
    except OSError:
        return False
    return True
