"""When a checkpoint is saved and which are kept, told with a checkpoint service that only remembers."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptrun.errors import MisconfigurationException, SaveError
from ckptrun.fit.callbacks.filename import FilenameTemplate
from ckptrun.fit.callbacks.model_checkpoint import ModelCheckpoint
from ckptrun.records import CheckpointRecord, RejectedRecord, SaveReason


@dataclass
class Service:
    """Remembers saves; ``catalogue`` is itself."""

    trainer: Trainer
    saves: list[SimpleNamespace] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    outcome: bool | Exception = True
    root: str = "/runs/demo/checkpoints"
    unreadable: bool = False
    quarantined: tuple[str, ...] = ()
    fails_later: bool = False
    undo: Any = None
    _key: int = -1

    def reserve(self, label: str | None) -> SimpleNamespace:
        if self.saves and self._key == self.trainer.global_step:
            name = self.saves[-1].name
            return SimpleNamespace(name=name, path=f"{self.root}/{name}", exists=True)
        number = len(self.saves) + 1
        name = f"{number:08d}-{label or f'step-{self.trainer.global_step:08d}'}"
        return SimpleNamespace(name=name, path=f"{self.root}/{name}", exists=False)

    def make_room(self) -> None:
        """A save in the background that failed calls what it was given, as the real one does."""
        undo, self.undo = self.undo, None
        if undo is not None:
            undo()

    def save(
        self,
        ticket: Any,
        *,
        reason: SaveReason,
        owner: str,
        undo: Any = None,
        replaces: Any = (),
        **options: Any,
    ) -> bool:
        if self.fails_later:
            self.undo, self.fails_later = undo, False
            return True
        if isinstance(self.outcome, Exception):
            raise self.outcome
        if self.outcome:
            self.dropped += replaces
            callback = next(c for c in self.trainer.callbacks if c.state_key == owner)
            self._key = self.trainer.global_step
            self.saves.append(
                SimpleNamespace(
                    name=ticket.name, step=self.trainer.global_step, reason=reason, owner=owner,
                    state=callback.state_dict(), again=ticket.exists, **options,
                )
            )  # fmt: skip
        return self.outcome

    def examine(self, name: str) -> CheckpointRecord | RejectedRecord:
        there = name in {save.name for save in self.saves} - set(self.dropped)
        path = f"{self.root}/{name}"
        if there and not self.unreadable:
            return CheckpointRecord(name, path, 1, 1, 0, "periodic")
        return RejectedRecord(name, path, 1, "it is gone", unreadable=self.unreadable)

    @property
    def steps(self) -> list[int]:
        return [save.step for save in self.saves]


class Trainer:
    """As much of a Trainer as ModelCheckpoint looks at, and a loop over it."""

    def __init__(self, *callbacks: ModelCheckpoint, run_id: str = "one", **options: Any) -> None:
        self.callbacks = callbacks
        self.fast_dev_run = False
        self.sanity_checking = False
        self.state = SimpleNamespace(fn="fit")
        self.global_step = 0
        self.current_epoch = 0
        self.callback_metrics: dict[str, torch.Tensor] = {}
        self.num_val_batches: int | list[int] = [1]
        self.val_check_interval: int | float = 1.0
        self.check_val_every_n_epoch: int | None = 1
        self.validation_due = False
        self.is_global_zero = True
        self.context = SimpleNamespace(run=object(), run_id=run_id)
        for name, value in options.items():
            assert hasattr(self, name)
            setattr(self, name, value)
        self.checkpoints: Any = Service(self)
        self.checkpoints.catalogue = self.checkpoints
        for callback in callbacks:
            callback.setup(self, None, "fit")  # type: ignore[arg-type]

    def call(self, hook: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, None, *args)

    def monitored(self, name: str) -> torch.Tensor | None:
        return self.callback_metrics.get(name)

    def clock_s(self) -> float:
        return time.monotonic()

    def start(self) -> Trainer:
        self.call("on_train_start")
        return self

    def log(self, **metrics: float) -> None:
        self.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})

    def step(self, **metrics: float) -> None:
        """One training batch with its update."""
        self.global_step += 1
        self.log(**metrics)
        self.batch_end()

    def batch_end(self) -> None:
        self.call("on_train_batch_end", None, None, 0)

    def validate(self, **metrics: float) -> None:
        self.log(**metrics)
        self.call("on_validation_end")

    def epoch(self, steps: int = 2, **metrics: float) -> None:
        """An epoch with its validation at the end, as Lightning orders it."""
        for _ in range(steps):
            self.step()
        self.validate(**metrics)
        self.call("on_train_epoch_end")
        self.current_epoch += 1


def trained(callback: ModelCheckpoint, losses: list[float], **options: Any) -> Trainer:
    """A training with one validation per epoch."""
    trainer = Trainer(callback, **options).start()
    for loss in losses:
        trainer.epoch(val_loss=loss)
    return trainer


def names(paths: Any) -> list[str]:
    return [path.rsplit("/", 1)[-1][:8] for path in paths]


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"save_top_k": -2}, "save_top_k=-2"),
        ({"mode": "best"}, "'min' or 'max'"),
        ({"every_n_epochs": -1}, "every_n_epochs=-1"),
        ({"every_n_train_steps": -3}, "every_n_train_steps=-3"),
        ({"save_top_k": 3}, "monitor=None"),
        ({"every_n_epochs": 1, "every_n_train_steps": 2}, "mutually exclusive"),
        ({"every_n_epochs": 1, "train_time_interval": timedelta(minutes=1)}, "mutually exclusive"),
        ({"every_n_train_steps": 1, "train_time_interval": timedelta(minutes=1)}, "mutually exclusive"),
        ({"filename": "{epoch"}, "filename"),
        ({"filename": "{}"}, "name of a metric"),
        ({"filename": "{loss:hello}"}, "name of a metric"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(MisconfigurationException, match=words):
        ModelCheckpoint(**arguments)


@pytest.mark.parametrize("interval", [{"every_n_train_steps": 0}, {"every_n_epochs": 0}, {}])
def test_zero_switches_off_and_does_not_exclude(interval: dict[str, int]) -> None:
    ModelCheckpoint(**interval)
    ModelCheckpoint(train_time_interval=timedelta(hours=1), **interval)


def test_ignored_arguments_are_noted(caplog: pytest.LogCaptureFixture) -> None:
    Trainer(ModelCheckpoint(dirpath="elsewhere", enable_version_counter=False))
    assert "elsewhere" in caplog.text
    assert "enable_version_counter" in caplog.text


def test_nothing_is_noted_where_nothing_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    Trainer(ModelCheckpoint())
    assert not caplog.text


def test_state_key_is_lightnings() -> None:
    callback = ModelCheckpoint(monitor="val_loss", every_n_train_steps=5)
    assert callback.state_key == (
        "ModelCheckpoint{'monitor': 'val_loss', 'mode': 'min', 'every_n_train_steps': 5, "
        "'every_n_epochs': 0, 'train_time_interval': None}"
    )
    assert "'every_n_epochs': 1" in ModelCheckpoint().state_key


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "insert", "label"),
    [
        ("{epoch}", True, "epoch=0"),
        ("{epoch:03d}-{step}", True, "epoch=000-step=7"),
        ("{epoch}-{val_loss:.2f}", True, "epoch=0-val_loss=0.12"),
        ("e={epoch}-loss={val/loss:.2f}", False, "e=0-loss=0.50"),
        ("{val/loss:.1f}", True, "val/loss=0.5"),
        ("{missing:d}", True, "missing=0"),
        ("{missing:.3f}", True, "missing=0.000"),
        ("{val_loss}-{val_loss_test}", False, "0.123-9"),
        ("{acc:d}", False, "1"),
        ("{nan:d}", False, "nan"),
        ("plain", True, "plain"),
        ("{{x}}-{step}", False, "{x}-7"),
        ("{val.loss:.1f}", False, "0.7"),
    ],
)
def test_filename_template(template: str, insert: bool, label: str) -> None:
    metrics = {
        "epoch": 0, "step": 7, "val_loss": 0.123, "val_loss_test": 9, "val/loss": 0.5, "acc": 1.0,
        "nan": math.nan, "val.loss": 0.7,
    }  # fmt: skip
    assert FilenameTemplate(template, auto_insert_metric_name=insert).format(metrics) == label
    callback = ModelCheckpoint(filename=template, auto_insert_metric_name=insert)
    assert callback.format_checkpoint_name(metrics) == label


def test_default_name_is_the_step_and_a_template_sees_the_metrics() -> None:
    assert trained(ModelCheckpoint(), [1.0]).checkpoints.saves[0].name == "00000001-step-00000002"
    callback = ModelCheckpoint(monitor="val_loss", filename="{epoch}-{step}-{val_loss:.2f}")
    trainer = trained(callback, [0.5])
    assert trainer.checkpoints.saves[0].name == "00000001-epoch=0-step=2-val_loss=0.50"
    assert ModelCheckpoint().format_checkpoint_name({"epoch": 1, "step": 3}) == "epoch=1-step=3"


def test_logged_epoch_and_step_are_whole_numbers() -> None:
    trainer = Trainer(ModelCheckpoint(filename="{epoch:02d}-{step:d}")).start()
    trainer.step(epoch=3.0, step=9.0)
    trainer.call("on_train_epoch_end")
    assert trainer.checkpoints.saves[0].name == "00000001-epoch=03-step=9"


# -- when ------------------------------------------------------------------------------------------


def test_every_n_train_steps() -> None:
    trainer = Trainer(ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)).start()
    for _ in range(10):
        trainer.step()
    assert trainer.checkpoints.steps == [3, 6, 9]


def test_batches_of_an_accumulation_window_save_once_and_at_its_end() -> None:
    trainer = Trainer(ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)).start()
    for _ in range(4):
        trainer.batch_end()
        trainer.step()
    assert trainer.checkpoints.steps == [2, 4]


def test_a_window_that_is_open_when_training_goes_on_is_no_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    callback = ModelCheckpoint(train_time_interval=timedelta(seconds=10), save_top_k=-1)
    trainer = Trainer(callback, global_step=7).start()
    now[0] = 11.0
    trainer.batch_end()
    assert trainer.checkpoints.steps == []
    trainer.step()
    assert trainer.checkpoints.steps == [8]


def test_train_time_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    trainer = Trainer(ModelCheckpoint(train_time_interval=timedelta(seconds=10), save_top_k=-1)).start()
    for seconds in (4.0, 5.0, 2.0, 8.0, 3.0):
        now[0] += seconds
        trainer.step()
    assert trainer.checkpoints.steps == [3, 5]


def test_every_n_epochs_counts_from_one() -> None:
    trainer = trained(ModelCheckpoint(every_n_epochs=2, save_top_k=-1), [1.0] * 5)
    assert trainer.checkpoints.steps == [4, 8]


@pytest.mark.parametrize(
    ("options", "at_epoch_end"),
    [
        ({}, True),
        ({"num_val_batches": [0]}, True),
        ({"num_val_batches": 0, "val_check_interval": 0.5}, True),
        ({"val_check_interval": 0.5}, False),
        ({"val_check_interval": 1}, False),
        ({"check_val_every_n_epoch": 2}, False),
        ({"check_val_every_n_epoch": None}, False),
    ],
)
def test_default_of_save_on_train_epoch_end(options: dict[str, Any], at_epoch_end: bool) -> None:
    trainer = Trainer(ModelCheckpoint(), **options).start()
    trainer.step()
    trainer.validate()
    assert trainer.checkpoints.steps == ([] if at_epoch_end else [1])
    trainer.call("on_train_epoch_end")
    assert trainer.checkpoints.steps == [1]


@pytest.mark.parametrize("at_epoch_end", [True, False])
def test_save_on_train_epoch_end(at_epoch_end: bool) -> None:
    trainer = Trainer(ModelCheckpoint(save_on_train_epoch_end=at_epoch_end), val_check_interval=0.5).start()
    trainer.step()
    trainer.validate()
    assert trainer.checkpoints.steps == ([] if at_epoch_end else [1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fast_dev_run", True),
        ("sanity_checking", True),
        ("state", SimpleNamespace(fn="validate")),
        ("global_step", 0),
    ],
)
def test_when_nothing_is_saved(name: str, value: Any) -> None:
    trainer = Trainer(ModelCheckpoint(every_n_train_steps=1, save_on_train_epoch_end=False), global_step=1)
    setattr(trainer, name, value)
    trainer.batch_end()
    trainer.validate()
    trainer.call("on_train_epoch_end")
    assert trainer.checkpoints.steps == []


def test_a_step_is_saved_once() -> None:
    callback = ModelCheckpoint(every_n_train_steps=1, save_last=True, save_top_k=-1)
    trainer = Trainer(callback).start()
    trainer.step()
    trainer.validate()
    trainer.call("on_train_epoch_end")
    assert trainer.checkpoints.steps == [1]


# -- which are kept --------------------------------------------------------------------------------


def test_without_a_monitor_the_newest_is_kept() -> None:
    callback = ModelCheckpoint()
    trainer = trained(callback, [1.0, 2.0, 3.0])
    assert [save.reason for save in trainer.checkpoints.saves] == ["periodic"] * 3
    assert names(trainer.checkpoints.dropped) == ["00000001", "00000002"]
    assert callback.best_model_path.endswith("00000003-step-00000006")
    assert callback.best_model_score is None
    assert callback.best_k_models == {}


@pytest.mark.parametrize(
    ("save_top_k", "kept", "saved"),
    [(0, [], 0), (1, ["00000002"], 2), (2, ["00000002", "00000003"], 3), (-1, ["1", "2", "3", "4"], 4)],
)
def test_top_k(save_top_k: int, kept: list[str], saved: int) -> None:
    callback = ModelCheckpoint(monitor="val_loss", save_top_k=save_top_k)
    trainer = trained(callback, [3.0, 1.0, 2.0, 4.0])
    assert len(trainer.checkpoints.saves) == saved
    there = [s.name for s in trainer.checkpoints.saves if s.name not in trainer.checkpoints.dropped]
    assert names(there) == [name.zfill(8) for name in kept]
    assert names(callback.best_k_models) == [name.zfill(8) for name in kept]


def test_attributes_are_lightnings() -> None:
    callback = ModelCheckpoint(monitor="val_loss", save_top_k=2)
    assert callback.kth_value == math.inf
    trainer = trained(callback, [3.0])
    assert callback.kth_best_model_path == ""
    trainer.epoch(val_loss=1.0)
    assert names([callback.best_model_path, callback.kth_best_model_path]) == ["00000002", "00000001"]
    assert (callback.best_model_score, callback.kth_value) == (1.0, 3.0)
    trainer.epoch(val_loss=2.0)
    assert names([callback.best_model_path, callback.kth_best_model_path]) == ["00000002", "00000003"]
    assert (callback.current_score, callback.kth_value) == (2.0, 2.0)
    assert callback.last_model_path == ""


def test_mode_max_and_reasons() -> None:
    callback = ModelCheckpoint(monitor="val_loss", mode="max", save_top_k=2)
    trainer = trained(callback, [0.5, 0.7, 0.6, 0.1])
    assert [str(save.reason) for save in trainer.checkpoints.saves] == ["best", "best", "periodic"]
    assert callback.best_model_score == torch.tensor(0.7)
    assert names(trainer.checkpoints.dropped) == ["00000001"]


def test_equal_scores_change_nothing() -> None:
    callback = ModelCheckpoint(monitor="val_loss")
    trainer = trained(callback, [1.0, 1.0])
    assert trainer.checkpoints.steps == [2]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_is_worse_than_any_number(mode: str) -> None:
    callback = ModelCheckpoint(monitor="val_loss", mode=mode, save_top_k=2)
    trainer = trained(callback, [math.nan, 1.0, 2.0, math.nan])
    assert names(trainer.checkpoints.dropped) == ["00000001"]
    assert len(trainer.checkpoints.saves) == 3
    assert names(callback.best_k_models) == ["00000002", "00000003"]


def test_the_only_score_may_be_nan() -> None:
    callback = ModelCheckpoint(monitor="val_loss")
    trained(callback, [math.nan])
    assert callback.best_model_score == math.inf


def test_scores_are_copies_of_what_was_logged() -> None:
    callback = ModelCheckpoint(monitor="val_loss")
    trainer = trained(callback, [1.0])
    trainer.callback_metrics["val_loss"].fill_(9.0)
    assert callback.best_model_score == 1.0


def test_save_weights_only_is_passed_on() -> None:
    trainer = trained(ModelCheckpoint(save_weights_only=True), [1.0])
    assert trainer.checkpoints.saves[0].weights_only is True


# -- save_last -------------------------------------------------------------------------------------


def test_save_last_holds_the_newest_beside_the_best() -> None:
    callback = ModelCheckpoint(monitor="val_loss", save_last=True)
    trainer = trained(callback, [1.0, 2.0, 3.0, 0.5])
    saves = trainer.checkpoints.saves
    assert [(save.step, str(save.reason)) for save in saves] == [
        (2, "best"), (4, "periodic"), (6, "periodic"), (8, "best"),
    ]  # fmt: skip
    # The first was best until the fourth came, the second and third were only the last for a while.
    assert names(trainer.checkpoints.dropped) == ["00000002", "00000001", "00000003"]
    assert callback.last_model_path == callback.best_model_path


def test_save_last_alone() -> None:
    callback = ModelCheckpoint(save_last=True, save_top_k=0)
    trainer = trained(callback, [1.0, 1.0])
    assert trainer.checkpoints.steps == [2, 4]
    assert names(trainer.checkpoints.dropped) == ["00000001"]
    assert callback.best_model_path == ""


def test_save_last_comes_at_every_epoch_whatever_every_n_epochs_says() -> None:
    callback = ModelCheckpoint(monitor="val_loss", save_last="link", every_n_epochs=2)
    trainer = trained(callback, [1.0, 2.0, 3.0])
    assert [str(save.reason) for save in trainer.checkpoints.saves] == ["periodic", "best", "periodic"]


@pytest.mark.parametrize("monitor", [None, "val_loss"])
def test_all_are_kept_but_those_that_were_only_the_last(monitor: str | None) -> None:
    callback = ModelCheckpoint(monitor=monitor, save_top_k=-1, save_last=True, every_n_epochs=2)
    trainer = trained(callback, [1.0] * 5)
    assert trainer.checkpoints.steps == [2, 4, 6, 8, 10]
    assert names(trainer.checkpoints.dropped) == ["00000001", "00000003"]


def test_what_was_held_as_last_is_given_up_once_save_last_is_switched_off() -> None:
    before = ModelCheckpoint(monitor="val_loss", save_last=True)
    trainer = trained(before, [1.0, 2.0])
    after = ModelCheckpoint(monitor="val_loss")
    after.load_state_dict(before.state_dict())
    trainer.callbacks = (after,)
    trainer.epoch(val_loss=0.5)
    assert names(trainer.checkpoints.dropped) == ["00000001", "00000002"]


# -- metric that is not there ----------------------------------------------------------------------


def test_missing_metric_after_a_validation_is_an_error_that_names_the_others() -> None:
    trainer = Trainer(ModelCheckpoint(monitor="val_los")).start()
    with pytest.raises(MisconfigurationException, match=r"(?s)monitor='val_los'.*acc, val_loss.*self\.log"):
        trainer.epoch(val_loss=1.0, acc=0.5)


def test_missing_metric_before_any_validation_is_a_note(caplog: pytest.LogCaptureFixture) -> None:
    callback = ModelCheckpoint(monitor="val_loss", every_n_train_steps=1, save_last=True)
    trainer = Trainer(callback).start()
    trainer.sanity_checking = True
    trainer.validate()
    trainer.sanity_checking = False
    trainer.step()
    trainer.step()
    assert caplog.text.count("no such metric was logged") == 1
    assert trainer.checkpoints.steps == [1, 2]  # save_last does not depend on it
    trainer.step(val_loss=1.0)
    assert callback.best_model_score == 1.0


def test_a_state_is_scored_by_its_own_validation_and_not_by_the_one_before() -> None:
    callback = ModelCheckpoint(monitor="val_loss", every_n_train_steps=2, filename="{val_loss:.1f}")
    trainer = Trainer(callback, val_check_interval=2).start()
    for loss in (3.0, 1.0):
        trainer.validation_due = False
        trainer.step()
        trainer.validation_due = True
        trainer.step()
        trainer.validate(val_loss=loss)
    assert [save.name for save in trainer.checkpoints.saves] == [
        "00000001-val_loss=3.0",
        "00000002-val_loss=1.0",
    ]


def test_a_save_that_waits_for_its_validation_is_remembered_in_a_checkpoint() -> None:
    callback = ModelCheckpoint(monitor="val_loss", every_n_train_steps=2)
    trainer = Trainer(callback, val_check_interval=2, global_step=1).start()
    trainer.validation_due = True
    trainer.step()
    resumed = ModelCheckpoint(monitor="val_loss", every_n_train_steps=2)
    trainer = Trainer(resumed, val_check_interval=2, global_step=2)
    resumed.load_state_dict(callback.state_dict())
    trainer.start().validate(val_loss=1.0)
    assert trainer.checkpoints.steps == [2]


# -- books and saves -------------------------------------------------------------------------------


def test_the_state_in_a_checkpoint_knows_of_the_checkpoint() -> None:
    callback = ModelCheckpoint(monitor="val_loss", save_last=True)
    trainer = trained(callback, [2.0, 1.0])
    for save in trainer.checkpoints.saves:
        path = f"{trainer.checkpoints.root}/{save.name}"
        assert save.state["best_model_path"] == save.state["last_model_path"] == path
        assert list(save.state["best_k_models"]) == [path]
        assert save.state["last_global_step_saved"] == save.step


@pytest.mark.parametrize("outcome", [False, SaveError("disk full"), KeyboardInterrupt()])
def test_a_failed_save_leaves_the_books_as_they_were(outcome: Any) -> None:
    callback = ModelCheckpoint(monitor="val_loss", save_last=True)
    trainer = trained(callback, [2.0])
    before = callback.state_dict()
    trainer.checkpoints.outcome = outcome
    if outcome is False:
        trainer.epoch(val_loss=1.0)
    else:
        trainer.checkpoints.save = _raise(outcome)
        with pytest.raises(type(outcome)):
            trainer.epoch(val_loss=1.0)
        del trainer.checkpoints.save
    assert callback.state_dict() == before
    assert trainer.checkpoints.dropped == []
    trainer.checkpoints.outcome = True
    trainer.epoch(val_loss=0.5)
    assert callback.best_model_score == 0.5
    assert len(trainer.checkpoints.dropped) == 1


def _raise(error: BaseException) -> Callable[..., bool]:
    def save(*_: Any, **__: Any) -> bool:
        raise error

    return save


def test_a_save_that_fails_later_is_judged_as_if_it_had_not_been_made() -> None:
    checkpoint = ModelCheckpoint(monitor="val_loss", save_top_k=1)
    trainer = Trainer(checkpoint).start()
    trainer.epoch(val_loss=3.0)
    trainer.checkpoints.fails_later = True
    trainer.epoch(val_loss=1.0)
    assert float(checkpoint.best_model_score or 0) == 1.0
    trainer.epoch(val_loss=2.0)
    assert float(checkpoint.best_model_score or 0) == 2.0, "better than the best that is there"
    assert trainer.checkpoints.steps == [2, 6]


def test_a_state_that_another_callback_saved_is_shared() -> None:
    best = ModelCheckpoint(monitor="val_loss")
    newest = ModelCheckpoint()
    trainer = Trainer(newest, best).start()
    trainer.epoch(val_loss=1.0)
    first, second = trainer.checkpoints.saves
    assert (first.again, second.again) == (False, True)
    assert best.best_model_path == newest.best_model_path


def test_verbose_says_what_was_saved_and_what_was_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    trained(ModelCheckpoint(monitor="val_loss", verbose=True), [1.0, 2.0])
    assert "saving 00000001-step-00000002, val_loss 1.00000 (best 1.00000)" in caplog.text
    assert "val_loss 2.00000 was not in top 1" in caplog.text


# -- exceptions ------------------------------------------------------------------------------------


def test_save_on_exception() -> None:
    callback = ModelCheckpoint(save_on_exception=True, filename="{step}", save_weights_only=True)
    trainer = Trainer(callback, global_step=5)
    trainer.call("on_exception", RuntimeError("no"))
    (save,) = trainer.checkpoints.saves
    assert (save.name, save.reason, save.on_exception) == ("00000001-step=5", SaveReason.EXCEPTION, True)
    assert save.weights_only
    assert callback.registry_entry()["on_exception"] is True


@pytest.mark.parametrize(
    ("name", "value"),
    [("fast_dev_run", True), ("sanity_checking", True), ("state", SimpleNamespace(fn="test"))],
)
def test_an_exception_where_nothing_was_trained_saves_nothing(name: str, value: Any) -> None:
    trainer = Trainer(ModelCheckpoint(save_on_exception=True), global_step=5)
    setattr(trainer, name, value)
    trainer.call("on_exception", RuntimeError("no"))
    assert trainer.checkpoints.saves == []


def test_an_exception_saves_nothing_by_default() -> None:
    trainer = Trainer(ModelCheckpoint(), global_step=5)
    trainer.call("on_exception", RuntimeError("no"))
    assert trainer.checkpoints.saves == []


# -- resume ----------------------------------------------------------------------------------------


def resumed(
    callback: ModelCheckpoint, trainer: Trainer, state: dict[str, Any] | None = None, **options: Any
) -> Trainer:
    """A new process that goes on after the last save, with the same checkpoints on disk."""
    later = Trainer(callback, **options)
    later.checkpoints.saves = list(trainer.checkpoints.saves)
    later.checkpoints.dropped = list(trainer.checkpoints.dropped)
    later.checkpoints._key = trainer.checkpoints._key
    later.global_step, later.current_epoch = trainer.global_step, trainer.current_epoch
    callback.load_state_dict(trainer.checkpoints.saves[-1].state if state is None else state)
    return later.start()


def test_the_limit_holds_across_resumes() -> None:
    losses = [5.0, 4.0, 3.0, 3.5, 2.0, 1.0]
    undisturbed = ModelCheckpoint(monitor="val_loss", save_top_k=3)
    trainer = trained(undisturbed, losses)
    first = trained(ModelCheckpoint(monitor="val_loss", save_top_k=3), losses[:4])
    callback = ModelCheckpoint(monitor="val_loss", save_top_k=3)
    later = resumed(callback, first)
    for loss in losses[4:]:
        later.epoch(val_loss=loss)
    assert callback.state_dict() == undisturbed.state_dict()
    assert later.checkpoints.dropped == trainer.checkpoints.dropped


def test_the_boundary_resumed_from_is_not_saved_again() -> None:
    first = trained(ModelCheckpoint(every_n_train_steps=2), [])
    first.step()
    first.step()
    callback = ModelCheckpoint(every_n_train_steps=2, save_last=True)
    later = resumed(callback, first)
    later.call("on_train_epoch_end")
    assert later.checkpoints.steps == [2]


def test_a_smaller_k_gives_up_what_is_too_much() -> None:
    first = trained(ModelCheckpoint(monitor="val_loss", save_top_k=3), [3.0, 2.0, 1.0])
    callback = ModelCheckpoint(monitor="val_loss", save_top_k=1)
    later = resumed(callback, first)
    later.epoch(val_loss=1.5)
    assert len(later.checkpoints.saves) == 3
    later.epoch(val_loss=0.5)
    assert sorted(names(later.checkpoints.dropped)) == ["00000001", "00000002", "00000003"]
    assert names(callback.best_k_models) == ["00000004"]


def test_checkpoints_that_are_gone_are_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    first = trained(ModelCheckpoint(monitor="val_loss", save_top_k=2), [1.0, 2.0])
    state = first.checkpoints.saves[-1].state
    first.checkpoints.dropped.append(first.checkpoints.saves[0].name)
    callback = ModelCheckpoint(monitor="val_loss", save_top_k=2)
    resumed(callback, first, state)
    assert names(callback.best_k_models) == ["00000002"]
    assert callback.best_model_score == 2.0
    assert "gone or damaged, so not counted any more: 00000001-step-00000002" in caplog.text


def test_checkpoints_that_cannot_be_read_just_now_are_not_gone() -> None:
    first = trained(ModelCheckpoint(monitor="val_loss"), [1.0])
    callback = ModelCheckpoint(monitor="val_loss")
    later = Trainer(callback)
    later.checkpoints.unreadable = True
    callback.load_state_dict(first.checkpoints.saves[-1].state)
    assert names(callback.best_k_models) == ["00000001"]


def test_what_is_in_quarantine_keeps_nobody_out_of_the_best() -> None:
    first = ModelCheckpoint(monitor="val_loss", save_top_k=1)
    trainer = trained(first, [0.1])
    (name,) = [save.name for save in trainer.checkpoints.saves]
    resumed = ModelCheckpoint(monitor="val_loss", save_top_k=1)
    again = Trainer(resumed)
    again.checkpoints.saves = trainer.checkpoints.saves
    again.checkpoints.quarantined = (name,)
    resumed.setup(again, None, "fit")  # type: ignore[arg-type]
    resumed.load_state_dict(first.state_dict())
    assert resumed.best_k_models == {}
    assert resumed.best_model_path == ""


def test_a_run_that_was_moved_keeps_its_books() -> None:
    first = trained(ModelCheckpoint(monitor="val_loss", save_last=True), [1.0])
    callback = ModelCheckpoint(monitor="val_loss", save_last=True)
    later = Trainer(callback)
    later.checkpoints.root = "/elsewhere/checkpoints"
    later.checkpoints.saves = first.checkpoints.saves
    callback.load_state_dict(first.checkpoints.saves[-1].state)
    path = "/elsewhere/checkpoints/00000001-step-00000002"
    assert callback.best_model_path == callback.last_model_path == path
    assert list(callback.best_k_models) == [path]


def test_another_runs_checkpoints_are_neither_counted_nor_deleted(caplog: pytest.LogCaptureFixture) -> None:
    first = trained(ModelCheckpoint(monitor="val_loss", save_last=True), [1.0])
    callback = ModelCheckpoint(monitor="val_loss", save_last=True)
    later = resumed(callback, first, run_id="two")
    assert callback.best_model_path == callback.last_model_path == ""
    assert "another run" in caplog.text
    later.epoch(val_loss=2.0)
    assert later.checkpoints.dropped == []


def test_a_state_of_lightning_is_of_another_run() -> None:
    callback, one = ModelCheckpoint(monitor="val_loss"), torch.tensor(1.0)
    Trainer(callback)
    callback.load_state_dict(
        {
            "monitor": "val_loss", "best_model_score": one, "best_model_path": "/x/a.ckpt",
            "current_score": one, "dirpath": "/x", "best_k_models": {"/x/a.ckpt": one},
            "kth_best_model_path": "/x/a.ckpt", "kth_value": one, "last_model_path": "/x/last.ckpt",
        }
    )  # fmt: skip
    assert callback.best_k_models == {}


def test_a_state_that_was_only_noted_for_this_callback_is_adopted_on_resume() -> None:
    def pair() -> tuple[ModelCheckpoint, ModelCheckpoint]:
        return ModelCheckpoint(save_last=True), ModelCheckpoint(monitor="val_loss", save_last=True)

    newest, best = pair()
    trainer = Trainer(newest, best).start()
    trainer.epoch(val_loss=1.0)
    entry = best.registry_entry()

    _, again = pair()
    later = Trainer(again)
    later.checkpoints.saves = trainer.checkpoints.saves[:1]
    path = best.best_model_path
    again.adopt(path, entry, step=2)
    assert again.best_model_path == again.last_model_path == path
    assert again.best_model_score == 1.0
    assert again.state_dict() == best.state_dict()


def test_what_was_given_up_for_a_noted_state_is_not_called_gone(caplog: pytest.LogCaptureFixture) -> None:
    newest, best = ModelCheckpoint(every_n_train_steps=2), ModelCheckpoint(monitor="val_loss")
    trainer = Trainer(newest, best).start()
    trainer.epoch(val_loss=2.0)
    state = best.state_dict()
    trainer.epoch(val_loss=1.0)
    assert names(trainer.checkpoints.dropped) == ["00000001", "00000001"]
    again = ModelCheckpoint(monitor="val_loss")
    later = Trainer(again)
    later.checkpoints.saves, later.checkpoints.dropped = (
        trainer.checkpoints.saves,
        trainer.checkpoints.dropped,
    )
    again.load_state_dict(state)
    again.adopt(best.best_model_path, best.registry_entry(), step=4)
    later.start()
    assert again.state_dict() == best.state_dict()
    assert not caplog.text


def test_what_the_registry_does_not_list_is_not_adopted() -> None:
    callback = ModelCheckpoint(monitor="val_loss")
    entry = callback.registry_entry()
    callback.adopt("/runs/demo/checkpoints/00000009-step-00000009", entry, step=9)
    assert callback.best_k_models == {}
    assert callback._last_global_step_saved == 0


# -- registry --------------------------------------------------------------------------------------


def test_registry_entry() -> None:
    callback = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)
    assert callback.registry_entry() == {
        "state_key": callback.state_key,
        "class": "ckptrun.fit.callbacks.model_checkpoint.ModelCheckpoint",
        "monitor": "val_loss",
        "mode": "min",
        "save_top_k": 2,
        "save_last": True,
        "saves_checkpoints": True,
        "on_exception": False,
        "best_k": {},
        "best": None,
        "best_score": None,
        "last": None,
    }
    trained(callback, [1.0, 0.5])
    entry = callback.registry_entry()
    assert entry["best_k"] == {"00000001-step-00000002": 1.0, "00000002-step-00000004": 0.5}
    assert (entry["best"], entry["best_score"]) == ("00000002-step-00000004", 0.5)
    assert entry["last"] == "00000002-step-00000004"
    assert ModelCheckpoint(save_top_k=0).registry_entry()["saves_checkpoints"] is False
