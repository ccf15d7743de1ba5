"""How do several ranks write one checkpoint, each its own files?

    rank 0   makes the temporary folder, tells its name, writes its files ── waits for the others ── commits
    others          wait for the name, write their files, make them durable, tell sizes and checksums

What they say to each other goes through the store that the ranks met in, so that threads can say it while training
goes on with collectives of its own. A try that failed is made again by all of them, in a new folder.

Decision: one folder and one manifest, written last by one rank, as for a checkpoint of one process. Turned down: a
folder or a manifest a rank, which a reader would have to put together and which can be whole in part.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ckptrun.checkpoint.commit import write_file
from ckptrun.checkpoint.state_file import write_state
from ckptrun.errors import SaveError
from ckptrun.records import FileRecord
from ckptrun.strategies.strategy import Strategy

_LOOK_EVERY_S = 0.002
_AFTER_FAILURE_S = 5.0  # how long what a rank still writes is waited for once another one has failed


class Gathering:
    """One save, as the rank sees it that commits; :class:`ckptrun.checkpoint.commit.Others` is its interface.

    Args:
        name: of the save, used once.
        failed: whether a rank has failed, so that not all can be waited for.
    """

    def __init__(self, strategy: Strategy, name: str, failed: Callable[[], bool]) -> None:
        self._strategy = strategy
        self._name = name
        self._failed = failed
        self._try = 0
        self._patience = _Patience(failed)

    def begin(self, temporary: str) -> None:
        self._try += 1
        self._patience = _Patience(self._failed)
        self._strategy.post(_begun(self._name, self._try), temporary.encode())

    def wait(self) -> Sequence[FileRecord]:
        records: list[FileRecord] = []
        for rank in range(1, self._strategy.world_size):
            told = json.loads(self._heard(rank))
            if told["error"] is not None:
                raise OSError(*told["error"])
            records += [FileRecord(**file) for file in told["files"]]
        return records

    def settle(self) -> None:
        for rank in range(1, self._strategy.world_size):
            with contextlib.suppress(Exception):  # what led here is what is told
                self._heard(rank)

    def _heard(self, rank: int) -> bytes:
        key = _written(self._name, self._try, rank)
        return _look(self._strategy, [key], self._patience, f"rank {rank} has not written its part")

    def end(self) -> None:
        """No other try will be made."""
        self._strategy.post(_over(self._name), b"1")

    def forget(self) -> None:
        """Every rank has seen the end: what was said is taken away."""
        ranks, name = range(1, self._strategy.world_size), self._name
        for number in range(1, self._try + 1):
            for key in (_begun(name, number), *(_written(name, number, rank) for rank in ranks)):
                self._strategy.forget(key)
        self._strategy.forget(_over(name))


def assist(
    strategy: Strategy,
    name: str,
    files: Mapping[str, Any],
    failed: Callable[[], bool],
    *,
    past_cache: bool = False,
) -> None:
    """The part of another rank in a save: write ``files`` as often as the rank that commits tries.

    Args:
        past_cache: as for :func:`ckptrun.checkpoint.commit.commit`.

    Raises:
        SaveError: a rank has failed.
    """
    over, number = _over(name), 1
    while True:
        begun = _begun(name, number)
        _look(strategy, [begun, over], _Patience(failed), "the rank that commits says nothing")
        folder = strategy.look(begun)
        if folder is None:
            return
        told = _write(folder.decode(), files, past_cache)
        strategy.post(_written(name, number, strategy.rank), json.dumps(told).encode())
        number += 1


def _write(folder: str, files: Mapping[str, Any], past_cache: bool) -> dict[str, Any]:
    records: list[FileRecord] = []
    try:
        if not os.path.isdir(folder):
            raise OSError(errno.ENOENT, "the folder that another rank made cannot be seen here", folder)
        for path, state in files.items():
            writer = functools.partial(write_state, state=state)
            records.append(write_file(folder, path, writer, past_cache=past_cache))
    except OSError as error:
        return {"error": [error.errno, error.strerror or str(error), error.filename], "files": []}
    except Exception as error:
        return {"error": [errno.EIO, f"{type(error).__name__}: {error}", folder], "files": []}
    return {"error": None, "files": [asdict(record) for record in records]}


class _Patience:
    """For as long as no rank has failed, and a little longer."""

    def __init__(self, failed: Callable[[], bool]) -> None:
        self._failed = failed
        self._ends_at: float | None = None

    def is_over(self) -> bool:
        if self._ends_at is None and self._failed():
            self._ends_at = time.monotonic() + _AFTER_FAILURE_S
        return self._ends_at is not None and time.monotonic() > self._ends_at


def _look(strategy: Strategy, keys: Sequence[str], patience: _Patience, what: str) -> bytes:
    """What stands under the first of ``keys`` under which something stands."""
    while True:
        for key in keys:
            value = strategy.look(key)
            if value is not None:
                return value
        if patience.is_over():
            raise SaveError(f"A save needs every rank, and one has failed: {what}.")
        time.sleep(_LOOK_EVERY_S)


def _begun(name: str, number: int) -> str:
    return f"save/{name}/{number}"


def _written(name: str, number: int, rank: int) -> str:
    return f"save/{name}/{number}/{rank}"


def _over(name: str) -> str:
    return f"save/{name}/over"
