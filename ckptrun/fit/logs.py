"""What has been logged, and what is its value at a step, over an epoch, on the bar?

Decision: ``log`` during a step only stores the (detached) tensor; nothing is turned into a Python number until
somebody needs it, so that logging every step costs about a dict store and a CUDA step is never waited for. What a
batch logs over the epoch is kept pending until the next boundary: an exception in mid-step then leaves the sums of
the last boundary. Turned down: one metric object per name that is called each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ckptrun.errors import MisconfigurationException

_REDUCTIONS = ("mean", "sum", "min", "max")
_OVER_RANKS: dict[Any, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean, "sum": torch.sum, "min": torch.min, "max": torch.max,
}  # fmt: skip


def batch_size_of(batch: Any) -> int:
    """The first dimension of the first tensor in ``batch``; 1 where there is none."""
    for size in _sizes(batch):
        return size
    return 1


def _sizes(batch: Any) -> Iterator[int]:
    if isinstance(batch, Tensor):
        yield batch.size(0) if batch.ndim else 1
    elif isinstance(batch, str):
        yield len(batch)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _sizes(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _sizes(value)


Part = tuple[Tensor | None, float, list[Tensor]]


class Entry:
    """One logged name within a stage: how it is treated, its last value and its sum over the epoch."""

    __slots__ = (
        "custom", "logger", "name", "on_epoch", "on_step", "prog_bar", "reduce_fx", "sync_dist", "total", "value",
        "values", "weight",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        prog_bar: bool,
        logger: bool,
        on_step: bool,
        on_epoch: bool,
        reduce_fx: Any,
        sync_dist: bool,
    ) -> None:
        self.name = name
        self.prog_bar = prog_bar
        self.logger = logger
        self.on_step = on_step
        self.on_epoch = on_epoch
        self.reduce_fx = reduce_fx
        self.sync_dist = sync_dist
        self.value: Any = None
        self.custom = callable(reduce_fx)
        self.reset()

    def reset(self) -> None:
        self.total: Tensor | None = None
        self.weight: float = 0.0
        self.values: list[Tensor] = []

    def add(self, value: Any, weight: int) -> None:
        tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
        if self.custom:
            self.values.append(tensor)
        elif self.reduce_fx == "mean":
            scaled = tensor.float() * weight
            self.total = scaled if self.total is None else self.total + scaled
            self.weight += weight
        elif self.total is None:
            self.total = tensor
        elif self.reduce_fx == "sum":
            self.total = self.total + tensor
        elif self.reduce_fx == "min":
            self.total = torch.minimum(self.total, tensor)
        else:
            self.total = torch.maximum(self.total, tensor)

    def kind(self) -> dict[str, Any]:
        """How it is treated; a function cannot be stored."""
        return {
            "flags": [self.prog_bar, self.logger, self.on_step, self.on_epoch, self.sync_dist],
            "reduce_fx": None if self.custom else self.reduce_fx,
        }

    def part(self) -> Part:
        """What this rank has of the epoch, to be merged with what others have."""
        return (
            None if self.total is None else self.total.cpu(),
            self.weight,
            [value.cpu() for value in self.values],
        )

    def merge(self, parts: Sequence[Part]) -> None:
        """Take the ranks' parts, in their order, for this entry's own; the same on every rank."""
        self.reset()
        for total, weight, values in parts:
            self.values += values
            if total is None:
                continue
            if self.total is None:
                self.total = total
            elif self.reduce_fx in ("mean", "sum"):
                self.total = self.total + total
            else:
                self.total = (torch.minimum if self.reduce_fx == "min" else torch.maximum)(self.total, total)
            self.weight += weight

    def compute(self) -> Tensor | None:
        """The value over the epoch; None where nothing was added."""
        if self.custom:
            if not self.values:
                return None
            result: Tensor = self.reduce_fx(torch.stack(self.values))
            return result
        if self.total is None:
            return None
        return self.total / torch.tensor(self.weight) if self.reduce_fx == "mean" else self.total

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; a function cannot be stored, so what it gives so far is."""
        return {
            **self.kind(),
            "total": self.total,
            "weight": self.weight,
            "values": list(self.values),
            "value": self.value,
            "so_far": self.compute() if self.custom else None,
        }


class Logs:
    """All that a fit, or an evaluation, has logged."""

    def __init__(self, log_every_n_steps: int) -> None:
        self.log_every_n_steps = log_every_n_steps
        # With several ranks: gives every rank the list of what each one has.
        self.share: Callable[[Any], list[Any]] | None = None
        self._train: dict[str, Entry] = {}
        self._eval: dict[str, Entry] = {}
        self._entries = self._train
        self._pending: list[tuple[Entry, Any, int]] = []
        # From a checkpoint: entries whose reduction is a function, which comes when the name is logged again.
        self._waiting: dict[str, dict[str, Any]] = {}
        self._default_on_step = True
        self._evaluating = False
        self._dataloader_suffix: str | None = None
        self.batch: Any = None  # the batch being worked on, for the weight of a mean
        # What was last made final: epoch values, and step values of hooks outside a step.
        self._callback: dict[str, Tensor] = {}
        self._logged: dict[str, Tensor] = {}
        self._bar: dict[str, Tensor] = {}

    # -- where the loops say what is going on ------------------------------------------------------

    def enter_step(self) -> None:
        """Inside a training batch: log per step by default."""
        self._entries, self._default_on_step, self._evaluating = self._train, True, False

    def enter_epoch(self) -> None:
        """In a hook of the training epoch: log per epoch by default."""
        self._entries, self._default_on_step, self._evaluating = self._train, False, False
        self.batch = None

    def enter_evaluation(self) -> None:
        """In a validation, test or prediction, which logs over the epoch by default."""
        self._entries, self._default_on_step, self._evaluating = self._eval, False, True
        self._eval = self._entries = {}
        self.batch = None

    def enter_dataloader(self, index: int, count: int) -> None:
        """Names get ``/dataloader_idx_N`` where there are several evaluation loaders."""
        self._dataloader_suffix = f"/dataloader_idx_{index}" if count > 1 else None

    # -- logging -----------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        sync_dist: bool = False,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
    ) -> None:
        """See :meth:`ckptrun.fit.module.Module.log`."""
        if self._dataloader_suffix is not None and add_dataloader_idx and self._evaluating:
            name = name + self._dataloader_suffix
        entry = self._entries.get(name)
        if entry is None:
            entry = self._register(name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist)
        if type(value) is Tensor:
            if value.requires_grad:
                value = value.detach()
            elif value.numel() == 1:
                value = value.clone()
            if value.ndim:
                value = self._as_scalar(name, value)
        elif type(value) is not float and type(value) is not int:
            value = self._as_scalar(name, value)
        entry.value = value
        if entry.on_epoch:
            weight = 1
            if entry.reduce_fx == "mean":
                weight = batch_size if batch_size is not None else batch_size_of(self.batch)
            self._pending.append((entry, value, weight))

    def _register(
        self, name: str, value: Any, prog_bar: bool, logger: bool, on_step: bool | None, on_epoch: bool | None,
        reduce_fx: Any, sync_dist: bool,
    ) -> Entry:  # fmt: skip
        self._as_scalar(name, value)
        if not callable(reduce_fx) and reduce_fx not in _REDUCTIONS:
            raise MisconfigurationException(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}): expected one of {', '.join(_REDUCTIONS)} or a function."
            )
        on_step = self._default_on_step if on_step is None else on_step
        on_epoch = (not self._default_on_step) if on_epoch is None else on_epoch
        entry = self._entries[name] = Entry(name, prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist)
        if entry.custom and self._entries is self._train:
            entry.values = list(self._waiting.pop(name, {"values": ()})["values"])
        return entry

    @staticmethod
    def _as_scalar(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.numel() == 1:
                return value.detach().reshape(())
            raise MisconfigurationException(
                f"self.log({name!r}): found a tensor of shape {tuple(value.shape)}, expected one number.",
                hint="Log a reduced value, such as value.mean().",
            )
        try:
            return float(value)
        except (TypeError, ValueError):
            raise MisconfigurationException(
                f"self.log({name!r}): found {type(value).__name__}, expected a number or a scalar tensor."
            ) from None

    # -- boundaries and epochs ---------------------------------------------------------------------

    def commit(self) -> None:
        """A boundary is reached: what its batches logged counts for the epoch."""
        for entry, value, weight in self._pending:
            entry.add(value, weight)
        self._pending.clear()

    def discard_pending(self) -> None:
        """The step failed: what it logged does not count."""
        self._pending.clear()

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    def step_metrics(self) -> dict[str, float]:
        """What goes to the loggers at this step, as numbers; names get ``_step`` where both kinds are logged."""
        return {
            _step_name(entry): float(entry.value)
            for entry in self._train.values()
            if entry.on_step and entry.logger and entry.value is not None
        }

    def sync_steps(self) -> None:
        """Replace this step's values that were logged with ``sync_dist`` by those over all ranks."""
        synced = {
            name: e for name, e in self._train.items() if e.on_step and e.sync_dist and e.value is not None
        }
        if not synced or self.share is None:
            return
        everybody = self.share({name: torch.as_tensor(entry.value).cpu() for name, entry in synced.items()})
        for name, entry in synced.items():
            values = torch.stack([theirs[name].float() for theirs in everybody if name in theirs])
            reduce = _OVER_RANKS.get(entry.reduce_fx, entry.reduce_fx)
            entry.value = reduce(values)

    def finish_epoch(self, *, evaluating: bool) -> dict[str, float]:
        """Reduce what was logged over the epoch, make it visible to callbacks, and return the loggers' part."""
        self.commit()
        entries = self._eval if evaluating else self._train
        if self.share is not None:
            self._merge_ranks(entries, self.share)
        result: dict[str, float] = {}
        for entry in entries.values():
            if entry.on_epoch and (value := entry.compute()) is not None:
                self._publish(entry, value, result)
            entry.reset()
        if not evaluating:
            for name, saved in self._waiting.items():
                # Not logged since the checkpoint: what had been computed there is the value of the epoch.
                if saved["so_far"] is not None:
                    self._publish(_entry_of(name, saved), saved["so_far"], result)
            self._waiting.clear()
        return result

    def _publish(self, entry: Entry, value: Tensor, result: dict[str, float]) -> None:
        name = _epoch_name(entry)
        self._callback[name] = value
        self._callback[entry.name] = value
        if entry.prog_bar:
            self._bar[name] = value
        if entry.logger:
            result[name] = float(value)
            self._logged[name] = value

    @staticmethod
    def _merge_ranks(entries: dict[str, Entry], share: Callable[[Any], list[Any]]) -> None:
        """Every rank ends with the values over all ranks, so that all decide alike by them."""
        own = {
            name: {**entry.kind(), "part": entry.part()} for name, entry in entries.items() if entry.on_epoch
        }
        everybody = share(own)
        for theirs in everybody:
            for name, saved in theirs.items():
                # A rank that had no batch at the end of the data has logged nothing.
                if name not in entries and saved["reduce_fx"] is not None:
                    entries[name] = _entry_of(name, {**saved, "total": None, "weight": 0.0, "value": None})
        for name, entry in entries.items():
            if entry.on_epoch:
                entry.merge([theirs[name]["part"] for theirs in everybody if name in theirs])

    # -- readers -----------------------------------------------------------------------------------

    def _with_steps(self, base: Mapping[str, Tensor], chosen: str | None) -> dict[str, Tensor]:
        merged = dict(base)
        for entries in (self._train, self._eval):
            for entry in entries.values():
                if entry.on_step and entry.value is not None and (chosen is None or getattr(entry, chosen)):
                    value = entry.value if isinstance(entry.value, Tensor) else torch.tensor(entry.value)
                    merged[_step_name(entry)] = value
                    if chosen is None and not entry.on_epoch:
                        merged[entry.name] = value
        return merged

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        return self._with_steps(self._callback, None)

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        return self._with_steps(self._logged, "logger")

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._with_steps(self._bar, "prog_bar").items()}

    # -- checkpoint --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Sums of the running training epoch and the values that callbacks and schedulers may look at."""
        return {
            "sums": {name: entry.state_dict() for name, entry in self._train.items()} | self._waiting,
            "callback": dict(self._callback),
            "logged": dict(self._logged),
            "bar": dict(self._bar),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back :meth:`state_dict`."""
        for name, saved in state["sums"].items():
            if saved["reduce_fx"] is None:
                self._waiting[name] = saved
            else:
                self._train[name] = _entry_of(name, saved)
        self._callback.update(state["callback"])
        self._logged.update(state["logged"])
        self._bar.update(state["bar"])


def _entry_of(name: str, saved: Mapping[str, Any]) -> Entry:
    """What :meth:`Entry.state_dict` gave."""
    prog_bar, logger, on_step, on_epoch, sync_dist = saved["flags"]
    entry = Entry(name, prog_bar, logger, on_step, on_epoch, saved["reduce_fx"], sync_dist)
    entry.total, entry.weight, entry.value = saved["total"], saved["weight"], saved["value"]
    return entry


def _step_name(entry: Entry) -> str:
    return f"{entry.name}_step" if entry.on_epoch else entry.name


def _epoch_name(entry: Entry) -> str:
    return f"{entry.name}_epoch" if entry.on_step else entry.name
