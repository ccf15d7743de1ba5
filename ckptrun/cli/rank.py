"""What does one rank do for a command? Build what the config names, and hand it to the trainer.

Decision: an object that is made from the config alone and can be pickled, because under a launcher it goes to
processes that have imported nothing of the user's; inline it builds before the attempt begins, so that a typo
in the config's classes leaves no trace in the run. Turned down: building in the supervisor always, which a
fork would share between ranks.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from ckptrun.config.run_config import ClassSpec, RunConfig
from ckptrun.errors import ConfigError
from ckptrun.launch.heavy_imports import FOR_ONE_RANK, FOR_OPTIMIZERS, collector_paused, import_all
from ckptrun.records import Fn, Outcome

if TYPE_CHECKING:
    from ckptrun.fit.context import RankContext
    from ckptrun.fit.rank_main import Built


class RankWork:
    """The work of one rank; called with the rank's context.

    Raises:
        ConfigError: the config names no model.
    """

    def __init__(self, fn: Fn, config: RunConfig) -> None:
        if config.model is None:
            raise ConfigError(
                f"the config has no model to {fn}",
                place=config.files[-1] if config.files else None,
                hint="Write model: {class_path: package.module.Class}.",
            )
        self._fn = fn
        self._config = config
        self._model: ClassSpec = config.model
        self._built: Built | None = None

    def prepare(self) -> None:
        """Build now, in this process, what the rank will use.

        Raises:
            ConfigError: the config does not fit the classes that it names.
            UserCodeError: the user's module or ``__init__`` raised.
        """
        with collector_paused():
            import_all(FOR_ONE_RANK)
            gc.freeze()
        from ckptrun.fit.random_state import seed_everything

        # As the rank does, so that weights begin the same wherever the model is built.
        seed_everything(self._config.trainer.seed)
        self._built = self._build()
        if self._fn == "fit":
            # Not before: it reads the environment, which the user's module may set.
            with collector_paused():
                import_all(FOR_OPTIMIZERS)

    def __call__(self, context: RankContext) -> Outcome:
        from ckptrun.fit.rank_main import run_rank

        built, self._built = self._built, None
        return run_rank(
            context,
            fn=self._fn,
            options=dict(vars(self._config.trainer)),
            build=self._build if built is None else lambda: built,
        )

    def _build(self) -> Built:
        from ckptrun.config.build import build
        from ckptrun.fit.callback import Callback
        from ckptrun.fit.datamodule import DataModule
        from ckptrun.fit.module import Module
        from ckptrun.fit.rank_main import Built

        config = self._config

        def made(spec: ClassSpec, base: type | None) -> Any:
            return build(spec, base=base, config=config)

        # A config that says nothing of loggers gets the default one; `loggers: []` means none.
        says_loggers = bool(config.loggers) or config.source("loggers").kind != "default"
        return Built(
            model=made(self._model, Module),
            data=None if config.data is None else made(config.data, DataModule),
            callbacks=[made(spec, Callback) for spec in config.callbacks],
            loggers=[made(spec, None) for spec in config.loggers] if says_loggers else None,
            strategy_options=config.strategy.options,
        )
