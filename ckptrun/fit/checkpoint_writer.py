"""How do a checkpoint's bytes get to the disk while training goes on?

    training   ──step──┬─copy─┬──step──step──step──step──┬─took note─┬──step──
    saver              └──────┴─write, fsync, commit, books──┘

The rank that writes copies the state into buffers that it keeps, and a thread writes the copy: see
:mod:`ckptrun.checkpoint.snapshot`. Where nothing moves on meanwhile (a stop, the end of training) the state is
written as it is.

What a failing disk means is decided here too, by ``run.on_save_error``; the temporary files are gone by then, and
the earlier checkpoints are as they were (:mod:`ckptrun.checkpoint.commit`).
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from ckptrun.checkpoint.commit import Others, commit, preflight
from ckptrun.checkpoint.manifest import Manifest
from ckptrun.checkpoint.snapshot import AsyncSaver, Snapshot
from ckptrun.checkpoint.state_file import write_state
from ckptrun.checkpoint.storages import size_of
from ckptrun.errors import SaveError
from ckptrun.fit.capture import STATE_FILE, rank_file

if TYPE_CHECKING:
    from ckptrun.fit.context import RankContext

NO_MEMORY = (MemoryError, RuntimeError)  # torch's out-of-memory errors are RuntimeErrors
_RETRY_AFTER_S = (0.5, 2.0)
_WORTH_PREPARING_BYTES = 16 << 20
_NO_SHARDS: Mapping[str, Any] = MappingProxyType({})


class CheckpointWriter:
    """Writes one checkpoint at a time, in the calling thread or in one of its own.

    While that thread works, others call nothing but :meth:`wait`; the thread itself calls :meth:`look_ahead`.

    Attributes:
        error: why the newest save failed, until one succeeds; of a save in flight, once it has ended.
    """

    def __init__(self, context: RankContext, checkpoints_dir: str, snapshot: Snapshot | None = None) -> None:
        self._context = context
        self._folder = checkpoints_dir
        self._snapshot = Snapshot() if snapshot is None else snapshot
        self._saver: AsyncSaver[Manifest | None] = AsyncSaver()
        self._preparing: threading.Thread | None = None
        self._room_said = False
        self._at_once: tuple[Manifest | None] | None = None  # where the state could not be copied
        self.error: str | None = None

    # -- writing -----------------------------------------------------------------------------------------

    def write(
        self,
        name: str,
        state: dict[str, Any],
        rank_states: list[Any],
        manifest: Manifest,
        last_word: Callable[[Manifest], Manifest] = lambda manifest: manifest,
        shards: Mapping[str, Any] = _NO_SHARDS,
        *,
        needed_bytes: int | None = None,
        beside_training: bool = False,
    ) -> Manifest | None:
        """Write and commit now.

        Args:
            shards: the content of further files by their path; a strategy's own.
            last_word: as :func:`ckptrun.checkpoint.commit.commit` has it.
            needed_bytes: what all ranks write, where others write too.
            beside_training: training goes on meanwhile, and is to lose as little as can be.

        Returns:
            The manifest as it was written; None where it failed and ``run.on_save_error`` lets training go on.

        Raises:
            SaveError: it failed, and the policy is to stop.
        """
        files = {STATE_FILE: functools.partial(write_state, state=state)}
        if not manifest.weights_only:
            for rank_state in rank_states:
                files[rank_file(rank_state["rank"])] = functools.partial(write_state, state=rank_state)
        for path, content in shards.items():
            files[path] = functools.partial(_write_shard, content=content)
        if needed_bytes is None:
            needed_bytes = size_of(state) + size_of(dict(shards))
        return self._commit(name, files, manifest, needed_bytes, last_word, past_cache=beside_training)

    def begin(
        self,
        name: str,
        state: dict[str, Any],
        rank_states: list[Any],
        manifest: Manifest,
        *,
        last_word: Callable[[Manifest], Manifest],
        ended: Callable[[Manifest | None], None],
        shards: Mapping[str, Any] = _NO_SHARDS,
        needed_bytes: int | None = None,
    ) -> None:
        """Copy the state and have it written by a thread; the save before must have been waited for.

        Args:
            last_word: as for :meth:`write`; called in that thread.
            needed_bytes: as for :meth:`write`.
            ended: called in that thread with what :meth:`wait` is about to give, or None where that raises.

        Raises:
            SaveError: there was no memory for the copy, so it was written at once; as :meth:`write`.
        """
        started = time.monotonic()
        self._at_once = None
        try:
            self._prepared()
            copied, copied_ranks, copied_shards = self._snapshot.take((state, rank_states, dict(shards)))
            took_s = time.monotonic() - started
            noted = replace(manifest, save_s=manifest.save_s + took_s)

            def work() -> Manifest | None:
                written = None
                try:
                    written = self.write(
                        name,
                        copied,
                        copied_ranks,
                        noted,
                        last_word,
                        copied_shards,
                        needed_bytes=needed_bytes,
                        beside_training=True,
                    )
                    return written
                finally:
                    ended(written)

            self._saver.submit(work)
        except NO_MEMORY as error:
            self._say_at_once(name, error)
            written = self.write(
                name, state, rank_states, manifest, last_word, shards, needed_bytes=needed_bytes
            )
            self._at_once = (written,)
            ended(written)

    def _say_at_once(self, what: str, error: Exception) -> None:
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        self._context.say(f"{what} cannot be copied ({reason}): training waits until it is written.")

    def wait(self) -> Manifest | None:
        """Wait for what :meth:`begin` began, and give what :meth:`write` gives."""
        if self._at_once is not None:
            return self._at_once[0]
        return self._saver.wait()

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
        policy = self._context.on_save_error
        waits = _RETRY_AFTER_S if policy == "retry" else ()
        for wait_s in (*waits, None):
            try:
                if not self._may_save():
                    self.error = "another process has taken the run over"
                    self._context.say(f"{name} is not written: {self.error}.")
                    return None
                written = commit(
                    self._folder,
                    name,
                    files,
                    manifest,
                    needed_bytes=needed_bytes,
                    last_word=last_word,
                    past_cache=past_cache,
                    others=self._others(),
                )
                self.error = None
                return written
            except SaveError as error:
                self.error = error.message
                if policy == "stop":
                    raise
                if wait_s is None or not self._worth_another_try():
                    self._context.say(f"{error} Training goes on.")
                    return None
                self._context.say(f"{error.message} Trying again in {wait_s:g} s.")
                time.sleep(wait_s)
        return None

    def _others(self) -> Others | None:
        """Who else writes a part of the same checkpoint."""
        return None

    def _worth_another_try(self) -> bool:
        return True

    def _may_save(self) -> bool:
        try:
            return self._context.may_save()
        except OSError as error:
            raise SaveError(
                f"Whether the run still is this process's cannot be read: {error.strerror or error}."
            ) from error

    # -- room --------------------------------------------------------------------------------------------

    def look_ahead(self, needed_bytes: int) -> None:
        """Say, once until there is room again, that the next save will not find the space it needs."""
        problem = preflight(self._folder, needed_bytes)
        if problem is not None and not self._room_said:
            self._context.say(problem)
        self._room_said = problem is not None

    # -- buffers -----------------------------------------------------------------------------------------

    def prepare(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have the buffers made in the background, so that the first copy takes no longer than the others.

        The kernel clears a page when it is touched first, which takes as long as the copy itself.
        """
        tensors = list(tensors)
        if sum(tensor.numel() * tensor.element_size() for tensor in tensors) < _WORTH_PREPARING_BYTES:
            return
        try:
            buffers = self._snapshot.reserve(tensors)
        except NO_MEMORY:
            return  # the save that needs them says so

        def touch() -> None:
            for buffer in buffers:
                # A call through ctypes lets go of the interpreter, and takes no thread of torch's.
                ctypes.memset(buffer.data_ptr(), 0, buffer.nbytes())

        self._preparing = threading.Thread(target=touch, name="ckptrun-save-buffers", daemon=True)
        self._preparing.start()

    def _prepared(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None


def _write_shard(f: BinaryIO, content: Any) -> None:
    """A text as it is; anything else as a torch file."""
    if isinstance(content, str):
        f.write(content.encode())
    else:
        write_state(f, content)
