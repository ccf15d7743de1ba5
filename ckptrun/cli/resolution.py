"""How does a resolution look on the terminal, and in JSON where there is none?

The words are :mod:`ckptrun.resolve.explain`'s; ``resolve``, ``--dry-run`` and ``--json`` all show what stands
there, so that they cannot tell different stories.
"""

from __future__ import annotations

from typing import Any

from ckptrun.cli.output import table
from ckptrun.records import Resolution
from ckptrun.resolve.explain import headline, rule_text, table_rows

_COLOURS = {"taken": "green", "rejected": "yellow", "not reached": "dim"}


def lines(resolution: Resolution, *, all_candidates: bool = False) -> list[str]:
    """The answer, what the rule says that gave it, and a table of the candidates."""
    shown = [headline(resolution), f"rule {resolution.rule}: {rule_text(resolution.rule)}"]
    rows = table_rows(resolution, all_candidates)
    if rows:
        header = ["verdict", "checkpoint", "step", "save", "reason", "why"]
        shown += ["", *table(header, rows, right=[2, 3], colour=_colour)]
    more = resolution.num_not_reached - sum(row.verdict == "not reached" for row in rows)
    if more > 0:
        shown.append(f"and {more} more that were not reached; --all lists them")
    return shown


def without_resolution(ref: str | None, error: dict[str, Any]) -> dict[str, Any]:
    """The document of ``resolve --json`` where the config or the usage is wrong and nothing was resolved."""
    return {
        "ref": ref,
        "rule": None,
        "fresh": False,
        "path": None,
        "step": None,
        "warnings": [],
        "notices": [],
        "candidates": [],
        "num_not_reached": 0,
        "error": error,
    }


def _colour(column: int, text: str) -> str | None:
    return _COLOURS.get(text.strip()) if column == 0 else None
