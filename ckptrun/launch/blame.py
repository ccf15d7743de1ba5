"""Which rank's failure is the cause, when several ranks have failed? A pure function over what each reported.

The order of blame: an error in the user's code, the kernel's out-of-memory killer, a rank that stood still, a signal
or a silent end, and last a collective that was cut off, which only says that somebody else failed.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptrun.errors import CkptrunError
from ckptrun.records import Damage, Outcome, StopReason


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended.

    ``outcome`` is its last word, None where it had none; ``code`` its exit status (negative: the signal); ``order``
    counts ends as they were noticed; ``stood_still_s`` says for how long it had not moved, where it was ended for that.
    """

    rank: int
    host: str
    outcome: dict[str, Any] | None
    code: int | None
    order: int
    out_of_memory: bool = False
    stood_still_s: float | None = None
    ended_by_us: bool = False
    host_lost: str | None = None  # why its whole host is gone


class RankError(CkptrunError):
    """An error that a rank raised, as it was told to the supervisor."""

    def __init__(self, told: dict[str, Any], rank: int, host: str) -> None:
        super().__init__(told["message"], hint=told["hint"])
        self.exit_code = int(told["exit_code"])
        self.type_name = str(told["type"])
        damage = told.get("damage")
        self.damage = None if damage is None else Damage(**damage)
        self.traceback_text = f"Rank {rank} on {host}:\n{told['traceback']}"


class LostRankError(CkptrunError):
    """A rank is gone without a word, or stood still."""

    exit_code = 70
    type_name = ""  # its message says it all
    host_lost = False  # its whole host is gone
    none_begun = False  # no rank was there to be lost: what was to start them failed


def combine(ends: Sequence[RankEnd], *, step: int = 0, logs: str = "") -> Outcome:
    """The outcome of the attempt.

    Args:
        step: the last one that training is known to have reached, for ranks that could not say it.
        logs: the folder of the ranks' logs, for messages.
    """
    failed = sorted(
        (end for end in ends if _severity(end) is not None), key=lambda end: (_severity(end), end.order)
    )
    asked = [end for end in ends if _stopped_as_asked(end)]
    if failed and asked and all(_follows(end) for end in failed):
        # A rank that left because it was asked to takes the others' collectives with it; that is no failure.
        failed, ends = [], asked
    if not failed:
        return _outcome(min(ends, key=lambda end: end.rank))
    end = failed[0]
    if (
        end.outcome is not None
        and end.outcome["error"] is not None
        and not end.outcome["error"]["collective"]
    ):
        return _outcome(end)
    step = max([step, *(int(each.outcome["step"]) for each in ends if each.outcome is not None)])
    if end.stood_still_s is not None:
        return Outcome(StopReason.HANG, step, error=_hung(ends, logs))
    if end.host_lost is not None:
        return Outcome(StopReason.RANK_LOST, step, error=_lost_host(end, ends, logs))
    if end.outcome is not None:
        return _outcome(end)  # nobody else is to blame: the network is
    return Outcome(StopReason.RANK_LOST, step, error=_lost(end, logs))


def _hung(ends: Sequence[RankEnd], logs: str) -> LostRankError:
    still = sorted((end for end in ends if end.stood_still_s is not None), key=lambda end: end.rank)
    seconds = max(end.stood_still_s or 0.0 for end in ends)
    return LostRankError(
        f"{_named(still)} stood still for {seconds:.0f} s",
        hint=f"The stacks of their threads are in {logs}. Where a step, a save or the set-up takes that long, raise "
        "--hang-timeout-s.",
    )


def _named(ends: Sequence[RankEnd]) -> str:
    """``rank 2 on a``, ``ranks 2 and 3 on a``, ``ranks 1 on a and 2 on b``."""
    hosts = {end.host for end in ends}
    if len(hosts) == 1:
        return f"{_numbered([str(end.rank) for end in ends])} on {hosts.pop()}"
    return _numbered([f"{end.rank} on {end.host}" for end in ends])


def _numbered(names: Sequence[str]) -> str:
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"


def _lost_host(end: RankEnd, ends: Sequence[RankEnd], logs: str) -> LostRankError:
    there = sorted(each.rank for each in ends if each.host_lost is not None and each.host == end.host)
    error = LostRankError(
        f"{_numbered([str(rank) for rank in there])} {'is' if len(there) == 1 else 'are'} lost with the host: "
        f"{end.host_lost}",
        hint=f"What its ckptrun said stands in its own output, what its ranks printed in {logs}.",
    )
    error.host_lost = True
    return error


def _lost(end: RankEnd, logs: str) -> LostRankError:
    where = f"rank {end.rank} on {end.host}"
    log = f"What it printed is in {logs}."
    if end.out_of_memory:
        return LostRankError(
            f"{where} was killed by the kernel, which ran out of memory",
            hint="Ask for more memory, use fewer loader workers, or a smaller batch.",
        )
    if end.ended_by_us:
        return LostRankError(f"{where} did not end by itself once another rank had", hint=log)
    if end.code is None:
        return LostRankError(f"{where} is gone", hint=log)
    if end.code < 0:
        return LostRankError(f"{where} was killed by {signal_name(-end.code)}", hint=log)
    return LostRankError(f"{where} ended with exit code {end.code} and without a word", hint=log)


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; those without a name by their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _severity(end: RankEnd) -> int | None:
    """Smaller is more to blame; None where the rank did not fail."""
    outcome = end.outcome
    if outcome is not None:
        # What happens to a process after it has reported is a warning and not a failure.
        if outcome["error"] is None:
            return None
        return 5 if outcome["error"]["collective"] else 0
    if end.out_of_memory:
        return 1
    if end.stood_still_s is not None:
        return 2
    return 6 if end.ended_by_us else 3


def _follows(end: RankEnd) -> bool:
    """Whether the rank only ended as another one did."""
    severity = _severity(end)
    return severity is not None and severity >= 5


def _stopped_as_asked(end: RankEnd) -> bool:
    return (
        end.outcome is not None
        and end.outcome["error"] is None
        and end.outcome["stop_reason"] != StopReason.DONE
    )


def _outcome(end: RankEnd) -> Outcome:
    told = end.outcome
    assert told is not None
    error = told["error"]
    return Outcome(
        StopReason(told["stop_reason"]),
        int(told["step"]),
        int(told["epoch"]),
        error=None if error is None else RankError(error, end.rank, end.host),
        user_error=bool(told["user_error"]),
        save_error=told["save_error"],
        finished_by=told["finished_by"],
        results=told["results"],
        built=told["built"],
    )
