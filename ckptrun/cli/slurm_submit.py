"""How is a training handed in to SLURM?

Decision: the folder of the log is made here, for SLURM does not make it and a job without it dies without a word;
the script goes to sbatch by its standard input and is kept by SLURM (``scontrol write batch_script``). Whether a job
was handed in is told by the number that sbatch prints: with ``--wait`` its exit code is the job's, and with
``--test-only`` it is 0 without a job. Turned down: a file beside the logs, which looks like the one to edit and is not.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import IO

import typer

from ckptrun.cli.app import PASSED_ON
from ckptrun.cli.options import takes
from ckptrun.cli.output import note, print_json, say
from ckptrun.cli.slurm_job import LEFT_OUT, AskedFor, JobOptions, asked_for
from ckptrun.cli.status import job_of, job_text, lives
from ckptrun.environment.slurm import outside_of_the_job
from ckptrun.errors import UsageError
from ckptrun.launch.sbatch import BatchJob, batch_script, log_folders, log_path
from ckptrun.run.folder import RunFolder
from ckptrun.run.status import read_status
from ckptrun.run.submitted import SubmittedJob, note_submitted


@takes(JobOptions, without=LEFT_OUT, own_first=True)
def submit(ctx: typer.Context, options: JobOptions) -> int:
    """Hand in a job that trains to the end.

    It makes the folder of the log, hands in what `ckptrun slurm script` prints, and says where to look.
    """
    asked = asked_for(options, ctx.meta[PASSED_ON], os.environ, "submit")
    text = batch_script(asked.job)
    for doubt in asked.warnings:
        note(f"ckptrun: warning: {doubt}")
    _make_log_folders(asked.job, asked.folder)
    before = _other_job(asked)
    if before is not None:
        note(f"ckptrun: warning: {before}")
    with handed_in(text, os.environ) as sbatch:
        job_id, _, cluster = sbatch.job.partition(";")
        if job_id:
            _tell(asked, job_id, cluster, text, as_json=options.json)
        elif any(option.name == "test-only" for option in asked.job.options):
            _tell_of_the_test(asked, sbatch, text, as_json=options.json)
        else:
            raise UsageError(f"sbatch has named no job; nothing was handed in:\n{sbatch.words()}")
        code = sbatch.wait()  # with --wait for the end of the job
        if job_id and sbatch.words():
            note(sbatch.words())
        return code


class Sbatch:
    """An ``sbatch --parsable`` that has been given a script.

    ``job`` is what it has printed: the job's id, and behind ``;`` its cluster; empty where there is no job.
    """

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[str]) -> None:
        assert process.stdout is not None
        self._process, self._errors = process, errors
        self.job = process.stdout.readline().decode(errors="replace").strip()

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        return self._process.wait()

    def words(self) -> str:
        """What it has said beside the job's id, once it has ended."""
        self.wait()
        self._errors.seek(0)
        return self._errors.read().strip()


@contextlib.contextmanager
def handed_in(text: str, env: Mapping[str, str]) -> Iterator[Sbatch]:
    """Hand a script in. With ``--wait`` sbatch still runs then, and waits for the end of the job.

    Raises:
        UsageError: there is no sbatch here, or it refuses the script.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        try:
            process = subprocess.Popen(
                ["sbatch", "--parsable"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=outside_of_the_job(env),
            )
        except FileNotFoundError as error:
            raise UsageError(
                "there is no sbatch on this machine; nothing was handed in.",
                hint="Call it where jobs are handed in from, or print the script with 'ckptrun slurm script'.",
            ) from error
        with process:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended without reading, and says why
                process.stdin.write(os.fsencode(text))
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            sbatch = Sbatch(process, errors)
            if not sbatch.job and sbatch.wait() != 0:
                raise UsageError(f"sbatch refused the job; nothing was handed in:\n{sbatch.words()}")
            yield sbatch


def _tell(asked: AskedFor, job_id: str, cluster: str, text: str, *, as_json: bool) -> None:
    log = os.path.join(asked.folder, log_path(asked.job, job_id))
    note_submitted(asked.root, SubmittedJob(asked.run, job_id, cluster or None, log))
    watch = _ways_to_watch(asked, job_id, log, cluster)
    if as_json:
        _print_json(asked, text, job_id=job_id, cluster=cluster or None, log=log, watch=[c for c, _ in watch])
        return
    say(f"submitted job {job_id}" + (f" on cluster {cluster}" if cluster else "") + f": run {asked.run}")
    say(f"log: {log}")
    width = max(len(command) for command, _ in watch)
    for command, meaning in watch:
        say(f"    {command.ljust(width)}  {meaning}")


def _tell_of_the_test(asked: AskedFor, sbatch: Sbatch, text: str, *, as_json: bool) -> None:
    note(sbatch.words())
    if as_json:
        _print_json(asked, text, job_id=None, cluster=None, log=None, watch=[])
    else:
        say("tested alone (--test-only); nothing was handed in")


def _print_json(
    asked: AskedFor, text: str, *, job_id: str | None, cluster: str | None, log: str | None, watch: list[str]
) -> None:
    print_json(
        {
            "job_id": job_id,
            "cluster": cluster,
            "run": asked.run,
            "job_name": asked.job.job_name,
            "log": log,
            "watch": watch,
            "script": text,
        }
    )


def _other_job(asked: AskedFor) -> str | None:
    """What is said where a job of the same run waits or runs already; None where none is known to."""
    if any(option.name == "dependency" for option in asked.job.options):
        return None  # it comes after that one
    folder = RunFolder.at(asked.root, asked.run)
    try:
        job = job_of(folder, read_status(folder, watch_s=0.0))
    except UsageError:  # a status that is damaged; the job will have something to say about it
        return None
    if job is None or not lives(job):
        return None
    return (
        f"job {job_text(job, time.time())}, and is of the same run: {asked.run}. While one of them runs, the other is "
        "turned away (exit 4)"
    )


def _make_log_folders(job: BatchJob, folder_of_the_job: str) -> None:
    for folder in log_folders(job):
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
