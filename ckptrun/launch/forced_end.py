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


class ForcedEnd:
    """Has ``listener`` end an evaluation by a second Ctrl-C or after the grace period.

    Args:
        folder: the evaluation's own folder; None for nowhere.
        say: shows one line.

    Attributes:
        dump_ranks: makes ranks that are other processes write the stacks of all their threads to their logs, which
            are in ``folder``; None where the rank is this process.
    """

    def __init__(self, listener: StopListener, folder: str | None, say: Callable[[str], None]) -> None:
        self.dump_ranks: Callable[[], None] | None = None
        self._listener = listener
        self._folder = folder
        self._say = say
        listener.on_force, listener.on_grace_over = self._forced, self._grace_over

    def _forced(self, request: StopRequest) -> None:
        self._end(request, "forced by a second Ctrl-C")

    def _grace_over(self, request: StopRequest) -> None:
        why = f"the work did not end within the grace period of {self._listener.grace_s:g} s"
        where = None if self._folder is None else self._dump(self._folder)
        self._end(request, why if where is None else f"{why}; its stacks are in {where}")

    def _dump(self, folder: str) -> str | None:
        """Write every thread's stack; returns where."""
        if self.dump_ranks is not None:
            self.dump_ranks()
            return folder
        path = os.path.join(folder, "stacks.log")
        try:
            with open(path, "w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError:
            return None
        return path

    def _end(self, request: StopRequest, why: str) -> None:
        said = threading.Thread(target=self._say, args=(why,), daemon=True)
        said.start()
        said.join(_SAID_S)
        end_now(request)
