"""The average is torch's, validation uses it, a checkpoint has both, and a resume goes on with both."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_helpers import CTRL_C, At, Picture, Scenario, Tiny, assert_same, make_trainer, send
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ckptrun import Callback, MisconfigurationException
from ckptrun.callbacks import EMAWeightAveraging, OnExceptionCheckpoint, WeightAveraging
from ckptrun.checkpoint.manifest import read_manifest


class Net(Tiny):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)))


def ema() -> list[Callback]:
    return [EMAWeightAveraging(decay=0.9)]


class Follows(Callback):
    """What torch's own class makes of the weights after each step, and what validation sees."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.average: AveragedModel | None = None
        self.trained: dict[str, torch.Tensor] = {}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = AveragedModel(pl_module.layers, **self.options)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        assert self.average is not None
        self.average.update_parameters(pl_module.layers)
        self.trained = {name: value.clone() for name, value in pl_module.layers.state_dict().items()}

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        assert self.average is not None
        assert_same(self.average.module.state_dict(), pl_module.layers.state_dict())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            assert_same(self.trained, dict(pl_module.layers.state_dict()))


@pytest.mark.parametrize(
    ("callback", "options"),
    [
        (EMAWeightAveraging(decay=0.9), {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True}),
        (
            EMAWeightAveraging(use_buffers=False),
            {"multi_avg_fn": get_ema_multi_avg_fn(0.999), "use_buffers": False},
        ),
        (WeightAveraging(device="cpu"), {"use_buffers": True}),
    ],
)
def test_the_average_is_torchs_and_is_what_is_validated(tmp_path: Path, callback: Any, options: Any) -> None:
    follows = Follows(**options)
    _, model = Scenario(Net, callbacks=lambda: [callback, follows]).fit(tmp_path, "demo")
    assert follows.average is not None
    assert_same(dict(follows.average.module.state_dict()), dict(model.layers.state_dict()))


def saved(root: Path, run: str = "demo") -> tuple[Any, Any]:
    folder = root / run / "checkpoints"
    newest = folder / max(os.listdir(folder))
    return torch.load(newest / "state.ckpt", weights_only=True), read_manifest(str(newest))


def test_a_checkpoint_has_both(tmp_path: Path) -> None:
    follows = Follows(multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    Scenario(Net, callbacks=lambda: [*ema(), follows]).fit(tmp_path, "demo")
    state, _ = saved(tmp_path)
    assert follows.average is not None
    averaged = {f"layers.{name}": value for name, value in follows.average.module.state_dict().items()}
    assert_same(averaged, state["state_dict"])
    assert_same(
        {f"layers.{name}": value for name, value in follows.trained.items()}, state["current_model_state"]
    )
    assert state["averaging_state"] == {
        "n_averaged": 15,
        "latest_update_step": 15,
        "latest_update_epoch": -1,
    }


def test_evaluation_uses_the_average(tmp_path: Path) -> None:
    scenario = Scenario(Net, callbacks=ema, max_epochs=1)
    trainer, _ = scenario.fit(tmp_path, "demo")
    expected = trainer.callback_metrics["val_loss"]
    for callbacks in (ema(), []):
        again = make_trainer(tmp_path, callbacks=callbacks)
        assert scenario.val is not None
        (metrics,) = again.validate(Net(), scenario.val(), ckpt_path="last")
        assert metrics["val_loss"] == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("options", "steps", "epochs"),
    [
        ({}, [0, 1, 2, 3, 4], []),
        ({"update_every_n_steps": 2}, [0, 2, 4], []),
        ({"update_starting_at_step": 3}, [3, 4], []),
        ({"update_every_n_steps": 0, "update_starting_at_epoch": 2}, [], [2, 3, 4]),
        ({"update_every_n_steps": 4, "update_starting_at_epoch": 4}, [0, 4], [4]),
    ],
)
def test_when_it_is_updated(options: Any, steps: list[int], epochs: list[int]) -> None:
    callback = EMAWeightAveraging(**options)
    assert [step for step in range(5) if callback.should_update(step_idx=step)] == steps
    assert [epoch for epoch in range(5) if callback.should_update(epoch_idx=epoch)] == epochs


def test_a_decay_that_is_none_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match=r"decay=1.5"):
        EMAWeightAveraging(decay=1.5)


# -- resumed -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Picture:
    return Scenario(Net, callbacks=ema).picture(tmp_path_factory.mktemp("whole"), "whole")


def test_saved_on_request_while_the_average_is_in_the_model(tmp_path: Path, undisturbed: Picture) -> None:
    scenario = Scenario(Net, callbacks=ema)
    scenario.fit(tmp_path, "demo", At("on_validation_batch_start", 3, send(signal.SIGUSR2)))
    names = sorted(os.listdir(tmp_path / "demo" / "checkpoints"))
    (manual,) = [
        manifest
        for name in names
        if (manifest := read_manifest(str(tmp_path / "demo" / "checkpoints" / name))).reason == "manual"
    ]
    assert (manual.step, manual.exact) == (5, True)
    undisturbed.assert_equal(scenario.picture(tmp_path, "demo", ckpt_path="step:5"))


class BoomError(Exception):
    pass


def boom(_: Any) -> None:
    raise BoomError


@pytest.mark.parametrize(
    ("hook", "nth", "step"),
    [
        ("on_validation_batch_end", 4, 5),
        ("on_train_batch_end", 8, 8),  # it is called before the average's own hook
        ("on_train_batch_start", 8, 7),
        ("on_train_epoch_end", 1, 5),
    ],
)
@pytest.mark.parametrize("options", [{}, {"update_every_n_steps": 3, "update_starting_at_epoch": 0}])
def test_an_exception_leaves_both_of_one_moment(
    tmp_path: Path, hook: str, nth: int, step: int, options: Any
) -> None:
    def callbacks() -> list[Callback]:
        return [EMAWeightAveraging(decay=0.9, **options), OnExceptionCheckpoint()]

    whole = Scenario(Net, callbacks=callbacks).picture(tmp_path, "whole")
    raises = At(hook, nth, boom)
    scenario = Scenario(Net, callbacks=lambda: [raises, *callbacks()])
    with pytest.raises(BoomError):
        scenario.fit(tmp_path, "demo")
    _, manifest = saved(tmp_path)
    assert (manifest.step, manifest.exact) == (step, True)
    whole.assert_equal(Scenario(Net, callbacks=callbacks).picture(tmp_path, "demo"))


def test_without_the_callback_what_was_trained_is_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Scenario(Net).picture(tmp_path, "plain")
    with pytest.raises(KeyboardInterrupt):
        Scenario(Net, callbacks=ema).fit(tmp_path, "demo", At("on_train_batch_end", 7, CTRL_C))
    resumed, _ = Scenario(Net).fit(tmp_path, "demo", ckpt_path="last")
    assert "averaged weights are passed over" in capsys.readouterr().err
    weights = {name: value.clone() for name, value in resumed.lightning_module.state_dict().items()}
    assert_same(plain.state["weights"], weights)


def test_with_the_callback_added_the_average_begins_with_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        Scenario(Net).fit(tmp_path, "demo", At("on_train_batch_end", 7, CTRL_C))
    Scenario(Net, callbacks=ema).fit(tmp_path, "demo", ckpt_path="last")
    assert "has no averaged weights" in capsys.readouterr().err
    state, _ = saved(tmp_path)
    assert state["averaging_state"]["n_averaged"] == 8
