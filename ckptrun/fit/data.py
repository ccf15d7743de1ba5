"""Which batch comes next, and how does a resumed run get there without reading what came before?

Decision: the order of samples is a function of (seed, epoch), so a position is two numbers and skipping costs no
data loading. A DataLoader with one of torch's own samplers is rebuilt around :class:`EpochBatchSampler`; a sampler
of the user's is replayed on its indices; a loader or an iterable dataset with ``state_dict`` (torchdata's protocol)
restores itself, torchdata's loader only where its dataset is iterable; a sequence is sliced; any other iterable is
read again up to the position, and that is said.
Generators that hang on the loader or its samplers, and the random state at the start of the epoch, are part of the
position where the order is drawn from them.
Turned down: saving the sampler's permutation (it grows with the data) or a generator's state (it says nothing about
how many samples were used).
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ckptrun.errors import IncompatibleError, MisconfigurationException
from ckptrun.fit.dataset_state import WatchedDataset, has_state, state_can_be_had, state_is_in_workers
from ckptrun.fit.loader_workers import shield_workers, start_iterator
from ckptrun.fit.random_state import (
    RandomState,
    capture_random_state,
    restore_random_state,
)
from ckptrun.fit.sample_order import EpochBatchSampler, EveryNth, SkippingSampler, epoch_seed
from ckptrun.fit.sample_seeds import Placing, SeededDataset, as_it_is
from ckptrun.fit.torchdata_loader import as_data_loader, options_of
from ckptrun.fit.user_generators import user_generators


def _with_dataset(loader: DataLoader[Any], dataset: IterableDataset[Any]) -> DataLoader[Any]:
    options = {"batch_size": loader.batch_size, "drop_last": loader.drop_last, **options_of(loader)}
    return DataLoader(dataset, collate_fn=loader.collate_fn, **options)


_ANY_WIDTH = 2**20  # more samples than a batch of unknown size will have


def _clone(
    loader: DataLoader[Any], sampler: EpochBatchSampler | SkippingSampler | EveryNth, seed: Callable[[], int]
) -> DataLoader[Any]:
    """``loader`` with another order of batches, and a seed for each sample.

    Args:
        seed: gives the seed of the epoch that begins.
    """
    batched = loader.batch_sampler is not None
    options = {"collate_fn": as_it_is, **options_of(loader)}
    seeded = SeededDataset(loader.dataset, loader.collate_fn, batched=batched)
    placing = Placing(sampler, seed)
    options |= {"batch_sampler": placing} if batched else {"sampler": placing, "batch_size": None}
    with warnings.catch_warnings():
        # About many workers: said already when the user made the loader.
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        return DataLoader(seeded, **options)


def _width(loader: DataLoader[Any]) -> int:
    """Samples in an item of the loader's sampler."""
    batches = loader.batch_sampler
    if batches is None:
        return 1
    return int(batches.batch_size) if type(batches) is torch.utils.data.BatchSampler else _ANY_WIDTH


def _is_ordinary(loader: DataLoader[Any]) -> bool:
    """Whether the order is one of torch's own, which :class:`EpochBatchSampler` can make."""
    sampler = loader.sampler
    known = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None
    )
    batches = loader.batch_sampler
    # Where the user gave a batch sampler, loader.sampler is one that is not used.
    return known and type(batches) is torch.utils.data.BatchSampler and batches.sampler is sampler


def evaluation_loader(loader: Any, *, seed: int, rank: int, world_size: int) -> Any:
    """This rank's part of an evaluation's loader: ranks take its batches in turn, in the order of the data.

    A loader with an order of its own keeps it: what each rank gets of it is the user's affair. Each sample of a
    map-style dataset has its seed, the same in every evaluation.
    """
    loader = as_data_loader(loader)
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return loader
    batches: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if world_size > 1 and _is_ordinary(loader):
        order = SequentialSampler(loader.dataset)  # type: ignore[arg-type]
        batches = torch.utils.data.BatchSampler(order, int(loader.batch_size or 1), loader.drop_last)
    else:
        rank, world_size = 0, 1
    return _clone(loader, EveryNth(batches, rank, world_size, width=_width(loader)), lambda: seed)


def _set_epoch(loader: Any, epoch: int) -> None:
    batch_sampler = getattr(loader, "batch_sampler", None)
    for holder in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        if holder is not None and hasattr(holder, "set_epoch"):
            holder.set_epoch(epoch)


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators of the user's that the order may be drawn from, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    )
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(item): item for item in found if isinstance(item, torch.Generator)}.values())


class TrainSource:
    """The training loader and how to start it at a position.

    Args:
        loader: a DataLoader, a sequence of batches, or any iterable.
        seed: the run's seed; with the epoch it decides the order of shuffling.
    """

    def __init__(self, loader: Any, *, seed: int, rank: int = 0, world_size: int = 1) -> None:
        if loader is None:
            raise MisconfigurationException(
                "There is nothing to train on: no train_dataloaders, and train_dataloader() returns nothing."
            )
        if (
            isinstance(loader, (list, tuple))
            and loader
            and all(isinstance(item, DataLoader) for item in loader)
        ):
            raise MisconfigurationException(
                f"Found a list of {len(loader)} training loaders; expected one.",
                hint="Combine them in one Dataset or IterableDataset.",
            )
        refuse_mapping(loader, "training data")
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise MisconfigurationException(
                f"Found {type(loader).__name__} as training data; expected a DataLoader or an iterable of batches."
            )
        loader = as_data_loader(loader)
        self.loader = self._user_loader = loader
        self.sampler: EpochBatchSampler | SkippingSampler | None = None
        self._seed, self._rank = seed, rank
        self.kind = self._recognise(loader, seed, rank, world_size)
        # The order of these depends on the random state at the start of the epoch, and on generators of the user's.
        self._draws = self.kind in ("sampled", "iterable")
        self._generators = _generators(loader) if self._draws else []
        self._epoch: int | None = None  # whose batches are being given out
        self._epoch_random: RandomState | None = None
        self._epoch_generators: list[torch.Tensor] = []
        self._exhausted = False
        self._resume_sample: int | None = None  # where in the order to go on
        # What has the state of a "stateful" source: the loader, or its dataset.
        self._stateful = self.loader.dataset if self.loader is not self._user_loader else self.loader
        shield_workers(self.loader)
        try:
            self.num_batches: float = len(self.loader)
        except (TypeError, NotImplementedError):
            self.num_batches = math.inf

    def _recognise(self, loader: Any, seed: int, rank: int, world_size: int) -> str:
        if has_state(loader):
            return "stateful"
        if state_can_be_had(loader):
            self.loader = _with_dataset(loader, WatchedDataset(loader.dataset))
            return "stateful"
        if type(loader) is DataLoader and not isinstance(loader.dataset, IterableDataset):
            sampler, part = loader.sampler, (0, 1)
            if isinstance(sampler, DistributedSampler):
                # It gives each rank its own part already.
                part, rank, world_size = (rank, world_size), 0, 1
            if _is_ordinary(loader):
                self.sampler = EpochBatchSampler(
                    len(loader.dataset),  # type: ignore[arg-type]
                    int(loader.batch_size or 1),
                    drop_last=loader.drop_last,
                    shuffle=type(sampler) is RandomSampler,
                    seed=seed,
                    rank=rank,
                    world_size=world_size,
                )
                self.loader = _clone(loader, self.sampler, self._seed_of_epoch)
                return "indexed"
            base: Any = sampler if loader.batch_sampler is None else loader.batch_sampler
            self.sampler = SkippingSampler(base, seed, rank, world_size, width=_width(loader), part=part)
            self.loader = _clone(loader, self.sampler, self._seed_of_epoch)
            return "sampled"
        return "sequence" if isinstance(loader, Sequence) else "iterable"

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch of this rank, where the loader tells."""
        loader = self._user_loader
        own = getattr(loader, "batch_size", None)
        found = getattr(getattr(loader, "batch_sampler", None), "batch_size", None) if own is None else own
        return int(found) if isinstance(found, int) else None

    @property
    def state_is_in_workers(self) -> bool:
        """Whether the dataset keeps a position that only loader workers know."""
        return state_is_in_workers(self._user_loader)

    def out_of_reach(self) -> list[str]:
        """Generators of the user's whose state is neither kept nor replaced, where they can be found."""
        loader = self._user_loader
        dataset = getattr(loader, "dataset", loader if self.kind == "iterable" else None)
        known = {id(generator) for generator in self._generators}
        return user_generators(dataset, getattr(loader, "collate_fn", None), known=known)

    def _seed_of_epoch(self) -> int:
        assert self.sampler is not None
        return epoch_seed(self.sampler.seed, self.sampler.epoch)

    def iterate(self, epoch: int) -> Iterator[Any]:
        """The batches of ``epoch`` from its beginning."""
        self._epoch = epoch
        if self._draws:
            self._epoch_random = capture_random_state()
            self._epoch_generators = self._generator_states()
        return self._iterate(epoch, 0)

    def resume(
        self,
        state: dict[str, Any],
        *,
        epoch: int,
        batch: int,
        goes_on: bool,
        read_again: Callable[[int], None],
    ) -> Iterator[Any] | None:
        """Take back what :meth:`state_dict` gave. Moves the global random state.

        Args:
            batch: batches of ``epoch`` that are done.
            goes_on: whether there are more to come in this epoch.
            read_again: called before each batch that is read only to get past it, with its number from 0.

        Returns:
            The batches to come in ``epoch``; None without ``goes_on``.

        Raises:
            IncompatibleError: the data ends before the position.
        """
        generators = state.get("generators") or {"epoch": [], "now": []}
        self._set_generators(generators["epoch" if goes_on else "now"])
        if self.kind == state["kind"] == "stateful":
            self._stateful.load_state_dict(state["loader"])
            self._exhausted = state["exhausted"]
            if not goes_on and not self._at_end():
                # As the training that was stopped did it: the pass is ended, or left, before the next one begins.
                self.finish(self._watched(self._start(epoch)), whole=state["whole"])
        if not goes_on:
            return None
        self._epoch = epoch
        if self.kind == state["kind"] == "stateful" and self._at_end():
            return iter(
                ()
            )  # all was used; only the loop, which does not know its length, has not seen it yet
        if self._draws and state.get("epoch_random") is not None:
            self._epoch_random, self._epoch_generators = state["epoch_random"], generators["epoch"]
            restore_random_state(state["epoch_random"])
        if self.kind != "iterable":
            return self._iterate(epoch, batch, self._resume_sample)
        iterator = self._iterate(epoch, 0)
        for number in range(batch):
            read_again(number)
            if next(iterator, self) is self:
                raise IncompatibleError(
                    f"The training data ends after {number} batches, but the checkpoint has used {batch} of this "
                    "epoch.",
                    hint="Use the data it was trained on.",
                )
        return iterator

    def rebase(self, state: dict[str, Any], batch: int) -> int:
        """The number of the batch at which to go on in an epoch of which ``batch`` batches are done.

        The same, but where the batches of all ranks together had another size when ``state`` was taken: then training
        goes on from the same sample. Called before :meth:`resume`.
        """
        position = state.get("position")
        if batch == 0 or position is None or not isinstance(self.sampler, EpochBatchSampler):
            return batch
        self._resume_sample = int(position["sample"] + (batch - position["batch"]) * position["global_batch"])
        if self.global_batches(state) is None:
            return batch
        return self.sampler.batches_after(0) - self.sampler.batches_after(self._resume_sample)

    def global_batches(self, state: dict[str, Any]) -> tuple[int, int] | None:
        """Samples in a step of all ranks when ``state`` was taken, and now; None where they are the same."""
        position = state.get("position")
        if position is None or not isinstance(self.sampler, EpochBatchSampler):
            return None
        before, now = int(position["global_batch"]), self.sampler.global_batch
        return None if before == now else (before, now)

    def _iterate(self, epoch: int, start_batch: int, start_sample: int | None = None) -> Iterator[Any]:
        if self.kind == "sequence":
            return (
                itertools.islice(iter(self.loader), start_batch, None) if start_batch else iter(self.loader)
            )
        if isinstance(self.sampler, EpochBatchSampler):
            self.sampler.epoch = epoch
            self.sampler.start_at(start_batch, start_sample)
            return self._start(epoch)
        _set_epoch(self._user_loader, epoch)
        if isinstance(self.sampler, SkippingSampler):
            self.sampler.skip, self.sampler.epoch = start_batch, epoch
        # Now, also where it is watched: what it draws from the random state is drawn here.
        iterator = self._start(epoch)
        return self._watched(iterator) if self.kind == "stateful" else iterator

    def _start(self, epoch: int) -> Iterator[Any]:
        return start_iterator(self.loader, (epoch_seed(self._seed, epoch) + self._rank) % 2**63)

    def _at_end(self) -> bool:
        """Whether the pass that was going on has nothing left, so that asking it for more would begin another."""
        return self._exhausted or (isinstance(self._stateful, WatchedDataset) and self._stateful.exhausted)

    def _watched(self, iterator: Iterator[Any]) -> Iterator[Any]:
        self._exhausted = False
        yield from iterator
        self._exhausted = True

    def finish(self, iterator: Iterator[Any], *, whole: bool) -> None:
        """An epoch is over. A loader with state is told so, that it begins anew and does not go on where it was.

        Args:
            whole: the epoch takes all that the loader has, so that the end is the next thing that it gives.
        """
        if self.kind == "stateful" and whole:
            next(iterator, None)

    def _position(self) -> dict[str, int] | None:
        """Which sample a batch of this pass begins at."""
        if not isinstance(self.sampler, EpochBatchSampler):
            return None
        return {
            "batch": self.sampler.start_batch,
            "sample": self.sampler.start_sample,
            "global_batch": self.sampler.global_batch,
        }

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set_generators(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(state)

    def state_dict(
        self, *, epoch: int, whole: bool = True, samples_a_batch: int | None = None
    ) -> dict[str, Any]:
        """What is needed to begin again at the current position, besides the position itself.

        Args:
            epoch: the position's.
            whole: see :meth:`finish`.
            samples_a_batch: how many the last batch had, to tell a user how much is read again.
        """
        began = self._epoch == epoch
        now = self._generator_states()
        return {
            "kind": self.kind,
            "loader": self._stateful.state_dict() if self.kind == "stateful" else None,
            "exhausted": self._exhausted,
            "samples_a_batch": samples_a_batch,
            "position": self._position(),
            "whole": whole,
            "epoch_random": self._epoch_random if began else None,
            "generators": {"epoch": self._epoch_generators if began else now, "now": now},
        }


def refuse_mapping(loader: Any, what: str) -> None:
    """A dict of loaders is one of Lightning's forms that is not offered."""
    if isinstance(loader, Mapping):
        raise MisconfigurationException(
            f"Found a {type(loader).__name__} as {what}; expected a DataLoader or an iterable of batches.",
            hint="Combine the loaders in one Dataset or IterableDataset.",
        )


def limited(num_batches: float, limit: int | float, what: str) -> float:
    """``num_batches`` under one of the ``limit_*_batches`` options: an int counts, a float is a share."""
    if isinstance(limit, float):
        if limit == 1.0:
            return num_batches
        if math.isinf(num_batches):
            raise MisconfigurationException(
                f"{what} is {limit}, a share, but the loader's length is not known.",
                hint="Give a number of batches.",
            )
        share = int(num_batches * limit)
        if share == 0 and limit > 0.0 and num_batches > 0:
            raise MisconfigurationException(
                f"{what} is {limit}, which is less than one of the loader's {int(num_batches)} batches.",
                hint="Raise it, or give a number of batches.",
            )
        return share
    return min(num_batches, limit)


def as_loaders(given: Any) -> list[Any]:
    """Evaluation loaders as a list; a list or tuple is several only where all its items are DataLoaders."""
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return []
    refuse_mapping(given, "evaluation data")
    if isinstance(given, (list, tuple)) and all(isinstance(item, DataLoader) for item in given):
        return list(given)
    return [given]


def loader_length(loader: Any) -> float:
    """Batches in ``loader``; infinite where it does not say."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return math.inf
