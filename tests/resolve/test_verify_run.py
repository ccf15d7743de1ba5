"""The registry against the disk, leftovers and the small files of a run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptrun.checkpoint.commit import commit
from ckptrun.checkpoint.manifest import Manifest
from ckptrun.errors import NoCheckpointError
from ckptrun.resolve import verify_run as verify_run_module
from ckptrun.resolve.verify_run import verify_one, verify_run
from ckptrun.run.folder import RunFolder
from ckptrun.run.lease import Holder, Lease
from ckptrun.run.registry import Registry


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.at(str(tmp_path / "runs"), "demo")
    folder.create()
    Path(folder.run_json).write_text('{"id": "r"}')
    registry = Registry(run_id="r")
    for sequence in (1, 2, 3):
        save(folder, sequence, registry)
    registry.save(folder.registry)
    return folder


def save(run: RunFolder, sequence: int, registry: Registry | None = None, **more: object) -> str:
    """A checkpoint whose only file is no torch file: what is looked at here is around it."""
    name = f"{sequence:08d}-step-{sequence:08d}"
    manifest = Manifest(
        **{"run_id": "r", "strategy": "other", "line": ((1, sequence),), **more},  # type: ignore[arg-type]
        sequence=sequence, step=sequence, epoch=0, reason="periodic",
    )  # fmt: skip
    done = commit(run.checkpoints_dir, name, {"state.bin": lambda file: file.write(b"x" * 10)}, manifest)
    if registry is not None:
        registry.note_saved(done.to_record(f"{run.checkpoints_dir}/{name}"), [])
    return name


def test_registry_against_the_disk(run: RunFolder) -> None:
    registry = Registry.load(run.registry)
    newest = save(run, 9)
    foreign = save(run, 10, run_id="other")
    late = save(run, 11, lease_epoch=1)
    registry.takeovers = [{"lease_epoch": 2, "sequence": 8}]
    registry.pin = {"reference": "last", "path": "/nowhere"}
    registry.keeps = ["00000007-gone"]
    registry.note_saved(
        Manifest("r", 4, 4, 0, "periodic").to_record(f"{run.checkpoints_dir}/00000004-gone"), []
    )
    registry.save(run.registry)
    notes = "\n".join(verify_run(run).notes)
    assert "known to the registry, gone from the disk: 00000004-gone" in notes
    assert "kept in the registry, gone from the disk: 00000007-gone" in notes
    assert "the pin leads nowhere: /nowhere" in notes
    assert f"{late} is ignored: written after the run was taken over at save 8" in notes
    assert f"{newest} is ignored: written after" in notes
    assert f"{foreign} is ignored" in notes
    registry.takeovers = []
    registry.save(run.registry)
    assert f"behind the disk: {newest}" in "\n".join(verify_run(run).notes)


def states(run: RunFolder) -> dict[str, str]:
    return {os.path.basename(each.path): each.state for each in verify_run(run).files}


def test_small_files(run: RunFolder) -> None:
    assert states(run) == {
        "registry.json": "good", "run.json": "good", "lease.json": "missing", "status.json": "missing",
        "attempts.jsonl": "missing", "config.yaml": "missing",
    }  # fmt: skip
    for name in ("registry.json", "lease.json", "status.json"):
        Path(run.path, name).write_text("{")
    Path(run.attempts).write_text('{"event": "start", "attempt": 1}\n{"torn')
    found = states(run)
    assert [found[name] for name in ("registry.json", "lease.json", "status.json")] == ["damaged"] * 3
    assert found["attempts.jsonl"] == "good", "a torn line is what a killed writer leaves"
    assert not verify_run(run).good
    os.unlink(run.registry)
    assert "rebuilds it" in "\n".join(verify_run(run).notes)


def test_leftovers_are_no_damage(run: RunFolder) -> None:
    os.mkdir(f"{run.checkpoints_dir}/.tmp-00000012-a.1-ab")
    os.mkdir(f"{run.checkpoints_dir}/00000012-a")
    report = verify_run(run)
    assert [text.partition(":")[0] for text in report.leftovers] == [".tmp-00000012-a.1-ab", "00000012-a"]
    assert all("was killed" in text for text in report.leftovers)
    lease = Lease.acquire(run.lease, Holder.this_process(job=None, command="fit"), noted=lambda: (3, 0))
    assert all("a live run may be writing it" in text for text in verify_run(run).leftovers)
    lease.release()


def test_what_would_be_used_instead(run: RunFolder) -> None:
    names = sorted(os.listdir(run.checkpoints_dir))
    for name in names[1:]:
        Path(run.checkpoints_dir, name, "state.bin").write_bytes(b"y" * 10)
    report = verify_run(run)
    assert [each.state for each in report.checkpoints] == ["damaged"] * 3  # none of them has a state.ckpt
    assert report.instead == {"last": None}
    one = verify_one(f"{run.checkpoints_dir}/{names[2]}")
    assert one.instead["last"] == f"{run.checkpoints_dir}/{names[1]}"
    os.mkdir(f"{run.checkpoints_dir}/00000020-a")
    with pytest.raises(NoCheckpointError, match="no manifest"):
        verify_one(f"{run.checkpoints_dir}/00000020-a")


def test_all_that_was_saved_is_gone(run: RunFolder) -> None:
    names = sorted(os.listdir(run.checkpoints_dir))
    shutil.rmtree(f"{run.checkpoints_dir}/{names[0]}")
    report = verify_run(run)
    assert (report.gone, report.all_gone) == (names[:1], False)
    for name in names[1:]:
        shutil.rmtree(f"{run.checkpoints_dir}/{name}")
    report = verify_run(run)
    assert (report.gone, report.all_gone, report.good) == (names, True, False)


def test_what_a_live_run_deletes_meanwhile_is_not_called_gone(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As retention does it: forgotten, then deleted; here while files are read, and after the registry was."""
    real_verify, real_load = verify_run_module._verify_all, Registry.load
    moves = [("verified", 4), ("loaded", 5)]

    def move_on(moment: str) -> None:
        if not moves or moves[0][0] != moment:
            return
        _, sequence = moves.pop(0)
        old = os.listdir(run.checkpoints_dir)
        registry = real_load(run.registry)
        save(run, sequence, registry)
        registry.forget(old)
        registry.save(run.registry)
        for name in old:
            shutil.rmtree(f"{run.checkpoints_dir}/{name}")

    def verify_all(*arguments: Any) -> list[Any]:
        found = real_verify(*arguments)
        move_on("verified")
        return found

    def load(path: str) -> Registry:
        registry = real_load(path)
        move_on("loaded")
        return registry

    monkeypatch.setattr(verify_run_module, "_verify_all", verify_all)
    monkeypatch.setattr(Registry, "load", load)
    report = verify_run(run)
    assert moves == []
    assert report.gone == []
    assert not any("gone" in note for note in report.notes)
    assert [each.sequence for each in report.checkpoints] == [4]
