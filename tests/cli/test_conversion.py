"""What happens to a run while its checkpoint is converted for another number of ranks, and where that fails."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptrun.checkpoint import commit
from ckptrun.launch.spawned import argv_for
from ckptrun.processes import descendants

pytestmark = pytest.mark.deepspeed

CONFIG = """\
run: {name: demo}
trainer: {max_steps: 4, num_threads: 1, limit_val_batches: 0}
strategy: {name: deepspeed, stage: 1}
launch: {nproc: 2}
model: {class_path: task.Model}
callbacks:
  - {class_path: ckptrun.callbacks.ModelCheckpoint, init_args: {every_n_train_steps: 2, save_top_k: -1}}
"""
TASK = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

from ckptrun import Module


class Model(Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def train_dataloader(self):
        x = torch.arange(64.0).view(32, 2) / 64
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4 // self.trainer.world_size)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.1)
"""
FIT = ("fit", "-c", "demo.yaml", "--ckpt", "last")
ALONE = (*FIT, "--nproc", "1", "trainer.max_steps=6")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained") / "project"


@pytest.fixture
def project(made: Path, run_cli: Callable[..., Any], tmp_path: Path) -> Path:
    """A run of 4 steps by two ranks, with a checkpoint at steps 2 and 4."""
    if not made.exists():
        made.mkdir()
        (made / "demo.yaml").write_text(CONFIG)
        (made / "task.py").write_text(TASK)
        done = run_cli(*FIT, cwd=made)
        assert done.code == 0, done
    copied = tmp_path / "project"
    shutil.copytree(made, copied)
    return copied


def names(project: Path) -> list[str]:
    return sorted(path.name for path in (project / "runs/demo/checkpoints").iterdir())


def test_a_damaged_one_is_quarantined_and_the_one_before_converted(
    project: Path, run_cli: Callable[..., Any]
) -> None:
    *_, before, newest = names(project)
    (shard,) = (project / "runs/demo/checkpoints" / newest).glob("global_step4/*rank_1*optim_states.pt")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    done = run_cli(*ALONE, cwd=project)
    assert done.code == 0, done
    registry = json.loads((project / "runs/demo/registry.json").read_text())
    assert list(registry["quarantine"]) == [newest]
    assert f"{before} was written by 2 ranks" in done.stderr
    assert any(name.endswith("step-00000002-universal") for name in names(project))


def test_the_run_is_live_while_it_is_converted(
    project: Path, start_cli: Callable[..., Any], run_cli: Callable[..., Any]
) -> None:
    """The lease beats, status and requests are served, and a stop ends the conversion without a trace of it."""
    before = names(project)
    live = start_cli(*ALONE, cwd=project)

    def converter() -> int | None:
        for process in descendants(live.pid):
            try:
                if b"universal_convert" in Path(f"/proc/{process.pid}/cmdline").read_bytes():
                    os.kill(process.pid, signal.SIGSTOP)  # stands for a model of some size
                    return process.pid
            except (FileNotFoundError, ProcessLookupError):
                continue
        return None

    def counter() -> int:
        return int(json.loads((project / "runs/demo/lease.json").read_text())["counter"])

    live.wait_for(converter, what="the converter works")
    first = counter()
    live.wait_for(lambda: counter() > first, what="the lease beats")
    assert live.status("demo")["status"] == "INITIALIZING"
    stopped = run_cli("stop", "demo", cwd=project)
    assert stopped.code == 0, stopped
    done = live.wait()
    assert done.code == 143, done
    assert names(project) == before
    again = run_cli(*ALONE, cwd=project)
    assert again.code == 0, again


class Touches:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_in_a_shard_is_not_run(project: Path, tmp_path: Path) -> None:
    folder = project / "runs/demo/checkpoints" / names(project)[-1] / "global_step4"
    (shard,) = folder.glob("*rank_1*optim_states.pt")
    state = torch.load(shard, weights_only=False)
    torch.save({**state, "more": Touches(tmp_path / "touched")}, shard)
    target = tmp_path / "made"
    command = argv_for("ckptrun.launch.universal_convert", folder, target, os.getpid())
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Weights only load failed" in done.stderr
    assert not (tmp_path / "touched").exists()


def test_the_converter_ends_with_who_started_it(tmp_path: Path) -> None:
    somebody_else = os.getppid()
    command = argv_for("ckptrun.launch.universal_convert", tmp_path, tmp_path / "made", somebody_else)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


def test_it_is_told_beforehand_and_exact_refuses_it(project: Path, run_cli: Callable[..., Any]) -> None:
    before, newest = names(project), names(project)[-1]
    shown = run_cli(*ALONE, "--dry-run", cwd=project)
    assert shown.code == 0, shown
    said = f"{newest} was written by 2 ranks in ZeRO stage 1; now there is 1 rank in stage 1"
    assert f"{said}: it will be converted to DeepSpeed's universal format" in shown.stdout + shown.stderr
    refused = run_cli(*ALONE, "--exact", cwd=project)
    assert refused.code == 5
    assert f"--exact: {said}" in refused.stderr
    assert names(project) == before


def test_weights_whose_shard_is_missing_are_refused_before_the_ranks_start(
    project: Path, run_cli: Callable[..., Any]
) -> None:
    folder = project / "runs/demo/checkpoints" / names(project)[-1]
    (shard,) = folder.glob("global_step4/*rank_1*optim_states.pt")
    shard.unlink()
    begin = ("fit", "-c", "demo.yaml", "--run", "other", "--ckpt", "none", "--init-from", str(folder))
    refused = run_cli(*begin, cwd=project)
    assert refused.code == 3, refused
    assert f"a checkpoint of DeepSpeed that lacks its file global_step4/{shard.name}" in refused.stderr
    assert not (project / "runs/other").exists()
    refused = run_cli(*FIT[:-1], str(shard), cwd=project)
    assert refused.code == 3
    assert "there is no such file or folder" in refused.stderr


def test_a_disk_without_room_is_told_before_anything_is_made(
    project: Path, run_cli: Callable[..., Any]
) -> None:
    before = names(project)
    code = (
        "import sys\nfrom ckptrun.checkpoint import commit\ncommit.free_bytes = lambda _: 1000\n"
        "from ckptrun.__main__ import main\nsys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *ALONE],
        cwd=project, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 1, done
    assert "-step-00000004-universal needs about" in done.stderr
    assert "1.0 kB are free" in done.stderr
    assert names(project) == before
    assert commit.free_bytes(str(project)) > 1000


def test_a_folder_that_cannot_be_written_is_one_error(project: Path) -> None:
    """The conversion's own folder cannot be made: nothing has begun, and the run says so."""
    before = (project / "runs/demo/attempts.jsonl").read_text()
    code = (
        "import errno, sys\nfrom ckptrun.launch import universal\n"
        "def fails(*_): raise OSError(errno.EROFS, 'Read-only file system')\n"
        "universal.scratch_folder = fails\nfrom ckptrun.__main__ import main\nsys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *ALONE],
        cwd=project, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 2, done
    assert "cannot be written: Read-only file system" in done.stderr
    assert "internal error" not in done.stderr
    assert (project / "runs/demo/attempts.jsonl").read_text() == before
    status = json.loads((project / "runs/demo/status.json").read_text())
    assert status["status"] == "FINISHED"
