"""How do ranks of one training talk to each other? A group for the device's data, a CPU group and a store for words.

What ranks agree on goes over a gloo group of its own: a rank that is blocked in an NCCL collective cannot be asked, and
nobody's gradients wait for a question. The store is asked where not all ranks are sure to come, and by threads that
must not take part in a collective.
"""

from __future__ import annotations

import datetime
import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from ckptrun.strategies.strategy import Strategy

_LOOK_EVERY_S = 0.001


class RanksStrategy(Strategy):
    """Several ranks; the base of the strategies that train with more than one.

    Args:
        process_group_backend: ``gloo`` or ``nccl``; by the device where not given.
        timeout_s: seconds after which a collective that nobody answers is an error.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        local_rank: int = 0,
        world_size: int = 1,
        process_group_backend: str | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        super().__init__(rank=rank, local_rank=local_rank, world_size=world_size)
        self._backend = process_group_backend
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._cpu_group: Any = None
        self._store: Any = None

    def setup_environment(self) -> None:
        """Join the other ranks through the store that the environment names."""
        super().setup_environment()
        backend = self._backend or ("nccl" if self.root_device.type == "cuda" else "gloo")
        dist.init_process_group(backend, rank=self.rank, world_size=self.world_size, timeout=self._timeout)
        self._cpu_group = dist.new_group(backend="gloo", timeout=self._timeout)
        self._store = PrefixStore("ckptrun", _get_default_store())

    def barrier(self) -> None:
        dist.barrier(group=self._cpu_group)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._cpu_group)
        return box[0]

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value in order, on rank 0; None elsewhere."""
        boxes: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, boxes, dst=0, group=self._cpu_group)
        return boxes

    def gather_all(self, value: Any) -> list[Any]:
        boxes: list[Any] = [None] * self.world_size
        dist.all_gather_object(boxes, value, group=self._cpu_group)
        return boxes

    def all_here(self, point: str, patience_s: float) -> bool:
        store = self._store
        if store is None:
            return True  # the ranks have not met yet
        decided = f"{point}/decided"
        # Whoever decides first decides for all: the last to come, or one that waited long enough.
        if store.add(f"{point}/came", 1) == self.world_size:
            store.compare_set(decided, "", "yes")
        deadline = time.monotonic() + patience_s
        # Looking again and again, because the store's own wait prints a warning where its time is over.
        while not store.check([decided]):
            if time.monotonic() >= deadline:
                store.compare_set(decided, "", "no")
            time.sleep(_LOOK_EVERY_S)
        return bool(store.get(decided) == b"yes")

    def agree(self, words: Sequence[int]) -> list[int]:
        """The maximum over ranks of each of a few small numbers."""
        tensor = torch.tensor(words, dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._cpu_group)
        return [int(word) for word in tensor.tolist()]

    def post(self, key: str, value: bytes) -> None:
        """Lay ``value`` down where every rank can :meth:`look` for it; callable from any thread."""
        self._store.set(key, value)

    def look(self, key: str) -> bytes | None:
        """What a rank has laid down under ``key``; None as long as there is nothing. Callable from any thread."""
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def forget(self, key: str) -> None:
        """Take away what was laid down, once nobody looks for it any more."""
        self._store.delete_key(key)

    def teardown(self, *, failed: bool = False) -> None:
        """Leave the group. What holds connections goes first and all ranks meet: a rank that ends while a peer still
        holds connections has been seen to abort after its work was done."""
        if failed:
            # The process ends, and with it its connections. Waiting for the others, or for a device that is still in
            # a collective with them, has no end.
            return
        self.let_go()
        gc.collect()
        if dist.is_initialized():
            self.barrier()
            dist.destroy_process_group()
        self._cpu_group = self._store = None

    def let_go(self) -> None:
        """Drop what wraps the module and holds connections to other ranks."""


def is_collective_error(error: BaseException) -> bool:
    """Whether this rank only failed because another did: a collective was cut off or timed out."""
    if isinstance(error, dist.DistBackendError | dist.DistNetworkError | dist.DistStoreError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _CUT_OFF)


_CUT_OFF = ("connection closed by peer", "connection reset by peer", "gloo", "nccl", "timed out waiting")
