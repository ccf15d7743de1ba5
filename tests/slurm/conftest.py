"""``slurm_cluster``: a real SLURM, started once for all tests that ask for it, and left without jobs after each.

    @pytest.mark.slurm
    def test_it(slurm_cluster, tmp_path):
        job = slurm_cluster.submit("#!/bin/bash\\nsrun ckptrun fit …\\n", "--nodes=2", cwd=tmp_path)
        slurm_cluster.wait_for_state(job, "COMPLETED")

``ckptrun`` and ``python`` of the tests' own environment are first in the jobs' ``PATH``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from slurm_cluster import SlurmCluster, missing_programs


@pytest.fixture(scope="session")
def running_slurm() -> Iterator[SlurmCluster]:
    missing = missing_programs()
    if missing:
        pytest.skip(f"not installed here: {', '.join(missing)} (Debian's slurm-wlm and munge)")
    cluster = SlurmCluster()
    try:
        cluster.start()
        yield cluster
    finally:
        left = cluster.stop()
    assert not left, f"the cluster left behind: {left}"


@pytest.fixture
def slurm_cluster(running_slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster, both nodes up and no job there."""
    for node in running_slurm.dead_nodes():
        running_slurm.start_node(node)
    yield running_slurm
    running_slurm.cancel_all()
