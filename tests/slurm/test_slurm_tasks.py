"""Tasks of a step through the command line: one a node, and one a rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from live_cli import Live
from rank_work import assert_same, picture
from slurm_cluster import SlurmCluster
from slurm_project import Project

pytestmark = pytest.mark.slurm


def test_a_task_a_node_and_a_task_a_rank_train_to_the_same_bits_as_one_command(
    slurm_cluster: SlurmCluster, in_tmp_path: Path, start_cli: Callable[..., Live]
) -> None:
    project = Project(in_tmp_path, slurm_cluster)
    fit = "srun ckptrun fit --ckpt last --run"
    nodes = project.submit(f"{fit} nodes", "--nodes=2")
    ranks = project.submit(f"{fit} ranks", "--nodes=1", "--ntasks-per-node=2")
    for job in (nodes, ranks):
        slurm_cluster.wait_for_state(job, "COMPLETED")
    assert start_cli("fit", "--run", "plain", "--nproc", "2").wait().code == 0
    plain = picture(project.run("plain"))
    for name, hosts in (("nodes", ["n1", "n2"]), ("ranks", ["n1", "n1"])):
        assert_same(plain, picture(project.run(name)))
        assert [each["host"].split()[0] for each in project.status(name)["ranks"]] == hosts
    assert not list((in_tmp_path / "runs").glob(".meet*"))
