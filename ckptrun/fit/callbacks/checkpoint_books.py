"""Which of its checkpoints does a checkpoint callback still want, and which is the best? Its books.

Decision: the books hold paths, as Lightning's attributes do, and in a saved state they are taken as names of
this run: on loading each is looked up again, so that a run folder that was moved keeps its top k, what is
gone is dropped, and the checkpoints of another run are never counted, and so never deleted. Turned down:
trusting the paths in the state, by which a resumed run deletes the files that it was resumed from.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from ckptrun.checkpoint.catalogue import Catalogue
from ckptrun.fit.callback import Callback
from ckptrun.records import CheckpointRecord
from ckptrun.run import best_k

log = logging.getLogger(__name__)


class CheckpointBooks(Callback):
    """The part of :class:`ModelCheckpoint` that remembers. See there for the arguments and attributes."""

    # What a save changes, and a failed one takes back. None of them is ever changed in place.
    _BOOKS = (
        "best_k_models", "best_model_path", "best_model_score", "current_score", "kth_best_model_path",
        "kth_value", "last_model_path", "_last_global_step_saved",
    )  # fmt: skip

    def __init__(self, monitor: str | None, mode: str, save_top_k: int, save_last: bool) -> None:
        self.monitor = monitor
        self.mode = mode
        self.save_top_k = save_top_k
        self.save_on_exception = False
        self._keeps_last = save_last
        self._worst = torch.tensor(math.inf if mode == "min" else -math.inf)
        self.best_k_models: dict[str, Tensor] = {}
        self.best_model_path = ""
        self.best_model_score: Tensor | None = None
        self.current_score: Tensor | None = None
        self.kth_best_model_path = ""
        self.kth_value: Tensor = self._worst
        self.last_model_path = ""
        self._last_global_step_saved = 0  # nothing to save before the first step
        self._deferred = False  # due at a step whose validation was still to come
        self._gone: list[str] = []  # named in the state that was loaded, and not there any more
        self._run_id: str | None = None  # these two are filled in by setup
        self._catalogue: Catalogue | None = None
        self._quarantined: Collection[str] = ()

    # -- entries -----------------------------------------------------------------------------------

    def _snapshot(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._BOOKS}

    def _roll_back(self, snapshot: Mapping[str, Any]) -> None:
        for name, value in snapshot.items():
            setattr(self, name, value)

    def _held(self) -> list[str]:
        """Every folder that this callback wants kept."""
        return [path for path in (*self.best_k_models, self.best_model_path, self.last_model_path) if path]

    def _given_up(self, before: Mapping[str, Any]) -> list[str]:
        """What was wanted ``before`` and is not any more."""
        was = dict.fromkeys((*before["best_k_models"], before["best_model_path"], before["last_model_path"]))
        if self.save_top_k == -1 and self.monitor is None:
            was.pop(before["best_model_path"], None)  # all are kept, and no list of them is
        held = self._held()
        return [path for path in was if path and path not in held]

    def _beats_kth(self, score: Tensor | None) -> bool:
        """Whether a state with this score belongs to the best ``save_top_k``."""
        if score is None:
            return False
        return best_k.comes_in(self.best_k_models, score, mode=self.mode, limit=self.save_top_k)

    def _enter(self, path: str, score: Tensor | None) -> None:
        """Take a checkpoint among those to keep; without a score it takes the place of the one before."""
        if score is None:
            self.best_model_path = path
            return
        self.best_k_models = best_k.entered(
            self.best_k_models, path, score, mode=self.mode, limit=self.save_top_k
        )
        self.current_score = score
        self._rank()

    def _rank(self) -> None:
        """Fill in what follows from ``best_k_models``."""
        models = self.best_k_models
        ranked, first = best_k.ranked(models, self.mode), best_k.best(models, self.mode)
        self.best_model_path = first or ""
        self.best_model_score = None if first is None else models[first]
        if ranked and (self.save_top_k == -1 or len(ranked) >= self.save_top_k):
            self.kth_best_model_path, self.kth_value = ranked[-1], models[ranked[-1]]
        else:
            self.kth_best_model_path, self.kth_value = "", self._worst

    # -- kept in checkpoints -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "monitor": self.monitor,
            "best_model_score": self.best_model_score,
            "best_model_path": self.best_model_path,
            "current_score": self.current_score,
            "best_k_models": dict(self.best_k_models),
            "kth_best_model_path": self.kth_best_model_path,
            "kth_value": self.kth_value,
            "last_model_path": self.last_model_path,
            "last_global_step_saved": self._last_global_step_saved,
            "deferred": self._deferred,
            "run_id": self._run_id,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back the books, as far as they speak of this run's checkpoints that still exist."""
        if self._catalogue is not None and state_dict.get("run_id") != self._run_id:
            log.warning(
                "%s: the checkpoint is of another run; its list of best checkpoints is not taken over.",
                type(self).__name__,
            )
            return
        self._gone = []

        def here(path: str) -> str:
            if not path or self._catalogue is None:
                return path
            name = os.path.basename(path)
            found = self._catalogue.examine(name)
            # What only cannot be read just now is not gone; what is damaged must not keep others out of the best.
            if name not in self._quarantined and (isinstance(found, CheckpointRecord) or found.unreadable):
                return found.path
            if name not in self._gone:
                self._gone.append(name)
            return ""

        models = state_dict.get("best_k_models", {})
        self.best_k_models = {found: score for path, score in models.items() if (found := here(path))}
        self.best_model_path = here(state_dict.get("best_model_path", ""))
        self.last_model_path = here(state_dict.get("last_model_path", ""))
        self.current_score = state_dict.get("current_score")
        self._last_global_step_saved = state_dict.get("last_global_step_saved", 0)
        self._deferred = state_dict.get("deferred", False)
        if self.monitor is not None:
            self._rank()

    def _tell_what_is_gone(self) -> None:
        if self._gone:
            log.warning(
                "%s: gone or damaged, so not counted any more: %s.",
                type(self).__name__,
                ", ".join(self._gone),
            )
            self._gone = []

    def adopt(self, path: str, entry: Mapping[str, Any], *, step: int) -> None:
        """Enter the checkpoint resumed from, where the registry says that this callback wanted it too.

        A state that another callback has just saved is not written a second time, so the state in it does not
        know that this callback wants it as well, and what it gave up for it; the registry, written later,
        does. The trainer calls this after :meth:`load_state_dict` where both are of this run.

        Args:
            path: folder of the checkpoint resumed from.
            entry: this callback's entry in the run's registry.
            step: the checkpoint's step.
        """
        name = os.path.basename(path)
        listed = {*entry["best_k"], entry["best"], entry["last"]}
        self._gone = [old for old in self._gone if old in listed]
        if name not in listed or name in self._quarantined:
            return
        if name in entry["best_k"]:
            self._enter(path, torch.tensor(float(entry["best_k"][name])))
        elif entry["best"] == name and self.monitor is None:
            self._enter(path, None)
        if entry["last"] == name:
            self.last_model_path = path
        self._last_global_step_saved = step
        self._deferred = False

    def registry_entry(self) -> dict[str, Any]:
        """What the registry keeps of this callback, for those who choose a checkpoint without training."""
        best, score = self.best_model_path, self.best_model_score
        return {
            "state_key": self.state_key,
            "class": f"{type(self).__module__}.{type(self).__qualname__}",
            "monitor": self.monitor,
            "mode": self.mode,
            "save_top_k": self.save_top_k,
            "save_last": self._keeps_last,
            "saves_checkpoints": self.save_top_k != 0 or self._keeps_last,
            "on_exception": self.save_on_exception,
            "best_k": {os.path.basename(path): float(value) for path, value in self.best_k_models.items()},
            "best": os.path.basename(best) or None,
            "best_score": None if score is None else float(score),
            "last": os.path.basename(self.last_model_path) or None,
        }
