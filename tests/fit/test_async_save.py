"""Training goes on while a checkpoint is written; before it is committed nobody is told and nothing goes for it."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_helpers import CTRL_C, At, Tiny, loader, make_trainer, send

from ckptrun import Callback
from ckptrun.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from ckptrun.checkpoint.commit import commit
from ckptrun.checkpoint.state_file import read_state
from ckptrun.errors import SaveError
from ckptrun.fit import checkpoint_writer, clearing
from ckptrun.run.folder import RunFolder
from ckptrun.run.registry import Registry
from ckptrun.run.status import read_status


class SlowDisk:
    """Commits wait until they are let go, and may fail then. What another thread may do is in the hands of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.begun: list[str] = []
        self.threads: list[str] = []
        self.most = self.ended = 0
        self.fails: set[int] = set()  # the numbers of the commits that fail, from 1
        monkeypatch.setattr(checkpoint_writer, "commit", self._commit)
        monkeypatch.setattr(checkpoint_writer, "_RETRY_AFTER_S", ())

    def _commit(self, folder: str, name: str, *args: Any, **options: Any) -> Any:
        self.begun.append(name)
        self.threads.append(threading.current_thread().name)
        number = len(self.begun)
        self.most = max(self.most, number - self.ended)
        try:
            return self._write(number, folder, name, *args, **options)
        finally:
            self.ended += 1

    def _write(self, number: int, folder: str, name: str, *args: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert self.go.wait(60)
        if number in self.fails:
            raise SaveError(f"commit {number} failed")
        return commit(folder, name, *args, **options)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    return SlowDisk(monkeypatch)


class Watch(Callback):
    """Calls back at the start of each batch, with the step that is done."""

    def __init__(self, *acts: tuple[int, Callable[[Any], object]]) -> None:
        self.acts = dict(acts)
        self.reached: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.reached.append(trainer.global_step)
        if trainer.global_step in self.acts:
            self.acts[trainer.global_step](trainer)


def fit(root: Path, *callbacks: Callback, **options: Any) -> Any:
    trainer = make_trainer(root, callbacks=list(callbacks), **{"max_epochs": 2, **options})
    trainer.fit(Tiny(), loader(), loader(8, shuffle=False))
    return trainer


class Let(Callback):
    """Lets saves go when training is over."""

    def __init__(self, disk: SlowDisk) -> None:
        self.disk = disk

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.disk.go.set()


def committed(root: Path) -> list[int]:
    """Steps of the checkpoints that have a manifest."""
    folder = root / "demo" / "checkpoints"
    return sorted(int(path.parent.name.rpartition("-")[2]) for path in folder.glob("*/manifest.json"))


def named(root: Path) -> list[int]:
    """Steps of the checkpoints that the registry names, be it as a save or in a callback's books."""
    registry = Registry.load(str(root / "demo" / "registry.json"))
    listed = {save["name"] for save in registry.saves}
    for entry in registry.callbacks:
        listed |= {*entry["best_k"], entry["best"], entry["last"]} - {None}
    return sorted(int(name.rpartition("-")[2]) for name in listed)


def land(disk: SlowDisk) -> Callable[[Any], None]:
    """Let the save in flight end, and see that it has, without taking note of it."""

    def act(trainer: Any) -> None:
        disk.go.set()
        while not trainer.checkpoints.landed:
            threading.Event().wait(0.001)

    return act


def first_lands(disk: SlowDisk) -> Callable[[Any], None]:
    """Let the save in flight end and be taken note of, and hold the next."""

    def act(trainer: Any) -> None:
        disk.go.set()
        trainer.checkpoints.settle()
        disk.go.clear()

    return act


def test_what_is_saved_are_the_values_of_the_moment(tmp_path: Path, disk: SlowDisk) -> None:
    at_the_call: list[torch.Tensor] = []

    class Notes(Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            if trainer.global_step == 3:
                at_the_call.append(pl_module.layers.weight.detach().clone())

    watch = Watch((4, land(disk)))
    trainer = fit(tmp_path, ModelCheckpoint(every_n_train_steps=3, save_top_k=-1), Notes(), watch)
    assert watch.reached[:5] == [0, 1, 2, 3, 4], "step 4 was made meanwhile"
    first = next((tmp_path / "demo" / "checkpoints").glob("*-step-00000003"))
    saved = read_state(str(first / "state.ckpt"))
    assert torch.equal(saved["state_dict"]["layers.weight"], at_the_call[0])
    assert not torch.equal(trainer.lightning_module.layers.weight, at_the_call[0])
    assert saved["global_step"] == 3
    assert disk.threads[0] == "ckptrun-save"


def test_nobody_hears_of_it_and_nothing_goes_before_it_is_committed(tmp_path: Path, disk: SlowDisk) -> None:
    seen: dict[str, Any] = {}
    run = RunFolder(str(tmp_path / "demo"))

    def look(name: str) -> Callable[[Any], None]:
        def act(trainer: Any) -> None:
            status = read_status(run)
            assert status is not None
            seen[name] = (committed(tmp_path), named(tmp_path), trainer.checkpoints.head.step)

        return act

    def in_flight(trainer: Any) -> None:
        look("in flight")(trainer)
        land(disk)(trainer)

    watch = Watch((4, first_lands(disk)), (7, in_flight), (8, look("landed")))
    fit(tmp_path, ModelCheckpoint(every_n_train_steps=3), watch, max_epochs=-1, max_steps=9)
    assert seen["in flight"] == ([3], [3], 3)
    assert seen["landed"] == ([6], [6], 6)


def test_one_save_is_in_flight_at_most(tmp_path: Path, disk: SlowDisk) -> None:
    disk.go.set()
    fit(tmp_path, ModelCheckpoint(every_n_train_steps=1), max_epochs=-1, max_steps=5)
    assert len(disk.begun) == 5
    assert disk.most == 1
    assert committed(tmp_path) == [5]


def test_a_stop_waits_for_the_save_in_flight(tmp_path: Path, disk: SlowDisk) -> None:
    def stop(trainer: Any) -> None:
        CTRL_C(trainer)
        disk.go.set()

    with pytest.raises(KeyboardInterrupt):
        fit(
            tmp_path, ModelCheckpoint(every_n_train_steps=2, save_top_k=-1), At("on_train_batch_end", 3, stop)
        )
    assert committed(tmp_path) == [2, 3]
    assert disk.threads == ["ckptrun-save", "MainThread"], "nothing moves on after a stop, so no copy is made"


def test_a_stop_where_the_save_in_flight_holds_this_state(tmp_path: Path, disk: SlowDisk) -> None:
    def stop(trainer: Any) -> None:
        CTRL_C(trainer)
        disk.go.set()

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, ModelCheckpoint(every_n_train_steps=2), At("on_train_batch_end", 2, stop))
    (save,) = Registry.load(str(tmp_path / "demo" / "registry.json")).saves
    assert (save["reason"], save["notes"]) == ("periodic", ["stop"])


def test_two_callbacks_share_the_save_in_flight(tmp_path: Path, disk: SlowDisk) -> None:
    one, two = (
        ModelCheckpoint(every_n_train_steps=2),
        ModelCheckpoint(every_n_train_steps=2, monitor="loss_step"),
    )
    fit(tmp_path, one, two, Let(disk), max_epochs=-1, max_steps=2)
    registry = Registry.load(str(tmp_path / "demo" / "registry.json"))
    assert [save["saved_for"] for save in registry.saves] == [[one.state_key, two.state_key]]
    assert len(disk.begun) == 1, "one for the state, and the end is the same state"


def test_a_failure_surfaces_at_the_next_boundary(
    tmp_path: Path, disk: SlowDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    disk.fails = {2}
    said: list[str] = []
    stood: list[list[int]] = []

    def note(trainer: Any) -> None:
        said.append(trainer.checkpoints.save_error)
        stood.append(committed(tmp_path))
        assert checkpoint.best_model_path.endswith("step-00000003")

    checkpoint = ModelCheckpoint(every_n_train_steps=3)
    watch = Watch((4, first_lands(disk)), (7, land(disk)), (8, note))
    fit(tmp_path, checkpoint, watch, max_epochs=-1, max_steps=9, on_save_error="warn")
    assert said == ["commit 2 failed"]
    assert "commit 2 failed" in capsys.readouterr().err
    # The first stayed, for what was to replace it had not come.
    assert stood == [[3]]
    assert checkpoint.best_model_path.endswith("step-00000009")
    assert committed(tmp_path) == [9]


def test_the_policy_to_stop_ends_it_there(tmp_path: Path, disk: SlowDisk) -> None:
    disk.fails = {1}
    watch = Watch((3, land(disk)))
    with pytest.raises(SaveError, match="commit 1 failed"):
        fit(tmp_path, ModelCheckpoint(every_n_train_steps=2), watch, on_save_error="stop")
    assert watch.reached[-1] == 3
    line = json.loads((tmp_path / "demo" / "attempts.jsonl").read_text().splitlines()[-1])
    assert (line["exit_code"], line["error"]) == (1, "SaveError: commit 1 failed")


def test_a_save_on_request_is_answered_once_it_is_committed(tmp_path: Path, disk: SlowDisk) -> None:
    answers: list[tuple[int, str | None]] = []

    def listen(trainer: Any) -> None:
        context, real = trainer.context, trainer.context.save_served

        def served(path: str | None, error: str | None, count: int) -> None:
            answers.append((trainer.global_step, path))
            real(path, error, count)

        context.save_served = served

    watch = Watch((0, listen), (4, land(disk)))
    fit(tmp_path, At("on_train_batch_end", 2, send(signal.SIGUSR2)), watch)
    ((step, path),) = answers
    assert step == 4, "in the middle of the next step"
    assert path is not None
    assert path.endswith("step-00000002")


def test_an_exception_leaves_the_save_in_flight_to_land(tmp_path: Path, disk: SlowDisk) -> None:
    def fail(trainer: Any) -> None:
        disk.go.set()
        raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        fit(tmp_path, ModelCheckpoint(every_n_train_steps=2), Watch((3, fail)))
    assert committed(tmp_path) == named(tmp_path) == [2]


def test_a_best_that_was_not_saved_is_not_in_the_checkpoint_of_a_stop(tmp_path: Path, disk: SlowDisk) -> None:
    """The validation that is stopped began while the save of the new best was still on its way."""
    disk.fails = {2}

    class Scores(Tiny):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", (3.0, 1.0, 2.0)[self.current_epoch])

    class Stops(Callback):
        def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.current_epoch == 2:
                land(disk)(trainer)
                CTRL_C(trainer)

    checkpoint = ModelCheckpoint(monitor="val_loss")
    trainer = make_trainer(
        tmp_path,
        callbacks=[checkpoint, Watch((6, first_lands(disk))), Stops()],
        on_save_error="warn",
        max_epochs=3,
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Scores(), loader(), loader(8, shuffle=False))
    assert committed(tmp_path) == [5, 15]
    (stopped,) = (tmp_path / "demo" / "checkpoints").glob("*-step-00000015")
    books = read_state(str(stopped / "state.ckpt"))["callbacks"][checkpoint.state_key]
    assert books["best_model_path"].endswith("step-00000005")
    assert [path[-8:] for path in books["best_k_models"]] == ["00000005"]


def test_who_else_wanted_the_state_is_committed_with_it(tmp_path: Path, disk: SlowDisk) -> None:
    """Not a step later: whoever is killed in between has to find it."""
    one = ModelCheckpoint(every_n_train_steps=2)
    two = ModelCheckpoint(every_n_train_steps=2, monitor="loss_step")
    found: list[Any] = []

    def look(trainer: Any) -> None:
        land(disk)(trainer)
        (path,) = (tmp_path / "demo" / "checkpoints").glob("*/manifest.json")
        found.append(json.loads(path.read_text()))

    fit(tmp_path, one, two, Watch((3, look)), max_epochs=-1, max_steps=4)
    (manifest,) = found
    assert manifest["saved_for"] == [one.state_key]
    assert [note["owner"] for note in manifest["noted"]] == [two.state_key]
    entry = next(e for e in manifest["callbacks"] if e["state_key"] == two.state_key)
    assert list(entry["best_k"]) == ["00000001-step-00000002"]


def test_an_exception_right_after_a_save_that_fails_has_a_checkpoint_of_its_own(
    tmp_path: Path, disk: SlowDisk
) -> None:
    disk.fails = {1}

    def fail(trainer: Any) -> None:
        disk.go.set()
        raise RuntimeError("the user's own")

    callbacks = (ModelCheckpoint(every_n_train_steps=2), OnExceptionCheckpoint(), Watch((2, fail)))
    with pytest.raises(RuntimeError, match="the user's own"):
        fit(tmp_path, *callbacks, on_save_error="warn")
    (save,) = Registry.load(str(tmp_path / "demo" / "registry.json")).saves
    assert (save["step"], save["reason"]) == (2, "exception")


@pytest.mark.parametrize("what", ["stop", "exception"])
def test_the_policy_to_stop_does_not_take_the_last_checkpoint_away(
    tmp_path: Path, disk: SlowDisk, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    disk.fails = {1}

    def end(trainer: Any) -> None:
        if what == "exception":
            disk.go.set()
            raise RuntimeError("the user's own")
        CTRL_C(trainer)
        disk.go.set()

    with pytest.raises(KeyboardInterrupt if what == "stop" else RuntimeError):
        fit(
            tmp_path,
            ModelCheckpoint(every_n_train_steps=2),
            OnExceptionCheckpoint(),
            At("on_train_batch_end", 3, end) if what == "stop" else Watch((3, end)),
            on_save_error="stop",
        )
    assert committed(tmp_path) == [3]
    assert "commit 1 failed" in capsys.readouterr().err


def test_training_goes_on_while_what_was_replaced_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry's writes and the deletion belong to the save: training does not wait for a slow disk there."""
    further, removed = threading.Event(), []

    def slowly(path: str) -> None:
        removed.append((path, further.wait(60)))
        remove(path)

    remove = clearing.remove
    monkeypatch.setattr(clearing, "remove", slowly)
    # The save at step 6 replaces the one at step 3; two more steps are made before its deletion gets on.
    watch = Watch((8, lambda trainer: further.set()))
    fit(tmp_path, ModelCheckpoint(every_n_train_steps=3, save_top_k=1), watch, max_steps=9)
    assert removed[0][1], "training waited for the deletion"
    assert committed(tmp_path) == named(tmp_path) == [9]


def test_switched_off_training_waits(tmp_path: Path, disk: SlowDisk) -> None:
    fit(tmp_path, ModelCheckpoint(every_n_train_steps=2), async_save=False)
    assert set(disk.threads) == {"MainThread"}


def test_training_stood_still_for_less_than_the_save_took(tmp_path: Path, disk: SlowDisk) -> None:
    began: list[float] = []

    def keep_it_waiting(trainer: Any) -> None:
        while time.monotonic() < began[0] + 1.0:  # what the disk takes, at least
            time.sleep(0.01)
        land(disk)(trainer)

    watch = Watch((2, lambda trainer: began.append(time.monotonic())), (3, keep_it_waiting))
    fit(tmp_path, ModelCheckpoint(every_n_train_steps=2, save_top_k=-1), watch, max_epochs=-1, max_steps=4)
    line = json.loads((tmp_path / "demo" / "attempts.jsonl").read_text().splitlines()[-1])
    assert line["save_s"] < 1.0


def test_buffers_are_made_ready_and_used_again(tmp_path: Path) -> None:
    class Big(Tiny):
        def __init__(self) -> None:
            super().__init__(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2_000_000, 1)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layers[0](x) + 0 * self.layers[1].weight.sum()  # type: ignore[index,operator]
            return out

    pointers: list[set[int]] = []

    def look(trainer: Any) -> None:
        trainer.checkpoints.settle()
        buffers = trainer.checkpoints.writer._snapshot._buffers
        pointers.append({buffer.data_ptr() for buffer in buffers[8_000_000]})

    def ready(trainer: Any) -> None:
        trainer.checkpoints.writer._prepared()
        look(trainer)

    trainer = make_trainer(
        tmp_path,
        callbacks=[ModelCheckpoint(every_n_train_steps=2), Watch((1, ready), (3, look), (5, look))],
        max_epochs=2,
    )
    trainer.fit(Big(), loader())
    first, second, third = pointers
    assert len(first) == 3, "a weight and Adam's two"
    assert first == second == third


def test_a_state_that_cannot_be_copied_is_written_while_training_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ckptrun.checkpoint.snapshot import Snapshot

    def no_memory(self: Snapshot, state: Any) -> Any:
        raise RuntimeError("not enough memory: you tried to allocate 9000 bytes")

    monkeypatch.setattr(Snapshot, "take", no_memory)
    at: list[list[int]] = []
    watch = Watch((2, lambda trainer: at.append(committed(tmp_path))))
    fit(tmp_path, ModelCheckpoint(every_n_train_steps=2, save_top_k=-1), watch, max_epochs=-1, max_steps=5)
    assert at == [[2]]
    assert committed(tmp_path) == named(tmp_path) == [2, 4, 5]
    assert "cannot be copied (not enough memory" in capsys.readouterr().err


def test_a_request_beside_a_save_that_has_landed_is_answered(tmp_path: Path, disk: SlowDisk) -> None:
    """Two boundaries at one step: the first one's save has landed when the second one asks."""
    disk.go.set()
    answers: list[tuple[str | None, int]] = []

    def listen(trainer: Any) -> None:
        trainer.context.save_served = lambda path, error, count: answers.append((path, count))

    class Asks(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step in (2, 3):
                trainer.context.stop.request_save()

    fit(tmp_path, Watch((0, listen)), Asks(), ModelCheckpoint(every_n_train_steps=2), max_epochs=1)
    assert [count for _, count in answers] == [1, 2]
    assert [str(path)[-8:] for path, _ in answers] == ["00000002", "00000003"]
