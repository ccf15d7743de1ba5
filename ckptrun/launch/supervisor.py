"""Who says what a run is doing, while its ranks work?

While ranks work the supervisor writes status and lease once a second, the ledger's line at the end, answers to requests
and the bar. (The line at the start, identity and config are the session's, before; registry, checkpoints and logs come
from the ranks.) It counts stop requests (through the listener) and is the one that ends
everything when a stop is forced. Inline it is two threads beside the rank; the rank only stores numbers.

Decision: one thread, one second, small files. Turned down: writing status from the training loop, which makes a
slow file system slow the training.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ckptrun.checkpoint.catalogue import Catalogue
from ckptrun.environment.process import this_process
from ckptrun.errors import NoCheckpointError
from ckptrun.processes import kill_descendants
from ckptrun.records import (
    AttemptRecord,
    CheckpointRecord,
    Outcome,
    Progress,
    SavedCheckpoint,
    Stage,
    Status,
    StopReason,
)
from ckptrun.run.attempts import append_end
from ckptrun.run.control import answer, take
from ckptrun.run.folder import RunFolder
from ckptrun.run.lease import Lease
from ckptrun.run.rank_processes import note_processes
from ckptrun.run.status import RankRecord, StatusRecord, write_status
from ckptrun.stop import StopListener, StopRequest, exit_code, final_status

HEARTBEAT_S = 1.0
_FORCED_WRITE_S = 2.0  # what a forced end gives the disk


class Display(Protocol):
    """The bar, or plain lines."""

    def start(self) -> None: ...
    def stop(self, final_line: str | None = None) -> None: ...
    def say(self, text: str) -> None: ...


@dataclass
class Supervision:
    """What one attempt is: the records that the supervisor writes about."""

    run: RunFolder
    lease: Lease
    attempt: AttemptRecord
    earlier_best_step: int = 0  # the furthest step that any earlier attempt reached
    checkpoint: str | None = None  # the newest committed
    sequence: int = 0


@dataclass
class _Pending:
    saves: list[tuple[int, str]] = field(default_factory=list)  # which request to save it is, and its id
    stops: list[str] = field(default_factory=list)


class Supervisor:
    """Supervises one attempt of a fit.

    Args:
        metrics: the newest values for status and bar, callable from another thread.
    """

    def __init__(
        self,
        supervision: Supervision,
        *,
        listener: StopListener,
        progress: Progress,
        display: Display,
        metrics: Callable[[], dict[str, float]],
    ) -> None:
        self._of = supervision
        self._listener = listener
        self._progress = progress
        self._display = display
        self._metrics = metrics
        self._status = Status.INITIALIZING
        self._pending = _Pending()
        self._lock = threading.Lock()
        self._writing = threading.Lock()  # of the status: nothing may follow its last word
        self._over = threading.Event()
        self._changed = threading.Event()
        self._ended = False
        self._save_s = 0.0
        self._thread: threading.Thread | None = None
        self._log_path = os.path.join(
            supervision.run.logs_dir, f"attempt-{supervision.attempt.attempt:04d}-rank-0000.log"
        )
        self.restore_s: Callable[[], float] = lambda: 0.0
        self.judge: Callable[[Outcome, int], tuple[Outcome, int]] = lambda outcome, code: (outcome, code)
        self.last_act: Callable[[Outcome, int], int] = lambda _, code: code  # before a forced end
        self.slurm: Callable[[], str | None] = lambda: None
        self.lease_lost = False
        self.dump_stacks: Callable[[], None] = self._dump_own_stacks
        self._ranks: tuple[RankRecord, ...] | None = None
        self._press_answered = False

    # -- beginning and end -------------------------------------------------------------------------------

    def start(self) -> None:
        """Write the first status and begin to beat. Raises OSError where the folder cannot be written."""
        self._listener.begins()
        self._write_status()
        self._listener.on_force = self._force
        self._listener.on_grace_over = self._grace_over
        self._thread = threading.Thread(target=self._beat, name="ckptrun-supervisor", daemon=True)
        self._thread.start()

    def finish(self, outcome: Outcome, code: int, *, error: str | None = None) -> None:
        """Write the ledger's end line and the last status, and answer who still waits. The lease stays ours."""
        self._listener.finished()
        self._over.set()
        self._changed.set()
        if self._thread is not None:
            self._thread.join()
        self._end(outcome, code, error=error)

    def _end(self, outcome: Outcome, code: int, *, error: str | None) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        if not self.lease_lost:
            try:
                self._write_end(outcome, code, error)
            except OSError as problem:
                # A full disk: what came of the training is told all the same.
                self.say(f"How the attempt ended could not be written: {problem}")
        for _, request_id in self._pending.saves:
            self._answer(request_id, "ended", None)
        for request_id in self._pending.stops:
            self._answer(request_id, "done", None)

    def _find_newest(self) -> None:
        """Look on the disk: a save in the background may have ended since a rank could last tell of one."""
        try:
            for found in Catalogue(self._of.run.checkpoints_dir).newest_first():
                if isinstance(found, CheckpointRecord):
                    if found.sequence > self._of.sequence:
                        self._of.checkpoint, self._of.sequence = found.path, found.sequence
                    return
        except (OSError, NoCheckpointError) as error:
            self.log(f"the newest checkpoint could not be looked up: {error}")

    def _write_end(self, outcome: Outcome, code: int, error: str | None) -> None:
        if outcome.stop_reason is not StopReason.DONE:
            self._find_newest()
        of, step = self._of, max(outcome.step, self._progress.step)
        start = of.attempt.start_step
        append_end(
            of.run.attempts,
            of.attempt.attempt,
            status=final_status(outcome),
            stop_reason=outcome.stop_reason,
            exit_code=code,
            step=step,
            sequence=of.sequence,
            steps_gained=max(0, step - max(start, of.earlier_best_step)),
            steps_replayed=max(0, min(step, of.earlier_best_step) - start),
            save_s=self._save_s,
            restore_s=self.restore_s(),
            error=error,
            slurm=self.slurm(),
        )
        with self._writing:
            self._status = final_status(outcome)
            self._write_status(stop_reason=outcome.stop_reason, code=code)

    # -- what the rank tells -----------------------------------------------------------------------------

    def stage_changed(self) -> None:
        """The rank entered another stage; the status says so soon."""
        running = self._progress.stage not in (Stage.SETUP, Stage.RESTORE)
        if running and self._status is Status.INITIALIZING:
            self._status = Status.RUNNING
        self._changed.set()

    def saved(self, saved: SavedCheckpoint) -> None:
        """A checkpoint is committed."""
        self._of.checkpoint = saved.path
        self._of.sequence = saved.sequence
        self._save_s += saved.blocked_s
        self._changed.set()

    def save_served(self, path: str | None, error: str | None, count: int) -> None:
        """The first ``count`` requests to save have been served, or could not be."""
        waiting = self._pending.saves
        while waiting and waiting[0][0] <= count:  # one by one: the other thread may be adding to it
            self._answer(waiting.pop(0)[1], "failed" if path is None else "done", error, path)

    def saving(self, is_saving: bool) -> None:
        """A save begins or ends."""
        self._progress.message = "saving" if is_saving else None

    def ranks(self, started: list[tuple[int, int, str]], here: list[int]) -> None:
        """The ranks of this attempt have started: (rank, process, host) each; ``here`` are this host's processes."""
        self._ranks = tuple(RankRecord(*each) for each in started)
        try:
            note_processes(self._of.run, here)
        except OSError as error:
            self.log(f"the ranks' processes could not be noted: {error}")
        self._changed.set()

    def say(self, text: str) -> None:
        """One line for the user: above the bar and into the attempt's log."""
        self._display.say(text)
        self.log(text)

    def log(self, text: str) -> None:
        """Into the attempt's log only."""
        try:
            with open(self._log_path, "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        except OSError:
            pass  # the log's disk is full; the message was shown

    # -- the thread ----------------------------------------------------------------------------------------

    def _beat(self) -> None:
        last = 0.0
        while not self._over.is_set():
            self._changed.wait(HEARTBEAT_S)
            if self._over.is_set():
                return
            self._changed.clear()
            self._answer_first_press()
            now = time.monotonic()
            try:
                if now - last >= HEARTBEAT_S * 0.9:
                    last = now
                    if not self._of.lease.beat():
                        if not self._ended:
                            self._lose_lease()
                        return
                    self._take_requests()
                with self._writing:
                    if not self._ended:
                        self._write_status()
            except OSError as error:
                # A full disk must not end the training; the next beat tries again.
                self.log(f"status could not be written: {error}")

    def _answer_first_press(self) -> None:
        """Say within a second that a Ctrl-C was seen: a step may take a while, and a second press gives the save up."""
        request = self._listener.request
        if request is not None and request.reason is StopReason.KEYBOARD and not self._press_answered:
            self._press_answered = True
            self._display.say("stopping after this step; Ctrl-C again ends without saving")

    def _lose_lease(self) -> None:
        self.lease_lost = True
        self.say("Another process has taken this run over: stopping here without saving.")
        self._listener.request_stop(StopReason.RANK_LOST)

    def _take_requests(self) -> None:
        for request in take(self._of.run):
            if request.kind == "save":
                # Before it is made: it may be served at once.
                self._pending.saves.append((self._listener.save_requested + 1, request.id))
                self._listener.request_save()
            else:
                self._pending.stops.append(request.id)
                self._listener.request_stop(StopReason.REQUESTED)

    def _answer(self, request_id: str, state: str, message: str | None, path: str | None = None) -> None:
        try:
            answer(
                self._of.run,
                request_id,
                {
                    "state": state,
                    "checkpoint": path or self._of.checkpoint,
                    "message": message,
                },
            )
        except OSError as error:
            self.log(f"a request could not be answered: {error}")

    def _write_status(self, *, stop_reason: StopReason | None = None, code: int | None = None) -> None:
        of, progress = self._of, self._progress
        me = this_process()
        write_status(
            of.run.status,
            StatusRecord(
                run=of.run.name,
                status=self._status,
                stop_reason=None if stop_reason is None else str(stop_reason),
                fn=progress.fn,
                stage=str(progress.stage),
                step=progress.step,
                epoch=progress.epoch,
                max_steps=progress.max_steps,
                metrics=dict(self._metrics()),
                checkpoint=of.checkpoint,
                attempt=of.attempt.attempt,
                ranks=(RankRecord(0, me.pid, me.host),) if self._ranks is None else self._ranks,
                exit_code=code,
                started_at=of.attempt.started_at,
            ),
        )

    # -- forced ends -----------------------------------------------------------------------------------------

    def _force(self, request: StopRequest) -> None:
        self._end_at_once(request, "forced by a second Ctrl-C: nothing more is saved")

    def _grace_over(self, request: StopRequest) -> None:
        try:
            with open(self._log_path, "a", encoding="utf-8") as file:
                file.write(
                    f"The grace period of {self._listener.allowed_s:.3g} s is over; stacks of all threads:\n"
                )
        except OSError:
            pass
        self.dump_stacks()
        self._end_at_once(
            request,
            f"the work did not end within the grace period of {self._listener.allowed_s:.3g} s; "
            f"its stacks are in {self._log_path}",
        )

    def _dump_own_stacks(self) -> None:
        try:
            with open(self._log_path, "a", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError:
            pass

    def _end_at_once(self, request: StopRequest, why: str) -> None:
        outcome = Outcome(request.reason, self._progress.step, self._progress.epoch)
        outcome, code = self.judge(outcome, exit_code(outcome, request=request))
        # The display may be in the hands of a thread that hangs; it gets a moment and no more.
        shown = threading.Thread(target=lambda: self._display.stop(f"ckptrun: {why}"), daemon=True)
        shown.start()
        kill_descendants()
        # So is the disk: what cannot be written soon is left to the next reader, who finds the run lost.
        written = threading.Thread(target=self._end_quietly, args=(outcome, code, why), daemon=True)
        written.start()
        written.join(_FORCED_WRITE_S)
        shown.join(0.5)
        try:
            code = self.last_act(outcome, code)
        finally:
            os._exit(code)

    def _end_quietly(self, outcome: Outcome, code: int, why: str) -> None:
        try:
            self._end(outcome, code, error=why)
            self._of.lease.release()
        except OSError:
            pass
