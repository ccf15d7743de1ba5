"""An evaluation beside a fit that deletes: what it reads is marked before anything slow, and chosen anew if it went."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptrun import Module, Trainer
from ckptrun.callbacks import ModelCheckpoint
from ckptrun.errors import NoCheckpointError
from ckptrun.run.evals import begin_eval, in_use
from ckptrun.run.folder import RunFolder
from ckptrun.run.registry import Registry
from ckptrun.session import evaluate as story_of_evaluation
from ckptrun.session import ranks


class Model(Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.linear(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.linear(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


BATCHES = [torch.ones(2, 3) for _ in range(4)]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    keep = ModelCheckpoint(save_top_k=-1, every_n_train_steps=1)
    trainer = Trainer(
        root=tmp_path, max_epochs=1, callbacks=[keep], logger=False, enable_progress_bar=False, seed=1
    )
    trainer.fit(Model(), BATCHES)
    return RunFolder.at(str(tmp_path), "default")


def evaluate(folder: RunFolder) -> Any:
    trainer = Trainer(root=folder.root, max_epochs=1, logger=False, enable_progress_bar=False)
    trainer.validate(Model(), BATCHES, ckpt_path="last", verbose=False)
    return trainer.resolution


def test_a_checkpoint_that_went_after_the_choice_is_chosen_anew(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone: list[str] = []

    def late(run: RunFolder, fn: str, checkpoint: str | None) -> Any:
        if not gone and checkpoint is not None:
            gone.append(checkpoint)
            shutil.rmtree(checkpoint)  # what retention does between the choice and the mark
        return begin_eval(run, fn, checkpoint)

    monkeypatch.setattr(story_of_evaluation, "begin_eval", late)
    with pytest.warns(UserWarning, match="gone from the disk"):
        resolution = evaluate(folder)
    assert resolution.step == 3
    assert gone == [f"{folder.checkpoints_dir}/00000004-step-00000004"]
    assert len(list(Path(folder.evals_dir).iterdir())) == 1


def test_one_that_always_goes_is_an_error_and_no_traceback(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(run: RunFolder, fn: str, checkpoint: str | None) -> Any:
        assert checkpoint is not None
        shutil.rmtree(checkpoint)
        return begin_eval(run, fn, checkpoint)

    monkeypatch.setattr(story_of_evaluation, "begin_eval", late)
    with pytest.raises(NoCheckpointError):
        evaluate(folder)


def test_one_that_is_damaged_is_set_aside_and_no_rank_is_forked_in_one_process(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = Path(folder.checkpoints_dir) / "00000004-step-00000004"
    whole = (newest / "state.ckpt").read_bytes()
    (newest / "state.ckpt").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    monkeypatch.setattr(ranks, "take", lambda *_, **__: pytest.fail("there is no use for a fork server"))
    with pytest.warns(UserWarning, match="quarantined"):
        assert evaluate(folder).step == 3
    assert set(Registry.load(folder.registry).quarantine) == {newest.name}


def test_it_is_marked_before_the_model_is_loaded(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[str]] = []
    original = Model.setup

    def setup(self: Model, stage: str) -> None:
        seen.append(in_use(folder))
        original(self, stage)

    monkeypatch.setattr(Model, "setup", setup)
    resolution = evaluate(folder)
    assert seen == [{resolution.path}]
    assert in_use(folder) == set()
