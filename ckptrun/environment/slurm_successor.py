"""Which job did the script of a SLURM job hand in anew, to go on with its work?

Decision: found by what the script gives the new one, the numbers of the jobs before it, which the queue shows behind
the command's name. Turned down: a note of the script's own, which has to know where the run is, in or outside of a
container.
"""

from __future__ import annotations

import subprocess

_TIMEOUT_S = 10.0


def successor_of(key: str) -> str | None:
    """The job or array task in the queue whose first predecessor is ``key``; None where there is none, or no queue."""
    try:
        done = subprocess.run(
            ["squeue", "--me", "--array", "--noheader", "--format=%i|%o"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # names that users chose, in whatever encoding
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return find_successor(done.stdout, key)


def find_successor(queue: str, key: str) -> str | None:
    """The same in what ``squeue --format=%i|%o`` has printed."""
    for line in queue.splitlines():
        job, _, command = line.strip().partition("|")
        words = command.split()
        if len(words) > 1 and words[-1].split(",")[0] == key:
            return job
    return None
