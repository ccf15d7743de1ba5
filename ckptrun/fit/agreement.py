"""At which step do all ranks stop, save, or find their time over? They ask each other every so many steps.

Decision: one small all-reduce on a CPU group about every half second, the number of steps until the next carried
along in it, so that all ranks ask at the same step. In between the loop compares two integers. Turned down: asking in
every step (a third of a millisecond each time), and a message from the supervisor that names a step (a rank may have
passed it when the message comes).
"""

from __future__ import annotations

import time

from ckptrun.fit.context import StopSource
from ckptrun.records import StopReason
from ckptrun.stop import StopRequest
from ckptrun.strategies.strategy import Strategy

ASK_EVERY_S = 0.5
_MOST_STEPS = 1 << 20
_REASONS = tuple(StopReason)


class Agreement:
    """What all ranks know of the requests; has the attributes of a StopSource, changed by :meth:`ask` only.

    Args:
        source: this rank's own view, which a thread changes at any time.
    """

    def __init__(self, source: StopSource, strategy: Strategy) -> None:
        self.request: StopRequest | None = None
        self.save_requested = 0
        self.time_over = False
        self.clock_s = 0.0  # rank 0's clock when it was last asked: what ranks decide by it they decide alike
        self.asked_s = 0.0  # seconds spent in asking
        self._source = source
        self._strategy = strategy
        self._asked_at = time.monotonic()

    def ask(self, *, time_over: bool = False, since: int | None = None) -> int:
        """Ask all ranks; every rank must call it at the same point.

        Args:
            time_over: this rank's clock says that the time of the training is over.
            since: steps (or batches) since the last call that was due; None for a call between two of them.

        Returns:
            After how many more steps to ask again; the same on all ranks.
        """
        began = time.monotonic()
        # Between the ranks the smallest proposal wins, so it travels as a negative number in a maximum.
        clock_ms = int(began * 1000) if self._strategy.rank == 0 else 0
        stop, saves, over, clock_ms, steps = self._strategy.agree(
            [
                _code(self._source.request),
                self._source.save_requested,
                int(time_over),
                clock_ms,
                -self._proposal(began, since),
            ]
        )
        if stop and self.request is None:
            reason, signum = _REASONS[stop // 1000 - 1], stop % 1000
            self.request = StopRequest(reason, signum or None, began)
        self.save_requested = saves
        self.time_over = bool(over)
        self.clock_s = clock_ms / 1000
        self.asked_s += time.monotonic() - began
        return -steps

    def _proposal(self, now: float, since: int | None) -> int:
        if since is None:
            return 1
        per_step_s = max(1e-7, (now - self._asked_at) / max(1, since))
        self._asked_at = now
        # At most twice as many as the last time: the first steps may be quick ones, from batches read ahead.
        return max(1, min(_MOST_STEPS, 2 * since, int(ASK_EVERY_S / per_step_s)))


def _code(request: StopRequest | None) -> int:
    """A request as a number: larger ones win, and 0 is none."""
    return 0 if request is None else (_REASONS.index(request.reason) + 1) * 1000 + (request.signum or 0)
