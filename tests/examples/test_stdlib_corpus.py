"""The text to train on: the same on every reading, split by file, and known by its hash."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptrun.errors import MisconfigurationException
from ckptrun.examples import stdlib_corpus
from ckptrun.examples.stdlib_corpus import END_OF_FILE, held_out, read_corpus

# Names on either side of the split.
TRAIN = next(f"t{i}.py" for i in range(1000) if not held_out(f"t{i}.py"))
VAL = next(f"v{i}.py" for i in range(1000) if held_out(f"v{i}.py"))


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of one file to train on and one that is held out."""
    monkeypatch.setattr(stdlib_corpus, "_LEAST_BYTES", 1)
    (tmp_path / TRAIN).write_bytes(b"train")
    (tmp_path / VAL).write_bytes(b"val")
    return tmp_path


def test_this_machines_library_is_megabytes_and_reads_the_same_twice() -> None:
    corpus = read_corpus()
    assert len(corpus.train) > 2_000_000
    assert len(corpus.val) > 100_000
    assert corpus.num_files > 100
    assert b"def " in corpus.val
    assert read_corpus() == corpus


def test_files_are_joined_in_the_order_of_their_names(library: Path) -> None:
    first, second = sorted([TRAIN, next(f"s{i}.py" for i in range(1000) if not held_out(f"s{i}.py"))])
    (library / first).write_bytes(b"first")
    (library / second).write_bytes(b"second")
    assert read_corpus(str(library)).train == b"first" + END_OF_FILE + b"second"


@pytest.mark.parametrize(
    "path",
    [
        "site-packages/a.py",
        "test/a.py",
        "json/tests/a.py",
        "config-3.11/a.py",
        "_sysconfigdata_x.py",
        "a.txt",
    ],
)
def test_what_is_no_part_of_the_library_is_left_out(library: Path, path: str) -> None:
    before = read_corpus(str(library))
    (library / path).parent.mkdir(parents=True, exist_ok=True)
    (library / path).write_bytes(b"other")
    assert read_corpus(str(library)) == before


def test_files_that_cannot_be_read_are_counted_and_passed_over(library: Path) -> None:
    before = read_corpus(str(library))
    (library / "dangling.py").symlink_to(library / "gone.py")
    (library / "folder.py").mkdir()
    after = read_corpus(str(library))
    assert after.num_unreadable == 1
    assert after.fingerprint == before.fingerprint


def test_the_split_is_decided_by_name_alone(library: Path) -> None:
    before = read_corpus(str(library))
    another = next(f"u{i}.py" for i in range(1000) if held_out(f"u{i}.py"))
    (library / another).write_bytes(b"more")
    after = read_corpus(str(library))
    assert after.train == before.train
    assert after.val == b"more" + END_OF_FILE + b"val"


def test_the_fingerprint_tells_text_and_split_apart(library: Path) -> None:
    found = {read_corpus(str(library)).fingerprint}
    (library / TRAIN).write_bytes(b"trainv")
    (library / VAL).write_bytes(b"al")  # the same bytes, split elsewhere
    found.add(read_corpus(str(library)).fingerprint)
    (library / VAL).write_bytes(b"an")
    found.add(read_corpus(str(library)).fingerprint)
    assert len(found) == 3


def test_a_folder_with_too_little_text_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="holds 0 bytes of Python source to train on"):
        read_corpus(str(tmp_path))
