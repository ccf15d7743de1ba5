"""What is a run doing now, and is anybody behind what its status says?

    status.json   the keys of `status --json`, then who wrote it: host, pid, pid_start, boot_id, counter, ...

Decision: the writer only says what it does; whether it still lives is the reader's to find out, each time:
of the kernel on the same host, by watching the counter on another one. Turned down: a reader that compares
its clock with the writer's time stamp, which calls a live run lost where two clocks differ.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ckptrun.environment.process import ProcessName, this_process
from ckptrun.errors import UsageError
from ckptrun.records import Status
from ckptrun.run.folder import RunFolder
from ckptrun.storage.files import write_json_atomic

WATCH_S = 5.0  # a live run rewrites its status about once a second
_POLL_S = 0.05
_LIVE = (Status.INITIALIZING, Status.RUNNING)
_writes = itertools.count(1)


@dataclass(frozen=True)
class RankRecord:
    """One worker process of the attempt."""

    rank: int
    pid: int
    host: str


@dataclass(frozen=True)
class StatusRecord:
    """What ``status.json`` says. The fields down to ``exit_code`` are `status --json`, in its order.

    ``checkpoint`` is the newest committed checkpoint's folder. ``heartbeat_age_s`` is the age of what was
    read, by the reader's clock: for a person to read, nothing is decided by it. ``started_at`` (of the
    attempt), ``written_at`` and ``lost_since`` are seconds since 1970 by the writer's clock.
    """

    run: str
    status: Status
    stop_reason: str | None = None
    fn: str = "fit"
    stage: str | None = None
    step: int = 0
    epoch: int = 0
    max_steps: int | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    checkpoint: str | None = None
    attempt: int = 1
    ranks: tuple[RankRecord, ...] = ()
    heartbeat_age_s: float | None = None
    exit_code: int | None = None
    lost_since: float | None = None
    started_at: float | None = None
    host: str = ""
    pid: int = 0
    pid_start: int = 0
    boot_id: str = ""
    counter: int = 0
    written_at: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON: a metric that is not finite is null, because JSON knows no NaN."""
        value = asdict(self)
        value["status"] = str(self.status)
        value["metrics"] = {
            name: metric if metric is not None and math.isfinite(metric) else None
            for name, metric in self.metrics.items()
        }
        value["ranks"] = [asdict(rank) for rank in self.ranks]
        return value

    @property
    def process(self) -> ProcessName:
        """The supervisor that wrote it."""
        return ProcessName(self.host, self.pid, self.pid_start, self.boot_id)


@dataclass(frozen=True)
class RunSummary:
    """One run of a listing. ``status`` is None where it never wrote one, or where that is damaged."""

    name: str
    path: str
    status: StatusRecord | None


def write_status(path: str, record: StatusRecord) -> None:
    """Replace ``status.json``; this process signs it. Not durable: the next one comes in a second.

    Raises:
        OSError: it cannot be written; the old one stays.
    """
    me = this_process()
    signed = replace(
        record,
        heartbeat_age_s=0.0,
        lost_since=None,
        host=me.host,
        pid=me.pid,
        pid_start=me.start,
        boot_id=me.boot_id,
        counter=next(_writes),
        written_at=time.time(),
    )
    write_json_atomic(path, signed.to_dict(), durable=False, point="status")


def read_status(folder: RunFolder, *, watch_s: float = WATCH_S) -> StatusRecord | None:
    """What the run is doing; None where it never wrote a status.

    One that says it lives and has no live process behind it is LOST, since its last word.

    Args:
        watch_s: how long the status of a run on another host may stand still until the run counts as lost. A
            live one is answered for as soon as it moves.

    Raises:
        UsageError: the status is there and cannot be read.
    """
    return _with_liveness([folder], watch_s)[0]


def amend_exit_code(folder: RunFolder, attempt: int, exit_code: int) -> None:
    """Say another exit code in this process's last word about an attempt; nothing where others have written since.

    Raises:
        OSError: it cannot be written; the old one stays.
    """
    try:
        record = _read(folder)
    except UsageError:
        return
    if record is None or record.status in _LIVE or record.attempt != attempt:
        return
    if record.process == this_process():
        write_status(folder.status, replace(record, exit_code=exit_code))


def list_runs(root: str, *, watch_s: float = WATCH_S) -> list[RunSummary]:
    """All runs under ``root`` by name; an empty list where there is no such folder.

    Raises:
        UsageError: the root, or a run in it, cannot be read.
    """
    root = os.path.abspath(os.path.expanduser(root))
    try:
        with os.scandir(root) as entries:
            names = sorted(
                entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()
            )
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(
            f"cannot list the runs under {root}: {error.strerror}", hint="Name another place with --root."
        ) from error
    folders = [RunFolder(os.path.join(root, name)) for name in names]
    folders = [folder for folder in folders if folder.exists()]
    records = _with_liveness(folders, watch_s, skip_damaged=True)
    return [RunSummary(f.name, f.path, record) for f, record in zip(folders, records, strict=True)]


def _with_liveness(
    folders: Sequence[RunFolder], watch_s: float, *, skip_damaged: bool = False
) -> list[StatusRecord | None]:
    def read(folder: RunFolder) -> StatusRecord | None:
        try:
            return _read(folder)
        except UsageError:
            if skip_damaged:
                return None  # the other runs of a listing are worth more than one that cannot be shown
            raise

    records = [read(folder) for folder in folders]
    watched: dict[int, StatusRecord] = {}
    for index, record in enumerate(records):
        if record is None or record.status not in _LIVE:
            continue
        if not record.process.here:
            watched[index] = record
        elif not record.process.alive:
            # It may have written its last word between the two looks.
            records[index] = _lost(read(folders[index]), record)
    deadline = time.monotonic() + watch_s
    while watched and time.monotonic() < deadline:  # all at once: many lost runs cost as much as one
        time.sleep(_POLL_S)
        for index, seen in list(watched.items()):
            now = read(folders[index])
            if now is None or (now.process, now.counter) != (seen.process, seen.counter):
                records[index] = now
                del watched[index]
    for index, seen in watched.items():
        records[index] = _lost(read(folders[index]), seen)
    return records


def _lost(now: StatusRecord | None, seen: StatusRecord) -> StatusRecord | None:
    if now is None or (now.process, now.counter) != (seen.process, seen.counter):
        return now
    return replace(now, status=Status.LOST, lost_since=now.written_at)


def _read(folder: RunFolder) -> StatusRecord | None:
    try:
        with open(folder.status, encoding="utf-8") as file:
            value = json.load(file)
        known = {name: value[name] for name in StatusRecord.__dataclass_fields__ if name in value}
        known["status"] = Status(known["status"])
        known["ranks"] = tuple(RankRecord(r["rank"], r["pid"], r["host"]) for r in known.get("ranks", ()))
        record = StatusRecord(**known)
        return replace(record, heartbeat_age_s=round(max(0.0, time.time() - record.written_at), 1))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"cannot read {folder.status}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{folder.status} is damaged: expected a status as JSON, found something else ({error})",
            hint="It is only a display: delete it, and the next start of the run writes it anew.",
        ) from error
