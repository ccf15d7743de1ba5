"""What stands behind ``--`` becomes options of sbatch."""

from __future__ import annotations

import pytest

from ckptrun.errors import UsageError
from ckptrun.launch.sbatch_options import SbatchOption as Option
from ckptrun.launch.sbatch_options import parse_sbatch_options


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], []),
        (["--account=x"], [Option("account", "x")]),
        (["--account", "x y"], [Option("account", "x y")]),
        (["-A", "x"], [Option("account", "x")]),
        (["-Ax"], [Option("account", "x")]),
        (["-p", "gpu", "--mem=64G", "-q", "long"],
         [Option("partition", "gpu"), Option("mem", "64G"), Option("qos", "long")]),
        (["--exclusive", "--hold"], [Option("exclusive"), Option("hold")]),
        (["--exclusive=user"], [Option("exclusive", "user")]),
        (["-H", "-Q"], [Option("H", is_letters=True), Option("Q", is_letters=True)]),
        (["-HQ"], [Option("HQ", is_letters=True)]),
        (["--comment="], [Option("comment", "")]),
        (["--comment=a=b\n"], [Option("comment", "a=b\n")]),
        (["--signal=USR2@60"], [Option("signal", "USR2@60")]),
        (["--no-requeue"], [Option("no-requeue")]),
    ],
    ids=lambda value: " ".join(value) if value and isinstance(value[0], str) else "",
)  # fmt: skip
def test_options(words: list[str], options: list[Option]) -> None:
    assert list(parse_sbatch_options(words)) == options


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x"], "'x' stands behind '--' and is no option"),
        (["--account=x", "y"], "'y' stands behind"),
        (["-H", "y"], "'y' stands behind"),
        (["--", "-A", "x"], "'--' stands behind"),
        (["--ACCOUNT=x"], "is no option"),
        (["-n", "8"], "--ntasks cannot be passed on"),
        (["--ntasks=8"], "--ntasks cannot be passed on"),
        (["--wrap=true"], "--wrap cannot be passed on"),
        (["--parsable"], "--parsable cannot be passed on"),
        (["--time"], "--time has no value"),
        (["-t", "-A", "x"], "--time has no value"),
        (["--time="], "--time has no value"),
        (["--signal=B:USR1@60"], "reaches only the shell"),
        (["--signal=RB:USR1@60"], "reaches only the shell"),
        (["--signal", "BR:10"], "reaches only the shell"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_sbatch_options(words)
    assert message in caught.value.message
    assert caught.value.hint
