"""What is a checkpoint's folder called, and what does a name say?

Decision: the save counter stands in front, so a name is never used twice and ordering needs no look inside;
numbers are compared as numbers, so save 100000000 comes after 99999999. Turned down: step in front, which two
saves of one step, or a rewound run, would share; and sorting names as text, where 9900 comes after 10000.

    checkpoints/00000042-step-00001200/     a checkpoint
    checkpoints/.tmp-00000043-step-00001300/    being written; swept by the next holder of the lease
    checkpoints/.trash-00000007-step-00000200/  being deleted; swept too
"""

from __future__ import annotations

import re
from typing import NamedTuple

TEMPORARY_PREFIX = ".tmp-"
TRASH_PREFIX = ".trash-"

_NUM_DIGITS = 8
_NAME = re.compile(r"([0-9]{8}|[1-9][0-9]{8,})-(.+)", re.DOTALL)
_STEP_LABEL = re.compile(r"step[-=]([0-9]+)")
_UNWANTED = re.compile(r"[/\\\s\x00-\x1f\x7f]+")
# A name has at most 255 bytes on common file systems; the counter and the prefixes above need their part.
_MAX_LABEL_BYTES = 180


class ParsedName(NamedTuple):
    """The two parts of a checkpoint folder's name."""

    sequence: int
    label: str

    @property
    def step(self) -> int | None:
        """The step that the label tells, where it tells one (``step-00001200`` or ``step=1200``)."""
        found = _STEP_LABEL.search(self.label)
        return int(found.group(1)) if found else None


def folder_name(sequence: int, label: str) -> str:
    """The folder name of save ``sequence``.

    Raises:
        ValueError: ``sequence`` is below 1, or the label is empty after :func:`sanitize_label`.
    """
    if sequence < 1:
        raise ValueError(f"The save counter starts at 1, not {sequence}")
    cleaned = sanitize_label(label)
    if not cleaned:
        raise ValueError(f"The label {label!r} has no character that a folder name can hold")
    return f"{sequence:0{_NUM_DIGITS}d}-{cleaned}"


def step_label(step: int) -> str:
    """The label of a checkpoint whose callback has no filename template."""
    return f"step-{step:08d}"


def parse(name: str) -> ParsedName | None:
    """The parts of ``name``, None where it is not a checkpoint's (as of one being written or deleted)."""
    found = _NAME.fullmatch(name)
    return None if found is None else ParsedName(int(found.group(1)), found.group(2))


def sanitize_label(label: str) -> str:
    """``label`` as one path component: separators, blanks and control characters become ``_``.

    Metric names hold slashes (``val/loss``); a folder inside a folder would hide the checkpoint from every
    reader. Cut to 180 bytes of UTF-8.
    """
    cleaned = _UNWANTED.sub("_", label).strip("_")
    return cleaned.encode("utf-8", "replace")[:_MAX_LABEL_BYTES].decode("utf-8", "ignore")


def newest_first(entries: list[str]) -> list[str]:
    """The checkpoint names among a folder's ``entries``, by save counter, highest first.

    Names of eight digits sort as text as they do as numbers, which spares parsing them: a run may have
    10,000. Those with more digits are all newer.
    """
    short = [name for name in entries if name[8:9] == "-" and name[:8].isdecimal() and len(name) > 9]
    longer: list[tuple[int, str]] = []
    if len(short) != len(entries):
        for name in entries:
            if name[8:9] != "-":
                parsed = parse(name)
                if parsed is not None:
                    longer.append((parsed.sequence, name))
    short.sort(reverse=True)
    longer.sort(reverse=True)
    return [name for _, name in longer] + short
