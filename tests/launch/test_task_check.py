"""Ranks, devices and cores of a task: what cannot work is an error, what wastes is a warning, each with the remedy."""

from __future__ import annotations

import pytest

from ckptrun.errors import UsageError
from ckptrun.launch.task_check import TaskShare as Share
from ckptrun.launch.task_check import check_share


@pytest.mark.parametrize(
    "share",
    [
        pytest.param(Share(num_ranks=1, num_cores=1), id="one rank"),
        pytest.param(Share(num_ranks=8, num_cores=32, num_gpus=8, num_workers=3), id="a task a node"),
        pytest.param(Share(num_ranks=1, num_cores=4, num_gpus=8, num_local_tasks=8, num_workers=3), id="each sees all"),
        pytest.param(Share(num_ranks=1, num_cores=1, num_gpus=1, num_local_tasks=8), id="each sees its own"),
        pytest.param(Share(num_ranks=1, num_cores=1, num_gpus=1, num_local_tasks=8, num_node_gpus=8),
                     id="each sees its own, and SLURM says how many"),
        pytest.param(Share(num_ranks=1, num_cores=1, num_gpus=8, num_local_tasks=8, num_node_gpus=2),
                     id="they see more than SLURM speaks of"),
        pytest.param(Share(num_ranks=1, num_cores=1, num_local_tasks=8), id="no GPUs"),
    ],
)  # fmt: skip
def test_has_what_it_needs(share: Share) -> None:
    assert check_share(share) == []


@pytest.mark.parametrize(
    ("share", "found", "remedy"),
    [
        (Share(num_ranks=1, num_cores=8, num_gpus=4, num_local_tasks=8),
         "8 tasks on this node, each of which is a rank, and gave them 4 GPUs", "--ntasks-per-node=4"),
        (Share(num_ranks=1, num_cores=8, num_gpus=1, num_local_tasks=2, num_node_gpus=1),
         "2 tasks on this node, each of which is a rank, and gave them 1 GPU.", "--gpus-per-node=2"),
        (Share(num_ranks=1, num_cores=8, num_gpus=2, num_local_tasks=4, num_node_gpus=2),
         "4 tasks on this node, each of which is a rank, and gave them 2 GPUs.", "--ntasks-per-node=2"),
    ],
)  # fmt: skip
def test_cannot_work(share: Share, found: str, remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_share(share)
    assert found in caught.value.message
    assert remedy in str(caught.value.hint)


@pytest.mark.parametrize(
    ("share", "found", "remedy"),
    [
        (Share(num_ranks=1, num_cores=8, num_gpus=8), "1 rank on this node, which has 8 GPUs: 7 will", "--nproc 8"),
        (Share(num_ranks=1, num_cores=8, num_gpus=8, num_local_tasks=4),
         "4 ranks on this node, which has 8 GPUs: 4 will", "--ntasks-per-node=8"),
        (Share(num_ranks=1, num_cores=8, num_gpus=2, num_local_tasks=4, num_node_gpus=8),
         "4 ranks on this node, which has 8 GPUs: 4 will", "--ntasks-per-node=8"),
        (Share(num_ranks=2, num_cores=1), "2 ranks on 1 core,", "SRUN_CPUS_PER_TASK=2"),
        (Share(num_ranks=1, num_cores=0, num_local_tasks=4), "1 rank on less than a core,", "--cpus-per-task=1"),
        (Share(num_ranks=2, num_cores=7, num_workers=3),
         "2 ranks with 3 loader workers each on 7 cores", "--cpus-per-task=8"),
        (Share(num_ranks=1, num_cores=1, num_workers=1),
         "1 rank with 1 loader worker each on 1 core,", "--cpus-per-task=2"),
    ],
)  # fmt: skip
def test_wastes_or_waits(share: Share, found: str, remedy: str) -> None:
    (warning,) = check_share(share)
    assert found in warning
    assert remedy in warning


def test_two_warnings() -> None:
    assert len(check_share(Share(num_ranks=2, num_cores=1, num_gpus=4))) == 2
