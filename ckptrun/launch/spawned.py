"""How does a process of ours begin that must not be a fork? As a new interpreter that finds what its starter finds.

Decision: ``-c`` with the starter's ``sys.path``, because ``-m`` would put the working folder on the path, where a
``json.py`` of the user's takes the place of the library's. Turned down: ``multiprocessing`` with ``spawn``, which
imports the user's main module and replaces signal handling.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
import traceback
from typing import NoReturn


def argv_for(module: str, *arguments: object) -> list[str]:
    """The command that runs ``main()`` of ``module`` in a new interpreter."""
    boot = f"import sys; sys.path[:] = {sys.path!r}; from {module} import main; sys.exit(main())"
    return [sys.executable, "-P", "-c", boot, *map(str, arguments)]


def call(target: str, payload: bytes, fds: list[int]) -> int:
    """Call ``module:function`` with what it was sent; returns its exit code."""
    module, _, name = target.partition(":")
    code: int = getattr(importlib.import_module(module), name)(payload, fds)
    return code


def execute(target: str, payload: bytes, fds: list[int]) -> NoReturn:
    """Replace this process by a new interpreter that does :func:`call`."""
    spool = os.memfd_create("ckptrun-payload", 0)
    with os.fdopen(os.dup(spool), "wb") as file:
        file.write(payload)
    for fd in fds:
        os.set_inheritable(fd, True)
    argv = argv_for("ckptrun.launch.spawned", target, spool, *fds)
    os.execv(argv[0], argv)


def leave(code: int) -> NoReturn:
    """End this process as an interpreter ends, but without taking its objects apart.

    That takes seconds with all that torch has made, and destructors of C++ have been seen to abort in it.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def main() -> None:
    """``TARGET SPOOL FD...``: the new interpreter's side of :func:`execute`; does not return."""
    target, spool, *fds = sys.argv[1:]
    with os.fdopen(int(spool), "rb") as file:
        file.seek(0)
        payload = file.read()
    for fd in fds:
        os.set_inheritable(int(fd), False)
    code = 1
    try:
        code = call(target, payload, [int(fd) for fd in fds])
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)
