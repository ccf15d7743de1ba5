"""What did each step of a training see and leave, and where do two trainings differ first?

    start-0002-rank-0000.jsonl      of the second start; one line a moment, in order
      {"moment": "begin", "step": 12, "epoch": 1, "number": 2, "parameter": {name: hash}}
      {"moment": "batch", …, "batch": {"batch[0]": hash}, "random state": {"torch": hash}}
      {"moment": "update", …, "learning rate": {"optimizer 0, group 0": "0.1"}}
      {"moment": "after", …, "random state": …, "parameter": …, "buffer": …, "optimizer state": …}
      {"moment": "validation" or "epoch end", …}

``number`` is that of the batch in its epoch.

Decision: hashes of everything at every batch, so that the first difference has a name; what is compared is plain text,
so this needs no torch. Turned down: comparing checkpoints at the end, which says that something differs and not what
did first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

VARIABLE: Final = "CKPTRUN_STEP_TRACE"

# In this order they are looked at within one moment: what comes first is the cause of what comes after.
KINDS: Final = ("batch", "random state", "learning rate", "parameter", "buffer", "optimizer state")
_COMPARED: Final = ("batch", "update", "after")

Line = dict[str, Any]
Key = tuple[int, int, str, int]  # epoch, batch, moment, which of its kind at this batch


@dataclass(frozen=True)
class Stop:
    """Where a start is to be stopped: in a batch, at an epoch's end or in a validation; named by its position."""

    moment: Literal["batch", "epoch end", "validation"]
    epoch: int
    batch: int
    step: int = 0  # about which step that is, for a reader

    def __str__(self) -> str:
        where = {"batch": "in mid-epoch", "epoch end": "at an epoch's end", "validation": "in a validation"}
        return f"{where[self.moment]} (step {self.step})"


@dataclass(frozen=True)
class Request:
    """What the environment variable asks of a training: write a trace, and stop somewhere."""

    folder: str
    start: int
    stop: Stop | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        value = json.loads(text)
        stop = value["stop"]
        return cls(value["folder"], value["start"], None if stop is None else Stop(**stop))

    def path(self, rank: int) -> str:
        """The file of one rank."""
        return os.path.join(self.folder, f"start-{self.start:04d}-rank-{rank:04d}.jsonl")


@dataclass(frozen=True)
class Difference:
    """The first difference: ``kind`` is one of KINDS, ``steps`` or ``initial parameter``."""

    kind: str
    what: str
    step: int
    epoch: int
    batch: int
    expected: str | None
    found: str | None
    rank: int = 0
    start: int = 1

    def __str__(self) -> str:
        rank = f" of rank {self.rank}" if self.rank else ""
        return f"{self.kind}{rank}: {self.what} (epoch {self.epoch}, batch {self.batch}, step {self.step})"


def read_trace(path: str) -> list[Line]:
    """The lines of one file; empty where there is none. A torn last line is left out."""
    try:
        with open(path, encoding="utf-8") as file:
            texts = file.read().splitlines()
    except FileNotFoundError:
        return []
    lines = []
    for text in texts:
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def events(lines: Sequence[Line], moment: str) -> list[Line]:
    """The lines of one moment."""
    return [line for line in lines if line["moment"] == moment]


def plan_stops(lines: Sequence[Line]) -> list[Stop]:
    """Where an interrupted training is stopped, from the trace of one that was not: at least two, where it is long
    enough, in mid-epoch, at an epoch's end, and in a validation."""
    batches = events(lines, "batch")
    if len(batches) < 4:
        return []
    last_of_epoch = {line["epoch"]: line["number"] for line in batches}
    last_step = batches[-1]["step"]

    def in_mid_epoch(first: int, after: int) -> Stop | None:
        for line in batches[first:-2]:
            if line["number"] != last_of_epoch[line["epoch"]] and line["step"] >= after:
                return Stop("batch", line["epoch"], line["number"], line["step"] + 1)
        return None

    def at(moment: Literal["epoch end", "validation"], after: int) -> Stop | None:
        for line in events(lines, moment):
            if after < line["step"] < last_step:
                return Stop(moment, line["epoch"], line["number"], line["step"])
        return None

    stops: list[Stop] = []
    reached = 0
    for stop in (
        in_mid_epoch(len(batches) // 4, 0),
        at("epoch end", batches[len(batches) // 4]["step"] + 1),
    ):
        if stop is not None:
            stops.append(stop)
            reached = stop.step
    validation = at("validation", reached)
    if validation is not None:
        stops.append(validation)
        reached = validation.step
    if len(stops) < 2:
        more = in_mid_epoch(2 * len(batches) // 3, reached + 1)
        stops += [] if more is None else [more]
    return stops


def compare(
    reference: Sequence[Line], starts: Sequence[Sequence[Line]], *, rank: int = 0, complete: bool = True
) -> Difference | None:
    """The first difference between a training and the starts of another one, None where there is none.

    Batches that were done twice are compared each time.

    Args:
        complete: the starts came to the end, so that what they did not make is a difference.
    """
    known = dict(_keyed(reference))
    done: set[Key] = set()
    for number, lines in enumerate(starts, 1):
        found = _begins_alike(reference, lines, number, rank) if number == 1 else None
        if found is not None:
            return found
        for key, line in _keyed(lines):
            expected = known.get(key)
            if expected is None:
                return _at(line, "steps", "it was made here only", None, "made", rank, number)
            done.add(key)
            difference = _differs(expected, line, rank, number)
            if difference is not None:
                return difference
    for key, line in known.items():
        if complete and key not in done:
            return _at(line, "steps", "it was never made", "made", None, rank, len(starts))
    return None


def _keyed(lines: Sequence[Line]) -> list[tuple[Key, Line]]:
    """The lines that are compared, each with its place; a batch that is done again begins to count anew."""
    keyed: list[tuple[Key, Line]] = []
    counts: dict[str, int] = {}
    for line in lines:
        moment = line["moment"]
        if moment not in _COMPARED:
            continue
        if moment == "batch":
            counts = {}
        counts[moment] = counts.get(moment, 0) + 1
        keyed.append(((line["epoch"], line["number"], moment, counts[moment]), line))
    return keyed


def _begins_alike(
    reference: Sequence[Line], lines: Sequence[Line], number: int, rank: int
) -> Difference | None:
    mine, theirs = events(lines, "begin"), events(reference, "begin")
    if not mine or not theirs:
        return None
    pair = _first(theirs[0].get("parameter", {}), mine[0].get("parameter", {}))
    return None if pair is None else _at(mine[0], "initial parameter", *pair, rank, number)


def _differs(expected: Line, found: Line, rank: int, number: int) -> Difference | None:
    for kind in KINDS:
        pair = _first(expected.get(kind, {}), found.get(kind, {}))
        if pair is not None:
            return _at(found, kind, *pair, rank, number)
    return None


def _first(
    expected: Mapping[str, str], found: Mapping[str, str]
) -> tuple[str, str | None, str | None] | None:
    for name in (*expected, *(name for name in found if name not in expected)):
        if expected.get(name) != found.get(name):
            return name, expected.get(name), found.get(name)
    return None


def _at(
    line: Line, kind: str, what: str, expected: str | None, found: str | None, rank: int, number: int
) -> Difference:
    return Difference(kind, what, line["step"], line["epoch"], line["number"], expected, found, rank, number)
