"""A rank that runs in this very process: whatever it does comes back as an outcome."""

from __future__ import annotations

import threading

import pytest

from ckptrun.errors import IncompatibleError
from ckptrun.fit.context import RankContext
from ckptrun.launch.inline import run_inline
from ckptrun.records import Outcome, StopReason


def test_the_rank_runs_here_so_that_a_debugger_works() -> None:
    seen = []

    def work(context: RankContext) -> Outcome:
        seen.append((threading.current_thread(), context.rank))
        return Outcome(StopReason.DONE, 3)

    assert run_inline(work, RankContext()) == Outcome(StopReason.DONE, 3)
    assert seen == [(threading.current_thread(), 0)]


@pytest.mark.parametrize(
    ("error", "reason", "user_error"),
    [
        (ValueError("x"), StopReason.EXCEPTION, True),
        (SystemExit(3), StopReason.EXCEPTION, True),
        (IncompatibleError("x"), StopReason.EXCEPTION, False),
    ],
)
def test_what_it_raises_is_in_the_outcome(error: BaseException, reason: StopReason, user_error: bool) -> None:
    def work(_: RankContext) -> Outcome:
        raise error

    outcome = run_inline(work, RankContext())
    assert (outcome.stop_reason, outcome.error, outcome.user_error) == (reason, error, user_error)


def test_a_keyboard_interrupt_where_signals_cannot_be_caught() -> None:
    def work(_: RankContext) -> Outcome:
        raise KeyboardInterrupt

    assert run_inline(work, RankContext()) == Outcome(StopReason.KEYBOARD)
