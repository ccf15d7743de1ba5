"""What do the loop and callbacks meet where nothing is to be saved?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptrun.fit.checkpoints import CheckpointService
from ckptrun.fit.flight import Ticket
from ckptrun.records import CheckpointRecord, SaveReason

if TYPE_CHECKING:
    from ckptrun.fit.trainer import Trainer
    from ckptrun.stop import StopRequest


class NoCheckpoints(CheckpointService):
    """``fast_dev_run`` and evaluation: nothing is written; callbacks find every state saved already."""

    save_error = None

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.alone = self.landed = False
        self.head = self.resumed = None
        self.boundary_keeper = None

    def begin(self) -> None: ...
    def begin_from(self, record: CheckpointRecord) -> None: ...
    def try_out(self) -> None: ...
    def keep_boundary(self) -> None: ...
    def moved_on(self) -> None: ...

    def attend(self) -> None: ...
    def make_room(self) -> None: ...
    def settle(self) -> None: ...
    def first_step_done(self) -> None: ...

    def weights_were_swapped(self) -> bool:
        return False

    def reserve(self, label: str | None = None) -> Ticket:
        return Ticket("", "", True)

    def save(self, ticket: Ticket, **options: Any) -> bool:
        return False

    def save_boundary(self, reason: SaveReason, *, finished_by: str | None = None) -> bool:
        return False

    def serve_save_request(self, count: int) -> None:
        self.trainer.context.save_served(None, "nothing is saved here", count)

    def save_for_stop(self, request: StopRequest) -> None: ...
