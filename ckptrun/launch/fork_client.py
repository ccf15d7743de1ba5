"""How does the supervisor use the fork server? It starts it early, asks for forks, and hears how children ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from ckptrun.launch.spawned import argv_for
from ckptrun.launch.wire import Message, send_with_fds
from ckptrun.processes import process_stat, reap_orphans
from ckptrun.records import Fn
from ckptrun.stop import STOP_SIGNALS

_NOT_FOR_IT = (*STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)
_SWEEP_S = 5.0
_ORPHANS_S = 2.0


class ForkServer:
    """A running fork server. ``fileno`` becomes readable when it has something to say.

    Attributes:
        pid: of the server.
        ready: it has imported what it needs, and has said so.
        closed: it is gone.
        made_for: the environment, method and fn that it was started with.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        control: socket.socket,
        made_for: tuple[dict[str, str], str, Fn],
    ) -> None:
        self._process = process
        self.made_for = made_for
        self._control = control
        self._next_id = 0
        self._children: set[int] = set()
        self._has_children = False
        self.pid = process.pid
        self.ready = False
        self.closed = False

    @classmethod
    def start(cls, env: Mapping[str, str], *, method: str = "fork", fn: Fn = "fit") -> ForkServer:
        """Start it; returns at once, while it imports torch.

        Args:
            env: variables that must stand before torch is imported (threads, allocator); what the user has set
                stays.
            method: ``fork`` or ``spawn``, how children begin.
            fn: what the ranks will do.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Until it can ignore them: SLURM sends its signals to every process of a step, and it would die of them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_IT)
        try:
            process = subprocess.Popen(
                argv_for("ckptrun.launch.fork_server", theirs.fileno(), os.getpid(), method, fn),
                pass_fds=[theirs.fileno()],
                env={**env, **os.environ},
                stdin=subprocess.DEVNULL,
                process_group=0,  # whoever kills the supervisor's whole group leaves this one to end the ranks
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return cls(process, ours, (dict(env), method, fn))

    def fileno(self) -> int:
        return self._control.fileno()

    def fork(
        self,
        target: str,
        payload: bytes,
        *,
        env: Mapping[str, str],
        fds: list[int],
        group_lasts: bool = False,
    ) -> int:
        """Ask for a child that calls ``target`` (``module:function``); returns the id that ``forked`` will carry.

        A server that is gone shows as ``closed`` at the next :meth:`receive`.

        Args:
            group_lasts: what is in the child's process group does not end with the child.
        """
        self._next_id += 1
        self._has_children = True
        message = {
            "op": "fork",
            "id": self._next_id,
            "target": target,
            "env": dict(env),
            "group_lasts": group_lasts,
        }
        try:
            send_with_fds(self._control, message, payload, fds)
        except OSError:
            pass
        return self._next_id

    def sweep(self) -> None:
        """End everything that has come from it, and wait until that is done; the server can be used again.

        One that is not ready, or does not answer, is closed.
        """
        if self.ready and not self.closed:
            try:
                send_with_fds(self._control, {"op": "sweep"}, b"", [])
            except OSError:
                self.closed = True
            self._control.settimeout(_SWEEP_S)
            while not self.closed and not any(message["op"] == "swept" for message in self.receive()):
                pass
            self._control.settimeout(None)
            self._has_children = self.closed
        if self.closed or not self.ready:
            self.close()

    def receive(self) -> list[Message]:
        """What it has said: ``ready``, ``forked``, ``refused`` or ``ended``; sets ``closed`` when it is gone."""
        try:
            data = self._control.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return []
        message: dict[str, Any] = json.loads(data)
        self.ready = self.ready or message["op"] == "ready"
        if message["op"] == "forked":
            self._children.add(message["pid"])
        elif message["op"] == "ended":
            self._children.discard(message["pid"])
        return [message]

    def close(self) -> None:
        """Let it end; it kills what is left of its children first. Where it is not ready, they end with it."""
        self.closed = True
        if not (self.ready and self._has_children):
            self._process.kill()
        self._control.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # Those that it could not wait for itself come here.
        deadline = time.monotonic() + _ORPHANS_S
        while True:
            reap_orphans()
            if not any(map(_is_ours, self._children)) or time.monotonic() > deadline:
                return
            time.sleep(0.01)


def _is_ours(pid: int) -> bool:
    stat = process_stat(pid)
    return stat is not None and stat.parent == os.getpid()
