"""What is in a checkpoint's files, and what is told where one does not fit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_helpers import CTRL_C, At, Tiny, loader, make_trainer
from torch import nn

from ckptrun import Callback, DataModule
from ckptrun.callbacks import OnExceptionCheckpoint
from ckptrun.checkpoint.manifest import read_manifest
from ckptrun.errors import DamagedCheckpointError, IncompatibleError, NoCheckpointError
from ckptrun.fit.capture import epoch_of, rank_file, read_checkpoint, read_init_weights


class Counts(DataModule):
    """Has state of its own, and hyperparameters."""

    def __init__(self, size: int = 20) -> None:
        self.save_hyperparameters()
        self.given = 0

    def train_dataloader(self) -> Any:
        self.given += 1
        return loader(self.hparams.size)

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.given = state_dict["given"] + 100


def fit(
    root: Path, model: Any = None, *, ckpt_path: str | None = None, data: Any = None, **options: Any
) -> Any:
    trainer = make_trainer(root, **options)
    if data is None:
        trainer.fit(model or Tiny(), loader(), ckpt_path=ckpt_path)
    else:
        trainer.fit(model or Tiny(), datamodule=data, ckpt_path=ckpt_path)
    return trainer


def newest(root: Path) -> Path:
    folder = root / "demo" / "checkpoints"
    return folder / max(os.listdir(folder))


def state_of(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path / "state.ckpt", weights_only=True)
    return state


def test_the_datamodule_is_in_it_by_its_name_and_comes_back(tmp_path: Path) -> None:
    fit(tmp_path, data=Counts(), max_epochs=1)
    state = state_of(newest(tmp_path))
    assert state["Counts"] == {"given": 1}
    assert state["datamodule_hyper_parameters"] == {"size": 20}
    data = Counts()
    fit(tmp_path, data=data, ckpt_path="last")
    assert data.given == 101


def test_restoring_comes_in_the_documented_order(tmp_path: Path) -> None:
    calls: list[str] = []

    class Speaks(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"x": 1}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            calls.append("callback.load_state_dict")

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            calls.append(f"callback.on_load_checkpoint, {'weights' in pl_module.loaded}")

    class Model(Tiny):
        loaded = ""

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            calls.append("module.on_load_checkpoint")

        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("weights")
            self.loaded = "weights"
            return super().load_state_dict(*args, **kwargs)

        def configure_optimizers(self) -> Any:
            calls.append("configure_optimizers")
            optimizer = super().configure_optimizers()
            load = optimizer.load_state_dict
            optimizer.load_state_dict = lambda state: (calls.append("optimizer"), load(state))
            return optimizer

    class Data(Counts):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            calls.append("datamodule")

    fit(tmp_path, Model(), data=Data(), max_epochs=1, callbacks=[Speaks()])
    calls.clear()
    fit(tmp_path, Model(), data=Data(), ckpt_path="last", callbacks=[Speaks()])
    assert calls == [
        "callback.on_load_checkpoint, False", "module.on_load_checkpoint", "weights", "datamodule",
        "configure_optimizers", "callback.load_state_dict", "optimizer",
    ]  # fmt: skip


def test_evaluation_restores_weights_and_datamodule_only(tmp_path: Path) -> None:
    class Model(Tiny):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("w", self.layers.weight.sum())

    trained = Model()
    fit(tmp_path, trained, max_epochs=1)
    (found,) = make_trainer(tmp_path).test(Model(), loader(8), ckpt_path="last", verbose=False)
    assert found["w"] == pytest.approx(float(trained.layers.weight.detach().sum()))


def test_callbacks_that_are_gone_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Gone(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"x": 1}

    fit(tmp_path, callbacks=[Gone()], max_epochs=1)
    fit(tmp_path, ckpt_path="last")
    assert "state of callbacks that are not set now, which is passed over" in capsys.readouterr().err


def test_another_number_of_threads_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    fit(tmp_path, max_epochs=1)
    try:
        fit(tmp_path, ckpt_path="last", num_threads=threads + 1)
    finally:
        torch.set_num_threads(threads)
    before = "1 thread" if threads == 1 else f"{threads} threads"
    assert f"with {before} per rank and there are {threads + 1} now" in capsys.readouterr().err


def test_another_kind_of_loader_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, callbacks=[At("on_train_batch_end", 2, CTRL_C)])
    trainer = make_trainer(tmp_path)
    trainer.fit(Tiny(), list(loader(shuffle=False)), ckpt_path="last")
    assert "was 'indexed' when the checkpoint was written and is 'sequence' now" in capsys.readouterr().err
    assert trainer.global_step == 15


def test_optimizers_and_schedulers_that_do_not_fit(tmp_path: Path) -> None:
    class Frozen(Tiny):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam([self.layers.weight], lr=0.1)

    class Without(Tiny):
        def configure_optimizers(self) -> Any:
            return None

    fit(tmp_path, max_epochs=1)
    for model, message in (
        (Frozen(), r"had 2 parameters and has 1 now: layers\.weight"),
        (Without(), "the state of 1 optimizers; configure_optimizers returned 0"),
        (Tiny(scheduler="step"), "the state of 0 LR schedulers; configure_optimizers returned 1"),
    ):
        with pytest.raises(IncompatibleError, match=message):
            fit(tmp_path, model, ckpt_path="last")


def test_what_was_restored_by_half_is_not_saved(tmp_path: Path) -> None:
    class Other(Tiny):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam([self.layers.weight], lr=0.1)

    fit(tmp_path, max_epochs=1)
    before = os.listdir(tmp_path / "demo" / "checkpoints")
    with pytest.raises(IncompatibleError):
        fit(tmp_path, Other(), ckpt_path="last", callbacks=[OnExceptionCheckpoint()])
    assert os.listdir(tmp_path / "demo" / "checkpoints") == before


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start"])
def test_a_stop_before_the_first_step_from_another_runs_checkpoint_saves_nothing(
    tmp_path: Path, hook: str
) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, callbacks=[At("on_train_batch_end", 2, CTRL_C)])
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, run="other", callbacks=[At(hook, 1, CTRL_C)], ckpt_path=str(newest(tmp_path)))
    assert os.listdir(tmp_path / "other" / "checkpoints") == []
    trainer = fit(tmp_path, run="other", ckpt_path=str(newest(tmp_path)))
    assert trainer.global_step == 15


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    fit(tmp_path, max_epochs=1)
    path = newest(tmp_path)
    state = path / "state.ckpt"
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(data)
    with pytest.raises(NoCheckpointError, match=r"state\.ckpt is damaged"):
        fit(tmp_path, ckpt_path="last")


def test_one_file_of_a_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, max_epochs=1)
    path = newest(tmp_path)
    record = read_manifest(str(path)).to_record(str(path))
    assert read_checkpoint(record, rank_file(0))["rank"] == 0
    with pytest.raises(DamagedCheckpointError, match=r"lists no rank-0001\.ckpt"):
        read_checkpoint(record, rank_file(1))


def test_init_from(tmp_path: Path) -> None:
    model = Tiny()
    fit(tmp_path, model, max_epochs=1)
    weights = read_init_weights(str(newest(tmp_path)))
    assert torch.equal(weights["layers.weight"], model.layers.weight)
    plain, nested, none = (str(tmp_path / name) for name in ("plain.pt", "nested.pt", "none.pt"))
    torch.save({"w": torch.ones(2)}, plain)
    torch.save({"state_dict": {"w": torch.ones(2)}, "epoch": 3}, nested)
    torch.save({"epoch": 3}, none)
    assert list(read_init_weights(plain)) == list(read_init_weights(nested)) == ["w"]
    with pytest.raises(DamagedCheckpointError, match="found no weights"):
        read_init_weights(none)
    with pytest.raises(NoCheckpointError, match="no such file"):
        read_init_weights(str(tmp_path / "gone"))
    with pytest.raises(NoCheckpointError, match=r"without manifest\.json"):
        read_init_weights(str(tmp_path))


@pytest.mark.parametrize(
    ("epoch", "point", "expected"), [(0, "start", 0), (2, "start", 1), (2, "batch", 2), (2, "validated", 2)]
)
def test_a_boundary_between_epochs_belongs_to_the_one_that_ended(
    epoch: int, point: str, expected: int
) -> None:
    assert epoch_of({"epoch": epoch, "point": point}) == expected


def test_every_save_of_an_epochs_end_names_the_same_epoch(tmp_path: Path) -> None:
    """Whoever asked for it: a callback at the end of epoch 0, or the end of training just after it."""
    fit(tmp_path, max_epochs=1)
    assert read_manifest(str(newest(tmp_path))).epoch == 0
    fit(tmp_path, run="other", max_epochs=1, enable_checkpointing=False)
    folder = tmp_path / "other" / "checkpoints"
    assert read_manifest(str(folder / os.listdir(folder)[0])).epoch == 0


def test_buffers_are_those_of_the_boundary(tmp_path: Path) -> None:
    """A stop in a validation, which a careless hook uses to change a buffer."""

    class Careless(Tiny):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Linear(4, 2)))
            self.register_buffer("count", torch.zeros(()))

        def on_validation_batch_start(self, *_: Any) -> None:
            if not self.trainer.sanity_checking:
                self.count += 1

    trainer = make_trainer(tmp_path, callbacks=[At("on_validation_batch_end", 3, CTRL_C)])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Careless(), loader(), loader(8, shuffle=False))
    assert float(state_of(newest(tmp_path))["state_dict"]["count"]) == 0
