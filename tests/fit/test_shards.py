"""Ranks that write one checkpoint together: threads here, with a dict in place of the store that ranks meet in."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptrun.checkpoint.commit import commit, write_file
from ckptrun.checkpoint.manifest import Manifest
from ckptrun.errors import SaveError
from ckptrun.fit import shards
from ckptrun.fit.sharded_writer import ShardedWriter
from ckptrun.fit.shards import Gathering, assist

NAME = "00000001-step-00000010"
RANKS = 3


class Ranks:
    """What they say to each other, and the temporary folder of the newest try."""

    def __init__(self) -> None:
        self.said: dict[str, bytes] = {}
        self.failed = False

    def strategy(self, rank: int) -> Any:
        return SimpleNamespace(
            rank=rank,
            world_size=RANKS,
            post=self.said.__setitem__,
            look=self.said.get,
            forget=lambda key: self.said.pop(key, None),
            classes=list,
        )

    def assist(self, rank: int) -> None:
        files = {f"tag/rank-{rank}-{part}.pt": {"a": torch.ones(3)} for part in "ab"}
        assist(self.strategy(rank), NAME, files, lambda: self.failed)

    def commit(self, folder: Path, write: Callable[[Any], Any]) -> Manifest:
        gathering = Gathering(self.strategy(0), NAME, lambda: self.failed)
        manifest = Manifest("r", 1, 10, 0, "periodic")
        try:
            return commit(str(folder), NAME, {"state.ckpt": write}, manifest, others=gathering)
        finally:
            gathering.end()


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(RANKS) as pool:
        yield pool


def meanwhile(monkeypatch: pytest.MonkeyPatch, *, broken: str, slow: str) -> threading.Event:
    """The file ``broken`` fails at once. ``slow`` is written once the folder is gone, or for long is not; the event
    says that it is being written."""
    begun = threading.Event()

    def write(folder: str, path: str, writer: Any, **options: Any) -> Any:
        if path.endswith(broken):
            begun.wait(60)
            raise OSError(errno.ENOSPC, "the disk is full", folder)
        if path.endswith(slow):
            begun.set()
            ends_at = time.monotonic() + 0.5
            while os.path.isdir(folder) and time.monotonic() < ends_at:
                time.sleep(0.01)
        return write_file(folder, path, writer, **options)

    monkeypatch.setattr(shards, "write_file", write)
    return begun


def ended(work: Future[None]) -> None:
    work.result(60)


def test_together(tmp_path: Path, ranks: Ranks, pool: ThreadPoolExecutor) -> None:
    others = [pool.submit(ranks.assist, rank) for rank in (1, 2)]
    written = ranks.commit(tmp_path, lambda f: f.write(b"x"))
    for other in others:
        ended(other)
    assert [file.path for file in written.files] == [
        "state.ckpt", "tag/rank-1-a.pt", "tag/rank-1-b.pt", "tag/rank-2-a.pt", "tag/rank-2-b.pt",
    ]  # fmt: skip
    assert os.listdir(tmp_path) == [NAME]


def test_nothing_stays_where_one_fails_while_another_still_writes(
    tmp_path: Path, ranks: Ranks, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, broken="rank-1-a.pt", slow="rank-2-a.pt")
    others = [pool.submit(ranks.assist, rank) for rank in (1, 2)]
    with pytest.raises(SaveError, match="disk is full"):
        ranks.commit(tmp_path, lambda f: f.write(b"x"))
    for other in others:
        ended(other)
    assert os.listdir(tmp_path) == []


def test_nothing_stays_where_the_rank_that_commits_fails(
    tmp_path: Path, ranks: Ranks, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = meanwhile(monkeypatch, broken="nothing", slow="rank-2-a.pt")

    def write(f: Any) -> None:
        begun.wait(60)
        raise OSError(errno.ENOSPC, "the disk is full", "state.ckpt")

    others = [pool.submit(ranks.assist, rank) for rank in (1, 2)]
    with pytest.raises(SaveError, match="disk is full"):
        ranks.commit(tmp_path, write)
    for other in others:
        ended(other)
    assert os.listdir(tmp_path) == []


def test_a_rank_that_says_nothing_any_more_is_not_waited_for(
    tmp_path: Path, ranks: Ranks, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_AFTER_FAILURE_S", 0.1)
    other = pool.submit(ranks.assist, 1)  # rank 2 is dead
    ranks.failed = True
    with pytest.raises(SaveError, match="rank 2 has not written its part"):
        ranks.commit(tmp_path, lambda f: f.write(b"x"))
    assert isinstance(other.exception(60), SaveError | None)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory\nand more")])
def test_without_memory_for_a_copy_a_ranks_part_is_written_at_once(
    tmp_path: Path,
    ranks: Ranks,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    said: list[str] = []
    context: Any = SimpleNamespace(say=said.append)
    writer = ShardedWriter(context, str(tmp_path), ranks.strategy(1), lambda: False)

    def take(_: Any) -> Any:
        raise error

    monkeypatch.setattr(writer._snapshot, "take", take)
    other = pool.submit(ranks.assist, 2)
    committed = pool.submit(ranks.commit, tmp_path, lambda f: f.write(b"x"))
    writer.begin_to_assist(NAME, {"tag/rank-1.pt": {"a": torch.ones(3)}})
    ended(other)
    assert "tag/rank-1.pt" in [file.path for file in committed.result(60).files]
    reason = str(error).split("\n")[0] or "MemoryError"
    assert said == [
        f"Rank 1's part of {NAME} cannot be copied ({reason}): training waits until it is written."
    ]
    assert writer.wait() is None
