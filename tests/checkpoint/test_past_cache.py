"""What goes past the page cache is the same file, on disks that take it and on those that do not."""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptrun.checkpoint import past_cache
from ckptrun.checkpoint.checksum import checksum_of
from ckptrun.checkpoint.commit import commit, write_file
from ckptrun.checkpoint.manifest import Manifest
from ckptrun.checkpoint.past_cache import BLOCK_BYTES
from ckptrun.checkpoint.snapshot import Snapshot
from ckptrun.checkpoint.state_file import read_state, write_state
from ckptrun.errors import SaveError

SIZES = [0, 1, 4095, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 12345]


def content(size_bytes: int) -> bytes:
    return (os.urandom(1 << 16) * (size_bytes // (1 << 16) + 1))[:size_bytes]


def in_pieces(data: bytes, piece: int) -> Callable[[Any], None]:
    """Pieces that begin at an odd address, where no disk can read them: by chance, bytes begin at a sector."""

    def write(file: Any) -> None:
        for start in range(0, len(data), piece):
            file.write(memoryview(b"x" + data[start : start + piece])[1:])

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


SECTOR = past_cache.SECTOR_BYTES
HEAD = b"h" * SECTOR  # what a torch file has before a tensor, filled up to a sector


def at_a_sector(data: bytes) -> memoryview:
    """The same bytes where a disk can read them."""
    mapped = mmap.mmap(-1, len(data))
    mapped.write(data)
    return memoryview(mapped)


def noted_writev(monkeypatch: pytest.MonkeyPatch, *answers: int | None) -> list[int]:
    """Lengths of what was to be written as it lies; the first calls take so many bytes, or none: as ``answers`` say."""
    calls: list[int] = []
    left, writev, write = list(answers), os.writev, os.write

    def noting(fd: int, parts: list[memoryview]) -> int:
        calls.append(sum(map(len, parts)))
        if not left:
            return writev(fd, parts)
        takes = left.pop(0)
        if takes is None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        try:
            return write(fd, b"".join(parts)[:takes])
        finally:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)

    monkeypatch.setattr(past_cache.os, "writev", noting)
    return calls


def write_behind_a_head(folder: Path, data: bytes) -> None:
    """Write ``f`` as a torch file has a tensor, and see that it is what was written."""

    def write(file: Any) -> None:
        file.write(HEAD)
        file.write(at_a_sector(data))

    record = write_file(str(folder), "f", write, past_cache=True)
    assert (folder / "f").read_bytes() == HEAD + data
    with io.FileIO(folder / "f") as raw:
        assert checksum_of(raw) == (record.checksum, record.size_bytes)


def test_what_begins_at_a_sector_is_written_as_it_lies(
    tmp_path: Path, flags: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = noted_writev(monkeypatch)
    data = content(2 * BLOCK_BYTES + 2 * SECTOR + 5)
    write_behind_a_head(tmp_path, data)
    assert calls == [SECTOR + BLOCK_BYTES, BLOCK_BYTES]  # the head goes along
    assert flags == [False]  # two sectors and five bytes at the end, through the cache


@pytest.mark.parametrize(
    "answers",
    [
        [None],
        [100],
        [SECTOR],
        [SECTOR + 100],
        [3 * SECTOR],
        [SECTOR + BLOCK_BYTES, None],
        [SECTOR + BLOCK_BYTES, 5 * SECTOR, 512],
    ],
    ids=str,
)
def test_a_disk_that_takes_less_of_what_lies_at_a_sector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[int | None]
) -> None:
    calls = noted_writev(monkeypatch, *answers)
    data = content(5 * BLOCK_BYTES + 2 * SECTOR + 5)
    write_behind_a_head(tmp_path, data)
    assert len(calls) >= len(answers)


def test_a_disk_that_is_full_while_it_writes_as_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, parts: list[memoryview]) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(past_cache.os, "writev", full)
    manifest = Manifest(run_id="r", sequence=1, step=1, epoch=0, reason="periodic")
    files = {"state.ckpt": lambda file: file.write(at_a_sector(content(BLOCK_BYTES)))}
    with pytest.raises(SaveError, match="No space left"):
        commit(str(tmp_path), "00000001-step-00000001", files, manifest, past_cache=True)
    assert list(tmp_path.iterdir()) == []


def test_a_copied_state_goes_to_the_disk_as_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = noted_writev(monkeypatch)
    state = {"a": torch.randn(3 << 18), "b": torch.randn(3 << 18), "c": torch.zeros(3)}
    copied = Snapshot().take(state)
    write_file(str(tmp_path), "state.ckpt", lambda file: write_state(file, copied), past_cache=True)
    assert sum(calls) > 2 * (3 << 20)
    found = read_state(str(tmp_path / "state.ckpt"))
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_one_piece_that_begins_elsewhere_leaves_the_others_as_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pickle of a state with very many tensors is large, and comes first."""
    calls = noted_writev(monkeypatch)
    odd, data = content((2 << 20) + 3), content(BLOCK_BYTES)
    filled = bytes(-len(odd) % SECTOR)

    def write(file: Any) -> None:
        file.write(memoryview(b"x" + odd)[1:])
        file.write(filled)
        file.write(at_a_sector(data))

    write_file(str(tmp_path), "f", write, past_cache=True)
    assert (tmp_path / "f").read_bytes() == odd + filled + data
    assert calls[-1] == len(odd + filled) + BLOCK_BYTES


def test_a_disk_that_never_takes_a_piece_as_it_lies_is_not_asked_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each refusal costs the file system an allocation that it takes back."""
    calls = noted_writev(monkeypatch, *[None] * 99)
    data = content(6 * BLOCK_BYTES)
    write_file(str(tmp_path), "f", lambda file: file.write(at_a_sector(data)), past_cache=True)
    assert (tmp_path / "f").read_bytes() == data
    assert len(calls) == 3
