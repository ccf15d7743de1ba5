"""At which step do all ranks stop, save, or find their time over? They ask each other every so many steps.

Decision: one small all-reduce on a CPU group about every half second, the number of steps until the next carried
along in it, so that all ranks ask at the same step. In between the loop compares two integers, and looks at the clock:
where steps have become slow the next asking may be far away, and the ranks meet earlier, through the store that they
met in, if all of them are late at the same step. Turned down: asking in every step (a third of a millisecond each
time), and a message from the supervisor that names a step (a rank may have passed it when the message comes).

A wish that user code has on one rank alone (``trainer.should_stop``, ``StopTraining``) travels in the same exchange.
Where every rank has it at the same step, which the store tells, training ends at that step.
"""

from __future__ import annotations

import time
from enum import IntEnum

from ckptrun.fit.context import StopSource
from ckptrun.records import StopReason
from ckptrun.stop import StopRequest
from ckptrun.strategies.strategy import Strategy

ASK_EVERY_S = 0.5
LATE_S = 0.75  # since they last asked, and ranks ask each other before it is due
MEET_S = 0.1  # how long one that is late waits for the others to be: they do the same steps
WISH_S = 2.0  # how long one that wishes to stop waits for the others to wish it at the same step
_MOST_STEPS = 1 << 20
_REASONS = tuple(StopReason)
_NO_SAVE = 500  # more than any signal's number


class Wish(IntEnum):
    """What user code asks for; the larger one counts."""

    GO_ON = 0
    SHOULD_STOP = 1
    STOP_TRAINING = 2


class Agreement:
    """What all ranks know of the requests; has the attributes of a StopSource, changed by :meth:`ask` only.

    Args:
        source: this rank's own view, which a thread changes at any time.
    """

    def __init__(self, source: StopSource, strategy: Strategy) -> None:
        self.request: StopRequest | None = None
        self.save_requested = 0
        self.time_over = False
        self.wish = Wish.GO_ON
        self.clock_s = 0.0  # rank 0's clock when it was last asked: what ranks decide by it they decide alike
        self.asked_s = 0.0  # seconds spent in asking
        self._source = source
        self._strategy = strategy
        self._asked_at = self._met_at = time.monotonic()
        self._times_asked = 0
        self._own_wish = Wish.GO_ON

    def ask(self, *, time_over: bool = False, since: int | None = None, wish: Wish = Wish.GO_ON) -> int:
        """Ask all ranks; every rank must call it at the same point.

        Args:
            time_over: this rank's clock says that the time of the training is over.
            since: steps (or batches) since the last call that was due; None for a call between two of them.
            wish: what this rank's user code asks for now; what it asked for before is not forgotten.

        Returns:
            After how many more steps to ask again; the same on all ranks.
        """
        began = time.monotonic()
        # Between the ranks the smallest proposal wins, so it travels as a negative number in a maximum.
        clock_ms = int(began * 1000) if self._strategy.rank == 0 else 0
        stop, saves, over, wished, clock_ms, steps = self._strategy.agree(
            [
                _code(self._source.request),
                self._source.save_requested,
                int(time_over),
                max(wish, self._own_wish),
                clock_ms,
                -self._proposal(began, since),
            ]
        )
        if stop and self.request is None:
            reason, rest = _REASONS[stop // 1000 - 1], stop % 1000
            self.request = StopRequest(reason, rest % _NO_SAVE or None, began, no_save=rest >= _NO_SAVE)
        self.save_requested = saves
        self.time_over = bool(over)
        self.wish = Wish(wished)
        self.clock_s = clock_ms / 1000
        self._met_at = time.monotonic()
        self._times_asked += 1
        self.asked_s += self._met_at - began
        return -steps

    def late(self, step: int) -> bool:
        """Whether all ranks find at this step that they have not asked each other for too long.

        Only for ranks that no step can leave behind (:attr:`Strategy.in_step`), at every step.
        """
        began = time.monotonic()
        if began - self._met_at < LATE_S:
            return False
        all_late = self._strategy.all_here(f"late/{self._times_asked}/{step}", MEET_S)
        self.asked_s += time.monotonic() - began
        return all_late

    def all_wish(self, wish: Wish, point: str) -> bool:
        """Whether every rank wishes to stop at this very point; else the wish waits until they next ask each other.

        Raises nothing and asks for nothing that the others would have to answer.
        """
        if self.wish >= wish:
            return True
        if self._own_wish >= wish:
            return False  # alone with it
        self._own_wish = wish
        if self._strategy.all_here(f"wish/{int(wish)}/{point}", WISH_S):
            self.wish = wish
            return True
        return False

    def _proposal(self, now: float, since: int | None) -> int:
        if since is None:
            return 1
        per_step_s = max(1e-7, (now - self._asked_at) / max(1, since))
        self._asked_at = now
        # At most twice as many as the last time: the first steps may be quick ones, from batches read ahead.
        return max(1, min(_MOST_STEPS, 2 * since, int(ASK_EVERY_S / per_step_s)))


def _code(request: StopRequest | None) -> int:
    """A request as a number: larger ones win, and 0 is none."""
    if request is None:
        return 0
    number = (_REASONS.index(request.reason) + 1) * 1000 + (request.signum or 0)
    return number + _NO_SAVE if request.no_save else number
