"""Only what somebody overrides is called, in the order that lets checkpoint callbacks see what all others did."""

from __future__ import annotations

from typing import Any

from ckptrun import Callback, Module
from ckptrun.fit.hooks import Hooks, overridden, part_of


class Named(Callback):
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.calls.append(self.name)


class Monitoring(Named):
    monitor = "loss"


class Saving(Monitoring):
    def registry_entry(self) -> dict[str, Any]:
        return {}


class Model(Module):
    def __init__(self, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls

    def on_train_epoch_end(self) -> None:
        self.calls.append("module")


def test_order_at_a_point() -> None:
    calls: list[str] = []
    given = [Saving("saves", calls), Monitoring("monitors", calls), Named("a", calls), Named("b", calls)]
    assert [part_of(callback) for callback in given] == ["checkpoint", "monitoring", "first", "first"]
    hooks = Hooks("trainer", Model(calls), given)
    hooks.call("on_train_epoch_end")
    assert calls == ["a", "b", "module", "monitors", "saves"]
    calls.clear()
    hooks.call_part("on_train_epoch_end", "monitoring")
    assert calls == ["monitors"]


def test_what_nobody_overrides_is_not_called() -> None:
    hooks = Hooks("trainer", Model([]), [Named("a", [])])
    assert hooks.get("on_train_batch_end") == ()
    assert hooks.get("no_such_hook") == ()
    assert len(hooks.get("on_train_epoch_end")) == 2


def test_hooks_are_found_once() -> None:
    hooks = Hooks("trainer", Model([]), [Named("a", [])])
    assert hooks.part("on_train_epoch_end", "first") is hooks.part("on_train_epoch_end", "first")


def test_overridden_knows_instances_and_bases() -> None:
    callback = Callback()
    assert overridden(callback, "on_fit_start", Callback) is None
    callback.on_fit_start = lambda *_: None  # type: ignore[method-assign]
    assert overridden(callback, "on_fit_start", Callback) is not None
    assert overridden(callback, "unknown", Callback) is None
