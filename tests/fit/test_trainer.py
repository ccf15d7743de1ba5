"""What users of ``ckptrun.Trainer`` can rely on, against what Lightning's own tests pin down."""

from __future__ import annotations

import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_helpers import CTRL_C, At, Tiny, disturb_random, loader, make_trainer, samples
from torch import nn

import ckptrun
from ckptrun import Callback, DataModule, MisconfigurationException, StopTraining
from ckptrun.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from ckptrun.errors import IncompatibleError, NoCheckpointError, UsageError
from ckptrun.fit.trainer import Trainer as RankTrainer
from ckptrun.loggers import CSVLogger
from ckptrun.records import Stage, Status
from ckptrun.run.attempts import read_attempts


class Data(DataModule):
    """Notes what is called on it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(8, shuffle=False)

    def test_dataloader(self) -> Any:
        return loader(8, shuffle=False)

    def predict_dataloader(self) -> Any:
        return loader(8, shuffle=False)

    def on_exception(self, exception: BaseException) -> None:
        self.calls.append(f"on_exception {type(exception).__name__}")


class Evaluated(Tiny):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


def fit(root: Path, *, model: Any = None, ckpt_path: str | None = None, **options: Any) -> Any:
    trainer = make_trainer(root, **options)
    trainer.fit(model or Tiny(), loader(), loader(8, shuffle=False), ckpt_path=ckpt_path)
    return trainer


# -- arguments of fit ----------------------------------------------------------------------------------------


def test_a_datamodule_as_second_argument(tmp_path: Path) -> None:
    data = Data()
    make_trainer(tmp_path, max_epochs=1).fit(Tiny(), data)  # type: ignore[arg-type]
    assert data.calls == ["prepare_data", "setup fit", "teardown fit"]


def test_a_datamodule_together_with_dataloaders(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(MisconfigurationException, match="datamodule and dataloaders"):
        trainer.fit(Tiny(), loader(), datamodule=Data())
    with pytest.raises(MisconfigurationException, match="datamodule and dataloaders"):
        trainer.fit(Tiny(), val_dataloaders=loader(), datamodule=Data())
    with pytest.raises(MisconfigurationException, match="two datamodules"):
        trainer.fit(Tiny(), Data(), datamodule=Data())  # type: ignore[arg-type]
    with pytest.raises(MisconfigurationException, match="datamodule and dataloaders"):
        trainer.test(Evaluated(), loader(), datamodule=Data())
    assert not (tmp_path / "demo").exists()


def test_what_is_no_module_is_named(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="Found Linear as model"):
        make_trainer(tmp_path).fit(nn.Linear(1, 1), loader())  # type: ignore[arg-type]


def test_a_module_without_its_parts(tmp_path: Path) -> None:
    class Empty(ckptrun.Module):
        pass

    with pytest.raises(MisconfigurationException, match="nothing to train on"):
        make_trainer(tmp_path, run="a").fit(Empty())
    with pytest.raises(MisconfigurationException, match="no configure_optimizers"):
        make_trainer(tmp_path, run="b").fit(Empty(), loader())
    with pytest.raises(MisconfigurationException, match="no test_step"):
        make_trainer(tmp_path, run="c").test(Tiny(), loader())
    with pytest.raises(MisconfigurationException, match="nothing to test on"):
        make_trainer(tmp_path, run="d").test(Evaluated())


def test_the_modules_own_loaders(tmp_path: Path) -> None:
    class WithData(Tiny):
        train_dataloader = staticmethod(loader)  # type: ignore[assignment]

        def val_dataloader(self) -> Any:
            return loader(8, shuffle=False)

    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(WithData())
    assert "val_loss" in trainer.callback_metrics


# -- state ---------------------------------------------------------------------------------------------------


def test_state_during_and_after(tmp_path: Path) -> None:
    seen: dict[str, tuple[Any, ...]] = {}

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen["train"] = (trainer.state.fn, trainer.state.status, trainer.state.stage, trainer.training)

        def on_validation_start(self, trainer: Any, *_: Any) -> None:
            seen["sanity" if trainer.sanity_checking else "validate"] = (
                trainer.state.fn, trainer.state.status, trainer.state.stage,
            )  # fmt: skip

    trainer = fit(tmp_path, callbacks=[Looks()])
    assert seen == {
        "sanity": ("fit", Status.RUNNING, Stage.SANITY_CHECKING),
        "train": ("fit", Status.RUNNING, Stage.TRAINING, True),
        "validate": ("fit", Status.RUNNING, Stage.VALIDATING),
    }
    assert (trainer.state.fn, trainer.state.status) == ("fit", Status.FINISHED)
    assert (trainer.global_step, trainer.current_epoch) == (15, 3)


def test_what_a_callback_reads_of_the_trainer(tmp_path: Path) -> None:
    values: dict[str, Any] = {}
    names = (
        "num_training_batches", "num_val_batches", "estimated_stepping_batches", "max_steps", "max_epochs",
        "is_global_zero", "world_size", "fast_dev_run", "log_dir", "default_root_dir", "attempt",
    )  # fmt: skip

    def look(trainer: Any) -> None:
        values.update({name: getattr(trainer, name) for name in names})

    fit(tmp_path, callbacks=[At("on_train_start", 1, look)], accumulate_grad_batches=2)
    assert values == {
        "num_training_batches": 5, "num_val_batches": [2], "estimated_stepping_batches": 9, "max_steps": -1,
        "max_epochs": 3, "is_global_zero": True, "world_size": 1, "fast_dev_run": False,
        "log_dir": str(tmp_path / "demo" / "logs"), "default_root_dir": str(tmp_path / "demo"), "attempt": 1,
    }  # fmt: skip


def test_checkpoint_and_early_stopping_callbacks_are_found(tmp_path: Path) -> None:
    stopping, first, second = EarlyStopping("val_loss"), ModelCheckpoint(), ModelCheckpoint(monitor="loss")
    trainer = make_trainer(tmp_path, callbacks=[stopping, first, second])
    assert trainer.checkpoint_callbacks == [first, second]
    assert trainer.checkpoint_callback is first
    assert trainer.early_stopping_callback is stopping
    assert make_trainer(tmp_path, enable_checkpointing=False).checkpoint_callback is None


def test_two_callbacks_with_one_state_key_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="same state key"):
        make_trainer(tmp_path, callbacks=[ModelCheckpoint(), ModelCheckpoint()])


def test_callbacks_of_the_module_replace_those_of_their_class(tmp_path: Path) -> None:
    class WithCallbacks(Tiny):
        def configure_callbacks(self) -> Any:
            return [EarlyStopping("val_loss", patience=9)]

    trainer = fit(tmp_path, model=WithCallbacks(), callbacks=[EarlyStopping("val_loss", patience=1)])
    assert [callback.patience for callback in trainer.early_stopping_callbacks] == [9]


def test_enable_checkpointing_contradicts_a_checkpoint_callback(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="enable_checkpointing"):
        make_trainer(tmp_path, enable_checkpointing=False, callbacks=[ModelCheckpoint()])


# -- ckpt_path -----------------------------------------------------------------------------------------------


def newest(root: Path, run: str = "demo") -> str:
    return str(root / run / "checkpoints" / max(os.listdir(root / run / "checkpoints")))


def test_ckpt_path_says_where_a_fn_started(tmp_path: Path) -> None:
    trainer = fit(tmp_path, max_epochs=1)
    assert trainer.ckpt_path is None
    first = newest(tmp_path)
    again = fit(tmp_path, ckpt_path="last", max_epochs=2)
    assert again.ckpt_path == first


def test_a_managed_path_is_used_until_it_is_reset(tmp_path: Path) -> None:
    fit(tmp_path, max_epochs=1)
    first = newest(tmp_path)
    fit(tmp_path, ckpt_path="last", max_epochs=2)
    trainer = make_trainer(tmp_path)
    model = Evaluated()
    trainer.ckpt_path = first
    trainer.test(model, loader(8), verbose=False)
    assert trainer.resolution is not None
    assert trainer.resolution.path == trainer.ckpt_path == first
    trainer.ckpt_path = None
    trainer.test(model, loader(8), verbose=False)
    assert trainer.resolution.fresh, "a model without ckpt_path is tested with its own weights"


def test_an_explicit_argument_beats_a_managed_path_and_resets_it(tmp_path: Path) -> None:
    fit(tmp_path, max_epochs=1)
    first = newest(tmp_path)
    fit(tmp_path, ckpt_path="last", max_epochs=2)
    trainer = make_trainer(tmp_path)
    trainer.ckpt_path = first
    with pytest.warns(UserWarning, match="no longer managed"):
        trainer.test(Evaluated(), loader(8), ckpt_path="last", verbose=False)
    assert trainer.resolution is not None
    assert trainer.resolution.path == newest(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.test(Evaluated(), loader(8), ckpt_path=first, verbose=False)


def test_a_managed_path_is_where_fit_goes_on(tmp_path: Path) -> None:
    fit(tmp_path, max_epochs=1)
    first = newest(tmp_path)
    trainer = make_trainer(tmp_path, max_epochs=2)
    trainer.ckpt_path = first
    trainer.fit(Tiny(), loader())
    assert trainer.global_step == 10
    assert trainer.resolution is not None
    assert trainer.resolution.rule == 3


def test_an_explicit_missing_path_is_an_error_and_an_implicit_one_is_not(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="no such file"):
        fit(tmp_path, ckpt_path=str(tmp_path / "gone"))
    with pytest.warns(UserWarning, match="never"):
        fit(tmp_path, ckpt_path="last")


def test_fit_in_a_run_that_has_checkpoints_is_refused(tmp_path: Path) -> None:
    fit(tmp_path)
    with pytest.raises(UsageError, match="last"):
        fit(tmp_path)


def test_best_fails_in_three_ways(tmp_path: Path) -> None:
    """Without a monitor, before any save, and in fast_dev_run."""
    fit(tmp_path, run="plain")
    trainer = make_trainer(tmp_path, run="plain")
    with pytest.raises(UsageError) as without:
        trainer.test(Evaluated(), loader(8), ckpt_path="best")

    with pytest.raises(RuntimeError, match="early"):
        fit(
            tmp_path, run="early",
            callbacks=[ModelCheckpoint(monitor="val_loss"), At("on_train_batch_end", 1, _raise_early)],
        )  # fmt: skip
    trainer = make_trainer(tmp_path, run="early", callbacks=[ModelCheckpoint(monitor="val_loss")])
    with pytest.raises(NoCheckpointError) as nothing_yet:
        trainer.test(Evaluated(), loader(8), ckpt_path="best")

    trainer = make_trainer(tmp_path, run="plain", fast_dev_run=True)
    with pytest.raises(UsageError) as fast:
        trainer.test(Evaluated(), loader(8), ckpt_path="best")
    assert [error.value.exit_code for error in (without, nothing_yet, fast)] == [2, 3, 2]
    assert "monitor" in without.value.message
    assert "fast_dev_run" in fast.value.message
    assert len({error.value.message for error in (without, nothing_yet, fast)}) == 3


def _raise_early(_: Any) -> None:
    raise RuntimeError("early")


def test_best_is_the_best_and_last_finds_a_save_of_an_earlier_process(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(monitor="val_loss", mode="max", save_top_k=1)
    fit(tmp_path, callbacks=[checkpoint])
    trainer = make_trainer(tmp_path)
    trainer.test(Evaluated(), loader(8), ckpt_path="best", verbose=False)
    assert trainer.ckpt_path == checkpoint.best_model_path
    trainer.test(Evaluated(), loader(8), ckpt_path="last", verbose=False)
    assert trainer.ckpt_path == newest(tmp_path)


def test_several_checkpoint_callbacks_warn_which_is_used(tmp_path: Path) -> None:
    fit(tmp_path, callbacks=[ModelCheckpoint(monitor="val_loss"), ModelCheckpoint(monitor="loss_epoch")])
    with pytest.warns(UserWarning, match="val_loss"):
        make_trainer(tmp_path).test(Evaluated(), loader(8), ckpt_path="best", verbose=False)


def test_without_a_model_the_best_checkpoint_is_tested(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(monitor="val_loss", mode="max", save_top_k=1)
    trainer = make_trainer(tmp_path, callbacks=[checkpoint])
    trainer.fit(Evaluated(), loader(), loader(8, shuffle=False))
    trainer.test(dataloaders=loader(8), verbose=False)
    assert trainer.ckpt_path == checkpoint.best_model_path
    assert trainer.global_step == 5, "the step of the weights that are tested"


# -- evaluation ----------------------------------------------------------------------------------------------


def test_all_four_fns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, model, data = make_trainer(tmp_path), Evaluated(), Data()
    trainer.fit(model, datamodule=data)
    (validated,) = trainer.validate(model, datamodule=data)
    assert "val_loss" in capsys.readouterr().out
    (tested,) = trainer.test(model, datamodule=data, verbose=False)
    assert capsys.readouterr().out == ""
    assert validated["val_loss"] == pytest.approx(tested["test_loss"])
    predictions = trainer.predict(model, datamodule=data)
    assert predictions is not None
    assert len(predictions) == 2
    assert torch.equal(torch.cat(predictions), _predict_by_hand(model))
    assert data.calls[-3:] == ["prepare_data", "setup predict", "teardown predict"]
    assert sorted(os.listdir(tmp_path / "demo" / "evals")) == ["0001-validate", "0002-test", "0003-predict"]
    assert trainer.state.fn == "predict"


def _predict_by_hand(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(x) for x, _ in loader(8, shuffle=False)])


class TakesBatch(Tiny):
    def predict_step(self, batch: Any) -> Any:
        return batch[0]


def test_prediction_over_several_loaders_gives_a_list_for_each(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    both = [loader(8, shuffle=False), loader(4, shuffle=False)]

    class Whole(Tiny):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return dataloader_idx, batch_idx

    assert trainer.predict(Whole(), both) == [[(0, 0), (0, 1)], [(1, 0)]]
    assert trainer.predict(Whole(), both, return_predictions=False) is None
    with pytest.raises(MisconfigurationException, match="2 predict loaders but predict_step takes 1"):
        trainer.predict(TakesBatch(), both)
    assert len(trainer.predict(TakesBatch(), loader(8))) == 2


def test_the_default_predict_step_over_several_loaders(tmp_path: Path) -> None:
    class Plain(Tiny):
        def forward(self, batch: Any) -> torch.Tensor:
            return super().forward(batch[0])

    found = make_trainer(tmp_path).predict(Plain(), [loader(8), loader(4)])
    assert [len(batches) for batches in found] == [2, 1]


def test_evaluation_leaves_modes_and_random_state(tmp_path: Path) -> None:
    model = Tiny(nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)))
    model.layers[1].eval()
    disturb_random()
    before = torch.get_rng_state()
    make_trainer(tmp_path).validate(model, loader(8), verbose=False)
    assert torch.equal(before, torch.get_rng_state())
    assert model.layers[0].training
    assert not model.layers[1].training, "a part that is frozen stays so"


def test_frozen_parts_stay_frozen_in_fit(tmp_path: Path) -> None:
    model = Tiny(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
    model.layers[0].eval()
    fit(tmp_path, model=model, max_epochs=2)
    assert torch.equal(model.layers[0].running_mean, torch.zeros(4))


def test_a_checkpoint_of_another_model_does_not_fit(tmp_path: Path) -> None:
    fit(tmp_path)
    with pytest.raises(IncompatibleError, match="do not fit the model: missing"):
        fit(tmp_path, model=Tiny(nn.Sequential(nn.Linear(4, 2))), ckpt_path="last", max_epochs=5)

    class OtherOptimizer(Tiny):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([{"params": [self.layers.weight]}, {"params": [self.layers.bias]}], lr=0.1)

    with pytest.raises(IncompatibleError, match="1 parameter groups, this one has 2"):
        fit(tmp_path, model=OtherOptimizer(), ckpt_path="last", max_epochs=5)


def test_weights_only_checkpoints_are_tested_but_not_resumed(tmp_path: Path) -> None:
    fit(tmp_path, callbacks=[ModelCheckpoint(save_weights_only=True)], max_epochs=1)
    names = sorted(os.listdir(tmp_path / "demo" / "checkpoints"))
    path = str(tmp_path / "demo" / "checkpoints" / names[0])
    trainer = make_trainer(tmp_path)
    trainer.test(Evaluated(), loader(8), ckpt_path=path, verbose=False)
    with pytest.raises((IncompatibleError, NoCheckpointError), match="weights only"):
        fit(tmp_path, ckpt_path=path)


# -- ends ----------------------------------------------------------------------------------------------------

HOOKS = [
    "setup", "on_fit_start", "on_sanity_check_start", "on_sanity_check_end", "on_train_start",
    "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_backward",
    "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start",
    "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end",
    "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end", "on_train_end", "on_fit_end",
    "teardown",
]  # fmt: skip


def _stop(_: Any) -> None:
    raise StopTraining


@pytest.mark.parametrize("hook", HOOKS)
def test_stop_training_in_any_hook_ends_as_done(tmp_path: Path, hook: str) -> None:
    finalized = Finalized()
    trainer = fit(tmp_path, callbacks=[At(hook, 1, _stop)], logger=finalized, max_epochs=2)
    assert trainer.state.status is Status.FINISHED
    assert finalized.statuses == ["success"]
    (attempt,) = read_attempts(str(tmp_path / "demo" / "attempts.jsonl"))
    assert (attempt.status, attempt.stop_reason, attempt.exit_code) == ("FINISHED", "done", 0)


def test_stop_training_saves_and_leaves_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = fit(tmp_path, callbacks=[At("on_train_batch_end", 7, _stop)])
    assert trainer.global_step == 7
    again = fit(tmp_path, ckpt_path="last")
    assert again.global_step == 0
    assert "nothing left to do: training ended by StopTraining at step 7" in capsys.readouterr().err


def test_stop_training_inside_a_step_leaves_nothing_to_do_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, callbacks=[At("on_after_backward", 8, _stop)])
    assert newest(tmp_path).endswith("step-00000007")
    with pytest.warns(UserWarning, match="step-00000007 is passed over: not exact"):
        fit(tmp_path, ckpt_path="last")
    assert "nothing left to do: training ended by StopTraining at step 7" in capsys.readouterr().err
    with pytest.warns(UserWarning, match="step-00000007 is passed over: not exact"):
        assert fit(tmp_path, ckpt_path="last", max_epochs=4).global_step == 20


def test_stop_training_in_an_evaluation(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, callbacks=[At("on_test_batch_start", 1, _stop)])
    assert trainer.test(Evaluated(), loader(8)) is None
    assert trainer.state.status is Status.FINISHED


class Finalized(CSVLogger):
    def __init__(self) -> None:
        super().__init__()
        self.statuses: list[str] = []

    def finalize(self, status: Any) -> None:
        super().finalize(status)
        self.statuses.append(status)


class Notes(Callback):
    def __init__(self) -> None:
        self.exceptions: list[BaseException] = []
        self.torn_down = False

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.exceptions.append(exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.torn_down = True


@pytest.mark.parametrize("hook", ["setup", "on_train_batch_start", "on_validation_end", "on_fit_end"])
def test_an_exception_reaches_everybody_and_the_caller(tmp_path: Path, hook: str) -> None:
    notes, logger, data = Notes(), Finalized(), Data()
    failure = ValueError("mine")

    def fail(_: Any) -> None:
        raise failure

    trainer = make_trainer(tmp_path, callbacks=[notes, At(hook, 1, fail)], logger=logger)
    with pytest.raises(ValueError, match="mine") as raised:
        trainer.fit(Tiny(), datamodule=data)
    assert raised.value is failure
    assert notes.exceptions == [failure]
    assert not notes.torn_down
    assert data.calls[-1] == "on_exception ValueError"
    assert logger.statuses == ["failed"]
    assert (trainer.state.status, trainer.interrupted) == (Status.INTERRUPTED, True)
    (attempt,) = read_attempts(str(tmp_path / "demo" / "attempts.jsonl"))
    assert (attempt.status, attempt.stop_reason, attempt.exit_code) == ("INTERRUPTED", "exception", 1)


def test_an_exception_in_on_exception_does_not_hide_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(text: str) -> Any:
        def act(_: Any) -> None:
            raise ValueError(text)

        return act

    notes = Notes()
    callbacks = [At("on_train_start", 1, fail("first")), At("on_exception", 1, fail("second")), notes]
    with pytest.raises(ValueError, match="first"):
        fit(tmp_path, callbacks=callbacks)
    assert len(notes.exceptions) == 1
    assert "on_exception failed too: ValueError: second" in capsys.readouterr().err


def test_an_exception_in_teardown_replaces_a_good_end(tmp_path: Path) -> None:
    def fail(_: Any) -> None:
        raise ValueError("late")

    trainer = make_trainer(tmp_path, callbacks=[At("teardown", 1, fail)])
    with pytest.raises(ValueError, match="late"):
        trainer.fit(Tiny(), loader())
    assert trainer.state.status is Status.INTERRUPTED


def test_ctrl_c_tells_callbacks_as_in_lightning(tmp_path: Path) -> None:
    notes, logger = Notes(), Finalized()
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, callbacks=[notes, At("on_train_batch_end", 3, CTRL_C)], logger=logger)
    assert [type(error) for error in notes.exceptions] == [KeyboardInterrupt]
    assert logger.statuses == ["interrupted"]
    (attempt,) = read_attempts(str(tmp_path / "demo" / "attempts.jsonl"))
    assert (attempt.status, attempt.stop_reason, attempt.exit_code) == ("INTERRUPTED", "keyboard", 130)


def test_a_keyboard_interrupt_that_code_raises_saves_the_last_boundary(tmp_path: Path) -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, callbacks=[At("on_train_batch_end", 7, interrupt)])
    assert newest(tmp_path).endswith("step-00000007")


@pytest.mark.parametrize("fn", ["validate", "test", "predict"])
def test_ctrl_c_ends_an_evaluation(tmp_path: Path, fn: str) -> None:
    kind = {"validate": "validation"}.get(fn, fn)
    trainer = make_trainer(tmp_path, callbacks=[At(f"on_{kind}_batch_start", 1, CTRL_C)])
    with pytest.raises(KeyboardInterrupt):
        getattr(trainer, fn)(Evaluated(), loader(8))
    assert trainer.state.status is Status.INTERRUPTED


def test_ctrl_c_in_set_up(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, callbacks=[At("setup", 1, CTRL_C)])
    assert os.listdir(tmp_path / "demo" / "checkpoints") == []


def test_save_on_stop_false(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, callbacks=[At("on_train_batch_end", 3, CTRL_C)], save_on_stop=False)
    assert os.listdir(tmp_path / "demo" / "checkpoints") == []


def test_fit_in_a_thread_degrades_with_a_warning(tmp_path: Path) -> None:
    caught: list[str] = []
    trainer = make_trainer(tmp_path, max_epochs=1)

    def work() -> None:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            trainer.fit(Tiny(), loader())
        caught.extend(str(warning.message) for warning in found)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert trainer.state.status is Status.FINISHED
    assert any("thread that is not the main one" in text for text in caught)


def test_nothing_left_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path)
    before = sorted(os.listdir(tmp_path / "demo" / "checkpoints"))
    fit(tmp_path, ckpt_path="last")
    assert "nothing left to do" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path / "demo" / "checkpoints")) == before
    assert len(read_attempts(str(tmp_path / "demo" / "attempts.jsonl"))) == 1


def test_a_trainer_is_used_again(tmp_path: Path) -> None:
    callbacks = [OnExceptionCheckpoint(), At("on_train_batch_end", 3, CTRL_C)]
    trainer, model = make_trainer(tmp_path, callbacks=callbacks), Tiny()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(model, loader())
    trainer.fit(model, loader(), ckpt_path="last")
    assert (trainer.global_step, trainer.state.status) == (15, Status.FINISHED)


def test_save_checkpoint_writes_a_file_of_its_own(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    with pytest.raises(MisconfigurationException, match="none has begun"):
        trainer.save_checkpoint(str(tmp_path / "mine.ckpt"))
    trainer.fit(Tiny(), loader())
    trainer.save_checkpoint(str(tmp_path / "mine.ckpt"))
    state = torch.load(tmp_path / "mine.ckpt", weights_only=True)
    assert state["global_step"] == 15


def test_the_trainer_of_a_rank_needs_no_run() -> None:
    """What the command line and users' scripts have in common stands on its own: a context that does nothing."""
    from ckptrun.fit.context import RankContext

    model = Tiny()
    trainer = RankTrainer({"max_steps": 3})
    outcome = trainer.execute("fit", model, dataloaders=list(loader(len(samples()))), context=RankContext())
    assert (outcome.stop_reason, outcome.step, outcome.finished_by) == ("done", 3, "max_steps")
