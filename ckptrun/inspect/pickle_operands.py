"""How are the operands of pickle instructions read from a file?

Decision: a length that the file claims is believed only as far as there are bytes, and what is long is
passed over with a seek and stands as :class:`Oversized`: a NumPy array of a gigabyte inside a pickle costs
nothing to look at. Turned down: reading the pickle into memory first.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

from ckptrun.inspect.pickle_values import MalformedPickleError, Oversized

MAX_TEXT = 1 << 16  # bytes of a string that is kept
MAX_BYTES = 256  # of a bytes object: nobody here looks into them
MAX_INT_BYTES = 32
MAX_LINE = 1 << 16  # bytes of a line in the text protocols

UINT8, UINT16, UINT32, UINT64 = (struct.Struct(layout) for layout in ("<B", "<H", "<I", "<Q"))
INT32, DOUBLE = struct.Struct("<i"), struct.Struct(">d")


class Operands:
    """Reads operands; ``memory`` adds up what the values take, in bytes and by estimate."""

    def __init__(self, file: BinaryIO, end: int) -> None:
        self.file = file
        self.end = end
        self.memory = 0

    def take(self, count: int) -> bytes:
        data = self.file.read(count)
        if len(data) != count:
            raise MalformedPickleError("it is cut off")
        return data

    def number(self, layout: struct.Struct) -> int:
        value: int = layout.unpack(self.take(layout.size))[0]
        return value

    def double(self) -> float:
        value: float = DOUBLE.unpack(self.take(8))[0]
        return value

    def line(self) -> bytes:
        line = self.file.readline(MAX_LINE)
        if line[-1:] != b"\n":
            raise MalformedPickleError("it is cut off, or a line in it is too long")
        self.memory += len(line)
        return line[:-1]

    def text(self, size: int) -> str | Oversized:
        data = self._sized("text", size, MAX_TEXT)
        return data if isinstance(data, Oversized) else data.decode("utf-8", "surrogatepass")

    def old_text(self, size: int) -> str | Oversized:
        """A ``str`` of Python 2: bytes that mostly are text."""
        data = self._sized("text", size, MAX_TEXT)
        return data if isinstance(data, Oversized) else lenient_text(data)

    def bytes_object(self, size: int) -> bytes | Oversized:
        return self._sized("bytes", size, MAX_BYTES)

    def long_int(self, size: int) -> int | Oversized:
        data = self._sized("int", size, MAX_INT_BYTES)
        return data if isinstance(data, Oversized) else int.from_bytes(data, "little", signed=True)

    def frame(self) -> None:
        size = self.number(UINT64)
        if size > self.end - self.file.tell():
            raise MalformedPickleError("a frame in it is longer than what is left: it is cut off")

    def protocol(self) -> None:
        protocol = self.number(UINT8)
        if protocol > 5:
            raise MalformedPickleError(f"pickle protocol {protocol} was found, 0 to 5 are known")

    def _sized(self, kind: str, size: int, limit: int) -> bytes | Oversized:
        position = self.file.tell()
        left = max(0, self.end - position)
        if not 0 <= size <= left:
            raise MalformedPickleError(
                f"at byte {position} it announces {size} bytes of {kind}, and {left} are left"
            )
        self.memory += min(size, limit) + 60
        if size > limit:
            self.file.seek(size, 1)
            return Oversized(kind, size)
        return self.take(size)


def lenient_text(data: bytes) -> str:
    """Text in UTF-8, or else each byte as a character."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def parse_int(line: bytes) -> int | Oversized:
    """A number in decimal digits.

    Raises:
        MalformedPickleError: it is none.
    """
    if len(line) > 80:
        return Oversized("int", len(line))
    try:
        return int(line)
    except ValueError:
        raise MalformedPickleError("a number in it is none") from None
