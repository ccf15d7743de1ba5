"""What happens, in which order, when a fn runs in a rank? The one place for all four.

The trainer sets up (data, model, strategy, restore), runs the loop of its fn, and turns whatever ends it into an
:class:`~ckptrun.records.Outcome`. It decides nothing about runs, leases or references: those come in the
:class:`~ckptrun.fit.context.RankContext`. ``ckptrun.Trainer``, which users make themselves, adds that
(:mod:`ckptrun.session`).
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from ckptrun.deepspeed_config import Given
from ckptrun.errors import CkptrunError, MisconfigurationException, RanksDisagreeError
from ckptrun.fit.agreement import Agreement, Wish
from ckptrun.fit.callback import Callback
from ckptrun.fit.checkpoints import CheckpointService
from ckptrun.fit.configured import Configured, configured
from ckptrun.fit.context import RankContext
from ckptrun.fit.data import TrainSource, as_loaders
from ckptrun.fit.datamodule import DataModule
from ckptrun.fit.evaluation import STAGES, Evaluation, EvaluationStopped
from ckptrun.fit.fit_loop import FitLoop, TrainingStopped
from ckptrun.fit.hooks import PARTS, Hooks, Part, overridden
from ckptrun.fit.loader_workers import end_workers
from ckptrun.fit.logs import Logs
from ckptrun.fit.module import DataHooks, Module
from ckptrun.fit.no_checkpoints import NoCheckpoints
from ckptrun.fit.optimizers import CountedOptimizer, LRSchedulerConfig, parse_configured
from ckptrun.fit.options import TrainerOptions
from ckptrun.fit.precision import make_precision
from ckptrun.fit.random_state import seed_everything
from ckptrun.fit.restore import begin_restore, finish_restore
from ckptrun.fit.sample_order import epoch_seed
from ckptrun.fit.state import TrainerState
from ckptrun.fit.trainer_view import TrainerView
from ckptrun.records import Fn, Outcome, SaveReason, Stage, Status, StopReason
from ckptrun.stop import StopRequest, StopTraining, final_status
from ckptrun.strategies import strategy_from_name
from ckptrun.strategies.compiled import compile_in_place, is_compiled, unwrapped

ALONE_S = (
    10.0  # how long a rank waits for the others to do what all must do: a hook may take long on one of them
)
_KIND = {"validate": "validation", "test": "test", "predict": "predict"}


class SetupStopped(Exception):  # noqa: N818 - not an error: a stop was asked for before the loop began
    """A stop was requested during set-up."""


class Trainer(TrainerView):
    """Runs fns in one rank. Attributes and their meaning are those of Lightning's Trainer.

    Args:
        options: the trainer's options under Lightning's names; see :class:`~ckptrun.fit.options.TrainerOptions`.
        callbacks: callbacks, in the order in which they are called.
        loggers: loggers.
        strategy: a name or a strategy.

    Raises:
        MisconfigurationException: an option is unknown or wrong.
    """

    def __init__(
        self,
        options: dict[str, Any],
        *,
        callbacks: Sequence[Callback] = (),
        loggers: Sequence[Any] = (),
        strategy: Any = "single",
    ) -> None:
        self.agreement: Agreement | None = None
        self.options = TrainerOptions.parse(options)
        self.seed = self.options.seed
        self._given_callbacks = list(callbacks)
        self._given_loggers = list(loggers)
        self.callbacks: list[Callback] = list(callbacks)
        self.loggers: list[Any] = list(loggers)
        self.strategy = strategy_from_name(strategy)
        self.state = TrainerState()
        self.context = RankContext()
        self.logs = Logs(self.options.log_every_n_steps)
        self.datamodule: DataModule | None = None
        self.fit_loop: FitLoop | None = None
        self.checkpoints: CheckpointService = NoCheckpoints(self)
        self.optimizers: list[Any] = []
        self.lr_scheduler_configs: list[LRSchedulerConfig] = []
        self.should_stop = False
        self.sanity_checking = False
        self.interrupted = False
        self.first_step_reported = False
        self.needs_transfer = False
        self._transfer_hooks: DataHooks | None = None
        self._evaluated_step = 0  # of the weights that are evaluated
        self._module: Module | None = None
        self._hooks: Hooks | None = None
        self._counted: list[CountedOptimizer] = []
        self.precision_plugin = make_precision("32", "cpu")
        self.configured: Configured = {}
        self._unique_state_keys()

    # -- the one place ---------------------------------------------------------------------------------

    def execute(
        self,
        fn: Fn,
        model: Module,
        *,
        dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        context: RankContext,
    ) -> Outcome:
        """Run ``fn`` and say how it ended. Raises nothing that the work itself raised: that is in the outcome."""
        self._attach(fn, model, datamodule, context)
        outcome = Outcome(StopReason.EXCEPTION)
        try:
            results = self._run(fn, dataloaders, val_dataloaders)
            finished_by = self.fit_loop.finished_by if self.fit_loop is not None else None
            outcome = self._outcome(StopReason.DONE, results=results, finished_by=finished_by)
        except StopTraining:
            outcome = self._after_stop_training()
        except (TrainingStopped, EvaluationStopped, SetupStopped):
            request = self.stop.request or context.stop.request
            outcome = self._after_request(request.reason if request is not None else StopReason.REQUESTED)
        except KeyboardInterrupt as error:
            # Raised by user code, or where signals cannot be caught (not the main thread): in the middle of anything.
            self._note_exception(error)
            self._save_after_interrupt()
            outcome = self._outcome(StopReason.KEYBOARD)
        except BaseException as error:
            outcome = self._after_exception(error)
        finally:
            outcome = self._close(fn, outcome) or outcome
            self.state.status = final_status(outcome)
        return outcome

    def _attach(self, fn: Fn, model: Module, datamodule: DataModule | None, context: RankContext) -> None:
        model = unwrapped(model)
        if not isinstance(model, Module):
            raise MisconfigurationException(
                f"Found {type(model).__name__} as model; expected a ckptrun.Module.",
                hint="Derive it from ckptrun.Module instead of torch.nn.Module.",
            )
        # Evaluated after a fit, a model still is at the step where that ended.
        self._evaluated_step = self.global_step if model is self._module else 0
        self.context = context
        self._module = model
        self.datamodule = datamodule
        model.__dict__["_trainer"] = self
        if datamodule is not None:
            datamodule.trainer = self
        own = model.configure_callbacks() or []
        replaced = {type(callback) for callback in own}
        self.callbacks = [cb for cb in self._given_callbacks if type(cb) not in replaced] + list(own)
        self.loggers = list(self._given_loggers)
        self._unique_state_keys()
        self._hooks = Hooks(self, model, self.callbacks)
        self.state = TrainerState(fn, Status.RUNNING, Stage.SETUP)
        self.should_stop = self.interrupted = self.sanity_checking = self.first_step_reported = False
        self.fit_loop = None
        self.checkpoints = NoCheckpoints(self)
        self.optimizers, self.lr_scheduler_configs, self._counted = [], [], []
        context.metrics = self.progress_metrics
        context.progress.fn = fn
        context.progress.max_steps = self.options.max_steps
        context.progress.max_epochs = self.options.max_epochs

    def _unique_state_keys(self) -> None:
        keys = [callback.state_key for callback in self.callbacks]
        for key in keys:
            if keys.count(key) > 1 and any(cb.state_dict() for cb in self.callbacks if cb.state_key == key):
                raise MisconfigurationException(
                    f"Two callbacks have the same state key {key!r}, so a checkpoint could not tell them apart.",
                    hint="Give one of them other arguments, or override its state_key property.",
                )

    def _run(self, fn: Fn, dataloaders: Any, val_dataloaders: Any) -> Any:
        self._set_up(fn)
        if fn == "fit":
            self._set_up_fit(dataloaders, val_dataloaders)
            self._fit()
            return None
        return self._evaluate(fn, dataloaders)

    # -- set-up ----------------------------------------------------------------------------------------

    def _set_up(self, fn: Fn) -> None:
        self.enter(Stage.SETUP)
        options, module, datamodule = self.options, self.lightning_module, self.datamodule
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        if options.deterministic:
            if torch.cuda.is_available():
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses without it
            torch.use_deterministic_algorithms(True, warn_only=options.deterministic == "warn")
        self.strategy.setup_environment()
        own_precision = fn == "fit" and self.strategy.updates_itself
        self.precision_plugin = make_precision(
            "32" if own_precision else options.precision, self.strategy.root_device.type
        )
        self.agreement = Agreement(self.context.stop, self.strategy) if self.world_size > 1 else None
        self.strategy.prepare(self.context.say, lambda: self.context.stop.request is not None)
        self._check_stop()
        if fn == "fit" and self.context.run is not None and not self.fast_dev_run:
            self.checkpoints = CheckpointService(self, self.context.run)
        if datamodule is not None:
            self._prepare_data(datamodule)
        self._prepare_data(module)
        if datamodule is not None:
            datamodule.setup(fn)
        for callback in self.callbacks:
            callback.setup(self, module, fn)
        module.setup(fn)
        module.configure_model()
        self._compile(module)
        if self.context.logs_dir is None or not self.is_global_zero:
            self.loggers = []
        for logger in self.loggers:
            logger.setup(self)
        self._check_stop()

    def _compile(self, module: Module) -> None:
        if self.options.compile:
            compile_in_place(module, self.options.compile)
        if not self.strategy.takes_compiled and is_compiled(module):
            raise MisconfigurationException(
                f"The strategy {self.strategy.name} cannot train a compiled model.",
                hint="Leave trainer.compile and torch.compile out, or use another strategy.",
            )

    def _prepare_data(self, owner: DataModule | Module) -> None:
        """Once a host, and nobody goes on before it is done: what is downloaded is downloaded once."""
        if self.local_rank == 0:
            owner.prepare_data()
        if (
            overridden(owner, "prepare_data", DataModule if isinstance(owner, DataModule) else Module)
            is not None
        ):
            self.strategy.barrier()

    def _dataloader(self, name: str, given: Any) -> Any:
        """Given loaders, else the datamodule's, else the module's own."""
        if given is not None:
            return given
        if self.datamodule is not None and overridden(self.datamodule, name, DataModule) is not None:
            return getattr(self.datamodule, name)()
        return getattr(self.lightning_module, name)()

    def _check_manual(self) -> None:
        """With manual optimization these are the user's own affair, as in Lightning."""
        if self.lightning_module.automatic_optimization:
            return
        for name in ("gradient_clip_val", "accumulate_grad_batches"):
            if getattr(self.options, name) not in (None, 1):
                raise MisconfigurationException(
                    f"Found {name}={getattr(self.options, name)} together with manual optimization.",
                    hint=f"Leave {name} out and do it in training_step.",
                )

    def _check_updates(self) -> None:
        """What a strategy that makes the updates itself leaves no room for."""
        strategy, module = self.strategy, self.lightning_module
        if not strategy.updates_itself:
            return
        if not module.automatic_optimization:
            raise MisconfigurationException(
                f"The strategy {strategy.name} makes the updates itself, which leaves no room for manual optimization.",
                hint="Leave automatic_optimization = False out, or use another strategy.",
            )
        for name in ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"):
            if overridden(module, name, Module) is not None:
                raise MisconfigurationException(
                    f"{type(module).__name__} overrides {name}, which the strategy {strategy.name} does itself.",
                    hint=f"Leave {name} out, or use another strategy.",
                )
        for callback in self.callbacks:
            if hasattr(callback, "unswapped_parameters"):
                raise MisconfigurationException(
                    f"{type(callback).__name__} does not go together with the strategy {strategy.name}: a rank has "
                    "perhaps only a part of the weights.",
                    hint="Leave it out, or use another strategy.",
                )

    def _check_windows(self) -> None:
        loop = self.fit_loop
        if (
            self.strategy.updates_itself
            and loop is not None
            and loop.accumulate > 1
            and loop.num_batches == math.inf
        ):
            raise MisconfigurationException(
                f"The strategy {self.strategy.name} has to know which batch is the last of an accumulation window, and "
                "the training data does not tell its length.",
                hint="Give it a length (__len__), or set trainer.limit_train_batches or accumulate_grad_batches=1.",
            )

    def _connect_strategy(self, source: TrainSource) -> None:
        options = self.options
        self.strategy.connect(
            Given(
                accumulate_grad_batches=options.accumulate_grad_batches,
                gradient_clip_val=options.gradient_clip_val,
                gradient_clip_algorithm=options.gradient_clip_algorithm,
                precision=options.precision,
                world_size=self.strategy.world_size,
                micro_batch_size=source.batch_size,
            )
        )

    def _set_up_fit(self, train_dataloaders: Any, val_dataloaders: Any) -> None:
        module = self.lightning_module
        self._check_manual()
        self._check_updates()
        source = TrainSource(
            self._dataloader("train_dataloader", train_dataloaders),
            seed=self.seed,
            rank=self.strategy.rank,
            world_size=self.strategy.world_size,
        )
        own = source.out_of_reach()
        if own and self.is_global_zero:
            self.context.say(
                "The training data draws from generators of its own, which are out of reach: their numbers are not "
                f"those of an undisturbed run after a resume. {', '.join(own)}"
            )
        self._connect_strategy(source)
        validation = self._validation(val_dataloaders)
        self._new_logs()
        self.fit_loop = FitLoop(self, source, validation)
        self._choose_transfer()
        self._check_windows()
        self.strategy.place(module)
        state = None if self.strategy.restore_checkpoint_after_setup else begin_restore(self)
        optimizers, self.lr_scheduler_configs = parse_configured(module.configure_optimizers())
        self.optimizers = list(self.strategy.setup(module, optimizers, self.lr_scheduler_configs))
        self.configured = configured(self.optimizers, self.lr_scheduler_configs)
        if self.strategy.restore_checkpoint_after_setup:
            state = begin_restore(self)
        finish_restore(self, state)
        hyper = {**(self.datamodule.hparams if self.datamodule is not None else {}), **module.hparams}
        for logger in self.loggers:
            if hyper:
                logger.log_hyperparams(hyper)
        self.checkpoints.begin()
        self.checkpoints.try_out()
        self._check_stop()

    def _validation(self, given: Any) -> Evaluation | None:
        if overridden(self.lightning_module, "validation_step", Module) is None:
            return None
        loaders = as_loaders(self._dataloader("val_dataloader", given))
        return Evaluation(self, "validation", loaders, self.options.limit_val_batches) if loaders else None

    # -- fit -------------------------------------------------------------------------------------------

    def _fit(self) -> None:
        loop = self.fit_loop
        assert loop is not None
        if not self.lightning_module.training:
            self.context.say(
                f"{type(self.lightning_module).__name__} is in eval mode as training begins; it stays as it is. Call "
                "its train() first if that is not meant."
            )
        if self.world_size > 1 and self.context.resolution.fresh:
            # Weights began the same; what each rank draws from here on (dropout, augmentation) must not.
            seed_everything(epoch_seed(self.seed, 0) % 2**31 + self.strategy.rank)
        self.hooks.call("on_fit_start")
        self._sanity_check()
        loop.run()
        self.hooks.call("on_fit_end")

    def _sanity_check(self) -> None:
        loop, steps = self.fit_loop, self.options.num_sanity_val_steps
        assert loop is not None
        resumed = not self.context.resolution.fresh
        if loop.validation is None or steps == 0 or resumed or self.options.limit_val_batches == 0:
            return
        self.enter(Stage.SANITY_CHECKING)
        self.sanity_checking = True
        try:
            self.hooks.call("on_sanity_check_start")
            loop.validation.run(sanity_steps=None if steps == -1 else steps)
            self.hooks.call_part("on_validation_end", "checkpoint")
            self.hooks.call("on_sanity_check_end")
        finally:
            self.sanity_checking = False
        # What was logged there is not a result.
        self._new_logs()

    # -- validate, test, predict -----------------------------------------------------------------------

    def _evaluate(self, fn: Fn, given: Any) -> Any:
        kind, module = _KIND[fn], self.lightning_module
        loader_name = {"validation": "val_dataloader"}.get(kind, f"{kind}_dataloader")
        if kind != "predict" and overridden(module, f"{kind}_step", Module) is None:
            raise MisconfigurationException(
                f"{type(module).__name__} has no {kind}_step.",
                hint=f"Define {kind}_step(self, batch, batch_idx).",
            )
        loaders = as_loaders(self._dataloader(loader_name, given))
        if not loaders:
            raise MisconfigurationException(
                f"There is nothing to {fn} on: no dataloaders, and {loader_name}() returns nothing."
            )
        limit = {"validation": "limit_val_batches"}.get(kind, f"limit_{kind}_batches")
        self._new_logs()
        self._choose_transfer()
        self.strategy.place(module)
        state = begin_restore(self)
        if state is not None:
            self._evaluated_step = state["global_step"]
        self.progress.step = self._evaluated_step
        evaluation = Evaluation(self, kind, loaders, getattr(self.options, limit))
        self._check_stop()
        self.enter(STAGES[kind])
        metrics = evaluation.run()
        predictions = self._all_predictions(evaluation.predictions)
        self.hooks.call_part(f"on_{kind}_end", "checkpoint")
        if kind != "predict":
            return metrics
        return predictions[0] if len(predictions) == 1 else predictions

    def _all_predictions(self, own: list[list[Any]]) -> list[list[Any]]:
        """The predictions of all ranks in the order of the batches, on rank 0; elsewhere this rank's own."""
        if self.world_size == 1:
            return own
        gathered = self.strategy.gather(_on_cpu(own))
        if gathered is None:
            return own
        # Ranks took the batches in turn; at the end some had one more.
        missing = object()
        return [
            [
                batch
                for batches in zip_longest(*ranks, fillvalue=missing)
                for batch in batches
                if batch is not missing
            ]
            for ranks in zip(*gathered, strict=True)
        ]

    # -- ends ------------------------------------------------------------------------------------------

    def _outcome(self, reason: StopReason, **more: Any) -> Outcome:
        return Outcome(
            reason, self.global_step, self.current_epoch, save_error=self.checkpoints.save_error, **more
        )

    def _after_stop_training(self) -> Outcome:
        agreement = self.agreement
        if agreement is not None and agreement.wish is not Wish.STOP_TRAINING:
            try:
                self.together("StopTraining was raised")
            except RanksDisagreeError as error:
                return self._after_exception(error)
        if self.fit_loop is not None and self.state.fn == "fit":
            loop = self.fit_loop
            loop.finished_by = loop.finished_by or "stop_training"
            try:
                loop.settle()
                self.checkpoints.save_boundary(SaveReason.FINAL, finished_by=loop.finished_by)
            except BaseException as error:
                return self._outcome(StopReason.EXCEPTION, error=error)
            return self._outcome(StopReason.DONE, finished_by=loop.finished_by)
        return self._outcome(StopReason.DONE, finished_by="stop_training")

    def _after_request(self, reason: StopReason) -> Outcome:
        self.interrupted = True
        if reason is StopReason.KEYBOARD:
            # As in Lightning; what checkpoint callbacks would save is saved.
            self._call_on_exception(KeyboardInterrupt(), parts=("first", "monitoring"))
        return self._outcome(reason)

    def _after_exception(self, error: BaseException) -> Outcome:
        self._note_exception(error)
        ours = isinstance(error, CkptrunError)
        return self._outcome(StopReason.EXCEPTION, error=error, user_error=not ours)

    def _save_after_interrupt(self) -> None:
        try:
            self.checkpoints.save_for_stop(StopRequest(StopReason.KEYBOARD, None, time.monotonic()))
        except Exception as error:
            self.context.say(f"saving after KeyboardInterrupt failed: {type(error).__name__}: {error}")

    def _note_exception(self, error: BaseException) -> None:
        self.interrupted = True
        self.checkpoints.alone = True
        if self.fit_loop is not None:
            self.fit_loop.settle()
        self._call_on_exception(error, parts=PARTS if self.fit_loop is not None else ("first", "monitoring"))

    def _call_on_exception(self, error: BaseException, parts: Sequence[Part]) -> None:
        hooks = [hook for part in parts for hook in self.hooks.part("on_exception", part)]
        if self.datamodule is not None:
            hooks.insert(0, self.datamodule.on_exception)
        for hook in hooks:
            try:
                hook(error)
            except BaseException as second:
                self.context.say(f"on_exception failed too: {type(second).__name__}: {second}")

    def _close(self, fn: Fn, outcome: Outcome) -> Outcome | None:
        """Tear down; an error here replaces an outcome that was good."""
        self.enter(Stage.TEARDOWN)
        status = {StopReason.DONE: "success", StopReason.EXCEPTION: "failed"}.get(
            outcome.stop_reason, "interrupted"
        )
        module, first_error = self.lightning_module, None
        steps: list[Callable[[], Any]] = [partial(logger.finalize, status) for logger in self.loggers]
        if outcome.stop_reason is StopReason.DONE:
            steps += [partial(callback.teardown, self, module, fn) for callback in self.callbacks]
            if self.datamodule is not None:
                datamodule = self.datamodule
                steps.append(lambda: datamodule.teardown(fn))
            steps.append(lambda: module.teardown(fn))
        steps.insert(0, self.checkpoints.settle)
        failed = self.checkpoints.alone or outcome.stop_reason is StopReason.EXCEPTION
        steps.append(lambda: self.strategy.teardown(failed=failed))
        steps.append(end_workers)
        for step in steps:
            try:
                step()
            except StopTraining:
                pass  # it ends what is ending
            except BaseException as error:
                first_error = first_error or error
        if first_error is None:
            return None
        if outcome.error is not None:
            warnings.warn(f"teardown failed too: {type(first_error).__name__}: {first_error}", stacklevel=2)
            return None
        ours = isinstance(first_error, CkptrunError)
        return self._outcome(StopReason.EXCEPTION, error=first_error, user_error=not ours)

    def save_checkpoint(self, filepath: str, weights_only: bool = False) -> None:
        """Write the current state to one file of its own, outside the run's checkpoints (``torch.load`` reads it)."""
        from ckptrun.checkpoint.state_file import write_state
        from ckptrun.fit.capture import capture

        if self.fit_loop is None:
            raise MisconfigurationException("save_checkpoint() saves the state of a fit, and none has begun.")
        with open(filepath, "wb") as file:
            write_state(file, capture(self, weights_only=weights_only))

    # -- services for the loops --------------------------------------------------------------------------

    def enter(self, stage: Stage) -> None:
        """Note the stage and tell the supervisor."""
        self.state.stage = stage
        self.progress.stage = stage
        self.context.stage_changed()

    def place(self) -> str:
        """Where this rank is, by a name that is the same on every rank that is there."""
        loop, progress = self.fit_loop, self.progress
        at = "" if loop is None else f"{loop.total_batches}-{loop.global_step}-{loop.epoch}-{loop.point}"
        return f"{self.state.fn}-{self.state.stage}-{at}-{progress.eval_batch}"

    def together(self, what: str) -> None:
        """User code did what all ranks have to do at the same place: they wait for each other there.

        Args:
            what: what it did, as a sentence without its end.

        Raises:
            RanksDisagreeError: not all of them did.
        """
        if self.world_size > 1 and not self.strategy.all_here(f"{what}/{self.place()}", ALONE_S):
            raise RanksDisagreeError(what, rank=self.global_rank, step=self.global_step, waited_s=ALONE_S)

    def _check_stop(self) -> None:
        if self.agreement is not None:
            self.agreement.ask()
        if self.stop.request is not None:
            raise SetupStopped

    def report_first_step(self) -> None:
        """The attempt has completed its first step."""
        self.first_step_reported = True
        self.context.first_step_done()
        self.checkpoints.first_step_done()

    def monitored(self, name: str) -> torch.Tensor | None:
        """The newest value of a metric that something is decided by, the same on every rank; None where there is none.

        Values over an epoch are the same anyway; of one that each rank logs for its own step, rank 0's counts. Every
        rank has to ask at the same point.
        """
        value = self.callback_metrics.get(name)
        if self.world_size > 1 and not self.checkpoints.alone:
            value = self.strategy.broadcast(None if value is None else value.detach().cpu())
        return value

    def clock_s(self) -> float:
        """Seconds, from any beginning, by which ranks decide alike; with several it moves when they ask each other."""
        return time.monotonic() if self.agreement is None else self.agreement.clock_s

    def log_step(self) -> None:
        """Send this step's values to the loggers."""
        if self.world_size > 1 and not self.checkpoints.alone:
            self.logs.sync_steps()
        if self.loggers:
            metrics = self.logs.step_metrics()
            if metrics:
                self.log_to_loggers(metrics)

    def log_to_loggers(self, metrics: dict[str, float]) -> None:
        """Send ``metrics`` to every logger at the current step."""
        if self.loggers:
            row = {"epoch": self.current_epoch, **metrics}
            for logger in self.loggers:
                logger.log_metrics(row, self.global_step)

    def forward_context(self) -> Any:
        """Around a forward pass: autocast under mixed precision."""
        return self.precision_plugin.forward_context()

    def _new_logs(self) -> None:
        self.logs = Logs(self.options.log_every_n_steps)
        if self.world_size > 1:
            self.logs.share = self.strategy.gather_all

    def _choose_transfer(self) -> None:
        names = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
        owners: list[DataHooks] = [o for o in (self.datamodule, self.lightning_module) if o is not None]
        own = [
            owner for owner in owners if any(overridden(owner, name, DataHooks) is not None for name in names)
        ]
        self._transfer_hooks = own[0] if own else self.lightning_module
        strategy = self.strategy
        self.needs_transfer = bool(own) or strategy.root_device.type != "cpu" or strategy.casts

    def transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """``batch`` on this rank's device, through the transfer hooks."""
        if not self.needs_transfer:
            return batch
        hooks = self._transfer_hooks
        assert hooks is not None
        batch = hooks.on_before_batch_transfer(batch, dataloader_idx)
        batch = hooks.transfer_batch_to_device(batch, self.strategy.root_device, dataloader_idx)
        return self.strategy.cast(hooks.on_after_batch_transfer(batch, dataloader_idx))

    def progress_metrics(self) -> dict[str, float]:
        """For the bar and ``status.json``, from another thread: values that cannot be had now are left out."""
        try:
            return self.progress_bar_metrics
        except RuntimeError:  # a dict that grew while it was read
            return {}


def _on_cpu(value: Any) -> Any:
    """Tensors in nested containers moved to the CPU, so that they can go to another rank."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_on_cpu, value))
    return value
