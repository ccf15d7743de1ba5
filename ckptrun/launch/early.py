"""Can the fork server begin before the config is read? Yes, where the command line itself asks for several ranks.

What it needs to know then (threads, how ranks begin) is guessed as it would be without a config; where the config
says otherwise, the session ends that server and starts the right one. Decision: it waits here until the session
takes it. Turned down: starting it in the session alone, a quarter of a second later, which is all lost time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ckptrun.environment.machine import num_cores, num_gpus
from ckptrun.launch.fork_client import ForkServer
from ckptrun.launch.plan import ALSO_IMPORTED, environment_of_ranks
from ckptrun.records import Fn

_STARTS_NOTHING = {"--dry-run", "--print-config", "--help", "-h"}
_waiting: list[ForkServer] = []


def start_early(fn: Fn, arguments: Sequence[str]) -> None:
    """Start a fork server where ``arguments`` ask for several ranks. Call it from the main thread."""
    num_ranks = _number("--nproc", arguments)
    if _number("--nnodes", arguments) > 1:
        num_ranks = max(1, num_ranks)
    elif num_ranks == 1:
        return
    if num_ranks and _STARTS_NOTHING.isdisjoint(arguments):
        env = environment_of_ranks(
            num_ranks,
            num_cores=num_cores(),
            strategy=_word("--strategy", arguments) or _word("--launcher", arguments),
            num_gpus=num_gpus(os.environ),
        )
        if _word("--launcher", arguments) == "deepspeed":
            env.pop(ALSO_IMPORTED, None)
            _waiting.append(ForkServer.start(env, method="spawn", fn=fn))
            return
        _waiting.append(ForkServer.start(env, fn=fn))


def take(env: Mapping[str, str], *, method: str, fn: Fn) -> ForkServer:
    """The server that was started early, where it is the right one; else a new one. Arguments as for its start."""
    server = _waiting.pop() if _waiting else None
    if server is not None and server.made_for == (dict(env), method, fn):
        return server
    if server is not None:
        server.close()
    return ForkServer.start(env, method=method, fn=fn)


def discard() -> None:
    """End a server that nobody has taken."""
    while _waiting:
        _waiting.pop().close()


def _number(flag: str, arguments: Sequence[str]) -> int:
    """What ``flag`` says; 0 where it is not there, or is not a number."""
    found = _word(flag, arguments)
    return int(found) if found.isdecimal() else 0


def _word(flag: str, arguments: Sequence[str]) -> str:
    """What ``flag`` says; empty where it is not there."""
    found = ""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word == "--":
            break
        if word == flag:
            found = following
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found
