"""What is a file that is no checkpoint?

Decision: by its first bytes, never by its name: a web page or a pointer to a large file saved as
``model.pt`` is the commonest wrong file there is. Turned down: a list of suffixes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection

HEAD_BYTES = 4096

_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras, h5py)"),
    (b"\x1f\x8b", "a gzip file; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstd file; unpack it first"),
    (b"\xfd7zXZ\x00", "an xz file; unpack it first"),
    (b"BZh", "a bzip2 file; unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"\x93NUMPY", "a NumPy array (.npy)"),
    (b"GGUF", "a GGUF file (llama.cpp)"),
    (b"PAR1", "a Parquet file"),
    (b"SQLite format 3\x00", "an SQLite database"),
    (b"\x7fELF", "a program or library (ELF)"),
    (b"%PDF", "a PDF"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"version https://git-lfs", "a pointer of git-lfs, not the file itself; 'git lfs pull' fetches it"),
    (b"#!", "a script"),
)


def describe_bytes(head: bytes, size: int) -> str:
    """What a file seems to be, as ``a …``.

    Args:
        head: its first bytes, :data:`HEAD_BYTES` where it has as many.
        size: of the file, in bytes.
    """
    if not size:
        return "empty (0 bytes)"
    if not head.strip(b"\x00"):
        return f"nothing but zeros in its first {len(head)} bytes; it was never written, or the disk was full"
    for signature, what in _SIGNATURES:
        if head.startswith(signature):
            return what
    if head[257:262] == b"ustar":
        return "a tar archive"
    if len(head) >= 9:
        (header_size,) = struct.unpack_from("<Q", head)
        if head[8:9] == b"{" and 2 <= header_size <= size - 8:
            return "a safetensors file"
    if head[:1] == b"\x80" and len(head) > 1 and head[1] <= 5:
        return "a Python pickle that torch.save did not write, or the beginning of one"
    return _describe_text(head) or f"a file of unknown bytes (0x{head[:8].hex()} …)"


def _describe_text(head: bytes) -> str | None:
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:  # a character may be cut at the end of the head
            return None
        text = head[: error.start].decode("utf-8")
    if "\x00" in text:
        return None
    begin = text.lstrip().lower()
    if begin.startswith(("<!doctype html", "<html")):
        return "a web page (HTML); the download failed or needs a login"
    if begin.startswith("<"):
        return "an XML file"
    if begin.startswith(("{", "[")) and re.match(r'[{\[]\s*("|[\]}\[{0-9tfn-])', begin):
        return "a JSON file"
    if re.search(r"^(---|[\w.-]+:(\s|$))", text, re.MULTILINE):
        return "a YAML or text file"
    return "a text file"


def describe_zip(names: Collection[str]) -> str:
    """What a zip file without torch's records seems to be."""
    parts = {name.rsplit("/", 1)[-1] for name in names}
    if "constants.pkl" in parts or any("/code/" in name for name in names):
        return "a TorchScript archive (torch.jit.save), which holds a program, not a checkpoint"
    if "archive_format" in parts:
        return "an archive of torch.export"
    if names and all(name.endswith(".npy") for name in names):
        return "a NumPy archive (.npz)"
    if "model.weights.h5" in parts:
        return "a Keras archive (.keras)"
    return "a zip archive that torch.save did not write (it has no data.pkl)"
