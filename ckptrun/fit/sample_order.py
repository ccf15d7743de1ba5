"""In which order do samples come, and which of them are this rank's? A function of seed, epoch and position."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from ckptrun.fit.random_state import capture_random_state, restore_random_state, seed_everything


def epoch_seed(seed: int, epoch: int) -> int:
    """One seed from a run's seed and an epoch; distinct pairs that occur in practice give distinct seeds."""
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**63


def epoch_order(num_samples: int, seed: int, epoch: int) -> torch.Tensor:
    """The shuffled order of ``num_samples`` indices in ``epoch``: int64, shape (num_samples,)."""
    generator = torch.Generator()
    generator.manual_seed(epoch_seed(seed, epoch))
    return torch.randperm(num_samples, generator=generator)


class EpochBatchSampler(Sampler[list[int]]):
    """Batches of indices from the epoch's global order, from any position.

    With several ranks each takes its part of every global batch, so that the global order does not depend on how
    many there are.
    """

    def __init__(
        self, num_samples: int, batch_size: int, *, drop_last: bool, shuffle: bool, seed: int, rank: int = 0,
        world_size: int = 1,
    ) -> None:  # fmt: skip
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.start_batch = self.start_sample = 0

    @property
    def global_batch(self) -> int:
        """Samples that all ranks take together in one step."""
        return self.batch_size * self.world_size

    def batches_after(self, sample: int) -> int:
        """How many batches the samples from ``sample`` on make."""
        left = self.num_samples - sample
        return left // self.global_batch if self.drop_last else math.ceil(left / self.global_batch)

    def start_at(self, batch: int, sample: int | None = None) -> None:
        """Begin the next pass with batch ``batch``, at ``sample`` of the order where batches were of other sizes."""
        self.start_batch = batch
        self.start_sample = batch * self.global_batch if sample is None else sample

    def sample_at(self, batch: int) -> int:
        """The first sample of a batch of this pass."""
        return self.start_sample + (batch - self.start_batch) * self.global_batch

    def place(self, number: int) -> tuple[int, int]:
        """Position in the global order of the first sample of this pass's ``number``-th batch; the next ones follow."""
        begin = self.sample_at(self.start_batch + number)
        return self._span(begin, min(self.global_batch, self.num_samples - begin))[0], 1

    def __len__(self) -> int:
        return self.start_batch + self.batches_after(self.start_sample)

    def __iter__(self) -> Iterator[list[int]]:
        order = epoch_order(self.num_samples, self.seed, self.epoch) if self.shuffle else None
        for batch in range(self.start_batch, len(self)):
            begin = self.sample_at(batch)
            first, last = self._span(begin, min(self.global_batch, self.num_samples - begin))
            yield list(range(first, last)) if order is None else order[first:last].tolist()

    def _span(self, begin: int, count: int) -> tuple[int, int]:
        """This rank's part of the ``count`` samples from ``begin`` on.

        What is left at the end of an epoch is shared out evenly; where that is less than one sample a rank, those
        that would get none repeat one, because every rank has to take part in the step.
        """
        first = begin + count * self.rank // self.world_size
        last = begin + count * (self.rank + 1) // self.world_size
        return (first, last) if last > first else (begin + self.rank % count, begin + self.rank % count + 1)


class SkippingSampler(Sampler[Any]):
    """The user's sampler (or batch sampler) without the first ``skip`` items of this rank.

    With several ranks each takes every ``world_size``-th item, the same number of them. What the sampler draws by
    chance is then drawn from the run's seed and the epoch, so that all ranks share out the same items; of one without
    a length, which may never end, that cannot be seen to.

    Args:
        width: samples in an item; more than that where it is not known.
        part: (rank, number of ranks) where the sampler gives each rank a part of its own.
    """

    def __init__(
        self, base: Iterable[Any], seed: int, rank: int = 0, world_size: int = 1, *, width: int = 1,
        part: tuple[int, int] = (0, 1),
    ) -> None:  # fmt: skip
        self.base = base
        self.width = width
        self.part = part
        self.seed = seed
        self.epoch = 0
        self.skip = 0
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[Any]:
        if self.world_size > 1 and hasattr(self.base, "__len__"):
            return iter(self._drawn_alike()[self.skip * self.world_size + self.rank :: self.world_size])
        iterator = iter(self.base)
        # The first item is taken here and not when it is asked for: what a sampler draws as it begins then comes
        # from the same random state whether items are skipped or not.
        skipped = self.skip * self.world_size
        first = list(itertools.islice(iterator, skipped + 1))[skipped:]
        return itertools.islice(itertools.chain(first, iterator), self.rank, None, self.world_size)

    def place(self, number: int) -> tuple[int, int]:
        """Position of the first sample of this pass's ``number``-th item, and the step to the next."""
        item = (self.skip + number) * self.world_size + self.rank
        own_rank, num_parts = self.part
        return item * self.width * num_parts + own_rank, num_parts

    def _drawn_alike(self) -> list[Any]:
        before = capture_random_state()
        seed_everything(epoch_seed(self.seed, self.epoch))
        try:
            return list(self.base)
        finally:
            restore_random_state(before)

    def __len__(self) -> int:
        return len(self.base) // self.world_size  # type: ignore[arg-type]


class EveryNth(Sampler[Any]):
    """Every ``world_size``-th batch of an evaluation, from ``rank`` on; at the end some ranks have one more."""

    def __init__(self, base: Iterable[Any], rank: int, world_size: int, *, width: int = 1) -> None:
        self.base = base
        self.width = width
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.base), self.rank, None, self.world_size)

    def __len__(self) -> int:
        """The most that a rank has."""
        return math.ceil(len(self.base) / self.world_size)  # type: ignore[arg-type]

    def place(self, number: int) -> tuple[int, int]:
        """Position of the first sample of the ``number``-th batch, and the step to the next."""
        return (self.rank + number * self.world_size) * self.width, 1
