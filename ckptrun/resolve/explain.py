"""How is a resolution told, to a program and to a reader?

Decision: the JSON is a stable contract and holds facts only; the table is for people and may change. Both are
made from the resolution alone, so neither can say what was not decided.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from ckptrun.records import Candidate, CheckpointRecord, FreshStart, Resolution
from ckptrun.resolve.facts import NUM_LISTED
from ckptrun.resolve.rules import RULES


class Row(NamedTuple):
    """One line of the table, as text."""

    verdict: str
    name: str
    step: str
    sequence: str
    reason_saved: str
    why: str


def to_json(resolution: Resolution, all_candidates: bool = False) -> dict[str, Any]:
    """The document of ``resolve --json``.

    The taken candidate, all turned down before it, and 20 of those not reached at most, or all of them with
    ``all_candidates`` (as far as the resolution lists them).
    """
    error = resolution.error
    return {
        "ref": resolution.ref,
        "rule": resolution.rule,
        "fresh": resolution.fresh,
        "path": None if resolution.path is None else os.path.abspath(resolution.path),
        "step": resolution.step,
        "warnings": list(resolution.warnings),
        "notices": list(resolution.notices),
        "candidates": [
            {
                "path": candidate.path,
                "step": candidate.step,
                "sequence": candidate.sequence,
                "reason_saved": candidate.reason_saved,
                "verdict": candidate.verdict,
                "why": candidate.why,
            }
            for candidate in _listed(resolution, all_candidates)
        ],
        "num_not_reached": resolution.num_not_reached,
        "error": None
        if error is None
        else {"exit_code": error.exit_code, "message": error.message, "hint": error.hint},
    }


def table_rows(resolution: Resolution, all_candidates: bool = False) -> list[Row]:
    """The candidates as text, in the order in which they were looked at."""
    return [
        Row(
            candidate.verdict,
            os.path.basename(candidate.path),
            _text(candidate.step),
            _text(candidate.sequence),
            candidate.reason_saved or "",
            candidate.why,
        )
        for candidate in _listed(resolution, all_candidates)
    ]


def headline(resolution: Resolution) -> str:
    """The answer in one line."""
    by = f"rule {resolution.rule}" + (f", {resolution.ref}" if resolution.ref else "")
    match resolution.answer:
        case CheckpointRecord(path=path, step=step):
            return f"step {step} from {path} ({by})"
        case FreshStart(init_from=None):
            return f"fresh start ({by})"
        case FreshStart(init_from=init_from):
            return f"fresh start with the weights of {init_from} ({by})"
        case str(path):
            return f"the weights in {path} ({by})"
        case None:
            return f"no answer ({by})"


def passed_over(resolution: Resolution) -> list[str]:
    """One line for each checkpoint that was turned down before the one taken; empty where nothing was taken."""
    if not isinstance(resolution.answer, CheckpointRecord):
        return []
    return [
        f"{candidate.path} is passed over: {candidate.why}"
        for candidate in resolution.candidates
        if candidate.verdict == "rejected"
    ]


def rule_text(number: int) -> str:
    """What the rule says, in one line."""
    return (RULES[number].__doc__ or "").strip()


def _listed(resolution: Resolution, all_candidates: bool) -> list[Candidate]:
    listed, num_not_reached = [], 0
    for candidate in resolution.candidates:
        if candidate.verdict == "not reached":
            num_not_reached += 1
            if num_not_reached > NUM_LISTED and not all_candidates:
                continue
        listed.append(candidate)
    return listed


def _text(number: int | None) -> str:
    return "" if number is None else str(number)
