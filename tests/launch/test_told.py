"""What is told to another host comes back as it was, and it is noticed where that host sees something else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ckptrun.launch.told import (
    fingerprint,
    first_difference,
    resolution_from_plain,
    resolution_to_plain,
    seen_otherwise,
)
from ckptrun.records import CheckpointRecord, FreshStart, Resolution
from ckptrun.run.folder import RunFolder
from ckptrun.run.lease import Holder, Lease

RECORD = CheckpointRecord(
    "00000003-step-00000009", "/runs/demo/checkpoints/x", 3, 9, 1, "periodic", metrics={"val_loss": 0.5},
    parent="00000001-step-00000003", line=((1, 1), (3, 3)), saved_for=("ModelCheckpoint",), saved_at=1.5,
)  # fmt: skip


@pytest.mark.parametrize(
    "answer", [RECORD, FreshStart(), FreshStart("/w.ckpt"), FreshStart("s3://b/w"), "/foreign.ckpt"]
)
def test_a_resolution_through_json(answer: CheckpointRecord | FreshStart | str) -> None:
    resolution = Resolution("last", 2, answer, notices=("not told",), removes_pin=True)
    plain = json.loads(json.dumps(resolution_to_plain(resolution)))
    assert resolution_from_plain(plain) == Resolution("last", 2, answer, removes_pin=True)


def test_weights_are_found_from_another_working_folder(in_tmp_path: Path) -> None:
    plain = resolution_to_plain(Resolution(None, 7, FreshStart("w.ckpt")))
    assert resolution_from_plain(plain).answer == FreshStart(str(in_tmp_path / "w.ckpt"))


def lease_of(folder: RunFolder) -> Lease:
    folder.create()
    return Lease.acquire(folder.lease, Holder.this_process(job=None, command=""), noted=lambda: (0, 0))


def test_the_same_disk(tmp_path: Path) -> None:
    folder = RunFolder.at(str(tmp_path), "demo")
    lease = lease_of(folder)
    checkpoint = tmp_path / "c"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text("{}")
    told = fingerprint(str(checkpoint))
    assert seen_otherwise(folder.path, lease.epoch, str(checkpoint), told) is None
    assert seen_otherwise(folder.path, lease.epoch, None, fingerprint(None)) is None
    assert seen_otherwise(None, 0, None, None) is None


def test_another_disk(tmp_path: Path) -> None:
    folder = RunFolder.at(str(tmp_path), "demo")
    lease = lease_of(folder)
    checkpoint, foreign = tmp_path / "c", tmp_path / "w.ckpt"
    checkpoint.mkdir()
    foreign.write_bytes(b"12345")
    sees = seen_otherwise(str(tmp_path / "other"), 1, None, None)
    assert sees == f"the run's folder {tmp_path / 'other'} is not there"
    sees = seen_otherwise(folder.path, lease.epoch + 1, None, None)
    assert sees == f"the lease in {folder.path} is epoch 1, and the leader's is epoch 2"
    assert "cannot be read: No such file" in (
        seen_otherwise(folder.path, 1, str(checkpoint), "sha256:0") or ""
    )
    (checkpoint / "manifest.json").write_text("{}")
    assert "is another one than the leader's" in (seen_otherwise(None, 0, str(checkpoint), "sha256:0") or "")
    assert fingerprint(str(foreign)) == "size:5"
    os.unlink(foreign)
    assert "cannot be read" in (seen_otherwise(None, 0, str(foreign), "size:5") or "")
    lease.release()
    assert "the lease in" in (seen_otherwise(folder.path, lease.epoch, None, None) or "")


def test_configs_may_differ_in_how_ranks_are_launched() -> None:
    ours = "launch:\n  nproc: 1\nmodel:\n  width: 8\n"
    assert first_difference(ours, "launch:\n  nproc: 2\n  grace_s: 3\nmodel:\n  width: 8\n") is None
    assert first_difference(ours, "model:\n  width: 9\n") == "'width: 8', not 'width: 9'"
    assert first_difference(ours, "model:\n  width: 8\n  depth: 2\n") == "nothing, not 'depth: 2'"
