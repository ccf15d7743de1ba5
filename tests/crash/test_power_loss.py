"""Is the newest committed checkpoint whole, at whatever moment the power goes?

What commit() and delete() ask of the file system is recorded while they do it, in a model of what a disk may have kept
when the power goes after any of these calls:

    of a file     what was in it at its last fsync; of what was written since, nothing, half, or all
    of a folder   its entries at its last fsync; each change since (a name made, renamed or removed) or not, in every
                  combination, as no order between them is promised

Each state that can be left is made in a folder and read as every command reads it.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckptrun.checkpoint.catalogue import Catalogue
from ckptrun.checkpoint.checksum import checksum_of
from ckptrun.checkpoint.commit import commit, delete
from ckptrun.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from ckptrun.records import CheckpointRecord, RejectedRecord
from ckptrun.storage.files import append_line, create_exclusive, write_atomic

OLD, NEW = "00000001-step-00000010", "00000002-step-00000020"


@dataclass
class File:
    path: str  # where its bytes can be read now
    synced: bytes = b""


@dataclass
class Folder:
    entries: dict[str, Node] = field(default_factory=dict)  # now
    synced: dict[str, Node] = field(default_factory=dict)
    pending: list[dict[str, Node | None]] = field(
        default_factory=list
    )  # changes since, each whole or not at all


Node = File | Folder


class Disk:
    """The model, kept beside the real folder while the calls are made there.

    ``moments`` has, after each call, everything that the disk may hold if the power goes then.
    """

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.tree = self._as_it_is(self.root)
        self.moments: list[tuple[str, list[dict[str, bytes]]]] = []
        self.num_syncs = 0
        self.forgets: int | None = None  # the fsync that does nothing, counted from 0

    def _as_it_is(self, path: str) -> Folder:
        folder = Folder()
        for entry in os.scandir(path):
            if entry.is_dir():
                folder.entries[entry.name] = self._as_it_is(entry.path)
            else:
                folder.entries[entry.name] = File(entry.path, Path(entry.path).read_bytes())
        folder.synced = dict(folder.entries)
        return folder

    # -- what the calls do

    def find(self, path: str) -> tuple[Folder, str] | None:
        """The folder that ``path`` is in, and its name there; None outside of the root."""
        relative = os.path.relpath(path, self.root)
        if relative.split(os.sep)[0] == "..":
            return None
        *above, name = relative.split(os.sep)
        folder = self.tree
        for part in above:
            inner = folder.entries[part]
            assert isinstance(inner, Folder)
            folder = inner
        return folder, name

    def node(self, path: str) -> Node | None:
        found = self.find(path)
        if found is None:
            return None
        return self.tree if found[1] == "." else found[0].entries.get(found[1])

    def edit(self, folder: Folder, changes: dict[str, Node | None]) -> None:
        for name, node in changes.items():
            if node is None:
                folder.entries.pop(name, None)
            else:
                folder.entries[name] = node
        folder.pending.append(changes)

    def sync(self, node: Node | None) -> None:
        self.num_syncs += 1
        if self.num_syncs - 1 == self.forgets:
            return
        if isinstance(node, Folder):
            node.synced, node.pending = dict(node.entries), []
        elif isinstance(node, File):
            node.synced = Path(node.path).read_bytes()

    def moved(self, node: Node, path: str) -> None:
        if isinstance(node, File):
            node.path = path
            return
        for name, inner in node.entries.items():
            self.moved(inner, os.path.join(path, name))

    def after(self, call: str) -> None:
        self.moments.append((call, list(self.states())))

    # -- what the disk may hold

    def states(self) -> Iterator[dict[str, bytes]]:
        """Every content that may be left, as path -> bytes; a folder without files as ``path/`` -> b""."""
        seen = set()
        for of_unsynced in (lambda data: b"", lambda data: data[: len(data) // 2], lambda data: data):
            for state in self._of_folder(self.tree, "", of_unsynced):
                key = tuple(sorted(state.items()))
                if key not in seen:
                    seen.add(key)
                    yield state

    def _of_folder(
        self, folder: Folder, prefix: str, of_unsynced: Callable[[bytes], bytes]
    ) -> list[dict[str, bytes]]:
        states = []
        for kept in itertools.product((False, True), repeat=len(folder.pending)):
            entries = dict(folder.synced)
            for changes in itertools.compress(folder.pending, kept):
                for name, node in changes.items():
                    if node is None:
                        entries.pop(name, None)
                    else:
                        entries[name] = node
            parts: list[list[dict[str, bytes]]] = [[{prefix: b""}] if prefix else [{}]]
            for name, node in entries.items():
                path = prefix + name
                if isinstance(node, Folder):
                    parts.append(self._of_folder(node, path + "/", of_unsynced))
                else:
                    parts.append([{path: self._of_file(node, of_unsynced)}])
            for combination in itertools.product(*parts):
                states.append({path: data for part in combination for path, data in part.items()})
        return states

    def _of_file(self, file: File, of_unsynced: Callable[[bytes], bytes]) -> bytes:
        try:
            now = Path(file.path).read_bytes()
        except FileNotFoundError:
            return file.synced  # removed since; what is left of it is what was synced
        return file.synced + of_unsynced(now[len(file.synced) :]) if now.startswith(file.synced) else now


@contextlib.contextmanager
def recorded(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Record what is asked of the file system below ``root``."""
    disk = Disk(root)
    real = {
        name: getattr(os, name) for name in ("mkdir", "open", "rename", "replace", "link", "unlink", "rmdir")
    }
    real_fsync, real_open, real_write = os.fsync, builtins.open, os.write

    def full(path: Any, dir_fd: int | None) -> str:
        path = os.fspath(path)
        return path if dir_fd is None else os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)

    def created(path: str) -> None:
        found = disk.find(path)
        if found is not None and found[1] not in found[0].entries:
            disk.edit(found[0], {found[1]: File(path)})
            disk.after(f"create {found[1]}")

    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        real["mkdir"](path, mode, dir_fd=dir_fd)
        found = disk.find(full(path, dir_fd))
        if found is not None:
            disk.edit(found[0], {found[1]: Folder()})
            disk.after(f"mkdir {found[1]}")

    def os_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        fd: int = real["open"](path, flags, mode, dir_fd=dir_fd)
        if flags & os.O_CREAT:
            created(full(path, dir_fd))
        return fd

    def python_open(file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        opened = real_open(file, mode, *more, **options)
        if isinstance(file, (str, os.PathLike)) and mode[0] in "xwa":
            created(os.fspath(file))
        return opened

    def move(name: str) -> Callable[..., None]:
        def moving(source: Any, target: Any, **options: Any) -> None:
            node = disk.node(os.fspath(source))
            real[name](source, target, **options)
            old, new = disk.find(os.fspath(source)), disk.find(os.fspath(target))
            if node is None or old is None or new is None:
                return
            assert old[0] is new[0], "a rename between two folders is two changes, which nothing here makes"
            disk.edit(old[0], {new[1]: node} if name == "link" else {old[1]: None, new[1]: node})
            disk.moved(node, os.fspath(target))
            disk.after(f"{name} {old[1]} {new[1]}")

        return moving

    def remove(name: str) -> Callable[..., None]:
        def removing(path: Any, *, dir_fd: int | None = None) -> None:
            whole = full(path, dir_fd)
            real[name](path, dir_fd=dir_fd)
            found = disk.find(whole)
            if found is not None:
                disk.edit(found[0], {found[1]: None})
                disk.after(f"{name} {found[1]}")

        return removing

    def fsync(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        disk.after(f"before fsync {os.path.basename(path)}")
        real_fsync(fd)
        disk.sync(disk.node(path))
        disk.after(f"fsync {os.path.basename(path)}")

    def write(fd: int, data: Any) -> int:
        count = real_write(fd, data)
        disk.after("write")
        return count

    with monkeypatch.context() as patch:
        for function, name in ((mkdir, "mkdir"), (os_open, "open"), (fsync, "fsync"), (write, "write")):
            patch.setattr(os, name, function)
        for name in ("rename", "replace", "link"):
            patch.setattr(os, name, move(name))
        for name in ("unlink", "rmdir"):
            patch.setattr(os, name, remove(name))
        patch.setattr(builtins, "open", python_open)
        yield disk
    assert disk.moments


def lay_out(state: dict[str, bytes], folder: Path) -> Path:
    """Make a state of the disk; what is there from the one before goes."""
    folder.mkdir(parents=True)
    for path, data in state.items():
        target = folder / path
        if path.endswith("/"):
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    return folder


def manifest(sequence: int) -> Manifest:
    return Manifest(run_id="r", sequence=sequence, step=10 * sequence, epoch=0, reason="periodic")


def save(checkpoints: Path, name: str, sequence: int, *, past_cache: bool = False) -> None:
    files = {
        "state.ckpt": lambda file: file.write(bytes([sequence]) * 3000),
        "sub/rank-0000.ckpt": lambda file: file.write(bytes([sequence]) * 100),
    }
    commit(str(checkpoints), name, files, manifest(sequence), past_cache=past_cache)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A run's checkpoints with one in it, all of it durable."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    save(folder, OLD, 1)
    return folder


def whole(checkpoints: Path) -> list[str]:
    """Names of the committed checkpoints, newest first; a folder with a manifest has to be whole to its last byte."""
    found = []
    for examined in Catalogue(str(checkpoints)).newest_first():
        if isinstance(examined, RejectedRecord):
            assert not os.path.exists(os.path.join(examined.path, MANIFEST_NAME)), examined.why
            continue
        assert isinstance(examined, CheckpointRecord)
        for entry in read_manifest(examined.path).files:
            with io.FileIO(os.path.join(examined.path, entry.path)) as raw:
                assert checksum_of(raw) == (entry.checksum, entry.size_bytes)
        found.append(examined.name)
    return found


def left(disk: Disk, tmp_path: Path) -> Iterator[tuple[int, str, Path]]:
    """Every state after every call, laid out: the number of the call, its words, the folder."""
    number = itertools.count()
    for moment, (call, states) in enumerate(disk.moments):
        for state in states:
            yield moment, call, lay_out(state, tmp_path / "after" / str(next(number)))


@pytest.mark.parametrize("past_cache", [False, True])
def test_a_commit(
    past_cache: bool, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded(checkpoints, monkeypatch) as disk:
        save(checkpoints, NEW, 2, past_cache=past_cache)
    assert [call for call, _ in disk.moments if NEW in call and call.startswith("rename")]
    seen = set()
    for moment, call, folder in left(disk, tmp_path):
        found = whole(folder)
        assert found in ([OLD], [NEW, OLD]), call
        seen.add((moment, len(found)))
    last = len(disk.moments) - 1
    assert (last, 1) not in seen, "commit() has returned, and power loss takes the checkpoint"
    assert (last, 2) in seen and (0, 2) not in seen


def test_a_deletion(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(checkpoints, NEW, 2)
    with recorded(checkpoints, monkeypatch) as disk:
        delete(str(checkpoints), OLD)
    assert os.listdir(checkpoints) == [NEW]
    seen = set()
    for _, call, folder in left(disk, tmp_path):
        found = whole(folder)
        assert found in ([NEW], [NEW, OLD]), call
        seen.add(tuple(found))
    assert len(seen) == 2


def test_a_commit_that_fails(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(file: Any) -> None:
        file.write(b"x" * 10)
        raise ValueError("no")

    with recorded(checkpoints, monkeypatch) as disk, pytest.raises(Exception, match="no"):
        commit(str(checkpoints), NEW, {"state.ckpt": broken}, manifest(2))
    for _, call, folder in left(disk, tmp_path):
        assert whole(folder) == [OLD], call


@pytest.mark.parametrize("nth", range(7))
def test_each_fsync_of_a_commit_is_needed(
    nth: int, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any one of them some state is wrong; else the tests above would show nothing."""
    with recorded(checkpoints, monkeypatch) as disk:
        disk.forgets = nth
        save(checkpoints, NEW, 2)
    assert disk.num_syncs == 7
    found = []
    for moment, _, folder in left(disk, tmp_path):
        try:
            found.append((moment, whole(folder)))
        except AssertionError:
            found.append((moment, ["damaged"]))
    last = len(disk.moments) - 1
    assert any(names == ["damaged"] or (moment == last and names == [OLD]) for moment, names in found)


@pytest.mark.parametrize("existing", [b"old\n", None])
def test_small_durable_files(existing: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registry, lease and config are the old or the new one; `run.json` is there whole or not at all."""
    root = tmp_path / "run"
    root.mkdir()
    path = root / "registry.json"
    if existing is not None:
        path.write_bytes(existing)
    with recorded(root, monkeypatch) as disk:
        if existing is None:
            assert create_exclusive(str(path), b"new\n")
        else:
            write_atomic(str(path), b"new\n", durable=True)
    for moment, call, folder in left(disk, tmp_path):
        target = folder / "registry.json"
        found = target.read_bytes() if target.exists() else None
        assert found in (existing, b"new\n"), call
        if moment == len(disk.moments) - 1:
            assert found == b"new\n"


def test_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the line that was being written can be torn, and what is appended later does not join it."""
    root = tmp_path / "run"
    root.mkdir()
    path = root / "attempts.jsonl"
    append_line(str(path), '{"first": 1}')
    with recorded(root, monkeypatch) as disk:
        append_line(str(path), '{"second": 2}')
    whole_line = b'{"first": 1}\n'
    for moment, call, folder in left(disk, tmp_path):
        found = (folder / "attempts.jsonl").read_bytes()
        assert found.startswith(whole_line), call
        append_line(str(folder / "attempts.jsonl"), '{"third": 3}')
        lines = (folder / "attempts.jsonl").read_bytes().splitlines()
        assert (lines[0], lines[-1]) == (whole_line.strip(), b'{"third": 3}')
        if moment == len(disk.moments) - 1:
            assert lines[1] == b'{"second": 2}'
