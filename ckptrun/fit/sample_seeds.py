"""Which random numbers does a sample get? Those of a seed of its own, made from (seed, epoch, position).

The sampler says with each batch where it lies in the epoch's global order (:class:`Placing`); the dataset's wrapper
seeds torch's, NumPy's and Python's global generators before each sample and before ``collate_fn``. Augmentation then
does not depend on how many loader workers or ranks there are, nor on where a run was stopped. In the training process
(no workers) its own random state is put aside for the time of a batch.

Decision: seeding anew costs 6 to 8 µs a sample, putting the state aside 16 µs a batch. NumPy's bit generator is
exchanged, because copying its state takes 24 µs each way; what NumPy keeps outside of it is one normal number held
back for the next call, which is taken out by asking for one and, where there was none, putting the 2,500 bytes of the
Mersenne Twister back. Turned down: ``torch.manual_seed``, which seeds the devices too (110 µs); saving and restoring
around each sample (97 µs).
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data import Dataset, Sampler, Subset, default_collate, default_convert, get_worker_info

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
_COLLATE = 0x5851F42D4C957F2D
_BATCH = 0x14057B7EF767814F


class PlacedSampler(Protocol):
    """A sampler that knows where the items of a pass lie in the epoch's global order."""

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...

    def place(self, number: int) -> tuple[int, int]:
        """Position of the first sample of the ``number``-th item of this pass, and the step to the next one's."""
        ...


class Placed(NamedTuple):
    """What a sampler gave, and where it lies."""

    item: Any
    """The indices of a batch, or one index."""
    seed: int
    """The epoch's."""
    first: int
    step: int


class Placing(Sampler[Placed]):
    """A sampler's items with their places.

    Args:
        base: the sampler.
        epoch_seed: called as a pass begins; gives the seed of its epoch.
    """

    def __init__(self, base: PlacedSampler, epoch_seed: Callable[[], int]) -> None:
        self.base = base
        self._epoch_seed = epoch_seed

    def __iter__(self) -> Iterator[Placed]:
        # Not a generator: what the base draws as it begins is drawn here.
        seed, place = self._epoch_seed(), self.base.place
        return (
            Placed(item, seed, *place(number))
            for number, item in zip(itertools.count(), iter(self.base), strict=False)
        )

    def __len__(self) -> int:
        return len(self.base)


def mixed(seed: int, position: int) -> int:
    """64 bits that depend on every bit of both (the finalizer of SplitMix64)."""
    value = (seed + (position + 1) * _STEP) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _seed_all(value: int) -> None:
    """Seed the global generators on the CPU; torch and NumPy get different halves, for theirs are one algorithm."""
    torch.default_generator.manual_seed(value)
    np.random.seed(value >> 32)
    random.seed(value)


class SeededDataset(Dataset[Any]):
    """A map-style dataset whose items are :class:`Placed` and come out as collated batches.

    The loader that uses it has :func:`as_it_is` as ``collate_fn``: the user's is called here.

    Args:
        dataset: the user's.
        collate_fn: the user's.
        batched: an item is a list of indices, and not one index.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], *, batched: bool) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self._batched = batched
        self._at_once = batched and _fetches_at_once(dataset)
        self._collate_draws = collate_fn not in (default_collate, default_convert)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, placed: Placed) -> Any:
        if get_worker_info() is not None:
            return self._fetch(placed)
        of_torch, of_python = torch.default_generator.get_state(), random.getstate()
        bits = mtrand.get_bit_generator()
        held_back = _take_held_back(bits)
        mtrand.set_bit_generator(_own_bits())
        try:
            return self._fetch(placed)
        finally:
            torch.default_generator.set_state(of_torch)
            random.setstate(of_python)
            mtrand.set_bit_generator(bits)
            if held_back is not None:
                np.random.set_state({**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": held_back})

    __getitems__ = __getitem__

    def _fetch(self, placed: Placed) -> Any:
        item, seed, position, step = placed
        dataset = self.dataset
        if not self._batched:
            _seed_all(mixed(seed, position))
            data = dataset[item]
        elif self._at_once:
            _seed_all(mixed(seed ^ _BATCH, position))
            data = dataset.__getitems__(item)
        else:
            data = []
            place = position
            for index in item:
                _seed_all(mixed(seed, place))
                data.append(dataset[index])
                place += step
        if self._collate_draws:
            _seed_all(mixed(seed ^ _COLLATE, position))
        return self.collate_fn(data)


def _fetches_at_once(dataset: Any) -> bool:
    while type(dataset) is Subset:  # it only passes on
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


_TWISTER_BYTES = 625 * 4  # 624 words and a position: NumPy's mt19937_state


def _raw(bits: Any) -> ctypes.Array[ctypes.c_char]:
    """The state of a Mersenne Twister where it lies in memory."""
    return (ctypes.c_char * _TWISTER_BYTES).from_address(bits.ctypes.state_address)


@functools.cache
def _lies_as_known() -> bool:
    """Whether this NumPy keeps the state as it is read here."""
    bits = np.random.MT19937(5)
    bits.random_raw(3)
    state = bits.state["state"]
    return _raw(bits).raw == state["key"].astype(np.uint32).tobytes() + int(state["pos"]).to_bytes(
        4, sys.byteorder
    )


def _take_held_back(bits: Any) -> float | None:
    """The normal number that NumPy's global generator holds back for the next call, taken out; None for none."""
    if type(bits) is np.random.MT19937 and _lies_as_known():
        memory = _raw(bits)
        before = memory.raw
        number = float(np.random.standard_normal())
        if memory.raw == before:
            return number
        memory.raw = before
        return None
    state = np.random.get_state(legacy=False)
    return state["gauss"] if state["has_gauss"] else None


_bits: list[np.random.MT19937] = []


def _own_bits() -> np.random.MT19937:
    """The bit generator of the samples, made once a process."""
    if not _bits:
        _bits.append(np.random.MT19937(0))
    return _bits[0]


def as_it_is(batch: Any) -> Any:
    """The ``collate_fn`` where batches are collated already."""
    return batch


def show_own_dataset() -> None:
    """In a loader worker: ``get_worker_info().dataset`` is the user's own, as ``worker_init_fn`` expects."""
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, SeededDataset):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
