"""What does the sbatch script of a training look like? Printed, so that it can be read, kept and changed."""

from __future__ import annotations

import os

import typer

from ckptrun.cli.app import PASSED_ON
from ckptrun.cli.options import takes
from ckptrun.cli.output import note, print_json, say
from ckptrun.cli.slurm_job import LEFT_OUT, JobOptions, asked_for
from ckptrun.launch.sbatch import batch_script, log_folder_from_here, log_pattern


@takes(JobOptions, without=LEFT_OUT, own_first=True)
def script(ctx: typer.Context, options: JobOptions) -> int:
    """Print an sbatch script that trains to the end.

    It is the same script for the first start and for every requeue. Any option of sbatch may stand behind `--`:
    `ckptrun slurm script -c gpt.yaml --nodes 2 --gpus-per-node 8 --time 4:00:00 -- --account=x > gpt.sbatch`
    """
    asked = asked_for(options, ctx.meta[PASSED_ON], os.environ, "script")
    text = batch_script(asked.job)
    for doubt in asked.warnings:
        note(f"ckptrun: warning: {doubt}")
    if options.json:
        print_json(
            {
                "run": asked.run,
                "job_name": asked.job.job_name,
                "log": log_pattern(asked.job),
                "log_folder": log_folder_from_here(asked.job),
                "script": text,
            }
        )
    else:
        say(text.rstrip("\n"))
    return 0
