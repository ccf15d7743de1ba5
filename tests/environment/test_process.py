"""Naming processes and asking whether they live."""

from __future__ import annotations

import os
import subprocess
import sys

from ckptrun.environment.process import ProcessName, boot_id, host_name, is_alive, this_process


def test_this_process_lives_and_is_here() -> None:
    me = this_process()
    assert (me.host, me.pid, me.boot_id) == (host_name(), os.getpid(), boot_id())
    assert me.here
    assert me.alive


def test_a_number_used_again_is_another_process() -> None:
    me = this_process()
    assert not is_alive(me.pid, me.start - 1)


def test_a_zombie_does_not_live() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    name = this_process()._replace(pid=child.pid)
    from ckptrun.processes import process_stat

    start = process_stat(child.pid).start_time
    assert is_alive(child.pid, start)
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended and nobody has collected it
    assert process_stat(child.pid).state == "Z"
    assert not name._replace(start=start).alive
    child.wait()
    assert not is_alive(child.pid, start)


def test_another_host_boot_or_container_is_not_here() -> None:
    me = this_process()
    assert not me._replace(host="another").here
    assert not me._replace(boot_id="an-earlier-boot").here
    boot, _, namespace = boot_id().partition(":")
    assert namespace.isdecimal()
    assert not ProcessName(me.host, me.pid, me.start, f"{boot}:1").here
