"""Whole trainings under SLURM that end with the same bits as without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from live_cli import Live
from rank_work import assert_same, picture
from slurm_cluster import CPUS, SlurmCluster
from slurm_project import Project

pytestmark = pytest.mark.slurm

PACE = """\
import os, time
from ckptrun import Callback

class Slow(Callback):
    def on_train_batch_end(self, *_):
        if os.path.exists("slow"):
            time.sleep(0.05)
"""
SLOW = "callbacks.2={class_path: pace.Slow}"


@pytest.fixture
def project(slurm_cluster: SlurmCluster, in_tmp_path: Path) -> Project:
    (in_tmp_path / "pace.py").write_text(PACE)
    (in_tmp_path / "slow").touch()  # as long as there is something to wait for
    return Project(in_tmp_path, slurm_cluster)


def test_a_job_of_two_nodes_is_signalled_loses_a_node_is_preempted_and_ends_with_the_same_bits(
    slurm_cluster: SlurmCluster, project: Project, start_cli: Callable[..., Live]
) -> None:
    job = project.submit(
        f"srun --kill-on-bad-exit=1 ckptrun fit --ckpt last trainer.max_steps=900 '{SLOW}'",
        "--nodes=2", "--ntasks-per-node=1", "--requeue", "--partition=low", "--time=30", "--signal=USR1@45",
    )  # fmt: skip

    def step() -> int:
        return int(project.status().get("step") or 0)

    # The signal comes when the controller looks at limits, up to a minute before it is due or half a minute after it.
    # With a limit of one minute from the start it may come before the first step.
    project.wait_for_step(job, 10)
    slurm_cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    slurm_cluster.wait_for_restart(job, 1)
    assert [each["why"] for each in project.ledger(event="requeue")] == ["SIGUSR1"]
    slurm_cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=30")  # no other signal
    project.wait_for_attempt(job, 2)
    project.wait_for_step(job, step() + 10)

    slurm_cluster.kill_node("n1")  # where the leader and the script are
    slurm_cluster.declare_down("n1")
    slurm_cluster.wait_for_state(job, "PENDING")
    slurm_cluster.start_node("n1")
    slurm_cluster.wait_for_restart(job, 2)
    project.wait_for_attempt(job, 3)
    project.wait_for_step(job, step() + 10)

    high = project.submit(
        "true", "--partition=high", "--nodes=2", "--ntasks-per-node=1", f"--cpus-per-task={CPUS}"
    )
    slurm_cluster.wait_for_state(high, "COMPLETED")
    (project.folder / "slow").unlink()
    slurm_cluster.wait_for_restart(job, 3)
    slurm_cluster.wait_for_state(job, "COMPLETED")

    assert start_cli("fit", "--run", "plain", "--nproc", "2", "trainer.max_steps=900", SLOW).wait().code == 0
    assert_same(picture(project.run("plain")), picture(project.run()))
    starts, ends = project.ledger(event="start"), project.ledger(event="end")
    assert [each["attempt"] for each in starts] == [1, 2, 3, 4]
    assert {each["job"] for each in starts} == {job}
    assert [each["attempt"] for each in ends] == [1, 3, 4]  # the killed one could not say how it ended
    assert [each["stop_reason"] for each in ends] == ["walltime", "walltime", "done"]
    assert [each["why"] for each in project.ledger(event="requeue")] == ["SIGUSR1", "requeued"]
    output = project.output(job)
    assert output.count("following n1, which leads") == 4  # appended to, at each start
    assert "Traceback" not in output


def test_an_array_of_four_tasks_from_one_script_two_of_them_requeued(
    slurm_cluster: SlurmCluster, project: Project, start_cli: Callable[..., Live]
) -> None:
    config = (project.folder / "ckptrun.yaml").read_text().partition("\n")[2]  # without the run's name
    (project.folder / "train.yaml").write_text(config)
    job = project.submit(
        f"srun ckptrun fit -c train.yaml --ckpt last trainer.max_steps=300 '{SLOW}'",
        "--array=0-3", "--requeue", "--output=slurm-%A_%a.out",
    )  # fmt: skip
    runs = [f"train-a{task}" for task in range(4)]
    for task, run in enumerate(runs):
        project.wait_for_step(f"{job}_{task}", 5, run)
    for task in (1, 3):
        slurm_cluster.run("scancel", "--signal=USR1", f"{job}_{task}")
    for task in (1, 3):
        slurm_cluster.wait_for_restart(f"{job}_{task}", 1)
    (project.folder / "slow").unlink()
    for task in range(4):
        ended = slurm_cluster.wait_for_state(f"{job}_{task}", "COMPLETED")
        assert ended["Restarts"] == ("1" if task in (1, 3) else "0")
    plain = start_cli("fit", "-c", "train.yaml", "--run", "plain", "trainer.max_steps=300", SLOW).wait()
    assert plain.code == 0
    expected = picture(project.run("plain"))
    for task, run in enumerate(runs):
        assert_same(expected, picture(project.run(run)))
        why = [(each["job"], each["why"]) for each in project.ledger(run, "requeue")]
        assert why == ([(f"{job}_{task}", "SIGUSR1")] if task in (1, 3) else [])
        hpc = [each["resolved"] for each in project.ledger(run, "start")[1:]]
        assert all(path.startswith(project.run(run).path) for path in hpc)
