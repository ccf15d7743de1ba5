"""Which evaluations did this run have, and which checkpoint is one of them reading right now?

    evals/0003-test/    eval.json   {"fn", "checkpoint", "process": {...}, "started_at", "ended_at", "metrics"}
                        ...         what the fn writes: predictions

An evaluation takes no lease and runs beside a live fit; retention asks :func:`in_use` before it deletes.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from typing import Any

from ckptrun.environment.process import ProcessName, this_process
from ckptrun.errors import UsageError
from ckptrun.run.folder import RunFolder
from ckptrun.storage.files import write_json_atomic

_RECORD = "eval.json"


class EvalFolder:
    """One evaluation's folder; made by :func:`begin_eval`."""

    def __init__(self, path: str, record: dict[str, Any]) -> None:
        self.path = path
        self._record = record

    def end(self, *, metrics: Any, status: str) -> None:
        """Note the end, so that retention need not spare the checkpoint any more."""
        self._record.update(ended_at=time.time(), metrics=metrics, status=status)
        write_json_atomic(os.path.join(self.path, _RECORD), self._record, durable=False)

    def discard(self) -> None:
        """Take the folder back: nothing was evaluated."""
        shutil.rmtree(self.path, ignore_errors=True)


def begin_eval(folder: RunFolder, fn: str, checkpoint: str | None) -> EvalFolder:
    """Make the next folder for an evaluation of ``checkpoint``.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        os.makedirs(folder.evals_dir, exist_ok=True)
        number = 1 + max((_number(name) for name in os.listdir(folder.evals_dir)), default=0)
        while True:
            path = os.path.join(folder.evals_dir, f"{number:04d}-{fn}")
            try:
                os.mkdir(path)
                break
            except FileExistsError:  # another evaluation began at the same moment
                number += 1
        record = {
            "fn": fn,
            "checkpoint": checkpoint,
            "process": this_process()._asdict(),
            "started_at": time.time(),
            "ended_at": None,
        }
        write_json_atomic(os.path.join(path, _RECORD), record, durable=False)
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder.evals_dir}: {error.strerror}",
            hint="An evaluation keeps its results in the run's folder; check its permissions and the disk.",
        ) from error
    return EvalFolder(path, record)


def in_use(folder: RunFolder) -> set[str]:
    """Paths of the checkpoints that a live evaluation reads.

    One on another host cannot be asked whether it lives; it counts as reading until it notes its end.
    """
    try:
        names = os.listdir(folder.evals_dir)
    except FileNotFoundError:
        return set()
    found = set()
    for name in names:
        try:
            with open(os.path.join(folder.evals_dir, name, _RECORD), encoding="utf-8") as file:
                record = json.load(file)
            if record["ended_at"] is not None or record["checkpoint"] is None:
                continue
            process = ProcessName(**record["process"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if not process.here or process.alive:
            found.add(record["checkpoint"])
    return found


def _number(name: str) -> int:
    digits = name.partition("-")[0]
    return int(digits) if digits.isdigit() else 0
