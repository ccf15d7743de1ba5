"""Tasks of a step through the command line: one a node, and one a rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from live_cli import Live
from rank_work import assert_same, picture
from slurm_cluster import SlurmCluster
from slurm_project import Project

pytestmark = pytest.mark.slurm

TOLD = """\
import json, os
from ckptrun import Callback

class Told(Callback):
    def on_train_start(self, trainer, *_):
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE".split()
        with open(f"rank-{trainer.global_rank}.json", "w") as file:
            json.dump([os.environ[name] for name in names], file)
"""


def test_a_task_a_node_and_a_task_a_rank_train_to_the_same_bits_as_one_command(
    slurm_cluster: SlurmCluster, in_tmp_path: Path, start_cli: Callable[..., Live]
) -> None:
    project = Project(in_tmp_path, slurm_cluster)
    fit = "srun ckptrun fit --ckpt last --run"
    nodes = project.submit(f"{fit} nodes", "--nodes=2")
    (in_tmp_path / "told.py").write_text(TOLD)
    ranks = project.submit(
        f"{fit} ranks callbacks.2.class_path=told.Told", "--nodes=1", "--ntasks-per-node=2"
    )
    for job in (nodes, ranks):
        slurm_cluster.wait_for_state(job, "COMPLETED")
    assert start_cli("fit", "--run", "plain", "--nproc", "2").wait().code == 0
    plain = picture(project.run("plain"))
    for name, hosts in (("nodes", ["n1", "n2"]), ("ranks", ["n1", "n1"])):
        assert_same(plain, picture(project.run(name)))
        assert [each["host"].split()[0] for each in project.status(name)["ranks"]] == hosts
    told = [json.loads((in_tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert told == [["0", "0", "2", "2"], ["1", "1", "2", "2"]]
    assert not list((in_tmp_path / "runs").glob(".meet*"))


ASK = """\
import os, sys
from ckptrun.environment.slurm import job_facts, task_facts
job, task = job_facts(os.environ), task_facts(os.environ, at_terminal=os.isatty(0))
where = None if task is None else (task.number, task.num_tasks, task.local, task.num_local, task.node)
print(sys.argv[1], job.key == os.environ.get("SLURM_ARRAY_JOB_ID", job.id) + sys.argv[2], job.batch, where)
"""


def test_what_a_real_slurm_says_of_each_place(slurm_cluster: SlurmCluster, in_tmp_path: Path) -> None:
    project = Project(in_tmp_path, slurm_cluster)
    (in_tmp_path / "ask.py").write_text(ASK)
    two = ("--nodes=2", "--ntasks-per-node=2")
    # With the same loss as of --export=NONE, but that Python is found.
    few = "srun --ntasks=1 --nodes=1 --export=PATH,PYTHONPATH python ask.py few ''"
    script = project.submit(f"python ask.py batch ''\nsrun python ask.py task ''\n{few}", *two)
    array = project.submit("python ask.py array _7", "--array=7", "--output=slurm-array.out")
    slurm_cluster.wait_for_state(script, "COMPLETED")
    slurm_cluster.wait_for_state(f"{array}_7", "COMPLETED")
    said = {
        *project.output(script).splitlines(),
        *project.output("array").splitlines(),
        *slurm_cluster.run("salloc", "--quiet", *two, "python", "ask.py", "salloc", "").splitlines(),
        *slurm_cluster.run("salloc", "--quiet", "srun", "python", "ask.py", "salloc-srun", "").splitlines(),
        *slurm_cluster.run("srun", "--quiet", "python", "ask.py", "login-srun", "").splitlines(),
    }
    pty = "srun --quiet --pty python ask.py pty ''"
    terminal = slurm_cluster.run("script", "--quiet", "--command", pty, "/dev/null")
    said.add(terminal[terminal.find("pty") :])  # a terminal may say something of its own before
    assert {line.strip() for line in said if line.strip()} == {
        "batch True True None",
        "array True True None",
        "few True True None",
        "salloc True False None",
        "salloc-srun True False None",
        "login-srun True False None",
        "pty True False None",
        "task True True (0, 4, 0, 2, 'n1')",
        "task True True (1, 4, 1, 2, 'n1')",
        "task True True (2, 4, 0, 2, 'n2')",
        "task True True (3, 4, 1, 2, 'n2')",
    }
