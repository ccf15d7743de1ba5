"""What does the sbatch script of a training look like?

Decision: a pure function from what is asked for to the whole text, so that tests compare whole scripts and the
ready ones in ``configs/slurm/`` are what it writes. The script starts ckptrun with ``srun``: a plain ``--signal``
then reaches ckptrun and not the shell, and the shell lives on to act on exit code 75. Turned down: ``exec ckptrun``
with ``--signal=B:``, which works for one task and leaves nobody there to put the job back into the queue where
ckptrun cannot; a template file with holes, whose values nobody quotes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ckptrun.errors import UsageError
from ckptrun.launch.sbatch_options import SbatchOption
from ckptrun.launch.script_quoting import bash_join, bash_quote, sbatch_quote

DEFAULT_LOG_DIR = "slurm-logs"
DEFAULT_LEAD_S = 120
_TIME_FORMS = (
    "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes[:seconds] or UNLIMITED"
)


@dataclass(frozen=True)
class BatchJob:
    """What is asked of SLURM, and what is run.

    Args:
        command: the words of ``ckptrun fit …``; in a job array ``%a`` in them is the task's number (``%%a`` is ``%a``).
        array: the numbers of a job array's tasks, as sbatch takes them.
        gpus_per_node: a number, with the kind of GPU in front where it matters (``a100:4``).
        time_limit: in one of SLURM's forms; the partition's where None.
        signal: its name, without SIG; None where none is to announce the time limit.
        lead_s: how long before the time limit the signal comes; a part of the time limit where None.
        requeues: whether the script itself acts on exit code 75.
        container: the words that run ckptrun in a container.
        set_up: lines of bash that come before it, as they are.
        options: of sbatch, which replace what the script says otherwise.
        written_by: the words of the command that writes this script.
    """

    command: tuple[str, ...]
    job_name: str
    nodes: str = "1"
    ntasks_per_node: str = "1"
    gpus_per_node: str | None = None
    cpus_per_task: str | None = None
    time_limit: str | None = None
    array: str | None = None
    log_dir: str = DEFAULT_LOG_DIR
    signal: str | None = "USR1"
    lead_s: int | None = None
    requeues: bool = True
    container: tuple[str, ...] = ()
    set_up: tuple[str, ...] = ()
    options: tuple[SbatchOption, ...] = ()
    written_by: tuple[str, ...] = ()


# Options of sbatch that are fields of a job.
_FIELDS = {
    "job-name": "job_name",
    "nodes": "nodes",
    "ntasks-per-node": "ntasks_per_node",
    "gpus-per-node": "gpus_per_node",
    "cpus-per-task": "cpus_per_task",
    "time": "time_limit",
    "array": "array",
}


def with_options(job: BatchJob, options: tuple[SbatchOption, ...]) -> BatchJob:
    """The job with options of sbatch: those that are a field of it replace the field, the rest are kept beside."""
    for option in options:
        field = _FIELDS.get(option.name)
        if field is not None:
            changed: dict[str, Any] = {field: option.value}
            job = replace(job, **changed)
    return replace(job, options=tuple(option for option in options if option.name not in _FIELDS))


def batch_script(job: BatchJob) -> str:
    """The whole script.

    Raises:
        UsageError: what is asked for does not go together, or a value cannot be written.
    """
    blocks = ([*_head(job), *_directives(job)], [*_variables(job)], [*job.set_up], [*_command(job)])
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def log_pattern(job: BatchJob) -> str:
    """Where SLURM is told to write the log, with its own place holders.

    Raises:
        UsageError: the folder's name has what switches all place holders off.
    """
    given = _last(job, "output")
    if given is not None:
        return given
    if "\\" in job.log_dir:
        raise UsageError(
            f"the folder for logs {job.log_dir!r} has a backslash, and SLURM replaces nothing in such a path.",
            hint="Name another one with --log-dir.",
        )
    # %x would be the job's name as it is, and a slash in it another folder.
    name = job.job_name.replace("/", "_").replace("%", "%%") if "/" in job.job_name else "%x"
    number = "%j" if job.array is None else "%A_%a"
    folder = "" if job.log_dir == os.curdir else job.log_dir.replace("%", "%%")
    return os.path.join(folder, f"{name}-{number}.out")


def log_path(job: BatchJob, job_id: str) -> str:
    """Where the log of the job will be; ``*`` stands for what is different for each task or node."""

    numbers = {"%j": job_id} if job.array is None else {"%A": job_id}  # in an array %j is each task's own
    known = {"%%": "%", "%x": job.job_name, **numbers}

    def filled(found: re.Match[str]) -> str:
        return known.get(found[0], "*")

    pattern = log_pattern(job)
    return pattern if "\\" in pattern else re.sub(r"%(%|\d*[a-zA-Z])", filled, pattern)


def log_folder(job: BatchJob) -> str | None:
    """The folder of the log, as :func:`log_folders` has it."""
    return _folder_of(log_pattern(job))


def log_folders(job: BatchJob) -> tuple[str, ...]:
    """The folders that have to be there before the job starts: of the log, and of what ``--error`` names.

    Those whose names SLURM itself decides are not known.
    """
    patterns = (log_pattern(job), _last(job, "error"))
    folders = [_folder_of(pattern) for pattern in patterns if pattern is not None]
    return tuple(dict.fromkeys(folder for folder in folders if folder))


def _folder_of(pattern: str) -> str | None:
    """None where SLURM itself decides its name."""
    folder = os.path.dirname(pattern)
    if "\\" in folder:
        return folder
    return None if re.search(r"%[^%]", folder.replace("%%", "")) else folder.replace("%%", "%")


def log_folder_from_here(job: BatchJob) -> str | None:
    """The same folder from where sbatch is called: the job's own paths begin where ``--chdir`` says."""
    folder = log_folder(job)
    return _from_here(job, folder) if folder else folder


def _from_here(job: BatchJob, folder: str) -> str:
    return os.path.join(_last(job, "chdir") or "", folder)


def limit_s(text: str) -> int | None:
    """A time limit in seconds, None where there is none, which SLURM also calls 0.

    Raises:
        UsageError: it has none of SLURM's forms.
    """
    if text.upper() in ("UNLIMITED", "INFINITE", "-1"):
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text, re.ASCII)
    if found is None:
        raise UsageError(
            f"the time limit is {text!r}, expected {_TIME_FORMS}.", hint="For example --time 4:00:00"
        )
    days, *parts = (None if part is None else int(part) for part in found.groups())
    first, second, third = parts
    assert first is not None
    if days is not None:
        seconds = ((days * 24 + first) * 60 + (second or 0)) * 60 + (third or 0)
    elif third is not None:
        seconds = (first * 60 + (second or 0)) * 60 + third
    else:
        seconds = first * 60 + (second or 0)
    return seconds or None


def lead_s(job: BatchJob) -> int:
    """How long before the time limit the signal comes.

    Raises:
        UsageError: as long as the time limit itself, or longer.
    """
    limit = None if job.time_limit is None else limit_s(job.time_limit)
    if job.lead_s is None:
        return DEFAULT_LEAD_S if limit is None else min(DEFAULT_LEAD_S, max(1, limit // 4))
    if limit is not None and job.lead_s >= limit:
        raise UsageError(
            f"the signal would come {job.lead_s} s before the end of a job of {limit} s.",
            hint="Shorten --lead-s, or give the job more --time.",
        )
    return job.lead_s


# -- the parts -------------------------------------------------------------------------------------------------


def _head(job: BatchJob) -> Iterator[str]:
    yield "#!/bin/bash"
    if job.written_by:
        yield f"# Written by: {bash_join(job.written_by)}"
    yield "# The same script for the first start and for every one after it: each goes on where the last one stopped."
    folders = [_from_here(job, folder) for folder in log_folders(job)]
    if folders:
        yield "# SLURM does not make the folder of the log, and a job without it dies without a word. Before sbatch:"
        yield f"#     mkdir -p {bash_join(folders)}"
    yield "#"


def _directives(job: BatchJob) -> Iterator[str]:
    yield _directive("job-name", job.job_name)
    if _last(job, "output") is None:
        yield _directive("output", log_pattern(job))
    if _last(job, "open-mode") is None:
        yield "# Every start goes on in the same log."
        yield _directive("open-mode", "append")
    if job.array is not None:
        yield _directive("array", job.array)
    yield _directive("nodes", job.nodes)
    per_rank = job.ntasks_per_node != "1"
    yield "# A task for each rank." if per_rank else "# One ckptrun a node, which starts the ranks there."
    yield _directive("ntasks-per-node", job.ntasks_per_node)
    if job.gpus_per_node is not None:
        yield _directive("gpus-per-node", job.gpus_per_node)
    if job.cpus_per_task is not None:
        yield "# Cores for the ranks of a task and their loader workers."
        yield _directive("cpus-per-task", job.cpus_per_task)
    if job.time_limit is not None:
        yield _directive("time", job.time_limit)
    if not any(option.name in ("requeue", "no-requeue") for option in job.options):
        yield "# Back into the queue after a preemption and after the loss of a node."
        yield "#SBATCH --requeue"
    if _last(job, "signal") is None and job.signal is None:
        yield "# No signal comes before the time limit (slurm.signals is empty): ckptrun itself looks at the time."
    elif _last(job, "signal") is None:
        lead = lead_s(job)
        then = "has the job requeued" if job.requeues else "ends with exit code 75"
        yield f"# {lead} s before the time limit ckptrun gets SIG{job.signal}, saves, and {then}."
        yield "# No 'B:' in front of it: that would reach this shell alone, which would die of it."
        yield _directive("signal", f"{job.signal}@{lead}")
    for option in job.options:
        if option.is_letters:
            yield f"#SBATCH -{option.name}"
        else:
            yield _directive(option.name, option.value)


def _variables(job: BatchJob) -> Iterator[str]:
    if job.requeues:
        yield "# The jobs whose work this one goes on with, where the end of this script handed it in."
        yield 'export CKPTRUN_PREVIOUS_JOBS="${1-}"'
        yield "# The folder of this job, and of one that the end of this script hands in."
        yield 'started_in="$PWD"'
    if job.cpus_per_task is not None:
        yield "# Since SLURM 22.05 srun does not take over --cpus-per-task, and would give each task a single core."
        yield 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"'


def _command(job: BatchJob) -> Iterator[str]:
    words = [bash_quote(word) if job.array is None else _with_task(word) for word in job.command]
    line = " ".join(["srun --export=ALL", *map(bash_quote, job.container), *words])
    if job.requeues:
        # Also where a line of the set-up lets the shell end at the first command that fails.
        yield from ("code=0", f"{line} || code=$?", *_ON_EXIT_75.splitlines())
    else:
        yield line


_ON_EXIT_75 = """
# 75: saved, and not requeued by ckptrun, which has no scontrol (in a container, say), was refused, or has
# slurm.requeue=exit-code. So it is done from here, and where that is refused too, this script is handed in anew.
if [ "$code" -eq 75 ]; then
    task="${SLURM_ARRAY_TASK_ID-}"
    job="${task:+${SLURM_ARRAY_JOB_ID}_$task}"
    job="${job:-$SLURM_JOB_ID}"
    # It may have been requeued though the answer to that was lost: then it has more restarts than this start had.
    requeued() {
        case "$(scontrol --oneliner show job "$job")" in
            *" Restarts=${SLURM_RESTART_COUNT:-0} "*) return 1 ;;
            *" Restarts="*) return 0 ;;
        esac
        return 1
    }
    if ! scontrol requeue "$job" && ! requeued; then
        # The new job was never restarted, whatever this one was.
        env -u SLURM_RESTART_COUNT sbatch --chdir="$started_in" ${task:+"--array=$task"} "$0" \\
            "$job${CKPTRUN_PREVIOUS_JOBS:+,$CKPTRUN_PREVIOUS_JOBS}" ||
            echo "job $job could not be put back into the queue; hand it in again to go on" >&2
    fi
fi
exit "$code"
"""


def _directive(name: str, value: str | None) -> str:
    return f"#SBATCH --{name}" if value is None else f"#SBATCH --{name}={sbatch_quote(value)}"


def _with_task(word: str) -> str:
    """A word of bash in which ``%a`` is the number of the array task."""
    parts = re.split(r"(?<!%)%a", word)
    quoted = [bash_quote(part.replace("%%a", "%a")) if part else "" for part in parts]
    return '"$SLURM_ARRAY_TASK_ID"'.join(quoted) or "''"


def _last(job: BatchJob, name: str) -> str | None:
    """The value that an option of sbatch was given last, None where it was not given."""
    values = [option.value for option in job.options if option.name == name]
    return values[-1] if values else None
