"""Each sample's random numbers are a function of seed, epoch and position, whoever loads it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from fit_helpers import assert_same, disturb_random
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from ckptrun.fit.data import TrainSource, evaluation_loader
from ckptrun.fit.loader_workers import end_workers
from ckptrun.fit.random_state import capture_random_state
from ckptrun.fit.sample_seeds import mixed

COUNT = 22


@pytest.fixture(autouse=True)
def workers_end() -> Iterator[None]:
    yield
    end_workers()


def draws() -> list[float]:
    """One number from each global generator, and what some hold back for the next time."""
    return [
        float(torch.rand(())), float(torch.randn(())), float(np.random.rand()), float(np.random.randn()),
        random.random(), random.gauss(0.0, 1.0),
    ]  # fmt: skip


class Draws(Dataset[Any]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index), *draws()], dtype=torch.float64)


class DrawsAtOnce(Draws):
    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


def collate(items: list[torch.Tensor]) -> torch.Tensor:
    """Draws too."""
    return torch.cat([torch.stack(items), torch.tensor([[-1.0, *draws()]], dtype=torch.float64)])


def epochs(loader: Any, *which: int, seed: int = 3, batch: int = 0, **ranks: int) -> list[list[torch.Tensor]]:
    """The batches of some epochs, from ``batch`` on in the first."""
    disturb_random()
    source = TrainSource(loader, seed=seed, **ranks)
    try:
        return [
            list(source._iterate(epoch, batch if epoch == which[0] else 0))  # as at a resume
            for epoch in which
        ]
    finally:
        end_workers()  # as at the end of a run; left to the garbage collector, torch may not reach them any more


MAKERS: dict[str, Callable[..., DataLoader[Any]]] = {
    "shuffled": lambda **o: DataLoader(Draws(), 4, shuffle=True, collate_fn=collate, **o),
    "in order": lambda **o: DataLoader(Draws(), 4, drop_last=True, collate_fn=collate, **o),
    "fetched at once": lambda **o: DataLoader(DrawsAtOnce(), 4, shuffle=True, **o),
    "subset": lambda **o: DataLoader(Subset(Draws(), range(3, 20)), 4, **o),
    "one by one": lambda **o: DataLoader(Draws(), batch_size=None, **o),
    "own sampler": lambda **o: DataLoader(Draws(), 4, sampler=list(range(20, 2, -1)), **o),
    "own batches": lambda **o: DataLoader(Draws(), batch_sampler=BatchSampler(range(19), 4, False), **o),
}


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more than there are cores
@pytest.mark.parametrize("kind", MAKERS)
def test_numbers_do_not_depend_on_the_workers(kind: str) -> None:
    make = MAKERS[kind]
    alone = epochs(make(), 0, 1)
    assert_same(alone, epochs(make(num_workers=2), 0, 1))
    if kind == "shuffled":
        assert_same(alone, epochs(make(num_workers=3, persistent_workers=True), 0, 1))
        # Every number is another one: each sample's, each batch's, each generator's, and in each epoch.
        numbers = torch.cat([batch[:, 1:].flatten() for epoch in alone for batch in epoch])
        assert len(numbers.unique()) == len(numbers) == 2 * (COUNT + 6) * 6
    assert not torch.equal(alone[0][0], epochs(make(), 0, seed=4)[0][0])


@pytest.mark.parametrize("kind", MAKERS)
def test_numbers_do_not_depend_on_where_one_begins(kind: str) -> None:
    (whole,), (rest,) = epochs(MAKERS[kind](), 1), epochs(MAKERS[kind](), 1, batch=2)
    assert_same(whole[2:], rest)


def rows(batches: list[torch.Tensor]) -> list[list[float]]:
    return sorted(torch.cat(batches).tolist())


@pytest.mark.parametrize(
    "make",
    [
        lambda size: DataLoader(Draws(), size, shuffle=True),
        lambda size: DataLoader(Draws(), size, sampler=list(range(COUNT - 1, -1, -1))),
    ],
)
def test_numbers_do_not_depend_on_the_ranks(make: Any) -> None:
    (alone,) = epochs(make(4), 1)
    parts = [epochs(make(2), 1, rank=rank, world_size=2)[0] for rank in (0, 1)]
    both = rows(parts[0] + parts[1])
    # A sampler's last batch without a partner is left out.
    assert both == (rows(alone) if len(both) == COUNT else [row for row in rows(alone) if row in both])
    assert len(both) >= COUNT - 2


def test_the_parts_of_a_distributed_sampler_have_numbers_of_their_own() -> None:
    def part(rank: int) -> Any:
        sampler: Any = DistributedSampler(Draws(), num_replicas=2, rank=rank, shuffle=False)
        return epochs(DataLoader(Draws(), 4, sampler=sampler), 0, rank=rank, world_size=2)[0]

    first, second = part(0), part(1)
    assert len(torch.cat(first + second)[:, 1:].unique()) == COUNT * 6
    (alone,) = epochs(DataLoader(Draws(), 4), 0)
    assert rows(first + second) == rows(alone)


def test_the_training_process_keeps_its_own_random_state() -> None:
    for after in (lambda: None, np.random.randn, lambda: random.gauss(0.0, 1.0)):
        disturb_random()
        after()  # a number may be held back for the next time
        iterator = iter(TrainSource(MAKERS["shuffled"](), seed=3)._iterate(0, 0))
        before = capture_random_state()
        for _ in iterator:
            assert_same(before, capture_random_state())
        assert draws()[2:] != []
        for _ in range(3):  # nor does it matter to the samples what was drawn in between
            draws()
    disturb_random()
    expected = draws()
    disturb_random()
    evaluation = evaluation_loader(DataLoader(Fails(), 2), seed=1, rank=0, world_size=1)
    placed = next(iter(evaluation.batch_sampler))
    with pytest.raises(ZeroDivisionError):
        evaluation.dataset[placed]
    assert draws() == expected


class Fails(Draws):
    def __getitem__(self, index: int) -> Any:
        draws()
        return 1 / 0


def test_a_bit_generator_of_the_users_is_put_back() -> None:
    mine = np.random.mtrand.get_bit_generator()
    try:
        np.random.mtrand.set_bit_generator(np.random.PCG64(5))
        before = np.random.get_state(legacy=False)
        loader = evaluation_loader(DataLoader(Draws(), 4), seed=1, rank=0, world_size=1)
        batches = list(loader)
        assert np.random.get_state(legacy=False) == before
    finally:
        np.random.mtrand.set_bit_generator(mine)
    assert_same(batches, list(evaluation_loader(DataLoader(Draws(), 4), seed=1, rank=0, world_size=1)))


@pytest.mark.parametrize("workers", [0, 2])
def test_every_evaluation_has_the_same_numbers(workers: int) -> None:
    def evaluated(seed: int, size: int = 4, rank: int = 0, world_size: int = 1) -> list[Any]:
        given = DataLoader(Draws(), size, num_workers=workers, collate_fn=default_collate)
        loader = evaluation_loader(given, seed=seed, rank=rank, world_size=world_size)
        first = list(loader)
        draws()
        assert_same(first, list(loader))
        return first

    assert_same(
        rows(evaluated(1)), rows(evaluated(1, rank=0, world_size=2) + evaluated(1, rank=1, world_size=2))
    )
    assert rows(evaluated(1)) != rows(evaluated(2))


class TellsItsWorker(Draws):
    scale = 1.0

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is None or type(info.dataset) is TellsItsWorker
        return torch.tensor([float(index) * self.scale])


def scale_up(_: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.scale = 10.0  # type: ignore[attr-defined]


def test_a_worker_sees_the_users_dataset() -> None:
    loader = DataLoader(TellsItsWorker(), 4, num_workers=1, worker_init_fn=scale_up)
    (batches,) = epochs(loader, 0)
    assert torch.cat(batches).flatten().tolist() == [10.0 * index for index in range(COUNT)]


def test_random_samplers_draw_from_the_training_state() -> None:
    """As before: what a sampler of the user's draws is not the samples' affair."""
    loader = DataLoader(Draws(), 4, sampler=WeightedRandomSampler(torch.ones(COUNT), COUNT))
    (first,), (second,) = epochs(loader, 0), epochs(loader, 0)
    assert_same(first, second)
    loader = DataLoader(Draws(), batch_sampler=BatchSampler(RandomSampler(Draws()), 4, False))
    assert_same(epochs(loader, 0), epochs(loader, 0))


def test_neighbours_share_no_bits() -> None:
    values = [mixed(seed, position) for seed in (0, 1) for position in range(1000)]
    assert len(set(values)) == len({value & 0xFFFFFFFF for value in values}) == 2000
    changed = [bin(a ^ b).count("1") for a, b in itertools.pairwise(values)]
    assert 30 < sum(changed) / len(changed) < 34
