"""What is written, what is only noted, what is deleted, and what happens where a save fails."""

from __future__ import annotations

import enum
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fit_helpers import CTRL_C, At, Tiny, loader, make_trainer, send

from ckptrun import Callback, MisconfigurationException
from ckptrun.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from ckptrun.checkpoint.manifest import read_manifest
from ckptrun.errors import NoCheckpointError, RunInUseError, SaveError, UsageError
from ckptrun.fit import checkpoint_writer
from ckptrun.records import StopReason
from ckptrun.run.registry import Registry


def fit(
    root: Path, *callbacks: Callback, model: Any = None, ckpt_path: str | None = None, **options: Any
) -> Any:
    trainer = make_trainer(root, callbacks=list(callbacks), **options)
    trainer.fit(model or Tiny(), loader(), loader(8, shuffle=False), ckpt_path=ckpt_path)
    return trainer


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root / "demo" / "checkpoints"))


def steps(root: Path) -> list[int]:
    return [int(name.rpartition("-")[2]) for name in names(root)]


def registry(root: Path) -> Registry:
    return Registry.load(str(root / "demo" / "registry.json"))


def notes(root: Path) -> dict[int, list[str]]:
    """By step: why a checkpoint was written, then why it was noted again."""
    return {save["step"]: [save["reason"], *save["notes"]] for save in registry(root).saves}


# -- one state is written once -------------------------------------------------------------------------------


def test_a_second_reason_is_noted_and_not_written(tmp_path: Path) -> None:
    plain, monitored = ModelCheckpoint(), ModelCheckpoint(monitor="val_loss")
    fit(tmp_path, plain, monitored, max_epochs=1)
    (only,) = registry(tmp_path).saves
    assert (only["reason"], only["notes"]) == ("periodic", ["best", "final"])
    assert only["saved_for"] == [plain.state_key, monitored.state_key]
    assert steps(tmp_path) == [5]


def test_the_end_is_always_saved(tmp_path: Path) -> None:
    trainer = fit(tmp_path, enable_checkpointing=False, max_epochs=-1, max_steps=7)
    assert trainer.checkpoint_callback is None
    assert notes(tmp_path) == {7: ["final"]}
    assert registry(tmp_path).finished == {
        "sequence": 1, "name": "00000001-step-00000007", "by": "max_steps", "max_steps": 7, "max_epochs": None,
        "max_time_s": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "by"),
    [({"max_epochs": 2}, "max_epochs"), ({"max_steps": 3}, "max_steps")],
)
def test_by_what_it_finished(tmp_path: Path, options: dict[str, Any], by: str) -> None:
    fit(tmp_path, **options)
    finished = registry(tmp_path).finished
    assert finished is not None
    assert finished["by"] == by
    assert finished["name"] == names(tmp_path)[-1]


def test_an_attempt_that_goes_on_is_not_finished(tmp_path: Path) -> None:
    fit(tmp_path, max_epochs=1)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, At("on_train_batch_end", 2, CTRL_C), ckpt_path="last")
    assert registry(tmp_path).finished is None


def test_a_stop_where_a_save_was_just_made(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(every_n_train_steps=3)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, checkpoint, At("on_train_batch_end", 3, CTRL_C))
    assert notes(tmp_path) == {3: ["periodic", "stop"]}


def test_a_stop_with_too_little_time_left_begins_no_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def time_is_up(trainer: Any) -> None:
        trainer.context.stop.no_time_to_save = lambda: True
        trainer.context.stop.request_stop(StopReason.WALLTIME)

    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, ModelCheckpoint(every_n_train_steps=3), At("on_train_batch_end", 5, time_is_up))
    assert ended.value.code == 75
    assert notes(tmp_path) == {3: ["periodic"]}
    assert "too little time is left for another save" in "".join(capsys.readouterr())


def test_a_save_on_request_is_never_deleted(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(every_n_train_steps=1), At("on_train_batch_end", 4, send(signal.SIGUSR2)))
    assert notes(tmp_path) == {4: ["periodic", "manual"], 15: ["periodic", "final"]}
    assert steps(tmp_path) == [4, 15]


# -- retention -----------------------------------------------------------------------------------------------


class Scores(Tiny):
    """A validation loss that is given."""

    values = (3.0, 1.0, 2.0, 4.0, 5.0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.values[self.current_epoch])


def test_the_best_k_and_the_last_are_kept(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)
    fit(tmp_path, checkpoint, model=Scores(), max_epochs=5)
    assert steps(tmp_path) == [10, 15, 25]
    (entry,) = registry(tmp_path).callbacks
    assert entry["best"].endswith("step-00000010")
    assert entry["last"].endswith("step-00000025")
    assert sorted(entry["best_k"].values()) == [1.0, 2.0]


def test_the_best_k_are_not_forgotten_over_a_resume(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(monitor="val_loss", save_top_k=2), model=Scores(), max_epochs=2)
    fit(
        tmp_path,
        ModelCheckpoint(monitor="val_loss", save_top_k=2),
        model=Scores(),
        max_epochs=3,
        ckpt_path="last",
    )
    # Step 10 is the best and the one resumed from; step 5 fell out of the best two; 15 is in.
    assert steps(tmp_path) == [10, 15]


def test_the_checkpoint_resumed_from_is_never_deleted(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(), max_epochs=1)
    fit(tmp_path, ModelCheckpoint(), max_epochs=3, ckpt_path="last")
    assert steps(tmp_path) == [5, 15]


def test_one_save_for_a_stop_is_held_at_a_time(tmp_path: Path) -> None:
    for number in range(4):
        with pytest.raises(KeyboardInterrupt):
            fit(
                tmp_path, At("on_train_batch_end", 2, CTRL_C), ckpt_path="last" if number else None,
                enable_checkpointing=False,
            )  # fmt: skip
    # The newest, and the one that the newest attempt resumed from.
    assert steps(tmp_path) == [6, 8]
    fit(tmp_path, ckpt_path="last", enable_checkpointing=False)
    assert steps(tmp_path) == [8, 15]


def test_finals_go_when_training_went_further(tmp_path: Path) -> None:
    """Also those that were a periodic save first, which their callback gave up while they were held."""
    for epochs in (1, 2, 3, 4):
        fit(tmp_path, ModelCheckpoint(), max_epochs=epochs, ckpt_path="last" if epochs > 1 else None)
    assert steps(tmp_path) == [15, 20]


def test_an_abandoned_line_is_neither_deleted_nor_counted(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(monitor="val_loss", save_top_k=1)
    fit(tmp_path, checkpoint, model=Scores(), max_epochs=2)
    before = names(tmp_path)
    again = ModelCheckpoint(monitor="val_loss", save_top_k=1)
    fit(tmp_path, again, model=Scores(), max_epochs=1, ckpt_path="none")
    assert set(before) < set(names(tmp_path))
    assert again.best_model_path.endswith(names(tmp_path)[-1])
    newest = read_manifest(str(tmp_path / "demo" / "checkpoints" / names(tmp_path)[-1]))
    assert (newest.parent, newest.line) == (None, ((newest.sequence, newest.sequence),))


def test_what_an_evaluation_reads_is_spared(tmp_path: Path) -> None:
    spared = []

    class Reads(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.checkpoints.settle()
                (name,) = names(tmp_path)
                path = str(tmp_path / "demo" / "checkpoints" / name)
                begin_eval(trainer.context.run, "test", path)
                spared.append(name)

    from ckptrun.run.evals import begin_eval

    fit(tmp_path, ModelCheckpoint(), Reads())
    assert spared[0] in names(tmp_path)
    assert steps(tmp_path) == [5, 15]


# -- failed saves --------------------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, times: int) -> list[str]:
    """The first ``times`` commits fail; returns the names that were tried."""
    tried: list[str] = []
    real = checkpoint_writer.commit

    def commit(folder: str, name: str, *args: Any, **options: Any) -> Any:
        tried.append(name)
        if len(tried) <= times:
            raise SaveError("the disk is full")
        return real(folder, name, *args, **options)

    monkeypatch.setattr(checkpoint_writer, "commit", commit)
    monkeypatch.setattr(checkpoint_writer, "_RETRY_AFTER_S", (0.0, 0.0))
    return tried


def test_a_failed_save_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = failing(monkeypatch, 2)
    trainer = fit(tmp_path, ModelCheckpoint(), max_epochs=1)
    assert tried == ["00000001-step-00000005"] * 3
    assert trainer.checkpoints.save_error is None


def test_training_goes_on_after_a_failed_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, 3)
    checkpoint = ModelCheckpoint(monitor="val_loss", mode="max", save_top_k=-1)
    trainer = fit(tmp_path, checkpoint, max_epochs=2)
    assert "the disk is full Training goes on." in capsys.readouterr().err
    assert steps(tmp_path) == [10]
    assert list(checkpoint.best_k_models) == [str(tmp_path / "demo" / "checkpoints" / names(tmp_path)[0])]
    assert trainer.checkpoints.save_error is None, "a later one succeeded"


@pytest.mark.parametrize(("policy", "tries"), [("retry", 3), ("warn", 1)])
def test_the_last_save_failed_and_none_after_it_succeeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, tries: int
) -> None:
    tried = failing(monkeypatch, 99)
    trainer = fit(tmp_path, enable_checkpointing=False, max_epochs=1, on_save_error=policy)
    assert len(tried) == tries
    assert trainer.checkpoints.save_error == "the disk is full"
    line = json.loads((tmp_path / "demo" / "attempts.jsonl").read_text().splitlines()[-1])
    assert (line["exit_code"], line["error"]) == (1, "the disk is full")


def test_the_policy_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = failing(monkeypatch, 99)
    with pytest.raises(SaveError, match="the disk is full"):
        fit(tmp_path, ModelCheckpoint(), on_save_error="stop")
    assert len(tried) == 1


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """With a real limit on what a process may write to a file, in a process of its own."""
    code = """
        import resource, signal, sys
        sys.path.insert(0, {tests!r})
        from pathlib import Path
        import torch
        from fit_helpers import Tiny, loader, make_trainer
        from ckptrun.callbacks import ModelCheckpoint
        from ckptrun.fit import checkpoint_writer
        checkpoint_writer._RETRY_AFTER_S = (0.0,)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        big = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ParameterList([torch.zeros(100_000)]))
        class Big(Tiny):
            def forward(self, x):
                return self.layers[0](x)
        def limit(trainer):
            trainer.checkpoints.settle()
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        from fit_helpers import At
        trainer = make_trainer(Path({root!r}), callbacks=[ModelCheckpoint(), At("on_train_epoch_end", 2, limit)])
        trainer.fit(Big(big), loader())
        print("save error:", trainer.checkpoints.save_error)
    """
    code = textwrap.dedent(code).format(tests=os.path.dirname(__file__), root=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert "save error: " in done.stdout, done.stderr
    assert "File too large" in done.stdout
    assert steps(tmp_path) == [5], "the earlier one is whole and nothing half-written is left"
    assert read_manifest(str(tmp_path / "demo" / "checkpoints" / names(tmp_path)[0])).step == 5
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_run_that_was_taken_over_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptrun.run.lease import Lease

    monkeypatch.setattr(Lease, "still_mine", lambda self: False)
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, ModelCheckpoint(every_n_train_steps=1), Waits(), max_epochs=1000)
    assert ended.value.code == 70
    assert names(tmp_path) == []


class Waits(Callback):
    """Takes its time, so that a beat of the supervisor falls into the training."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 20:
            while trainer.context.stop.request is None:
                pass


# -- what cannot be stored -----------------------------------------------------------------------------------


class Keeps(Callback):
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    "value",
    [
        np.float32(1.5), np.int64(3), np.arange(6).reshape(2, 3), Path("a/b"), Colour.RED, {1, 2}, (1, (2, 3)),
        {"a": [np.bool_(True)]}, torch.float16, complex(1, 2),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_users_put_in_comes_back_as_it_was(tmp_path: Path, value: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, Keeps(value), At("on_train_batch_end", 1, CTRL_C))
    torch.load(tmp_path / "demo" / "checkpoints" / names(tmp_path)[0] / "state.ckpt", weights_only=True)
    keeps = Keeps(None)
    fit(tmp_path, keeps, ckpt_path="last")
    assert type(keeps.value) is type(value)
    assert np.array_equal(keeps.value, value) if isinstance(value, np.ndarray) else keeps.value == value


class PutsIn(Tiny):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"deep": [open]}


@pytest.mark.parametrize(
    ("model", "callbacks", "place"),
    [
        (Tiny, [Keeps({"decay": lambda step: step})], r"callbacks\['Keeps'\]\['value'\]\['decay'\]"),
        (PutsIn, [], r"mine\['deep'\]\[0\]"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_the_first_step(
    tmp_path: Path, model: Callable[[], Any], callbacks: list[Callback], place: str
) -> None:
    made = model()
    with pytest.raises(MisconfigurationException, match=place):
        fit(tmp_path, *callbacks, model=made)
    assert made.seen == []


def test_the_modules_own_additions_come_back(tmp_path: Path) -> None:
    class Adds(Tiny):
        loaded = None

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = Colour.RED

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.loaded = checkpoint["mine"]

    fit(tmp_path, model=Adds(), max_epochs=1)
    model = Adds()
    fit(tmp_path, model=model, ckpt_path="last")
    assert model.loaded is Colour.RED


def test_hyperparameters_are_stored(tmp_path: Path) -> None:
    class WithHparams(Tiny):
        def __init__(self, lr: float = 0.1, path: Path = Path("data")) -> None:
            super().__init__()
            self.save_hyperparameters()

    fit(tmp_path, model=WithHparams(lr=0.5), max_epochs=1)
    state = torch.load(
        tmp_path / "demo" / "checkpoints" / names(tmp_path)[0] / "state.ckpt", weights_only=True
    )
    assert state["hyper_parameters"]["lr"] == 0.5


# -- who else is there ---------------------------------------------------------------------------------------


def test_a_second_fit_on_the_same_run_is_turned_away(tmp_path: Path) -> None:
    errors: list[Exception] = []

    def second(_: Any) -> None:
        try:
            fit(tmp_path)
        except RunInUseError as error:
            errors.append(error)

    fit(tmp_path, At("on_train_batch_end", 2, second), max_epochs=1)
    assert f"process {os.getpid()}" in str(errors[0])


def test_a_run_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        fit(Path("/proc/no-folder-can-be-made-here"))
    (tmp_path / "demo").write_text("a file where the run's folder should be")
    with pytest.raises(NoCheckpointError, match="cannot be listed: Not a directory"):
        fit(tmp_path)


def test_a_damaged_registry_is_rebuilt(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(monitor="val_loss"), model=Scores(), max_epochs=1)
    (tmp_path / "demo" / "registry.json").write_text("{")
    with pytest.warns(UserWarning, match="registry is damaged"):
        fit(tmp_path, ModelCheckpoint(monitor="val_loss"), model=Scores(), max_epochs=2, ckpt_path="last")
    assert [save["step"] for save in registry(tmp_path).saves] == [5, 10]


def test_on_exception_callbacks_are_in_the_registry_from_the_first_attempt(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, OnExceptionCheckpoint(), At("on_train_start", 1, CTRL_C))
    assert registry(tmp_path).on_exception


# -- the order in which things go ------------------------------------------------------------------------------


def test_what_the_user_keeps_at_the_last_moment_stays(tmp_path: Path) -> None:
    """Between the last write of the registry and the deletion: `ckptrun keep` beside the run."""
    kept: list[str] = []

    class Keeps(Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                trainer.checkpoints.settle()
                (name,) = names(tmp_path)
                real = trainer.checkpoints.catalogue.examine

                def examine(which: str) -> Any:
                    if which == name and not kept:
                        kept.append(keep(trainer.context.run, f"seq:{int(name[:8])}").name)
                    return real(which)

                trainer.checkpoints.catalogue.examine = examine

    from ckptrun.resolve.pin import keep

    fit(tmp_path, ModelCheckpoint(), Keeps())
    assert len(kept) == 1
    assert kept[0] in names(tmp_path)
    assert registry(tmp_path).keeps == kept


def test_nothing_is_deleted_where_the_registry_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(self: Registry, path: str) -> None:
        raise OSError(errno.ESTALE, "another process has taken the run over", path)

    def from_now_on(trainer: Any) -> None:
        trainer.checkpoints.settle()
        monkeypatch.setattr(Registry, "write", fails)

    fit(tmp_path, ModelCheckpoint(), At("on_train_epoch_end", 2, from_now_on), max_epochs=3)
    assert steps(tmp_path) == [5, 10, 15]
    said = capsys.readouterr().err
    assert "another process has taken the run over" in said
    assert "Nothing is deleted" in said


@pytest.mark.parametrize("monitor", ["val_loss", None])
def test_a_smaller_limit_says_what_goes(
    tmp_path: Path, monitor: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(save_top_k: int, max_epochs: int, **options: Any) -> tuple[set[str], str]:
        fit(
            tmp_path,
            ModelCheckpoint(monitor=monitor, save_top_k=save_top_k),
            max_epochs=max_epochs,
            **options,
        )
        return set(names(tmp_path)), capsys.readouterr().err

    before, told = run(-1, 4)
    assert "save_top_k" not in told
    kept, told = run(1, 6, ckpt_path="last")
    deleted = before - kept
    assert len(deleted) >= 2
    assert f"save_top_k is 1 now: {len(deleted)} checkpoints that are no longer wanted" in told
    _, told = run(1, 7, ckpt_path="last")
    assert "save_top_k" not in told
