"""What can go wrong at which moment, and how does a test make it so?

The environment variable ``CKPTRUN_FAULT`` names moments and what happens there, separated by commas:

    CKPTRUN_FAULT=commit:renamed=kill                 SIGKILL to this process at the first arrival
    CKPTRUN_FAULT=commit:file-written:3=raise:ENOSPC  OSError at the third arrival, and only then
    CKPTRUN_FAULT=state:read:1+=raise:EIO             OSError at each arrival from the first on
    CKPTRUN_FAULT=registry:written=halt               this process stands still (SIGSTOP) until SIGCONT comes

Decision: the moments are points in the code itself that are reached by name, so that a kill falls exactly between
two system calls; where a process halts at one, any other process can be killed at that very moment. Turned down:
killing after a random sleep, which hits the narrow gaps once in a thousand tries; patching ``os.rename`` in tests,
which cannot reach a process that is started as a user starts it. Where the variable is not set, a point costs one
look at an empty dict.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from ckptrun.errors import UsageError

VARIABLE: Final = "CKPTRUN_FAULT"

SMALL_FILES: Final = (
    "identity",  # run.json
    "config",  # config.yaml
    "registry",  # registry.json
    "status",  # status.json
    "ranks",  # control/ranks.json
    "lease-acquire",  # lease.json, in each of its three uses
    "lease-renew",
    "lease-release",
)

POINTS: Final[tuple[str, ...]] = (
    "commit:start",  # nothing of this save is on disk
    "commit:temp-made",  # the temporary folder stands, empty
    "commit:file-half",  # some bytes of a file are written (arrives once a file, at its first bytes)
    "commit:file-written",  # all bytes of a file are written, nothing is durable
    "commit:file-synced",  # ... the file is durable
    "commit:manifest-written",  # all files are written, and the manifest under a name that does not count
    "commit:temp-synced",  # all files and the temporary folder's entries are durable
    "commit:renamed",  # the folder has its name, and no manifest
    "commit:rename-synced",  # ... the name is durable
    "commit:manifest-renamed",  # committed
    "commit:done",  # committed, and durable
    "delete:start",  # the checkpoint is as it was
    "delete:renamed",  # it is out of every reader's sight, all bytes are there
    "delete:half",  # part of its files is gone
    "state:read",  # a block of a state file is about to be read
    # A small file is replaced whole: all bytes stand under a temporary name, then under its own.
    *(f"{what}:{done}" for what in SMALL_FILES for done in ("written", "renamed")),
    "ledger:opened",  # a line is about to be appended to the ledger
    "ledger:written",  # ... its bytes are written, nothing is durable
    "sweep:folder",  # what a killed save or deletion left behind is about to go
    "sweep:file",  # what a killed writer of a small file left behind is about to go
    "metrics:written",  # rows were appended to the CSV logger's table
    "metrics:set-aside",  # rows after the checkpoint stand in a file of their own, and still in the table
)

_RULE: Final = re.compile(r"(?P<name>[a-z-]+:[a-z-]+)(?::(?P<count>[1-9][0-9]*)(?P<on>\+?))?=(?P<action>.+)")
_SIGNALS: Final = {"kill": signal.SIGKILL, "halt": signal.SIGSTOP}


@dataclass
class _Fault:
    at: int  # the arrival at which it happens, from 1
    onwards: bool  # at each later arrival too
    error: int | None  # errno to raise; None: a signal to this process
    signal: signal.Signals  # SIGKILL or SIGSTOP
    arrivals: int = 0


def _parse(spec: str) -> dict[str, _Fault]:
    faults: dict[str, _Fault] = {}
    for part in filter(None, (p.strip() for p in spec.split(","))):
        match = _RULE.fullmatch(part)
        if match is None:
            raise UsageError(
                f"{VARIABLE}: found {part!r}, expected NAME[:N[+]]=kill, =halt or =raise:ERRNO",
                hint=f"The names are: {', '.join(POINTS)}.",
            )
        name, action = match["name"], match["action"]
        if name not in POINTS:
            raise UsageError(
                f"{VARIABLE}: there is no point {name!r}", hint=f"The names are: {', '.join(POINTS)}."
            )
        verb, _, argument = action.partition(":")
        code = getattr(errno, argument, None) if verb == "raise" else None
        if not (action in _SIGNALS or isinstance(code, int)):
            raise UsageError(
                f"{VARIABLE}: found {action!r}, expected kill, halt or raise:ERRNO, as raise:ENOSPC"
            )
        faults[name] = _Fault(
            at=int(match["count"] or 1),
            onwards=match["on"] == "+",
            error=code,
            signal=_SIGNALS.get(action, signal.SIGKILL),
        )
    return faults


_armed: dict[str, _Fault] = _parse(os.environ.get(VARIABLE, ""))


def reach(name: str, path: str | None = None) -> None:
    """Say that the moment ``name`` (one of :data:`POINTS`) is reached; what the variable asks for happens
    here.

    Args:
        path: the file or folder at hand, for the message of a raised error.

    Raises:
        OSError: the variable asks for one here.
    """
    if not _armed:
        return
    fault = _armed.get(name)
    if fault is None:
        return
    fault.arrivals += 1
    if fault.arrivals != fault.at and not (fault.onwards and fault.arrivals > fault.at):
        return
    if fault.error is None:
        # To this thread and not to the process: it is taken before the call returns, so nothing after this point runs.
        signal.pthread_kill(threading.get_ident(), fault.signal)
    else:
        raise OSError(fault.error, os.strerror(fault.error), path)


@contextmanager
def armed(spec: str) -> Iterator[None]:
    """Arm faults within this process for as long as the ``with`` lasts; ``spec`` as in the variable."""
    global _armed
    before, _armed = _armed, _parse(spec)
    try:
        yield
    finally:
        _armed = before
