"""The command of DeepSpeed's launcher, and how many ranks it will start."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptrun.environment.process import host_name
from ckptrun.errors import UsageError
from ckptrun.launch.deepspeed_command import DeepSpeedOptions, command, slots_of_hosts
from ckptrun.launch.plan import make_plan

HOSTS = "# the pool\nhost1 slots=4\n\nhost2 slots=2\n"


@pytest.fixture
def hostfile(tmp_path: Path) -> str:
    path = tmp_path / "hosts"
    path.write_text(HOSTS)
    return str(path)


def words(options: DeepSpeedOptions, **more: Any) -> list[str]:
    """The command between its own name and the script."""
    whole = command(options, **{"num_ranks": 2, "control": "/runs/demo/control/deepspeed-fit.json", **more})
    assert Path(whole[0]).name == "deepspeed"
    assert whole[-5:-2] == ("--no_local_rank", "--log_level", "error")
    assert whole[-2].endswith("launch/deepspeed_rank.py")
    assert whole[-1] == "/runs/demo/control/deepspeed-fit.json"
    return list(whole[1:-5])


def test_on_this_host() -> None:
    assert words(DeepSpeedOptions()) == ["--num_gpus", "2"]
    assert words(DeepSpeedOptions(include="localhost:0,2")) == ["--include", "localhost:0,2"]


@pytest.mark.parametrize("backend", ["pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm"])
def test_every_back_end_is_passed_through(hostfile: str, backend: str) -> None:
    options = DeepSpeedOptions(
        hostfile=hostfile,
        exclude="host2:1",
        backend=backend,
        further="--launcher_args '-p 22 -q' --ssh_port 22",
    )
    assert words(options) == [
        "--hostfile", hostfile, "--exclude", "host2:1", "--launcher", backend,
        "--launcher_args", "-p 22 -q", "--ssh_port", "22",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({}, 6),
        ({"include": "host1"}, 4),
        ({"include": "host1:0,3@host2"}, 4),
        ({"exclude": "host1"}, 2),
        ({"exclude": "host1:0@host2:0,1"}, 3),
        ({"include": "host1:0@host1:1"}, 2),
        ({"include": "host1:0,0"}, 1),
        ({"include": "host1@host1:3"}, 1),
        ({"include": "host2@host1:1"}, 3),
        ({"exclude": "host1:0@host1:0,1"}, 4),
        ({"further": "--num_nodes 1"}, 4),
        ({"further": "--num_gpus 1"}, 2),
        ({"further": "--num_nodes=1 --num_acc 3"}, 3),
        ({"further": "-i host1:1"}, 1),
        ({"further": "--exclude=host1"}, 2),
        ({"include": "host1", "further": "--include host2"}, 2),
    ],
)
def test_how_many_ranks(hostfile: str, options: dict[str, str], ranks: int) -> None:
    """The same as DeepSpeed's own reading of the same words."""
    given = DeepSpeedOptions(hostfile=hostfile, **options)
    slots = slots_of_hosts(given, nproc=1)
    assert sum(map(len, slots.values())) == ranks
    runner = pytest.importorskip("deepspeed.launcher.runner")
    args = runner.parse_args(list(command(given, num_ranks=1, control="c"))[1:])
    active = runner.parse_inclusion_exclusion(runner.fetch_hostfile(hostfile), args.include, args.exclude)
    active = runner.apply_num_nodes_and_gpus(active, args.num_nodes, args.num_gpus)
    assert list(active.items()) == list(slots.items())


@pytest.mark.parametrize(
    ("options", "num_gpus", "slots"),
    [
        ({}, 0, [0, 1]),
        ({"further": "--num_gpus 1"}, 0, [0]),
        ({"include": "localhost:2,3"}, 4, [2, 3]),
        ({"include": "localhost:2,3"}, 0, [2, 3]),  # whether it has them DeepSpeed says
        ({"include": "localhost"}, 4, [0, 1, 2, 3]),
        ({"exclude": "localhost:0"}, 4, [1, 2, 3]),
    ],
)
def test_how_many_ranks_without_a_hostfile(options: dict[str, str], num_gpus: int, slots: list[int]) -> None:
    assert slots_of_hosts(DeepSpeedOptions(**options), nproc=2, num_gpus=num_gpus) == {"localhost": slots}


@pytest.mark.parametrize(
    ("options", "num_gpus", "why"),
    [
        ({"include": "localhost:5"}, 4, "localhost has no slot 5; it has 4"),
        ({"include": "localhost"}, 0, "and this host has none"),
        ({"exclude": "localhost:0"}, 0, "and this host has none"),
        ({"include": "localhost:0", "further": "--num_gpus 1"}, 2, "takes one of them"),
        ({"further": "--num_nodes 2"}, 0, "for the hosts of a hostfile"),
        ({"further": "--num_gpus two"}, 0, "launch.deepspeed_args: argument --num_gpus"),
        ({"further": "--launcher_args '-p"}, 0, "which no shell would read: No closing quotation"),
    ],
)
def test_what_is_wrong_without_a_hostfile(options: dict[str, str], num_gpus: int, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        slots_of_hosts(DeepSpeedOptions(**options), nproc=2, num_gpus=num_gpus)
    assert why in str(caught.value)


def test_arguments_that_say_where_ranks_run_stand_once_in_the_command(hostfile: str) -> None:
    options = DeepSpeedOptions(include="host1", further=f"-H {hostfile} --ssh_port 22 --include host2")
    assert words(options) == ["--hostfile", hostfile, "--include", "host2", "--ssh_port", "22"]
    assert words(DeepSpeedOptions(further="--num_gpus 1")) == ["--num_gpus", "1"]


def test_a_hostfile_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"host\xff slots=2\n")
    with pytest.raises(UsageError, match="hosts is no text in UTF-8"):
        slots_of_hosts(DeepSpeedOptions(hostfile=str(path)), nproc=1)


@pytest.mark.parametrize(
    ("text", "options", "why"),
    [
        ("host1 4", {}, "hosts:1: 'host1 4', expected a line such as"),
        ("a slots=1\na slots=2", {}, "hosts:2: a stands there twice"),
        ("# nobody", {}, "names no host"),
        (HOSTS, {"include": "host3"}, "names 'host3', which the hostfile does not have: host1, host2"),
        (HOSTS, {"include": "host2:5"}, "host2 has no slot 5; it has 2"),
        (HOSTS, {"include": "host2:x"}, "expected slots as in"),
        (HOSTS, {"exclude": "host1@host2"}, "leave no rank to start"),
        (HOSTS, {"include": "host1", "exclude": "host2"}, "takes one of them"),
    ],
)
def test_what_is_wrong(tmp_path: Path, text: str, options: dict[str, str], why: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        slots_of_hosts(DeepSpeedOptions(hostfile=str(path), **options), nproc=1)
    assert why in str(caught.value)


def test_the_plan() -> None:
    plan = make_plan(
        launcher="deepspeed",
        strategy="auto",
        num_ranks=2,
        command=["ckptrun", "fit"],
        num_cores=8,
        control="c",
    )
    assert (plan.launcher, plan.strategy, plan.num_ranks, plan.control) == ("deepspeed", "deepspeed", 2, "c")
    assert plan.env == {"OMP_NUM_THREADS": "4", "DS_ACCELERATOR": "cpu"}
    assert str(plan).startswith(str(Path(sys.executable).parent / "deepspeed"))
    for options, why in (
        ({"strategy": "ddp"}, "asked for is ddp"),
        ({"num_hosts": 2, "rdzv_endpoint": "h:1"}, "on one host only"),
    ):
        with pytest.raises(UsageError, match=why):
            make_plan(
                **{"launcher": "deepspeed", "strategy": "auto", "num_ranks": 2, "command": [], **options}
            )


def of_hosts(tmp_path: Path, text: str, **more: Any) -> Any:
    (tmp_path / "hosts").write_text(text)
    options = DeepSpeedOptions(hostfile=str(tmp_path / "hosts"))
    given = {
        "launcher": "deepspeed",
        "strategy": "auto",
        "num_ranks": 1,
        "command": [],
        "num_cores": 8,
        **more,
    }
    return make_plan(deepspeed=options, **given)


@pytest.mark.parametrize("name", ["localhost", host_name()])
def test_ranks_of_this_host_share_its_cores(tmp_path: Path, name: str) -> None:
    made = of_hosts(tmp_path, f"{name} slots=4\n")
    assert made.env == {"OMP_NUM_THREADS": "2", "DS_ACCELERATOR": "cpu"}
    assert not made.everywhere  # nobody else is to reach the supervisor
    assert made.warnings == ()
    warned = of_hosts(tmp_path, f"{name} slots=64\n")
    assert warned.warnings == ("64 ranks share 8 cores; they will take turns",)
    with pytest.raises(UsageError, match="4 ranks are asked for, and this host has 1 GPUs") as caught:
        of_hosts(tmp_path, f"{name} slots=4\n", num_gpus=1)
    assert "slots=1" in str(caught.value.hint)


def test_ranks_of_other_hosts_find_out_themselves_what_they_have(tmp_path: Path) -> None:
    text = "localhost slots=2\nelsewhere slots=64\n"
    made = of_hosts(tmp_path, text)
    assert (made.env, made.everywhere, made.num_ranks, made.warnings) == ({}, True, 66, ())
    assert of_hosts(tmp_path, text, num_threads=3).env == {"OMP_NUM_THREADS": "3"}


def test_a_number_of_ranks_beside_a_hostfile_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    options = DeepSpeedOptions(hostfile=str(tmp_path / "hosts"))

    def warnings(num_ranks: int, **more: Any) -> tuple[str, ...]:
        given = {"launcher": "deepspeed", "strategy": "auto", "command": ["ckptrun"], "num_cores": 8, **more}
        return make_plan(num_ranks=num_ranks, deepspeed=options, **given).warnings

    (told,) = warnings(4)
    assert told == f"launch.nproc is 4 (--nproc), and the hostfile {options.hostfile} counts: 2 ranks in all"
    assert warnings(1) == warnings(2) == warnings(4, counted=True) == ()


@pytest.mark.parametrize(("launcher", "runs"), [("auto", "inline"), ("torchrun", "torchrun")])
def test_options_of_deepspeeds_launcher_under_another_one(launcher: str, runs: str) -> None:
    options = DeepSpeedOptions(hostfile="hosts", include="host1")
    plan = make_plan(launcher=launcher, strategy="auto", num_ranks=1, command=["ckptrun"], deepspeed=options)
    assert plan.warnings == (
        f"launch.hostfile, launch.include have no effect with the launcher {runs}: use --launcher deepspeed",
    )


def test_more_ranks_than_this_host_has_room_for() -> None:
    given: dict[str, Any] = {"launcher": "deepspeed", "strategy": "auto", "command": [], "num_cores": 2}
    assert make_plan(num_ranks=64, **given).warnings == ("64 ranks share 2 cores; they will take turns",)
    with pytest.raises(UsageError, match="8 ranks are asked for, and this host has 1 GPUs"):
        make_plan(num_ranks=8, num_gpus=1, **given)


PROJECT = """\
run: {name: demo}
trainer: {max_steps: 6, num_threads: 1, limit_val_batches: 0}
strategy: {name: deepspeed, stage: 1}
launch: {launcher: deepspeed, nproc: 2}
model: {class_path: task.Model}
data: {class_path: task.Data}
"""
TASK = """\
import os

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
        if batch_idx == 2:
            print(f"rank {self.trainer.global_rank} of {self.trainer.world_size}", flush=True)
            print(f"port {os.environ['MASTER_PORT']}", flush=True)
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "demo.yaml").write_text(PROJECT)
    (tmp_path / "task.py").write_text(TASK)
    return tmp_path


@pytest.mark.deepspeed
def test_a_hostfile_and_what_ranks_print(run_cli: Callable[..., Any], project: Path) -> None:
    """The whole way with the one host that is here: no ssh is needed to reach it."""
    (project / "hosts").write_text("localhost slots=2\n")
    line = (
        "fit", "-c", "demo.yaml", "launch.hostfile=hosts", "launch.master_addr=127.0.0.1",
        "launch.deepspeed_args=--no_ssh_check",
    )  # fmt: skip
    planned = run_cli(*line, "--dry-run", cwd=project)
    assert "--hostfile hosts --master_addr 127.0.0.1 --no_ssh_check --no_local_rank" in planned.stdout
    done = run_cli(*line, cwd=project)
    assert done.code == 0, done
    assert done.stdout.count("rank 0 of 2") == 1
    assert "rank 1 of 2" not in done.stdout
    logs = sorted((project / "runs/demo/logs").glob("attempt-*.log"))
    assert ["rank 0 of 2" in logs[0].read_text(), "rank 1 of 2" in logs[1].read_text()] == [True, True]
    assert not list((project / "runs/demo/control").glob("deepspeed*"))
    (port,) = re.findall(r"port (\d+)", done.stdout)
    assert not list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"))


@pytest.mark.deepspeed
def test_a_launcher_that_cannot_reach_its_hosts(run_cli: Callable[..., Any], project: Path) -> None:
    (project / "hosts").write_text("localhost slots=2\nnowhere.invalid slots=2\n")
    line = ("launch.hostfile=hosts", "launch.master_addr=127.0.0.1", "launch.deepspeed_args=--no_ssh_check")
    failed = run_cli("fit", "-c", "demo.yaml", *line, cwd=project, env={"PATH": "/nowhere"})
    assert failed.code == 70, failed
    assert "DeepSpeed's launcher ended with exit code 1, and 0 of 4 ranks had begun" in failed.stderr
    assert "attempt-0001-rank-0000.log" in failed.stderr
    assert "lost" not in failed.stderr
    assert "to go on" not in failed.stderr
