"""What is never deleted, what goes after all, what a lost registry costs, and a holder that comes back too late."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fit_helpers import At, Tiny, loader, make_trainer, send

from ckptrun import Callback
from ckptrun.callbacks import ModelCheckpoint
from ckptrun.checkpoint.commit import commit as commit_for_real
from ckptrun.checkpoint.manifest import read_manifest
from ckptrun.fit import checkpoint_writer
from ckptrun.fit.save_books import SaveBooks
from ckptrun.records import JobFacts, SaveReason
from ckptrun.resolve.gather import gather, resolve_run
from ckptrun.resolve.pin import keep, pin
from ckptrun.run.folder import RunFolder
from ckptrun.run.lease import _locked
from ckptrun.run.registry import Registry, edit

pytestmark = pytest.mark.filterwarnings(
    "ignore:--ckpt (last|auto) beats the pin",
    "ignore:.* is passed over",
    "ignore:The registry is missing; it was rebuilt",
)


class Boom(Exception):  # noqa: N818 - it stands for a kill
    """An attempt ends and saves nothing."""


def boom(_: Any) -> None:
    raise Boom


def fit(root: Path, *callbacks: Callback, ckpt_path: str | None = "last", **options: Any) -> Any:
    trainer = make_trainer(root, callbacks=list(callbacks), **options)
    trainer.fit(Tiny(), loader(), loader(8, shuffle=False), ckpt_path=ckpt_path)
    return trainer


def begin(root: Path, *callbacks: Callback, **options: Any) -> None:
    fit(root, *callbacks, ckpt_path=None, **options)


def folder(root: Path) -> RunFolder:
    return RunFolder(str(root / "demo"))


def names(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder(root).checkpoints_dir) if name[0] != ".")


def steps(root: Path) -> list[int]:
    return [int(name.rpartition("-")[2]) for name in names(root)]


def registry(root: Path) -> Registry:
    return Registry.load(folder(root).registry)


def each_step(**options: Any) -> ModelCheckpoint:
    """Saves at every step and wants the newest only, unless the options say otherwise."""
    return ModelCheckpoint(every_n_train_steps=1, **options)


# -- what stays, and what goes -------------------------------------------------------------------------------


def replace_all(trainer: Any, names: list[str]) -> None:
    """A save after which its owner wants none of ``names`` any more."""
    service = trainer.checkpoints
    owner = next(each.state_key for each in trainer.callbacks if isinstance(each, ModelCheckpoint))
    assert service.save(service.reserve(), reason=SaveReason.PERIODIC, owner=owner, replaces=names)


def test_pinned_kept_and_quarantined_stay_and_go_once_they_are_not(tmp_path: Path) -> None:
    def protect(_: Any) -> None:
        pin(folder(tmp_path), "step:1")
        keep(folder(tmp_path), "step:2")
        three = names(tmp_path)[2]
        edit(folder(tmp_path).registry, lambda r: r.quarantine.update({three: {"why": "x", "at": 1.0}}))

    def drop(trainer: Any) -> None:
        replace_all(trainer, names(tmp_path))

    begin(tmp_path, each_step(save_top_k=-1), max_steps=5)
    # By somebody else, beside the run that trains.
    wishes = At("on_train_batch_end", 1, protect)
    fit(tmp_path, each_step(), wishes, At("on_train_batch_end", 2, drop), max_steps=8)
    assert steps(tmp_path) == [1, 2, 3, 5, 8]
    edit(folder(tmp_path).registry, _forget_wishes)
    fit(tmp_path, each_step(), At("on_train_batch_end", 2, drop), max_steps=11)
    assert steps(tmp_path) == [8, 11]


def _forget_wishes(found: Registry) -> None:
    found.pin, found.keeps, found.quarantine = None, [], {}


def test_what_this_run_did_not_write_is_never_deleted(tmp_path: Path) -> None:
    begin(tmp_path, each_step(), max_steps=2)
    other = make_trainer(tmp_path, run="other", callbacks=[each_step()], max_steps=1)
    other.fit(Tiny(), loader(), loader(8, shuffle=False))
    (foreign,) = os.listdir(tmp_path / "other" / "checkpoints")
    place = Path(folder(tmp_path).checkpoints_dir)
    shutil.copytree(tmp_path / "other" / "checkpoints" / foreign, place / foreign)
    (place / "00000099-mine").mkdir()
    (place / "00000099-mine" / "notes.txt").write_text("keep")
    (place / "weights.pt").write_text("keep")
    everything = At(
        "on_train_batch_end",
        2,
        lambda trainer: replace_all(trainer, [foreign, "00000099-mine"]),
    )
    fit(tmp_path, each_step(), everything, max_steps=6)
    assert (place / foreign / "manifest.json").exists()
    assert (place / "00000099-mine" / "notes.txt").read_text() == "keep"
    assert (place / "weights.pt").exists()


def test_an_older_hpc_checkpoint_goes_once_a_newer_one_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("ENVIRONMENT", "BATCH")
    for number in range(3):
        with pytest.raises(SystemExit) as ended:
            fit(
                tmp_path, At("on_train_batch_end", 2, send(signal.SIGUSR1)),
                ckpt_path="last" if number else None, enable_checkpointing=False,
            )  # fmt: skip
        assert ended.value.code == 75
    # The newest, and the one that the newest attempt resumed from.
    assert steps(tmp_path) == [4, 6]
    assert registry(tmp_path).hpc["7"] == names(tmp_path)


def test_what_killed_attempts_resumed_from_does_not_pile_up(tmp_path: Path) -> None:
    begin(tmp_path, each_step(), max_steps=1)
    for number in range(5):
        with pytest.raises(Boom):
            fit(tmp_path, each_step(), At("on_train_batch_start", 3, boom), max_steps=100)
        # The newest, the one this attempt began from, and at most the one that an earlier attempt began from.
        assert len(steps(tmp_path)) <= 3, number
        assert steps(tmp_path)[-1] == 3 + 2 * number
    fit(tmp_path, each_step(), max_steps=15)
    assert steps(tmp_path) == [11, 15]


def test_the_limit_holds_over_killed_attempts_and_a_lost_registry(tmp_path: Path) -> None:
    def best_two() -> ModelCheckpoint:
        return each_step(monitor="loss_step", save_top_k=2, save_on_train_epoch_end=True)

    begin(tmp_path, best_two(), max_steps=3)
    for number in range(3):
        with pytest.raises(Boom):
            fit(tmp_path, best_two(), At("on_train_batch_start", 3, boom), max_steps=100)
        if number == 1:
            os.unlink(folder(tmp_path).registry)
    fit(tmp_path, best_two(), max_steps=14)
    (entry,) = registry(tmp_path).callbacks
    assert len(entry["best_k"]) == 2
    assert set(entry["best_k"]) <= set(names(tmp_path))
    # Beside the best two: the newest, and what the attempts began from until the next save after that.
    assert len(names(tmp_path)) <= 4


def test_an_abandoned_line_stays_over_resumes(tmp_path: Path) -> None:
    begin(tmp_path, each_step(save_top_k=-1), max_steps=4)
    before = names(tmp_path)
    fit(tmp_path, each_step(), max_steps=3, ckpt_path="step:1")
    fit(tmp_path, each_step(), max_steps=6)
    # Step 1 is on the line, and the limit is another one now.
    assert set(before[1:]) <= set(names(tmp_path))
    assert steps(tmp_path) == [2, 3, 4, 3, 6]


# -- a registry that is lost -----------------------------------------------------------------------------------


def test_only_pins_keeps_and_quarantine_are_lost_with_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("ENVIRONMENT", "BATCH")
    plain, monitored = each_step(save_top_k=-1), ModelCheckpoint(monitor="val_loss")
    manual = At("on_train_batch_end", 2, send(signal.SIGUSR2))
    with pytest.raises(SystemExit):  # a save for the walltime where a save was just made: noted, not written
        begin(tmp_path, plain, monitored, manual, At("on_train_batch_end", 7, send(signal.SIGUSR1)))
    with pytest.raises(SystemExit):
        fit(tmp_path, plain, monitored, At("on_train_batch_end", 2, send(signal.SIGUSR1)))
    keep(folder(tmp_path), "step:1")
    pin(folder(tmp_path), "step:2")
    known = registry(tmp_path)
    assert any(save["step"] == 2 and "manual" in save["notes"] for save in known.saves)
    os.unlink(folder(tmp_path).registry)
    resolution = resolve_run(folder(tmp_path), reference="hpc", job=JobFacts("7", batch=True))
    assert resolution.path is not None
    assert os.path.basename(resolution.path) == known.holds["hpc"]
    (told,) = resolution.warnings
    assert told.startswith("The registry is missing; it was rebuilt from 10 manifests")
    rebuilt = gather(folder(tmp_path)).registry
    assert (rebuilt.keeps, rebuilt.pin) == ([], None)
    rebuilt.keeps, rebuilt.pin = known.keeps, known.pin
    rebuilt._stamp = known._stamp
    assert _told(rebuilt) == _told(known)


def _told(found: Registry) -> dict[str, Any]:
    value = found.to_dict()
    for save in value["saves"]:
        del save["save_s"]  # the registry's counts the seconds after the manifest was written too
        save["notes"].sort()
        save["saved_for"].sort()
    return value


def test_the_end_of_training_is_not_lost_with_the_registry(tmp_path: Path) -> None:
    begin(tmp_path, each_step(), max_steps=3)
    ended = registry(tmp_path).finished
    assert ended is not None
    Path(folder(tmp_path).registry).write_text("{")
    assert gather(folder(tmp_path)).registry.finished == ended
    with pytest.warns(UserWarning, match="registry is damaged; it was rebuilt"):
        trainer = fit(tmp_path, each_step(), max_steps=3)
    assert trainer.global_step == 0, "nothing was left to do"


def test_a_checkpoint_that_was_moved_elsewhere_stays_there_and_so_does_the_link(tmp_path: Path) -> None:
    begin(tmp_path, each_step(), max_steps=2)
    (moved,) = (
        path for path in Path(folder(tmp_path).checkpoints_dir).iterdir() if path.name == names(tmp_path)[-1]
    )
    shutil.move(moved, tmp_path / "elsewhere")
    moved.symlink_to(tmp_path / "elsewhere")
    fit(tmp_path, each_step(), max_steps=4)
    fit(tmp_path, each_step(), max_steps=6)
    assert moved.is_symlink()
    assert (tmp_path / "elsewhere" / "manifest.json").exists()
    assert steps(tmp_path)[-1] == 6


def test_what_fails_after_the_commit_is_said_and_takes_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: Any, *_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("odd")

    monkeypatch.setattr(SaveBooks, "clear", broken)
    callback = each_step()
    begin(tmp_path, callback, max_steps=3)
    assert steps(tmp_path) == [1, 2, 3]
    assert callback.best_model_path.endswith(names(tmp_path)[-1])
    assert "is saved, and what belongs to it failed: ValueError: odd" in capsys.readouterr().err


def test_a_name_that_somebody_has_taken_is_not_used(tmp_path: Path) -> None:
    """As by a holder that was overtaken while it saved and comes back now."""
    begin(tmp_path, each_step(), max_steps=2)
    place = Path(folder(tmp_path).checkpoints_dir)

    def take(_: Any) -> None:
        (place / "00000004-step-00000004").mkdir()

    fit(tmp_path, each_step(), At("on_train_batch_end", 1, take), max_steps=4)
    assert names(tmp_path)[-1] == "00000005-step-00000004"
    assert Registry.load(folder(tmp_path).registry).sequence == 5


# -- a holder that was overtaken while it saved ------------------------------------------------------------------


def test_what_an_overtaken_holder_still_writes_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path, each_step(save_top_k=2, monitor="loss_step", save_on_train_epoch_end=True), max_steps=3)
    run = folder(tmp_path)
    theirs: list[str] = []
    deleted_before: list[str] = []

    def overtaken(checkpoints_dir: str, name: str, files: Any, manifest: Any, **more: Any) -> Any:
        """The process halts between its last look at the lease and the commit, and another one takes over."""
        if not theirs:
            epoch = _take_over(run)
            edit(run.registry, lambda r: r.note_takeover(epoch, 3))
            theirs.append("00000005-step-00000004")
            _commit_of_another(run, theirs[0], epoch)
            deleted_before.extend(names(tmp_path))
        return commit_for_real(checkpoints_dir, name, files, manifest, **more)

    monkeypatch.setattr(checkpoint_writer, "commit", overtaken)
    with pytest.raises(SystemExit) as ended:
        fit(
            tmp_path, each_step(save_top_k=2, monitor="loss_step", save_on_train_epoch_end=True), Waits(),
            max_steps=-1, max_epochs=-1,
        )  # fmt: skip
    assert ended.value.code == 70
    zombie = "00000004-step-00000004"
    assert zombie in names(tmp_path), "it was committed all the same"
    assert set(deleted_before) <= set(names(tmp_path)), "and nothing was deleted"
    noted = registry(tmp_path)
    assert [save["name"] for save in noted.saves][-1] == theirs[0]
    assert zombie not in [save["name"] for save in noted.saves]
    for reference in ("last", "auto", "step:4"):
        assert os.path.basename(resolve_run(run, reference=reference).path or "") == theirs[0]
    by_name = resolve_run(run, reference=f"{run.checkpoints_dir}/{zombie}")
    assert by_name.error is not None
    assert "taken over" in by_name.error.message
    os.unlink(run.registry)
    assert os.path.basename(resolve_run(run, reference="last").path or "") == theirs[0], (
        "the manifests say it too"
    )


def _take_over(run: RunFolder) -> int:
    """As if this process had been held to be dead, on another host; returns the new epoch."""
    with _locked(run.lease):
        lease = json.loads(Path(run.lease).read_text())
        lease.update(epoch=lease["epoch"] + 1, holder={**lease["holder"], "host": "elsewhere"})
        Path(run.lease).write_text(json.dumps(lease))
    return int(lease["epoch"])


def _commit_of_another(run: RunFolder, name: str, epoch: int) -> None:
    first = sorted(os.listdir(run.checkpoints_dir))[-1]
    before = read_manifest(f"{run.checkpoints_dir}/{first}")
    manifest = replace(
        before, sequence=5, step=4, parent=first, line=(*before.line, (5, 5)), lease_epoch=epoch, files=()
    )
    written = commit_for_real(run.checkpoints_dir, name, {"state.ckpt": lambda f: f.write(b"x")}, manifest)

    def note(found: Registry) -> None:
        found.note_saved(written.to_record(f"{run.checkpoints_dir}/{name}"), ["x"])

    edit(run.registry, note)


class Waits(Callback):
    """Trains until the supervisor has seen that the lease is lost."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= 5:
            deadline = time.monotonic() + 60
            while trainer.context.stop.request is None:
                assert time.monotonic() < deadline
                time.sleep(0.001)
