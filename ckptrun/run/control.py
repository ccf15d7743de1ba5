"""How does another process ask a live run to save or to stop, and hear what came of it?

    control/   <id>.save.json      written by `ckptrun save`, picked up and removed by the run's supervisor
               <id>.answer.json    written by the supervisor, picked up and removed by who asked

Decision: requests are files, because the folder is what every node that may ask has in common with the run.
Turned down: signals and sockets, which do not cross hosts or are blocked between them.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ckptrun.environment.process import this_process
from ckptrun.run.folder import RunFolder
from ckptrun.storage.files import write_json_atomic

Kind = Literal["save", "stop"]
KINDS: tuple[Kind, ...] = ("save", "stop")
# The time in front keeps requests of one host in order.
FILE_NAME = re.compile(r"(?P<id>[0-9]{20}-[0-9a-f]{12})\.(?P<what>save|stop|answer)\.json")


@dataclass(frozen=True)
class Request:
    """What somebody asks of a live run."""

    id: str
    kind: Kind


@dataclass(frozen=True)
class Answer:
    """What came of a request.

    ``ended``: the run ended before it answered; ``timeout``: it neither answered nor ended in time, and the
    request was withdrawn.
    """

    state: Literal["done", "failed", "ended", "timeout"]
    checkpoint: str | None = None
    message: str | None = None


def ask(folder: RunFolder, kind: Kind) -> str:
    """Put a request to the run; returns its id for :func:`wait_answer`.

    Raises:
        OSError: the run's folder cannot be written.
    """
    me = this_process()
    request_id = f"{time.time_ns():020d}-{uuid.uuid4().hex[:12]}"
    value = {"id": request_id, "kind": kind, "host": me.host, "pid": me.pid, "asked_at": time.time()}
    os.makedirs(folder.control_dir, exist_ok=True)
    write_json_atomic(_path(folder, request_id, kind), value, durable=False)
    return request_id


def take(folder: RunFolder) -> list[Request]:
    """The supervisor picks up all requests, oldest first; each is handed out once.

    Cheap where there are none: one listing of a small folder.
    """
    try:
        names = sorted(os.listdir(folder.control_dir))
    except FileNotFoundError:
        return []
    requests = []
    for name in names:
        parts = FILE_NAME.fullmatch(name)
        for kind in KINDS:
            if parts is not None and parts["what"] == kind:
                try:
                    os.unlink(os.path.join(folder.control_dir, name))
                except FileNotFoundError:  # withdrawn
                    continue
                requests.append(Request(parts["id"], kind))
    return requests


def answer(folder: RunFolder, request_id: str, result: Mapping[str, Any]) -> None:
    """Tell who asked what came of it.

    Args:
        result: ``{"state": "done" | "failed", "checkpoint": path | None, "message": text | None}``.

    Raises:
        OSError: the run's folder cannot be written.
    """
    write_json_atomic(_path(folder, request_id, "answer"), dict(result), durable=False)


def wait_answer(
    folder: RunFolder,
    request_id: str,
    alive: Callable[[], bool],
    timeout: float | None,
    *,
    poll_s: float = 0.1,
) -> Answer:
    """Wait for the run's answer, at most ``timeout`` seconds (None: as long as the run lives).

    Args:
        alive: whether the run still lives; asked about once a second.

    Raises:
        OSError: the run's folder cannot be read.
    """
    start = time.monotonic()
    next_look = start
    while True:
        found = _read_answer(folder, request_id)
        if found is not None:
            return found
        now = time.monotonic()
        if now >= next_look:
            if not alive():
                # Its answer may have come between the two looks.
                found = _read_answer(folder, request_id)
                withdraw(folder, request_id)
                return Answer("ended") if found is None else found
            next_look = now + 1.0
        if timeout is not None and now - start >= timeout:
            withdraw(folder, request_id)
            return Answer("timeout")
        time.sleep(poll_s)


def withdraw(folder: RunFolder, request_id: str) -> None:
    """Take a request back, where it was not picked up yet."""
    for kind in KINDS:
        try:
            os.unlink(_path(folder, request_id, kind))
        except FileNotFoundError:
            pass


def _read_answer(folder: RunFolder, request_id: str) -> Answer | None:
    path = _path(folder, request_id, "answer")
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
        os.unlink(path)
    except FileNotFoundError:
        return None
    return Answer(value["state"], value.get("checkpoint"), value.get("message"))


def _path(folder: RunFolder, request_id: str, what: str) -> str:
    return os.path.join(folder.control_dir, f"{request_id}.{what}.json")
