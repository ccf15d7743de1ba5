from __future__ import annotations

from typing import Any

import pytest
from resolve_helpers import ck

from ckptrun.resolve.finished import Limits, nothing_left

TAKEN = ck(12, 1200)


def note(by: str, **limits: Any) -> dict[str, Any]:
    return {
        "sequence": 12,
        "name": TAKEN.name,
        "by": by,
        "max_steps": None,
        "max_epochs": None,
        "max_time_s": None,
        **limits,
    }


@pytest.mark.parametrize(
    ("finished", "limits", "changed", "left"),
    [
        (note("max_steps", max_steps=1200), Limits(max_steps=1200), False, False),
        (note("max_steps", max_steps=1200), Limits(max_steps=2400), False, True),
        (note("max_steps", max_steps=1200), Limits(max_steps=-1, max_epochs=9), False, True),
        (note("max_steps", max_steps=1200), Limits(max_steps=1000), False, False),
        (note("max_epochs", max_epochs=3), Limits(max_epochs=3), False, False),
        (note("max_epochs", max_epochs=3), Limits(max_epochs=4), False, True),
        (note("max_epochs", max_epochs=3), Limits(max_steps=5000), False, True),
        (note("max_time", max_time_s=60.0), Limits(max_time_s=60.0), False, False),
        (note("max_time", max_time_s=60.0), Limits(max_time_s=120.0), False, True),
        (note("early_stopping", max_epochs=9), Limits(max_epochs=9), False, False),
        (note("early_stopping", max_epochs=9), Limits(max_epochs=9), True, True),
        (note("early_stopping", max_epochs=9), Limits(max_epochs=20), False, True),
        (note("stop_training"), Limits(), False, False),
        (None, Limits(max_steps=1200), False, True),  # its validation may not be through
        (None, Limits(max_steps=2000), False, True),
        (None, Limits(), False, True),
        ({**note("max_epochs", max_epochs=3), "name": "another"}, Limits(max_epochs=3), False, True),
    ],
)
def test_nothing_is_left_until_a_limit_is_raised(
    finished: dict[str, Any] | None, limits: Limits, changed: bool, left: bool
) -> None:
    why = nothing_left(finished, TAKEN, limits, early_stopping_changed=changed)
    assert (why is None) == left
    if why is not None:
        assert "1200" in why
