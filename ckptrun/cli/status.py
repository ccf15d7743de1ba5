"""What is a run doing now? Exit code 0 for any run that exists, whatever it is doing.

Decision: ``--watch`` rewrites its lines in place on a terminal and writes one line a change elsewhere, so
that it can be logged. Turned down: a full-screen display, which loses what it showed when it ends.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ckptrun.checkpoint.manifest import read_manifest
from ckptrun.cli.options import ConfigOption, DebugOption, JsonOption, RootOption, RunArgument, RunOption
from ckptrun.cli.output import age, metrics_text, print_json, say, style, when
from ckptrun.cli.settle import named_once, settle_run
from ckptrun.environment.node_list import expand
from ckptrun.environment.slurm_queue import QueueJob, read_job
from ckptrun.errors import DamagedCheckpointError
from ckptrun.inspect.deepspeed_files import NOTE, in_words
from ckptrun.inspect.deepspeed_files import summary as summary_of_shards
from ckptrun.records import Status
from ckptrun.run.attempts import read_attempts
from ckptrun.run.folder import RunFolder
from ckptrun.run.registry import DamagedRegistryError, Registry
from ckptrun.run.status import StatusRecord, read_status

KEYS = (
    "run", "status", "stop_reason", "fn", "stage", "step", "epoch", "max_steps", "metrics", "checkpoint",
    "attempt", "ranks", "heartbeat_age_s", "exit_code", "job", "deepspeed",
)  # fmt: skip
_LIVE = (Status.INITIALIZING, Status.RUNNING)
_WATCH_EVERY_S = 1.0
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
    folder = settle_run(named_once(run_argument, run), root, config, os.environ)
    record = read_status(folder)
    job = job_of(folder, record)
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
        say(f"{folder.name}: it has never written a status")
    else:
        if in_place and num_lines:
            say(f"\x1b[{num_lines}F\x1b[J" + "\n".join(describe(record, decided(folder), job)))
        else:
            say("\n".join(describe(record, decided(folder), job)))
    return 0


def job_of(folder: RunFolder, record: StatusRecord | None) -> QueueJob | None:
    """What the queue says about the SLURM job of a run that has not finished; None where there is none, or no SLURM."""
    if record is None or record.status is Status.FINISHED:
        return None
    try:
        attempts = read_attempts(folder.attempts)
    except OSError:
        return None
    key = attempts[-1].job if attempts else None
    return None if key is None else read_job(key)


def document(folder: RunFolder, record: StatusRecord | None, job: QueueJob | None = None) -> dict[str, Any]:
    """What ``status --json`` says; a run that has never written a status has ``status`` null."""
    if record is None:
        return {**dict.fromkeys(KEYS), "run": folder.name, "metrics": {}, "ranks": []}
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


def job_text(job: QueueJob, now: float) -> str:
    """A job in the queue, in a line."""
    parts = [f"{job.id} is {job.state.lower()}"]
    if job.state == "PENDING":
        again = f"to start again ({job.restarts} so far)" if job.restarts else "to start"
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
