"""Which samples each of several ranks gets: every one once, and none twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler

from ckptrun.fit.data import TrainSource, evaluation_loader
from ckptrun.fit.sample_order import EpochBatchSampler


def samplers(
    count: int, batch: int, world: int, *, drop_last: bool = False, shuffle: bool = True, epoch: int = 0
) -> list[EpochBatchSampler]:
    made = [
        EpochBatchSampler(
            count, batch, drop_last=drop_last, shuffle=shuffle, seed=3, rank=rank, world_size=world
        )
        for rank in range(world)
    ]
    for sampler in made:
        sampler.epoch = epoch
    return made


def steps(made: list[EpochBatchSampler]) -> list[list[int]]:
    """What all ranks together take in each step."""
    return [[index for part in parts for index in part] for parts in zip(*made, strict=True)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [48, 52, 53])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_once(world: int, count: int, shuffle: bool) -> None:
    made = samplers(count, 12 // world, world, shuffle=shuffle)
    assert sorted(index for step in steps(made) for index in step) == list(range(count))
    assert {len(sampler) for sampler in made} == {-(-count // 12)}


def test_the_order_does_not_depend_on_how_many_there_are() -> None:
    alone = steps(samplers(53, 12, 1, epoch=2))
    for world in (2, 3, 4):
        assert steps(samplers(53, 12 // world, world, epoch=2)) == alone


def test_the_end_is_shared_out_evenly() -> None:
    parts = [[len(batch) for batch in sampler] for sampler in samplers(21, 4, 2, shuffle=False)]
    assert parts == [[4, 4, 2], [4, 4, 3]]


def test_with_less_than_one_sample_each_some_repeat_one() -> None:
    last = [list(sampler)[-1] for sampler in samplers(13, 4, 3, shuffle=False)]
    assert last == [[12], [12], [12]]


def test_drop_last_drops_what_does_not_fill_a_step_of_all() -> None:
    made = samplers(21, 4, 2, drop_last=True, shuffle=False)
    assert sorted(index for step in steps(made) for index in step) == list(range(16))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_from_any_sample(world: int) -> None:
    made = samplers(53, 12 // world, world)
    whole = [index for step in steps(samplers(53, 12, 1)) for index in step]
    for sampler in made:
        sampler.start_at(2, 17)
    assert [index for step in steps(made) for index in step] == whole[17:]
    assert {len(sampler) for sampler in made} == {2 + 3}
    assert made[0].sample_at(3) == 29


# -- a position, and another number of ranks -------------------------------------------------------------------


def loader(count: int = 40, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), **{"batch_size": 4, "shuffle": True, **options})


def source(rank: int = 0, world: int = 1, given: Any = None) -> TrainSource:
    return TrainSource(loader() if given is None else given, seed=5, rank=rank, world_size=world)


def indices(batches: Any) -> list[int]:
    return [int(index) for (batch,) in batches for index in batch]


def go_on(state: dict[str, Any], batch: int, world: int) -> tuple[int, list[int]]:
    """The batch at which ``world`` ranks go on, and what they then take together, in order."""
    given, number = [], 0
    for rank in range(world):
        resumed = source(rank, world)
        number = resumed.rebase(state, batch)
        batches = resumed.resume(state, epoch=0, batch=number, goes_on=True, read_again=lambda _: None)
        assert batches is not None
        given.append([[int(index) for index in item] for (item,) in batches])
    return number, [index for parts in zip(*given, strict=True) for part in parts for index in part]


@pytest.mark.parametrize(
    ("before", "batch", "after"), [(2, 3, 1), (1, 3, 2), (2, 3, 2), (4, 1, 3), (1, 9, 4)]
)
def test_another_number_of_ranks_goes_on_from_the_same_sample(before: int, batch: int, after: int) -> None:
    whole = indices(source().iterate(0))
    first = source(0, before)
    first.iterate(0)
    state = first.state_dict(epoch=0)
    _, rest = go_on(state, batch, after)
    assert rest == whole[batch * 4 * before :]


def test_twice_in_one_epoch() -> None:
    whole = indices(source().iterate(0))
    first = source(0, 4)
    first.iterate(0)
    second = source(0, 3)
    number = second.rebase(first.state_dict(epoch=0), 1)  # 16 samples are done
    second.resume(first.state_dict(epoch=0), epoch=0, batch=number, goes_on=True, read_again=lambda _: None)
    number, rest = go_on(second.state_dict(epoch=0), number + 1, 3)  # and 12 more
    assert rest == whole[28:]
    assert number == 3


def test_what_changed_is_known() -> None:
    state = source(0, 2).state_dict(epoch=0)
    assert source(0, 1).global_batches(state) == (8, 4)
    assert source(1, 2).global_batches(state) is None


# -- samplers of the user's ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: WeightedRandomSampler([1.0] * 40, 40),
        lambda: RandomSampler(range(40), replacement=True),
        lambda: RandomSampler(range(40), num_samples=80),
    ],
)
def test_what_a_sampler_draws_is_shared_out(sampler: Any) -> None:
    def given(rank: int, world: int) -> list[list[int]]:
        torch.manual_seed(rank)  # each rank's own random state
        before = torch.get_rng_state()
        made = source(rank, world, loader(shuffle=False, sampler=sampler()))
        batches = [[int(index) for index in batch] for (batch,) in made.iterate(3)]
        if world > 1:
            torch.empty((), dtype=torch.int64).random_()  # what a loader's iterator draws
        assert world == 1 or not torch.equal(before, torch.get_rng_state())
        return batches

    one, two = given(0, 2), given(1, 2)
    assert len(one) == len(two)
    assert one != two
    assert given(0, 2) == one
    torch.manual_seed(77)
    assert given(1, 2) == two


# -- evaluation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count", [40, 41, 3])
def test_ranks_take_the_batches_of_an_evaluation_in_turn(count: int, shuffle: bool) -> None:
    whole = [batch.tolist() for (batch,) in loader(count, shuffle=False)]
    parts = [
        [
            batch.tolist()
            for (batch,) in evaluation_loader(loader(count, shuffle=shuffle), seed=1, rank=rank, world_size=3)
        ]
        for rank in range(3)
    ]
    assert parts == [whole[rank::3] for rank in range(3)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(4))


def test_what_has_no_indices_stays() -> None:
    for given in (DataLoader(Stream()), [1, 2, 3]):
        assert evaluation_loader(given, seed=1, rank=0, world_size=2) is given


def test_every_rank_gets_all_of_an_order_of_its_own() -> None:
    given = loader(shuffle=False, sampler=WeightedRandomSampler([1.0] * 40, 40))
    torch.manual_seed(1)
    whole = [batch.tolist() for (batch,) in given]
    torch.manual_seed(1)
    shared = evaluation_loader(given, seed=1, rank=1, world_size=2)
    assert [batch.tolist() for (batch,) in shared] == whole
