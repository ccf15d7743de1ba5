"""What does a user's own script start with? :class:`Trainer`, under Lightning's names.

The same sessions as on the command line: a run's folder, a lease, the rules for choosing a checkpoint, stop signals.
What is an exit code there is an exception here: errors are raised, Ctrl-C ends in KeyboardInterrupt after the save,
SIGTERM in ``SystemExit(143)``.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from ckptrun.environment.slurm import job_facts
from ckptrun.errors import (
    CkptrunError,
    IncompatibleError,
    MisconfigurationException,
    NoCheckpointError,
    RunInUseError,
    UsageError,
)
from ckptrun.fit.callback import Callback
from ckptrun.fit.context import RankContext
from ckptrun.fit.datamodule import DataModule
from ckptrun.fit.module import Module
from ckptrun.fit.random_state import seed_everything
from ckptrun.fit.rank_main import default_loggers, with_default_checkpoint
from ckptrun.fit.trainer import Trainer as RankTrainer
from ckptrun.launch.plan import make_plan
from ckptrun.records import (
    DEFAULT_ON_SAVE_ERROR,
    Fn,
    Outcome,
    Progress,
    Resolution,
    ResolutionError,
    StopReason,
)
from ckptrun.resolve.explain import passed_over
from ckptrun.resolve.finished import Limits
from ckptrun.run.folder import RunFolder
from ckptrun.session.spec import SessionResult, SessionSpec
from ckptrun.session.story import run_session
from ckptrun.stop import DEFAULT_GRACE_S, StopListener

_BY_CODE: dict[int, type[CkptrunError]] = {3: NoCheckpointError, 4: RunInUseError, 5: IncompatibleError}


class Trainer(RankTrainer):
    """Trains and evaluates in this process.

    Args:
        run: the run's name; its folder is ``<root>/<run>``.
        root: the folder that holds runs. ``default_root_dir``, Lightning's name, is understood too.
        callbacks: callbacks; a ModelCheckpoint with its defaults is added where there is none.
        logger: True for the CSV logger, False for none, or a logger or several.
        enable_checkpointing: False adds no ModelCheckpoint.
        strategy: how the model meets the hardware.
        save_on_stop: whether a stop by signal saves.
        on_save_error: ``retry``, ``warn`` or ``stop``.
        async_save: whether training goes on while a checkpoint is written.
        grace_s: seconds from SIGTERM until the end is forced.
        override: go on although the optimizers are configured otherwise than when the checkpoint was written.
        exact: refuse to resume where the result would not be that of an undisturbed run.
        options: Lightning's trainer options, such as ``max_epochs`` and ``precision``.

    Raises:
        MisconfigurationException: an option is unknown or wrong.
    """

    def __init__(
        self,
        *,
        run: str = "default",
        root: str | os.PathLike[str] | None = None,
        default_root_dir: str | os.PathLike[str] | None = None,
        callbacks: Sequence[Callback] | Callback | None = None,
        logger: Any = True,
        enable_checkpointing: bool = True,
        strategy: Any = "single",
        save_on_stop: bool = True,
        on_save_error: str = DEFAULT_ON_SAVE_ERROR,
        async_save: bool = True,
        grace_s: float = DEFAULT_GRACE_S,
        override: bool = False,
        exact: bool = False,
        **options: Any,
    ) -> None:
        given = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())
        if enable_checkpointing:
            given = with_default_checkpoint(given)
        elif any(hasattr(cb, "registry_entry") for cb in given):
            raise MisconfigurationException(
                "enable_checkpointing=False, and callbacks has one that saves checkpoints.",
                hint="Leave one of them out.",
            )
        if logger is True or logger is None:
            loggers = default_loggers()
        elif logger is False:
            loggers = []
        else:
            loggers = list(logger) if isinstance(logger, (list, tuple)) else [logger]
        if strategy not in ("single", "auto") and getattr(strategy, "name", None) != "single":
            raise MisconfigurationException(
                f"Trainer(strategy={strategy!r}): a script trains in its own process, with the strategy 'single'.",
                hint="Several ranks are started from the shell: ckptrun fit --nproc 2.",
            )
        super().__init__(options, callbacks=given, loggers=loggers, strategy=strategy)
        self._seed_given = options.get("seed") is not None
        self._folder = RunFolder.at(os.fspath(root or default_root_dir or "runs"), run)
        self._save_on_stop = save_on_stop
        self._on_save_error = on_save_error
        self._async_save = async_save
        self._grace_s = grace_s
        self._override = override
        self._exact = exact
        self._ckpt_path: str | None = None
        self._user_managed = False
        self.resolution: Resolution | None = None

    # -- the checkpoint that the user manages ------------------------------------------------------------

    @property
    def ckpt_path(self) -> str | None:
        """The checkpoint that the last fn started from, or that the user chose by setting it.

        Setting it makes the path the user's to manage: every fn without a ``ckpt_path`` argument uses it, until it is
        set to None or an argument beats it, which warns and resets it.
        """
        return self._ckpt_path

    @ckpt_path.setter
    def ckpt_path(self, path: str | os.PathLike[str] | None) -> None:
        self._ckpt_path = None if path is None else os.fspath(path)
        self._user_managed = bool(path)

    # -- the four fns ------------------------------------------------------------------------------------

    def fit(
        self,
        model: Module,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Train.

        Args:
            ckpt_path: a reference (``last``, ``best``, ``none``, ``step:N``, ...) or a path; without it the rules
                that the command line follows decide.

        Raises:
            CkptrunError: nothing was started.
            Exception: whatever the user's own code raised.
            KeyboardInterrupt: Ctrl-C, after the checkpoint was saved.
            SystemExit: another stop signal, with its exit code, after the checkpoint was saved.
        """
        if isinstance(train_dataloaders, DataModule):
            if datamodule is not None:
                raise MisconfigurationException("fit() got two datamodules.")
            train_dataloaders, datamodule = None, train_dataloaders
        if datamodule is not None and (train_dataloaders is not None or val_dataloaders is not None):
            raise MisconfigurationException(
                "fit() got a datamodule and dataloaders too.", hint="Pass the one or the others."
            )
        self._run_session("fit", model, train_dataloaders, val_dataloaders, datamodule, ckpt_path)

    def validate(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> Any:
        """Evaluate on the validation data; see :meth:`test`."""
        return self._evaluate_fn("validate", model, dataloaders, ckpt_path, verbose, datamodule)

    def test(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
    ) -> Any:
        """Evaluate on the test data and return what was logged: a list with one dict.

        With a ``model`` and no ``ckpt_path`` the model's own weights are used; without a model, the best checkpoint.
        """
        return self._evaluate_fn("test", model, dataloaders, ckpt_path, verbose, datamodule)

    def predict(
        self,
        model: Module | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool = True,
        ckpt_path: str | os.PathLike[str] | None = None,
    ) -> Any:
        """Return the predictions, a list over batches (of such lists with several loaders)."""
        results = self._evaluate_fn("predict", model, dataloaders, ckpt_path, False, datamodule)
        return results if return_predictions else None

    def _evaluate_fn(
        self, fn: Fn, model: Module | None, dataloaders: Any, ckpt_path: Any, verbose: bool, datamodule: Any
    ) -> Any:
        if isinstance(dataloaders, DataModule):
            dataloaders, datamodule = None, dataloaders
        if datamodule is not None and dataloaders is not None:
            raise MisconfigurationException(
                f"{fn}() got a datamodule and dataloaders too.", hint="Pass the one or the other."
            )
        own_weights = model is not None and ckpt_path is None and not self._user_managed
        chosen = model if model is not None else self._module
        if chosen is None:
            raise MisconfigurationException(f"{fn}() needs a model: none was given and no fn has run before.")
        if datamodule is None and dataloaders is None:
            datamodule = self.datamodule
        results = self._run_session(
            fn, chosen, dataloaders, None, datamodule, "none" if own_weights else ckpt_path
        )
        if verbose and results:
            for name, value in results[0].items():
                print(f"{name:>24}  {value:.6g}")
        return results

    # -- sessions ----------------------------------------------------------------------------------------

    def _run_session(
        self, fn: Fn, model: Module, dataloaders: Any, val_dataloaders: Any, datamodule: Any, ckpt_path: Any
    ) -> Any:
        reference, pin = self._reference(fn, ckpt_path)

        def rank_main(context: RankContext) -> Outcome:
            if self._seed_given and fn == "fit":
                seed_everything(self.options.seed)
            return self.execute(
                fn, model, dataloaders=dataloaders, val_dataloaders=val_dataloaders, datamodule=datamodule,
                context=context,
            )  # fmt: skip

        listener = StopListener(grace_s=self._grace_s)
        warning = listener.install()
        if warning is not None:
            warnings.warn(warning, stacklevel=4)
        try:
            result = run_session(
                SessionSpec(
                    fn=fn,
                    folder=self._folder,
                    rank_main=rank_main,
                    listener=listener,
                    plan=make_plan(
                        launcher="inline", strategy=self.strategy.name, num_ranks=1, command=sys.argv
                    ),
                    reference=reference,
                    pin=pin,
                    fast_dev_run=self.fast_dev_run,
                    limits=Limits(self.options.max_steps, self.options.max_epochs, self.options.max_time_s),
                    grace_s=self._grace_s,
                    override=self._override,
                    exact=self._exact,
                    save_on_stop=self._save_on_stop,
                    on_save_error=self._on_save_error,
                    async_save=self._async_save,
                    job=job_facts(os.environ),
                    command=sys.argv,
                    on_resolution=self._noted,
                    echo=_echo,
                    make_display=self._display() if self.options.enable_progress_bar else None,
                )
            )
        finally:
            listener.restore()
        return self._result(result)

    def _reference(self, fn: Fn, ckpt_path: Any) -> tuple[str | None, dict[str, Any] | None]:
        explicit = None if ckpt_path is None else os.fspath(ckpt_path)
        if not self._user_managed:
            return explicit, None
        managed = self._ckpt_path
        assert managed is not None
        if explicit is not None:
            if explicit != "none" or fn == "fit":
                warnings.warn(
                    f"trainer.ckpt_path was set to {managed!r}, and {fn}(ckpt_path={explicit!r}) was called: the "
                    "argument is used, and trainer.ckpt_path is no longer managed by you.",
                    stacklevel=5,
                )
            self.ckpt_path = None
            return explicit, None
        return None, {"reference": managed, "path": os.path.abspath(managed), "pinned_at": 0.0}

    def _noted(self, resolution: Resolution) -> None:
        self.resolution = resolution
        if not self._user_managed:
            self._ckpt_path = resolution.path
        for warning in (*resolution.warnings, *passed_over(resolution)):
            warnings.warn(warning, stacklevel=8)
        for notice in resolution.notices:
            _echo(notice)

    def _display(self) -> Callable[[Progress, Callable[[], dict[str, float]]], Any]:
        from ckptrun.launch.progress_bar import make_display

        return lambda progress, metrics: make_display(progress, metrics, run=self._folder.name)

    def _result(self, result: SessionResult) -> Any:
        outcome = result.outcome
        if outcome is None:
            if result.resolution is not None and result.resolution.error is not None:
                raise _as_error(result.resolution.error)
            return None
        if outcome.error is not None:
            raise outcome.error
        if outcome.stop_reason is StopReason.KEYBOARD:
            raise KeyboardInterrupt
        if outcome.stop_reason is not StopReason.DONE:
            raise SystemExit(result.exit_code)
        return outcome.results


def _as_error(error: ResolutionError) -> CkptrunError:
    return _BY_CODE.get(error.exit_code, UsageError)(error.message, hint=error.hint)


def _echo(text: str) -> None:
    print(f"ckptrun: {text}", file=sys.stderr, flush=True)
