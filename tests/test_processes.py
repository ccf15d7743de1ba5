"""Ending processes, with real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from ckptrun.processes import ProcessStat, descendants, kill_descendants, process_stat

CHAIN = """
import os, subprocess, sys, time
depth = int(sys.argv[1])
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[2], str(depth - 1), sys.argv[2]], start_new_session=True)
else:
    print("ready", flush=True)
time.sleep(1000)
"""


def _gone(pid: int) -> bool:
    stat = process_stat(pid)
    return stat is None or stat.ended


def test_grandchildren_in_sessions_of_their_own_are_ended_too() -> None:
    with subprocess.Popen([sys.executable, "-c", CHAIN, "2", CHAIN], stdout=subprocess.PIPE) as top:
        assert top.stdout is not None
        assert top.stdout.readline() == b"ready\n"
        below = descendants(top.pid)
        assert len(below) == 2
        assert below[1].parent == below[0].pid
        assert kill_descendants(top.pid) == []
        assert all(_gone(stat.pid) for stat in below)
        assert not _gone(top.pid)
        top.kill()


def test_one_that_ignores_stop_signals_is_ended() -> None:
    code = (
        "import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; print(flush=True); "
        "time.sleep(99)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert kill_descendants() == [], "it lives longer than the two seconds that kill_descendants waits"
        assert child.wait() == -signal.SIGKILL


def test_a_process_that_forks_without_end_leaves_nobody() -> None:
    code = "import os, time\nprint(flush=True)\nwhile os.fork(): time.sleep(0.001)\ntime.sleep(99)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert kill_descendants() == []
        child.wait()
    assert not [stat for stat in _everybody() if os.getpgid(stat.pid) == child.pid]


def _everybody() -> list[ProcessStat]:
    found = (process_stat(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [stat for stat in found if stat is not None and not stat.ended]


def test_a_name_with_parentheses_and_spaces_is_read_right(tmp_path) -> None:
    code = "import sys; open('/proc/self/comm', 'w').write('a) R 1 (b'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        stat = process_stat(child.pid)
        assert stat is not None
        assert (stat.parent, stat.ended) == (os.getpid(), False)
        assert stat.start_time >= process_stat(os.getpid()).start_time


def test_no_such_process() -> None:
    assert process_stat(1 << 22) is None
