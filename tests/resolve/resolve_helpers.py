"""Checkpoints, registries and a view of a disk, from literals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ckptrun.checkpoint import naming
from ckptrun.records import CheckpointRecord, RejectedRecord
from ckptrun.resolve.facts import Examined, OtherFile
from ckptrun.run.registry import Registry

DIR = "/runs/gpt/checkpoints"


def ck(sequence: int, step: int | None = None, *, label: str | None = None, **more: Any) -> CheckpointRecord:
    """A good checkpoint whose line is everything up to it."""
    step = sequence * 100 if step is None else step
    name = naming.folder_name(sequence, label or naming.step_label(step))
    fields: dict[str, Any] = {
        "name": name,
        "path": f"{DIR}/{name}",
        "sequence": sequence,
        "step": step,
        "epoch": sequence // 10,
        "reason": "periodic",
        "line": ((1, sequence),),
        "run_id": "r",
    }
    return CheckpointRecord(**{**fields, **more})


def bad(
    sequence: int, why: str = "lacks its file state.ckpt", *, committed: bool = True, **more: Any
) -> RejectedRecord:
    """A damaged checkpoint; ``committed=False`` for one without a manifest."""
    good = ck(sequence)
    line = good.line if committed else ()
    return replace(
        RejectedRecord(good.name, good.path, sequence, why, good.step, committed=committed, line=line), **more
    )


class ListView:
    """A disk that holds the given checkpoints and other files."""

    def __init__(self, records: Iterable[Examined] = (), others: Iterable[OtherFile] = ()) -> None:
        self.records = {record.name: record for record in records}
        self.others = {other.path: other for other in others}
        self.examined: list[str] = []

    def names(self) -> list[str]:
        return naming.newest_first(list(self.records))

    def path_of(self, name: str) -> str:
        return f"{DIR}/{name}"

    def by_name(self, name: str) -> Examined:
        self.examined.append(name)
        gone = RejectedRecord(name, self.path_of(name), None, "gone")
        return self.records.get(name, gone)

    def by_path(self, path: str) -> Examined | OtherFile:
        for record in self.records.values():
            if record.path == path:
                return record
        return self.others.get(path, OtherFile(path, "missing", "there is no such file or folder"))


def registry_of(*records: CheckpointRecord, **more: Any) -> Registry:
    """The registry of a run that saved ``records``, oldest first."""
    registry = Registry(run_id="r")
    for record in records:
        registry.note_saved(record, record.saved_for)
    for key, value in more.items():
        setattr(registry, key, value)
    return registry


def callback(monitor: str | None = "val_loss", mode: str = "min", **more: Any) -> dict[str, Any]:
    """A ModelCheckpoint's entry; ``best_k`` maps names to scores."""
    best_k: dict[str, float] = more.pop("best_k", {})
    best = (min if mode == "min" else max)(best_k, key=lambda name: best_k[name]) if best_k else None
    return {
        "state_key": f"ModelCheckpoint({monitor})",
        "class": "ModelCheckpoint",
        "monitor": monitor,
        "mode": mode,
        "save_top_k": 3,
        "save_last": False,
        "saves_checkpoints": True,
        "on_exception": False,
        "best_k": best_k,
        "best": best,
        "best_score": best_k.get(best) if best else None,
        "last": None,
        **more,
    }
