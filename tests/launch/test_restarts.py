"""Another attempt, or the end?"""

from __future__ import annotations

import pytest

from ckptrun.launch.restarts import Tried, give_up
from ckptrun.records import StopReason

LOST = StopReason.RANK_LOST


def tried(*steps: tuple[str | None, int, int], reason: StopReason = LOST) -> list[Tried]:
    """Attempts as (checkpoint, its step, the step where it ended)."""
    return [Tried(reason, *each) for each in steps]


@pytest.mark.parametrize(
    ("attempts", "max_restarts", "why"),
    [
        pytest.param(tried((None, 0, 9), reason=StopReason.DONE), 3, "", id="done"),
        pytest.param(tried((None, 0, 9), reason=StopReason.SIGTERM), 3, "", id="stopped"),
        pytest.param(tried((None, 0, 9)), 0, "", id="no restart was asked for"),
        pytest.param(tried((None, 0, 9)), 1, None, id="lost"),
        pytest.param(tried((None, 0, 9), reason=StopReason.HANG), 1, None, id="hung"),
        pytest.param(tried((None, 0, 9), reason=StopReason.EXCEPTION), 1, None, id="raised"),
        pytest.param(tried((None, 0, 9), ("a", 8, 12)), 1, "no restart is left", id="none left"),
        pytest.param(
            tried((None, 0, 9), ("a", 8, 9), ("a", 8, 9)),
            9,
            "two attempts from a failed at step 9",
            id="same step",
        ),
        pytest.param(
            tried((None, 0, 9), ("a", 8, 12), ("a", 8, 11)), 9, None, id="same checkpoint, another step"
        ),
        pytest.param(tried((None, 0, 9), ("a", 8, 12), ("b", 12, 12)), 9, None, id="another checkpoint"),
        pytest.param(
            tried((None, 0, 3), (None, 0, 3)),
            9,
            "two attempts from the beginning failed at step 3",
            id="fresh, same",
        ),
        pytest.param(tried((None, 0, 0), (None, 0, 0)), 9, None, id="nothing began, twice"),
        pytest.param(
            tried(*[(None, 0, 0)] * 3), 9, "3 attempts made no progress", id="nothing began, three times"
        ),
        pytest.param(
            tried((None, 0, 20), ("a", 8, 12), ("a", 8, 11), ("a", 8, 13)),
            9,
            "no progress",
            id="never further",
        ),
        pytest.param(
            tried((None, 0, 20), ("a", 8, 12), ("a", 8, 11), ("a", 8, 21)), 9, None, id="further at last"
        ),
    ],
)
def test_give_up(attempts: list[Tried], max_restarts: int, why: str | None) -> None:
    found = give_up(attempts, max_restarts)
    assert found == why if not why else why in str(found)


def test_the_checkpoint_before_is_named() -> None:
    twice = [Tried(LOST, "runs/a/2", 8, 9, before="00000001-step-00000004")] * 2
    assert "the one before it is 00000001-step-00000004" in str(give_up(twice, 5))


def test_an_error_that_says_that_nothing_helps() -> None:
    assert give_up([Tried(StopReason.EXCEPTION, None, 0, 0, final=True)], 5) == ""
