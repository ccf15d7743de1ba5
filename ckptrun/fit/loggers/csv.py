"""How do metrics become a table that is still right after a resume? ``logs/metrics.csv``, one row a call.

    step,train_loss,val_loss
    50,2.31,
    100,2.02,
    100,,2.11

Decision: rows wait in memory and go to the file in one write, a hundred or a few seconds of them at a time. A
checkpoint holds the number of rows that lie before it, and a resume cuts the file back to them, so that a
curve never runs twice over the same steps; the rows that are cut go to ``metrics.attempt-<n>-cut.csv`` beside
it. Rows are counted, not bytes: a metric that comes up later makes the header longer, and with it every
position in the file wrong. Turned down: appending and leaving it to the reader to drop double steps.
"""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from ckptrun import faults
from ckptrun.fit.loggers.logger import CloseStatus, Logger
from ckptrun.storage.files import write_atomic

log = logging.getLogger(__name__)

_FLUSH_EVERY_S = 5.0  # so that a slow training can be followed too


class CSVLogger(Logger):
    """Write metrics to ``metrics.csv`` and hyperparameters to ``hparams.yaml``.

    Args:
        save_dir: folder to write under; None is the run's ``logs/``.
        name: folder within it; None for none.
        version: folder within that; None for none.
        prefix: put before each metric's name, with ``-`` between.
        flush_logs_every_n_steps: rows to keep in memory at most.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        self._flush_every = max(1, flush_logs_every_n_steps)
        self._rows: list[tuple[int, Mapping[str, Any]]] = []  # not written yet
        self._fd: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._close()
        self._rows.clear()
        self._num_written = 0
        self._columns: dict[str, None] = {"step": None}
        self._size = 0  # of the file, up to the last whole row
        self._opened = False  # whether the file was brought to where this training begins
        self._next_flush = 0.0
        self._failed = False

    @property
    def path(self) -> str:
        """The table."""
        return os.path.join(self.log_dir, "metrics.csv")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._rows.append((step, dict(metrics)))
        if len(self._rows) >= self._flush_every or time.monotonic() >= self._next_flush:
            self.save()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        import yaml

        text = yaml.safe_dump(_plain(params), sort_keys=False, allow_unicode=True)
        path = os.path.join(self.log_dir, "hparams.yaml")
        try:
            os.makedirs(self.log_dir, exist_ok=True)
            write_atomic(path, text.encode(), durable=False)
        except OSError as error:
            log.warning("The hyperparameters cannot be written to %s: %s", path, error)

    def save(self) -> None:
        """Write the rows out. Where that fails (a full disk), say so once, keep them and try again later."""
        self._next_flush = time.monotonic() + _FLUSH_EVERY_S
        if not self._rows:
            return
        try:
            self._write()
        except OSError as error:
            if not self._failed:
                log.warning("Metrics cannot be written to %s, and are kept in memory: %s", self.path, error)
            self._failed = True
        else:
            self._failed = False

    def finalize(self, status: CloseStatus) -> None:
        self.save()
        self._close()

    def state_dict(self) -> dict[str, Any]:
        self.save()
        return {**super().state_dict(), "rows": self._num_written + len(self._rows)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rows.clear()
        self._begin_at(state_dict.get("rows", 0) if self._is_own(state_dict) else 0)

    # -- the file ----------------------------------------------------------------------------------

    def _write(self) -> None:
        if not self._opened:
            self._begin_at(0)
        prefix = self._prefix
        metrics = [row for _, row in self._rows]
        if prefix:
            metrics = [{prefix + name: value for name, value in row.items()} for row in metrics]
        if self._size == 0 or not all(row.keys() <= self._columns.keys() for row in metrics):
            new = dict.fromkeys(name for row in metrics for name in row)
            self._rewrite_header({**self._columns, **new})
        if not {type(value) for row in metrics for value in row.values()} <= {float, int}:
            metrics = [{name: _cell(value) for name, value in row.items()} for row in metrics]
        names = list(self._columns)[1:]
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(
            [step, *map(row.get, names)] for (step, _), row in zip(self._rows, metrics, strict=True)
        )
        data = text.getvalue().encode()
        if self._fd is None:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            view = memoryview(data)
            position = self._size
            while view:
                written = os.pwrite(self._fd, view, position)
                view, position = view[written:], position + written
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)  # no torn row
            raise
        faults.reach("metrics:written", self.path)
        self._size += len(data)
        self._num_written += len(self._rows)
        self._rows.clear()

    def _rewrite_header(self, columns: dict[str, None]) -> None:
        """Put a longer header over the rows that stand there, and empty cells into these."""
        header = _line(columns)
        os.makedirs(self.log_dir, exist_ok=True)
        old = b""
        if self._size:
            with open(self.path, "rb") as file:
                file.readline()
                old = file.read(self._size - file.tell())
            missing = len(columns) - len(self._columns)
            old = old.replace(b"\n", b"," * missing + b"\n")
        write_atomic(self.path, header + old, durable=False)
        self._close()
        self._columns = columns
        self._size = len(header) + len(old)

    def _begin_at(self, num_rows: int) -> None:
        """Bring the file to its first ``num_rows`` rows; what follows them goes to a file of its own."""
        self._opened = True
        self._close()
        self._num_written = num_rows
        self._columns, self._size = {"step": None}, 0
        try:
            with open(self.path, "rb") as file:
                lines = file.read().split(b"\n")
        except FileNotFoundError:
            lines = [b""]
        torn = lines.pop()  # what follows the last newline: nothing, or a row that was being written
        if not lines:
            self._num_written = 0
            if num_rows:
                log.warning("%s is gone; its %d rows are lost.", self.path, num_rows)
            return
        header, rows = lines[0], lines[1:]
        self._columns = dict.fromkeys(next(csv.reader([header.decode()])))
        kept, cut = rows[:num_rows], rows[num_rows:]
        if torn:
            cut.append(torn)
        if len(kept) < num_rows:
            log.warning(
                "%s has %d rows where the checkpoint knows of %d: what was in memory when a process was "
                "killed is lost.",
                self.path, len(kept), num_rows,
            )  # fmt: skip
            self._num_written = len(kept)
        if cut:
            self._set_aside([header, *cut])
            faults.reach("metrics:set-aside", self.path)
            write_atomic(self.path, b"\n".join([header, *kept, b""]), durable=False)
        self._size = len(header) + 1 + sum(map(len, kept)) + len(kept)

    def _set_aside(self, lines: list[bytes]) -> None:
        base = os.path.join(self.log_dir, f"metrics.attempt-{self._attempt}-cut")
        path, number = f"{base}.csv", 1
        while os.path.exists(path):
            number += 1
            path = f"{base}-{number}.csv"
        write_atomic(path, b"\n".join([*lines, b""]), durable=False)
        log.info("%d rows after the checkpoint were moved from %s to %s.", len(lines) - 1, self.path, path)

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _cell(value: Any) -> Any:
    """A number as it is; a tensor as its number; a text in one line, because one row is one line."""
    if type(value) is float or type(value) is int:
        return value
    if hasattr(value, "item"):
        return value.item()
    return " ".join(value.splitlines()) if isinstance(value, str) else value


def _line(columns: Mapping[str, None]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerow(_cell(name) for name in columns)
    return text.getvalue().encode()


def _plain(value: Any) -> Any:
    """What YAML can say without naming Python classes; anything else as its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    return str(value)
