"""How does a process learn which rank it is, under each of the launchers that DeepSpeed has?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ckptrun.launch import deepspeed_rank
from ckptrun.launch.deepspeed_rank import numbers_of

DEEPSPEED = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_SIZE": "4", "CROSS_RANK": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "5", "MPI_LOCALRANKID": "1", "PMI_SIZE": "8", "MPI_LOCALNRANKS": "4"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "5",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "8",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
}


@pytest.mark.parametrize(
    ("env", "host_rank"),
    [
        pytest.param(DEEPSPEED, 1, id="DeepSpeed's own"),
        pytest.param(OPEN_MPI, 0, id="Open MPI"),
        pytest.param(MPICH, 0, id="MPICH and Intel MPI"),
        pytest.param(MVAPICH, 0, id="MVAPICH"),
        pytest.param(SRUN, 1, id="srun"),
        pytest.param({**SRUN, **DEEPSPEED, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, 1, id="within a step"),
    ],
)
def test_the_names_of_each_launcher(env: dict[str, str], host_rank: int) -> None:
    assert numbers_of(env) == {
        "rank": 5,
        "local_rank": 1,
        "world_size": 8,
        "local_size": 4,
        "host_rank": host_rank,
    }


@pytest.mark.parametrize(
    ("env", "fact", "tried"),
    [
        ({}, "rank", "RANK, OMPI_COMM_WORLD_RANK, PMI_RANK, MV2_COMM_WORLD_RANK, SLURM_PROCID"),
        ({"RANK": "zero"}, "rank", "RANK, OMPI"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "local rank", "LOCAL_RANK, OMPI"),
        ({"RANK": "0", "LOCAL_RANK": "0"}, "world size", "WORLD_SIZE, OMPI"),
    ],
)
def test_a_launcher_with_other_names_is_an_error(env: dict[str, str], fact: str, tried: str) -> None:
    with pytest.raises(SystemExit) as caught:
        numbers_of(env)
    assert f"was not told its {fact}: none of {tried}" in str(caught.value)


def test_it_is_told_by_the_process_itself(tmp_path: Path) -> None:
    control = tmp_path / "control.json"
    control.write_text(json.dumps({"addresses": [["127.0.0.1", 1]], "token": "t", "sys_path": sys.path}))
    done = subprocess.run(
        [sys.executable, deepspeed_rank.__file__, str(control)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1, done
    assert "was not told its rank" in done.stderr
    assert "Traceback" not in done.stderr
