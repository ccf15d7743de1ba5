"""What did a run's files say before an attempt that turned out to have started nothing?

Decision: an attempt whose ranks could not make what the config names, or refused the checkpoint, leaves no trace, as
where one rank runs in the command's own process and makes it before the attempt begins; so the ledger is cut back to
where it was. Turned down: having ranks report before the ledger is written, which costs every start a turn of waiting.
"""

from __future__ import annotations

import glob
import os

from ckptrun.run.folder import RunFolder
from ckptrun.storage.files import write_atomic


class Unbegun:
    """Made before the attempt writes anything.

    Raises:
        OSError: a file is there and cannot be read.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._ledger_bytes = _size(folder.attempts)
        self._before = {path: _read(path) for path in (folder.run_json, folder.config_yaml, folder.status)}

    def put_back(self, attempt: int) -> None:
        """Take back what attempt number ``attempt`` has written. The lease and what it noted stay.

        Raises:
            OSError: a file cannot be written.
        """
        ledger = self._folder.attempts
        if self._ledger_bytes is not None:
            os.truncate(ledger, self._ledger_bytes)
        for path, data in {**self._before, **({ledger: None} if self._ledger_bytes is None else {})}.items():
            if data is not None:
                write_atomic(path, data, durable=True)
            elif os.path.exists(path):
                os.unlink(path)
        logs = glob.escape(os.path.join(self._folder.logs_dir, f"attempt-{attempt:04d}-rank-"))
        for path in glob.glob(f"{logs}*.log"):
            os.unlink(path)


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None
