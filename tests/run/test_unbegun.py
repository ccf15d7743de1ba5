"""A run's files after an attempt that has started nothing."""

from __future__ import annotations

import os
from pathlib import Path

from ckptrun.records import AttemptRecord
from ckptrun.run.attempts import append_end, append_start, read_attempts
from ckptrun.run.folder import RunFolder
from ckptrun.run.identity import ensure_identity
from ckptrun.run.unbegun import Unbegun


def begin(folder: RunFolder, attempt: int) -> None:
    ensure_identity(folder, ("ckptrun", "fit"))
    append_start(folder.attempts, AttemptRecord(attempt=attempt, fn="fit", started_at=1.0), versions={})
    Path(folder.status).write_text(f'{{"attempt": {attempt}}}')
    Path(folder.config_yaml).write_text(f"attempt: {attempt}\n")
    for rank in range(2):
        Path(folder.logs_dir, f"attempt-{attempt:04d}-rank-{rank:04d}.log").write_text("a traceback\n")


def end(folder: RunFolder, attempt: int) -> None:
    numbers = dict.fromkeys(("step", "sequence", "steps_gained", "steps_replayed", "exit_code"), 0)
    append_end(
        folder.attempts,
        attempt,
        status="INTERRUPTED",
        stop_reason="exception",
        save_s=0.0,
        restore_s=0.0,
        **numbers,  # type: ignore[arg-type]
    )


def files(folder: RunFolder) -> dict[str, bytes]:
    return {
        os.path.relpath(path, folder.path): path.read_bytes()
        for path in sorted(Path(folder.path).rglob("*"))
        if path.is_file()
    }


def test_a_new_run_is_none_again(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path / "demo"))
    folder.create()
    before = Unbegun(folder)
    begin(folder, 1)
    end(folder, 1)
    before.put_back(1)
    assert files(folder) == {}
    assert not folder.exists()


def test_an_older_run_is_as_it_was(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path / "demo"))
    folder.create()
    begin(folder, 1)
    end(folder, 1)
    was = files(folder)
    before = Unbegun(folder)
    begin(folder, 2)
    end(folder, 2)
    assert [each.attempt for each in read_attempts(folder.attempts)] == [1, 2]
    before.put_back(2)
    assert files(folder) == was
