"""How many cores and GPUs may this process use?

Decision: what the kernel says is read from files. Turned down: asking torch, which costs seconds and opens a
context on every GPU, and ``os.cpu_count``, which counts cores that a container or a job was not given.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping


def num_cores(*, root: str = "/") -> int:
    """Cores that this process can keep busy: its affinity, or its cgroup's CPU limit where that is less.

    Args:
        root: where ``proc`` and ``sys`` stand; for tests.
    """
    cores = len(os.sched_getaffinity(0))
    limit = cgroup_cpu_limit(root=root)
    return cores if limit is None else max(1, min(cores, math.ceil(limit)))


def cgroup_cpu_limit(*, root: str = "/") -> float | None:
    """The least CPU limit of this process's cgroup and those above it, in cores; None where there is none."""
    limits = []
    for line in (_read(os.path.join(root, "proc/self/cgroup")) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Version 2 has no controllers in the line and one tree; a namespace may show a path that is not
        # there.
        trees = [f"sys/fs/cgroup/{controllers}", "sys/fs/cgroup/cpu"] if controllers else ["sys/fs/cgroup"]
        for tree in trees:
            top = os.path.join(root, tree)
            folder = os.path.join(top, path.strip("/"))
            while len(folder) >= len(top):
                limits.append(_limit_v1(folder) if controllers else _limit_v2(folder))
                folder = os.path.dirname(folder)
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def num_gpus(env: Mapping[str, str], *, root: str = "/") -> int:
    """NVIDIA GPUs that CUDA will show to a process with this environment. No driver is called.

    ``CUDA_VISIBLE_DEVICES`` is read as CUDA reads it: the list ends at the first entry that names no device.

    Args:
        root: where ``proc`` and ``dev`` stand; for tests.
    """
    try:
        present = len(os.listdir(os.path.join(root, "proc/driver/nvidia/gpus")))
    except OSError:
        present = 0
    if present == 0:
        try:
            names = os.listdir(os.path.join(root, "dev"))
        except OSError:
            names = []
        present = sum(re.fullmatch(r"nvidia\d+", name) is not None for name in names)
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None or present == 0:
        return present
    seen: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        by_number = entry.isdecimal() and int(entry) < present
        if not by_number and not entry.startswith(("GPU-", "MIG-")):
            break
        if entry in seen:  # CUDA shows no device at all when one is named twice
            return 0
        seen.append(entry)
    return len(seen)


def oom_kills(*, root: str = "/") -> int:
    """How often the kernel has killed for memory in this process's cgroup; 0 where it does not say.

    Args:
        root: where ``proc`` and ``sys`` stand; for tests.
    """
    for line in (_read(os.path.join(root, "proc/self/cgroup")) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = os.path.join(root, "sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        name = "memory.oom_control" if controllers else "memory.events"
        for folder in (os.path.join(top, path.strip("/")), top):
            found = re.search(r"^oom_kill (\d+)$", _read(os.path.join(folder, name)) or "", re.MULTILINE)
            if found:
                return int(found[1])
    return 0


def _limit_v2(folder: str) -> float | None:
    fields = (_read(os.path.join(folder, "cpu.max")) or "").split()
    return int(fields[0]) / int(fields[1]) if len(fields) == 2 and fields[0] != "max" else None


def _limit_v1(folder: str) -> float | None:
    quota = _read(os.path.join(folder, "cpu.cfs_quota_us"))
    period = _read(os.path.join(folder, "cpu.cfs_period_us"))
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return None
