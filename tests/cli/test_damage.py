"""A checkpoint is found damaged when it is loaded: said, set aside, and the next good one taken, or an error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_work
from live_cli import Finished, command_of_cli

Cli = Callable[..., Finished]

TASK = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from ckptrun import Module


class Model(Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).pow(2).mean())

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.net(batch[0]).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=4)

    val_dataloader = test_dataloader = train_dataloader
"""

CONFIG = """\
run: {name: demo}
trainer: {max_steps: 4, num_threads: 1}
model: {class_path: task.Model}
callbacks:
  - class_path: ckptrun.callbacks.ModelCheckpoint
    init_args: {monitor: loss, save_top_k: -1, every_n_train_steps: 1}
"""


@pytest.fixture(scope="module")
def trained_by_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    (folder / "task.py").write_text(TASK)
    (folder / "ckptrun.yaml").write_text(CONFIG)
    command = command_of_cli(("fit",))
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def project(trained_by_steps: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained_by_steps, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def run(project: Path) -> Path:
    """A run with four checkpoints, at the steps 1 to 4."""
    return project / "runs" / "demo"


def names(run: Path) -> list[str]:
    return sorted(os.listdir(run / "checkpoints"))


def spoil(run: Path, name: str, file: str = "state.ckpt") -> None:
    """Change one byte in the middle."""
    with open(run / "checkpoints" / name / file, "r+b") as handle:
        handle.seek(os.path.getsize(handle.name) // 2)
        byte = handle.read(1)[0]
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte ^ 1]))


def ledger(run: Path, event: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "attempts.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


def quarantined(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "registry.json").read_text())["quarantine"]
    return found


def test_keyword_references_take_the_next_good_one(project: Path, run: Path, run_cli: Cli) -> None:
    first, second, third, fourth = names(run)
    spoil(run, fourth)
    spoil(run, third, "rank-0000.ckpt")
    done = run_cli("fit", "--ckpt", "last", "trainer.max_steps=6", cwd=project)
    assert done.code == 0, done
    told = [line for line in done.stderr.splitlines() if "in two reads" in line]
    assert [name in line for line, name in zip(told, (fourth, third), strict=True)] == [True, True]
    assert "ckptrun verify" in told[0]
    assert done.stderr.count(f"ckptrun verify {run}/checkpoints/{third}") == 1
    assert "xxh3_64" not in done.stderr
    assert f"step 2 from {run}/checkpoints/{second}" in done.stderr
    notes = quarantined(run)
    assert set(notes) == {third, fourth}
    assert notes[fourth]["file"] == "state.ckpt"
    assert notes[third]["file"] == "rank-0000.ckpt"
    assert notes[third]["expected"].startswith("xxh3_64:")
    assert notes[third]["found"].startswith("xxh3_64:")
    starts, ends = ledger(run, "start"), ledger(run, "end")
    assert [os.path.basename(start["resolved"] or "") for start in starts] == ["", fourth, third, second]
    assert [end["exit_code"] for end in ends] == [0, 3, 3, 0]
    assert "DamagedCheckpointError" in ends[1]["error"]
    assert "found the checksum" in ends[1]["error"]
    assert {first, second, third, fourth} <= set(names(run)), "what is in quarantine stays on the disk"

    explained = run_cli("resolve", "--ckpt", "last", "--all", "--json", cwd=project).document
    whys = {os.path.basename(each["path"]): each["why"] for each in explained["candidates"]}
    assert "abandoned" in whys[fourth] or "quarantined" in whys[fourth] or "not needed" in whys[fourth]


def test_one_that_was_asked_for_exactly_is_an_error(project: Path, run: Path, run_cli: Cli) -> None:
    _, second, third, _ = names(run)
    spoil(run, third)
    third_path = f"{run}/checkpoints/{third}"
    for reference in ("step:3", third_path):
        done = run_cli("fit", "--ckpt", reference, "trainer.max_steps=6", cwd=project)
        assert done.code == 3, done
        assert "cannot be used" in done.stderr
        assert "wrong checksum" in done.stderr
        assert "nearest good one" in done.stderr
        assert f"{run}/checkpoints/" in done.stderr.partition("hint:")[2]
    # Another run's is not this run's to judge.
    elsewhere = project / "copy" / third
    shutil.copytree(third_path, elsewhere)
    shutil.copytree(f"{run}/checkpoints/{second}", project / "copy" / second)
    done = run_cli("fit", "--run", "other", "--ckpt", elsewhere, "trainer.max_steps=6", cwd=project)
    assert done.code == 3, done
    assert f"{project}/copy/{second}" in done.stderr
    registry = project / "runs" / "other" / "registry.json"
    assert not registry.exists() or not json.loads(registry.read_text())["quarantine"]


def test_an_evaluation_chooses_again(project: Path, run: Path, run_cli: Cli) -> None:
    best = json.loads((run / "registry.json").read_text())["callbacks"][0]["best"]
    others = [name for name in names(run) if name != best]
    spoil(run, best)
    done = run_cli("test", cwd=project)
    assert done.code == 3, done
    assert "--allow-fallback" in done.stderr
    assert set(quarantined(run)) == {best}
    done = run_cli("test", "--allow-fallback", cwd=project)
    assert done.code == 0, done
    newest = others[-1]
    spoil(run, newest)
    done = run_cli("validate", "--ckpt", "last", "--json", cwd=project)
    assert done.code == 0, done
    assert set(quarantined(run)) == {best, newest}
    assert os.path.basename(done.document["resolution"]["path"]) not in (best, newest)
    assert done.document["eval_dir"] == str(run / "evals" / "0004-validate")
    assert json.loads((run / "evals" / "0003-validate" / "eval.json").read_text())["ended_at"] is not None
    assert len(ledger(run, "start")) == 1, "an evaluation is no attempt"


def test_an_io_error_is_no_damage(project: Path, run: Path, run_cli: Cli) -> None:
    done = run_cli(
        "fit", "--ckpt", "last", "trainer.max_steps=6",
        cwd=project, env={"CKPTRUN_FAULT": "state:read:1+=raise:EIO"},
    )  # fmt: skip
    assert done.code == 3, done
    assert "could not be read" in done.stderr
    assert "It may be whole" in done.stderr
    assert quarantined(run) == {}
    assert len(ledger(run, "start")) == 2


def test_one_rank_of_two_finds_its_file_damaged(in_tmp_path: Path, run_cli: Cli) -> None:
    shutil.copy(rank_work.__file__, in_tmp_path / "rank_work.py")
    config = CONFIG.replace("task.", "rank_work.").replace("monitor: loss, ", "")
    more = "data: {class_path: rank_work.Data}\nlaunch: {nproc: 2}\n"
    (in_tmp_path / "ckptrun.yaml").write_text(config + more)
    done = run_cli("fit")
    assert done.code == 0, done
    run = in_tmp_path / "runs" / "demo"
    *_, third, fourth = names(run)
    spoil(run, fourth, "rank-0001.ckpt")
    done = run_cli("fit", "--ckpt", "last", "trainer.max_steps=6")
    assert done.code == 0, done
    assert quarantined(run)[fourth]["file"] == "rank-0001.ckpt"
    assert [os.path.basename(start["resolved"] or "") for start in ledger(run, "start")] == [
        "",
        fourth,
        third,
    ]
    assert "rank-0001.ckpt" in ledger(run, "end")[1]["error"]
