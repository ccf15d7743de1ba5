"""What is a run doing now? Exit code 0 for any run that exists, whatever it is doing.

Decision: ``--watch`` rewrites its lines in place on a terminal and writes one line a change elsewhere, so
that it can be logged. Turned down: a full-screen display, which loses what it showed when it ends.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from ckptrun.checkpoint.manifest import read_manifest
from ckptrun.cli.options import ConfigOption, DebugOption, JsonOption, RootOption, RunArgument, RunOption
from ckptrun.cli.output import age, metrics_text, print_json, say, style, when
from ckptrun.cli.settle import named_once, settle_run
from ckptrun.environment.node_list import expand
from ckptrun.environment.slurm_queue import QueueJob, read_job
from ckptrun.environment.slurm_successor import successor_of
from ckptrun.errors import DamagedCheckpointError, UnknownRunError
from ckptrun.inspect.deepspeed_files import NOTE, in_words
from ckptrun.inspect.deepspeed_files import summary as summary_of_shards
from ckptrun.records import Status
from ckptrun.run.attempts import read_attempts, read_requeues
from ckptrun.run.folder import RunFolder
from ckptrun.run.registry import DamagedRegistryError, Registry
from ckptrun.run.status import StatusRecord, read_status
from ckptrun.run.submitted import SubmittedJob, read_submitted

KEYS = (
    "run", "status", "stop_reason", "fn", "stage", "step", "epoch", "max_steps", "metrics", "checkpoint",
    "attempt", "ranks", "heartbeat_age_s", "exit_code", "job", "deepspeed",
)  # fmt: skip
_LIVE = (Status.INITIALIZING, Status.RUNNING)
_WATCH_EVERY_S = 1.0
_ASK_EVERY_S = 10.0
# What SLURM calls jobs that do not come back by themselves.
_ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
)  # fmt: skip
_COLOURS = {
    Status.RUNNING: "green", Status.FINISHED: "green", Status.INTERRUPTED: "yellow", Status.LOST: "red",
}  # fmt: skip


def status(
    run_argument: RunArgument = None,
    run: RunOption = None,
    root: RootOption = None,
    config: ConfigOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again and again until the run has stopped.")
    ] = False,
    json: JsonOption = False,
    debug: DebugOption = False,  # noqa: ARG001 - main() reads it
) -> int:
    """Show the state of one run."""
    folder = settle_run(named_once(run_argument, run), root, config, os.environ, or_submitted=True)
    record = read_status(folder)
    job = job_of(folder, record)
    if watch and record is None:
        record, job = _until_it_begins(folder, job, quiet=json)
    if record is None and not folder.exists() and not lives(job):
        raise _never_began(folder, job)
    num_lines, shown = 0, ""
    in_place = sys.stdout.isatty()
    while watch and record is not None and record.status in _LIVE:
        lines = describe(record, decided(folder), job) if in_place else [summary(record)]
        if in_place and num_lines:
            say(f"\x1b[{num_lines}F\x1b[J" + "\n".join(lines))
        elif not json and summary(record) != shown:
            say("\n".join(lines))
        num_lines, shown = len(lines), summary(record)
        time.sleep(_WATCH_EVERY_S)
        record = read_status(folder)
    if watch:
        job = job_of(folder, record)  # not in each second: all users of a cluster ask the one controller
    if json:
        print_json(document(folder, record, job))
    elif record is None:
        say(f"{folder.name}: {_before_the_first_step(job)}")
    else:
        if in_place and num_lines:
            say(f"\x1b[{num_lines}F\x1b[J" + "\n".join(describe(record, decided(folder), job)))
        else:
            say("\n".join(describe(record, decided(folder), job)))
    return 0


def job_of(folder: RunFolder, record: StatusRecord | None) -> QueueJob | None:
    """What the queue says about the run's SLURM job; None where there is none, or no SLURM.

    It is the one that was handed in last, as long as that waits to enter the ledger, else that of the newest attempt,
    unless the run has finished.
    """
    try:
        attempts = read_attempts(folder.attempts)
    except OSError:
        return None
    submitted = read_submitted(folder)
    if submitted is not None and all(attempt.job != submitted.job for attempt in attempts):
        job = read_submitted_job(submitted)
        if not attempts or lives(job):
            return job
    if record is None or record.status is Status.FINISHED:
        return None
    key = attempts[-1].job if attempts else None
    job = None if key is None else _named_as_asked(read_job(key), key)
    if key is not None and not lives(job) and _left_to_its_script(folder, key):
        successor = successor_of(key)
        if successor is not None:
            return _named_as_asked(read_job(successor), successor) or job
    return job


def _left_to_its_script(folder: RunFolder, key: str) -> bool:
    """Whether a job has ended with 75, so that its script may have handed in another."""
    try:
        requeues = read_requeues(folder.attempts)
    except OSError:
        return False
    return bool(requeues) and requeues[-1].job == key and requeues[-1].by == "exit-code"


def read_submitted_job(submitted: SubmittedJob) -> QueueJob | None:
    """What the queue says about a job that was handed in."""
    env = os.environ if submitted.cluster is None else {**os.environ, "SLURM_CLUSTERS": submitted.cluster}
    return _named_as_asked(read_job(submitted.job, env), submitted.job)


def lives(job: QueueJob | None) -> bool:
    """Whether a job waits or runs."""
    return job is not None and job.state not in _ENDED


def _named_as_asked(job: QueueJob | None, key: str) -> QueueJob | None:
    """An array's task has an id of its own, which nobody else calls it by."""
    return None if job is None else replace(job, id=key)


def _until_it_begins(
    folder: RunFolder, job: QueueJob | None, *, quiet: bool
) -> tuple[StatusRecord | None, QueueJob | None]:
    shown, asked_at = "", time.monotonic()
    while (record := read_status(folder)) is None and lives(job):
        text = f"{folder.name}: {_before_the_first_step(job)}"
        if text != shown and not quiet:
            say(text)
        shown = text
        time.sleep(_WATCH_EVERY_S)
        if time.monotonic() - asked_at > _ASK_EVERY_S:
            job, asked_at = job_of(folder, None), time.monotonic()
    return record, job


def _before_the_first_step(job: QueueJob | None) -> str:
    if job is None:
        return "it has never written a status"
    return f"job {job_text(job, time.time(), first=True)}"


def _never_began(folder: RunFolder, job: QueueJob | None) -> UnknownRunError:
    submitted = read_submitted(folder)
    assert submitted is not None
    fate = "the queue does not know it" if job is None else f"it is {job.state.lower()}"
    return UnknownRunError(
        f"there is no run {folder.name!r} under {folder.root}: job {submitted.job} was handed in for it, and {fate}",
        hint=f"What it said is in its log: {submitted.log}" if submitted.log else None,
    )


def document(folder: RunFolder, record: StatusRecord | None, job: QueueJob | None = None) -> dict[str, Any]:
    """What ``status --json`` says; a run that has never written a status has ``status`` null."""
    if record is None:
        waits = None if job is None else job_document(job, time.time())
        return {**dict.fromkeys(KEYS), "run": folder.name, "metrics": {}, "ranks": [], "job": waits}
    known = {
        **record.to_dict(),
        "job": None if job is None else job_document(job, time.time()),
        "deepspeed": _shards(record),
    }
    return {key: known[key] for key in KEYS}


def job_document(job: QueueJob, now: float) -> dict[str, Any]:
    """A job in the queue, for a program."""
    runs = job.state == "RUNNING"
    return {
        "id": job.id,
        "state": job.state,
        "reason": job.reason or None,
        "restarts": job.restarts,
        "nodes": expand(job.nodes) if runs else [],
        "left_s": job.end - now if runs and job.end is not None else None,
        "starts_at": job.start if job.state == "PENDING" else None,
    }


def job_text(job: QueueJob, now: float, *, first: bool = False) -> str:
    """A job in the queue, in a line.

    Args:
        first: its run has not begun yet.
    """
    parts = [f"{job.id} is {job.state.lower()}"]
    if job.state == "PENDING":
        again = f"to start again ({job.restarts} so far)" if job.restarts else "to start"
        again = "for its first start" if first and not job.restarts else again
        parts = [f"{job.id} waits {again}"]
        if job.reason:
            parts.append(job.reason)
        if job.start is not None:
            parts.append(f"not before {when(job.start)}")
    elif job.state == "RUNNING":
        parts = [f"{job.id} runs on {', '.join(expand(job.nodes))}"]
        if job.end is not None:
            parts.append(f"{age(max(0.0, job.end - now))} left")
    return ", ".join(parts)


def _shards(record: StatusRecord) -> dict[str, Any] | None:
    """Stage, ranks and shards of the newest checkpoint, where DeepSpeed's strategy wrote it."""
    if record.checkpoint is None:
        return None
    try:
        manifest = read_manifest(record.checkpoint)
    except (OSError, DamagedCheckpointError):
        return None
    note = manifest.extra.get(NOTE)
    if note is None:
        return None
    return summary_of_shards(note, manifest.world_size, [(f.path, f.size_bytes) for f in manifest.files])


def state(record: StatusRecord) -> str:
    """The status with its stop reason, as one word or two: ``INTERRUPTED (keyboard)``."""
    if record.status is Status.LOST and record.lost_since is not None:
        return f"LOST since {when(record.lost_since)}"
    return f"{record.status} ({record.stop_reason})" if record.stop_reason else str(record.status)


def position(record: StatusRecord) -> str:
    """The step, of how many."""
    return f"{record.step}/{record.max_steps}" if record.max_steps else str(record.step)


def summary(record: StatusRecord) -> str:
    """One line about a run."""
    stage = f" {record.stage}" if record.status in _LIVE and record.stage else ""
    parts = [f"{record.run}: {state(record)}{stage}", f"step {position(record)}", f"epoch {record.epoch}"]
    return ", ".join([*parts, *filter(None, [metrics_text(_known(record))])])


def decided(folder: RunFolder) -> list[tuple[str, str]]:
    """What the user decided about checkpoints, and what was set aside; empty where the registry does not say."""
    try:
        registry = Registry.load(folder.registry)
    except (OSError, DamagedRegistryError):
        return []
    facts = []
    if registry.pin is not None:
        reference, path = registry.pin.get("reference"), registry.pin["path"]
        facts.append(("pin", path if reference in (None, path) else f"{reference}: {path}"))
    if registry.keeps:
        facts.append(("kept", ", ".join(registry.keeps)))
    if registry.quarantine:
        facts.append(("quarantine", ", ".join(registry.quarantine)))
    return facts


def describe(
    record: StatusRecord, more: Sequence[tuple[str, str]] = (), job: QueueJob | None = None
) -> list[str]:
    """A run in a few lines, one fact a line.

    Args:
        more: further facts, each with its name; shown after the checkpoint.
        job: the SLURM job of its newest attempt, where the queue knows it.
    """
    facts: list[tuple[str, str]] = [
        ("run", record.run),
        ("status", style(state(record), _COLOURS.get(record.status, "bold"))),
    ]
    if record.status in _LIVE and record.stage:
        facts.append(("stage", record.stage))
    facts.append(("step", f"{position(record)}, epoch {record.epoch}"))
    if record.metrics:
        facts.append(("metrics", metrics_text(_known(record), most=8)))
    facts.append(("checkpoint", record.checkpoint or "none yet"))
    shards = _shards(record)
    if shards is not None:
        facts.append(("deepspeed", in_words(shards)))
    facts += more
    facts.append(("attempt", f"{record.attempt} ({record.fn})"))
    if record.status in _LIVE:
        ranks = ", ".join(f"{rank.rank}: pid {rank.pid} on {rank.host}" for rank in record.ranks)
        facts.append(("ranks", ranks or "none yet"))
    if job is not None:
        facts.append(("job", job_text(job, time.time())))
    facts.append(("last sign", f"{age(record.heartbeat_age_s)} ago"))
    if record.exit_code is not None:
        facts.append(("exit code", str(record.exit_code)))
    width = max(len(name) for name, _ in facts)
    return [f"{name.ljust(width)}  {text}" for name, text in facts]


def _known(record: StatusRecord) -> dict[str, float]:
    return {name: float("nan") if value is None else value for name, value in record.metrics.items()}
