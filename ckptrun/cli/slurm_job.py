"""Which batch job do `slurm script` and `slurm submit` mean?

Decision: they take the options of ``fit``, SLURM's own names for what is asked of SLURM, and anything else of
sbatch behind ``--``; the config is read, so that a mistake in it shows now and not after a night in the queue.
Turned down: options of our own for accounts, partitions and memory, of which no list would be complete.
"""

# No `from __future__ import annotations`: see cli/options.py.

import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from ckptrun.cli.drift import WAYS_ON, changes, told_of_changes
from ckptrun.cli.options import FnOptions, command_line
from ckptrun.cli.settle import Settled, settle_fn
from ckptrun.config.source_defaults import find_module
from ckptrun.config.support import check_supported
from ckptrun.errors import IncompatibleError, UsageError
from ckptrun.launch.sbatch import DEFAULT_LEAD_S, DEFAULT_LOG_DIR, BatchJob, with_options
from ckptrun.launch.sbatch_options import SbatchOption, parse_sbatch_options
from ckptrun.run.folder import RunFolder

_JOB = "Job"
_TASK = re.compile(r"(?<!%)%a")

# Of sbatch's options those that ask for GPUs, beside --gpus-per-node.
_GPU_OPTIONS = ("gpus", "gpus-per-task", "gres")

# Of fit's options those that SLURM answers, or that only show something.
LEFT_OUT = frozenset({"print_config", "dry_run", "nnodes", "rdzv_endpoint", "no_slurm"})


@dataclass(frozen=True, eq=False, repr=False)
class JobOptions(FnOptions):
    """What ``slurm script`` and ``slurm submit`` take, beside options of sbatch behind ``--``."""

    nodes: Annotated[
        str | None,
        typer.Option(
            "--nodes", metavar="N", help="Nodes; launch.nnodes, or 1, where not given.", rich_help_panel=_JOB
        ),
    ] = None
    ntasks_per_node: Annotated[
        str | None,
        typer.Option(
            "--ntasks-per-node",
            metavar="N",
            help="1: one ckptrun a node starts the ranks there. More: a task for each rank.",
            rich_help_panel=_JOB,
        ),
    ] = None
    gpus_per_node: Annotated[
        str | None,
        typer.Option("--gpus-per-node", metavar="[TYPE:]N", help="A rank for each.", rich_help_panel=_JOB),
    ] = None
    cpus_per_task: Annotated[
        str | None,
        typer.Option(
            "--cpus-per-task",
            metavar="N",
            help="Cores of a task; enough for its ranks and their loader workers where not given.",
            rich_help_panel=_JOB,
        ),
    ] = None
    time: Annotated[
        str | None,
        typer.Option(
            "--time", metavar="TIME", help="Time limit of each start: 4:00:00.", rich_help_panel=_JOB
        ),
    ] = None
    array: Annotated[
        str | None,
        typer.Option(
            "--array",
            metavar="TASKS",
            help="A job array, each task a run of its own; %a in KEY=VALUE or --run is the task's number.",
            rich_help_panel=_JOB,
        ),
    ] = None
    job_name: Annotated[
        str | None,
        typer.Option(
            "--job-name", metavar="NAME", help="The run's name where not given.", rich_help_panel=_JOB
        ),
    ] = None
    log_dir: Annotated[
        str | None,
        typer.Option(
            "--log-dir",
            metavar="DIR",
            help=f"The folder of the jobs' logs; {DEFAULT_LOG_DIR} where not given.",
            rich_help_panel=_JOB,
        ),
    ] = None
    lead_s: Annotated[
        str | None,
        typer.Option(
            "--lead-s",
            metavar="SECONDS",
            help=f"How long before the time limit the signal comes; {DEFAULT_LEAD_S}, or a quarter of a short limit.",
            rich_help_panel=_JOB,
        ),
    ] = None
    container: Annotated[
        str | None,
        typer.Option(
            "--container",
            metavar="COMMAND",
            help="What runs ckptrun in a container: 'apptainer exec --nv image.sif'.",
            rich_help_panel=_JOB,
        ),
    ] = None
    set_up: Annotated[
        list[str] | None,
        typer.Option(
            "--set-up",
            metavar="LINE",
            help="A line of bash to run first: 'module load cuda'; may be given several times.",
            rich_help_panel=_JOB,
        ),
    ] = None


@dataclass(frozen=True)
class AskedFor:
    """The job, the run that it trains and its root, and the folder in which it will run, where relative paths begin.

    In a job array ``run`` has ``*`` for the task's number. ``warnings`` are what is likely not meant so.
    """

    job: BatchJob
    run: str
    root: str
    folder: str
    warnings: tuple[str, ...] = ()


def asked_for(options: JobOptions, sbatch_words: list[str], env: Mapping[str, str], command: str) -> AskedFor:
    """The job that the options ask for.

    Args:
        sbatch_words: what stands behind ``--``.
        command: ``script`` or ``submit``.

    Raises:
        ConfigError: there is no config, or something in it is wrong or not available yet.
        UsageError: what is asked for does not go together.
        IncompatibleError: it is to be handed in, and the run cannot go on with this config.
    """
    if not options.config and env.get("CKPTRUN_CONFIG"):
        # The job may start in another environment.
        options = replace(options, config=[p for p in env["CKPTRUN_CONFIG"].split(os.pathsep) if p])
    passed_on = parse_sbatch_options(sbatch_words)
    array = next((option.value for option in passed_on if option.name == "array"), options.array)
    if array is None and _has_task(_named(options) or ""):
        raise UsageError(
            f"the run is named {_named(options)!r}, where %a is the number of an array's task, and there is no array.",
            hint="Ask for one with --array, or name the run without %a.",
        )
    settled = settle_fn("fit", _as_a_task_has_them(options, array), env)
    config = settled.config
    check_supported(config)
    if options.lead_s is not None and not config.slurm.signals:
        raise UsageError(
            "--lead-s is given, and slurm.signals is empty, so no signal comes before the time limit.",
            hint="Leave --lead-s out: ckptrun itself looks at the time.",
        )
    given = BatchJob(
        command=(),
        job_name=_job_name(_named(options) or settled.folder.name, array)
        if options.job_name is None
        else options.job_name,
        nodes=str(config.launch.nnodes) if options.nodes is None else options.nodes,
        ntasks_per_node=options.ntasks_per_node or "1",
        gpus_per_node=options.gpus_per_node,
        cpus_per_task=options.cpus_per_task,
        time_limit=options.time,
        array=options.array,
        log_dir=options.log_dir or DEFAULT_LOG_DIR,
        signal=_signal_name(config.slurm.signals),
        lead_s=None if options.lead_s is None else _number(options.lead_s, "--lead-s"),
        requeues=config.slurm.requeue != "none",
        container=tuple(shlex.split(options.container or "")),
        set_up=tuple(options.set_up or ()),
        written_by=_written_by(command, options, sbatch_words),
    )
    job = with_options(given, passed_on)
    nproc = _ranks_of_a_task(job, settled)
    _check_strategy(job, nproc, settled)
    if job.cpus_per_task is None:
        job = replace(job, cpus_per_task=str(_cores(nproc, settled)))
    _number(job.cpus_per_task or "", "--cpus-per-task")
    words = _command(options, settled, job, nproc)
    run = settled.folder.name
    if job.array is not None:
        run = _run_of_a_task(options, settled).replace("%a", "*")
    folder = _folder(job)
    root = settled.config.root
    root = root if folder == os.getcwd() else os.path.join(folder, root)
    first = re.match(r"\d+", job.array or "")
    doubts = [*_doubts(job, nproc, settled), *_missed_modules(job, settled, folder)]
    changed = _changes(options, settled, RunFolder.at(root, run.replace("*", first[0] if first else "*")))
    if changed is not None and command == "submit":
        raise IncompatibleError(changed, hint=f"Nothing was handed in. {WAYS_ON}")
    return AskedFor(
        replace(job, command=words), run, root, folder, (*doubts, *([] if changed is None else [changed]))
    )


def _as_a_task_has_them(options: JobOptions, array: str | None) -> JobOptions:
    """The options for reading the config here: values that differ from task to task are those of the first one."""
    first = re.match(r"\d+", array or "")
    overrides = [text if first is None else _TASK.sub(first[0], text) for text in options.overrides or ()]
    return replace(options, overrides=overrides, no_slurm=True)


def _job_name(run: str, array: str | None) -> str:
    return run if array is None else run.replace("%a", "").strip("-_. ") or "ckptrun"


def _folder(job: BatchJob) -> str:
    chosen = [option.value for option in job.options if option.name == "chdir" and option.value]
    return os.path.abspath(chosen[-1] if chosen else os.curdir)


def _written_by(command: str, options: JobOptions, sbatch_words: list[str]) -> tuple[str, ...]:
    words = ["ckptrun", "slurm", command, *command_line("fit", options)[2:]]
    return (*words, *(["--", *sbatch_words] if sbatch_words else []))


def _command(options: JobOptions, settled: Settled, job: BatchJob, nproc: int) -> tuple[str, ...]:
    """The words of ``ckptrun fit``: the user's own, ``--ckpt last``, and what the job's shape asks for."""
    fit = FnOptions(**{name: getattr(options, name) for name in FnOptions.__dataclass_fields__})
    if fit.ckpt is None:
        fit = replace(fit, ckpt="last")
    if _folder(job) != os.getcwd():
        # Found and read here, and not there.
        fit = replace(fit, config=[os.path.abspath(path) for path in settled.config.files])
    if settled.config.launch.nproc != "auto" and settled.config.launch.nproc != nproc:
        fit = replace(fit, nproc=str(nproc))
    if job.array is not None and settled.name_was_given:
        fit = replace(fit, run=_run_of_a_task(options, settled))
    words = command_line("fit", fit)
    return (*_program(job), *words[1:])


def _run_of_a_task(options: JobOptions, settled: Settled) -> str:
    """The run of an array's task. Two tasks of one name would be one run, and the second is turned away from it."""
    name = _named(options) or settled.folder.name
    return name if _has_task(name) else f"{name}-a%a"


def _named(options: JobOptions) -> str | None:
    """The run's name on the command line, as it was written there."""
    overrides = [text for text in options.overrides or () if text.startswith("run.name=")]
    return options.run if options.run is not None or not overrides else overrides[-1].partition("=")[2]


def _has_task(text: str) -> bool:
    """Whether ``%a``, the number of the array's task, stands in it."""
    return _TASK.search(text) is not None


def _program(job: BatchJob) -> tuple[str, ...]:
    """How the job starts ckptrun: by its name, unless it is not found by that here."""
    if job.container or shutil.which("ckptrun") is not None:
        return ("ckptrun",)
    return (sys.executable, "-m", "ckptrun")


def _ranks_of_a_task(job: BatchJob, settled: Settled) -> int:
    """How many ranks one ckptrun starts.

    Raises:
        UsageError: ranks, tasks and GPUs do not go together.
    """
    nproc, per_node = settled.config.launch.nproc, _number(job.ntasks_per_node, "--ntasks-per-node")
    gpus = (
        None
        if job.gpus_per_node is None
        else _number(job.gpus_per_node.rpartition(":")[2], "--gpus-per-node")
    )
    _number(job.nodes.partition("-")[0], "--nodes")
    if per_node > 1:
        if nproc not in (1, "auto"):
            raise UsageError(
                f"{per_node} tasks on each node are asked for, and {nproc} ranks in each of them.",
                hint=f"Either --ntasks-per-node {per_node} and no --nproc, or --nproc {nproc} and one task a node.",
            )
        if gpus is not None and per_node != gpus:
            raise UsageError(
                f"{per_node} tasks on each node are asked for, a rank each, and {gpus} GPUs.",
                hint=f"Use --ntasks-per-node {gpus}.",
            )
        return 1
    if nproc == "auto" or (nproc == 1 and settled.config.source("launch.nproc").kind == "default"):
        return gpus or 1
    if gpus is not None and int(nproc) != gpus:
        raise UsageError(
            f"{gpus} GPUs on each node are asked for, and --nproc is {nproc}.",
            hint=f"Use --nproc {gpus}, or --gpus-per-node {nproc}.",
        )
    return int(nproc)


def _doubts(job: BatchJob, nproc: int, settled: Settled) -> Iterator[str]:
    """What can be meant so, and hardly is."""
    taken = settled.config.slurm.signals
    for option in job.options:
        value = option.value or ""
        sent = value.rpartition(":")[2].partition("@")[0].upper()
        if option.name == "signal" and not any(_same_signal(sent, name) for name in taken):
            instead = [
                f"{name.removeprefix('SIG')}@{value.partition('@')[2] or DEFAULT_LEAD_S}"
                for name in taken[:1]
            ]
            yield (
                f"--signal={value} is none of the signals that announce the end (slurm.signals: "
                f"{', '.join(taken) or 'none'}): it does not have the job requeued. Name it there, or write "
                + (f"--signal={instead[0]}" if instead else "none")
            )
        if (
            option.name in _GPU_OPTIONS
            and nproc == 1
            and settled.config.source("launch.nproc").kind == "default"
        ):
            gpus = _gpus(option)
            if gpus > _number(job.ntasks_per_node, "--ntasks-per-node"):
                yield (
                    f"--{option.name}={value} asks for {gpus} GPUs, and one rank is started in each task: ask for them "
                    "with --gpus-per-node, or say how many ranks a node has with --nproc"
                )


def _missed_modules(job: BatchJob, settled: Settled, folder: str) -> Iterator[str]:
    """Modules of the config that are in the working folder, and will not be where the job runs."""
    if job.container or folder == os.getcwd():
        return
    config = settled.config
    specs = [
        spec for spec in (config.model, config.data, *config.callbacks, *config.loggers) if spec is not None
    ]
    for module in dict.fromkeys(spec.class_path.partition(".")[0] for spec in specs):
        if find_module(module, folder) is None and find_module(module, os.getcwd()) is not None:
            yield (
                f"the module {module!r} is in this folder, and the job runs in {folder}, where it will not be found: "
                f"leave --chdir out, or give the job a PYTHONPATH, as with --set-up {_export(os.getcwd())}"
            )


def _export(folder: str) -> str:
    return shlex.quote(f"export PYTHONPATH={shlex.quote(folder)}")


def _changes(options: JobOptions, settled: Settled, folder: RunFolder) -> str | None:
    """How the config differs from that of the run that the job goes on with, as ``fit`` would refuse it."""
    if options.override or options.ckpt == "none" or not _has_saved(folder):
        return None
    changed = changes(folder, settled.config)
    return told_of_changes(folder, changed) if changed else None


def _has_saved(folder: RunFolder) -> bool:
    try:
        with os.scandir(folder.checkpoints_dir) as entries:
            return any(not entry.name.startswith(".") for entry in entries)
    except OSError:
        return False


def _same_signal(text: str, name: str) -> bool:
    number = getattr(signal, name, None)
    return text.removeprefix("SIG") == name.removeprefix("SIG") or (
        text.isdecimal() and number is not None and int(text) == int(number)
    )


def _gpus(option: SbatchOption) -> int:
    """How many GPUs an option of sbatch asks for: ``4``, ``a100:4``, ``gpu``, ``gpu:a100:4,tmp:9``."""
    kinds = (option.value or "").split(",")
    if option.name == "gres":
        kinds = [kind for kind in kinds if re.match(r"(gres[/:])?gpu\b", kind)]
    numbers = [kind.rpartition(":")[2] for kind in kinds]
    return sum(int(number) if number.isdecimal() else 1 for number in numbers)


def _check_strategy(job: BatchJob, nproc: int, settled: Settled) -> None:
    num_ranks = int(job.nodes.partition("-")[0]) * int(job.ntasks_per_node) * nproc
    if settled.config.strategy.name == "single" and num_ranks > 1:
        raise UsageError(
            f"the strategy single is for one rank, and the job would have {num_ranks}.",
            hint="Several ranks run with ddp: use --strategy ddp, or ask for one node, one task and one GPU.",
        )


def _cores(nproc: int, settled: Settled) -> int:
    """Cores for the ranks of a task, their threads where the config says how many, and their loader workers."""
    config = settled.config
    return nproc * ((config.trainer.num_threads or 1) + config.num_loader_workers)


def _signal_name(names: tuple[str, ...]) -> str | None:
    """The name that sbatch has for the first of the config's signals; None where it names none."""
    return names[0].removeprefix("SIG") if names else None


def _number(text: str, option: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{option} is {text!r}, expected a whole number, 1 or more.")
    return int(text)
