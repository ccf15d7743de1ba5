"""In which order does training happen, and where exactly is it?

A position is (epoch, batches done in it, point), where the point says what is behind us after that batch:

    start      nothing yet: the epoch begins                 (batch == 0)
    batch      the update and the batch's end hooks
    validated  ... and the validation that was due there
    end        the epoch's end hooks and schedulers too

Saving happens only where no accumulated gradient is pending, at a boundary; a run that is resumed does what is
still to be done at its point and goes on. Decision: the position is stored as what was done, and what is due is
computed again from the options, so that cadence can change at a resume. Turned down: Lightning's tree of progress
trackers, which stores what was begun as well and has to guess what to repeat.
"""

from __future__ import annotations

import itertools
import math
import time
from typing import TYPE_CHECKING, Any

from ckptrun.errors import MisconfigurationException
from ckptrun.fit.agreement import Wish
from ckptrun.fit.data import TrainSource, limited
from ckptrun.fit.evaluation import Evaluation, EvaluationStopped
from ckptrun.fit.logs import batch_size_of
from ckptrun.fit.random_state import RandomState, restore_random_state
from ckptrun.fit.update import AutomaticUpdate, step_function
from ckptrun.records import SaveReason, Stage
from ckptrun.stop import StopTraining

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.optim import Optimizer

    from ckptrun.fit.trainer import Trainer


_SAY_EVERY_S = 10.0


class TrainingStopped(Exception):  # noqa: N818 - not an error: a stop was asked for and has been served
    """Training left at a boundary because a stop was requested; the checkpoint is written."""


class FitLoop:
    """Trains; holds the position and knows what is due at it."""

    def __init__(self, trainer: Trainer, source: TrainSource, validation: Evaluation | None) -> None:
        self.trainer = trainer
        self.source = source
        self.validation = validation
        options = trainer.options
        self.num_batches = limited(source.num_batches, options.limit_train_batches, "limit_train_batches")
        # The same, until a loader turns out to be shorter or tells its length only by ending.
        self.epoch_batches = self.num_batches
        self.accumulate = self._saved_accumulate = options.accumulate_grad_batches
        self.val_check_batch = self._val_check_batch()
        # Position.
        self.epoch = 0
        self.batch = 0
        self.point = "start"
        self.global_step = 0
        self.total_batches = 0
        self.elapsed_before_s = 0.0
        # What a resume needs to begin in the middle.
        self.resume_random: RandomState | None = None
        self.resume_data: dict[str, Any] | None = None
        self.samples_a_batch: int | None = None  # of the last batch, to tell how much is read again
        # State of this process.
        self.ready = False  # set up and restored to the last bit: from here on there is something to save
        self.started_at = time.monotonic()
        self.in_update = False  # inside the optimizer's update: no boundary can be saved
        self.at_boundary = True  # nothing of the next step has begun
        self.finished_by: str | None = None
        self._saves_served = 0
        self._skip_epoch = False
        self._asked_at_step = 0
        self._window = 0  # batches of the update that was just made
        self._logged_step = 0  # the last step whose values went to the loggers

    # -- what is due -------------------------------------------------------------------------------

    def _val_check_batch(self) -> float:
        options = self.trainer.options
        interval = options.val_check_interval
        if isinstance(interval, int):
            if options.check_val_every_n_epoch is not None and interval > self.num_batches:
                raise MisconfigurationException(
                    f"val_check_interval is {interval} batches, but an epoch has {self.num_batches}.",
                    hint="Lower it, or set check_val_every_n_epoch to null to count batches over epochs.",
                )
            return interval
        if interval == 1.0:
            return math.inf  # at the end of the epoch, wherever that is
        if math.isinf(self.num_batches):
            raise MisconfigurationException(
                f"val_check_interval is {interval}, a share of an epoch, but the loader's length is not known.",
                hint="Give a number of batches.",
            )
        return max(1, int(self.num_batches * interval))

    @property
    def validation_due(self) -> bool:
        """Whether a validation follows the update that was just made; for callbacks at its boundary."""
        return self._validation_due(self._window)

    def _validation_due(self, batches_in_window: int) -> bool:
        """Whether a validation falls on one of the batches of the window that ends at the current position."""
        every = self.trainer.options.check_val_every_n_epoch
        if self.validation is None or self.trainer.options.limit_val_batches == 0:
            return False
        if every is None:
            done = self.total_batches
        else:
            if (self.epoch + 1) % every:
                return False
            done = self.batch
            if math.isinf(self.val_check_batch):
                return self.batch >= self.epoch_batches
        interval = int(self.val_check_batch)
        return done // interval > (done - batches_in_window) // interval

    def elapsed_s(self) -> float:
        """Seconds of training over all attempts."""
        return self.elapsed_before_s + time.monotonic() - self.started_at

    def done(self) -> str | None:
        """Why training is over at this position, or None."""
        options = self.trainer.options
        if options.max_steps is not None and self.global_step >= options.max_steps:
            return "max_steps"
        if options.max_epochs is not None and self.epoch >= options.max_epochs:
            return "max_epochs"
        if options.max_time_s is not None and self._time_is_over(options.max_time_s):
            return "max_time"
        if self.trainer.should_stop and self._may_stop_early() and self._all_wish(Wish.SHOULD_STOP):
            return "early_stopping"
        return None

    def _time_is_over(self, limit_s: float) -> bool:
        agreement = self.trainer.agreement
        # The clocks of ranks differ; with several the last agreement decides.
        return self.elapsed_s() >= limit_s if agreement is None else agreement.time_over

    def _all_wish(self, wish: Wish) -> bool:
        """Whether this rank's wish is that of all; one that is alone with it goes on until ranks ask each other."""
        agreement = self.trainer.agreement
        return agreement is None or agreement.all_wish(wish, self.trainer.place())

    def _may_stop_early(self) -> bool:
        options = self.trainer.options
        return self.global_step >= options.min_steps and self.epoch >= options.min_epochs

    # -- the whole of training ----------------------------------------------------------------------

    def run(self) -> None:
        """Train until something in the options, or somebody, ends it."""
        trainer = self.trainer
        self.started_at = time.monotonic()
        trainer.enter(Stage.TRAINING)
        trainer.progress.num_batches = None if math.isinf(self.num_batches) else int(self.num_batches)
        trainer.hooks.call("on_train_start")
        if self.point == "start":
            self._resume(goes_on=False)
        self._attend()
        while self.finished_by is None:
            # Inside an epoch something may be due (a validation that a stop cut short) although no step is left.
            if self.point == "start":
                self.finished_by = self._finished()
            if self.finished_by is None:
                self._run_epoch()
        trainer.checkpoints.save_boundary(SaveReason.FINAL, finished_by=self.finished_by)
        trainer.hooks.call("on_train_end")

    def _finished(self) -> str | None:
        if self.num_batches == 0:
            return "no_batches"
        return self.done()

    def _run_epoch(self) -> None:
        trainer, hooks, logs = self.trainer, self.trainer.hooks, self.trainer.logs
        # Together: of an epoch that has ended with the next one's batches a display would make another pace.
        trainer.progress.epoch, trainer.progress.batch = self.epoch, self.batch
        if self.point == "start":
            logs.enter_epoch()
            hooks.call("on_train_epoch_start")
            iterator: Iterator[Any] | None = self.source.iterate(self.epoch)
        else:
            iterator = self._reenter()
        if iterator is not None and self.done() is None:
            self._train_batches(iterator)
        complete = self.batch >= self.epoch_batches or self._skip_epoch
        if complete and iterator is not None:
            self.source.finish(iterator, whole=self._whole and not self._skip_epoch)
        if not complete:
            # Left in mid-epoch by a limit: the last boundary is the checkpoint, before the epoch's end hooks.
            self.finished_by = self.done()
            trainer.checkpoints.save_boundary(SaveReason.FINAL, finished_by=self.finished_by)
        self._end_epoch(complete)

    def _reenter(self) -> Iterator[Any] | None:
        """The iterator at a position inside an epoch, with the random state of that boundary restored."""
        iterator = self._resume(goes_on=self.batch < self.epoch_batches)
        if self.point == "batch":
            self._after_batch(self._window_before(self.batch))
        return iterator

    def _resume(self, *, goes_on: bool) -> Iterator[Any] | None:
        """The data from the position on, and the random state of that boundary, where training was resumed."""
        data, random, iterator = self.resume_data, self.resume_random, None
        if data is not None:
            if self.source.kind == "iterable" and goes_on:
                self.trainer.context.say(self.to_read_again(data))
            iterator = self.source.resume(
                data, epoch=self.epoch, batch=self.batch, goes_on=goes_on, read_again=self._reading_again()
            )
        self.resume_data = self.resume_random = None
        self.ready = True
        if random is not None:
            restore_random_state(random)
            self.trainer.checkpoints.moved_on()
        return iterator

    def to_read_again(self, data: dict[str, Any]) -> str:
        """How much of an iterable without a state is read to get to the position, and why."""
        size = data.get("samples_a_batch")
        samples = "" if size is None else f"{self.batch * size} samples "
        count = f"{samples}({self.batch} batches)" if samples else f"{self.batch} batches"
        if self.source.state_is_in_workers:
            return (
                f"The dataset keeps its position, but in its loader workers, where it cannot be had: {count} are read "
                "again. num_workers=0, or a loader with state_dict such as torchdata's StatefulDataLoader, spares that."
            )
        return (
            f"The training data has no state of its own: {count} are read again to reach the position. state_dict and "
            "load_state_dict on the dataset spare that."
        )

    def _reading_again(self) -> Callable[[int], None]:
        """What to do before each batch that is only read to get past it: see to stop requests, say how far it is."""
        stop, total, began = self.trainer.context.stop, self.batch, time.monotonic()
        said = [began]

        progress = self.trainer.progress

        def before(number: int) -> None:
            progress.beats += 1
            # With several ranks the others may not be reading: they all see to it at the next step.
            if stop.request is not None and self.trainer.agreement is None:
                self._attend()
            now = time.monotonic()
            if now - said[0] > _SAY_EVERY_S:
                said[0] = now
                left_s = (now - began) / number * (total - number) if number else math.nan
                self.trainer.context.say(f"read {number} of {total} batches again, about {left_s:.0f} s left")

        return before

    @property
    def _whole(self) -> bool:
        """Whether an epoch takes all that the loader has."""
        return self.num_batches == self.source.num_batches

    def _window_before(self, batch: int) -> int:
        """Batches of the accumulation window that ends at ``batch``."""
        return (batch - 1) % self._saved_accumulate + 1 if batch else 0

    # -- batches -----------------------------------------------------------------------------------

    def _train_batches(self, iterator: Iterator[Any]) -> None:
        """The hot loop. Everything looked up before it; per batch only what somebody switched on."""
        trainer, options = self.trainer, self.trainer.options
        module, hooks, logs, progress = (
            trainer.lightning_module,
            trainer.hooks,
            trainer.logs,
            trainer.progress,
        )
        batch_starts, batch_ends = (
            hooks.get("on_train_batch_start"),
            hooks.part("on_train_batch_end", "first"),
        )
        late_batch_ends = (
            *hooks.part("on_train_batch_end", "monitoring"),
            *hooks.part("on_train_batch_end", "checkpoint"),
        )
        step = step_function(trainer)
        automatic = AutomaticUpdate(self, step) if module.automatic_optimization else None
        update = automatic.update if automatic is not None else None
        transfer = trainer.transfer if trainer.needs_transfer else None
        stop, checkpoints, keeper = trainer.stop, trainer.checkpoints, trainer.checkpoints.boundary_keeper
        agreement = trainer.agreement
        ask_at: float = math.inf if agreement is None else self.global_step + 1
        in_step = agreement is not None and trainer.strategy.in_step and bool(trainer.optimizers)
        late = agreement.late if agreement is not None and in_step else None
        accumulate, num_batches, log_every = self.accumulate, self.num_batches, options.log_every_n_steps
        max_steps = math.inf if options.max_steps is None else options.max_steps
        step_schedulers = [c for c in trainer.lr_scheduler_configs if c.interval == "step" and automatic]
        timed, scales = options.max_time_s is not None, trainer.precision_plugin.scales
        remaining = (
            iterator if math.isinf(num_batches) else itertools.islice(iterator, int(num_batches) - self.batch)
        )
        logs.enter_step()
        window = 0
        outputs: Any = None
        for batch in remaining:
            self.at_boundary = False
            index = self.batch
            if transfer is not None:
                batch = transfer(batch, 0)
            logs.batch = batch
            # A list: each hook is called, also after one that asks to skip the rest of the epoch.
            if batch_starts and -1 in [hook(batch, index) for hook in batch_starts]:
                trainer.together("on_train_batch_start returned -1")
                self._skip_epoch = True
                self.at_boundary = window == 0
                break
            window += 1
            ends_window = window == accumulate or index + 1 == num_batches
            if update is None:
                steps_before = self.global_step
                with trainer.forward_context():
                    outputs = step(batch, index)
                stepped = self.global_step > steps_before
                if stepped and scales:
                    trainer.precision_plugin.steps_are_done()
                ends_window = True
            else:
                outputs = update(batch, index, window == 1, ends_window)
                stepped = ends_window
                if stepped:
                    self.global_step += 1
            self.batch = index + 1
            self.total_batches += 1
            self.point = "batch"
            if stepped and step_schedulers:
                self._step_schedulers("step", plateau=False)
            self.in_update = False
            self.at_boundary = ends_window
            progress.step = self.global_step
            progress.batch = index + 1
            try:
                for hook in batch_ends:
                    hook(outputs, batch, index)
            except StopTraining:
                if self._all_wish(Wish.STOP_TRAINING):
                    raise
            if not ends_window:
                for hook in late_batch_ends:
                    hook(outputs, batch, index)
                continue
            if logs.has_pending:
                logs.commit()
            if stepped and self.global_step % log_every == 0:
                trainer.log_step()
                self._logged_step = self.global_step
            self._window = window
            if keeper is not None:
                keeper()
            for hook in late_batch_ends:
                hook(outputs, batch, index)
            if not trainer.first_step_reported:
                trainer.report_first_step()
            if self.global_step >= ask_at or (late is not None and late(self.global_step)):
                ask_at = self.global_step + self._ask()
            if stop.request is not None or stop.save_requested != self._saves_served:
                self._attend(ask=False)
            if checkpoints.landed:
                checkpoints.attend()
            batches, window = window, 0
            if self.validation is not None:
                self._after_batch(batches)
            elif step_schedulers:
                self._step_schedulers("step", plateau=True)
            if (self.global_step >= max_steps or trainer.should_stop or timed) and self.done() is not None:
                return
        if not self._skip_epoch and self.batch < self.epoch_batches:
            self._note_end_of_data()
        if window and automatic is not None:
            self._flush_window(automatic, window, outputs, batch)
        if not self._skip_epoch and self.point == "batch" and (window or math.isinf(self.val_check_batch)):
            self._after_batch(window)

    def _note_end_of_data(self) -> None:
        """The loader ended before its length, or had none: the epoch is complete here."""
        if self.batch == 0:
            raise MisconfigurationException(
                f"The training data gave no batch in epoch {self.epoch}.",
                hint="An iterator (a generator, for one) is used up after one pass: pass an iterable that can be "
                "gone through once an epoch.",
            )
        if not math.isinf(self.epoch_batches):
            self.trainer.context.say(
                f"The training data ended after {self.batch} of {int(self.epoch_batches)} batches; the epoch "
                "ends there."
            )
        self.epoch_batches = self.batch

    def _flush_window(self, automatic: AutomaticUpdate, window: int, outputs: Any, batch: Any) -> None:
        """The epoch ended inside an accumulation window: its update is made now, and what follows one is done."""
        trainer, index = self.trainer, self.batch - 1
        automatic.flush(index, outputs)
        self.global_step += 1
        self._step_schedulers("step", plateau=False)
        self.in_update = False
        self.at_boundary = True
        self._window = window
        trainer.progress.step = self.global_step
        trainer.logs.commit()
        if self.global_step % trainer.options.log_every_n_steps == 0:
            trainer.log_step()
            self._logged_step = self.global_step
        trainer.checkpoints.moved_on()
        trainer.hooks.call_part("on_train_batch_end", "checkpoint", outputs, batch, index)
        if not trainer.first_step_reported:
            trainer.report_first_step()
        self._attend()

    def manual_step(self, optimizer: Optimizer, closure: Any = None, **kwargs: Any) -> Any:
        """``optimizer.step()`` of manual optimization; counts as a step."""
        precision = self.trainer.precision_plugin
        precision.unscale(optimizer)
        self.trainer.hooks.call("on_before_optimizer_step", optimizer)
        self.in_update = True  # until the whole training_step is done: it may have further optimizers to step
        if closure is not None:
            kwargs["closure"] = closure
        result = precision.step(optimizer, **kwargs)
        self.global_step += 1
        return result

    # -- after a batch, after an epoch ---------------------------------------------------------------

    def _after_batch(self, batches_in_window: int) -> None:
        """What is due at a boundary besides its own hooks: validation, then schedulers that watch a metric."""
        if self._validation_due(batches_in_window):
            self._validate()
        self._step_schedulers("step", plateau=True)

    def _validate(self) -> None:
        trainer = self.trainer
        assert self.validation is not None
        trainer.enter(Stage.VALIDATING)
        trainer.checkpoints.keep_boundary()
        try:
            self.validation.run()
        except EvaluationStopped:
            self._put_weights_back()
            trainer.enter(Stage.TRAINING)
            self._attend()
            raise AssertionError("a stop that ends a validation is served") from None
        finally:
            trainer.logs.enter_step()
        self.point = "validated"
        trainer.checkpoints.moved_on()
        trainer.enter(Stage.TRAINING)
        trainer.hooks.call_part("on_validation_end", "checkpoint")
        self._attend()

    def _put_weights_back(self) -> None:
        """Hooks that train other weights than they validate (averaging) are given the chance to swap them back."""
        trainer = self.trainer
        if not trainer.checkpoints.weights_were_swapped():
            return
        for name in ("on_validation_epoch_end", "on_validation_end"):
            for hook in trainer.hooks.part(name, "first"):
                try:
                    hook()
                except Exception as error:
                    trainer.context.say(
                        f"{name}, called to end a validation that a stop cut short, failed: {error}"
                    )

    def _end_epoch(self, complete: bool) -> None:
        trainer, hooks, logs = self.trainer, self.trainer.hooks, self.trainer.logs
        self._skip_epoch = False
        trainer.checkpoints.keep_boundary()
        logs.enter_epoch()
        hooks.call_part("on_train_epoch_end", "first")
        metrics = logs.finish_epoch(evaluating=False)
        if metrics:
            trainer.log_to_loggers(metrics)
        if not complete:
            return  # what callbacks monitor may not have been logged in part of an epoch
        hooks.call_part("on_train_epoch_end", "monitoring")
        self._step_schedulers("epoch", plateau=None)
        self.point = "end"
        trainer.checkpoints.moved_on()
        hooks.call_part("on_train_epoch_end", "checkpoint")
        self._begin_next_epoch()
        self._attend()

    def _begin_next_epoch(self) -> None:
        self.epoch += 1
        self.batch = 0
        self.epoch_batches = self.num_batches
        self.point = "start"

    def _step_schedulers(self, interval: str, *, plateau: bool | None) -> None:
        """Advance schedulers of ``interval``; ``plateau`` chooses those that watch a metric (None: both)."""
        trainer = self.trainer
        if not trainer.lightning_module.automatic_optimization:
            return  # then the user steps them too
        count = self.global_step if interval == "step" else self.epoch + 1
        for config in trainer.lr_scheduler_configs:
            if config.interval != interval or count % config.frequency:
                continue
            if plateau is not None and config.reduce_on_plateau != plateau:
                continue
            metric = None
            if config.reduce_on_plateau:
                metric = self._monitored(config)
                if metric is None:
                    continue
            trainer.lightning_module.lr_scheduler_step(config.scheduler, metric)

    def _monitored(self, config: Any) -> Any:
        value = self.trainer.monitored(config.monitor)
        if value is not None:
            return value
        metrics = self.trainer.callback_metrics
        if config.strict and config.interval == "epoch":
            raise MisconfigurationException(
                f"ReduceLROnPlateau watches {config.monitor!r}, which has not been logged; logged so far: "
                f"{', '.join(sorted(metrics)) or 'nothing'}.",
                hint="Log it, or change 'monitor' in configure_optimizers.",
            )
        return None

    # -- requests ------------------------------------------------------------------------------------

    def _ask(self) -> int:
        """Agree with the other ranks on what was asked for; returns the steps until the next time.

        Raises:
            StopTraining: user code of a rank has raised it; all ranks end here.
        """
        agreement, limit_s = self.trainer.agreement, self.trainer.options.max_time_s
        assert agreement is not None
        since, self._asked_at_step = self.global_step - self._asked_at_step, self.global_step
        steps = agreement.ask(
            since=since,
            time_over=limit_s is not None and self.elapsed_s() >= limit_s,
            wish=Wish.SHOULD_STOP if self.trainer.should_stop else Wish.GO_ON,
        )
        if agreement.wish is Wish.STOP_TRAINING:
            raise StopTraining
        if agreement.wish is Wish.SHOULD_STOP:
            self.trainer.should_stop = True
        return steps

    def _attend(self, *, ask: bool = True) -> None:
        """Serve what was asked for, at a boundary; with several ranks, after asking them.

        Raises:
            TrainingStopped: a stop was requested; its checkpoint is written.
        """
        stop, checkpoints = self.trainer.stop, self.trainer.checkpoints
        if ask and self.trainer.agreement is not None:
            self._ask()
        self.serve_saves()
        if stop.request is not None:
            checkpoints.save_for_stop(stop.request)
            raise TrainingStopped

    def serve_saves(self) -> None:
        """Save the last boundary where somebody asked for it; what is asked before the first waits for it."""
        asked = self.trainer.stop.save_requested
        if asked != self._saves_served and self.global_step > 0:
            self._saves_served = asked
            self.trainer.checkpoints.serve_save_request(asked)

    def settle(self) -> None:
        """An exception ends training: what a complete update logged counts, what an incomplete one did does not."""
        trainer = self.trainer
        if not self.at_boundary:
            trainer.logs.discard_pending()
            return
        trainer.logs.commit()
        due = self.global_step % trainer.options.log_every_n_steps == 0
        if due and self.point == "batch" and self._logged_step != self.global_step:
            self._logged_step = self.global_step
            trainer.log_step()

    # -- checkpoint ----------------------------------------------------------------------------------

    def data_state(self) -> dict[str, Any]:
        """What the data needs to begin again at the position."""
        return self.source.state_dict(
            epoch=self.epoch + 1 if self.point == "end" else self.epoch,
            whole=self._whole,
            samples_a_batch=self._last_batch_samples() if self.source.kind == "iterable" else None,
        )

    def _last_batch_samples(self) -> int | None:
        """How many samples the last training batch that is known of had."""
        batch = self.trainer.logs.batch
        if batch is not None and self.trainer.training:
            self.samples_a_batch = batch_size_of(batch)
        return self.samples_a_batch

    def state_dict(self) -> dict[str, Any]:
        """The position as what has been done."""
        ended = self.point == "end"
        return {
            "epoch": self.epoch + 1 if ended else self.epoch,
            "batch": 0 if ended else self.batch,
            "point": "start" if ended else self.point,
            "global_step": self.global_step,
            "total_batches": self.total_batches,
            "elapsed_s": self.elapsed_s(),
            "should_stop": self.trainer.should_stop,
            "accumulate_grad_batches": self.accumulate,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the position back."""
        self.epoch = state["epoch"]
        self.batch = state["batch"]
        self.point = state["point"]
        self.global_step = self._logged_step = state["global_step"]
        self.total_batches = state["total_batches"]
        # The window that ended at the position was that of the options then.
        self._saved_accumulate = state.get("accumulate_grad_batches", self.accumulate)
        self.elapsed_before_s = state["elapsed_s"]
        self.trainer.should_stop = state["should_stop"] and not self.trainer.context.resume_past_early_stop
