"""Small files that are replaced whole, and lines that are appended."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckptrun.storage import files


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_whole_and_nothing_is_left(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    files.write_json_atomic(str(path), {"a": 1}, durable=durable)
    assert path.read_text() == '{\n "a": 1\n}\n'
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_goes_wrong_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for write in (
        lambda: files.write_atomic(str(path), b"new", durable=True),
        lambda: files.create_exclusive(str(tmp_path / "b"), b"new"),
    ):
        with pytest.raises(OSError, match="No space left"):
            write()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_line_after_a_torn_one_stands_on_its_own(tmp_path: Path) -> None:
    path = tmp_path / "log"
    files.append_line(str(path), "one")
    with path.open("ab") as file:
        file.write(b"to")
    files.append_line(str(path), "three")
    assert path.read_text() == "one\nto\nthree\n"


def test_create_exclusive_never_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert files.create_exclusive(str(path), b"first")
    assert not files.create_exclusive(str(path), b"second")
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["a"]


def test_create_exclusive_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    test_create_exclusive_never_replaces(tmp_path)


def test_of_several_that_create_at_once_one_wins(tmp_path: Path) -> None:
    code = (
        "import os, sys; from ckptrun.storage.files import create_exclusive as c; sys.stdin.read(1); "
        "print(c(sys.argv[1], str(os.getpid()).encode()), os.getpid())"
    )
    path = tmp_path / "a"
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    said = [one.communicate("x")[0].split() for one in starters]
    winners = [pid for won, pid in said if won == "True"]
    assert winners == [path.read_text()]


def test_threads_that_replace_the_same_file_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    texts = [b"a" * 100_000, b"b" * 50_000]

    def write(text: bytes) -> None:
        for _ in range(50):
            files.write_atomic(str(path), text, durable=False)
            assert path.read_bytes() in texts

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, texts))
    assert [entry.name for entry in tmp_path.iterdir()] == ["status.json"]
