"""What a job hands on to one that is handed in from within it."""

from __future__ import annotations

from ckptrun.environment.slurm import outside_of_the_job

USER = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "x", "CKPTRUN_CONFIG": "c.yaml"}
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_RESTART_COUNT": "2",
    "SLURM_ARRAY_TASK_ID": "1",
    "SLURMD_NODENAME": "n1",
    "SRUN_CPUS_PER_TASK": "4",
    "ENVIRONMENT": "BATCH",
    "CKPTRUN_PREVIOUS_JOBS": "5",
}


def test_the_new_job_knows_nothing_of_the_old_one() -> None:
    assert outside_of_the_job({**USER, **JOB}) == USER
