"""Which rank is to blame, as a table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptrun.launch.blame import RankEnd, combine, signal_name
from ckptrun.records import StopReason


def word(
    rank: int, reason: str = "done", *, error: str | None = None, collective: bool = False, exit_code: int = 1
) -> dict[str, Any]:
    """A rank's last word."""
    told = None
    if error is not None:
        told = {
            "type": "ValueError",
            "message": error,
            "hint": None,
            "exit_code": exit_code,
            "traceback": f"Traceback\n{error}",
            "collective": collective,
        }
    return {
        "rank": rank,
        "stop_reason": "exception" if error is not None else reason,
        "step": 5,
        "epoch": 1,
        "error": told,
        "user_error": error is not None and not collective,
        "save_error": None,
        "finished_by": "max_steps",
        "built": True,
        "results": None,
    }


def end(rank: int, outcome: dict[str, Any] | None = None, code: int | None = 0, **more: Any) -> RankEnd:
    return RankEnd(rank, "here", outcome, code, more.pop("order", rank), **more)


DONE_0, DONE_1 = end(0, word(0)), end(1, word(1))
STOPPED_0 = end(0, word(0, "sigterm"))
CUT_OFF_0 = end(0, word(0, error="Connection closed by peer", collective=True), 1)
RAISED_1 = end(1, word(1, error="theirs"), 1)
KILLED_1 = end(1, None, -9)
ENDED_BY_US_0 = end(0, None, -9, ended_by_us=True)


@pytest.mark.parametrize(
    ("ends", "reason", "message"),
    [
        pytest.param([DONE_0, DONE_1], StopReason.DONE, None, id="both done"),
        pytest.param([STOPPED_0, end(1, word(1, "sigterm"))], StopReason.SIGTERM, None, id="both stopped"),
        pytest.param([CUT_OFF_0, RAISED_1], StopReason.EXCEPTION, "theirs", id="a traceback before what follows"),
        pytest.param([ENDED_BY_US_0, RAISED_1], StopReason.EXCEPTION, "theirs", id="before one that we ended"),
        pytest.param(
            [KILLED_1, end(0, word(0, error="first"), 1)], StopReason.EXCEPTION, "first", id="before a signal"
        ),
        pytest.param(
            [end(0, word(0, error="late"), 1, order=2), end(1, word(1, error="early"), 1, order=1)],
            StopReason.EXCEPTION, "early", id="the first of two",
        ),
        pytest.param([CUT_OFF_0, KILLED_1], StopReason.RANK_LOST, "rank 1 on here was killed by SIGKILL", id="signal"),
        pytest.param([CUT_OFF_0, end(1, None, 3)], StopReason.RANK_LOST, "exit code 3 and without a word", id="code"),
        pytest.param(
            [KILLED_1, end(0, None, -9, out_of_memory=True)], StopReason.RANK_LOST, "rank 0 .* ran out of memory",
            id="memory before a signal",
        ),
        pytest.param(
            [end(0, None, -9, stood_still_s=9.0), end(1, None, -9, stood_still_s=8.0)],
            StopReason.HANG, "ranks 0 and 1 on here stood still for 9 s", id="all who stand still are named",
        ),
        pytest.param([CUT_OFF_0, DONE_1], StopReason.EXCEPTION, "Connection closed", id="only the network to blame"),
        pytest.param([end(0, word(0), -6), DONE_1], StopReason.DONE, None, id="an abort after the last word"),
        pytest.param([DONE_0, KILLED_1], StopReason.RANK_LOST, "SIGKILL", id="killed before its last word"),
        pytest.param(
            [STOPPED_0, end(1, word(1, error="gloo: closed", collective=True), 1)], StopReason.SIGTERM, None,
            id="one that left as asked took the other with it",
        ),
        pytest.param(
            [STOPPED_0, end(1, None, -9, ended_by_us=True)], StopReason.SIGTERM, None,
            id="one that was stopped in its set-up, and the one that waited for it",
        ),
        pytest.param([STOPPED_0, RAISED_1], StopReason.EXCEPTION, "theirs", id="an error while stopping"),
        pytest.param([end(0, None, None)], StopReason.RANK_LOST, "rank 0 on here is gone", id="nobody knows"),
    ],
)  # fmt: skip
def test_blame(ends: list[RankEnd], reason: StopReason, message: str | None) -> None:
    outcome = combine(ends, step=7, logs="logs")
    assert outcome.stop_reason is reason
    if message is None:
        assert outcome.error is None
    else:
        assert outcome.error is not None
        with pytest.raises(type(outcome.error), match=message):
            raise outcome.error


def test_a_lost_rank_ends_where_training_is_known_to_have_been() -> None:
    assert combine([KILLED_1], step=7).step == 7
    assert combine([KILLED_1, CUT_OFF_0], step=3).step == 5


def test_the_exit_code_of_an_error_of_ours_is_kept() -> None:
    outcome = combine([end(0, word(0, error="wrong", exit_code=2), 1)])
    assert outcome.error.exit_code == 2  # type: ignore[union-attr]


def test_signals_have_names_or_numbers() -> None:
    assert (signal_name(9), signal_name(39)) == ("SIGKILL", "signal 39")


def test_a_host_that_is_lost_is_told_once_with_its_ranks() -> None:
    why = "hostb is gone (its connection was closed)"
    gone = [replace(end(rank, None, -9), host="hostb", host_lost=why) for rank in (2, 3)]
    outcome = combine([CUT_OFF_0, end(1, None, -9, ended_by_us=True), *gone], step=7)
    assert outcome.stop_reason is StopReason.RANK_LOST
    assert outcome.step == 7
    assert str(outcome.error).splitlines()[0] == f"ranks 2 and 3 are lost with the host: {why}"
    (one,) = [replace(end(1, None, -9), host="hostb", host_lost=why)]
    assert str(combine([CUT_OFF_0, one]).error).startswith("rank 1 is lost with the host: hostb is gone")


def test_ranks_that_stand_still_on_several_hosts() -> None:
    still = [
        replace(end(rank, None, -9, stood_still_s=60.0), host=host) for rank, host in ((0, "a"), (1, "b"))
    ]
    assert str(combine(still).error).startswith("ranks 0 on a and 1 on b stood still for 60 s")
