"""A training that was stopped and resumed ends with the same bits as one that never was."""

from __future__ import annotations

import json
import os
import random
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fit_helpers import (
    CTRL_C,
    At,
    Picture,
    Scenario,
    Tiny,
    assert_same,
    loader,
    make_trainer,
    samples,
    send,
)
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from ckptrun import Callback
from ckptrun.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint, OnExceptionCheckpoint
from ckptrun.checkpoint.manifest import read_manifest
from ckptrun.checkpoint.state_file import read_state

# -- where it is stopped (20 samples in batches of 4: 5 steps an epoch, 3 epochs; 2 batches of validation) ---

MOMENTS = {
    "step 1": ("on_train_batch_end", 1),
    "mid-epoch": ("on_train_batch_end", 7),
    "last batch of an epoch": ("on_train_batch_end", 5),
    "first batch of an epoch": ("on_train_batch_start", 6),
    "inside a step": ("on_after_backward", 8),
    "start of an epoch": ("on_train_epoch_start", 2),
    "end of an epoch": ("on_train_epoch_end", 1),
    "validation begins": ("on_validation_start", 3),  # 1 is the sanity check's
    "in validation": ("on_validation_batch_end", 5),
    "validation ends": ("on_validation_end", 2),
    "last step": ("on_train_batch_end", 15),
    "end of training": ("on_train_epoch_end", 3),
}


def stop_and_resume(scenario: Scenario, root: Path, run: str, *moments: tuple[str, int]) -> Picture:
    """Stop at the first moment, resume, stop at the next one (counted anew), ..., and go on to the end."""
    for number, (hook, nth) in enumerate(moments):
        with pytest.raises(KeyboardInterrupt):
            scenario.fit(root, run, At(hook, nth, CTRL_C), ckpt_path="last" if number else None)
    return scenario.picture(root, run, ckpt_path="last")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Picture:
    return Scenario().picture(tmp_path_factory.mktemp("plain"), "plain")


@pytest.mark.parametrize("moment", MOMENTS)
def test_stopped_anywhere(tmp_path: Path, plain: Picture, moment: str) -> None:
    plain.assert_equal(stop_and_resume(Scenario(), tmp_path, "demo", MOMENTS[moment]))


def test_stopped_three_times(tmp_path: Path, plain: Picture) -> None:
    moments = [("on_train_batch_end", 2), ("on_validation_batch_start", 1), ("on_train_batch_end", 4)]
    plain.assert_equal(stop_and_resume(Scenario(), tmp_path, "demo", *moments))


def test_stopped_five_times(tmp_path: Path) -> None:
    """With everything that draws random numbers, in loader workers too."""
    scenario = Scenario(
        Noisy, data=lambda: augmented(num_workers=2), callbacks=lambda: [EMAWeightAveraging(decay=0.9)]
    )
    undisturbed = scenario.picture(tmp_path, "undisturbed")
    moments = [
        ("on_train_batch_end", 1),
        ("on_train_batch_end", 3),
        ("on_validation_batch_end", 1),
        ("on_train_epoch_end", 1),
        ("on_train_batch_start", 4),
    ]
    undisturbed.assert_equal(stop_and_resume(scenario, tmp_path, "demo", *moments))
    # Nor does it matter who loaded the data.
    alone = Scenario(Noisy, data=augmented, callbacks=scenario.callbacks)
    undisturbed.assert_equal(stop_and_resume(alone, tmp_path, "alone", *moments[:2]))


def test_stopped_again_before_the_first_step(tmp_path: Path, plain: Picture) -> None:
    moments = [("on_train_batch_end", 7), ("on_train_start", 1), ("setup", 1)]
    plain.assert_equal(stop_and_resume(Scenario(), tmp_path, "demo", *moments))


def test_stopped_in_the_sanity_check_saves_nothing(tmp_path: Path, plain: Picture) -> None:
    scenario = Scenario()
    with pytest.raises(KeyboardInterrupt):
        scenario.fit(tmp_path, "demo", At("on_validation_batch_end", 1, CTRL_C))
    assert os.listdir(tmp_path / "demo" / "checkpoints") == []
    with pytest.warns(UserWarning, match="never"):
        plain.assert_equal(scenario.picture(tmp_path, "demo", ckpt_path="last"))


def test_a_stop_after_the_end_changes_nothing(tmp_path: Path, plain: Picture) -> None:
    trainer, model = Scenario().fit(tmp_path, "demo", At("on_fit_end", 1, CTRL_C))
    plain.assert_equal(Picture(trainer, model, tmp_path, "demo"))
    assert trainer.state.finished


# -- what is trained, and on what ----------------------------------------------------------------------------


class Noisy(Tiny):
    """Everything that makes a step depend on more than weights and batch."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)),
            scheduler="step",
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        x = x + 0.1 * random.random() + 0.1 * float(np.random.rand()) + 0.1 * torch.rand_like(x)
        return super().training_step((x, y), batch_idx)


class NoisyOverflow(Noisy):
    """Its gradients do not fit into float16 in some steps, so that the scale moves."""

    def loss(self, batch: Any) -> Any:
        loss = super().loss(batch)
        return loss * 1e9 if self.training and self.global_step in (2, 7, 11) else loss


class Manual(Tiny):
    """Two optimizers in turn, with a scheduler that it steps itself."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):
            if batch_idx % (index + 1) == 0:
                loss = self.loss(batch)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                self.log(f"loss_{index}", loss, on_epoch=True)
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.layers[0].parameters(), lr=0.02)
        second = torch.optim.SGD(self.layers[1].parameters(), lr=0.02, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(first, 0.9)]


class OwnStep(Tiny):
    """Overrides how the update is made."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + self.global_step)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class Lbfgs(Tiny):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Reductions(Tiny):
    """Logs what a mean does not cover."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for fx in ("sum", "min", "max"):
            self.log(f"{fx}_loss", loss, on_step=False, on_epoch=True, reduce_fx=fx)
        self.log("weighted", batch_idx, on_epoch=True, batch_size=batch_idx + 1)
        self.log("median", loss, on_epoch=True, reduce_fx=torch.median)
        return loss


class Unsized:
    """Batches without a length, made anew at each pass."""

    def __init__(self, count: int = 5) -> None:
        self.batches = list(loader(4 * count, shuffle=False))

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches


class Stateful:
    """A loader that keeps its own state, as torchdata's do: a position and an order that goes on and on."""

    def __init__(self) -> None:
        self.data, self.position, self.passes, self.ended, self.resumed = samples(), 0, 0, False, False

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        if not self.resumed:
            self.position, self.passes = 0, self.passes + 1
        self.resumed = self.ended = False
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        order = torch.randperm(20, generator=torch.Generator().manual_seed(self.passes))
        while self.position < 5:
            chosen = order[4 * self.position : 4 * self.position + 4]
            self.position += 1
            yield [part[chosen] for part in self.data.tensors]
        self.ended = True

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "passes": self.passes, "ended": self.ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.passes, self.ended = state["position"], state["passes"], state["ended"]
        self.resumed = not self.ended  # after the end of a pass the next one begins


class Augmented(Dataset[Any]):
    """Draws from all global random states for each sample."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        x, y = samples()[index]
        return x + torch.rand(4) + random.gauss(0.0, 1.0) + float(np.random.randn()), y


def noisy_collate(items: Any) -> Any:
    """Draws for each batch."""
    x, y = default_collate(items)
    return x + torch.randn(4) + float(np.random.randn()), y


def augmented(**options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=4, shuffle=True, collate_fn=noisy_collate, **options)


def torchdatas(**options: Any) -> DataLoader[Any]:
    options.setdefault("shuffle", None if "sampler" in options else True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*set_vital", UserWarning)  # torchdata's own
        return StatefulDataLoader(Augmented(), batch_size=4, collate_fn=noisy_collate, **options)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from samples()


class Positioned(IterableDataset[Any]):
    """Keeps its position, as torchdata asks for it; goes through its data in another order each time."""

    def __init__(self, count: int = 20) -> None:
        self.data, self.passes, self.position = samples(count), 0, 0

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.passes))
        while self.position < len(self.data):
            self.position += 1
            yield self.data[int(order[self.position - 1])]
        self.position, self.passes = 0, self.passes + 1

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes, self.position = state["passes"], state["position"]


def weighted(**options: Any) -> DataLoader[Any]:
    sampler = WeightedRandomSampler(torch.arange(1.0, 21.0), 18, **options)
    return DataLoader(samples(), batch_size=4, sampler=sampler)


def own_generator() -> DataLoader[Any]:
    return weighted(generator=torch.Generator().manual_seed(5))


def lazily_drawing() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    sampler = RandomSampler(samples(), replacement=True, num_samples=70, generator=generator)
    return DataLoader(samples(), batch_size=14, sampler=sampler)


class Counter(Callback):
    """Has state that every batch and every validation changes, and that draws random numbers."""

    def __init__(self) -> None:
        self.counts = {"train": 0, "val": 0}
        self.draws: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts, "draws": self.draws}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts, self.draws = state_dict["counts"], state_dict["draws"]

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts["train"] += 1
        self.draws.append(random.random())

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.counts["val"] += 1


VARIANTS = {
    "no shuffle": Scenario(data=lambda: loader(shuffle=False)),
    "short last batch": Scenario(data=lambda: loader(18)),
    "drop_last": Scenario(data=lambda: loader(22, drop_last=True)),
    "dropout, batch norm, all random states": Scenario(Noisy),
    "random augmentation": Scenario(Noisy, data=augmented),
    "random augmentation in workers": Scenario(Noisy, data=lambda: augmented(num_workers=2)),
    "dropout beside persistent workers": Scenario(
        Noisy, data=lambda: augmented(num_workers=2, persistent_workers=True)
    ),
    "random augmentation in torchdata's loader": Scenario(Noisy, data=lambda: torchdatas(num_workers=2)),
    "torchdata's loader, a sampler with a generator": Scenario(
        data=lambda: torchdatas(sampler=RandomSampler(samples(), generator=torch.Generator()))
    ),
    "random augmentation of an evaluation": Scenario(
        val=lambda: DataLoader(Augmented(), batch_size=8, collate_fn=noisy_collate, num_workers=1)
    ),
    "accumulate 3 of 5": Scenario(accumulate_grad_batches=3),
    "accumulate 3 of 5, unsized": Scenario(data=Unsized, accumulate_grad_batches=3),
    "clip by norm": Scenario(gradient_clip_val=0.1),
    "clip by value": Scenario(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "bf16-mixed": Scenario(Noisy, precision="bf16-mixed"),
    "16-mixed": Scenario(NoisyOverflow, precision="16-mixed", gradient_clip_val=0.5),
    "16-mixed, accumulate 3 of 5": Scenario(NoisyOverflow, precision="16-mixed", accumulate_grad_batches=3),
    "16-mixed, manual, two optimizers": Scenario(Manual, precision="16-mixed"),
    "16-mixed, own optimizer_step": Scenario(OwnStep, precision="16-mixed"),
    "compiled": Scenario(Noisy, data=lambda: loader(18), compile={"backend": "aot_eager", "dynamic": False}),
    "scheduler by step": Scenario(lambda: Tiny(scheduler="step")),
    "scheduler by epoch": Scenario(lambda: Tiny(scheduler="epoch")),
    "scheduler by plateau": Scenario(lambda: Tiny(scheduler="plateau")),
    "manual optimization": Scenario(Manual, max_epochs=3),
    "own optimizer_step": Scenario(OwnStep),
    "closures": Scenario(Lbfgs),
    "closures, accumulate 2, unsized": Scenario(Lbfgs, data=Unsized, accumulate_grad_batches=2),
    "reductions": Scenario(Reductions),
    "weighted sampler": Scenario(data=weighted),
    "sampler with a generator": Scenario(data=own_generator),
    "sampler that draws as it goes": Scenario(data=lazily_drawing),
    "list of batches": Scenario(data=lambda: list(loader(shuffle=False))),
    "iterable without length": Scenario(data=Unsized),
    "iterable dataset": Scenario(data=lambda: DataLoader(Stream(), batch_size=4)),
    "loader with state": Scenario(data=Stateful),
    "loader with state, limited": Scenario(data=Stateful, limit_train_batches=3),
    "iterable dataset with state": Scenario(data=lambda: DataLoader(Positioned(), batch_size=4)),
    "iterable dataset with state, short last batch": Scenario(
        data=lambda: DataLoader(Positioned(18), batch_size=4), val_check_interval=2
    ),
    "iterable dataset with state, limited": Scenario(
        data=lambda: DataLoader(Positioned(), batch_size=4), limit_train_batches=3
    ),
    "iterable dataset in workers": Scenario(
        data=lambda: DataLoader(Positioned(16), batch_size=4, num_workers=2)
    ),
    "loader workers": Scenario(data=lambda: loader(num_workers=2)),
    "early stopping": Scenario(
        callbacks=lambda: [EarlyStopping("val_loss", patience=2, min_delta=100.0)], max_epochs=9
    ),
    "averaged weights": Scenario(Noisy, callbacks=lambda: [EMAWeightAveraging(decay=0.9)]),
    "averaged weights, in part": Scenario(
        Noisy,
        callbacks=lambda: [
            EMAWeightAveraging(
                decay=0.5, use_buffers=False, update_every_n_steps=3, update_starting_at_epoch=1
            )
        ],
        accumulate_grad_batches=2,
        val_check_interval=2,
    ),
    "callback with state": Scenario(callbacks=lambda: [Counter()]),
    "validation every 2 batches": Scenario(val_check_interval=2),
    "validation every 7 batches": Scenario(val_check_interval=7, check_val_every_n_epoch=None),
    "validation every 2 epochs": Scenario(check_val_every_n_epoch=2),
    "best 2": Scenario(callbacks=lambda: [ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)]),
    "limited": Scenario(limit_train_batches=3, limit_val_batches=1),
    "max_steps": Scenario(max_epochs=-1, max_steps=13),
}


# torch's own, when the compiler is imported.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_training(tmp_path: Path, variant: str) -> None:
    """Stopped in the middle of the second epoch, in the validation after it, and at its end."""
    scenario = VARIANTS[variant]
    undisturbed = scenario.picture(tmp_path, "undisturbed")
    middle = int(scenario.options.get("limit_train_batches", 5)) + 2
    moments = [("on_train_batch_end", middle), ("on_validation_batch_end", 1), ("on_train_epoch_end", 1)]
    undisturbed.assert_equal(stop_and_resume(scenario, tmp_path, "demo", *moments))


def test_each_sample_is_seen_once_an_epoch(tmp_path: Path) -> None:
    _, model = Scenario().fit(tmp_path, "whole")
    seen = []
    for ckpt_path, nth in ((None, 3), ("last", 4), ("last", 99)):
        part = Tiny()
        trainer = make_trainer(tmp_path, "parts", callbacks=[At("on_train_batch_end", nth, CTRL_C)])
        try:
            trainer.fit(part, loader(), loader(8, shuffle=False), ckpt_path=ckpt_path)
        except KeyboardInterrupt:
            pass
        seen += part.seen
    assert seen == model.seen
    assert len(seen) == 15


def test_accumulation_ends_before_the_stop(tmp_path: Path) -> None:
    """A stop that comes inside a window is served at the window's end: no gradients are lost."""
    scenario = Scenario(accumulate_grad_batches=3)
    with pytest.raises(KeyboardInterrupt):
        scenario.fit(tmp_path, "demo", At("on_train_batch_end", 1, CTRL_C))
    (name,) = os.listdir(tmp_path / "demo" / "checkpoints")
    manifest = read_manifest(str(tmp_path / "demo" / "checkpoints" / name))
    assert (manifest.step, manifest.loops["batch"], manifest.reason) == (1, 3, "stop")


# -- other ways to stop --------------------------------------------------------------------------------------


def test_sigterm_ends_in_system_exit(tmp_path: Path, plain: Picture) -> None:
    scenario = Scenario()
    with pytest.raises(SystemExit) as ended:
        scenario.fit(tmp_path, "demo", At("on_train_batch_end", 7, send(signal.SIGTERM)))
    assert ended.value.code == 143
    plain.assert_equal(scenario.picture(tmp_path, "demo", ckpt_path="last"))


def test_a_walltime_signal_saves_as_hpc(tmp_path: Path, plain: Picture) -> None:
    scenario = Scenario()
    with pytest.raises(SystemExit) as ended:
        scenario.fit(tmp_path, "demo", At("on_train_batch_end", 7, send(signal.SIGUSR1)))
    assert ended.value.code == 75
    plain.assert_equal(scenario.picture(tmp_path, "demo", ckpt_path="hpc"))


def test_saved_on_request_and_resumed_from_there(tmp_path: Path, plain: Picture) -> None:
    scenario = Scenario()
    first, model = scenario.fit(tmp_path, "demo", At("on_train_batch_end", 7, send(signal.SIGUSR2)))
    plain.assert_equal(Picture(first, model, tmp_path, "demo"))
    before = set(os.listdir(tmp_path / "demo" / "checkpoints"))
    manual = next(name for name in before if name.endswith("step-00000007"))
    plain.assert_equal(scenario.picture(tmp_path, "demo", ckpt_path="step:7"))
    after = set(os.listdir(tmp_path / "demo" / "checkpoints"))
    assert before < after, "the abandoned line stays"
    line = read_manifest(str(tmp_path / "demo" / "checkpoints" / max(after))).line
    on_line = {int(name[:8]) for name in after if any(a <= int(name[:8]) <= b for a, b in line)}
    assert on_line == {int(name[:8]) for name in after - before} | {int(manual[:8])}


def test_saved_on_request_during_a_validation(tmp_path: Path, plain: Picture) -> None:
    scenario = Scenario()
    scenario.fit(tmp_path, "demo", At("on_validation_batch_start", 3, send(signal.SIGUSR2)))
    plain.assert_equal(scenario.picture(tmp_path, "demo", ckpt_path="step:5"))


def test_a_request_to_save_before_the_first_step_waits_for_it(tmp_path: Path) -> None:
    Scenario().fit(tmp_path, "demo", At("on_sanity_check_start", 1, send(signal.SIGUSR2)))
    names = os.listdir(tmp_path / "demo" / "checkpoints")
    assert any(name.endswith("step-00000001") for name in names)


# -- exceptions ----------------------------------------------------------------------------------------------


class BoomError(Exception):
    pass


def boom(_: Any) -> None:
    raise BoomError


def newest(root: Path, run: str = "demo") -> Any:
    names = sorted(os.listdir(root / run / "checkpoints"))
    return read_manifest(str(root / run / "checkpoints" / names[-1]))


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Picture:
    return Scenario(Noisy).picture(tmp_path_factory.mktemp("noisy"), "noisy")


@pytest.mark.parametrize(
    ("hook", "nth", "step"),
    [
        ("on_train_batch_start", 8, 7),
        ("on_before_zero_grad", 8, 7),
        ("on_after_backward", 8, 7),
        ("on_train_batch_end", 8, 8),
        ("on_validation_batch_end", 4, 5),
        ("on_validation_epoch_end", 2, 5),
        ("on_train_epoch_end", 1, 5),
        ("on_train_epoch_start", 2, 5),
    ],
)
def test_an_exception_leaves_the_last_boundary(
    tmp_path: Path, noisy: Picture, hook: str, nth: int, step: int
) -> None:
    scenario = Scenario(Noisy, callbacks=lambda: [OnExceptionCheckpoint()])
    with pytest.raises(BoomError):
        scenario.fit(tmp_path, "demo", At(hook, nth, boom))
    saved = newest(tmp_path)
    assert (saved.step, saved.exact) == (step, True)
    noisy.assert_equal(scenario.picture(tmp_path, "demo"))  # rule 5: it goes on without being told


def test_a_model_checkpoint_may_save_on_an_exception_too(tmp_path: Path, noisy: Picture) -> None:
    scenario = Scenario(Noisy, callbacks=lambda: [ModelCheckpoint(save_on_exception=True)])
    with pytest.raises(BoomError):
        scenario.fit(tmp_path, "demo", At("on_after_backward", 8, boom))
    assert newest(tmp_path).step == 7
    noisy.assert_equal(scenario.picture(tmp_path, "demo"))


def test_an_exception_inside_an_accumulation_window(tmp_path: Path) -> None:
    scenario = Scenario(Noisy, callbacks=lambda: [OnExceptionCheckpoint()], accumulate_grad_batches=3)
    undisturbed = scenario.picture(tmp_path, "undisturbed")
    with pytest.raises(BoomError):
        scenario.fit(tmp_path, "demo", At("on_train_batch_start", 7, boom))
    saved = newest(tmp_path)
    assert (saved.step, saved.exact, saved.loops["epoch"], saved.loops["batch"]) == (2, True, 1, 0)
    undisturbed.assert_equal(scenario.picture(tmp_path, "demo"))


class FailingAdam(torch.optim.SGD):
    """Fails after it has changed a part of the weights."""

    left = 7

    def step(self, closure: Any = None) -> Any:
        FailingAdam.left -= 1
        if FailingAdam.left == 0:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            raise BoomError
        return super().step(closure)


class FailsInTheUpdate(Tiny):
    def configure_optimizers(self) -> Any:
        FailingAdam.left = 7
        return FailingAdam(self.parameters(), lr=0.01)


class FailsBetweenUpdates(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if self.global_step > 10:
            raise BoomError


class FailsInOwnStep(OwnStep):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 6 and not FailsInOwnStep.failed:
            FailsInOwnStep.failed = True
            raise BoomError
        return super().training_step(batch, batch_idx)

    failed = True


@pytest.mark.parametrize("model", [FailsInTheUpdate, FailsBetweenUpdates])
def test_an_exception_inside_the_update_is_not_exact(tmp_path: Path, model: Any) -> None:
    scenario = Scenario(model, callbacks=lambda: [OnExceptionCheckpoint()])
    with pytest.raises(BoomError):
        scenario.fit(tmp_path, "demo")
    assert not newest(tmp_path).exact


def test_an_exception_in_the_step_of_an_own_update_is_exact(tmp_path: Path) -> None:
    """The closure runs inside optimizer_step, but before it anything is changed."""
    scenario = Scenario(FailsInOwnStep, callbacks=lambda: [OnExceptionCheckpoint()])
    undisturbed = scenario.picture(tmp_path, "undisturbed")
    FailsInOwnStep.failed = False
    with pytest.raises(BoomError):
        scenario.fit(tmp_path, "demo")
    saved = newest(tmp_path)
    assert (saved.step, saved.exact) == (6, True)
    undisturbed.assert_equal(scenario.picture(tmp_path, "demo"))


def test_weights_that_are_not_finite_are_not_exact(tmp_path: Path) -> None:
    def poison(trainer: Any) -> None:
        with torch.no_grad():
            next(trainer.lightning_module.parameters()).fill_(float("nan"))
        raise BoomError

    scenario = Scenario(callbacks=lambda: [OnExceptionCheckpoint()])
    with pytest.raises(BoomError):
        scenario.fit(tmp_path, "demo", At("on_train_batch_end", 7, poison))
    saved = newest(tmp_path)
    assert (saved.reason, saved.exact) == ("exception", False)


class SwapsWeights(Callback):
    """As weight averaging does it: other weights for the time of a validation."""

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept = {name: value.clone() for name, value in pl_module.state_dict().items()}
        for parameter in pl_module.parameters():
            parameter.data.fill_(0.5)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.load_state_dict(self.kept)


def test_weights_that_are_swapped_for_a_validation_are_not_saved(tmp_path: Path) -> None:
    scenario = Scenario(callbacks=lambda: [SwapsWeights()])
    undisturbed = scenario.picture(tmp_path, "undisturbed")
    undisturbed.assert_equal(stop_and_resume(scenario, tmp_path, "demo", ("on_validation_batch_end", 4)))


def test_an_exception_while_weights_are_swapped_is_not_exact(tmp_path: Path) -> None:
    scenario = Scenario(callbacks=lambda: [SwapsWeights(), OnExceptionCheckpoint()])
    with pytest.raises(BoomError):
        scenario.fit(tmp_path, "demo", At("on_validation_batch_end", 4, boom))
    assert not newest(tmp_path).exact


# -- going further -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "longer"),
    [
        ({"max_epochs": -1, "max_steps": 7}, {"max_epochs": -1, "max_steps": 13}),
        ({"max_epochs": -1, "max_steps": 5}, {"max_epochs": -1, "max_steps": 13}),
        ({"max_epochs": 1}, {"max_epochs": 3}),
        ({"max_epochs": 3, "max_steps": 8}, {"max_epochs": 3}),
        ({"max_epochs": -1, "max_time": 0.0}, {"max_epochs": 2}),
    ],
)
def test_a_raised_limit_goes_on_as_if_it_had_stood_there_from_the_start(
    tmp_path: Path, first: dict[str, Any], longer: dict[str, Any]
) -> None:
    scenario = Scenario(Noisy, val_check_interval=2)
    undisturbed = scenario.picture(tmp_path, "undisturbed", **longer)
    scenario.fit(tmp_path, "demo", **first)
    ckpt_path = None if "max_time" in first else "last"
    undisturbed.assert_equal(scenario.picture(tmp_path, "demo", ckpt_path=ckpt_path, **longer))


# -- the file itself -----------------------------------------------------------------------------------------


def test_the_state_file_is_an_ordinary_torch_file_with_lightnings_keys(tmp_path: Path) -> None:
    Scenario(lambda: Tiny(scheduler="step")).fit(tmp_path, "demo")
    folder = tmp_path / "demo" / "checkpoints" / newest_name(tmp_path)
    state = torch.load(folder / "state.ckpt", weights_only=True)
    assert {
        "state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks", "epoch", "global_step",
        "hyper_parameters",
    } <= state.keys()  # fmt: skip
    assert state["global_step"] == 15
    assert state["epoch"] == 2
    assert_same(state, read_state(str(folder / "state.ckpt"), checksum=None, size_bytes=None))
    rank = torch.load(folder / "rank-0000.ckpt", weights_only=True)
    assert {"python", "numpy", "torch"} <= rank["random"].keys()
    document = json.loads((folder / "manifest.json").read_text())
    assert (document["step"], document["epoch"], document["exact"]) == (15, 2, True)


def newest_name(root: Path, run: str = "demo") -> str:
    return max(os.listdir(root / run / "checkpoints"))
