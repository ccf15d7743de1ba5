"""What is in a file that ``torch.save`` wrote?

Decision: the zip's directory and the pickle are read, the tensors' bytes never, so that the time and memory
are the same at 100 MB and at 100 GB. That the bytes are all there is known from sizes alone. Both formats
of torch are read: a zip with the pickle in ``data.pkl`` (since 1.6), and five pickles with the bytes behind
them (before, and with ``_use_new_zipfile_serialization=False``)::

    zip:     <top>/data.pkl  <top>/version  <top>/byteorder  <top>/data/0  <top>/data/1 …  directory
    legacy:  magic number, protocol, system, object, storage keys | number of elements, bytes | …

Turned down: ``torch.load(mmap=True)``, which needs torch (seconds) and calls what the pickle names.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, BinaryIO, Literal

from ckptrun.errors import DamagedCheckpointError, NoCheckpointError
from ckptrun.inspect.identify import HEAD_BYTES, describe_bytes, describe_zip
from ckptrun.inspect.pickle_tree import PickleReader
from ckptrun.inspect.pickle_values import Global, MalformedPickleError
from ckptrun.inspect.torch_calls import TorchObjects
from ckptrun.inspect.torch_objects import Storage, Tensor
from ckptrun.inspect.walk import Walker
from ckptrun.inspect.zip_directory import Record, open_record, read_directory

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_MAGIC_BYTES = (MAGIC_NUMBER.to_bytes(10, "little"), b"L%dL" % MAGIC_NUMBER)
_SMALL_RECORDS = {"version": "zip_version", ".format_version": "format_version", "byteorder": "byteorder"}


@dataclass
class TorchFile:
    """A file of torch.save, described.

    ``root`` is the saved object as plain containers, :class:`Tensor`, :class:`Storage` and the stand-ins of
    :mod:`ckptrun.inspect.pickle_values`. ``storages`` are by key; ``globals`` are all classes and functions
    that the pickle names; ``versions`` is what the file says about its writer; ``size_bytes`` is the file's.
    """

    path: str
    format: Literal["torch-zip", "torch-legacy"]
    size_bytes: int
    root: Any
    storages: dict[str, Storage]
    globals: list[Global]
    versions: dict[str, str] = field(default_factory=dict)
    num_dropped: int = 0
    walker: Walker = field(default_factory=Walker)

    @cached_property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """All tensors with their names (keys joined by dots), in the order of the file.

        Raises:
            DamagedCheckpointError: there are more objects than are looked at.
        """
        return [(name, leaf) for name, leaf in self.leaves(self.root) if isinstance(leaf, Tensor)]

    def leaves(self, value: Any, name: str = "") -> Iterator[tuple[str, Tensor | Storage]]:
        """Tensors and bare storages below one of the file's objects, with their names.

        Raises:
            DamagedCheckpointError: there are more objects than are looked at.
        """
        try:
            yield from self.walker.leaves(value, name)
        except MalformedPickleError as error:
            raise _damaged(self.path, str(error)) from None


def read_torch_file(path: str) -> TorchFile:
    """Describe a file of ``torch.save``. Nothing in it is called and no tensor's bytes are read.

    Raises:
        NoCheckpointError: there is no such file, it cannot be read, or it is something else.
        DamagedCheckpointError: it was written by torch.save, and is cut off or altered.
    """
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            what = "a folder" if stat.S_ISDIR(status.st_mode) else "a device, pipe or socket"
            raise NoCheckpointError(f"{path} is {what}; a file of torch.save was expected")
        with open(path, "rb") as file:
            return _read(file, status.st_size, path)
    except FileNotFoundError:
        raise NoCheckpointError(f"there is no file {path}") from None
    except OSError as error:
        raise NoCheckpointError(f"{path} is there and cannot be read: {error.strerror or error}") from None


def _read(file: BinaryIO, size: int, path: str) -> TorchFile:
    head = file.read(HEAD_BYTES)
    if head.startswith(b"PK\x03\x04"):
        return _read_zip(file, size, path)
    if any(magic in head[:32] for magic in _MAGIC_BYTES):
        file.seek(0)
        return _read_legacy(file, size, path)
    what = describe_bytes(head, size)
    raise NoCheckpointError(
        f"{path} is no checkpoint: it is {what}",
        hint="inspect reads ckptrun's checkpoints and files of torch.save",
    )


def _read_zip(file: BinaryIO, size: int, path: str) -> TorchFile:
    records = read_directory(file, size, path)
    pickles = [name for name in records if name == "data.pkl" or name.endswith("/data.pkl")]
    pickle_name = min(pickles, key=lambda name: name.count("/"), default=None)
    top = "" if pickle_name is None else pickle_name.removesuffix("data.pkl")
    if pickle_name is None or f"{top}constants.pkl" in records:
        raise NoCheckpointError(f"{path} is no checkpoint: it is {describe_zip(records)}")
    stream, end = open_record(file, records[pickle_name], path)
    objects = TorchObjects()
    reader = PickleReader(stream, end, persistent=objects.persistent, rebuild=objects.rebuild)
    root = _load(reader, path, pickle_name)
    for storage in objects.storages.values():
        _check_record(storage, records.get(f"{top}data/{storage.key}"), path)
    versions = {}
    for name, label in _SMALL_RECORDS.items():
        record = records.get(top + name)
        if record is not None and record.size_bytes <= 64:
            stream, _ = open_record(file, record, path)
            versions[label] = stream.read(record.size_bytes).decode("ascii", "replace").strip()
    return TorchFile(
        path, "torch-zip", size, root, objects.storages, reader.globals, versions, reader.num_dropped
    )


def _check_record(storage: Storage, record: Record | None, path: str) -> None:
    if storage.location == "meta":
        return
    if record is None:
        raise _damaged(
            path, f"storage {storage.key!r} is missing, {storage.size_bytes} bytes of it were expected"
        )
    if record.size_bytes < storage.size_bytes:
        raise _damaged(
            path,
            f"storage {storage.key!r} has {record.size_bytes} bytes, {storage.size_bytes} were expected",
        )


def _read_legacy(file: BinaryIO, size: int, path: str) -> TorchFile:
    objects = TorchObjects()
    reader = PickleReader(file, size, persistent=objects.persistent, rebuild=objects.rebuild)
    magic = _load(reader, path, "first pickle")
    if magic != MAGIC_NUMBER:
        raise _damaged(path, "it does not begin with the number that torch.save writes")
    protocol = _load(reader, path, "protocol number")
    system = _load(reader, path, "description of the system")
    root = _load(reader, path, "pickle")
    keys = _load(reader, path, "list of storages")
    little = system.get("little_endian", True) if isinstance(system, dict) else True
    if type(keys) is not list:
        raise _damaged(path, "its list of storages is none")
    _check_storages(
        file, size, path, [_legacy_storage(objects, key, path) for key in keys], little is not False
    )
    versions = {"protocol_version": str(protocol)} if type(protocol) is int else {}
    return TorchFile(
        path, "torch-legacy", size, root, objects.storages, reader.globals, versions, reader.num_dropped
    )


def _legacy_storage(objects: TorchObjects, key: Any, path: str) -> Storage:
    storage = objects.storages.get(key) if type(key) is str else None
    if storage is None:
        raise _damaged(path, "its list of storages names one that no tensor uses")
    return storage


def _check_storages(file: BinaryIO, size: int, path: str, storages: list[Storage], little: bool) -> None:
    """Each storage is its number of elements, in 8 bytes, and then its bytes, which are passed over."""
    position = file.tell()
    expected = position + sum(8 + storage.size_bytes for storage in storages)
    if size < expected:
        raise _damaged(
            path, f"it has {size} bytes, {expected} were expected: it was cut off, or is being written"
        )
    for storage in storages:
        file.seek(position)
        (count,) = struct.unpack("<q" if little else ">q", file.read(8))
        if count != storage.num_elements:
            raise _damaged(
                path,
                f"storage {storage.key} at byte {position} has {count} elements, {storage.num_elements} "
                "were expected",
            )
        position += 8 + storage.size_bytes


def _load(reader: PickleReader, path: str, what: str) -> Any:
    try:
        return reader.load()
    except MalformedPickleError as error:
        raise _damaged(path, f"its {what} cannot be read: {error}") from None


def _damaged(path: str, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{path} is damaged: {what}", hint="use an earlier checkpoint, or copy it again"
    )
