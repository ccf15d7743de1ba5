"""What does a rank's process do around its work? It takes the supervisor's word and reports its own.

    supervisor --> stop, save           rank --> progress, stages, saves, signals, the outcome

The supervisor alone counts signals; one that comes straight to a rank is passed on and nothing else. Its heartbeat is
the position of its main thread, told a few times a second by another thread: a rank whose main thread hangs still
tells, but always the same. Stacks are written by a signal handler in C, which needs no thread of Python to be free.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from ckptrun.errors import DamagedCheckpointError
from ckptrun.launch.inline import RankMain, run_inline
from ckptrun.launch.parent_death import release_signals
from ckptrun.launch.wire import Channel, Message
from ckptrun.records import Outcome, Progress, Resolution, StopReason
from ckptrun.run.folder import RunFolder
from ckptrun.run.lease import read_lease
from ckptrun.stop import StopListener, StopRequest

PROGRESS_EVERY_S = 0.25
DUMP_SIGNAL = (
    signal.SIGRTMIN + 5
)  # nobody else's: the C library uses the first ones, and ckptrun's users none


@dataclass(frozen=True)
class RankJob:
    """What a rank is told at its start; pickled."""

    work: RankMain
    run_path: str | None
    facts: dict[str, Any]  # fields of RankContext that are plain data
    resolution: Resolution
    rank: int
    local_rank: int
    world_size: int


@dataclass(frozen=True)
class StoredPredictions:
    """Predictions that no message can carry: a file of ``torch.save`` that the rank has written."""

    path: str


class RemoteStop:
    """The supervisor's requests, as the loop reads them."""

    def __init__(self) -> None:
        self.request: StopRequest | None = None
        self.save_requested = 0
        self.leave = threading.Event()  # where the process stays until all ranks are done


def rank_main(payload: bytes, fds: list[int]) -> int:
    """The whole life of a rank's process; returns its exit code.

    Args:
        fds: the control channel, stdout, stderr and the log.
    """
    control, stdout, stderr, log = fds
    for fd, target in ((stdout, 1), (stderr, 2)):
        os.dup2(fd, target)
        os.close(fd)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    channel = Channel(socket.socket(fileno=control))
    listener = StopListener(report=lambda signum: channel.send("signal", signum=signum))
    listener.install()
    release_signals()
    return work_and_tell(payload, channel, log, RemoteStop(), channel.messages())


def work_and_tell(
    payload: bytes, channel: Channel, log: int, stop: RemoteStop, messages: Iterator[Message]
) -> int:
    """Do the job in ``payload`` and tell how it ended; returns the exit code.

    Args:
        log: an open file, for stacks and tracebacks.
        messages: the supervisor's, which ``stop`` follows from here on.
    """
    faulthandler.enable(log, all_threads=True)
    faulthandler.register(DUMP_SIGNAL, log, all_threads=True)
    threading.Thread(target=_obey, args=(messages, stop), name="ckptrun-rank-control", daemon=True).start()
    outcome, job = Outcome(StopReason.EXCEPTION), None
    try:
        job = pickle.loads(payload)
        outcome = _work(job, channel, stop)
        told = _plain(outcome, job.rank, job.facts.get("logs_dir"))
    except BaseException as error:
        outcome = Outcome(StopReason.EXCEPTION, outcome.step, outcome.epoch, error=error)
        told = _plain(outcome, 0 if job is None else job.rank, None)
    if outcome.error is not None:
        os.write(log, "".join(traceback.format_exception(outcome.error)).encode())
    # First, so that what was printed is there when the last word is heard.
    sys.stdout.flush()
    sys.stderr.flush()
    channel.send("outcome", **told)
    return 0 if outcome.error is None else 1


def _work(job: RankJob, channel: Channel, stop: RemoteStop) -> Outcome:
    progress = Progress.starting("fit", job.resolution.answer)  # the trainer says which fn it is
    over = threading.Event()
    context = _context(job, channel, stop, progress)
    threading.Thread(
        target=_report, args=(channel, progress, context, over), name="ckptrun-rank-progress", daemon=True
    ).start()
    try:
        return run_inline(job.work, context)
    finally:
        over.set()
        channel.send("progress", restore_s=context.restore_s, **_progress(progress))


def _context(job: RankJob, channel: Channel, stop: RemoteStop, progress: Progress) -> Any:
    from ckptrun.fit.context import RankContext

    run = None if job.run_path is None else RunFolder(job.run_path)
    epoch = job.facts.get("lease_epoch", 0)

    def may_save() -> bool:
        if run is None:
            return False
        lease = read_lease(run.lease)
        # None: the file is gone or damaged, and the supervisor writes it anew (see Lease.still_mine).
        return lease is None or (lease.epoch == epoch and lease.holder is not None)

    def saving(is_saving: bool) -> None:
        progress.beats += 1
        channel.send("saving", saving=is_saving)

    return RankContext(
        run=run,
        resolution=job.resolution,
        stop=stop,
        progress=progress,
        rank=job.rank,
        local_rank=job.local_rank,
        world_size=job.world_size,
        may_save=may_save,
        saved=lambda saved: _tell(channel, "saved", saved=asdict(saved)),
        first_step_done=lambda: _tell(channel, "first_step"),
        stage_changed=lambda: _tell(channel, "progress", **_progress(progress)),
        say=lambda text: _tell(channel, "say", text=text),
        saving=saving,
        save_served=lambda path, error, count: _tell(
            channel, "save_served", path=path, error=error, count=count
        ),
        **job.facts,
    )


def _tell(channel: Channel, op: str, **fields: Any) -> None:
    channel.send(op, **fields)


def _progress(progress: Progress) -> dict[str, Any]:
    fields = dict(vars(progress))
    fields["stage"] = str(progress.stage)
    del fields["message"]  # the supervisor's
    return fields


def _report(channel: Channel, progress: Progress, context: Any, over: threading.Event) -> None:
    """Tell where the rank is, a few times a second."""
    while not over.wait(PROGRESS_EVERY_S):
        try:
            progress.metrics = context.metrics()
        except Exception:  # what is logged at this moment; the values of a moment ago will do
            pass
        channel.send("progress", restore_s=context.restore_s, **_progress(progress))


def _obey(messages: Iterator[Message], stop: RemoteStop) -> None:
    for message in messages:
        take(message, stop)
    # Nobody is there to report to any more.
    os.killpg(os.getpgrp(), signal.SIGKILL)


def take(message: Message, stop: RemoteStop) -> None:
    """Do what the supervisor says."""
    op = message["op"]
    if op == "stop" and stop.request is None:
        stop.request = StopRequest(
            StopReason(message["reason"]), message["signum"], time.monotonic(), no_save=message["no_save"]
        )
    elif op == "save":
        stop.save_requested = message["count"]
    elif op == "leave":
        stop.leave.set()
    elif op == "stacks":
        os.kill(os.getpid(), DUMP_SIGNAL)
    elif op == "die":
        os.kill(os.getpid(), signal.SIGKILL)


# -- the last word ---------------------------------------------------------------------------------------------


def _plain(outcome: Outcome, rank: int, folder: str | None) -> dict[str, Any]:
    """An outcome without objects that only this process can have."""
    error = outcome.error
    told: dict[str, Any] | None = None
    if error is not None:
        original = getattr(error, "original", None)
        shown = original if isinstance(original, BaseException) else error
        told = {
            "type": type(shown).__name__,
            "message": str(getattr(error, "message", error)),
            "hint": getattr(error, "hint", None),
            "exit_code": getattr(error, "exit_code", 1),
            "traceback": "".join(
                traceback.format_exception(type(shown), shown, _from_user_code(shown.__traceback__))
            ),
            "collective": _is_collective(error),
            "damage": _damage(error),
        }
    results, stored = (None, None) if rank else _results(outcome.results, folder)
    return {
        "rank": rank,
        "stop_reason": str(outcome.stop_reason),
        "step": outcome.step,
        "epoch": outcome.epoch,
        "error": told,
        "user_error": outcome.user_error,
        "save_error": outcome.save_error,
        "finished_by": outcome.finished_by,
        "built": outcome.built,
        "results": results,
        "results_path": stored,
    }


_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def _from_user_code(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first frame on: the loop that called it explains nothing. The log has all."""
    first = frames
    while first is not None and _explains_nothing(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    return first or frames


def _explains_nothing(file: str) -> bool:
    if file.startswith(_OURS):
        return not file.startswith(_OURS + "examples")  # which are the user's, as far as a traceback goes
    return f"{os.sep}torch{os.sep}nn{os.sep}" in file  # DDP's wrapper


def _results(results: Any, folder: str | None) -> tuple[Any, str | None]:
    """Numbers and texts as they are; all else as a file in ``folder``."""
    if all(isinstance(leaf, str | int | float | None) for leaf in _leaves(results)):
        return results, None
    if folder is None:
        return None, None
    from ckptrun.checkpoint.safe_state import encode
    from ckptrun.checkpoint.state_file import write_state

    path = os.path.join(folder, "predictions.pt")
    with open(path, "wb") as file:
        write_state(file, {"predictions": encode(results, "predictions")})
    return None, path


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from (leaf for each in value.values() for leaf in _leaves(each))
    elif type(value) in (list, tuple):
        yield from (leaf for each in value for leaf in _leaves(each))
    else:
        yield value


def _damage(error: BaseException) -> dict[str, Any] | None:
    damage = error.damage if isinstance(error, DamagedCheckpointError) else None
    return None if damage is None else asdict(damage)


def _is_collective(error: BaseException) -> bool:
    if "torch.distributed" not in sys.modules:
        return False
    from ckptrun.strategies.ranks import is_collective_error

    return is_collective_error(error)
