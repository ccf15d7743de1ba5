"""How does a save take the state's values of one moment without stopping training for as long as a write
takes?

    training   ──step──┬─wait for the save before─┬─copy─┬──step──step──step──
    saver                                                └──write, fsync, commit──

A :class:`Snapshot` copies the state into CPU buffers that it keeps from save to save: at most one copy
exists. An :class:`AsyncSaver` writes it in a thread, one save at a time.

Decision: a copy into kept buffers, as fast as memory allows. Turned down: fresh buffers at each save, whose
pages the kernel has to clear first; a copy-on-write fork, which stops for a tenth of the time and makes the
next updates pay more than that, and which CUDA does not survive; a queue of saves, which needs one copy for
each.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch

from ckptrun.checkpoint.copy_room import room_for

T = TypeVar("T")

_Buffers = dict[int, list[torch.UntypedStorage]]  # by size in bytes


class Snapshot:
    """Copies of a nested state, in buffers that are used again by the next one.

    Tensors that share a storage share one in the copy too, and objects that occur twice occur twice.

    Args:
        classes: plain data classes besides those that an encoded state has; they are copied as they are.
    """

    def __init__(self, classes: Iterable[type] = ()) -> None:
        self._buffers: _Buffers = {}
        self._classes = frozenset(classes)

    @property
    def size_bytes(self) -> int:
        """What the kept buffers take."""
        return sum(size_bytes * len(buffers) for size_bytes, buffers in self._buffers.items())

    def reserve(self, tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
        """Make the buffers for these tensors, in place of those there are, and copy nothing yet."""
        self._buffers = {}
        seen, made = set(), []
        for tensor in tensors:
            if tensor.device.type == "meta" or not _is_one_storage(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                made.append(room_for(storage))
                self._buffers.setdefault(storage.nbytes(), []).append(made[-1])
        return made

    def take(self, state: Any) -> Any:
        """Copy ``state``, which is in the form that :func:`ckptrun.checkpoint.safe_state.encode` gives.

        Returns:
            The copy, on the CPU. It is valid until the next call, which writes over it.

        Raises:
            TypeError: a value is not in the encoded form.
        """
        copier = _Copier(self._buffers, self._classes)
        try:
            result = copier.value(state)
            for device in copier.waits_for:
                torch.cuda.synchronize(device)
            return result
        finally:
            self._buffers = copier.used  # those that this state did not need go


class _Copier:
    def __init__(self, free: _Buffers, classes: frozenset[type]) -> None:
        self._classes = classes
        # Taken from the front, so that an unchanged state finds each of its storages' own buffer again.
        self._free = {size_bytes: buffers[::-1] for size_bytes, buffers in free.items()}
        self.used: _Buffers = {}
        self._storages: dict[int, torch.UntypedStorage] = {}  # by the source storage's identity
        self.waits_for: set[torch.device] = set()  # GPUs from which copies are under way
        self._done: dict[int, tuple[Any, Any]] = {}  # by id, with the original, so that ids stay unique

    def value(self, obj: Any) -> Any:
        kind = type(obj)
        if kind in _IMMUTABLE:
            return obj
        found = self._done.get(id(obj))
        if found is not None:
            return found[1]
        result: Any
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            result = self._tensor(obj)
        elif kind is dict or kind is OrderedDict:
            result = kind((self.value(key), self.value(item)) for key, item in obj.items())
            if kind is OrderedDict:
                result.__dict__.update(self.value(obj.__dict__))
        elif kind is list or kind is tuple or kind is set:
            result = kind([self.value(item) for item in obj])
        elif kind is Counter or kind is bytearray:
            result = kind(obj)
        elif kind in self._classes:
            result = copy.deepcopy(obj)
        else:
            raise TypeError(
                f"a snapshot takes encoded values only, not {kind.__module__}.{kind.__qualname__}"
            )
        self._done[id(obj)] = (obj, result)
        return result

    def _tensor(self, source: torch.Tensor) -> torch.Tensor:
        plain = source.detach()
        if source.device.type == "meta":
            copied = plain
        elif not _is_one_storage(plain):
            copied = plain.to("cpu", copy=True)
        else:
            storage = self._storage(plain.untyped_storage())
            copied = torch.empty(0, dtype=plain.dtype).set_(
                storage, plain.storage_offset(), plain.size(), plain.stride()
            )
        if type(source) is torch.nn.Parameter:
            copied = torch.nn.Parameter(copied, source.requires_grad)
        elif source.requires_grad:
            copied.requires_grad_()
        if source.__dict__:
            copied.__dict__.update(self.value(source.__dict__))
        return copied

    def _storage(self, source: torch.UntypedStorage) -> torch.UntypedStorage:
        copied = self._storages.get(source._cdata)
        if copied is None:
            size_bytes = source.nbytes()
            free = self._free.get(size_bytes)
            copied = free.pop() if free else room_for(source)
            self.used.setdefault(size_bytes, []).append(copied)
            self._storages[source._cdata] = copied
            on_device = source.device.type == "cuda"
            # In the order of the device's own work, so after the update that made these values.
            copied.copy_(source, non_blocking=on_device)
            if on_device:
                self.waits_for.add(source.device)
        return copied


_IMMUTABLE = frozenset(
    {str, int, float, bool, type(None), complex, bytes}
    | {torch.dtype, torch.device, torch.layout, torch.Size}
)


def _is_one_storage(tensor: torch.Tensor) -> bool:
    """Whether storage, offset, size, stride and dtype say all: not for sparse, quantized and the like."""
    return tensor.layout is torch.strided and not (
        tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg()
    )


class AsyncSaver(Generic[T]):
    """Runs saves in the background, one at a time. To be used from one thread.

    A save counts only once :meth:`wait` or the next :meth:`submit` has returned its result; a failure is raised
    there, once, as the exception it was.
    """

    def __init__(self) -> None:
        self._job: _Job[T] | None = None

    def submit(self, job: Callable[[], T]) -> T | None:
        """Start ``job`` in a thread, after the save before has ended.

        Returns:
            As :meth:`wait` for the save before.

        Raises:
            BaseException: the save before failed; ``job`` was not started, and may be submitted again.
        """
        before = self.wait()
        started = _Job(job)
        # Not a daemon: where the main thread ends early, the interpreter waits for the save.
        threading.Thread(target=started.run, name="ckptrun-save").start()
        self._job = started
        return before

    def wait(self) -> T | None:
        """Wait for the save in flight.

        Returns:
            Its result, once; None where there is none or its result was returned before.

        Raises:
            BaseException: what the save raised.
        """
        if self._job is None:
            return None
        self._job.done.wait()
        job, self._job = self._job, None
        if job.error is not None:
            raise job.error
        return job.result


class _Job(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self.done = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        assert self._work is not None
        try:
            self.result = self._work()
        except BaseException as error:  # whatever it is, it belongs to whoever waits
            self.error = error
        finally:
            self._work = None  # with what it holds: the copy of a state
            self.done.set()
