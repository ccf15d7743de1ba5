"""Which right name is nearest to a wrong one?

Decision: difflib over names with case, dashes and underscores evened out, so that ``maxSteps`` and
``max-steps`` find ``max_steps``. Turned down: a spelling library, for one dependency more and the same
answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


def _plain(name: str) -> str:
    return re.sub(r"[-_\s]", "", name).lower()


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that ``name`` was most likely meant to be, or None where none is near."""
    import difflib  # only a mistake pays for it

    plain: dict[str, str] = {}
    for candidate in candidates:
        plain.setdefault(_plain(candidate), candidate)
    found = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=0.65)
    return plain[found[0]] if found else None


def did_you_mean(name: str, candidates: Iterable[str], *, prefix: str = "") -> str | None:
    """Return ``Did you mean <prefix><candidate>?`` for the nearest candidate, or None."""
    found = nearest(name, candidates)
    return None if found is None else f"Did you mean {prefix}{found}?"
