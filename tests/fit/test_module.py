"""What a Module and a DataModule offer beyond their hooks."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_helpers import Tiny, loader, make_trainer

from ckptrun import DataModule, MisconfigurationException, Module
from ckptrun.fit.module import move_to_device


class WithHparams(Module):
    def __init__(self, lr: float, size: int = 3, *extra: int, name: str = "x", **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


class Chosen(Module):
    def __init__(self, lr: float, size: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters("lr")


class Ignoring(Module):
    def __init__(self, lr: float, net: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["net"])


class Mapped(Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters(config, ignore="secret")


class Inherited(WithHparams):
    def __init__(self, depth: int) -> None:
        super().__init__(lr=0.5)
        self.save_hyperparameters()


class Unknown(Module):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters("learning_rate")


def test_hyperparameters() -> None:
    assert WithHparams(0.1, 4, 5, name="y", more=1).hparams == {"lr": 0.1, "size": 4, "name": "y", "more": 1}
    assert Chosen(0.1).hparams == {"lr": 0.1}
    assert Ignoring(0.1).hparams == {"lr": 0.1}
    assert Mapped({"a": 1, "secret": 2}).hparams == {"a": 1}
    with pytest.raises(MisconfigurationException, match=r"'learning_rate'.*it has lr"):
        Unknown(0.1)


def test_hyperparameters_of_a_subclass_add_to_those_of_its_base() -> None:
    assert Inherited(2).hparams["depth"] == 2
    assert Inherited(2).hparams["lr"] == 0.5


def test_hyperparameters_are_attributes() -> None:
    model = Chosen(0.1)
    assert model.hparams.lr == 0.1
    model.hparams.lr = 0.2
    assert model.hparams["lr"] == 0.2
    with pytest.raises(AttributeError, match="no hyperparameter 'size'; there are: lr"):
        _ = model.hparams.size


def test_a_module_without_a_trainer() -> None:
    model = Tiny()
    assert (model.current_epoch, model.global_step, model.automatic_optimization) == (0, 0, True)
    with pytest.raises(RuntimeError, match="not attached"):
        _ = model.trainer


def test_what_a_module_reads_of_its_trainer(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Looks(Tiny):
        def on_train_batch_end(self, *_: Any) -> None:
            if not seen:
                seen.extend(
                    [self.global_step, self.current_epoch, self.device.type, self.dtype, self.logger is not None,
                     len(self.loggers), self.lr_schedulers(), self.optimizers(use_pl_optimizer=False)]
                )  # fmt: skip

    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(Looks(), loader())
    assert seen == [1, 0, "cpu", torch.float32, True, 1, None, trainer.optimizers[0]]


def test_the_trainer_is_no_submodule_and_not_in_the_weights(tmp_path: Path) -> None:
    model = Tiny()
    make_trainer(tmp_path, max_epochs=1).fit(model, loader())
    assert list(model.state_dict()) == ["layers.weight", "layers.bias"]
    assert [name for name, _ in model.named_children()] == ["layers"]


def test_freeze_and_unfreeze() -> None:
    model = Tiny()
    model.freeze()
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.unfreeze()
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_print_on_rank_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Prints(Tiny):
        def on_train_start(self) -> None:
            self.print("here")

    make_trainer(tmp_path, max_epochs=1).fit(Prints(), loader())
    assert "here" in capsys.readouterr().out


Pair = namedtuple("Pair", "x y")


def test_batches_are_moved_whatever_their_shape() -> None:
    device = torch.device("meta")
    batch = {"a": [torch.zeros(1), (torch.zeros(2), "text")], "b": Pair(torch.zeros(3), 5)}
    moved = move_to_device(batch, device)
    assert moved["a"][0].device == moved["a"][1][0].device == moved["b"].x.device == device
    assert (moved["a"][1][1], moved["b"].y, type(moved["b"])) == ("text", 5, Pair)


def test_the_datamodules_transfer_hooks_go_before_the_modules(tmp_path: Path) -> None:
    calls = []

    class Data(DataModule):
        def train_dataloader(self) -> Any:
            return loader()

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append("data")
            return batch

    class Own(Tiny):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append("module")
            return batch

    make_trainer(tmp_path, max_epochs=1).fit(Own(), datamodule=Data())
    assert calls == ["data"] * 5


def test_steps_may_take_the_batch_alone(tmp_path: Path) -> None:
    class Short(Tiny):
        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
            return self.loss(batch)

        def validation_step(self, batch: Any) -> None:  # type: ignore[override]
            self.log("val_loss", self.loss(batch))

    trainer = make_trainer(tmp_path, max_epochs=1)
    trainer.fit(Short(), loader(), loader(8))
    assert "val_loss" in trainer.callback_metrics
