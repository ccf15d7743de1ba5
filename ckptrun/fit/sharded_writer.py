"""How does a checkpoint get to the disk of which every rank writes a part?

As :mod:`ckptrun.fit.checkpoint_writer` has it, on every rank: each copies its part and writes it in a thread,
while rank 0 commits once it has heard of all (:mod:`ckptrun.fit.shards`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ckptrun.checkpoint.commit import Others
from ckptrun.checkpoint.manifest import Manifest
from ckptrun.checkpoint.snapshot import Snapshot
from ckptrun.fit.checkpoint_writer import NO_MEMORY, CheckpointWriter
from ckptrun.fit.shards import Gathering, assist
from ckptrun.strategies.strategy import Strategy

if TYPE_CHECKING:
    from ckptrun.fit.context import RankContext


class ShardedWriter(CheckpointWriter):
    """Writes one checkpoint at a time, together with the writers of the other ranks.

    Args:
        failed: whether a rank has failed, so that not all can be waited for.
    """

    def __init__(
        self, context: RankContext, checkpoints_dir: str, strategy: Strategy, failed: Callable[[], bool]
    ) -> None:
        super().__init__(context, checkpoints_dir, Snapshot(strategy.classes()))
        self._strategy = strategy
        self._failed = failed
        self._gathering: Gathering | None = None

    def _commit(
        self,
        name: str,
        files: dict[str, Any],
        manifest: Manifest,
        needed_bytes: int,
        last_word: Callable[[Manifest], Manifest],
        *,
        past_cache: bool,
    ) -> Manifest | None:
        if self._gathering is not None:
            self._gathering.forget()
        self._gathering = Gathering(self._strategy, name, self._failed)
        try:
            return super()._commit(name, files, manifest, needed_bytes, last_word, past_cache=past_cache)
        finally:
            self._gathering.end()

    def _others(self) -> Others | None:
        return self._gathering

    def _worth_another_try(self) -> bool:
        return not self._failed()

    def assist(self, name: str, shards: Mapping[str, Any]) -> None:
        """Take part in the save ``name`` of rank 0, now.

        Raises:
            SaveError: a rank has failed.
        """
        assist(self._strategy, name, shards, self._failed)

    def begin_to_assist(self, name: str, shards: Mapping[str, Any]) -> None:
        """Copy this rank's part and have it written by a thread.

        Raises:
            SaveError: there was no memory for the copy, so it was written at once; as :meth:`assist`.
        """
        try:
            copied = self._snapshot.take(dict(shards))

            def work() -> None:
                assist(self._strategy, name, copied, self._failed, past_cache=True)

            self._saver.submit(work)
        except NO_MEMORY as error:
            self._say_at_once(f"Rank {self._strategy.rank}'s part of {name}", error)
            self.assist(name, shards)
