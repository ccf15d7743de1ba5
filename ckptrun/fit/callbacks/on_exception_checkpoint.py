"""Is something saved when user code raises? With :class:`OnExceptionCheckpoint`, the last boundary is.

Decision: it only asks; the trainer's checkpoint service saves the state of the last completed step, not the
one in which the exception arose, and says in the manifest whether that was possible.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from ckptrun.fit.callback import Callback
from ckptrun.records import SaveReason

if TYPE_CHECKING:
    from ckptrun.fit.module import Module
    from ckptrun.fit.trainer import Trainer

log = logging.getLogger(__name__)


class OnExceptionCheckpoint(Callback):
    """Save a checkpoint when fit is ended by an exception. A fit after that goes on from it by default.

    Args:
        dirpath: accepted and ignored, with a note: checkpoints stand in the run's folder.
        filename: the part of the checkpoint's name after the save counter; the default is the step.
    """

    def __init__(self, dirpath: str | os.PathLike[str] | None = None, filename: str | None = None) -> None:
        self.dirpath = dirpath
        self.filename = filename

    def setup(self, trainer: Trainer, pl_module: Module, stage: str) -> None:
        if self.dirpath is not None and stage == "fit" and trainer.is_global_zero:
            log.warning(
                "OnExceptionCheckpoint(dirpath=%r) is ignored: checkpoints stand in the run.",
                str(self.dirpath),
            )

    def on_exception(self, trainer: Trainer, pl_module: Module, exception: BaseException) -> None:
        if trainer.fast_dev_run or trainer.state.fn != "fit":
            return
        ticket = trainer.checkpoints.reserve(self.filename)
        trainer.checkpoints.save(ticket, reason=SaveReason.EXCEPTION, owner=self.state_key, on_exception=True)

    def registry_entry(self) -> dict[str, Any]:
        """What the run's registry keeps of this callback: that it is set, so that fit goes on by default."""
        return {
            "state_key": self.state_key,
            "class": f"{type(self).__module__}.{type(self).__qualname__}",
            "monitor": None,
            "mode": None,
            "save_top_k": 0,
            "save_last": False,
            "saves_checkpoints": False,
            "on_exception": True,
            "best_k": {},
            "best": None,
            "best_score": None,
            "last": None,
        }
