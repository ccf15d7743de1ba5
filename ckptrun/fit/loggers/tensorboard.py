"""How do metrics get to TensorBoard so that curves do not fold after a resume? Event files with a purge step.

Decision: a checkpoint holds the last step that was logged before it; a resumed attempt opens a new event file
that tells TensorBoard to hide all that lies after that step, by TensorBoard's own means (``purge_step``).
Nothing is deleted. Turned down: a folder for each attempt, which shows one curve as many.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptrun.errors import MisconfigurationException
from ckptrun.fit.loggers.logger import CloseStatus, Logger

if TYPE_CHECKING:
    from torch.utils.tensorboard.writer import SummaryWriter


class TensorBoardLogger(Logger):
    """Write metrics as TensorBoard event files. Needs ``pip install ckptrun[tensorboard]``.

    Args:
        save_dir: folder to write under; None is ``tensorboard/`` in the run's ``logs/``.
        name: folder within it; None for none.
        version: folder within that; None for none.
        prefix: put before each metric's name, with ``-`` between.
        max_queue: number of values to keep in memory at most.
        flush_secs: seconds to keep them at most.

    Raises:
        MisconfigurationException: tensorboard is not installed.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        version: int | str | None = None,
        prefix: str = "",
        max_queue: int = 100,
        flush_secs: int = 30,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        if importlib.util.find_spec("tensorboard") is None:
            raise MisconfigurationException(
                "TensorBoardLogger needs the package tensorboard: pip install 'ckptrun[tensorboard]'."
            )
        self._max_queue = max_queue
        self._flush_secs = flush_secs
        self._writer: SummaryWriter | None = None
        self._begin()

    def _begin(self) -> None:
        self.finalize("interrupted")
        self._last_step = -1
        # The step from which on what stands there is hidden; without a state none of it is this training's.
        self._purge_step: int | None = 0

    def _default_dir(self) -> str | None:
        return None if self._logs_dir is None else os.path.join(self._logs_dir, "tensorboard")

    @property
    def experiment(self) -> SummaryWriter:
        """The writer itself, for images, texts and whatever else TensorBoard shows."""
        if self._writer is None:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._writer = SummaryWriter(
                self.log_dir,
                purge_step=self._purge(),
                max_queue=self._max_queue,
                flush_secs=self._flush_secs,
            )
            self._purge_step = None
        return self._writer

    def _purge(self) -> int | None:
        """The step from which on earlier event files are hidden; None where there is nothing to hide."""
        if self._purge_step is None or not os.path.isdir(self.log_dir):
            return None
        there = any(entry.startswith("events.out.tfevents") for entry in os.listdir(self.log_dir))
        return self._purge_step if there else None

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        writer = self.experiment
        for name, value in metrics.items():
            writer.add_scalar(self._prefix + name, value, step)
        if step > self._last_step:
            self._last_step = step

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.summary import hparams

        writer: Any = self.experiment.file_writer
        for summary in hparams(dict(_flat(params)), {}):  # type: ignore[no-untyped-call]
            writer.add_summary(summary)

    def save(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def finalize(self, status: CloseStatus) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def state_dict(self) -> dict[str, Any]:
        self.save()
        return {**super().state_dict(), "last_step": self._last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._begin()
        self._last_step = state_dict.get("last_step", -1) if self._is_own(state_dict) else -1
        self._purge_step = self._last_step + 1


def _flat(params: Mapping[str, Any], prefix: str = "") -> list[tuple[str, bool | int | float | str]]:
    """Nested values under names with ``/``; what TensorBoard cannot show as a value is shown as text."""
    flat: list[tuple[str, bool | int | float | str]] = []
    for key, value in params.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat += _flat(value, f"{name}/")
        elif isinstance(value, (bool, int, float, str)):
            flat.append((name, value))
        else:
            flat.append((name, str(value)))
    return flat
