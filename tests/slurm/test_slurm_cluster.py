"""The test cluster itself: it runs jobs on both nodes, its nodes die and come back, and it preempts."""

from __future__ import annotations

from pathlib import Path

import pytest
from slurm_cluster import CPUS, SlurmCluster

pytestmark = pytest.mark.slurm


def test_a_job_of_two_nodes_runs_and_is_requeued(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    script = (
        "#!/bin/bash\n"
        "srun bash -c 'echo $SLURMD_NODENAME $SLURM_RESTART_COUNT'\n"
        '[ -n "$SLURM_RESTART_COUNT" ] || { scontrol requeue $SLURM_JOB_ID; sleep 60; }\n'
        "command -v ckptrun python\n"
    )
    job = slurm_cluster.submit(script, "--nodes=2", cwd=tmp_path)
    slurm_cluster.wait_for_restart(job, 1)
    slurm_cluster.wait_for_state(job, "COMPLETED")
    lines = (tmp_path / f"slurm-{job}.out").read_text().splitlines()
    assert {"n1", "n2", "n1 1", "n2 1"} <= {line.strip() for line in lines}


def test_a_node_that_dies_takes_its_job_along(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    job = slurm_cluster.submit("#!/bin/bash\nsleep 300\n", "--requeue", cwd=tmp_path)
    node = slurm_cluster.wait_for_state(job, "RUNNING")["NodeList"]
    slurm_cluster.kill_node(node)
    slurm_cluster.declare_down(node)
    assert slurm_cluster.wait_for_restart(job, 1)["NodeList"] == ({"n1", "n2"} - {node}).pop()
    slurm_cluster.start_node(node)


def test_it_preempts(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    everything = ("--nodes=2", "--ntasks-per-node=1", f"--cpus-per-task={CPUS}")
    script = "#!/bin/bash\nsleep 300\n"
    low = slurm_cluster.submit(script, "--partition=low", "--requeue", *everything, cwd=tmp_path)
    slurm_cluster.wait_for_state(low, "RUNNING")
    high = slurm_cluster.submit("#!/bin/bash\ntrue\n", "--partition=high", *everything, cwd=tmp_path)
    slurm_cluster.wait_for_state(high, "COMPLETED")
    slurm_cluster.wait_for_restart(low, 1)
