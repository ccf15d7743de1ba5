"""Which records does a zip file have, and where do their bytes begin?

Decision: the directory at the end of the file is read entry by entry, zip64 included, and nothing else. A
record that reaches into the directory, or a directory that is not where it should be, is damage, said with
both numbers. Turned down: :mod:`zipfile`, which takes as long to import as the whole answer and says
``BadZipFile`` where it matters what was found and what was expected.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import BinaryIO

from ckptrun.errors import DamagedCheckpointError

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_FULL = 0xFFFFFFFF  # a field of 32 bits that says: see the zip64 field
MAX_RECORDS = 2_000_000
MAX_INFLATED = 64 << 20  # bytes of a compressed record that is read
_CRC_LIMIT = 256 << 20  # bytes of a record up to which its checksum is looked at


@dataclass(slots=True)
class Record:
    """One file in the zip. ``start`` is the place of its own header in the file."""

    name: str
    size_bytes: int
    stored_bytes: int
    method: int  # 0 stored, 8 deflated
    flags: int
    crc: int
    start: int


def read_directory(file: BinaryIO, size: int, path: str) -> dict[str, Record]:
    """All records by name, in the order of the directory.

    Args:
        size: of the file, in bytes.
        path: for messages.

    Raises:
        DamagedCheckpointError: the directory is missing or does not fit the file.
    """
    count, length, offset, end = _find_directory(file, size, path)
    if count > MAX_RECORDS or count * _ENTRY.size > length:
        raise _damaged(path, f"its directory announces {count} records in {length} bytes, which cannot be")
    file.seek(offset)
    records: dict[str, Record] = {}
    for _ in range(count):
        record = _read_entry(file, end, path)
        if record.start + _LOCAL.size + record.stored_bytes > offset:
            raise _damaged(
                path, f"record {record.name!r} reaches beyond where the directory begins (byte {offset})"
            )
        records[record.name] = record
    return records


def _find_directory(file: BinaryIO, size: int, path: str) -> tuple[int, int, int, int]:
    """Number of entries, length and start of the directory, and the place where it must have ended."""
    tail_start = max(0, size - (1 << 16) - _END.size)
    file.seek(tail_start)
    tail = file.read(size - tail_start)
    at = tail.rfind(b"PK\x05\x06")
    while at >= 0:
        if len(tail) - at >= _END.size:
            _, _, _, _, count, length, offset, _ = _END.unpack_from(tail, at)
            end = tail_start + at
            # torch writes the zip64 end even where nothing is large.
            count, length, offset, end = _find_zip64(file, end) or (count, length, offset, end)
            if offset + length == end and _begins(file, offset, b"PK\x01\x02" if count else b"PK"):
                return count, length, offset, end
        at = tail.rfind(b"PK\x05\x06", 0, at)
    raise _damaged(
        path,
        f"it is a zip file of {size} bytes without the directory that stands at its end: it was cut off, or "
        "the writing of it was",
    )


def _find_zip64(file: BinaryIO, end: int) -> tuple[int, int, int, int] | None:
    if end < _END64_LOCATOR.size:
        return None
    file.seek(end - _END64_LOCATOR.size)
    signature, _, start, _ = _END64_LOCATOR.unpack(file.read(_END64_LOCATOR.size))
    if signature != b"PK\x06\x07" or start > end - _END64_LOCATOR.size - _END64.size:
        return None
    file.seek(start)
    fields = _END64.unpack(file.read(_END64.size))
    return (fields[7], fields[8], fields[9], start) if fields[0] == b"PK\x06\x06" else None


def _begins(file: BinaryIO, offset: int, signature: bytes) -> bool:
    file.seek(offset)
    return file.read(len(signature)) == signature


def _read_entry(file: BinaryIO, end: int, path: str) -> Record:
    head = file.read(_ENTRY.size)
    if len(head) != _ENTRY.size or head[:4] != b"PK\x01\x02":
        raise _damaged(path, f"its directory has no entry before byte {file.tell()} where one should be")
    _, _, _, flags, method, _, _, crc, stored, plain, name_len, extra_len, comment_len, _, _, _, start = (
        _ENTRY.unpack(head)
    )
    name = file.read(name_len).decode("utf-8", "replace")
    extra = file.read(extra_len)
    file.seek(comment_len, 1)
    if file.tell() > end:
        raise _damaged(path, f"its directory goes on beyond byte {end}, where it should end")
    if _FULL in (stored, plain, start):
        plain, stored, start = _zip64_fields(extra, plain, stored, start)
    return Record(name, plain, stored, method, flags, crc, start)


def _zip64_fields(extra: bytes, *fields: int) -> list[int]:
    """Each field that is full, from the extra field 1, which has just those, in this order."""
    values = list(fields)
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            place, stop = at + 4, min(at + 4 + length, len(extra))
            for number, value in enumerate(values):
                if value == _FULL and place + 8 <= stop:
                    values[number] = struct.unpack_from("<Q", extra, place)[0]
                    place += 8
            break
        at += 4 + length
    return values


def open_record(file: BinaryIO, record: Record, path: str) -> tuple[BinaryIO, int]:
    """A file positioned at the record's first byte, and the position of its end.

    Raises:
        DamagedCheckpointError: it is not where the directory says, or its checksum differs.
    """
    file.seek(record.start)
    header = file.read(_LOCAL.size)
    if len(header) != _LOCAL.size or header[:4] != b"PK\x03\x04":
        raise _damaged(
            path, f"record {record.name!r} is not at byte {record.start}, where the directory says it is"
        )
    if record.flags & 1:
        raise _damaged(path, f"record {record.name!r} is encrypted")
    name_len, extra_len = _LOCAL.unpack(header)[-2:]
    begin = record.start + _LOCAL.size + name_len + extra_len
    file.seek(begin)
    if record.method == 0:
        _check_crc(file, record, path)
        file.seek(begin)
        return file, begin + record.size_bytes
    if record.method != 8:
        raise _damaged(
            path, f"record {record.name!r} is compressed by method {record.method}; 0 and 8 can be read"
        )
    return _inflate(file, record, path)


def _inflate(file: BinaryIO, record: Record, path: str) -> tuple[BinaryIO, int]:
    import zlib

    if max(record.size_bytes, record.stored_bytes) > MAX_INFLATED:
        raise _damaged(
            path, f"record {record.name!r} is compressed and {record.size_bytes} bytes long, too long"
        )
    try:
        data = zlib.decompressobj(-15).decompress(file.read(record.stored_bytes), MAX_INFLATED)
    except zlib.error:
        raise _damaged(path, f"record {record.name!r} cannot be decompressed") from None
    if len(data) != record.size_bytes or zlib.crc32(data) != record.crc:
        raise _damaged(
            path, f"record {record.name!r} has {len(data)} bytes, {record.size_bytes} were expected"
        )
    return io.BytesIO(data), len(data)


def _check_crc(file: BinaryIO, record: Record, path: str) -> None:
    """A checksum of zero says that the writer left it out."""
    if record.crc == 0 or record.size_bytes > _CRC_LIMIT:
        return
    from zlib import crc32

    left, crc = record.size_bytes, 0
    while left > 0:
        block = file.read(min(left, 1 << 16))
        if not block:
            break
        crc = crc32(block, crc)
        left -= len(block)
    if crc != record.crc:
        raise _damaged(
            path, f"record {record.name!r} has the checksum {crc:08x}, the directory says {record.crc:08x}"
        )


def _damaged(path: str, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{path} is damaged: {what}", hint="use an earlier checkpoint, or copy it again"
    )
