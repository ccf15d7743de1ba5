"""Which nodes does a SLURM node list name? ``n[1-3,07],gpu-a[0-1]-ib`` and the counts of tasks beside it, ``2(x3),1``.

Decision: the whole grammar is read here (several brackets in a name, dashes, leading zeros), so that a container
without ``scontrol show hostnames`` knows its nodes as well.
"""

from __future__ import annotations

import itertools
import re

_ITEM = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
MOST_NODES = 1 << 20


def expand(text: str) -> list[str]:
    """The names of the nodes, in the list's order.

    Raises:
        ValueError: it is no node list.
    """
    return [name for part in _parts(text) for name in _expand_part(part, text)]


def expand_counts(text: str) -> list[int]:
    """The number of tasks on each node: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        ValueError: it is no such list.
    """
    counts: list[int] = []
    for part in text.strip().split(","):
        found = _COUNT.fullmatch(part.strip())
        if found is None:
            raise ValueError(f"{text!r} is no list of task counts")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _parts(text: str) -> list[str]:
    """The list cut at those commas that stand outside of brackets."""
    parts, depth, current = [], 0, ""
    for character in text.strip():
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise ValueError(f"{text!r} is no node list: its brackets do not match")
        if character == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += character
    if depth:
        raise ValueError(f"{text!r} is no node list: its brackets do not match")
    parts.append(current)
    if parts == [""]:
        return []
    if "" in parts:
        raise ValueError(f"{text!r} is no node list: a name is empty")
    return parts


def _expand_part(part: str, text: str) -> list[str]:
    pieces: list[list[str]] = []
    for index, piece in enumerate(re.split(r"\[([^\[\]]*)\]", part)):
        pieces.append(_numbers(piece, text) if index % 2 else [piece])
    size = 1
    for numbers in pieces:
        size *= len(numbers)
    if size > MOST_NODES:
        raise ValueError(f"{text!r} names {size} nodes")
    return ["".join(chosen) for chosen in itertools.product(*pieces)]


def _numbers(inside: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in inside.split(","):
        found = _ITEM.fullmatch(item.strip())
        if found is None:
            raise ValueError(f"{text!r} is no node list: {item!r} is neither a number nor a range")
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first) or int(last) - int(first) >= MOST_NODES:
            raise ValueError(f"{text!r} is no node list: {item!r} is no range")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
