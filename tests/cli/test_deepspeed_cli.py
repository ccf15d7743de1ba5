"""A run under DeepSpeed from the command line: what is told of its checkpoints, paths to them, and its first use."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_cli import Live, wait_until_true

from ckptrun.config.load import load_config
from ckptrun.config.support import check_supported
from ckptrun.errors import ConfigError

pytestmark = pytest.mark.deepspeed

CONFIG = """\
run: {name: demo}
trainer: {max_steps: 4, num_threads: 1, limit_val_batches: 0}
strategy: {name: deepspeed, stage: 3}
launch: {nproc: 2}
model: {class_path: task.Model}
data: {class_path: task.Data}
"""
TASK = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

from ckptrun import DataModule, Module


class Data(DataModule):
    def train_dataloader(self):
        x = torch.arange(64.0).view(32, 2) / 64
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 2)


class Model(Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.1)
"""
FIT = ("fit", "-c", "demo.yaml")


def make_project(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "demo.yaml").write_text(CONFIG)
    (folder / "task.py").write_text(TASK)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path / "project")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"": tmp_path_factory.mktemp("trained")}


@pytest.fixture
def trained(made: dict[str, Path], run_cli: Callable[..., Any]) -> Path:
    """A project with a run of 4 steps in stage 3, made once; not to be altered."""
    if "trained" not in made:
        folder = make_project(made[""] / "project")
        done = run_cli(*FIT, cwd=folder)
        assert done.code == 0, done
        made["trained"] = folder
    return made["trained"]


def newest(project: Path) -> Path:
    return max((project / "runs/demo/checkpoints").iterdir())


def test_inspect_and_status_tell_of_stage_ranks_and_shards(
    trained: Path, run_cli: Callable[..., Any]
) -> None:
    folder = newest(trained)
    shown = run_cli("inspect", str(folder), cwd=trained).stdout
    assert "ZeRO stage 3, 2 ranks, 4 files in global_step4" in shown
    assert any(line.split() == ["resumable", "yes"] for line in shown.splitlines())
    told = run_cli("inspect", str(folder), "--json", cwd=trained).document["deepspeed"]
    size_bytes = sum(path.stat().st_size for path in (folder / "global_step4").iterdir())
    assert told == {
        "stage": 3, "world_size": 2, "universal": False, "tag": "global_step4", "num_shards": 4,
        "size_bytes": size_bytes,
    }  # fmt: skip
    assert "ZeRO stage 3, 2 ranks, 4 files" in run_cli("status", "demo", cwd=trained).stdout
    assert run_cli("status", "demo", "--json", cwd=trained).document["deepspeed"] == told


@pytest.mark.parametrize(
    "inner",
    [
        "",
        "global_step4",
        "global_step4/zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "latest",
        "state.ckpt",
    ],
)
def test_a_path_into_a_checkpoint_means_the_checkpoint(
    trained: Path, run_cli: Callable[..., Any], inner: str
) -> None:
    path = newest(trained) / inner
    resolved = run_cli("resolve", "-c", "demo.yaml", "--ckpt", str(path), "--json", cwd=trained)
    assert resolved.code == 0, resolved
    assert resolved.document["path"] == str(newest(trained))


def test_a_checkpoint_that_lacks_a_shard(trained: Path, project: Path, run_cli: Callable[..., Any]) -> None:
    copied = project / newest(trained).name
    shutil.copytree(newest(trained), copied)
    (copied / "global_step4/zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    refused = run_cli(*FIT, "--ckpt", str(copied), cwd=project)
    assert refused.code == 3
    assert "lacks its file global_step4/zero_pp_rank_1_mp_rank_00_model_states.pt" in refused.stderr


@pytest.mark.parametrize(
    "inner", ["", "global_step4", "global_step4/zero_pp_rank_0_mp_rank_00_model_states.pt"]
)
def test_what_deepspeed_wrote_by_itself(
    trained: Path, project: Path, run_cli: Callable[..., Any], inner: str
) -> None:
    """Without anything of ckptrun's: nothing goes on from it, and its weights can be begun from."""
    foreign = project / "foreign"
    foreign.mkdir()
    shutil.copytree(newest(trained) / "global_step4", foreign / "global_step4")
    shutil.copy(newest(trained) / "latest", foreign / "latest")
    refused = run_cli(*FIT, "--ckpt", str(foreign / inner), cwd=project)
    assert refused.code == 5, refused
    assert "is a checkpoint of DeepSpeed without anything of ckptrun's" in refused.stderr
    assert "--init-from" in refused.stderr
    if inner != "":
        return
    begun = run_cli(*FIT, "--ckpt", "none", "--init-from", str(foreign), cwd=project)
    assert begun.code == 0, begun
    (foreign / "global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    refused = run_cli(*FIT, "--run", "other", "--ckpt", str(foreign), cwd=project)
    assert refused.code == 3
    assert "lacks global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt" in refused.stderr
    refused = run_cli(*FIT, "--run", "other", "--ckpt", "none", "--init-from", str(foreign), cwd=project)
    assert refused.code == 3, refused
    assert "that lacks global_step4/zero_pp_rank_0_mp_rank_00_optim_states.pt" in refused.stderr
    assert not (project / "runs/other").exists()  # no rank was started


def test_a_plain_checkpoint_is_refused_before_the_ranks_start(
    project: Path, run_cli: Callable[..., Any]
) -> None:
    plain = run_cli(*FIT, "strategy.name=single", "strategy.stage=null", "launch.nproc=1", cwd=project)
    assert plain.code == 2  # DeepSpeed's options are none of single's
    (project / "plain.yaml").write_text(CONFIG.replace("strategy: {name: deepspeed, stage: 3}\n", ""))
    assert run_cli("fit", "-c", "plain.yaml", "--run", "plain", "launch.nproc=1", cwd=project).code == 0
    path = max((project / "runs/plain/checkpoints").iterdir())
    refused = run_cli(*FIT, "--ckpt", str(path), cwd=project)
    assert refused.code == 5
    assert "was not written under the strategy deepspeed" in refused.stderr
    assert not (project / "runs/demo").exists()


def test_a_contradiction_is_found_before_anything_starts(project: Path, run_cli: Callable[..., Any]) -> None:
    (project / "ds.json").write_text(json.dumps({"gradient_accumulation_steps": 4}))
    refused = run_cli(*FIT, "strategy.config=ds.json", cwd=project)
    assert refused.code == 2
    both = "gradient_accumulation_steps: 4, and trainer.accumulate_grad_batches is 1"
    assert both in refused.stderr
    assert not (project / "runs").exists()


def test_a_stop_does_not_wait_for_the_compiler(
    project: Path, start_cli: Callable[..., Any], tmp_path: Path
) -> None:
    """The first use on a machine: DeepSpeed's operation is compiled, which is said, and SIGTERM ends that at once."""
    extensions = tmp_path / "extensions"
    live = start_cli(*FIT, "--grace-s", "60", cwd=project, env={"TORCH_EXTENSIONS_DIR": str(extensions)})
    live.wait_for_output("DeepSpeed compiles its operation ShareMemComm, once on this machine")
    live.wait_for(lambda: list(extensions.glob("*/lock")), what="the compiler is at work")
    live.signal(signal.SIGTERM)
    done = live.wait(timeout_s=15.0)  # the compiler takes longer, and the grace period lasts a minute
    assert done.code == 143, done
    assert "forced" not in done.stderr
    assert not list(extensions.glob("*/lock"))
    assert not list(extensions.glob("*/*.so"))


HALTS = """\
import os, signal, sys

def halt(event, args):
    if event == "os.mkdir" and "/global_step4/zero/" in str(args[0]):
        os.kill(os.getpid(), signal.SIGSTOP)

if "universal_convert" in " ".join(sys.orig_argv):
    sys.addaudithook(halt)
"""


def nothing_outlives(live: Live) -> None:
    wait_until_true(lambda: not live.survivors(), 10.0, what="all that the command had started ends too")


def test_a_conversion_that_was_ended_is_made_again(
    trained: Path,
    project: Path,
    tmp_path: Path,
    run_cli: Callable[..., Any],
    start_cli: Callable[..., Any],
) -> None:
    """SIGTERM and SIGKILL to the command while the converter writes."""
    shutil.copytree(trained / "runs", project / "runs")
    folder = project / "runs/demo/checkpoints"
    before = sorted(os.listdir(folder))
    (tmp_path / "halting").mkdir()
    (tmp_path / "halting/sitecustomize.py").write_text(HALTS)
    paths = [str(tmp_path / "halting"), os.environ.get("PYTHONPATH", "")]
    fit = (*FIT, "--ckpt", "last", "launch.nproc=1", "trainer.max_steps=8")
    for number, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)):
        live = start_cli(*fit, cwd=project, env={"PYTHONPATH": os.pathsep.join(filter(None, paths))})
        live.wait_for(lambda: list(folder.glob(".tmp-*-universal.*/*/zero")), what="half is converted")
        live.signal(number)
        assert live.wait(timeout_s=15.0).code == code, live
        nothing_outlives(live)
        committed = sorted(name for name in os.listdir(folder) if not name.startswith(".tmp-"))
        assert committed == before, live
    done = run_cli(*fit, cwd=project)
    assert done.code == 0, done
    assert "it is converted to DeepSpeed's universal format, once" in done.stderr
    names = sorted(os.listdir(folder))
    assert [name for name in names if name.startswith(".tmp-")] == []
    assert sum(name.endswith("-universal") for name in names) == 1
    assert newest(project).name.endswith("-step-00000008")


def test_without_the_package_it_is_one_line(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(files=[str(project / "demo.yaml")])
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "deepspeed" else find(name, *more)
    )
    with pytest.raises(ConfigError) as caught:
        check_supported(config)
    (line,) = str(caught.value).splitlines()
    assert "pip install 'ckptrun[deepspeed]'" in line
    assert os.path.basename(project / "demo.yaml") in line
