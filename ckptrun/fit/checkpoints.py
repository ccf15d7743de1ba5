"""When the loop or a callback wants a checkpoint: what is written, what is only noted, and who hears of it when?

Decision: all saves of a rank pass through one service, which knows the state that was saved last, so that a second
reason for the same state is noted in the registry and not written again; and which alone has others deleted, after
what replaces them is committed (:mod:`ckptrun.fit.clearing`).

Saves that training goes on after are written in the background, one at a time (:mod:`ckptrun.fit.checkpoint_writer`).
Until such a save is committed it is in nobody's books: the registry and the status do not name it, what it replaces
stays, and a callback that entered it takes that back where it fails. The thread that writes it also enters it in the
registry and deletes what it replaces. The training thread takes note at the next boundary; with several ranks all of
them learn how it ended when the next save begins, where they meet anyway.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ckptrun.checkpoint import naming
from ckptrun.checkpoint.catalogue import Catalogue
from ckptrun.checkpoint.commit import preflight
from ckptrun.checkpoint.manifest import Manifest, extend_line
from ckptrun.checkpoint.safe_state import encode
from ckptrun.checkpoint.state_file import ZIP_CRC
from ckptrun.checkpoint.storages import size_of
from ckptrun.errors import SaveError
from ckptrun.fit.capture import (
    Boundary,
    capture,
    capture_rank,
    epoch_of,
    has_nan,
    rank_file,
    trained_tensors,
)
from ckptrun.fit.checkpoint_writer import CheckpointWriter
from ckptrun.fit.flight import Flight, PositionKey, Ticket
from ckptrun.fit.save_books import SaveBooks, noted_again
from ckptrun.fit.sharded_writer import ShardedWriter
from ckptrun.inspect.deepspeed_files import NOTE
from ckptrun.records import CheckpointRecord, SavedCheckpoint, SaveReason
from ckptrun.run.registry import Registry

if TYPE_CHECKING:
    from ckptrun.fit.trainer import Trainer
    from ckptrun.run.folder import RunFolder
    from ckptrun.stop import StopRequest

# Saves after which training goes on; before the others nothing more happens.
_IN_THE_BACKGROUND = frozenset({SaveReason.PERIODIC, SaveReason.BEST, SaveReason.MANUAL})

T = TypeVar("T")


@dataclass(frozen=True)
class _Saved:
    """Which state a checkpoint holds."""

    record: CheckpointRecord
    key: PositionKey


class CheckpointService:
    """Saves of one fit, in one run's folder."""

    def __init__(self, trainer: Trainer, run: RunFolder) -> None:
        self.trainer = trainer
        self.run = run
        self.catalogue = Catalogue(run.checkpoints_dir)
        self.books = SaveBooks(trainer.context, run, self.catalogue)
        self.head: CheckpointRecord | None = None  # the newest committed checkpoint of this line
        self.resumed: CheckpointRecord | None = None
        self.writer = self._make_writer()
        self._flight: Flight | None = None  # on every rank, until all know how it ended
        self.landed = False  # the save in flight has ended and nobody took note; looked at at each boundary
        self._last: _Saved | None = None  # from which training can go on exactly
        self._newest: CheckpointRecord | None = None  # that was written or noted last
        self._boundary: Boundary | None = None
        self._stopping = False
        self.alone = False  # another rank has failed: nobody is asked or waited for
        self._highest = self.catalogue.highest_sequence()
        self.boundary_keeper: Callable[[], None] | None = None

    def _make_writer(self) -> CheckpointWriter:
        context, folder, strategy = self.trainer.context, self.run.checkpoints_dir, self.trainer.strategy
        if not strategy.sharded:
            return CheckpointWriter(context, folder)
        return ShardedWriter(context, folder, strategy, lambda: self.alone)

    @property
    def registry(self) -> Registry:
        """What the run's callbacks and its user decided, as this attempt knows it."""
        return self.books.registry

    @property
    def quarantined(self) -> Collection[str]:
        """Names of the checkpoints that are set aside as damaged."""
        return self.registry.quarantine

    @property
    def save_error(self) -> str | None:
        """Why the newest save failed; None where it did not."""
        return self.writer.error

    # -- ranks -----------------------------------------------------------------------------------------

    @property
    def _writes(self) -> bool:
        """Whether this rank is the one that touches the run's files."""
        return self.trainer.strategy.rank == 0

    def _shared(self, make: Callable[[], T]) -> T:
        """What ``make`` gives on rank 0, on every rank; its error too."""
        if self.alone or self.trainer.world_size == 1:
            return make()
        told: tuple[Any, SaveError | None] = (None, None)
        own: Exception | None = None
        if self._writes:
            try:
                told = (make(), None)
            except SaveError as error:
                own, told = error, (None, error)
            except Exception as error:
                own, told = error, (None, SaveError(f"rank 0: {type(error).__name__}: {error}"))
        value, failure = self.trainer.strategy.broadcast(told)
        if failure is not None:
            raise own or failure
        return value  # type: ignore[no-any-return]

    def _gathered(self, own: T) -> list[T]:
        """Every rank's, on rank 0; where this rank is alone, its own."""
        if self.alone or self.trainer.world_size == 1:
            return [own]
        return self.trainer.strategy.gather(own) or []

    def _can_save_alone(self) -> bool:
        """Whether what this rank holds is a checkpoint without the others."""
        trainer = self.trainer
        if trainer.world_size == 1 or not trainer.strategy.sharded:
            return True
        trainer.context.say("Nothing is saved now: a save needs every rank, and one has failed.")
        return False

    def _collect(self, step: int, *, weights_only: bool) -> dict[str, Any]:
        """This rank's files of the strategy's own; none where one rank saves all."""
        strategy = self.trainer.strategy
        if not strategy.sharded:
            return {}
        tag = _tag(step)
        files = strategy.collect(tag=tag, weights_only=weights_only)
        return {**files, "latest": tag} if self._writes else files

    def _begin_to_write(
        self,
        flight: Flight,
        state: dict[str, Any],
        rank_states: list[Any],
        manifest: Manifest,
        shards: dict[str, Any],
    ) -> None:
        name = flight.ticket.name
        if self._writes:
            self.writer.begin(
                name,
                state,
                rank_states,
                manifest,
                last_word=functools.partial(self._last_word, flight),
                ended=functools.partial(self._ended, flight),
                shards=shards,
                needed_bytes=flight.size_bytes,
            )
        elif isinstance(self.writer, ShardedWriter):
            self.writer.begin_to_assist(name, shards)

    def _write(
        self,
        name: str,
        state: dict[str, Any],
        rank_states: list[Any],
        manifest: Manifest,
        shards: dict[str, Any],
        needed_bytes: int,
    ) -> Manifest | None:
        if not self._writes and isinstance(self.writer, ShardedWriter) and not self.alone:
            self.writer.assist(name, shards)
        return self._shared(
            lambda: self.writer.write(
                name, state, rank_states, manifest, shards=shards, needed_bytes=needed_bytes
            )
        )

    # -- beginning -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Register the callbacks, so that a process that never trained knows them."""
        callbacks = self._entries()
        if any(entry.get("on_exception") for entry in callbacks):
            self.boundary_keeper = self._keep_step
        if self._writes:
            self.books.register(callbacks)

    def begin_from(self, record: CheckpointRecord) -> None:
        """Training goes on from ``record``: its state need not be saved again."""
        self.resumed = record
        own = record.run_id == self.trainer.context.run_id
        if own:
            self.head = record
            self._last = None if record.weights_only else _Saved(record, self._key())

    def try_out(self) -> None:
        """Capture once without writing, so that what cannot be stored is refused now and not in hours.

        Raises:
            MisconfigurationException: something a user put in cannot be stored.
        """
        state = capture(self.trainer, weights_only=False)
        encode(capture_rank(self.trainer), rank_file(self.trainer.strategy.rank))
        weights = size_of(state.get("state_dict", dict(self.trainer.lightning_module.named_parameters())))
        expected = max(size_of(state), weights * (3 if self.trainer.optimizers else 1))
        warning = preflight(self.run.checkpoints_dir, expected)
        if warning is not None and self._writes:
            self.trainer.context.say(warning)

    def _entries(self) -> list[dict[str, Any]]:
        return [cb.registry_entry() for cb in self.trainer.callbacks if hasattr(cb, "registry_entry")]

    # -- boundaries ------------------------------------------------------------------------------------

    def _key(self) -> PositionKey:
        loop = self.trainer.fit_loop
        assert loop is not None
        boundary = self._held()
        return _key_of(loop.state_dict() if boundary is None else boundary.loop)

    def _held(self) -> Boundary | None:
        """The kept boundary, as long as it is the newest: where the next update is complete, the live state is."""
        loop, boundary = self.trainer.fit_loop, self._boundary
        assert loop is not None
        if boundary is None or boundary.callbacks is not None or not loop.at_boundary or loop.in_update:
            return boundary
        return boundary if _key_of(boundary.loop) == _key_of(loop.state_dict()) else None

    def weights_were_swapped(self) -> bool:
        """Whether the model holds other weights than those of the boundary that is kept."""
        boundary = self._boundary
        return boundary is not None and not boundary.has_weights_of(self.trainer, kept_too=False)

    def _keep_step(self) -> None:
        self._boundary = Boundary(self.trainer, with_callbacks=False)

    def keep_boundary(self) -> None:
        """Something that moves on begins (a validation): keep what a save of this boundary needs."""
        self._boundary = Boundary(self.trainer, with_callbacks=True)

    def moved_on(self) -> None:
        """The position has moved without an update (validated, epoch ended): the live state is the boundary again."""
        self._boundary = None
        if self.boundary_keeper is not None:
            self.boundary_keeper()

    # -- what callbacks call ---------------------------------------------------------------------------

    def reserve(self, label: str | None = None) -> Ticket:
        """A name for a save of the current boundary; of an existing one where this state is saved already.

        Args:
            label: the part of the folder's name after the save counter; the step when None.
        """
        if self.alone:
            self._settle_anyhow()
        else:
            self.make_room()
        key, flight = self._key(), self._flight
        if flight is not None:
            return replace(flight.ticket, exists=True)
        if self._last is not None and self._last.key == key:
            record = self._last.record
            return Ticket(record.name, record.path, True, record.sequence)

        def make() -> Ticket:
            while True:
                sequence = self.registry.reserve_sequence(self._highest)
                name = naming.folder_name(sequence, label or naming.step_label(key[0]))
                path = f"{self.catalogue.path}/{name}"
                # A holder that was overtaken while it saved may have committed under this very name since.
                if not os.path.lexists(path):
                    return Ticket(name, path, False, sequence)

        return self._shared(make)

    def save(
        self,
        ticket: Ticket,
        *,
        reason: SaveReason,
        owner: str | None = None,
        weights_only: bool = False,
        on_exception: bool = False,
        undo: Callable[[], None] | None = None,
        replaces: Collection[str] = (),
    ) -> bool:
        """Write and commit, or note a further reason for a state that is saved already.

        A save for a stop, an exception or the end is committed on return. Another is copied and goes on in the
        background (see ``run.async_save``).

        Args:
            undo: called where this returned True and the save failed all the same.
            replaces: names of checkpoints that the owner no longer wants once this one is committed.

        Returns:
            False where it failed and ``run.on_save_error`` lets training go on.

        Raises:
            SaveError: it failed and the policy is to stop.
        """
        loop = self.trainer.fit_loop
        assert loop is not None
        if self.alone and not (self._writes and self._can_save_alone()):
            return False
        if not loop.ready and not ticket.exists:
            return False  # what is restored by half is not saved
        if ticket.exists:
            self._note_again(ticket, reason, owner, undo, replaces)
            return True
        if self._key()[0] == 0:
            return False  # no update was made yet, so there is no boundary
        boundary = self._held()
        if not on_exception and boundary is not None and boundary.callbacks is None and loop.at_boundary:
            boundary = None  # kept for an exception only; the live state is this very boundary
        if boundary is None and loop.at_boundary:
            self.trainer.logs.commit()
        # Alone, the random states of the other ranks are missing.
        alone = self.alone and self.trainer.world_size > 1
        exact = not (alone or loop.in_update or (on_exception and has_nan(self.trainer)))
        if boundary is None:
            exact = exact and loop.at_boundary
        elif not boundary.has_weights_of(self.trainer):
            exact = False
        key = self._key() if exact and not weights_only else None
        started = time.monotonic()
        self.trainer.context.saving(True)
        flight: Flight | None = None
        written: Manifest | None = None
        try:
            # All ranks do this in this order. Where one rank writes all, it hears the others first: from there on the
            # save is its alone. DeepSpeed's part is collected by all at once, and heard of after that.
            sharded = self.trainer.strategy.sharded
            own = encode(capture_rank(self.trainer, boundary), rank_file(self.trainer.strategy.rank))
            heard = [] if sharded else self._gathered((own, 0))
            state = capture(self.trainer, weights_only=weights_only, boundary=boundary)
            shards = self._collect(state["global_step"], weights_only=weights_only)
            if sharded:
                heard = self._gathered((own, sum(map(size_of, shards.values()))))
            rank_states = [rank_state for rank_state, _ in heard]
            needed_bytes = size_of(state) + sum(size_bytes for _, size_bytes in heard)
            manifest = self._manifest(ticket, reason, owner, weights_only, exact, boundary, started)
            if self.trainer.context.async_save and reason in _IN_THE_BACKGROUND and not self.alone:
                flight = Flight(ticket, key, owner, needed_bytes, self._entries(), self.resumed, [*replaces])
                flight.undo += [] if undo is None else [undo]
                self._begin_to_write(flight, state, rank_states, manifest, shards)
                self._flight = flight
            else:
                written = self._write(ticket.name, state, rank_states, manifest, shards, needed_bytes)
        finally:
            blocked_s = time.monotonic() - started
            if self._flight is None:
                self.trainer.context.saving(False)
        if flight is not None:
            flight.blocked_s = blocked_s
            return True
        if written is None:
            return False
        record = written.to_record(ticket.path)
        self._take_over(record, key)
        if self._writes:
            self.books.enter(record, owner, written.save_s, self._entries())
            self._clear(replaces)
            self._announce(record, written.save_s, blocked_s)
        return True

    def _note_again(
        self,
        ticket: Ticket,
        reason: SaveReason,
        owner: str | None,
        undo: Callable[[], None] | None,
        replaces: Collection[str],
    ) -> None:
        flight = self._flight
        if flight is not None and flight.ticket.name == ticket.name:
            flight.undo += [undo] if undo is not None else []
            if self._joins(flight, reason, owner, replaces):
                return
            if flight.record is None:
                return  # it failed; the other ranks learn it, and all take back what was entered, at the next save
            self._newest = flight.record
        else:
            self._newest = self._last.record if self._last is not None else None
        if self._writes:
            self.books.enter_again(ticket.name, ticket.path, reason, owner, self._entries())
            self._clear(replaces)

    def _joins(
        self, flight: Flight, reason: SaveReason, owner: str | None, replaces: Collection[str]
    ) -> bool:
        """Whether a further reason still gets into the manifest that is being written; else how it ended is noted."""
        if not self._writes:
            return True
        if flight.joins(reason, owner, self._entries(), replaces):
            return True
        self._note_end()  # a moment, now
        return False

    def _clear(self, names: Collection[str] = ()) -> None:
        """What a callback no longer wants goes, and what earlier saves for a stop, or a killed attempt, left."""
        self.books.clear(names, self._entries(), self.head, self.resumed)

    # -- the save in flight ------------------------------------------------------------------------------

    def _last_word(self, flight: Flight, manifest: Manifest) -> Manifest:
        """In the writer's thread: who else wanted this state belongs to it, whatever happens after the commit."""
        entries, reasons = flight.close_manifest()
        return noted_again(replace(manifest, callbacks=tuple(entries)), self.books.notes(reasons))

    def _ended(self, flight: Flight, written: Manifest | None) -> None:
        """In the writer's thread: enter it, delete what it replaces, and tell whoever waits for it without delay."""
        record = None if written is None else written.to_record(flight.ticket.path)
        try:
            if written is not None and record is not None:
                self.books.enter(record, flight.owner, written.save_s, *flight.close_manifest())
                self.books.clear(flight.replaces, flight.entries, record, flight.resumed)
                self.writer.look_ahead(flight.size_bytes)
        except Exception as error:
            # It is committed, and the next start completes the registry from its manifest.
            self.trainer.context.say(
                f"{flight.ticket.path} is saved, and what belongs to it failed: {type(error).__name__}: {error}"
            )
        finally:
            count = flight.end(record)
            self.trainer.context.saving(False)
            if count:
                self._serve(flight, count)
            self.landed = True  # looked at by the training thread, which then waits for this one's end

    def _serve(self, flight: Flight, count: int) -> None:
        path = None if flight.record is None else flight.ticket.path
        self.trainer.context.save_served(path, self.save_error if path is None else None, count)

    def attend(self) -> None:
        """The save in flight has ended: take note, as far as this rank can do that by itself.

        Raises:
            SaveError: it failed and the policy is to stop.
        """
        self.landed = False
        if self.trainer.world_size == 1 or self.alone:
            self.settle()
        else:
            self._note_end()

    def make_room(self) -> None:
        """Before a save, on all ranks: the one in flight has to have ended, unless it is of this very state.

        Raises:
            SaveError: as :meth:`settle`.
        """
        if self._flight is not None and self._flight.key != self._key():
            self.settle()

    def settle(self) -> None:
        """Wait for the save in flight; on all ranks, unless this one is alone. Where it failed, what was entered
        for it is taken back.

        Raises:
            SaveError: it failed and the policy is to stop.
        """
        flight = self._flight
        if flight is None:
            return
        record: CheckpointRecord | None = None
        try:
            if not self._writes and isinstance(self.writer, ShardedWriter):
                self.writer.wait()  # for this rank's part
            record = self._shared(self._note_end)
        finally:
            self._flight = None
            if record is None:
                for undo in flight.undo:
                    undo()
                if self._boundary is not None:
                    self._boundary.retake_books(self.trainer)
        if record is not None:
            self._take_over(record, flight.key)

    def _settle_anyhow(self) -> None:
        """As :meth:`settle`, where a checkpoint is due that must not fail because the one before did."""
        try:
            self.settle()
        except SaveError as error:
            self.trainer.context.say(str(error))

    def _note_end(self) -> CheckpointRecord | None:
        """What came of the save in flight, waited for; on the rank that writes. Its end is noted once."""
        flight = self._flight
        assert flight is not None
        if flight.noted or not self._writes:
            return flight.record
        try:
            written = self.writer.wait()
        finally:
            flight.noted = True
            self.landed = False
        if written is None:
            return None
        assert flight.record is not None
        self._take_over(flight.record, flight.key)
        self._announce(flight.record, written.save_s, flight.blocked_s)
        return flight.record

    def _take_over(self, record: CheckpointRecord, key: PositionKey | None) -> None:
        """``record`` is committed and the newest."""
        self.head = self._newest = record
        self._highest = record.sequence
        if key is not None:
            self._last = _Saved(record, key)

    def _announce(self, record: CheckpointRecord, save_s: float, blocked_s: float) -> None:
        self.trainer.context.saved(
            SavedCheckpoint(
                record.name,
                record.path,
                record.sequence,
                record.step,
                record.epoch,
                record.reason,
                save_s,
                record.size_bytes,
                blocked_s,
            )
        )

    # -- what the loop calls -----------------------------------------------------------------------------

    def save_boundary(self, reason: SaveReason, *, finished_by: str | None = None) -> bool:
        """Save the current boundary for the loop's own reasons; ``finished_by`` notes the end of training."""
        self._settle_anyhow()
        if self._key()[0] == 0:
            return False
        saved = False
        last = self._last
        if last is not None and last.key[0] == self._key()[0] and reason is SaveReason.FINAL:
            # Same step, so the same weights: going on from it does again what little came after.
            saved = self.save(
                Ticket(last.record.name, last.record.path, True, last.record.sequence), reason=reason
            )
        else:
            saved = self.save(self.reserve(), reason=reason)
        newest = self._newest
        if finished_by is not None and saved and newest is not None:
            options = self.trainer.options
            finished = {
                "sequence": newest.sequence,
                "name": newest.name,
                "by": finished_by,
                "max_steps": options.max_steps,
                "max_epochs": options.max_epochs,
                "max_time_s": options.max_time_s,
            }
            if self._writes:
                self._clear()
                self.books.finish(newest.path, finished, self._entries())
        return saved

    def first_step_done(self) -> None:
        """Optimizers have their state now, so what a save will copy is known."""
        saves = any(entry["saves_checkpoints"] for entry in self._entries())
        if self._writes and self.trainer.context.async_save and saves:
            self.writer.prepare(trained_tensors(self.trainer))

    def serve_save_request(self, count: int) -> None:
        """Save because somebody asked for it; what comes of it is said once it is known.

        Args:
            count: how many such requests there have been.
        """
        if self._key()[0] == 0:
            return
        try:
            self.settle()  # the one in flight may hold this very state, and fail
        except SaveError as error:
            self.trainer.context.save_served(None, error.message, count)
            raise
        saved = self.save(self.reserve(), reason=SaveReason.MANUAL)
        flight = self._flight
        if flight is not None:
            if not flight.answers(count):
                self._serve(flight, count)
            return
        path = self._newest.path if saved and self._newest is not None else None
        self.trainer.context.save_served(path, self.save_error if path is None else None, count)

    def save_for_stop(self, request: StopRequest) -> None:
        """The checkpoint of a stop, at this boundary."""
        if self._stopping:
            return
        self._stopping = True
        self._settle_anyhow()
        if request.no_save:
            self.trainer.context.say("too little time is left for another save; the one before it counts")
        elif self.trainer.context.save_on_stop:
            hpc = str(request.reason) in self.trainer.context.hpc_for
            self.save_boundary(SaveReason.HPC if hpc else SaveReason.STOP)

    # -- writing -----------------------------------------------------------------------------------------

    def _manifest(
        self,
        ticket: Ticket,
        reason: SaveReason,
        owner: str | None,
        weights_only: bool,
        exact: bool,
        boundary: Boundary | None,
        started: float,
    ) -> Manifest:
        trainer, context = self.trainer, self.trainer.context
        loop = trainer.fit_loop
        assert loop is not None
        position = loop.state_dict() if boundary is None else boundary.loop
        parent = self.head
        return Manifest(
            run_id=context.run_id,
            sequence=ticket.sequence,
            step=position["global_step"],
            epoch=epoch_of(position),
            reason=str(reason),
            attempt=context.attempt,
            parent=parent.name if parent is not None else None,
            line=extend_line(parent.line if parent is not None else (), ticket.sequence),
            lease_epoch=context.lease_epoch,
            exact=exact,
            weights_only=weights_only,
            strategy=trainer.strategy.name,
            world_size=trainer.strategy.world_size,
            metrics=_finite(trainer.callback_metrics),
            save_s=time.monotonic() - started,
            versions=context.versions,
            saved_for=(owner,) if owner else (),
            job=context.job,
            callbacks=tuple(self._entries()),
            loops={key: position[key] for key in ("epoch", "batch", "point")},
            extra={"zip_crc": ZIP_CRC, **self._shards_note(position["global_step"])},
        )

    def _shards_note(self, step: int) -> dict[str, Any]:
        strategy = self.trainer.strategy
        return {NOTE: strategy.shards_note(_tag(step))} if strategy.sharded else {}


def _tag(step: int) -> str:
    """What DeepSpeed calls the checkpoint of a step: the folder with its files."""
    return f"global_step{step}"


def _key_of(position: dict[str, Any]) -> PositionKey:
    return position["global_step"], position["epoch"], position["batch"], position["point"]


def _finite(metrics: dict[str, Any]) -> dict[str, float]:
    numbers = {name: float(value) for name, value in metrics.items()}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
