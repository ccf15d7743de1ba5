"""Which text is there to train on, on every machine? The source of its own Python standard library.

    <stdlib>/argparse.py ─┐                            ┌─ train: about 19 files of 20
    <stdlib>/ast.py       ├─ sorted by path, kept or ──┤
    <stdlib>/json/...     ┘  held out file by file     └─ val:   the others

Decision: the text is read where it lies, whole, and identified by a hash, because another Python release has
another library; a checkpoint carries the hash and says so when it is continued on other text. Turned down:
shipping or downloading a corpus, which needs space in the package or a network where training runs.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from ckptrun.errors import MisconfigurationException

END_OF_FILE = b"\x00"  # stands between files; it cannot occur in Python source

# Tests and tables: large, repetitive, and not what one wants to see more of. What is installed beside the
# library (site-packages) is not the same on two machines with the same Python.
_SKIPPED_FOLDERS = {
    *("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"),
    *("idlelib", "lib2to3", "turtledemo", "encodings", "pydoc_data"),
}
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata")  # what this build was configured with

_VAL_SHARE = 20  # one file in so many is held out
_LEAST_BYTES = 100_000  # of a split; less is no library but a stub of one


@dataclass(frozen=True)
class Corpus:
    """The text, in two parts that share no file.

    Attributes:
        train, val: the files' bytes, ``END_OF_FILE`` between them.
        num_files: files in both together.
        num_unreadable: files that were there and could not be read.
        fingerprint: 16 hex digits that are the same only for the same text and split.
    """

    train: bytes
    val: bytes
    num_files: int
    num_unreadable: int
    fingerprint: str


def read_corpus(root: str | None = None) -> Corpus:
    """Read every Python file under ``root``.

    Args:
        root: a folder; by default the standard library of the Python that runs.

    Raises:
        MisconfigurationException: there is too little text in it, as where the library lies in a zip file.
    """
    root = sysconfig.get_path("stdlib") if root is None else root
    train: list[bytes] = []
    val: list[bytes] = []
    num_unreadable = 0
    for relative in _python_files(root):
        try:
            with open(os.path.join(root, relative), "rb") as file:
                text = file.read()
        except OSError:  # a dangling link, or not ours to read
            num_unreadable += 1
            continue
        (val if held_out(relative) else train).append(text)
    joined = END_OF_FILE.join(train), END_OF_FILE.join(val)
    if min(map(len, joined)) < _LEAST_BYTES:
        raise MisconfigurationException(
            f"{root} holds {len(joined[0])} bytes of Python source to train on and {len(joined[1])} to "
            f"validate on; at least {_LEAST_BYTES} of each are needed.",
            hint="Give another folder with Python files: data.init_args.root=FOLDER",
        )
    digest = hashlib.blake2b(digest_size=8)
    for part in joined:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return Corpus(*joined, len(train) + len(val), num_unreadable, digest.hexdigest())


def held_out(relative: str) -> bool:
    """Whether a file belongs to the validation part. It is decided by its name alone, so that a file more or
    less in the folder moves no other file to the other side."""
    return zlib.crc32(relative.encode("utf-8", "surrogateescape")) % _VAL_SHARE == 0


def _python_files(root: str) -> Iterator[str]:
    """Paths relative to ``root``, with ``/``, in an order that depends on nothing but the names."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED_FOLDERS and not name.startswith(_SKIPPED_PREFIXES)
        )
        for name in sorted(files):
            if name.endswith(".py") and not name.startswith(_SKIPPED_PREFIXES):
                yield os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/")
