"""How is a value written into a script so that bash, or sbatch, reads it as it is?

Decision: two functions for two readers. A ``#SBATCH`` line is never seen by a shell: sbatch splits it itself,
knows one kind of quoting (a backslash takes the next character as it is, inside quotes too), begins a comment
at any ``#`` outside of quotes, and has no way to write a line break. Turned down: :func:`shlex.quote` for
both, whose ``'it'"'"'s'`` happens to work and whose ``'a\\b'`` loses its backslash.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

from ckptrun.errors import UsageError

_PLAIN = re.compile(r"[\w@%+=:,./\[\]-]+", re.ASCII)
_SHORT_ESCAPES = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\\": r"\\", "'": r"\'"}


def bash_quote(value: str) -> str:
    """``value`` as one word of bash, on one line and printable whatever it contains.

    What cannot be printed becomes ``$'…'``, byte by byte where it is not ASCII, so that neither the locale of the
    node nor a line that happens to begin with ``#SBATCH`` matters.
    """
    if value.isprintable():
        return shlex.quote(value)
    return "$'" + "".join(map(_escaped, value)) + "'"


def bash_join(words: Sequence[str]) -> str:
    """The words as one command of bash, on one line."""
    return " ".join(map(bash_quote, words))


def sbatch_quote(value: str) -> str:
    """``value`` as (the end of) one word of a ``#SBATCH`` line.

    Raises:
        UsageError: it has a character that no such line can hold.
    """
    if _PLAIN.fullmatch(value):
        return value
    for character in value:
        if _unwritable(character):
            raise UsageError(
                f"{value!r} cannot stand in a #SBATCH line, which has no way to write {character!r}.",
                hint="Leave that character out.",
            )
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _unwritable(character: str) -> bool:
    if character == "\t":
        return False
    # Control characters, of which a line break would end the line, and bytes that are no text.
    return ord(character) < 0x20 or ord(character) == 0x7F or "\ud800" <= character <= "\udfff"


def _escaped(character: str) -> str:
    if character in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[character]
    if character.isprintable():
        return character
    # Octal, always three digits: what follows a hexadecimal escape could be taken for a part of it.
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(character))
