"""In which order things happen while training, and when validation, schedulers and limits are due."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_helpers import At, Tiny, loader, make_trainer
from torch import nn

from ckptrun import Callback, MisconfigurationException
from ckptrun.callbacks import EarlyStopping
from ckptrun.fit.callback import Callback as Base

HOOK_NAMES = [name for name in vars(Base) if name.startswith("on_") or name in ("setup", "teardown")]


class Records(Callback):
    """Notes every hook that is called, with who."""

    def __init__(self, calls: list[str], who: str = "") -> None:
        for name in HOOK_NAMES:
            setattr(self, name, lambda *_, name=name: calls.append(f"{who}{name}"))


class Loud(Tiny):
    """A module that notes its own hooks too."""

    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        for name in HOOK_NAMES:
            if hasattr(Tiny, name):
                setattr(self, name, lambda *_, name=name: calls.append(f"module.{name}"))
        self.calls = calls

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.calls.append("validation_step")

    def optimizer_zero_grad(self, *args: Any) -> None:
        self.calls.append("optimizer_zero_grad")
        super().optimizer_zero_grad(*args)

    def backward(self, loss: Any) -> None:
        self.calls.append("backward")
        super().backward(loss)

    def configure_gradient_clipping(self, *args: Any) -> None:
        self.calls.append("configure_gradient_clipping")


class Looks(Callback):
    """Notes in every hook which epoch and batch a display would show."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        for name in HOOK_NAMES:
            setattr(
                self,
                name,
                lambda trainer, *_: self.seen.append((trainer.progress.epoch, trainer.progress.batch)),
            )


def fit(root: Path, model: Any = None, data: Any = None, val: Any = "default", **options: Any) -> Any:
    trainer = make_trainer(root, **options)
    validation = loader(8, shuffle=False) if isinstance(val, str) else val
    trainer.fit(Tiny() if model is None else model, loader() if data is None else data, validation)
    return trainer


# -- order ---------------------------------------------------------------------------------------------------

STEP = [
    "on_train_batch_start", "training_step", "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward",
    "backward", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping",
    "on_train_batch_end",
]  # fmt: skip
VALIDATION = [
    "on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "validation_step",
    "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end",
]  # fmt: skip
FIT = [
    "setup", "on_save_checkpoint", "on_fit_start", "on_sanity_check_start", *VALIDATION, "on_sanity_check_end",
    "on_train_start", "on_train_epoch_start", *STEP, *STEP, *VALIDATION, "on_train_epoch_end",
    "on_save_checkpoint", "on_train_end", "on_fit_end", "teardown",
]  # fmt: skip


def test_hooks_come_in_lightnings_order(tmp_path: Path) -> None:
    calls: list[str] = []
    model = Loud(calls)
    fit(
        tmp_path, model, max_epochs=1, limit_train_batches=2, limit_val_batches=1,
        callbacks=[Records(calls, "callback.")],
    )  # fmt: skip
    expected = []
    for name in FIT:
        if name in HOOK_NAMES:
            # At teardown and setup too: the callback first, then the module.
            expected += [f"callback.{name}"] + [f"module.{name}"] * hasattr(Tiny, name)
        else:
            expected.append(name)
    assert calls == expected


def test_accumulation_updates_at_the_end_of_a_window_and_of_the_epoch(tmp_path: Path) -> None:
    calls: list[str] = []
    trainer = fit(
        tmp_path, Loud(calls), max_epochs=1, limit_train_batches=5, accumulate_grad_batches=3, val=None,
        callbacks=[Records(calls)],
    )  # fmt: skip
    short = [
        name for name in calls if name in ("training_step", "optimizer_zero_grad", "on_before_optimizer_step")
    ]
    window = ["training_step", "optimizer_zero_grad"]
    update = ["on_before_optimizer_step"]
    expected = [*window, "training_step", "training_step", *update, *window, "training_step", *update]
    assert short == expected
    assert trainer.global_step == 2


def test_accumulated_gradients_are_those_of_the_mean_loss(tmp_path: Path) -> None:
    class Sgd(Tiny):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    one, many = Sgd(), Sgd()
    fit(tmp_path, one, loader(8, batch_size=8, shuffle=False), run="one", max_steps=1, max_epochs=-1)
    fit(
        tmp_path, many, loader(8, batch_size=4, shuffle=False), run="many", max_steps=1, max_epochs=-1,
        accumulate_grad_batches=2,
    )  # fmt: skip
    assert torch.allclose(one.layers.weight, many.layers.weight, atol=1e-6)


def test_a_batch_that_returns_none_is_skipped(tmp_path: Path) -> None:
    class Skips(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    model = Skips()
    before = model.layers.weight.clone()
    trainer = fit(tmp_path, model, max_epochs=1)
    assert torch.equal(before, model.layers.weight)
    assert trainer.global_step == 5


@pytest.mark.parametrize("returned", [5, {"los": torch.tensor(1.0)}, "loss"])
def test_a_wrong_return_value_is_named(tmp_path: Path, returned: Any) -> None:
    class Wrong(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return returned

    with pytest.raises(MisconfigurationException, match=f"training_step returned {type(returned).__name__}"):
        fit(tmp_path, Wrong())


def test_a_dict_with_the_loss_reaches_the_batch_end_hook_as_it_is(tmp_path: Path) -> None:
    class Dict(Tiny):
        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
            return {"loss": self.loss(batch), "extra": 1}

    seen = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            seen.append(outputs["extra"])

    fit(tmp_path, Dict(), max_epochs=1, callbacks=[Looks()])
    assert seen == [1] * 5


def test_minus_one_skips_the_rest_of_the_epoch(tmp_path: Path) -> None:
    class Skips(Tiny):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if batch_idx == 4 else None

    model = Skips()
    trainer = fit(tmp_path, model, max_epochs=2, accumulate_grad_batches=3)
    assert len(model.seen) == 8
    assert trainer.global_step == 4, "the window that was open is closed"
    assert trainer.current_epoch == 2


def test_transfer_hooks_come_before_the_batch_start_hook(tmp_path: Path) -> None:
    seen = []

    class Transfers(Tiny):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [10 * batch[0], batch[1]]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append(float(batch[0].sum()))

    model = Transfers()
    fit(tmp_path, model, max_epochs=1, val=None)
    assert seen == model.seen


def test_manual_optimization_leaves_schedulers_to_the_user(tmp_path: Path) -> None:
    class Manual(Tiny):
        def __init__(self) -> None:
            super().__init__(scheduler="step")
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    trainer = fit(tmp_path, Manual(), max_epochs=1)
    assert trainer.global_step == 5
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 0
    with pytest.raises(MisconfigurationException, match="accumulate_grad_batches=2 together with manual"):
        fit(tmp_path, Manual(), run="b", accumulate_grad_batches=2)
    with pytest.raises(MisconfigurationException, match=r"gradient_clip_val=0.5 together with manual"):
        fit(tmp_path, Manual(), run="c", gradient_clip_val=0.5)


def test_automatic_optimization_takes_one_optimizer(tmp_path: Path) -> None:
    class Two(Tiny):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]

    with pytest.raises(MisconfigurationException, match="returned 2 optimizers"):
        fit(tmp_path, Two())


def test_training_without_an_optimizer(tmp_path: Path) -> None:
    class No(Tiny):
        def configure_optimizers(self) -> Any:
            return None

    assert fit(tmp_path, No(), max_epochs=1).global_step == 5


# -- when validation is due ----------------------------------------------------------------------------------


class When(Callback):
    """At which (epoch, step) validation ran."""

    def __init__(self) -> None:
        self.at: list[tuple[int, int]] = []
        self.sanity = 0
        self.batches = 0

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.at.append((trainer.current_epoch, trainer.global_step))

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        self.sanity += trainer.sanity_checking
        self.batches += not trainer.sanity_checking


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [(0, 5), (1, 10), (2, 15)]),
        ({"check_val_every_n_epoch": 2}, [(1, 10)]),
        ({"val_check_interval": 2}, [(0, 2), (0, 4), (1, 7), (1, 9), (2, 12), (2, 14)]),
        ({"val_check_interval": 0.4}, [(0, 2), (0, 4), (1, 7), (1, 9), (2, 12), (2, 14)]),
        ({"val_check_interval": 5}, [(0, 5), (1, 10), (2, 15)]),
        ({"val_check_interval": 7, "check_val_every_n_epoch": None}, [(1, 7), (2, 14)]),
        ({"val_check_interval": 3, "limit_train_batches": 4}, [(0, 3), (1, 7), (2, 11)]),
        ({"limit_train_batches": 2}, [(0, 2), (1, 4), (2, 6)]),
        ({"limit_val_batches": 0}, []),
        ({"accumulate_grad_batches": 2, "val_check_interval": 3}, [(0, 2), (1, 5), (2, 8)]),
        ({"max_steps": 7}, [(0, 5)]),
    ],
)
def test_when_validation_runs(
    tmp_path: Path, options: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    when = When()
    fit(tmp_path, callbacks=[when], **options)
    assert when.at == expected


@pytest.mark.parametrize(("steps", "batches"), [(2, 2), (0, 0), (1, 1), (-1, 2), (9, 2)])
def test_the_sanity_check(tmp_path: Path, steps: int, batches: int) -> None:
    when = When()
    fit(tmp_path, callbacks=[when], num_sanity_val_steps=steps, max_epochs=1)
    assert when.sanity == batches


def test_what_the_sanity_check_logs_is_no_result(tmp_path: Path) -> None:
    found: list[Any] = []
    fit(tmp_path, callbacks=[At("on_train_start", 1, lambda t: found.append(dict(t.callback_metrics)))])
    assert found == [{}]
    assert ",val_loss" not in (tmp_path / "demo" / "logs" / "metrics.csv").read_text().splitlines()[1]


@pytest.mark.parametrize(("limit", "batches"), [(1, 1), (0.5, 1), (1.0, 2), (7, 2)])
def test_limit_val_batches(tmp_path: Path, limit: float, batches: int) -> None:
    when = When()
    fit(tmp_path, callbacks=[when], limit_val_batches=limit, max_epochs=1, num_sanity_val_steps=0)
    assert when.batches == batches


def test_an_interval_longer_than_the_epoch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        MisconfigurationException, match="val_check_interval is 6 batches, but an epoch has 5"
    ):
        fit(tmp_path, val_check_interval=6)


class Unsized:
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(list(loader(4 * self.count))) if self.count else iter(())


class Lying(Unsized):
    """Has fewer batches than it says."""

    def __len__(self) -> int:
        return self.count + 2


def test_data_without_a_length(tmp_path: Path) -> None:
    when = When()
    trainer = fit(tmp_path, data=Unsized(3), callbacks=[when], max_epochs=2)
    assert when.at == [(0, 3), (1, 6)]
    assert math.isinf(trainer.num_training_batches)
    with pytest.raises(MisconfigurationException, match="share of an epoch"):
        fit(tmp_path, data=Unsized(3), val_check_interval=0.5, run="b")


def test_data_that_ends_early_is_said_and_the_epoch_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    when = When()
    trainer = fit(tmp_path, data=Lying(3), callbacks=[when], max_epochs=2)
    assert trainer.global_step == 6
    assert when.at == [(0, 3), (1, 6)]
    assert "ended after 3 of 5 batches" in capsys.readouterr().err


def test_an_iterator_that_is_used_up_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="gave no batch in epoch 1"):
        fit(tmp_path, data=iter(list(loader())), max_epochs=-1, max_steps=1000)


def test_no_batches_at_all(tmp_path: Path) -> None:
    trainer = fit(tmp_path, limit_train_batches=0)
    assert (trainer.global_step, trainer.state.finished) == (0, True)


# -- when it ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "step", "epoch"),
    [
        ({"max_epochs": 2}, 10, 2),
        ({"max_steps": 7}, 7, 1),
        ({"max_steps": 5}, 5, 1),
        ({"max_steps": 0}, 0, 0),
        ({"max_epochs": 1, "max_steps": 100}, 5, 1),
        ({"max_time": "00:00:00:00"}, 0, 0),
        ({"max_epochs": 0}, 0, 0),
        ({"limit_train_batches": 0.4, "max_epochs": 2}, 4, 2),
    ],
)
def test_limits(tmp_path: Path, options: dict[str, Any], step: int, epoch: int) -> None:
    trainer = fit(tmp_path, **options)
    assert (trainer.global_step, trainer.current_epoch) == (step, epoch)


@pytest.mark.parametrize(
    ("options", "step"), [({}, 2), ({"min_steps": 4}, 4), ({"min_epochs": 2}, 10), ({"min_steps": 99}, 15)]
)
def test_should_stop_ends_after_the_step_and_the_minimum(
    tmp_path: Path, options: dict[str, Any], step: int
) -> None:
    def stop(trainer: Any) -> None:
        trainer.should_stop = True

    trainer = fit(tmp_path, callbacks=[At("on_train_batch_end", 2, stop)], **options)
    assert trainer.global_step == step


def test_early_stopping(tmp_path: Path) -> None:
    stopping = EarlyStopping("val_loss", patience=1, min_delta=100.0)
    trainer = fit(tmp_path, callbacks=[stopping], max_epochs=9)
    assert (trainer.current_epoch, stopping.stopped_epoch) == (2, 1)


def test_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    when = When()
    trainer = fit(tmp_path, callbacks=[when], fast_dev_run=True)
    assert (trainer.global_step, when.batches, when.sanity) == (1, 1, 0)
    assert list(tmp_path.iterdir()) == []
    more = fit(tmp_path, fast_dev_run=3)
    assert more.global_step == 3
    assert list(tmp_path.iterdir()) == []


# -- schedulers ----------------------------------------------------------------------------------------------


class Scheduled(Tiny):
    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = config

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler: Any
        if "monitor" in self.config:
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0, threshold=9.0
            )
        else:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.config}}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 0.0 * super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("config", "options", "halvings"),
    [
        ({"interval": "epoch"}, {}, 3),
        ({"interval": "epoch", "frequency": 2}, {}, 1),
        ({"interval": "step"}, {"max_epochs": 1}, 5),
        ({"interval": "step", "frequency": 2}, {"max_epochs": 1}, 2),
        ({"interval": "step"}, {"max_epochs": 1, "accumulate_grad_batches": 2}, 3),
        ({"interval": "epoch", "monitor": "val_loss"}, {}, 3),
        ({"interval": "step", "monitor": "loss_step"}, {"max_epochs": 1}, 5),
        ({"interval": "epoch", "monitor": "never", "strict": False}, {}, 0),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_when_schedulers_are_stepped(
    tmp_path: Path, config: dict[str, Any], options: dict[str, Any], halvings: int
) -> None:
    trainer = fit(tmp_path, Scheduled(**config), **options)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5**halvings


def test_a_plateau_scheduler_whose_metric_was_not_logged(tmp_path: Path) -> None:
    with pytest.raises(
        MisconfigurationException, match=r"watches 'never', which has not been logged.*val_loss"
    ):
        fit(tmp_path, Scheduled(interval="epoch", monitor="never"))


# -- gradients and precision ---------------------------------------------------------------------------------


def test_gradients_are_clipped(tmp_path: Path) -> None:
    norms = []

    class Looks(Tiny):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any) -> None:
            super().configure_gradient_clipping(optimizer, *args)
            norms.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters()])))

    fit(tmp_path, Looks(), gradient_clip_val=0.01, max_epochs=1)
    assert norms == [pytest.approx(0.01, rel=1e-3)] * 5


def test_bf16_mixed_runs_the_step_and_the_validation_under_autocast(tmp_path: Path) -> None:
    dtypes = set()

    class Looks(Tiny):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            dtypes.add((self.training, out.dtype))
            return out

    model = Looks()
    fit(tmp_path, model, precision="bf16-mixed", max_epochs=1)
    assert dtypes == {(True, torch.bfloat16), (False, torch.bfloat16)}
    assert model.layers.weight.dtype == torch.float32


def test_deterministic_and_threads_are_set(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        fit(tmp_path, deterministic=True, num_threads=1, max_epochs=1)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_num_threads() == 1
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


def test_a_model_in_eval_mode_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, Tiny().eval(), max_epochs=1)
    assert "Tiny is in eval mode as training begins" in capsys.readouterr().err


def test_what_is_shown_never_goes_back(tmp_path: Path) -> None:
    """Epoch and batch go on together, or the pace and the time left are made of two epochs."""
    looks = Looks()
    fit(tmp_path, max_epochs=3, callbacks=[looks])
    assert looks.seen == sorted(looks.seen)
    assert looks.seen[-1] == (2, 5)
