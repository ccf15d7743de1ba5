"""The ledger of attempts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ckptrun.records import AttemptRecord, Status, StopReason
from ckptrun.run.attempts import append_end, append_exit, append_start, next_attempt, read_attempts

FIRST = AttemptRecord(
    attempt=1, fn="fit", started_at=10.0, reference="step:1000", rule=2, resolved="/runs/a/checkpoints/1",
    job="1230_4", command_key="k", start_sequence=3, start_step=1000,
)  # fmt: skip


def _end(path: str, attempt: int, **changes: object) -> None:
    values = {
        "status": Status.INTERRUPTED, "stop_reason": StopReason.SIGTERM, "exit_code": 143, "step": 1200,
        "sequence": 5, "steps_gained": 150, "steps_replayed": 50, "save_s": 0.12345, "restore_s": 1.0,
    }  # fmt: skip
    append_end(path, attempt, **{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "attempts.jsonl")


def test_no_ledger(path: str) -> None:
    assert read_attempts(path) == []
    assert next_attempt([]) == 1


def test_start_and_end(path: str) -> None:
    append_start(path, FIRST, versions={"torch": "2.9"})
    assert read_attempts(path) == [FIRST]
    _end(path, 1)
    [read] = read_attempts(path)
    assert read.ended_at is not None
    assert dataclasses.replace(read, ended_at=None) == dataclasses.replace(
        FIRST, status="INTERRUPTED", stop_reason="sigterm", exit_code=143, end_step=1200, end_sequence=5
    )
    append_start(path, dataclasses.replace(FIRST, attempt=2), versions={})
    assert next_attempt(read_attempts(path)) == 3


def test_an_exit_code_that_became_another_one(path: str) -> None:
    append_start(path, FIRST, versions={})
    append_exit(path, 2, exit_code=1, why="of nobody")
    _end(path, 1, exit_code=75)
    append_exit(path, 1, exit_code=143, why="walltime")
    [read] = read_attempts(path)
    assert (read.exit_code, read.status, read.end_step) == (143, "INTERRUPTED", 1200)


def test_what_a_reader_of_the_file_finds(path: str) -> None:
    append_start(path, FIRST, versions={"torch": "2.9"})
    _end(path, 1, error="disk full")
    start, end = (json.loads(line) for line in Path(path).read_text().splitlines())
    assert start["event"] == "start"
    assert start["versions"] == {"torch": "2.9"}
    assert "status" not in start
    assert list(end) == [
        "event", "attempt", "ended_at", "status", "stop_reason", "exit_code", "step", "sequence",
        "steps_gained", "steps_replayed", "save_s", "restore_s", "error",
    ]  # fmt: skip
    assert (end["status"], end["stop_reason"], end["save_s"]) == ("INTERRUPTED", "sigterm", 0.123)


@pytest.mark.parametrize(
    "torn", [b'{"event": "end", "attempt": 1, "stat', b"\xff\xfe", b"[1]", b'{"event": "end"}']
)
def test_a_torn_line_is_passed_over_wherever_it_stands(path: str, torn: bytes) -> None:
    append_start(path, FIRST, versions={})
    with open(path, "ab") as file:
        file.write(torn)
    assert read_attempts(path) == [FIRST]
    append_start(path, dataclasses.replace(FIRST, attempt=2), versions={})
    assert [attempt.attempt for attempt in read_attempts(path)] == [1, 2]


def test_a_line_of_a_newer_version_is_read(path: str) -> None:
    Path(path).write_text(
        '{"event": "start", "attempt": 7, "fn": "test", "new": 1}\n{"event": "pause", "attempt": 7}\n'
    )
    assert read_attempts(path) == [AttemptRecord(7, "test", 0.0)]


def test_one_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        read_attempts(str(tmp_path))
