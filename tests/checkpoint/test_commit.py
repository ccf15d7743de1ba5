"""A commit is whole or absent, whatever ends it: a kill at a point, a full disk, an error in a writer."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from ckptrun import faults
from ckptrun.checkpoint.catalogue import Catalogue
from ckptrun.checkpoint.checksum import checksum_of
from ckptrun.checkpoint.commit import commit, delete, preflight, sweep, write_file
from ckptrun.checkpoint.manifest import Manifest, read_manifest
from ckptrun.errors import MisconfigurationException, SaveError, UsageError
from ckptrun.records import CheckpointRecord

OLD, NEW = "00000001-step-00000010", "00000002-step-00000020"
COMMIT_POINTS = [point for point in faults.POINTS if point.startswith("commit:")]
COMMITTED_AT = {"commit:manifest-renamed", "commit:done"}


def manifest(sequence: int, **changes: object) -> Manifest:
    values = {"run_id": "r", "sequence": sequence, "step": 10 * sequence, "epoch": 0, "reason": "periodic"}
    return Manifest(**{**values, **changes})  # type: ignore[arg-type]


def writes(data: bytes, times: int = 1) -> Callable[[BinaryIO], None]:
    def write(f: BinaryIO) -> None:
        for _ in range(times):
            f.write(data)

    return write


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A run's checkpoints with one in it."""
    path = tmp_path / "checkpoints"
    path.mkdir()
    commit(str(path), OLD, {"state.ckpt": writes(b"old" * 1000)}, manifest(1))
    return str(path)


def whole(folder: str) -> list[str]:
    """Names of the committed checkpoints, newest first, each verified to its last byte."""
    names = []
    for found in Catalogue(folder).newest_first():
        if isinstance(found, CheckpointRecord):
            for file in read_manifest(found.path).files:
                with open(os.path.join(found.path, file.path), "rb", buffering=0) as raw:
                    assert checksum_of(raw) == (file.checksum, file.size_bytes)
            names.append(found.name)
    return names


def run_python(script: str, *args: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", script, *args],
        env={**os.environ, faults.VARIABLE: fault},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# --- what a commit leaves ------------------------------------------------------------------------------


def test_files_manifest_and_nothing_else(folder: str) -> None:
    written = commit(
        folder,
        NEW,
        {"state.ckpt": writes(b"x" * 100_000, 30), "zero/rank-0000.ckpt": writes(b"rank")},
        manifest(2, save_s=1.5, line=((1, 2),)),
    )
    assert whole(folder) == [NEW, OLD]
    assert sorted(os.listdir(folder)) == [OLD, NEW]
    assert sorted(os.listdir(os.path.join(folder, NEW))) == ["manifest.json", "state.ckpt", "zero"]
    assert read_manifest(os.path.join(folder, NEW)) == written
    assert [(file.path, file.size_bytes) for file in written.files] == [
        ("state.ckpt", 3_000_000),
        ("zero/rank-0000.ckpt", 4),
    ]
    assert written.save_s >= 1.5
    assert written.saved_at > 1_600_000_000


def test_times_that_the_caller_set_stay(folder: str) -> None:
    assert commit(folder, NEW, {}, manifest(2, saved_at=12.0)).saved_at == 12.0


def test_small_and_large_pieces_keep_their_order(folder: str) -> None:
    pieces = [bytes([number]) * size for number, size in enumerate((1, 70_000, 3, 9_500_000, 0, 65_535, 1))]

    def write(f: BinaryIO) -> None:
        for piece in pieces:
            assert f.write(piece) == len(piece)

    commit(folder, NEW, {"state.ckpt": write}, manifest(2))
    assert Path(folder, NEW, "state.ckpt").read_bytes() == b"".join(pieces)
    assert whole(folder) == [NEW, OLD]


def test_the_folder_is_never_created(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="No such file or directory"):
        commit(str(tmp_path / "not-mounted"), NEW, {}, manifest(2))
    assert not (tmp_path / "not-mounted").exists()


def test_a_name_that_stands_is_not_overwritten(folder: str) -> None:
    os.mkdir(os.path.join(folder, NEW))  # an empty folder, which rename(2) would replace
    with pytest.raises(SaveError, match="exists already"):
        commit(folder, NEW, {"state.ckpt": writes(b"new")}, manifest(2))
    assert os.listdir(os.path.join(folder, NEW)) == []
    assert sorted(os.listdir(folder)) == [OLD, NEW]


# --- killed -------------------------------------------------------------------------------------------

WAYS = pytest.mark.parametrize(
    "past",
    [(), ("past the cache",), ("as it lies",)],
    ids=["through the cache", "past the cache", "as it lies"],
)
COMMIT_SCRIPT = """
import mmap
import sys
from ckptrun.checkpoint import past_cache
from ckptrun.checkpoint.commit import commit
from ckptrun.checkpoint.manifest import Manifest
past_cache.BLOCK_BYTES = 1 << 16
folder, name, *past = sys.argv[1:]
mapped = mmap.mmap(-1, 3_000_000)
mapped.write(b"new" * 1_000_000)
as_it_lies = [memoryview(mapped)]
pieces = as_it_lies if past == ["as it lies"] else [b"new" * 50_000] * 20
files = {
    "state.ckpt": lambda f: [f.write(piece) for piece in pieces],
    "rank-0000.ckpt": lambda f: f.write(b"r"),
}
manifest = Manifest(run_id="r", sequence=2, step=20, epoch=0, reason="periodic")
commit(folder, name, files, manifest, past_cache=bool(past))
"""


@WAYS
@pytest.mark.parametrize("point", COMMIT_POINTS)
def test_killed_at_every_point(folder: str, point: str, past: tuple[str, ...]) -> None:
    ended = run_python(COMMIT_SCRIPT, folder, NEW, *past, fault=f"{point}=kill")
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    committed = [NEW, OLD] if point in COMMITTED_AT else [OLD]
    assert whole(folder) == committed

    sweep(folder)
    assert whole(folder) == committed
    assert [name for name in os.listdir(folder) if name.startswith(".")] == []

    # Its run may also take away what was renamed and never got its manifest; nobody else's may.
    assert sweep(folder, run_id="other") == []
    sweep(folder, run_id="r")
    assert sorted(os.listdir(folder)) == sorted(committed)

    following = f"{Catalogue(folder).highest_sequence() + 1:08d}-step-00000030"
    commit(folder, following, {"state.ckpt": writes(b"next")}, manifest(int(following[:8])))
    assert whole(folder) == [following, *committed]


AMEND_SCRIPT = """
import os, sys
from dataclasses import replace
from ckptrun.checkpoint.manifest import amend
from ckptrun.storage import files
files.os.replace = lambda *_: os.kill(os.getpid(), 9)
amend(sys.argv[1], lambda manifest: replace(manifest, noted=({"reason": "manual", "owner": None, "job": None},)))
"""


def test_killed_while_adding_to_a_manifest(folder: str) -> None:
    before = sorted(os.listdir(f"{folder}/{OLD}"))
    ended = run_python(AMEND_SCRIPT, f"{folder}/{OLD}")
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert len(os.listdir(f"{folder}/{OLD}")) == len(before) + 1
    assert sweep(folder) == []
    assert sorted(os.listdir(f"{folder}/{OLD}")) == before
    assert whole(folder) == [OLD]


@WAYS
def test_killed_in_the_second_file(folder: str, past: tuple[str, ...]) -> None:
    ended = run_python(COMMIT_SCRIPT, folder, NEW, *past, fault="commit:file-half:2=kill")
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert whole(folder) == [OLD]
    [left] = [name for name in os.listdir(folder) if name != OLD]
    assert sweep(folder) == [left]


DELETE_SCRIPT = """
import sys
from ckptrun.checkpoint.commit import delete
delete(*sys.argv[1:])
"""


@pytest.mark.parametrize("point", [point for point in faults.POINTS if point.startswith("delete:")])
def test_killed_while_deleting(folder: str, point: str) -> None:
    commit(folder, NEW, {"state.ckpt": writes(b"new")}, manifest(2))
    ended = run_python(DELETE_SCRIPT, folder, OLD, fault=f"{point}=kill")
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert whole(folder) == ([NEW, OLD] if point == "delete:start" else [NEW])
    sweep(folder)
    assert [name for name in os.listdir(folder) if name.startswith(".")] == []


# --- errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", COMMIT_POINTS)
@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EIO"])
def test_an_error_at_every_point_leaves_what_was(folder: str, point: str, code: str) -> None:
    before = Path(folder, OLD, "manifest.json").read_bytes()
    with faults.armed(f"{point}=raise:{code}"), pytest.raises(SaveError) as raised:
        commit(folder, NEW, {"state.ckpt": writes(b"new" * 100)}, manifest(2), needed_bytes=7_500_000)
    assert os.listdir(folder) == [OLD]
    assert Path(folder, OLD, "manifest.json").read_bytes() == before
    error = raised.value
    assert isinstance(error.__cause__, OSError)
    assert NEW in error.message
    assert folder in error.message
    assert os.strerror(getattr(errno, code)) in error.message
    if code != "EIO":
        assert "7.5 MB were needed" in error.message
        assert "free on that disk" in error.message
        assert "keep fewer checkpoints" in str(error.hint)
    assert ("quota" in error.message) == (code == "EDQUOT")

    commit(folder, NEW, {"state.ckpt": writes(b"new")}, manifest(2))  # the same name serves a second try
    assert whole(folder) == [NEW, OLD]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[str]:
    """A real disk of 2 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a disk of its own can only be mounted by root")
    try:
        yield str(path)
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_what_cannot_fit_is_not_begun(small_disk: str) -> None:
    def never(_: BinaryIO) -> None:
        raise AssertionError("nothing is written")

    commit(small_disk, OLD, {"state.ckpt": writes(b"old")}, manifest(1))
    with pytest.raises(SaveError, match=r"4\.0 MB were needed; .* are free"):
        commit(small_disk, NEW, {"state.ckpt": never}, manifest(2), needed_bytes=4_000_000)
    assert whole(small_disk) == os.listdir(small_disk) == [OLD]


def test_a_full_disk(small_disk: str) -> None:
    import torch

    from ckptrun.checkpoint.state_file import write_state

    def write_of(num_values: int) -> Callable[[BinaryIO], None]:
        return lambda f: write_state(f, {"w": torch.ones(num_values), "b": torch.ones(3)})

    commit(small_disk, OLD, {"state.ckpt": write_of(100_000)}, manifest(1))
    assert preflight(small_disk, 1_000_000) is None
    warning = preflight(small_disk, 4_000_000)
    assert warning is not None
    assert "4.0 MB" in warning
    with pytest.raises(
        SaveError, match=r"No space left on device. About 4.0 MB were needed; 1.\d MB are free"
    ):
        commit(small_disk, NEW, {"state.ckpt": write_of(1_000_000)}, manifest(2), needed_bytes=4_000_000)
    assert os.listdir(small_disk) == [OLD]
    assert whole(small_disk) == [OLD]
    commit(small_disk, NEW, {"state.ckpt": write_of(200_000)}, manifest(2))
    assert whole(small_disk) == [NEW, OLD]


def test_a_limit_on_file_sizes(folder: str) -> None:
    script = COMMIT_SCRIPT.replace(
        "import sys", "import sys, resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))"
    )
    ended = run_python(script, folder, NEW)
    assert ended.returncode == 1
    assert os.strerror(errno.EFBIG) in ended.stderr
    assert os.listdir(folder) == [OLD]


def test_an_error_in_a_writer(folder: str) -> None:
    def fails(f: BinaryIO) -> None:
        f.write(b"some")
        raise RuntimeError("cannot serialize")

    with pytest.raises(SaveError, match="RuntimeError: cannot serialize"):
        commit(folder, NEW, {"state.ckpt": fails}, manifest(2))
    assert os.listdir(folder) == [OLD]


def test_errors_of_ours_and_interrupts_pass(folder: str) -> None:
    for error in (MisconfigurationException("key"), KeyboardInterrupt()):

        def fails(f: BinaryIO, error: BaseException = error) -> None:
            f.write(b"some")
            raise error

        with pytest.raises(type(error)) as raised:
            commit(folder, NEW, {"state.ckpt": fails}, manifest(2))
        assert raised.value is error
        assert os.listdir(folder) == [OLD]


def test_a_writer_that_hides_the_cause(folder: str) -> None:
    """torch's zip writer turns the disk's error into a RuntimeError of its own."""

    def hides(f: BinaryIO) -> None:
        try:
            f.write(b"x" * 100_000)
        except OSError:
            f.write(b"more")
            raise RuntimeError("unexpected position") from None

    with (
        faults.armed("commit:file-half=raise:ENOSPC"),
        pytest.raises(SaveError, match="No space left on device"),
    ):
        commit(folder, NEW, {"state.ckpt": hides}, manifest(2))

    def swallows(f: BinaryIO) -> None:
        try:
            f.write(b"x" * 100_000)
        except OSError:
            pass

    with faults.armed("commit:file-half=raise:EIO"), pytest.raises(SaveError, match="Input/output error"):
        commit(folder, NEW, {"state.ckpt": swallows}, manifest(2))
    assert os.listdir(folder) == [OLD]


# --- deleting and sweeping ----------------------------------------------------------------------------


def test_delete(folder: str) -> None:
    assert delete(folder, OLD)
    assert os.listdir(folder) == []
    assert not delete(folder, OLD)


def test_delete_touches_only_what_ckptrun_wrote(folder: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    os.symlink(tmp_path / "mine", os.path.join(folder, NEW))
    os.mkdir(os.path.join(folder, "my-own"))
    for name in ("my-own", NEW, "..", "", ".tmp-" + OLD, f"../{OLD}"):
        with pytest.raises(ValueError, match="nothing that ckptrun wrote"):
            delete(folder, name)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"
    assert sorted(os.listdir(folder)) == [OLD, NEW, "my-own"]


def test_sweep_touches_only_leftovers(folder: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    stay = [".tmp-cache", ".trash-", ".tmpfile", "notes", f".tmp-{NEW}.file", f".trash-{NEW}.link"]
    for name in stay[:4]:
        os.mkdir(os.path.join(folder, name))
    Path(folder, stay[4]).write_text("a file")
    os.symlink(tmp_path / "mine", os.path.join(folder, stay[5]))
    go = [f".tmp-{NEW}", f".tmp-{NEW}.123-0123abcd", f".trash-{OLD}.9-ffffffff", ".trash-100000000-best"]
    for name in go:
        os.makedirs(os.path.join(folder, name, "zero"))
        Path(folder, name, "zero", "state.ckpt").write_bytes(b"left")
        os.symlink(tmp_path / "mine", os.path.join(folder, name, "link"))
    assert sweep(folder) == sorted(go)
    assert sorted(os.listdir(folder)) == sorted([OLD, *stay])
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"
    assert sweep(folder) == []
    assert sweep(os.path.join(folder, "absent")) == []


def test_a_folder_that_does_not_say_whose_it_is_stays(folder: str) -> None:
    """A checkpoint that is being copied by hand has its files before its manifest."""
    for name, manifest_text in (
        (NEW, None),
        ("00000003-a", b"{"),
        ("00000004-a", manifest(4, run_id="x").to_json()),
    ):
        os.mkdir(os.path.join(folder, name))
        Path(folder, name, "state.ckpt").write_bytes(b"copied")
        if manifest_text is not None:
            Path(folder, name, ".manifest.json.tmp").write_bytes(manifest_text)
    assert sweep(folder, run_id="r") == []
    assert len(os.listdir(folder)) == 4


def test_two_writers_of_one_name_share_no_file(folder: str) -> None:
    """A writer that lost the lease and does not know it: the second to finish gets the error."""

    def write_while_another_commits(f: BinaryIO) -> None:
        commit(folder, NEW, {"state.ckpt": writes(b"first")}, manifest(2, lease_epoch=2))
        f.write(b"second")

    with pytest.raises(SaveError, match="exists already"):
        commit(folder, NEW, {"state.ckpt": write_while_another_commits}, manifest(2, lease_epoch=1))
    assert whole(folder) == [NEW, OLD]
    assert read_manifest(os.path.join(folder, NEW)).lease_epoch == 2


# --- preflight and faults -----------------------------------------------------------------------------


def test_preflight(folder: str) -> None:
    assert preflight(folder, 1) is None
    warning = preflight(folder, 10**18)
    assert warning is not None
    assert "1000000.0 TB" in warning
    assert "are free in" in warning
    assert "cannot be told" in str(preflight(os.path.join(folder, "absent"), 1))


def test_faults_count_arrivals() -> None:
    with faults.armed("state:read:2=raise:EIO, commit:start:2+=raise:ENOSPC"):
        faults.reach("state:read")
        with pytest.raises(OSError, match="Input/output error") as raised:
            faults.reach("state:read", "a/path")
        assert raised.value.filename == "a/path"
        faults.reach("state:read")
        faults.reach("commit:start")
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                faults.reach("commit:start")
    faults.reach("state:read")


def test_a_process_halts_at_a_point_and_goes_on() -> None:
    script = "from ckptrun import faults; faults.reach('registry:written'); print('went on')"
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", script],
        env={**os.environ, faults.VARIABLE: "registry:written=halt"},
        stdout=subprocess.PIPE,
    )
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    child.send_signal(signal.SIGCONT)
    out, _ = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, b"went on\n")


@pytest.mark.parametrize("spec", ["commit:start", "commit:strat=kill", "commit:start=raise:ENOPE", "x=kill"])
def test_a_fault_that_is_written_wrongly_is_an_error(spec: str) -> None:
    with pytest.raises(UsageError, match=faults.VARIABLE), faults.armed(spec):
        pass


def test_a_manifest_is_json_with_the_bytes_that_were_written(folder: str) -> None:
    document = json.loads(Path(folder, OLD, "manifest.json").read_text())
    assert document["files"] == [
        {
            "path": "state.ckpt",
            "size_bytes": 3000,
            "checksum": document["files"][0]["checksum"],
        }
    ]
    assert document["files"][0]["checksum"].startswith("xxh3_64:")
    assert len(document["files"][0]["checksum"]) == len("xxh3_64:") + 16


def test_a_folder_that_is_gone_is_not_made_again_for_one_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_file(str(tmp_path / "gone"), "a/b/c.pt", writes(b"x"))
    assert os.listdir(tmp_path) == []
    write_file(str(tmp_path), "a/b/c.pt", writes(b"x"))
    write_file(str(tmp_path), "a/b/d.pt", writes(b"x"))
    assert sorted(os.listdir(tmp_path / "a/b")) == ["c.pt", "d.pt"]
