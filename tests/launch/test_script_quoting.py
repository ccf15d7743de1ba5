"""Values come through bash, and through sbatch's own reading of ``#SBATCH`` lines, as they are."""

from __future__ import annotations

import os
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptrun.errors import UsageError
from ckptrun.launch.script_quoting import bash_join, bash_quote, sbatch_quote

# Everything that a word of a command can be: no NUL, and a byte that is no UTF-8 is a lone surrogate.
BYTE = st.integers(0x80, 0xFF).map(lambda byte: chr(0xDC00 + byte))
ANY_TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)) | BYTE, max_size=20)
AWKWARD = [
    "",
    " ",
    "a b",
    "it's",
    '"',
    "\\",
    "\\n",
    "$HOME",
    "`id`",
    "!x",
    "#SBATCH",
    "a\n#SBATCH --hold\n",
    "\t",
    "\r\n",
    "~",
    "*",
    "é\u2028",
    "\udcff9",
    "\x0112",
    "-x",
    "%j",
    "{a,b}",
    "a=b",
]


def through_bash(script: bytes) -> list[bytes]:
    """The arguments that a command of the script gets."""
    done = subprocess.run(["bash", "-s"], input=script, capture_output=True, check=True)
    assert not done.stderr
    return done.stdout.split(b"\0")[:-1]


@settings(max_examples=25, deadline=None)
@given(st.lists(ANY_TEXT | st.sampled_from(AWKWARD), min_size=1, max_size=12))
def test_any_words_come_through_bash(words: list[str]) -> None:
    line = bash_join(words)
    assert "\n" not in line
    assert line.isprintable()
    script = f"printf '%s\\0' {line}\n"
    assert through_bash(script.encode()) == [os.fsencode(word) for word in words]


def test_awkward_words_come_through_bash() -> None:
    assert through_bash(f"printf '%s\\0' {bash_join(AWKWARD)}\n".encode()) == [
        os.fsencode(word) for word in AWKWARD
    ]


def test_plain_words_stay_as_they_are() -> None:
    assert bash_join(["ckptrun", "fit", "-c", "configs/a.yaml", "trainer.max_steps=5"]) == (
        "ckptrun fit -c configs/a.yaml trainer.max_steps=5"
    )
    assert bash_quote("a\nb") == r"$'a\nb'"


def as_sbatch_reads(word: str) -> str:
    """What sbatch makes of a word: its own rules, said once more, to compare with where there is no cluster."""
    read, quote, rest = "", "", list(word)
    while rest:
        character = rest.pop(0)
        if character == "\\":
            read += rest.pop(0)
        elif quote:
            quote, read = ("", read) if character == quote else (quote, read + character)
        elif character in "\"'":
            quote = character
        else:
            assert not character.isspace() and character != "#"
            read += character
    assert not quote
    return read


LINE = st.text(st.characters(exclude_categories=("Cc", "Cs")) | st.just("\t"), max_size=20)


@given(LINE | st.sampled_from([value for value in AWKWARD if value.isprintable()]))
def test_any_line_survives_the_rules_of_sbatch(value: str) -> None:
    assert as_sbatch_reads(sbatch_quote(value)) == value


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\x01", "\x7f", "\udcff"])
def test_what_no_directive_can_hold_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="#SBATCH line"):
        sbatch_quote(value)
