"""How is a training handed in to SLURM?

Decision: the folder of the log is made here, for SLURM does not make it and a job without it dies without a word;
the script goes to sbatch by its standard input and is kept by SLURM (``scontrol write batch_script``). Turned down: a
file beside the logs, which looks like the one to edit and is not.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping

import typer

from ckptrun.cli.app import PASSED_ON
from ckptrun.cli.options import takes
from ckptrun.cli.output import print_json, say
from ckptrun.cli.slurm_job import LEFT_OUT, AskedFor, JobOptions, asked_for
from ckptrun.environment.slurm import outside_of_the_job
from ckptrun.errors import UsageError
from ckptrun.launch.sbatch import BatchJob, batch_script, log_folder, log_path


@takes(JobOptions, without=LEFT_OUT, own_first=True)
def submit(ctx: typer.Context, options: JobOptions) -> int:
    """Hand in a job that trains to the end.

    It makes the folder of the log, hands in what `ckptrun slurm script` prints, and says where to look.
    """
    asked = asked_for(options, ctx.meta[PASSED_ON], os.environ, "submit")
    text = batch_script(asked.job)
    _make_log_folder(asked.job, asked.folder)
    job_id, _, cluster = hand_in(text, os.environ).partition(";")
    log = os.path.join(asked.folder, log_path(asked.job, job_id))
    watch = _ways_to_watch(asked, job_id, log, cluster)
    if options.json:
        print_json(
            {
                "job_id": job_id,
                "cluster": cluster or None,
                "run": asked.run,
                "job_name": asked.job.job_name,
                "log": log,
                "watch": [command for command, _ in watch],
                "script": text,
            }
        )
        return 0
    say(f"submitted job {job_id}" + (f" on cluster {cluster}" if cluster else "") + f": run {asked.run}")
    say(f"log: {log}")
    width = max(len(command) for command, _ in watch)
    for command, meaning in watch:
        say(f"    {command.ljust(width)}  {meaning}")
    return 0


def hand_in(text: str, env: Mapping[str, str]) -> str:
    """Hand a script in, and return what ``sbatch --parsable`` says: the job's id, and behind ``;`` its cluster.

    Raises:
        UsageError: there is no sbatch here, or it refuses the script.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"],
            input=text,
            env=outside_of_the_job(env),
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise UsageError(
            "there is no sbatch on this machine; nothing was handed in.",
            hint="Call it where jobs are handed in from, or print the script with 'ckptrun slurm script'.",
        ) from error
    if done.returncode != 0:
        raise UsageError(f"sbatch refused the job; nothing was handed in:\n{done.stderr.strip()}")
    return done.stdout.strip().splitlines()[-1]


def _make_log_folder(job: BatchJob, folder_of_the_job: str) -> None:
    folder = log_folder(job)
    if not folder:
        return
    path = os.path.join(folder_of_the_job, folder)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the folder for the log cannot be made: {path}: {error.strerror}; nothing was handed in.",
            hint="Name another one with --log-dir.",
        ) from error


def _ways_to_watch(asked: AskedFor, job_id: str, log: str, cluster: str) -> list[tuple[str, str]]:
    where = ["--clusters", cluster] if cluster else []
    writes = "what it writes" if "*" not in log else "what its tasks write, once they run"
    ways = [(f"tail -F {_quoted_but_stars(log)}", writes)]
    if "*" not in asked.run:
        status = ["ckptrun", "status", asked.run, "--root", asked.root, "--watch"]
        ways.append((shlex.join(status), "how far it is"))
    else:
        ways.append((shlex.join(["ckptrun", "runs", "--root", asked.root]), "how far its runs are"))
    ways.append((shlex.join(["squeue", *where, "--job", job_id]), "whether it waits or runs"))
    ways.append((shlex.join(["scancel", *where, job_id]), "ends it, with a checkpoint"))
    return ways


def _quoted_but_stars(path: str) -> str:
    """A path for the shell, which fills in the stars."""
    return "*".join(shlex.quote(part) if part else "" for part in path.split("*"))
