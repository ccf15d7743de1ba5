"""The order of samples, and how a loader is started in the middle of an epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fit_helpers import disturb_random, loader, samples
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

from ckptrun import MisconfigurationException
from ckptrun.errors import IncompatibleError
from ckptrun.fit.data import TrainSource, as_loaders, limited, loader_length
from ckptrun.fit.loader_workers import end_workers
from ckptrun.fit.sample_order import EpochBatchSampler, epoch_order, epoch_seed


def source(given: Any, seed: int = 7) -> TrainSource:
    return TrainSource(given, seed=seed)


def first(batches: Iterator[Any]) -> list[float]:
    return [float(batch[0].sum()) for batch in batches]


def never(_: int) -> None:
    raise AssertionError("nothing is read again")


# -- order ---------------------------------------------------------------------------------------------------


def test_an_order_is_a_function_of_seed_and_epoch() -> None:
    assert torch.equal(epoch_order(50, 1, 2), epoch_order(50, 1, 2))
    assert sorted(epoch_order(50, 1, 2).tolist()) == list(range(50))
    pairs = [(seed, epoch) for seed in range(20) for epoch in range(50)]
    assert len({epoch_seed(*pair) for pair in pairs}) == len(pairs)
    assert all(0 <= epoch_seed(*pair) < 2**63 for pair in pairs)
    assert epoch_seed(-1, 0) >= 0


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("start", [0, 1, 3])
def test_batches_from_any_position(drop_last: bool, shuffle: bool, start: int) -> None:
    sampler = EpochBatchSampler(14, 4, drop_last=drop_last, shuffle=shuffle, seed=3)
    sampler.epoch = 2
    whole = list(sampler)
    assert len(whole) == len(sampler) == (3 if drop_last else 4)
    sampler.start_at(start)
    assert list(sampler) == whole[start:]
    assert len(sampler) == len(whole)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_same_global_order(world_size: int) -> None:
    alone = EpochBatchSampler(24, 12, drop_last=True, shuffle=True, seed=3)
    ranks = [
        EpochBatchSampler(
            24, 12 // world_size, drop_last=True, shuffle=True, seed=3, rank=rank, world_size=world_size
        )
        for rank in range(world_size)
    ]
    together = [[index for part in parts for index in part] for parts in zip(*ranks, strict=True)]
    assert together == list(alone)


# -- kinds of loaders ----------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from samples()


class Subclassed(DataLoader[Any]):
    pass


def sampled(**options: Any) -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=4, sampler=WeightedRandomSampler(torch.ones(20), 20, **options))


def batch_sampled() -> DataLoader[Any]:
    return DataLoader(
        samples(), batch_sampler=BatchSampler(RandomSampler(samples(), replacement=True), 4, False)
    )


def unbatched() -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=None, sampler=WeightedRandomSampler(torch.ones(20), 9))


KINDS = {
    "indexed": loader,
    "sampled": sampled,
    "sampled by batches": batch_sampled,
    "sampled without batches": unbatched,
    "sequence": lambda: list(loader(shuffle=False)),
    "iterable": lambda: DataLoader(Stream(), batch_size=4),
    "iterable subclass": lambda: Subclassed(samples(), batch_size=4, shuffle=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_goes_on_where_it_was(kind: str) -> None:
    disturb_random()
    undisturbed = source(KINDS[kind]())
    epochs = [first(undisturbed.iterate(epoch)) for epoch in range(3)]

    disturb_random()
    stopped = source(KINDS[kind]())
    assert stopped.kind == kind.split()[0]
    first(stopped.iterate(0))
    begun = stopped.iterate(1)
    seen = [float(next(begun)[0].sum()) for _ in range(2)]
    state, random = stopped.state_dict(epoch=1), torch.get_rng_state()
    assert seen == epochs[1][:2]

    torch.manual_seed(1234)
    resumed = source(KINDS[kind]())
    read: list[int] = []
    rest = resumed.resume(
        state, epoch=1, batch=2, goes_on=True, read_again=read.append if "iterable" in kind else never
    )
    torch.set_rng_state(random)
    assert rest is not None
    assert first(rest) == epochs[1][2:]
    assert read == ([0, 1] if "iterable" in kind else [])
    assert first(resumed.iterate(2)) == epochs[2]


def test_generators_of_the_users_come_back() -> None:
    undisturbed = source(sampled(generator=torch.Generator().manual_seed(5)))
    epochs = [first(undisturbed.iterate(epoch)) for epoch in range(3)]
    assert epochs[0] != epochs[1]
    stopped = source(sampled(generator=torch.Generator().manual_seed(5)))
    first(stopped.iterate(0))
    states = [stopped.state_dict(epoch=1)]  # between two epochs
    begun = stopped.iterate(1)
    next(begun)
    states.append(stopped.state_dict(epoch=1))  # inside one
    first(begun)
    states.append(stopped.state_dict(epoch=1))  # at its end
    for state, batch, goes_on, rest in zip(
        states,
        (0, 1, 5),
        (False, True, False),
        (epochs[1:], [epochs[1][1:], epochs[2]], [epochs[2]]),
        strict=True,
    ):
        resumed = source(sampled(generator=torch.Generator().manual_seed(5)))
        iterator = resumed.resume(state, epoch=1, batch=batch, goes_on=goes_on, read_again=never)
        found = [] if iterator is None else [first(iterator)]
        found += [first(resumed.iterate(3 - number)) for number in range(len(rest) - len(found), 0, -1)]
        assert found == rest


def test_set_epoch_is_called_before_the_iterator_is_made() -> None:
    class WithEpoch(WeightedRandomSampler):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch] * 4)

    given = DataLoader(range(20), batch_size=2, sampler=WithEpoch(torch.ones(20), 4))
    assert [batch.tolist() for batch in source(given).iterate(3)] == [[3, 3], [3, 3]]


def test_data_that_ends_before_the_position_does_not_fit() -> None:
    class Short:
        def __init__(self, count: int) -> None:
            self.count = count

        def __iter__(self) -> Iterator[Any]:
            return iter(list(loader())[: self.count])

    state = source(Short(5)).state_dict(epoch=0)
    with pytest.raises(IncompatibleError, match="ends after 2 batches, but the checkpoint has used 4"):
        source(Short(2)).resume(state, epoch=0, batch=4, goes_on=True, read_again=lambda _: None)


def test_the_users_options_of_a_loader_are_kept() -> None:
    def collate(items: list[Any]) -> int:
        return len(items)

    given = DataLoader(samples(), batch_size=4, collate_fn=collate, num_workers=0, drop_last=False)
    assert list(source(given).iterate(0)) == [4] * 5
    assert source(given).num_batches == 5


def test_workers_see_their_own_init_function() -> None:
    def note(worker_id: int) -> None:
        torch.utils.data.get_worker_info().dataset.tag = worker_id + 1  # type: ignore[union-attr]

    given = DataLoader(
        Tagged(), batch_size=2, num_workers=1, worker_init_fn=note, multiprocessing_context="fork"
    )
    assert next(iter(source(given).iterate(0))).tolist() == [1, 1]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_end_though_their_iterator_is_still_held(persistent: bool) -> None:
    given = DataLoader(
        Tagged(),
        batch_size=1,
        num_workers=2,
        multiprocessing_context="fork",
        persistent_workers=persistent,
    )
    made = source(given)
    held: Any = made.iterate(0)  # as the traceback of an error does
    assert next(held).tolist() == [0]
    workers = list(held._workers)
    end_workers()
    assert [worker.exitcode for worker in workers] == [-9, -9]
    assert [batch.tolist() for batch in made.iterate(1)] == [[0], [0]]
    end_workers()


class Tagged(torch.utils.data.Dataset[int]):
    tag = 0

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return self.tag


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "nothing to train on"),
        ([loader(), loader()], "list of 2 training loaders"),
        ({"a": loader()}, "Found a dict as training data"),
        (5, "Found int as training data"),
    ],
)
def test_what_is_no_training_data(given: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        source(given)


# -- limits and lists ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "limit", "expected"),
    [(10, 1.0, 10), (10, 3, 3), (10, 99, 10), (10, 0.25, 2), (10, 0, 0), (10, 0.0, 0), (math.inf, 4, 4),
     (math.inf, 1.0, math.inf), (0, 0.5, 0)],
)  # fmt: skip
def test_limited(batches: float, limit: float, expected: float) -> None:
    assert limited(batches, limit, "limit_train_batches") == expected


@pytest.mark.parametrize(("batches", "limit"), [(math.inf, 0.5), (10, 0.05)])
def test_limits_that_make_no_sense(batches: float, limit: float) -> None:
    with pytest.raises(MisconfigurationException, match="limit_test_batches"):
        limited(batches, limit, "limit_test_batches")


def test_as_loaders() -> None:
    one, two = loader(), loader()
    assert as_loaders(None) == as_loaders([]) == []
    assert as_loaders(one) == [one]
    assert as_loaders((one, two)) == [one, two]
    assert as_loaders([1, 2]) == [[1, 2]], "a list of batches is one loader"
    with pytest.raises(MisconfigurationException, match="dict as evaluation data"):
        as_loaders({"a": one})


def test_loader_length() -> None:
    assert loader_length([1, 2]) == 2
    assert loader_length(iter([1])) == math.inf
    assert loader_length(DataLoader(Stream())) == math.inf
