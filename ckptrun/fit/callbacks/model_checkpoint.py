"""When is a checkpoint saved, and which are kept? :class:`ModelCheckpoint`, with Lightning's arguments.

Decision: one save serves everything that is asked of it at a step. Whether the state enters the top k, and
whether it is the newest one of ``save_last``, is entered into the books first, so that the state inside the
checkpoint knows of the checkpoint; a save that fails, be it later in the background, takes the entries back;
what fell out of the books is given up only once the save is committed. Names, counters, commit and deletion are
the trainer's checkpoint service's, which knows of the other callbacks too. Turned down: files named
``last.ckpt`` beside the others, as in Lightning: in a run, ``last`` is whatever was saved last, whoever saved
it, so a second copy of it would only cost time and space.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from ckptrun.errors import MisconfigurationException
from ckptrun.fit.callbacks.checkpoint_books import CheckpointBooks
from ckptrun.fit.callbacks.filename import FilenameTemplate
from ckptrun.records import SaveReason

if TYPE_CHECKING:
    from ckptrun.fit.module import Module
    from ckptrun.fit.trainer import Trainer

log = logging.getLogger(__name__)


class ModelCheckpoint(CheckpointBooks):
    """Save checkpoints now and then, and keep the best ones by a logged metric.

    Args:
        dirpath: accepted and ignored, with a note: checkpoints stand in the run's folder.
        filename: template of the part of the name after the save counter, such as
            ``"{epoch}-{val_loss:.2f}"``; the default is the step.
        monitor: name of the logged metric that says which checkpoint is better; None keeps the newest.
        verbose: say what was saved and what was not in the top k.
        save_last: keep the newest save as well, also where it is not in the top k (``"link"`` is the same).
        save_top_k: how many to keep: -1 all, 0 none.
        save_weights_only: save the weights without what training needs to go on.
        mode: ``min`` or ``max``, which values of ``monitor`` are better. NaN is worse than any number.
        auto_insert_metric_name: put ``name=`` before each value in ``filename``.
        every_n_train_steps: save after each so many steps; 0 or None: not by steps.
        train_time_interval: save after each so much time of training.
        every_n_epochs: save after each so many epochs; the default, 1, where nothing else is given.
        save_on_train_epoch_end: at the end of the training epoch instead of after validation; the default
            depends on how often the trainer validates, as in Lightning.
        enable_version_counter: accepted and ignored: the save counter makes every name unique.
        save_on_exception: save when user code raises, from the last boundary.

    Attributes:
        best_model_path: folder of the best checkpoint (of the newest one without ``monitor``); "" before the
            first.
        best_model_score: its score; None before the first.
        best_k_models: folder -> score of those that are kept by score.
        kth_best_model_path: folder of the worst of them, once there are ``save_top_k``.
        kth_value: its score.
        current_score: the score that was taken into ``best_k_models`` last.
        last_model_path: folder of the newest save, with ``save_last``.

    Raises:
        MisconfigurationException: the arguments contradict each other.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        save_on_exception: bool = False,
    ) -> None:
        super().__init__(monitor, mode, save_top_k, bool(save_last))
        self.dirpath = dirpath
        self.filename = filename
        self.verbose = verbose
        self.save_last = save_last
        self.save_weights_only = save_weights_only
        self.auto_insert_metric_name = auto_insert_metric_name
        self.enable_version_counter = enable_version_counter
        self.save_on_exception = save_on_exception
        self._save_on_train_epoch_end = save_on_train_epoch_end
        if every_n_train_steps is None and every_n_epochs is None and train_time_interval is None:
            every_n_epochs = 1
        self._every_n_train_steps = every_n_train_steps or 0
        self._every_n_epochs = every_n_epochs or 0
        self._train_time_interval = train_time_interval
        self._check_arguments()
        self._template = self._parse(filename)
        self._last_time_checked = 0.0  # both are set when training starts
        self._last_step_seen = 0
        self._validation_ran = False
        self._missing_said = False

    def _check_arguments(self) -> None:
        if self.mode not in ("min", "max"):
            raise MisconfigurationException(f"ModelCheckpoint(mode={self.mode!r}): expected 'min' or 'max'.")
        if self.save_top_k < -1:
            raise MisconfigurationException(
                f"ModelCheckpoint(save_top_k={self.save_top_k}): expected -1 or more."
            )
        for name, value in (
            ("every_n_train_steps", self._every_n_train_steps),
            ("every_n_epochs", self._every_n_epochs),
        ):
            if value < 0:
                raise MisconfigurationException(f"ModelCheckpoint({name}={value}): expected 0 or more.")
        given = {
            "every_n_train_steps": self._every_n_train_steps or None,
            "every_n_epochs": self._every_n_epochs or None,
            "train_time_interval": self._train_time_interval,
        }
        active = [f"{name}={value}" for name, value in given.items() if value is not None]
        if len(active) > 1:
            raise MisconfigurationException(
                f"ModelCheckpoint({', '.join(active)}): these are mutually exclusive.",
                hint="Set one of them here, and add a second ModelCheckpoint for the other.",
            )
        if self.monitor is None and self.save_top_k not in (-1, 0, 1):
            raise MisconfigurationException(
                f"ModelCheckpoint(save_top_k={self.save_top_k}, monitor=None): no metric says which.",
                hint="Name a logged metric as monitor, or set save_top_k to -1 (all), 0 or 1 (the newest).",
            )

    def _parse(self, filename: str | None) -> FilenameTemplate | None:
        if not filename:
            return None
        return FilenameTemplate(filename, auto_insert_metric_name=self.auto_insert_metric_name)

    @property
    def every_n_epochs(self) -> int:
        """After how many epochs a checkpoint is due; 0: epochs do not count."""
        return self._every_n_epochs

    @property
    def state_key(self) -> str:
        return self._generate_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self._every_n_train_steps,
            every_n_epochs=self._every_n_epochs,
            train_time_interval=self._train_time_interval,
        )

    # -- when --------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        if stage != "fit" or trainer.context.run is None:
            return
        self._run_id = trainer.context.run_id
        self._catalogue = trainer.checkpoints.catalogue
        self._quarantined = trainer.checkpoints.quarantined
        if trainer.is_global_zero:
            if self.dirpath is not None:
                log.warning(
                    "ModelCheckpoint(dirpath=%r) is ignored: checkpoints stand in the run.", str(self.dirpath)
                )
            if not self.enable_version_counter:
                log.warning(
                    "ModelCheckpoint(enable_version_counter=False) is ignored: no name is ever used twice."
                )

    def on_train_start(self, trainer: Trainer, pl_module: Module) -> None:
        self._last_time_checked = trainer.clock_s()
        self._last_step_seen = trainer.global_step
        self._tell_what_is_gone()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._last_step_seen:
            return  # inside an accumulation window, which is no boundary
        self._last_step_seen = trainer.global_step
        every_n, interval = self._every_n_train_steps, self._train_time_interval
        due = every_n > 0 and trainer.global_step % every_n == 0
        if interval is not None:
            now = trainer.clock_s()
            if now - self._last_time_checked >= interval.total_seconds():
                self._last_time_checked = now
                due = True
        if not due or self._skips(trainer):
            return
        if self.monitor is None or self._saves_on_train_epoch_end(trainer) or not trainer.validation_due:
            self._save(trainer, top_k=True)
        else:
            self._deferred = True  # the metric of an earlier validation would be taken for that of this state

    def on_validation_end(self, trainer: Trainer, pl_module: Module) -> None:
        if not trainer.sanity_checking:
            self._validation_ran = True
        if self._skips(trainer):
            return
        if self._deferred:
            self._save(trainer, top_k=True)
        elif not self._saves_on_train_epoch_end(trainer):
            self._save(trainer, top_k=self._epoch_is_due(trainer))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Module) -> None:
        if not self._skips(trainer) and self._saves_on_train_epoch_end(trainer):
            self._save(trainer, top_k=self._epoch_is_due(trainer))

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        if (
            not self.save_on_exception
            or trainer.fast_dev_run
            or trainer.state.fn != "fit"
            or trainer.sanity_checking
        ):
            return
        ticket = trainer.checkpoints.reserve(self._label(trainer))
        trainer.checkpoints.save(
            ticket,
            reason=SaveReason.EXCEPTION,
            owner=self.state_key,
            weights_only=self.save_weights_only,
            on_exception=True,
        )

    def _skips(self, trainer: Trainer) -> bool:
        return (
            bool(trainer.fast_dev_run)
            or trainer.state.fn != "fit"
            or trainer.sanity_checking
            or trainer.global_step == self._last_global_step_saved
        )

    def _epoch_is_due(self, trainer: Trainer) -> bool:
        return self._every_n_epochs > 0 and (trainer.current_epoch + 1) % self._every_n_epochs == 0

    def _saves_on_train_epoch_end(self, trainer: Trainer) -> bool:
        if self._save_on_train_epoch_end is not None:
            return self._save_on_train_epoch_end
        if trainer.check_val_every_n_epoch != 1:
            return False  # not every epoch has a validation, so wait for those that do
        batches = trainer.num_val_batches
        if (sum(batches) if isinstance(batches, list) else batches) == 0:
            return True
        interval = trainer.val_check_interval  # a whole number counts batches: 1 is not 1.0
        return isinstance(interval, float) and interval == 1.0

    # -- saving ------------------------------------------------------------------------------------

    def _save(self, trainer: Trainer, *, top_k: bool) -> None:
        self._deferred = False
        if not self.save_last and not (top_k and self.save_top_k != 0):
            return  # before a save in flight is waited for
        # First: where the save before fails, what was entered for it is taken back, and this state may be the better.
        trainer.checkpoints.make_room()
        score = self._score(trainer) if top_k and self.save_top_k != 0 and self.monitor is not None else None
        enters = top_k and self.save_top_k != 0 and (self.monitor is None or self._beats_kth(score))
        if self.verbose and score is not None and not enters:
            self._say(trainer, f"{self.monitor} {float(score):.5f} was not in top {self.save_top_k}")
        if not enters and not self.save_last:
            return
        ticket = trainer.checkpoints.reserve(self._label(trainer))
        before = self._snapshot()
        if enters:
            self._enter(ticket.path, score)
        self.last_model_path = ticket.path if self.save_last else ""
        self._last_global_step_saved = trainer.global_step
        best = score is not None and enters and self.best_model_path == ticket.path
        if self.verbose:
            self._say(trainer, f"saving {ticket.name}" + (f", {self._standing(score)}" if enters else ""))
        saved = False
        try:
            saved = trainer.checkpoints.save(
                ticket,
                reason=SaveReason.BEST if best else SaveReason.PERIODIC,
                owner=self.state_key,
                weights_only=self.save_weights_only,
                undo=lambda: self._roll_back(before),
                replaces=[os.path.basename(path) for path in self._given_up(before)],
            )
        finally:
            if not saved:
                self._roll_back(before)

    def _standing(self, score: Tensor | None) -> str:
        if score is None or self.best_model_score is None:
            return "the newest"
        return f"{self.monitor} {float(score):.5f} (best {float(self.best_model_score):.5f})"

    @staticmethod
    def _say(trainer: Trainer, text: str) -> None:
        if trainer.is_global_zero:
            log.info("Epoch %d, step %d: %s", trainer.current_epoch, trainer.global_step, text)

    # -- metrics and names -------------------------------------------------------------------------

    def _score(self, trainer: Trainer) -> Tensor | None:
        """The monitored value; None, said once, where it may still come.

        Raises:
            MisconfigurationException: a validation has run and the metric was not logged.
        """
        assert self.monitor is not None
        found = trainer.monitored(self.monitor)
        if found is not None:
            value = found.detach().reshape(()).to("cpu", copy=True)
            return self._worst if value.isnan() else value
        message = (
            f"ModelCheckpoint(monitor={self.monitor!r}): no such metric was logged; there are: "
            f"{', '.join(sorted(trainer.callback_metrics)) or 'none'}."
        )
        hint = f"Call self.log({self.monitor!r}, value) in the module, or name another metric as monitor."
        if self._validation_ran:
            raise MisconfigurationException(message, hint=hint)
        if not self._missing_said and trainer.is_global_zero:
            self._missing_said = True
            log.warning("%s %s", message, hint)
        return None

    @staticmethod
    def _metrics(trainer: Trainer) -> dict[str, int | float]:
        """What the filename may name: the logged metrics, and ``epoch`` and ``step`` as whole numbers."""
        metrics: dict[str, int | float] = {
            name: value.item() for name, value in trainer.callback_metrics.items()
        }
        for name, value in (("epoch", trainer.current_epoch), ("step", trainer.global_step)):
            metrics[name] = int(metrics.get(name, value))
        return metrics

    def _label(self, trainer: Trainer) -> str | None:
        return None if self._template is None else self._template.format(self._metrics(trainer))

    def format_checkpoint_name(self, metrics: Mapping[str, int | float], filename: str | None = None) -> str:
        """The part of a checkpoint's name after the save counter, by ``filename`` or this callback's own."""
        template = self._parse(filename) or self._template or FilenameTemplate("{epoch}-{step}")
        return template.format(metrics)
