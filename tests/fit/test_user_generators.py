"""Generators that the user made are named where they are."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from fit_helpers import Scenario, Tiny, loader, samples
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from ckptrun.fit.data import TrainSource
from ckptrun.fit.user_generators import user_generators

of_module = np.random.default_rng(1)


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand((), generator=self.generator)


class Compose:
    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms


class Data(Dataset[Any]):
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        return samples()[index]


class UsesAGlobal(Data):
    def __getitem__(self, index: int) -> Any:
        return of_module.random()


def in_a_closure() -> Any:
    rng = random.Random(1)
    return lambda items: rng.choice(items)


def collate(items: Any, rng: Any) -> Any:
    return rng.choice(items)


@pytest.mark.parametrize(
    ("dataset", "collate_fn", "expected"),
    [
        (Data(rng=np.random.default_rng(1)), None, ["dataset.rng (numpy Generator)"]),
        (Data(rng=np.random.RandomState(1)), None, ["dataset.rng (numpy RandomState)"]),
        (Data(transform=Noise()), None, ["dataset.transform.generator (torch Generator)"]),
        (
            Data(transform=Compose([nn.Identity(), Noise()])),
            None,
            ["dataset.transform.transforms[1].generator (torch Generator)"],
        ),
        (Subset(Data(rng=random.Random(1)), [1]), None, ["dataset.dataset.rng (random.Random)"]),
        (UsesAGlobal(), None, [f"{__name__}.of_module (numpy Generator)"]),
        (
            Data(),
            functools.partial(collate, rng=np.random.default_rng(1)),
            ["collate_fn['rng'] (numpy Generator)"],
        ),
        (Data(), in_a_closure(), ["rng of in_a_closure.<locals>.<lambda> (random.Random)"]),
        (Data(generator=torch.default_generator, table=np.zeros(3), nothing=None), print, []),
        (range(20), None, []),
    ],
)
def test_each_is_named(dataset: Any, collate_fn: Any, expected: list[str]) -> None:
    assert user_generators(dataset, collate_fn) == expected


def test_circles_end() -> None:
    first, second = Data(), Data(rng=random.Random(1))
    first.other, second.other = second, first  # type: ignore[attr-defined]
    assert user_generators(first) == ["dataset.other.rng (random.Random)"]


def test_what_a_resume_restores_is_not_named() -> None:
    generator = torch.Generator()
    data = Data(generator=generator)
    sampled = DataLoader(data, sampler=torch.utils.data.RandomSampler(data, True, generator=generator))
    assert TrainSource(sampled, seed=1).out_of_reach() == []
    assert TrainSource(loader(), seed=1).out_of_reach() == []
    assert TrainSource(list(loader()), seed=1).out_of_reach() == []


def test_it_is_said_once_at_the_start(tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    scenario = Scenario(Tiny, data=lambda: DataLoader(Data(rng=np.random.default_rng(1)), 4), max_epochs=1)
    scenario.fit(tmp_path, "demo")
    captured = capfd.readouterr()
    assert (captured.out + captured.err).count("dataset.rng (numpy Generator)") == 1
