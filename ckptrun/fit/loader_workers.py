"""What becomes of a loader's workers when a stop comes, and at the end? They ignore stops, and end with the work."""

from __future__ import annotations

import multiprocessing
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from ckptrun.fit.sample_seeds import show_own_dataset
from ckptrun.stop import ignore_stop_signals_in_child


class _WorkerInit:
    """Loader workers leave stop signals to their parent; then the user's own ``worker_init_fn`` runs."""

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self.user = user
        self.parent_pid = os.getpid()

    def __call__(self, worker_id: int) -> None:
        ignore_stop_signals_in_child(self.parent_pid)
        show_own_dataset()
        if self.user is not None:
            self.user(worker_id)


def shield_workers(loader: Any) -> None:
    """Make the workers of a DataLoader ignore stop signals; once per loader."""
    if (
        isinstance(loader, DataLoader)
        and loader.num_workers > 0
        and not isinstance(loader.worker_init_fn, _WorkerInit)
    ):
        loader.worker_init_fn = _WorkerInit(loader.worker_init_fn)


# Iterators with workers, and their loaders, until somebody lets go of them.
_with_workers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def start_iterator(loader: Any, seed: int | None = None) -> Iterator[Any]:
    """``iter(loader)``, whose workers :func:`end_workers` then knows.

    Args:
        seed: for the workers of a DataLoader. Torch draws one from the training's random state where it makes an
            iterator, and not where persistent workers begin another epoch: a run that was resumed there would go on
            with other random numbers than one that was not.
    """
    if not getattr(loader, "num_workers", 0):
        return _seeded_iter(loader, seed)
    before = multiprocessing.active_children()
    try:
        iterator = _seeded_iter(loader, seed)
    except BaseException as error:
        # A worker died as soon as it was there: the others belong to an iterator that nobody will ever have.
        for half_made in _iterators_in(error):
            _forget(half_made)
        _kill([child for child in multiprocessing.active_children() if child not in before and child.daemon])
        raise
    if getattr(iterator, "_workers", None):
        _with_workers[iterator] = weakref.ref(loader)
    return iterator


def _seeded_iter(loader: Any, seed: int | None) -> Iterator[Any]:
    if seed is None or not isinstance(loader, DataLoader):
        return iter(loader)
    own, loader.generator = loader.generator, torch.Generator().manual_seed(seed)
    try:
        return iter(loader)
    finally:
        loader.generator = own


def end_workers() -> None:
    """End the workers of all iterators that still live, and wait for them.

    An iterator ends its workers when nobody holds it any more; after an error the traceback does, and then it is
    multiprocessing that sends SIGTERM at exit and waits. The workers ignore SIGTERM, for it comes to whole process
    groups while training still needs them: they have to be killed. Their loader can be iterated again.
    """
    for iterator, reference in list(_with_workers.items()):
        _forget(iterator)
        if hasattr(iterator, "_pin_memory_thread"):
            iterator._pin_memory_thread_done_event.set()
        _kill(iterator._workers)
        for queue in iterator._index_queues:
            queue.cancel_join_thread()
            queue.close()
        loader = reference()
        if loader is not None and getattr(loader, "_iterator", None) is iterator:
            loader._iterator = None
    _with_workers.clear()


def _forget(iterator: Any) -> None:
    """Have torch no longer watch over this iterator's workers: else it raises in this thread that they were killed."""
    if iterator._worker_pids_set:
        signal_handling: Any = torch.utils.data._utils.signal_handling
        signal_handling._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
    # Not _shutdown_workers(): its locks may be held by a worker that is dead, and it waits 5 s for a busy one.
    iterator._shutdown = True


def _kill(workers: Sequence[Any]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join()


def _iterators_in(error: BaseException) -> Iterator[Any]:
    """The iterators whose making failed with ``error``."""
    traceback = error.__traceback__
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        if frame.f_code.co_name == "__init__" and hasattr(frame.f_locals.get("self"), "_worker_pids_set"):
            yield frame.f_locals["self"]
