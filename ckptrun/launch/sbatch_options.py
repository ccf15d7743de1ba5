"""Which options of sbatch did the user write behind ``--``, and what do they mean for the script?

Decision: any option passes, by its long name where there is one; sbatch itself knows which exist, which differs
from version to version. Read are only those that the script's own lines would contradict. Turned down: a table of
all of sbatch's options, which is out of date with the next release.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ckptrun.errors import UsageError

_LONG_NAMES = {
    "A": "account", "a": "array", "B": "extra-node-info", "b": "begin", "C": "constraint", "c": "cpus-per-task",
    "D": "chdir", "d": "dependency", "e": "error", "F": "nodefile", "G": "gpus", "i": "input", "J": "job-name",
    "L": "licenses", "M": "clusters", "m": "distribution", "N": "nodes", "n": "ntasks", "o": "output",
    "p": "partition", "q": "qos", "S": "core-spec", "t": "time", "w": "nodelist", "x": "exclude",
}  # fmt: skip
_REFUSED = {
    "ntasks": "Say how many tasks each node gets: --ntasks-per-node, and --nodes.",
    "wrap": "The script has its command; what shall run before it goes into --set-up.",
    "parsable": "Leave it out; --json gives the job's id to a program.",
}


@dataclass(frozen=True)
class SbatchOption:
    """One option by its long name, or one or more letters of options that take no value (``-H``)."""

    name: str
    value: str | None = None
    is_letters: bool = False


def parse_sbatch_options(words: Sequence[str]) -> tuple[SbatchOption, ...]:
    """The options that the words are, each with its value.

    Raises:
        UsageError: a word is no option, or an option cannot be part of the script.
    """
    found: list[SbatchOption] = []
    rest = list(words)
    while rest:
        option = _option(rest.pop(0))
        if rest and option.value is None and not option.is_letters and not rest[0].startswith("-"):
            option = SbatchOption(option.name, rest.pop(0))
        _check(option)
        found.append(option)
    return tuple(found)


def _option(word: str) -> SbatchOption:
    long = re.fullmatch(r"--([a-z][a-z0-9-]*)(?:=(.*))?", word, re.DOTALL)
    if long is not None:
        return SbatchOption(long[1], long[2])
    short = re.fullmatch(r"-([A-Za-z])(.*)", word, re.DOTALL)
    if short is not None and short[1] in _LONG_NAMES:
        return SbatchOption(_LONG_NAMES[short[1]], short[2] or None)
    if re.fullmatch(r"-[A-Za-z]+", word):
        return SbatchOption(word[1:], is_letters=True)
    raise UsageError(
        f"{word!r} stands behind '--' and is no option of sbatch.",
        hint="Behind '--' stand only options of sbatch, each value after its option: -- --account=x --mem=64G",
    )


def _check(option: SbatchOption) -> None:
    if option.name in _REFUSED:
        raise UsageError(f"--{option.name} cannot be passed on to sbatch.", hint=_REFUSED[option.name])
    if option.name in _LONG_NAMES.values() and not option.value:
        raise UsageError(f"--{option.name} has no value.", hint=f"Write it as --{option.name}=VALUE.")
    if option.name == "signal" and "B" in (option.value or "").rpartition(":")[0]:
        raise UsageError(
            f"--signal={option.value} reaches only the shell of the script, which dies of it, and not ckptrun.",
            hint="Leave out 'B:'; then it reaches what srun starts.",
        )
