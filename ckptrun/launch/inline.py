"""How does a single rank run? In the supervisor's own process, so that a debugger works."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ckptrun.errors import CkptrunError
from ckptrun.records import Outcome, StopReason

if TYPE_CHECKING:
    from ckptrun.fit.context import RankContext

RankMain = Callable[["RankContext"], Outcome]


def run_inline(rank_main: RankMain, context: RankContext) -> Outcome:
    """Run the rank's work here. Raises nothing that the work raised: that is in the outcome."""
    try:
        return rank_main(context)
    except KeyboardInterrupt:
        # Only where signals cannot be caught; otherwise the listener has taken it.
        return Outcome(StopReason.KEYBOARD)
    except CkptrunError as error:
        return Outcome(StopReason.EXCEPTION, error=error)
    except BaseException as error:
        return Outcome(StopReason.EXCEPTION, error=error, user_error=True)
