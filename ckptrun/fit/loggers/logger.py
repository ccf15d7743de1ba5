"""Where do logged metrics go? To loggers; this is what each of them can do. Names are Lightning's.

Decision: a logger is told its place by :meth:`Logger.setup` and touches no disk before the first metric, so
that a logger can be built from a config in any process, and only rank 0's writes. Turned down: opening files
in the constructor, which leaves an empty folder behind each ``--dry-run``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from ckptrun.errors import MisconfigurationException

if TYPE_CHECKING:
    from ckptrun.fit.trainer import Trainer

CloseStatus = Literal["success", "failed", "interrupted"]


class Logger:
    """Base of all loggers.

    Args:
        save_dir: folder to write under; None is the run's ``logs/``.
        name: folder within it; None or "" for none.
        version: folder within that; a number N is ``version_N``; None for none. It never counts up by itself,
            so that a run which is started again writes on in the same place.
        prefix: put before each metric's name, with ``-`` between.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        version: int | str | None = None,
        prefix: str = "",
    ) -> None:
        self._save_dir = None if save_dir is None else os.fspath(save_dir)
        self._name = name
        self._version = version
        self._prefix = f"{prefix}-" if prefix else ""
        self._logs_dir: str | None = None
        self._run_id = ""
        self._attempt = 1
        self._fn_dir: str | None = None

    def setup(self, trainer: Trainer) -> None:
        """Called when a fn begins, before :meth:`load_state_dict`: where the run is, and whose it is."""
        run, fn = trainer.context.run, trainer.state.fn
        self._logs_dir = trainer.log_dir
        self._run_id = trainer.context.run_id
        self._attempt = trainer.context.attempt
        # What an evaluation logs stands apart from the training's, which may be written at this moment.
        shared = self._save_dir is not None or run is None or self._logs_dir == run.logs_dir
        self._fn_dir = fn if shared and fn != "fit" else None
        self._begin()

    def _begin(self) -> None:
        """Forget what an earlier fn of this process has written."""

    @property
    def name(self) -> str | None:
        """The folder's name, as given."""
        return self._name

    @property
    def version(self) -> int | str | None:
        """The version, as given."""
        return self._version

    @property
    def save_dir(self) -> str | None:
        """The folder that ``name`` and ``version`` stand in; None where nobody has said it yet."""
        return self._save_dir if self._save_dir is not None else self._default_dir()

    @property
    def log_dir(self) -> str:
        """The folder this logger writes into.

        Raises:
            MisconfigurationException: no ``save_dir`` was given, and no trainer has said where its run is.
        """
        base = self.save_dir
        if base is None:
            raise MisconfigurationException(
                f"{type(self).__name__} does not know where to write: it has no save_dir and no trainer.",
                hint="Give it a save_dir, or pass it to a Trainer that has a run.",
            )
        version = f"version_{self._version}" if isinstance(self._version, int) else self._version
        return os.path.join(base, *(part for part in (self._name, version, self._fn_dir) if part))

    def _default_dir(self) -> str | None:
        return self._logs_dir

    # -- what a subclass does ----------------------------------------------------------------------

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log numbers under a step of training."""
        raise NotImplementedError

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log what the run was set up with, once."""

    def save(self) -> None:
        """Write out what is still in memory."""

    def finalize(self, status: CloseStatus) -> None:
        """Write out everything and close. Metrics that come after this open the logger again."""
        self.save()

    def state_dict(self) -> dict[str, Any]:
        """How far this logger has written, to be kept in a checkpoint."""
        return {"run_id": self._run_id}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there: what was written after it is taken out of sight. Comes before any metric.

        A state of another run says nothing about this one's files: then, as without a state, nothing that
        stands there belongs to this training.
        """

    def _is_own(self, state_dict: Mapping[str, Any]) -> bool:
        return bool(state_dict.get("run_id") == self._run_id)
