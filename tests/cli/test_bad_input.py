"""What wrong input gets: one clear message, its exit code, nothing damaged, and no traceback of ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TASK = '''
import time
from pathlib import Path

import torch
from ckptrun import DataModule, Module

STEPS = 12


class Batches(DataModule):
    def train_dataloader(self):
        return [torch.ones(2, 200) for _ in range(STEPS)]


class Model(Module):
    def __init__(self, width: int = 200):
        super().__init__()
        self.net = torch.nn.Linear(200, width)  # 160 kB, and twice that in Adam's state

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

    def training_step(self, batch, batch_idx):
        while self.global_step == 1 and Path("wait").exists():
            Path("waiting").touch()
            time.sleep(0.002)
        if self.global_step == 5 and Path("fill").exists():
            self.trainer.checkpoints.settle()
            fill()
        return self.net(batch).pow(2).mean()


def fill():
    """Leave not a byte on the disk of the runs."""
    try:
        with open("runs/filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        pass


class Broken(Module):
    def __init__(self):
        raise KeyError("the user's own mistake")
'''
CONFIG = """\
run: {name: demo}
trainer: {max_epochs: 1, num_threads: 1}
model: {class_path: task.Model}
data: {class_path: task.Batches}
callbacks:
  - class_path: ckptrun.callbacks.ModelCheckpoint
    init_args: {every_n_train_steps: 2, save_top_k: -1}
"""
FIT = ("fit", "-c", "demo.yaml", "--ckpt", "last")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "demo.yaml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def refused(run_cli: Callable[..., Any], tmp_path: Path) -> Callable[..., str]:
    """Run a command that must be refused with one error and without a trace; returns what it said."""

    def refuse(code: int, *args: str, traceback: bool = False) -> str:
        before = tree(tmp_path)
        done = run_cli(*args)
        assert done.code == code, done
        assert done.stdout == ""
        assert done.stderr.count("ckptrun: error: ") == 1, done
        assert ("Traceback" in done.stderr) is traceback, done
        assert tree(tmp_path) == before, done
        return str(done.stderr)

    return refuse


def tree(folder: Path) -> dict[str, bytes | None]:
    """All that there is but bytecode and what a refused start may leave: a lease that was given back."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and "__pycache__" not in path.parts
        and path.name not in ("lease.json", ".lease.lock")
    }


# --- the config -----------------------------------------------------------------------------------


def test_a_config_that_is_missing(refused: Callable[..., str]) -> None:
    said = refused(2, "fit", "-c", "nowhere.yaml")
    assert "nowhere.yaml" in said
    said = refused(2, "fit")
    assert "ckptrun init" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["demo.yaml", "model"]),
        ("model: [unclosed", ["demo.yaml:2:1: this is not YAML"]),
        ("- a\n- b\n", ["demo.yaml:1", "found a list"]),
        (CONFIG.replace("max_epochs", "max_epoch"), ["demo.yaml:2", "max_epoch'", "trainer.max_epochs"]),
        (CONFIG.replace("max_epochs: 1", "max_epochs: one"), ["demo.yaml:2", "trainer.max_epochs", "'one'"]),
        (CONFIG.replace("trainer: {", "trainers: {"), ["demo.yaml:2", "'trainers", "trainer"]),
    ],
    ids=["empty", "not YAML", "a list", "wrong key", "wrong type", "wrong section"],
)
def test_a_config_that_is_wrong(
    text: str, words: list[str], project: Path, refused: Callable[..., str]
) -> None:
    (project / "demo.yaml").write_text(text)
    said = refused(2, *FIT)
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.class_path=task.Modell", ["task", "Modell", "task.Model?"]),
        ("model.class_path=taks.Model", ["taks"]),
        ("model.init_args.widht=3", ["widht", "width"]),
        ("model.init_args.width=wide", ["width", "wide"]),
    ],
    ids=["class", "module", "argument", "argument's type"],
)
def test_a_class_that_is_not_there(
    override: str, words: list[str], project: Path, refused: Callable[..., str]
) -> None:
    said = refused(2, *FIT, override)
    for word in words:
        assert word in said


def test_a_module_whose_import_fails(project: Path, refused: Callable[..., str]) -> None:
    (project / "task.py").write_text("import torch\n\nimport no_such_library\n")
    said = refused(1, *FIT, traceback=True)
    assert "task.py" in said
    assert "No module named 'no_such_library'" in said
    assert "ckptrun/cli" not in said


def test_a_class_that_raises_when_it_is_built(project: Path, refused: Callable[..., str]) -> None:
    said = refused(1, *FIT, "model.class_path=task.Broken", traceback=True)
    assert "the user's own mistake" in said
    assert "task.py" in said


# --- the checkpoint -------------------------------------------------------------------------------


def test_a_reference_that_leads_nowhere(
    project: Path, refused: Callable[..., str], run_cli: Callable[..., Any]
) -> None:
    fitted = run_cli(*FIT, "trainer.max_steps=4")
    assert fitted.code == 0, fitted
    checkpoints = sorted((project / "runs/demo/checkpoints").iterdir())
    (project / "notes.txt").write_text("no checkpoint")
    half = project / "half" / checkpoints[0].name
    shutil.copytree(checkpoints[0], half)
    (half / "manifest.json").unlink()
    for reference, code, words in (
        (f"{checkpoints[0]}x", 3, [checkpoints[0].name, "no such file or folder"]),
        (str(half), 3, ["manifest.json"]),
        ("notes.txt", 3, ["notes.txt", "13 bytes"]),
        ("step:99", 3, ["99"]),
        ("lsat", 3, ["lsat", "last"]),
        ("step:two", 2, ["step:two"]),
    ):
        for fn in ("fit", "test"):
            said = refused(code, fn, "-c", "demo.yaml", "--ckpt", reference)
            for word in words:
                assert word in said


# --- the folder and the disk ----------------------------------------------------------------------


@pytest.fixture
def mounted(project: Path) -> Iterator[Callable[..., Path]]:
    """``mounted("size=3m")``: a small disk of its own at ``runs``; skips where none can be mounted."""
    target = project / "runs"

    def mount(options: str) -> Path:
        target.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "ckptrun-test", str(target)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
        return target

    yield mount
    if os.path.ismount(target):
        subprocess.run(["umount", str(target)], check=True)


def test_a_folder_that_cannot_be_written(
    project: Path, mounted: Callable[..., Path], refused: Callable[..., str]
) -> None:
    mounted("ro")
    said = refused(2, *FIT)
    assert "runs/demo cannot be written: Read-only file system" in said
    assert "--root" in said


def test_a_file_in_the_place_of_the_folder(project: Path, refused: Callable[..., str]) -> None:
    (project / "runs").write_text("a file")
    said = refused(3, *FIT)  # an error of the disk is never "no checkpoints"
    assert str(project / "runs") in said
    assert "Not a directory" in said
    (project / "runs").unlink()
    (project / "runs").mkdir()
    (project / "runs/demo").write_text("a file")
    said = refused(3, *FIT)
    assert str(project / "runs/demo") in said


def steps_saved(run: Path) -> list[int]:
    return sorted(json.loads(path.read_text())["step"] for path in run.glob("checkpoints/*/manifest.json"))


@pytest.mark.parametrize("policy", ["retry", "warn", "stop"])
def test_a_disk_that_is_full(
    policy: str, project: Path, mounted: Callable[..., Path], run_cli: Callable[..., Any]
) -> None:
    disk = mounted("size=2m")
    full = run_cli(*FIT, f"run.on_save_error={policy}")
    assert full.code == 1, full
    assert "Traceback" not in full.stderr
    assert "No space left on device" in full.stderr
    assert "The earlier checkpoints are untouched" in full.stderr
    saved = steps_saved(disk / "demo")
    assert saved
    assert saved == list(range(2, saved[-1] + 1, 2))
    assert saved[-1] < 12
    status = run_cli("status", "demo", "--json").document
    if policy == "stop":
        # At the next boundary, and at the next save at the latest.
        assert status["status"] == "INTERRUPTED"
        assert saved[-1] + 2 <= status["step"] <= saved[-1] + 4
    else:
        assert "the last save failed, and none after it succeeded: Checkpoint" in full.stderr
        assert (status["status"], status["step"]) == ("FINISHED", 12)
        assert ("Trying again" in full.stderr) is (policy == "retry")
    assert status["exit_code"] == 1
    assert status["checkpoint"].endswith(f"step-{saved[-1]:08d}")
    left = [path.name for path in (disk / "demo/checkpoints").iterdir() if path.name.startswith(".")]
    assert left == []
    # With room, the same line goes on.
    subprocess.run(["mount", "-o", "remount,size=30m", str(disk)], check=True)
    again = run_cli(*FIT)
    assert again.code == 0, again
    assert f"step {saved[-1]} from" in again.stderr
    assert steps_saved(disk / "demo") == [2, 4, 6, 8, 10, 12]


def test_a_disk_without_a_byte(
    project: Path, mounted: Callable[..., Path], run_cli: Callable[..., Any]
) -> None:
    disk = mounted("size=3m")
    (project / "fill").touch()
    full = run_cli(*FIT, "run.on_save_error=warn")
    assert full.code == 1, full
    assert "Traceback" not in full.stderr
    assert "internal error" not in full.stderr
    assert "No space left on device" in full.stderr
    assert steps_saved(disk / "demo") == [2, 4]
    (disk / "filler").unlink()
    (project / "fill").unlink()
    subprocess.run(["mount", "-o", "remount,size=30m", str(disk)], check=True)
    again = run_cli(*FIT)
    assert again.code == 0, again
    assert "step 4 from" in again.stderr


# --- two at once ----------------------------------------------------------------------------------


def test_a_second_fit_of_the_same_run(
    project: Path, start_cli: Callable[..., Any], refused: Callable[..., str]
) -> None:
    (project / "wait").touch()
    first = start_cli(*FIT)
    first.wait_for((project / "waiting").exists, what="it reached step 1")
    lease = json.loads((project / "runs/demo/lease.json").read_text())["holder"]
    assert lease["pid"] == first.pid
    for args in (FIT, ("resolve", *FIT[1:]), (*FIT[:3], "--ckpt", "none")):
        done = start_cli(*args).wait()
        assert done.code == 4, done
        assert f"process {first.pid} on {lease['host']}" in done.stderr
        assert "ckptrun stop" in done.stderr
        assert "Traceback" not in done.stderr
    (project / "wait").unlink()
    done = first.wait()
    assert done.code == 0, done
    assert steps_saved(project / "runs/demo") == [2, 4, 6, 8, 10, 12]
