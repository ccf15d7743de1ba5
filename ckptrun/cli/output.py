"""How do commands write what they have found?

Decision: tables are plain aligned columns that are never cut, so that what is piped can be read by ``awk``
and a path can be copied; on a terminal the last column is wrapped and verdicts are coloured. Turned down:
rich tables, which cost 40 ms to import and shorten paths to fit.

Answers go to stdout, notices and warnings to stderr. A reader that goes away (``| head``) never ends a
command: what is written after that is dropped and the exit code stays what it would have been.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}


def say(text: str) -> None:
    """Write a line of the answer to stdout."""
    _write(sys.stdout, text)


def note(text: str) -> None:
    """Write a line about the answer (a notice, a warning, an error) to stderr."""
    _write(sys.stderr, text)


def print_json(document: Any) -> None:
    """Write the one JSON document of a command to stdout. NaN and infinity, which JSON lacks, become null."""
    say(json.dumps(_finite(document), indent=2, allow_nan=False, default=str))


def style(text: str, name: str, *, stream: TextIO | None = None) -> str:
    """``text`` in a colour or weight, where the stream is a terminal and NO_COLOR is not set."""
    return f"\x1b[{_STYLES[name]}m{text}\x1b[0m" if _styled(stream or sys.stdout) else text


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    colour: Callable[[int, str], str | None] | None = None,
) -> list[str]:
    """Aligned columns, as lines.

    Args:
        right: numbers of the columns that are aligned to the right.
        colour: the style of a cell, given its column's number and text; None leaves it plain.
    """
    last = len(header) - 1
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(last + 1)]
    indent = sum(widths[:-1]) + 2 * last
    room = _width() - indent if _styled(sys.stdout) else 0
    lines = []
    for number, row in enumerate((header, *rows)):
        cells = []
        for column, text in enumerate(row):
            if column == last and column not in right:
                cell = (
                    textwrap.fill(text, room, break_long_words=False, break_on_hyphens=False)
                    if room > 20
                    else text
                )
                cell = cell.replace("\n", "\n" + " " * indent)
            else:
                cell = text.rjust(widths[column]) if column in right else text.ljust(widths[column])
            name = "bold" if number == 0 else (colour(column, text) if colour is not None else None)
            cells.append(cell if name is None else style(cell, name))
        lines.append("  ".join(cells).rstrip())
    return lines


def age(seconds: float | None) -> str:
    """A length of time in its two largest units: ``42 s``, ``3 min 10 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    for unit, length, lesser, lesser_length in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if whole >= length:
            rest = whole % length // lesser_length
            return f"{whole // length} {unit}" + (f" {rest} {lesser}" if rest else "")
    return f"{whole} s"


def size(num_bytes: float) -> str:
    """A size in the unit that keeps it readable: ``512 B``, ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def metrics_text(metrics: dict[str, float], *, most: int = 4) -> str:
    """``name=value`` of the first few metrics, on one line."""
    shown = [f"{name}={value:.4g}" for name, value in list(metrics.items())[:most]]
    more = len(metrics) - len(shown)
    return " ".join(shown) + (f" (+{more})" if more > 0 else "")


def when(seconds_since_1970: float) -> str:
    """A moment in local time, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds_since_1970))


@contextmanager
def stdout_kept_for_json() -> Iterator[Callable[[Any], None]]:
    """Send everything that anybody writes to stdout to stderr instead, and give a way to write the one
    document.

    It works on the file descriptor, so that prints of the user's code, of libraries in C and of child
    processes do not get into the document.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)

    def write(document: Any) -> None:
        sys.stdout.flush()
        os.dup2(kept, 1)
        try:
            print_json(document)
        finally:
            sys.stdout.flush()
            os.dup2(2, 1)

    try:
        yield write
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text + "\n")
        stream.flush()
    except BrokenPipeError:
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)


def _styled(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _width() -> int:
    return shutil.get_terminal_size().columns
