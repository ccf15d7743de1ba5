"""A lock ends when it is said to, whoever was forked while it was held."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from ckptrun.checkpoint.commit import write_file
from ckptrun.run.registry import Registry
from ckptrun.storage.file_lock import locked

Fork = Callable[[], int]


@pytest.fixture
def fork() -> Iterator[Fork]:
    """Forks a process that does nothing, as a loader worker that waits for its next sample."""
    children = []

    def forked() -> int:
        reads, writes = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(writes, b".")
            signal.pause()
        children.append(pid)
        assert os.read(reads, 1)
        os.close(reads)
        os.close(writes)
        return pid

    yield forked
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _lock_at_once(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_one_at_a_time(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    with locked(path, _lock_at_once), pytest.raises(BlockingIOError), locked(path, _lock_at_once):
        pass
    with locked(path, _lock_at_once):
        pass


def test_a_child_that_was_forked_meanwhile_does_not_keep_it(tmp_path: Path, fork: Fork) -> None:
    path = str(tmp_path / "lock")
    with locked(path, _lock_at_once):
        fork()
    with locked(path, _lock_at_once):
        pass


def test_the_registry_can_be_written_after_a_fork_in_the_middle(tmp_path: Path, fork: Fork) -> None:
    path, registry = str(tmp_path / "registry.json"), Registry(run_id="r")
    with registry.exclusively(path):
        fork()
        registry.write(path)
    lock = str(tmp_path / ".registry.json.lock")
    assert os.path.exists(lock)
    with locked(lock, _lock_at_once):
        pass


def test_a_child_does_not_hold_a_checkpoint_open_that_is_being_written(tmp_path: Path, fork: Fork) -> None:
    children = []

    def write(file: BinaryIO) -> None:
        file.write(b"x" * 100_000)
        children.append(fork())
        file.write(b"y" * 100_000)

    record = write_file(str(tmp_path), "state.ckpt", write)
    assert record.size_bytes == 200_000
    (child,) = children
    held = [
        os.readlink(entry.path) for entry in os.scandir(f"/proc/{child}/fd") if os.path.islink(entry.path)
    ]
    assert not any(str(tmp_path) in path for path in held)
