"""What does the supervisor know of a rank, and how does it end one?"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptrun.environment.process import host_name
from ckptrun.launch.rank_output import RankOutput
from ckptrun.launch.rank_process import DUMP_SIGNAL
from ckptrun.launch.wire import Channel, Message
from ckptrun.records import Stage

_DUMP_S = 1.0  # what stacks may take to be written


@dataclass
class Rank:
    rank: int
    channel: Channel
    output: RankOutput
    pid: int | None = None
    outcome: Message | None = None
    outcome_at: float = 0.0
    code: int | None = None
    code_unknown: bool = False  # it has ended, and with which code cannot be told
    stage: str = Stage.SETUP
    saving: bool = False
    position: Any = None  # of its main thread, as it told it last
    moved_at: float = field(default_factory=time.monotonic)
    order: int = 0
    out_of_memory: bool = False
    stood_still_s: float | None = None
    ended_by_us: bool = False
    host: str = field(default_factory=host_name)
    host_lost: str | None = None  # why its host is gone, where that is what ended it

    @property
    def runs(self) -> bool:
        return self.pid is not None and self.code is None

    def kill(self) -> None:
        """End it and all that is in its group."""
        if self.runs and self.pid is not None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass

    def ask_for_stacks(self) -> None:
        """Make it write the stacks of its threads to its log, soon."""
        if self.pid is not None:
            try:
                os.kill(self.pid, DUMP_SIGNAL)
            except (ProcessLookupError, PermissionError):
                pass


def end_ranks(ranks: Sequence[Rank], *, dump: bool) -> None:
    """Kill ranks and all that is in their groups; with ``dump`` their stacks are in their logs before."""
    for rank in ranks:
        rank.ended_by_us = True
    if dump:
        dump_stacks(ranks)
    for rank in ranks:
        rank.kill()


def dump_stacks(ranks: Sequence[Rank]) -> None:
    """Make those ranks that work write the stacks of their threads to their logs; returns once they have."""
    asked = [rank for rank in ranks if rank.runs and rank.outcome is None]
    before = [_size(rank.output.log_path) for rank in asked]
    for rank in asked:
        rank.ask_for_stacks()
    deadline, last = time.monotonic() + _DUMP_S, before
    while asked and time.monotonic() < deadline:
        time.sleep(0.05)
        sizes = [_size(rank.output.log_path) for rank in asked]
        if sizes == last and all(size > old for size, old in zip(sizes, before, strict=True)):
            return
        last = sizes


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
