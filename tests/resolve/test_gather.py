"""Real folders: what is read, what is only completed in memory, and what is never "absent"."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ckptrun.checkpoint import naming
from ckptrun.checkpoint.commit import commit
from ckptrun.checkpoint.manifest import Manifest
from ckptrun.processes import process_stat
from ckptrun.records import CheckpointRecord, FreshStart, JobFacts
from ckptrun.resolve.gather import gather, highest_epoch, resolve_run
from ckptrun.run.folder import RunFolder
from ckptrun.run.lease import Holder, Lease
from ckptrun.run.registry import Registry, edit
from ckptrun.storage import retry


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.at(str(tmp_path / "runs"), "gpt")
    os.makedirs(folder.checkpoints_dir)
    return folder


def save(run: RunFolder, sequence: int, **more: Any) -> str:
    """Commit a small checkpoint and note it in the registry, as a run does; returns its path."""
    name = naming.folder_name(sequence, naming.step_label(100 * sequence))
    fields: dict[str, Any] = {
        "run_id": "r",
        "epoch": 0,
        "reason": "periodic",
        "line": ((1, sequence),),
        **more,
    }
    manifest = Manifest(sequence=sequence, step=100 * sequence, **fields)
    manifest = commit(run.checkpoints_dir, name, {"state.ckpt": lambda f: f.write(b"0123456789")}, manifest)
    path = os.path.join(run.checkpoints_dir, name)
    registry = Registry.load(run.registry) if os.path.exists(run.registry) else Registry(run_id="r")
    registry.note_saved(manifest.to_record(path), manifest.saved_for)
    registry.save(run.registry)
    return path


def everything_in(run: RunFolder) -> dict[str, tuple[int, int]]:
    found = {}
    for folder, _, files in os.walk(run.root):
        for name in files:
            stat = os.stat(os.path.join(folder, name))
            found[os.path.join(folder, name)] = (stat.st_mtime_ns, stat.st_size)
    return found


def test_last_finds_a_save_of_an_earlier_process_and_changes_nothing(run: RunFolder) -> None:
    save(run, 1)
    newest = save(run, 2)
    before = everything_in(run)
    resolution = resolve_run(run, reference="last")
    assert resolution.path == newest
    assert resolution.warnings == ()
    assert everything_in(run) == before


def test_a_root_that_is_not_there_is_a_fresh_start_and_is_not_made(tmp_path: Path) -> None:
    folder = RunFolder.at(str(tmp_path / "no" / "runs"), "gpt")
    assert resolve_run(folder, reference="last").fresh
    requeued = resolve_run(folder, reference="last", job=JobFacts("7", True, restart_count=1))
    assert requeued.error is not None
    assert requeued.error.exit_code == 3
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("there", "fresh"),
    [
        ([], False),  # a mount point without its file system
        (
            [".meet-7-1-0.json", "..meet-7-1-0.json.tmp-3-3"],
            False,
        ),  # what this start of the job has put there itself
        ([".meet-7-0-0.json"], True),
        ([".submitted-gpt.json"], True),
        (["other"], True),
    ],
)
def test_a_requeued_job_begins_nothing_in_an_empty_root(
    there: list[str], fresh: bool, tmp_path: Path
) -> None:
    for name in there:
        (tmp_path / name).touch()
    folder = RunFolder.at(str(tmp_path), "gpt")
    assert resolve_run(folder, reference="last", job=JobFacts("7", True)).fresh
    requeued = resolve_run(folder, reference="last", job=JobFacts("7", True, restart_count=1))
    assert requeued.fresh is fresh
    assert fresh or (requeued.error is not None and "is empty" in requeued.error.message)


@pytest.mark.parametrize("damage", [None, b"", b"{", b"[]"])
def test_a_registry_that_is_missing_or_damaged_is_rebuilt_in_memory(
    run: RunFolder, damage: bytes | None
) -> None:
    newest = save(run, 1, reason="hpc", job="7")
    os.unlink(run.registry)
    if damage is not None:
        Path(run.registry).write_bytes(damage)
    resolution = resolve_run(run, reference="hpc")
    assert resolution.path == newest
    assert any("rebuilt from 1 manifest " in warning for warning in resolution.warnings)
    gathered = gather(run)
    assert gathered.registry_changed
    assert gathered.registry.hpc == {"7": [os.path.basename(newest)]}


def test_a_registry_behind_the_disk_is_completed(run: RunFolder) -> None:
    save(run, 1)
    old = Path(run.registry).read_bytes()
    newest = save(run, 2, reason="hpc", job="7")
    Path(run.registry).write_bytes(old)
    resolution = resolve_run(run, reference="hpc", job=JobFacts("7", True))
    assert resolution.path == newest
    assert any("behind the disk" in warning for warning in resolution.warnings)


def test_beside_a_live_run_a_registry_that_is_behind_is_no_news(run: RunFolder) -> None:
    save(run, 1)
    old = Path(run.registry).read_bytes()
    newest = save(run, 2)
    Path(run.registry).write_bytes(old)
    own = Holder.this_process(job=None, command="fit")
    lives, started = os.getppid(), process_stat(os.getppid()).start_time  # type: ignore[union-attr]
    holders = {  # who holds the lease: whether it is worth a word
        own: True,  # nobody else notes it
        replace(own, pid=lives, pid_start=started): False,
        replace(own, pid=lives, pid_start=started + 1): True,  # dead, and its id used again
        replace(own, host="elsewhere", boot_id="another"): False,
    }
    for holder, told in holders.items():
        lease = {"epoch": 1, "holder": asdict(holder), "counter": 1, "sequence_at_takeover": 0}
        Path(run.lease).write_text(json.dumps(lease))
        resolution = resolve_run(run, reference="last")
        assert resolution.path == newest
        assert any("behind the disk" in warning for warning in resolution.warnings) == told, holder


@pytest.mark.parametrize("reference", ["last", "auto", None])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_an_io_error_is_never_absent(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, reference: str | None, code: int
) -> None:
    def fail(path: str) -> list[str]:
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(os, "listdir", fail)
    monkeypatch.setattr(retry, "RETRY_WAITS_S", (0.0, 0.0))
    resolution = resolve_run(run, reference=reference)
    assert not resolution.fresh
    assert resolution.error is not None
    assert resolution.error.exit_code == 3
    assert os.strerror(code) in resolution.error.message


def test_a_root_that_cannot_be_listed_is_never_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", fail)
    resolution = resolve_run(RunFolder.at(str(tmp_path), "gpt"), reference="last")
    assert resolution.error is not None
    assert "Permission denied" in resolution.error.message


def test_a_registry_that_cannot_be_read_is_an_error_and_not_rebuilt(run: RunFolder) -> None:
    path = save(run, 1)
    os.unlink(run.registry)
    os.mkdir(run.registry)  # opening it fails, for root too
    resolution = resolve_run(run, reference="last")
    assert resolution.error is not None
    assert resolution.error.exit_code == 3
    # A checkpoint named by its path needs no registry.
    assert resolve_run(run, reference=path).path == path


def test_known_and_gone_is_never_a_fresh_start(run: RunFolder) -> None:
    path = save(run, 1)
    os.rename(path, os.path.join(run.root, "elsewhere"))
    for reference in ("last", "auto"):
        resolution = resolve_run(run, reference=reference)
        assert resolution.error is not None
        assert resolution.error.exit_code == 3
        assert "gone from the disk" in resolution.error.message


def test_an_interrupted_first_save_is_no_commit(run: RunFolder) -> None:
    os.mkdir(os.path.join(run.checkpoints_dir, ".tmp-00000001-step-00000100"))
    os.mkdir(os.path.join(run.checkpoints_dir, "00000001-step-00000100"))
    resolution = resolve_run(run, reference="last")
    assert resolution.fresh
    assert [candidate.why for candidate in resolution.candidates] == [
        "not committed: it has no manifest.json"
    ]


def test_quarantined_overtaken_and_foreign_checkpoints_are_turned_down(run: RunFolder) -> None:
    good = save(run, 1)
    quarantined, overtaken, foreign = save(run, 2), save(run, 3), save(run, 4, run_id="other")
    registry = Registry.load(run.registry)
    registry.quarantine[os.path.basename(quarantined)] = {"why": "checksum of state.ckpt", "at": 1.0}
    registry.takeovers = [{"lease_epoch": 1, "sequence": 2}]
    registry.save(run.registry)
    path = save(run, 5, lease_epoch=1)
    assert resolve_run(run, reference="last").path == path
    Path(path, "state.ckpt").unlink()
    Path(good, "state.ckpt").unlink()
    whys = [candidate.why for candidate in resolve_run(run, reference="last").candidates]
    assert whys[0] == "lacks its file state.ckpt"
    assert "taken over" in whys[1]
    assert "taken over" in whys[2]
    assert whys[3] == "quarantined: checksum of state.ckpt"
    assert overtaken != foreign


def test_another_runs_checkpoint_is_taken_by_its_path_only(run: RunFolder) -> None:
    mine, foreign = save(run, 1), save(run, 2, run_id="other")
    assert resolve_run(run, reference="last").path == mine
    assert resolve_run(run, reference=foreign).path == foreign


def test_a_quarantined_checkpoint_is_not_taken_by_its_path(run: RunFolder) -> None:
    path = save(run, 1)
    registry = Registry.load(run.registry)
    registry.quarantine[os.path.basename(path)] = {"why": "checksum", "at": 1.0}
    registry.save(run.registry)
    resolution = resolve_run(run, reference=path)
    assert resolution.error is not None
    assert "quarantined: checksum" in resolution.error.message


def test_paths_of_every_kind(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = save(run, 1)
    monkeypatch.chdir(run.path)
    assert resolve_run(run, reference=os.path.relpath(good)).path == good
    assert resolve_run(run, reference=os.path.join(good, "state.ckpt")).path == good
    assert resolve_run(run, reference=os.path.join(good, "manifest.json")).path == good

    (tmp_path / "weights.pt").write_bytes(b"PK\x03\x04rest")
    (tmp_path / "old.pt").write_bytes(b"\x80\x02rest")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    expected = {
        "weights.pt": (5, "--init-from"),
        "old.pt": (5, "--init-from"),
        "notes.txt": (3, "5 bytes"),
        "empty": (3, "0 bytes"),
        "folder": (3, "without manifest.json"),
        "link": (3, "leads nowhere"),
        "weight.pt": (3, "weights.pt"),
    }
    for name, (exit_code, says) in expected.items():
        error = resolve_run(run, reference=str(tmp_path / name)).error
        assert error is not None, name
        assert error.exit_code == exit_code, name
        assert says in f"{error.message} {error.hint}", name
    tested = resolve_run(run, reference=str(tmp_path / "weights.pt"), fn="test")
    assert tested.answer == str(tmp_path / "weights.pt")


def test_a_runs_folder_given_as_a_path_shows_its_newest_checkpoints(run: RunFolder) -> None:
    save(run, 9)
    newest = save(run, 10)
    error = resolve_run(run, reference=run.path).error
    assert error is not None
    assert error.hint is not None
    assert error.hint.index(newest) < error.hint.index("00000009-")


def test_a_name_in_the_run_is_offered_as_a_path(run: RunFolder) -> None:
    path = save(run, 1)
    error = resolve_run(run, reference=os.path.basename(path)).error
    assert error is not None
    assert path in str(error.hint)


def test_a_damaged_path_names_the_nearest_good_one(run: RunFolder) -> None:
    good, damaged = save(run, 1), save(run, 2)
    Path(damaged, "state.ckpt").write_bytes(b"")
    error = resolve_run(run, reference=damaged).error
    assert error is not None
    assert error.exit_code == 3
    assert good in str(error.hint)


def test_a_new_run_with_init_from(run: RunFolder) -> None:
    assert resolve_run(run, reference="last", init_from="w.pt").answer == FreshStart("w.pt")


def test_the_record_is_whole(run: RunFolder) -> None:
    save(run, 1, metrics={"val_loss": 0.5}, job="7")
    answer = resolve_run(run, reference="seq:1").answer
    assert isinstance(answer, CheckpointRecord)
    assert (answer.metrics, answer.job, answer.size_bytes) == ({"val_loss": 0.5}, "7", 10)


def test_a_lease_that_was_lost_goes_on_after_the_highest_epoch(run: RunFolder) -> None:
    assert highest_epoch(run) == 0
    save(run, 1, lease_epoch=3)
    save(run, 2, lease_epoch=2)  # of a holder who had been overtaken
    assert highest_epoch(run) == 3
    edit(run.registry, lambda registry: registry.note_takeover(5, 2))
    assert highest_epoch(run) == 5, "its holder has committed nothing yet"
    os.unlink(run.registry)
    assert highest_epoch(run) == 3
    lease = Lease.acquire(run.lease, Holder.this_process(job=None, command="x"), noted=lambda: (2, 3))
    assert (lease.epoch, highest_epoch(run)) == (4, 0), "lease.json knows it"
    lease.release()
