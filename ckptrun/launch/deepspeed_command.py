"""Which command starts ranks through DeepSpeed's launcher, and how many will there be?

    deepspeed [--hostfile F --include HOSTS --launcher pdsh ...] --no_local_rank .../deepspeed_rank.py CONTROL

``CONTROL`` is a file in the run's folder that tells the ranks where the supervisor listens.

Decision: pure functions over options and the hostfile's text, so that ``--dry-run`` prints exactly what would be
started, and the number of ranks is known before anything is.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ckptrun.errors import UsageError

DEFAULT_HOSTFILE = "/job/hostfile"
LAUNCHERS = ("pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm")
_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "deepspeed_rank.py")
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
    """
    words = [_executable()]
    for flag, value in (
        ("--hostfile", options.hostfile),
        ("--include", options.include),
        ("--exclude", options.exclude),
        ("--launcher", options.backend),
        ("--master_addr", options.master_addr),
    ):
        if value is not None:
            words += [flag, value]
    if options.include is None and options.exclude is None and options.hosts_file is None:
        words += ["--num_gpus", str(num_ranks)]
    words += shlex.split(options.further or "")
    return (*words, "--no_local_rank", "--log_level", "error", _SCRIPT, control)


def count_ranks(options: DeepSpeedOptions, *, nproc: int) -> int:
    """How many ranks the command will start.

    Raises:
        UsageError: the hostfile cannot be read, or the filter names what it does not have.
    """
    path = options.hosts_file
    if options.include is not None and options.exclude is not None:
        raise UsageError(
            "launch.include and launch.exclude are both given; DeepSpeed's launcher takes one of them.",
            hint="Leave one out.",
        )
    if path is None:
        if options.include is None and options.exclude is None:
            return nproc
        hosts = {"localhost": nproc}
    else:
        hosts = _hosts(path)
    slots = {host: list(range(count)) for host, count in hosts.items()}
    if options.include is not None:
        slots = {host: named or slots[host] for host, named in _filter(options.include, slots).items()}
    elif options.exclude is not None:
        for host, named in _filter(options.exclude, slots).items():
            slots[host] = [slot for slot in slots[host] if named and slot not in named]
    total = sum(map(len, slots.values()))
    if total == 0:
        raise UsageError(
            "The hostfile and its filter leave no rank to start.", hint="Look at launch.exclude."
        )
    return total


def _executable() -> str:
    beside = os.path.join(os.path.dirname(sys.executable), "deepspeed")
    return beside if os.path.exists(beside) else shutil.which("deepspeed") or "deepspeed"


def _hosts(path: str) -> dict[str, int]:
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise UsageError(f"the hostfile {path} cannot be read: {error.strerror or error}.") from None
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
    """Hosts and their slots in ``host1@host2:0,2``; no slots mean all."""
    named: dict[str, list[int]] = {}
    for part in text.split("@"):
        host, colon, numbers = part.partition(":")
        if host not in slots:
            raise UsageError(
                f"launch.include or exclude names {host!r}, which the hostfile does not have: {', '.join(slots)}."
            )
        try:
            chosen = [int(number) for number in numbers.split(",")] if colon else []
        except ValueError:
            raise UsageError(f"{part!r}: expected slots as in host1:0,2.") from None
        wrong = [slot for slot in chosen if slot not in slots[host]]
        if wrong:
            raise UsageError(f"{part!r}: {host} has no slot {wrong[0]}; it has {len(slots[host])}.")
        named[host] = chosen
    return named
