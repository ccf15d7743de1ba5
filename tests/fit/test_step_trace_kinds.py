"""A training is stopped and resumed: is what it does traced, and is what it forgot named, by kind?"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ckptrun import Module, Trainer
from ckptrun.fit.random_state import seed_everything
from ckptrun.fit.step_trace import StepTrace, _random, digest, leaves
from ckptrun.run.step_trace import Difference, Line, Request, Stop, compare, plan_stops, read_trace


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, draw: Callable[[], float] = lambda: 0.0) -> None:
        self.x = torch.randn(20, 4, generator=torch.Generator().manual_seed(3))
        self.draw = draw

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.x[index] + self.draw()


class Net(Module):
    """Exact; its subclasses are not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch["x"]).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch["x"]).pow(2).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def collate(self, samples: list[torch.Tensor]) -> Any:
        return {"x": torch.stack(samples)}

    def dataset(self) -> Numbers:
        return Numbers()

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset(), batch_size=4, shuffle=True, collate_fn=self.collate)

    def val_dataloader(self) -> Any:
        return DataLoader(Numbers(), batch_size=10, collate_fn=lambda samples: {"x": torch.stack(samples)})


class OwnGeneratorInTheDataset(Net):
    def dataset(self) -> Numbers:
        generator = np.random.default_rng(0)
        return Numbers(lambda: float(generator.normal()))


class OwnGeneratorInCollate(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def collate(self, samples: list[torch.Tensor]) -> Any:
        return {"x": torch.stack(samples), "noise": torch.randn(2, generator=self.generator)}


class DrawsOnceAProcess(Net):
    """As a cache that is made at the first step."""

    cache: torch.Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.cache is None:
            self.cache = torch.randn(3)
        return loss


class CountsItsLearningRate(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        self.optimizers().param_groups[0]["lr"] = 0.01 / self.calls
        return super().training_step(batch, batch_idx)


class CountsInItsLoss(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return super().training_step(batch, batch_idx) * self.calls


class BeginsWithTheTime(Net):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.init.constant_(self.net[0].bias, time.time_ns() % 1_000_003)


_runs = itertools.count()


def start(
    kind: type[Net], folder: Path, number: int = 1, stop: Stop | None = None, **options: Any
) -> list[Line]:
    """One start of the training in ``folder``, of 15 steps over three epochs; its trace."""
    folder.mkdir(exist_ok=True)
    request = Request(str(folder), number, stop)
    trainer = Trainer(
        root=folder, max_steps=15, seed=1, num_threads=1, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, callbacks=[StepTrace(request)], **options,
    )  # fmt: skip
    torch.manual_seed(1)
    if stop is None:
        trainer.fit(kind(), ckpt_path="last")
    else:
        with pytest.raises(SystemExit) as ended:
            trainer.fit(kind(), ckpt_path="last")
        assert ended.value.code == 143
    return read_trace(request.path(0))


def first_difference(kind: type[Net], tmp_path: Path, **options: Any) -> Difference | None:
    """Between a training that was stopped once, in mid-epoch, and one that was not."""
    whole = start(kind, tmp_path / "whole", **options)
    stop = Stop("batch", 1, 1)
    stopped = [
        start(kind, tmp_path / "stopped", 1, stop, **options),
        start(kind, tmp_path / "stopped", 2, **options),
    ]
    assert stopped[1][0]["step"] == 7
    return compare(whole, stopped)


@pytest.mark.filterwarnings("ignore:Run 'default' has never committed")
class TestKinds:
    @pytest.mark.parametrize(
        ("kind", "expected", "what"),
        [
            (OwnGeneratorInTheDataset, "batch", "batch['x']"),
            (OwnGeneratorInCollate, "batch", "batch['noise']"),
            (DrawsOnceAProcess, "random state", "torch"),
            (CountsItsLearningRate, "learning rate", "optimizer 0, group 0"),
            (CountsInItsLoss, "parameter", "net.0.weight"),
        ],
    )
    def test_what_is_not_saved_is_named(
        self, kind: type[Net], expected: str, what: str, tmp_path: Path
    ) -> None:
        found = first_difference(kind, tmp_path)
        assert found is not None
        assert (found.kind, found.what) == (expected, what)
        assert (found.start, found.epoch, found.batch) == (2, 1, 2), "at the first step after the stop"

    def test_what_does_not_begin_the_same(self, tmp_path: Path) -> None:
        once, again = (start(BeginsWithTheTime, tmp_path / name) for name in ("once", "again"))
        found = compare(once, [again])
        assert found is not None
        assert (found.kind, found.what) == ("initial parameter", "net.0.bias")

    def test_every_stop_that_is_planned(self, tmp_path: Path) -> None:
        whole = start(Net, tmp_path / "whole")
        stops = plan_stops(whole)
        assert [stop.moment for stop in stops] == ["batch", "epoch end", "validation"]
        starts = [start(Net, tmp_path / "stopped", n, stop) for n, stop in enumerate([*stops, None], 1)]
        assert [lines[0]["step"] for lines in starts] == [0, *(stop.step for stop in stops)]
        assert compare(whole, starts) is None

    def test_with_accumulation(self, tmp_path: Path) -> None:
        whole = start(Net, tmp_path / "whole", accumulate_grad_batches=2)
        again = [
            start(Net, tmp_path / "stopped", 1, Stop("batch", 1, 2), accumulate_grad_batches=2),
            start(Net, tmp_path / "stopped", 2, accumulate_grad_batches=2),
        ]
        assert compare(whole, again) is None


def test_leaves_and_hashes() -> None:
    batch = {"x": [torch.ones(2), "text"], "n": (1, None)}
    assert [name for name, _ in leaves(batch, "batch")] == [
        "batch['x'][0]", "batch['x'][1]", "batch['n'][0]", "batch['n'][1]",
    ]  # fmt: skip
    different = [
        torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int32), torch.zeros(()), torch.ones(2),
        torch.ones(2, dtype=torch.bfloat16), torch.tensor([True, False]), torch.tensor([-0.0, 0.0]), np.zeros(2),
        1, 1.0, True, "1", b"1", None, {1, 2},
    ]  # fmt: skip
    assert len({digest(value) for value in different}) == len(different)
    assert digest(torch.arange(6.0).reshape(2, 3).t()) == digest(
        torch.arange(6.0).reshape(2, 3).t().contiguous()
    )
    assert digest(torch.eye(3).to_sparse()) == digest(torch.eye(3))
    assert digest(lambda: None) == "function", "what cannot be pickled is told by its type"


def test_the_same_random_state_has_the_same_hash_in_another_process() -> None:
    """A hash of where a tensor lies would differ."""
    script = (
        "import torch\n"
        "from ckptrun.fit.random_state import seed_everything\n"
        "from ckptrun.fit.step_trace import _random\n"
        "seed_everything(3)\n"
        "print(sorted(_random().items()))"
    )
    ours = [torch.empty(100) for _ in range(7)]  # so that what comes next lies elsewhere
    seed_everything(3)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(sorted(_random().items()))
    assert len(ours) == 7
