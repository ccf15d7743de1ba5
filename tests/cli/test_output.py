"""Tables, sizes and times, and what happens to stdout."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ckptrun.cli.output import age, metrics_text, size, style, table


def test_a_table_is_aligned_and_never_cut() -> None:
    why = "because " * 40
    lines = table(["step", "name", "why"], [["5", "a", why.strip()], ["1200", "long-name", "b"]], right=[0])
    assert lines == [
        "step  name       why",
        f"   5  a          {why.strip()}",
        "1200  long-name  b",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (-3.0, "0 s"),
        (0.4, "0 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (190, "3 min 10 s"),
        (7500, "2 h 5 min"),
        (273600, "3 d 4 h"),
    ],
)
def test_age(seconds: float | None, text: str) -> None:
    assert age(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB")]
)
def test_size(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text


def test_metrics_are_shortened_openly() -> None:
    assert metrics_text({"a": 1.0, "b": 0.123456, "c": 3.0}, most=2) == "a=1 b=0.1235 (+1)"


def test_no_control_characters_where_it_is_not_a_terminal() -> None:
    assert style("x", "red") == "x"


NOISY = """
import os, subprocess, sys
from ckptrun.cli.output import stdout_kept_for_json
with stdout_kept_for_json() as write:
    print("from Python")
    os.write(1, b"from C\\n")
    subprocess.run([sys.executable, "-c", "print('from a child')"])
    write({"a": float("inf")})
    print("after")
"""


def test_stdout_is_one_document_whatever_is_printed() -> None:
    done = subprocess.run([sys.executable, "-c", NOISY], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"a": None}
    for text in ("from Python", "from C", "from a child", "after"):
        assert text in done.stderr


CLOSED = """
import sys
from ckptrun.cli.output import say
for number in range(100000):
    say("a line that nobody reads")
sys.exit(7)
"""


def test_a_reader_that_goes_away_changes_nothing() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CLOSED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(60) == 7
