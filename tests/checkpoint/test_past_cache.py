"""What goes past the page cache is the same file, on disks that take it and on those that do not."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptrun.checkpoint import past_cache
from ckptrun.checkpoint.checksum import checksum_of
from ckptrun.checkpoint.commit import commit, write_file
from ckptrun.checkpoint.manifest import Manifest
from ckptrun.checkpoint.past_cache import BLOCK_BYTES
from ckptrun.errors import SaveError

SIZES = [0, 1, 4095, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 12345]


def content(size_bytes: int) -> bytes:
    return (os.urandom(1 << 16) * (size_bytes // (1 << 16) + 1))[:size_bytes]


def in_pieces(data: bytes, piece: int) -> Callable[[Any], None]:
    def write(file: Any) -> None:
        for start in range(0, len(data), piece):
            file.write(data[start : start + piece])

    return write


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each write to the disk whether it went past the cache."""
    seen = []
    write = os.write

    def noting(fd: int, data: Any) -> int:
        seen.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return write(fd, data)

    monkeypatch.setattr(past_cache.os, "write", noting)
    return seen


@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize("piece", [5_000_011, 70_001])
def test_the_file_is_what_was_written(tmp_path: Path, size_bytes: int, piece: int) -> None:
    data = content(size_bytes)
    record = write_file(str(tmp_path), "state.ckpt", in_pieces(data, piece), past_cache=True)
    path = tmp_path / "state.ckpt"
    assert path.read_bytes() == data
    with path.open("rb", buffering=0) as file:
        assert checksum_of(file) == (record.checksum, record.size_bytes)  # type: ignore[arg-type]


def test_whole_blocks_go_past_the_cache_and_the_rest_through_it(tmp_path: Path, flags: list[bool]) -> None:
    write_file(str(tmp_path), "f", in_pieces(content(2 * BLOCK_BYTES + 5), 1 << 20), past_cache=True)
    assert flags == [True, True, False]


def test_small_files_and_other_saves_go_through_it(tmp_path: Path, flags: list[bool]) -> None:
    write_file(str(tmp_path), "small", in_pieces(content(BLOCK_BYTES - 1), 1 << 20), past_cache=True)
    assert flags == [False]
    write_file(str(tmp_path), "stop", in_pieces(content(BLOCK_BYTES), 1 << 20))
    assert flags == [False]  # not by this way at all


def test_a_file_system_without_it(tmp_path: Path, flags: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    control = fcntl.fcntl

    def refusing(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return control(fd, command, argument)

    monkeypatch.setattr(past_cache.fcntl, "fcntl", refusing)
    data = content(2 * BLOCK_BYTES + 5)
    write_file(str(tmp_path), "f", in_pieces(data, 1 << 20), past_cache=True)
    assert (tmp_path / "f").read_bytes() == data
    assert flags == [False, False, False]


@pytest.mark.parametrize("written", [None, 512, 1000, 8192], ids=["refused", "512", "1000", "8192"])
def test_a_disk_that_wants_another_alignment_or_writes_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int | None
) -> None:
    write, calls = os.write, []

    def odd(fd: int, data: Any) -> int:
        calls.append(len(data))
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            if written is None or len(data) % 4096:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            if len(calls) == 2:
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                try:
                    return write(fd, data[:written])
                finally:
                    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        return write(fd, data)

    monkeypatch.setattr(past_cache.os, "write", odd)
    data = content(3 * BLOCK_BYTES + 77)
    write_file(str(tmp_path), "f", in_pieces(data, 1 << 20), past_cache=True)
    assert (tmp_path / "f").read_bytes() == data
    assert len(calls) > 4


@pytest.mark.parametrize("at", [1, 2, 3], ids=["the first block", "a later block", "the rest"])
def test_a_disk_that_is_full_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    write, calls = os.write, []

    def full(fd: int, data: Any) -> int:
        calls.append(len(data))
        if len(calls) >= at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    monkeypatch.setattr(past_cache.os, "write", full)
    manifest = Manifest(run_id="r", sequence=1, step=1, epoch=0, reason="periodic")
    files = {"state.ckpt": in_pieces(content(2 * BLOCK_BYTES + 5), 1 << 20)}
    with pytest.raises(SaveError, match="No space left"):
        commit(str(tmp_path), "00000001-step-00000001", files, manifest, past_cache=True)
    assert list(tmp_path.iterdir()) == []
