"""Which commit is the user's code at, and is it clean?

Decision: ask ``git`` once, with a time limit, and go on without an answer: no training waits for a version
control system. Turned down: reading ``.git`` ourselves, which has too many forms (worktrees, packed refs).
"""

from __future__ import annotations

import os
from typing import NamedTuple


class GitState(NamedTuple):
    """``clean`` is False where a tracked file differs from the commit; untracked files do not count."""

    commit: str
    clean: bool


def git_state(folder: str, *, timeout_s: float = 3.0) -> GitState | None:
    """The state of the working tree that ``folder`` is in.

    None where there is no git, no repository or no commit yet, or where git does not answer in time.
    """
    import subprocess  # not needed by the commands that only read

    command = ["git", "-C", folder, "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},  # no lock: it refreshes no index
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    commit, clean = "", True
    for line in done.stdout.splitlines():
        if line.startswith("# branch.oid "):
            commit = line.removeprefix("# branch.oid ")
        elif not line.startswith("#"):
            clean = False
    return GitState(commit, clean) if commit and commit != "(initial)" else None
