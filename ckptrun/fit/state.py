"""What is the trainer doing? Lightning's ``trainer.state``."""

from __future__ import annotations

from dataclasses import dataclass

from ckptrun.records import Fn, Stage, Status


@dataclass
class TrainerState:
    """The fn that runs or ran last, its status and its stage."""

    fn: Fn | None = None
    status: Status = Status.INITIALIZING
    stage: Stage | None = None

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def stopped(self) -> bool:
        return self.status in (Status.FINISHED, Status.INTERRUPTED)
