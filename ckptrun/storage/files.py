"""How is a local file written so that it survives a crash?

Decision: every small file is replaced whole (temporary name in the same folder, then ``os.replace``), so
that a reader sees the old or the new one and never a torn one. ``durable=True`` also makes it survive power
loss, at the price of two fsyncs. Turned down: writing in place under a lock, which a SIGKILL leaves half
done.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from typing import Any

from ckptrun import faults


def fsync_dir(path: str) -> None:
    """Make the entries of a folder durable: after a rename or a create, before anything relies on it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: str, data: bytes, *, durable: bool, point: str | None = None) -> None:
    """Replace ``path`` by ``data``.

    The temporary file carries the writer's process and thread, so that two writers never share one.

    Args:
        point: what :mod:`ckptrun.faults` calls this file, for tests that kill around its rename.

    Raises:
        OSError: the file could not be written; ``path`` is as it was and the temporary file is gone.
    """
    folder, name = os.path.split(path)
    temporary = _temporary_name(folder, name)
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        if point is not None:
            faults.reach(f"{point}:written", temporary)
        os.replace(temporary, path)
        if point is not None:
            faults.reach(f"{point}:renamed", path)
    except BaseException:
        try:
            os.unlink(temporary)
        except FileNotFoundError:
            pass
        raise
    if durable:
        fsync_dir(folder or ".")


def write_json_atomic(
    path: str, value: Any, *, durable: bool, indent: int | None = 1, point: str | None = None
) -> None:
    """Replace ``path`` by ``value`` as JSON; see :func:`write_atomic`."""
    write_atomic(path, json.dumps(value, indent=indent).encode() + b"\n", durable=durable, point=point)


def append_line(path: str, line: str) -> None:
    """Append one line in a single write and make it durable; a torn line can only ever be the last one.

    Where an earlier writer died in the middle of its line, a newline is put in between first, so that its
    torn line does not swallow this one.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        faults.reach("ledger:opened", path)
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        view = memoryview((b"\n" if torn else b"") + line.encode() + b"\n")
        while view:  # one write, but for a disk that is filling up: there the next one says so
            view = view[os.write(fd, view) :]
        faults.reach("ledger:written", path)
        os.fsync(fd)
        if size == 0:
            fsync_dir(os.path.dirname(path) or ".")
    finally:
        os.close(fd)


def create_exclusive(path: str, data: bytes, *, point: str | None = None) -> bool:
    """Create ``path`` with ``data``, whole and durable, unless it exists. False where it does.

    Of several that try at once exactly one succeeds, and no reader sees a part of the file. ``point`` as in
    :func:`write_atomic`.

    Raises:
        OSError: it could not be written; nothing is left behind.
    """
    folder, name = os.path.split(path)
    temporary = _temporary_name(folder, name)
    try:
        write_atomic(temporary, data, durable=True)
        if point is not None:
            faults.reach(f"{point}:written", temporary)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            # No hard links here (FAT, some network mounts). The exclusive create decides who may write; a
            # reader in between could see an empty file, so this is the second choice.
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            except FileExistsError:
                return False
            os.replace(temporary, path)
        if point is not None:
            faults.reach(f"{point}:renamed", path)
        fsync_dir(folder or ".")
        return True
    finally:
        try:
            os.unlink(temporary)
        except FileNotFoundError:
            pass


def _temporary_name(folder: str, name: str) -> str:
    return os.path.join(folder, f".{name}.tmp-{os.getpid()}-{threading.get_native_id()}")
