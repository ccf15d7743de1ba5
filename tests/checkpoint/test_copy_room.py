"""Room for a copy is the process's own, and begins where a disk can read it."""

from __future__ import annotations

import mmap
import os
import resource
from typing import Any, cast

import pytest
import torch

from ckptrun.checkpoint import copy_room, snapshot
from ckptrun.checkpoint.copy_room import MAPPED_BYTES, room_for
from ckptrun.checkpoint.snapshot import Snapshot
from ckptrun.fit.checkpoint_writer import CheckpointWriter


@pytest.mark.parametrize(
    "size_bytes", [0, 1, MAPPED_BYTES - 1, MAPPED_BYTES, MAPPED_BYTES + 1, 5 * MAPPED_BYTES]
)
def test_it_has_the_size_and_can_be_written(size_bytes: int) -> None:
    source = torch.randint(256, (size_bytes,), dtype=torch.uint8).untyped_storage()
    room = room_for(source)
    assert room.nbytes() == size_bytes
    room.copy_(source)
    found, wanted = (torch.empty(0, dtype=torch.uint8).set_(storage) for storage in (room, source))
    assert torch.equal(found, wanted)
    assert size_bytes < MAPPED_BYTES or room.data_ptr() % mmap.PAGESIZE == 0


def test_no_memory_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuses)
    with pytest.raises(MemoryError, match="no memory for a copy of 4194304 bytes: Cannot allocate memory"):
        room_for(torch.zeros(1 << 20).untyped_storage())


def test_a_forked_child_does_not_make_the_next_copy_slow() -> None:
    """As a loader's worker at the begin of an epoch: pages that are shared with it would each be copied first."""
    kept, state = Snapshot(), {"a": torch.zeros(8 << 20), "b": torch.zeros(8 << 20)}
    kept.take(state)
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reads, 1)
        os._exit(0)
    try:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        kept.take(state)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    finally:
        os.write(writes, b"x")
        os.waitpid(child, 0)
        os.close(writes)
        os.close(reads)
    assert faults < kept.size_bytes // mmap.PAGESIZE // 10


def test_a_forked_child_may_let_go_of_a_copy() -> None:
    """Its collector finds what it inherited; where that lay there must be nothing of its own by then."""
    rooms = [room_for(torch.zeros(1 << 20).untyped_storage()) for _ in range(4)]
    child = os.fork()
    if child == 0:
        own = [
            mmap.mmap(-1, rooms[0].nbytes(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(8)
        ]
        rooms.clear()
        for mapped in own:
            mapped.write(b"x" * len(mapped))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_a_kernel_that_does_not_know_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_room, "_MADV_WIPEONFORK", 12345)
    assert room_for(torch.zeros(1 << 20).untyped_storage()).nbytes() == 4 << 20


def test_no_memory_for_what_a_save_will_need_is_said_by_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(snapshot, "room_for", refuses)
    writer = CheckpointWriter(cast(Any, None), "")
    writer.prepare([torch.zeros(8 << 20)])
    assert writer.wait() is None
