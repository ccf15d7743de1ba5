"""Which command starts ranks through DeepSpeed's launcher, and how many will there be?

    deepspeed [--hostfile F --include HOSTS --launcher pdsh ...] --no_local_rank .../deepspeed_rank.py CONTROL

``CONTROL`` is a file in the run's folder that tells the ranks where the supervisor listens.

Decision: pure functions over options and the hostfile's text, so that ``--dry-run`` prints exactly what would be
started, and the number of ranks is known before anything is.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from ckptrun.errors import UsageError

DEFAULT_HOSTFILE = "/job/hostfile"
LAUNCHERS = ("pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm")
_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "deepspeed_rank.py")
_LOCAL = "localhost"  # the only host where there is no hostfile
_ENTRY = re.compile(r"(\S+)\s+slots=(\d+)")


@dataclass(frozen=True)
class DeepSpeedOptions:
    """What the config's section ``launch`` says for this launcher; each is passed on as it is."""

    hostfile: str | None = None
    include: str | None = None
    exclude: str | None = None
    backend: str | None = None
    master_addr: str | None = None
    further: str | None = None  # arguments as a shell has them
    num_nodes: int | None = None
    num_gpus: int | None = None

    def settled(self) -> DeepSpeedOptions:
        """The same, where nothing of what ``further`` says of hosts and slots is left there; it counts.

        Raises:
            UsageError: it cannot be read.
        """
        said, rest = _Parser().parse_known_args(_words(self.further))
        found = {name: value for name, value in vars(said).items() if value is not None}
        for name in ("num_nodes", "num_gpus"):
            if found.get(name, 1) < 1:
                del found[name]  # which says as little to DeepSpeed
        return replace(self, further=shlex.join(rest), **found)

    @property
    def hosts_file(self) -> str | None:
        """The hostfile that counts; DeepSpeed takes one from its own place where none is named."""
        if self.hostfile is not None:
            return self.hostfile
        return DEFAULT_HOSTFILE if os.path.isfile(DEFAULT_HOSTFILE) else None


def command(options: DeepSpeedOptions, *, num_ranks: int, control: str) -> tuple[str, ...]:
    """The whole command.

    Args:
        num_ranks: on this host, where neither a hostfile nor a filter says.
        control: the file for the ranks.

    Raises:
        UsageError: ``launch.deepspeed_args`` cannot be read.
    """
    options = options.settled()
    num_gpus = options.num_gpus
    if num_gpus is None and (options.include, options.exclude, options.hosts_file) == (None, None, None):
        num_gpus = num_ranks
    words = [_executable()]
    for flag, value in (
        ("--hostfile", options.hostfile),
        ("--include", options.include),
        ("--exclude", options.exclude),
        ("--num_nodes", options.num_nodes),
        ("--num_gpus", num_gpus),
        ("--launcher", options.backend),
        ("--master_addr", options.master_addr),
    ):
        if value is not None:
            words += [flag, str(value)]
    words += _words(options.further)
    return (*words, "--no_local_rank", "--log_level", "error", _SCRIPT, control)


def slots_of_hosts(options: DeepSpeedOptions, *, nproc: int, num_gpus: int = 0) -> dict[str, list[int]]:
    """On which hosts the command will start ranks, and for which of their slots; as DeepSpeed reads the same words.

    Args:
        num_gpus: of this host; what a filter chooses from where there is no hostfile.

    Raises:
        UsageError: the hostfile cannot be read, or the filter names what it does not have.
    """
    options = options.settled()
    filtered = options.include is not None or options.exclude is not None
    if options.include is not None and options.exclude is not None:
        raise UsageError(
            "launch.include and launch.exclude are both given; DeepSpeed's launcher takes one of them.",
            hint="Leave one out.",
        )
    if filtered and (options.num_nodes is not None or options.num_gpus is not None):
        raise UsageError(
            "launch.deepspeed_args has --num_nodes or --num_gpus beside launch.include or launch.exclude; DeepSpeed's "
            "launcher takes one of them.",
            hint="Leave one out.",
        )
    path = options.hosts_file
    slots: dict[str, list[int]]
    if path is not None:
        slots = {host: list(range(count)) for host, count in _hosts(path).items()}
    elif (options.num_nodes or 0) > 1:
        raise UsageError("--num_nodes is for the hosts of a hostfile.", hint="Set launch.hostfile=FILE.")
    elif filtered:
        slots = {_LOCAL: list(range(num_gpus)) if num_gpus else _named_slots(options)}
    else:
        slots = {_LOCAL: list(range(nproc))}
    if options.include is not None:
        chosen = _filter(options.include, slots)
        slots = {host: chosen[host] or slots[host] for host in slots if host in chosen}
    elif options.exclude is not None:
        for host, named in _filter(options.exclude, slots).items():
            slots[host] = [slot for slot in slots[host] if named and slot not in named]
    slots = {host: numbers for host, numbers in slots.items() if numbers}
    if options.num_nodes:
        slots = dict(list(slots.items())[: options.num_nodes])
    if options.num_gpus:
        slots = {host: list(range(options.num_gpus)) for host in slots}
    if not slots:
        raise UsageError(
            "The hostfile and its filter leave no rank to start.", hint="Look at launch.exclude."
        )
    return slots


def _named_slots(options: DeepSpeedOptions) -> list[int]:
    """Those that launch.include names, where no GPU can be counted: DeepSpeed knows itself what it takes for a slot."""
    named = _parsed(options.include or "").get(_LOCAL, [])
    if options.exclude is not None or not named:
        raise UsageError(
            "launch.include and launch.exclude choose among GPUs where there is no hostfile, and this host has none.",
            hint="Say how many ranks there are to be with --nproc.",
        )
    return named


def _executable() -> str:
    beside = os.path.join(os.path.dirname(sys.executable), "deepspeed")
    return beside if os.path.exists(beside) else shutil.which("deepspeed") or "deepspeed"


def _hosts(path: str) -> dict[str, int]:
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise UsageError(f"the hostfile {path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise UsageError(f"the hostfile {path} is no text in UTF-8.") from None
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        entry = _ENTRY.match(text)
        if entry is None:
            raise UsageError(f"{path}:{number}: {text!r}, expected a line such as 'host1 slots=4'.")
        if entry[1] in hosts:
            raise UsageError(f"{path}:{number}: {entry[1]} stands there twice.")
        hosts[entry[1]] = int(entry[2])
    if not hosts:
        raise UsageError(f"the hostfile {path} names no host.", hint="Write a line 'host1 slots=4' for each.")
    return hosts


def _filter(text: str, slots: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Hosts and their slots in ``host1@host2:0,2``; no slots mean all.

    Raises:
        UsageError: it cannot be read, or names what is not in ``slots``.
    """
    named = _parsed(text)
    for host, chosen in named.items():
        if host not in slots:
            raise UsageError(
                f"launch.include or exclude names {host!r}, which the hostfile does not have: {', '.join(slots)}."
            )
        wrong = [slot for slot in chosen if slot not in slots[host]]
        if wrong:
            raise UsageError(f"{text!r}: {host} has no slot {wrong[0]}; it has {len(slots[host])}.")
    return named


def _parsed(text: str) -> dict[str, list[int]]:
    """What is said of one host in several places is said together."""
    named: dict[str, set[int]] = {}
    for part in text.split("@"):
        host, colon, numbers = part.partition(":")
        try:
            chosen = [int(number) for number in numbers.split(",")] if colon else []
        except ValueError:
            raise UsageError(f"{part!r}: expected slots as in host1:0,2.") from None
        named.setdefault(host, set()).update(chosen)
    return {host: sorted(numbers) for host, numbers in named.items()}


class _Parser(argparse.ArgumentParser):
    """The arguments of DeepSpeed's launcher that say where ranks are started."""

    def __init__(self) -> None:
        super().__init__(add_help=False)
        self.add_argument("-H", "--hostfile")
        self.add_argument("-i", "--include")
        self.add_argument("-e", "--exclude")
        self.add_argument("--num_nodes", type=int)
        self.add_argument("--num_gpus", "--num_accelerators", type=int)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"launch.deepspeed_args: {message}.")


def _words(text: str | None) -> list[str]:
    try:
        return shlex.split(text or "")
    except ValueError as error:
        raise UsageError(
            f"launch.deepspeed_args is {text!r}, which no shell would read: {error}.",
            hint="Close the quote, or put a backslash before it.",
        ) from None
