"""Where do ranks come from? From a process that has imported torch once and forks.

    supervisor --(socket)--> fork server --fork--> elastic agent
                                         --fork--> rank 0, rank 1, ...

It imports torch, what ckptrun itself needs in a rank, and nothing of the user's; has one thread, never touches CUDA,
and only forks and reaps. Importing torch takes longer than everything else between a command and its first step, and
here it happens once, while the supervisor chooses the checkpoint. The agent is forked as soon as what it needs is
there, so that the ranks' rendezvous costs no time of its own. ``torch._dynamo`` comes last: whatever is trained, the
first optimizer imports it, which takes about as long as torch itself.

Where forking cannot serve (``launch.start_method: spawn``, or CUDA was initialized here after all) the child begins
as a new interpreter: :mod:`.spawned`.

When the supervisor is gone (its end of the socket closes) the server kills all that came from it and ends; when the
server itself is killed, the kernel kills its children.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import weakref
from typing import Any, NoReturn

from ckptrun.launch.heavy_imports import (
    FOR_OPTIMIZERS,
    FOR_RANKS,
    FOR_STRATEGY,
    FOR_THE_AGENT,
    collector_paused,
    import_all,
)
from ckptrun.launch.parent_death import adopt_orphans, die_with_parent, hold_signals, release_signals
from ckptrun.launch.plan import ALSO_IMPORTED
from ckptrun.launch.spawned import call, execute, leave
from ckptrun.launch.wire import receive_with_fds
from ckptrun.processes import kill_descendants
from ckptrun.stop import ignore_stop_signals_in_child


def main() -> None:
    """``FD PARENT METHOD FN``: serve on the socket ``FD`` until it closes; ``METHOD`` is ``fork`` or ``spawn``."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    parent, method, fn = int(sys.argv[2]), sys.argv[3], sys.argv[4]
    under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    ignore_stop_signals_in_child(parent)
    release_signals()  # those that came before are let go
    adopt_orphans()
    wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    server = Server(control, wake_read, spawns=method == "spawn", under_nohup=under_nohup)
    if method == "fork":
        with collector_paused():
            import_all(FOR_THE_AGENT)
            server.take_what_waits()
            import_all(FOR_RANKS)
            import_all(FOR_STRATEGY.get(os.environ.get(ALSO_IMPORTED, ""), ()))
            if fn == "fit":
                import_all(FOR_OPTIMIZERS)
            gc.freeze()
    # From here on not killed with the supervisor: it sees the socket close, and ends what it has started first.
    die_with_parent(parent, signal.SIGURG)
    _send(control, {"op": "ready", "pid": os.getpid()})
    server.serve()
    # Not by way of the interpreter's end, which takes its time with all that was imported and does nothing for us.
    os._exit(0)


class Server:
    """Forks on request and tells how each child ended.

    Args:
        control: the supervisor's socket.
        wake: becomes readable when a child has ended.
        spawns: each child begins as a new interpreter.
        under_nohup: SIGHUP came in ignored, and stays so in the children.
    """

    def __init__(self, control: socket.socket, wake: int, *, spawns: bool, under_nohup: bool) -> None:
        self._control = control
        self._wake = wake
        self._spawns = spawns
        self._under_nohup = under_nohup
        self._children: set[int] = set()
        self._whose_groups_last: set[int] = set()

    def take_what_waits(self) -> None:
        """Serve a request that is there already."""
        if select.select([self._control], [], [], 0)[0]:
            self._take()

    def serve(self) -> None:
        """Until the supervisor is gone."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._wake:
                    os.read(self._wake, 4096)
                    self._reap()
                elif not self._take():
                    kill_descendants()
                    self._reap()
                    return

    def _take(self) -> bool:
        try:
            received = receive_with_fds(self._control)
        except OSError:
            return False
        if received is None:
            return False
        message, payload, fds = received
        if message["op"] == "sweep":
            kill_descendants()
            self._reap()
            _send(self._control, {"op": "swept"})
        else:
            self._fork(message, payload, fds)
        for fd in fds:
            os.close(fd)
        return True

    def _fork(self, message: dict[str, Any], payload: bytes, fds: list[int]) -> None:
        me = os.getpid()
        why = (
            None
            if self._spawns or not _cuda_was_touched()
            else "CUDA is initialized in the process that forks them"
        )
        hold_signals()  # until the child can take them
        try:
            pid = os.fork()
        except OSError as error:
            release_signals()
            _send(self._control, {"op": "refused", "id": message["id"], "why": error.strerror})
            return
        if pid == 0:
            self._be_child(me, message, payload, fds, new_interpreter=self._spawns or why is not None)
        release_signals()
        self._children.add(pid)
        if message["group_lasts"]:
            self._whose_groups_last.add(pid)
        _send(self._control, {"op": "forked", "id": message["id"], "pid": pid, "spawned_because": why})

    def _be_child(
        self, parent: int, message: dict[str, Any], payload: bytes, fds: list[int], *, new_interpreter: bool
    ) -> NoReturn:
        code = 1
        try:
            gc.enable()
            _disown_finalizers()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if not self._under_nohup:
                signal.signal(signal.SIGHUP, signal.SIG_DFL)
            os.setpgid(0, 0)
            die_with_parent(parent)
            self._control.close()
            os.close(self._wake)
            os.environ.update(message["env"])
            if new_interpreter:
                execute(message["target"], payload, fds)
            code = call(message["target"], payload, fds)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            leave(code)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid not in self._children:
                continue  # an orphan that came here when its parent ended
            self._children.discard(pid)
            if pid in self._whose_groups_last:
                self._whose_groups_last.discard(pid)
            else:
                # Whatever it left behind in its group (a command started by a shell) ends with it.
                _kill_group(pid)
            _send(self._control, {"op": "ended", "pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _disown_finalizers() -> None:
    """What objects of this process do at its exit is not the child's to do.

    What modules have registered stays, in the child too: logs are flushed, queues emptied, and ``weakref.finalize``,
    which registers once a process, serves the child's own objects.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def _cuda_was_touched() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    try:
        control.send(json.dumps(message).encode())
    except OSError:
        pass  # the supervisor is gone; the next read says so


if __name__ == "__main__":
    main()
