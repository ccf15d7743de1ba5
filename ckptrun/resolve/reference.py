"""What did the user write after ``--ckpt``?

Decision: a closed set of words, each its own kind, and everything else is a path, exactly as written; a file
that is called like a word is reached with ``./last``. Turned down: looking whether a file of that name exists
first, so that the meaning of ``--ckpt last`` would hang on the working folder.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal, get_args

from ckptrun.errors import UsageError

Kind = Literal["best", "last", "hpc", "auto", "none", "step", "epoch", "seq", "run", "url", "path"]

WORDS = ("best", "last", "hpc", "auto", "none")
NUMBERED = ("step", "epoch", "seq")
KNOWN_FORMS = "best, best:METRIC, last, hpc, auto, none, step:N, epoch:N, seq:N or a path"

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.*")
assert {*WORDS, *NUMBERED} <= set(get_args(Kind))


@dataclass(frozen=True)
class Reference:
    """A reference, taken apart.

    ``value`` is the metric of ``best:METRIC``, what follows ``run:``, or the path or URL; ``number`` is the N
    of ``step:N``, ``epoch:N`` and ``seq:N``.
    """

    text: str
    kind: Kind
    value: str | None = None
    number: int | None = None


def parse(text: str) -> Reference:
    """The reference that ``text`` writes.

    Raises:
        UsageError: it starts like one of the words and is not one (``step:ten``, ``best:``), or is empty.
    """
    if not text.strip():
        raise UsageError("--ckpt is empty", hint=f"It takes {KNOWN_FORMS}.")
    word, colon, rest = text.partition(":")
    if text in WORDS:
        return Reference(text, text)  # type: ignore[arg-type]
    if colon and word in NUMBERED:
        # Only ASCII digits: int() would also take "1_000", " 7" and "+7".
        if not re.fullmatch(r"[0-9]+", rest):
            raise UsageError(
                f"--ckpt {text}: {word}: is followed by a number, not {rest!r}", hint=f"As in {word}:1200."
            )
        return Reference(text, word, number=int(rest))  # type: ignore[arg-type]
    if colon and word == "best":
        if not rest:
            raise UsageError("--ckpt best: names no metric", hint="As in best:val_loss, or best alone.")
        return Reference(text, "best", value=rest)
    if _URL.fullmatch(text):
        return Reference(text, "url", value=text)
    if colon and word == "run":
        return Reference(text, "run", value=rest)
    return Reference(text, "path", value=text)


def nearest_word(text: str) -> str | None:
    """The reference that a lone word was probably meant to be, None where it looks like a path."""
    if "/" in text or text.startswith((".", "~")):
        return None
    word, colon, rest = text.partition(":")
    near = difflib.get_close_matches(word.lower(), (*WORDS, *NUMBERED) if colon else WORDS, n=1, cutoff=0.5)
    if not near:
        return None
    if near[0] in NUMBERED:
        return f"{near[0]}:{rest}" if rest.isdecimal() else f"{near[0]}:N"
    return f"{near[0]}:{rest}" if colon and near[0] == "best" and rest else near[0]
