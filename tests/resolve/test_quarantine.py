"""A checkpoint that was found damaged: who is told what, and which one is near it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckptrun.checkpoint.commit import commit
from ckptrun.checkpoint.manifest import Manifest
from ckptrun.errors import DamagedCheckpointError
from ckptrun.records import Damage, Resolution
from ckptrun.resolve import quarantine as module
from ckptrun.resolve.gather import resolve_run
from ckptrun.resolve.quarantine import found_damage, lift, nearest_good, nothing_else, quarantine
from ckptrun.run.folder import RunFolder
from ckptrun.run.registry import Registry


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.at(str(tmp_path), "demo")
    folder.create()
    return folder


def save(run: RunFolder, sequence: int, run_id: str = "run-1") -> str:
    """Commit a checkpoint of step 100 times ``sequence``; the registry is not told."""
    name = f"{sequence:08d}-step-{100 * sequence:08d}"
    manifest = Manifest(run_id, sequence, 100 * sequence, 0, "periodic", line=((1, sequence),))
    commit(run.checkpoints_dir, name, {"state.ckpt": lambda file: file.write(b"0123456789")}, manifest)
    return os.path.join(run.checkpoints_dir, name)


def damage_of(path: str) -> Damage:
    return Damage(path, "state.ckpt", "state.ckpt is damaged: found a, expected b", "b", "a")


def test_noted_turned_down_and_lifted(run: RunFolder) -> None:
    good, bad = save(run, 1), save(run, 2)
    name = os.path.basename(bad)
    Registry(run_id="run-1", pin={"reference": "last", "path": good}).save(run.registry)
    told = quarantine(run, damage_of(bad), "run-1")
    assert told.startswith(f"{name} is damaged, in two reads: state.ckpt is damaged")
    assert f"`ckptrun verify {bad}`" in told
    assert "\n" not in told
    note = Registry.load(run.registry).quarantine[name]
    assert {key: note[key] for key in ("file", "expected", "found")} == {
        "file": "state.ckpt", "expected": "b", "found": "a",
    }  # fmt: skip
    assert note["at"] > 1e9
    assert Registry.load(run.registry).pin is not None, "nothing else is changed"
    resolution = resolve_run(run, reference="last")
    assert resolution.path == good
    assert any(f"ckptrun verify {bad}" in notice for notice in resolution.notices)
    assert lift(run, name) == note
    assert lift(run, name) is None
    assert resolve_run(run, reference="last").path == bad


def test_what_is_not_this_runs_is_left_alone(run: RunFolder, tmp_path: Path) -> None:
    foreign = save(run, 1, run_id="other")
    Registry(run_id="run-1").save(run.registry)
    before = Path(run.registry).read_bytes()
    assert "quarantine" not in quarantine(run, damage_of(foreign), "other")
    elsewhere = str(tmp_path / "elsewhere" / "00000001-a")
    os.makedirs(elsewhere)
    assert "quarantine" not in quarantine(run, damage_of(elsewhere), "run-1")
    assert "quarantine" not in quarantine(run, damage_of(f"{run.checkpoints_dir}/00000009-gone"), "run-1")
    assert Path(run.registry).read_bytes() == before


def test_a_note_that_cannot_be_written_is_said(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = save(run, 1)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", run.registry)

    monkeypatch.setattr(module, "edit", refuse)
    assert "could not be put into quarantine" in quarantine(run, damage_of(bad), "run-1")


def test_only_damage_of_the_chosen_checkpoint_counts(run: RunFolder) -> None:
    path = save(run, 1)
    error = DamagedCheckpointError("x", damage=damage_of(path))
    chosen = resolve_run(run, reference="last")
    assert found_damage(error, chosen) == damage_of(path)
    assert found_damage(error, Resolution(None, 7, None)) is None
    assert found_damage(DamagedCheckpointError("x"), chosen) is None
    assert found_damage(ValueError("x"), chosen) is None
    assert found_damage(None, chosen) is None


def test_the_nearest_good_one(run: RunFolder) -> None:
    paths = {sequence: save(run, sequence) for sequence in (1, 4, 6, 9)}
    os.unlink(f"{paths[6]}/manifest.json")
    near = nearest_good(paths[9])
    assert near is not None
    assert near.path == paths[4]
    error = nothing_else(damage_of(paths[9]), Resolution("step:900", 2, near))
    assert error.exit_code == 3
    assert error.message.startswith("--ckpt step:900 cannot be used: state.ckpt is damaged")
    assert paths[4] in (error.hint or "")
    Registry(run_id="run-1").save(run.registry)
    quarantine(run, damage_of(paths[4]), "run-1")
    near = nearest_good(paths[9])
    assert near is not None
    assert near.path == paths[1], "what is known to be damaged is no help"
    for sequence in (1, 4):
        os.unlink(f"{paths[sequence]}/manifest.json")
    assert nearest_good(paths[9]) is None
    assert "no good one" in (nothing_else(damage_of(paths[9]), Resolution(None, 3, near)).hint or "")


def test_neither_path_nor_checksums_are_said_twice(run: RunFolder) -> None:
    bad = save(run, 2)
    why = f"{bad}/state.ckpt is damaged: found the checksum xxh3_64:12, expected xxh3_64:34"
    told = quarantine(run, Damage(bad, "state.ckpt", why, "xxh3_64:34", "xxh3_64:12"), "run-1")
    assert told == (
        f"{os.path.basename(bad)} is damaged, in two reads: state.ckpt is damaged: wrong checksum; in quarantine "
        f"until `ckptrun verify {bad}` finds it good."
    )
    gone = Damage(bad, "manifest.json", f"{bad}: its manifest lists no state.ckpt")
    assert "two reads: its manifest lists no state.ckpt; in" in quarantine(run, gone, "run-1")
