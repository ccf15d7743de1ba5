"""Cores and GPUs, from files that a test can write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptrun.environment.machine import cgroup_cpu_limit, num_cores, num_gpus, oom_kills


def _write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/job/step/cpu.max": "400000 100000\n",
            },
            2.0,
        ),
        ({"proc/self/cgroup": "0::/not/shown/here\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/docker/a:b\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/a:b/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/a:b/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
    ],
)
def test_cgroup_cpu_limit(tmp_path: Path, files: dict[str, str], limit: float | None) -> None:
    assert cgroup_cpu_limit(root=_write(tmp_path, files)) == limit


def test_cores_are_those_of_the_affinity_unless_the_cgroup_gives_less(tmp_path: Path) -> None:
    given = len(os.sched_getaffinity(0))
    assert num_cores(root=str(tmp_path)) == given
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "10000 100000\n"}
    assert num_cores(root=_write(tmp_path, files)) == 1


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("0", 1),
        ("3,1", 2),
        ("0,7,1", 1),  # the list ends at the first that is none
        ("0, 1", 2),
        ("1,1", 0),
        ("GPU-8932f937-d72c,GPU-1", 2),
        ("MIG-a,MIG-b,MIG-c", 3),
    ],
)
def test_gpus_as_cuda_shows_them(tmp_path: Path, visible: str | None, gpus: int) -> None:
    for number in range(4):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0").mkdir(parents=True)
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert num_gpus(env, root=str(tmp_path)) == gpus


def test_gpus_by_their_device_files_and_none_at_all(tmp_path: Path) -> None:
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, root=str(tmp_path)) == 0
    _write(tmp_path, dict.fromkeys(("dev/nvidia0", "dev/nvidia11", "dev/nvidiactl", "dev/nvidia-uvm"), ""))
    assert num_gpus({}, root=str(tmp_path)) == 2


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({}, 0),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.events": "oom 3\noom_kill 2\n"}, 2),
        ({"proc/self/cgroup": "0::/hidden\n", "sys/fs/cgroup/memory.events": "oom_kill 1\n"}, 1),
        (
            {
                "proc/self/cgroup": "5:cpu:/job\n4:memory:/job\n",
                "sys/fs/cgroup/memory/job/memory.oom_control": "under_oom 0\noom_kill 4\n",
            },
            4,
        ),
    ],
)
def test_oom_kills(tmp_path: Path, files: dict[str, str], kills: int) -> None:
    assert oom_kills(root=_write(tmp_path, files)) == kills
