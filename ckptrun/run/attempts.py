"""Which attempts did this run have, and how did each end?

    attempts.jsonl    {"event": "start", "attempt": 3, "fn": "fit", ...}
                      {"event": "end", "attempt": 3, "status": "INTERRUPTED", "exit_code": 143, ...}
                      {"event": "requeue", "attempt": 3, "job": "1234", "by": "scontrol", "why": "walltime", ...}
                      {"event": "exit", "attempt": 3, "exit_code": 143, ...}    where it became another one since

Decision: a ledger that is only ever appended to, one durable line an event, so that no death of a writer
harms what is written already. A line that is not JSON is the torn end of a writer that died, and is passed
over. Turned down: one JSON document rewritten each time, which loses the past where a rewrite goes wrong.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ckptrun.records import AttemptRecord
from ckptrun.storage.files import append_line

_END_FIELDS = ("ended_at", "status", "stop_reason", "exit_code", "end_step", "end_sequence")
_START_FIELDS = tuple(f.name for f in fields(AttemptRecord) if f.name not in _END_FIELDS)


def read_attempts(path: str) -> list[AttemptRecord]:
    """All attempts in the order in which they started; an empty list where there is no ledger.

    Raises:
        OSError: the ledger is there and cannot be read.
    """
    try:
        with open(path, "rb") as file:
            lines = file.read().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    attempts: dict[int, AttemptRecord] = {}
    for line in lines:
        event = _parse(line)
        if event is None:
            continue
        number = event["attempt"]
        if event["event"] == "start":
            known = {name: event[name] for name in _START_FIELDS if name in event}
            attempts[number] = AttemptRecord(**{"fn": "fit", "started_at": 0.0, **known})
        elif event["event"] == "end" and number in attempts:
            attempts[number] = replace(
                attempts[number],
                ended_at=event.get("ended_at"),
                status=event.get("status"),
                stop_reason=event.get("stop_reason"),
                exit_code=event.get("exit_code"),
                end_step=event.get("step"),
                end_sequence=event.get("sequence"),
            )
        elif event["event"] == "exit" and number in attempts:
            attempts[number] = replace(attempts[number], exit_code=event.get("exit_code"))
    return list(attempts.values())


def next_attempt(attempts: list[AttemptRecord]) -> int:
    """The number of the attempt that starts now: 1 for the first."""
    return max((attempt.attempt for attempt in attempts), default=0) + 1


def append_start(path: str, attempt: AttemptRecord, *, versions: Mapping[str, str]) -> None:
    """Note that ``attempt`` starts; its end fields are not written.

    Raises:
        OSError: the ledger cannot be written.
    """
    start = {name: value for name, value in asdict(attempt).items() if name in _START_FIELDS}
    append_line(path, json.dumps({"event": "start", **start, "versions": dict(versions)}))


def append_end(
    path: str,
    attempt: int,
    *,
    status: str,
    stop_reason: str | None,
    exit_code: int,
    step: int,
    sequence: int,
    steps_gained: int,
    steps_replayed: int,
    save_s: float,
    restore_s: float,
    error: str | None = None,
    slurm: str | None = None,
) -> None:
    """Note how attempt number ``attempt`` ended.

    Args:
        step: the optimizer step it ended at.
        sequence: the run's save counter at the end.
        steps_gained: steps that no attempt had done before.
        steps_replayed: steps that an earlier attempt had done and lost.
        save_s: seconds for which training stood still to save.
        restore_s: seconds from the start of restoring to the first step.
        error: one line about what went wrong.
        slurm: what SLURM said that SIGTERM was for, where it was asked.

    Raises:
        OSError: the ledger cannot be written.
    """
    end = {
        "event": "end",
        "attempt": attempt,
        "ended_at": time.time(),
        "status": str(status),
        "stop_reason": None if stop_reason is None else str(stop_reason),
        "exit_code": exit_code,
        "step": step,
        "sequence": sequence,
        "steps_gained": steps_gained,
        "steps_replayed": steps_replayed,
        "save_s": round(save_s, 3),
        "restore_s": round(restore_s, 3),
        "error": error,
        **({} if slurm is None else {"slurm": slurm}),
    }
    append_line(path, json.dumps(end))


def append_exit(path: str, attempt: int, *, exit_code: int, why: str) -> None:
    """Note that the command of an attempt that has ended exits with another code than its end says.

    Raises:
        OSError: the ledger cannot be written.
    """
    event = {"event": "exit", "attempt": attempt, "at": time.time(), "exit_code": exit_code, "why": why}
    append_line(path, json.dumps(event))


@dataclass(frozen=True)
class RequeueRecord:
    """That the job of an attempt was to start again: who saw to it, and why it was stopped."""

    attempt: int
    job: str
    by: str
    why: str


def append_requeue(
    path: str, attempt: int, *, job: str, by: str, why: str, problem: str | None = None
) -> None:
    """Note that the job starts again.

    Args:
        by: ``scontrol``, ``slurm`` (by itself), or who acts on the exit code.
        problem: why ``scontrol`` did not do it.

    Raises:
        OSError: the ledger cannot be written.
    """
    event = {
        "event": "requeue", "attempt": attempt, "at": time.time(), "job": job, "by": by, "why": why,
        "problem": problem,
    }  # fmt: skip
    append_line(path, json.dumps(event))


def read_requeues(path: str) -> list[RequeueRecord]:
    """How often jobs of the run were to start again, oldest first.

    Raises:
        OSError: the ledger is there and cannot be read.
    """
    try:
        with open(path, "rb") as file:
            events = [_parse(line) for line in file.read().splitlines()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [
        RequeueRecord(each["attempt"], str(each.get("job")), str(each.get("by")), str(each.get("why")))
        for each in events
        if each is not None and each["event"] == "requeue"
    ]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    is_event = isinstance(event, dict) and isinstance(event.get("attempt"), int) and "event" in event
    return event if is_event else None
