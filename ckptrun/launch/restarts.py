"""After a failure: another attempt, or the end? A pure function over what the attempts did.

A restart helps where the machine failed; it does not help where the same checkpoint leads to the same failure at the
same step, or where attempts die without getting anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptrun.records import StopReason

_FAILURES = (StopReason.EXCEPTION, StopReason.RANK_LOST, StopReason.HANG)
_WITHOUT_PROGRESS = 3


@dataclass(frozen=True)
class Tried:
    """One attempt: from which checkpoint, and how far it came.

    ``resolved`` is the checkpoint's path, None for a fresh start, and ``before`` the name of the one before it on the
    line. ``final``: the error says that no other attempt does better (a wrong config, a checkpoint that does not fit).
    """

    stop_reason: StopReason
    resolved: str | None
    start_step: int
    end_step: int
    before: str | None = None
    final: bool = False


def give_up(tried: Sequence[Tried], max_restarts: int) -> str | None:
    """Why there is no further attempt after the last of ``tried``; None where there is one.

    An empty text means that nothing needs to be said: it did not fail, or no restart was asked for.
    """
    last = tried[-1]
    if last.stop_reason not in _FAILURES or max_restarts == 0 or last.final:
        return ""
    if len(tried) > max_restarts:
        return f"no restart is left of --max-restarts {max_restarts}"
    if len(tried) > 1:
        before = tried[-2]
        same = (before.resolved, before.end_step) == (last.resolved, last.end_step)
        if same and last.resolved is None and last.end_step > 0:
            return f"two attempts from the beginning failed at step {last.end_step}"
        if same and last.resolved is not None:
            on = (
                "start over with --ckpt none"
                if last.before is None
                else f"the one before it is {last.before}"
            )
            return f"two attempts from {last.resolved} failed at step {last.end_step}; {on}"
    if len(tried) >= _WITHOUT_PROGRESS and not any(_progressed(tried[: n + 1]) for n in _newest(tried)):
        return f"{_WITHOUT_PROGRESS} attempts made no progress"
    return None


def _newest(tried: Sequence[Tried]) -> range:
    return range(len(tried) - _WITHOUT_PROGRESS, len(tried))


def _progressed(tried: Sequence[Tried]) -> bool:
    """Whether the last of ``tried`` came further than it began, and than any before it."""
    *earlier, last = tried
    return last.end_step > max([last.start_step, *(each.end_step for each in earlier)])
