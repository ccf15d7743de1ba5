"""How do several ranks run that DeepSpeed's launcher starts? It starts them; all else is said between ckptrun and them.

    supervisor --(fork server)--> deepspeed --> deepspeed.launcher.launch --> rank 0, rank 1, ...
         ^                                                                        |
         └──────────────────────────(TCP, a token)────────────────────────────────┘

The launcher's own ways to stop are not used: its runner dies of SIGTERM and leaves the ranks running, its inner
launcher gives each rank 30 s, one after the other, and when that one is killed the runner exits 0. Here ranks are told
to stop over their channel. They stay until all are done, for the launcher ends the others as soon as one has ended, and
are then told to leave; what is left is swept. What an attempt came to is what the ranks say. A runner that was ended by
a stop signal is one to the command; one that ends otherwise takes its ranks with it.

The port may be open to a network: nobody is believed, and little is read of anybody, before the token has been shown.

The command runs below the fork server's process, which does nothing here but own what is started: it ends all of it
when the supervisor is gone. Ranks on other hosts end when their channel closes.
"""

from __future__ import annotations

import hmac
import json
import os
import pickle
import secrets
import select
import signal
import socket
import sys
import time
from typing import Any

from ckptrun.environment.machine import oom_kills
from ckptrun.environment.process import ProcessName
from ckptrun.launch.fork_client import ForkServer
from ckptrun.launch.rank_output import OutputElsewhere, RankOutput
from ckptrun.launch.rank_state import Rank
from ckptrun.launch.torchrun import Hooks, Launch, TorchrunLaunch
from ckptrun.launch.wire import Channel, Message
from ckptrun.processes import process_stat
from ckptrun.records import Outcome, Progress
from ckptrun.stop import STOP_SIGNALS, StopListener
from ckptrun.storage.files import write_atomic

_LEAVE_S = 2.0  # what ranks get to end once all are done
_ZOMBIE_S = 0.2  # from a process's last connection to its end
_HELLO_S = 10.0  # what who calls gets to say who it is
_LONGEST_HELLO = 4096
_INNER = b"deepspeed.launcher.launch"  # in its command


class _CalledRank(Rank):
    """A rank that called; it shares its process group with the others."""

    def __init__(self, hello: Message, channel: Channel, output: RankOutput, address: str) -> None:
        self.process = ProcessName(*hello["process"])
        super().__init__(int(hello["rank"]), channel, output, pid=self.process.pid, host=self.process.host)
        self.world_size = int(hello["world_size"])
        self.address = address

    @property
    def is_here(self) -> bool:
        """Whether its number means the same process here as there; it may be another container's."""
        return self.process.here

    def kill(self) -> None:
        if self.code is not None:
            return
        if not self.is_here:
            self.channel.send("die")
        elif self.process.alive:  # somebody else has waited for it, and its number is free once it has ended
            try:
                os.kill(self.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass

    def halt_launcher(self) -> None:
        """Keep DeepSpeed's inner launcher from killing this rank half a minute after it has sent it a signal. What is
        started here is swept at the end, halted or not; elsewhere nobody would."""
        stat = process_stat(self.process.pid) if self.is_here and self.process.alive else None
        try:
            if stat is not None and _INNER in _command_line(stat.parent):
                os.kill(stat.parent, signal.SIGSTOP)
        except OSError:
            pass  # it is gone

    def ask_for_stacks(self) -> None:
        if not self.is_here:
            self.channel.send("stacks")
        elif self.process.alive:
            super().ask_for_stacks()


class _Caller:
    """A connection of whom nothing is known yet: a rank, or anybody who has found the port."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.channel = Channel(sock, longest=_LONGEST_HELLO)
        self.address = address
        self.since = time.monotonic()

    def hear(self, token: str) -> list[Message] | None:
        """What it has said: its hello, and what came right behind; None where it is not let in. Does not wait."""
        if not select.select([self.channel.fileno()], [], [], 0)[0]:
            return []
        try:
            messages = self.channel.receive()
        except ValueError:
            return None
        if messages:
            hello = messages[0]
            shown = str(hello.get("token")).encode(errors="replace")
            if hello.get("op") != "hello" or not hmac.compare_digest(shown, token.encode()):
                return None
            self.channel.longest = None
        return None if self.channel.closed else messages


class DeepSpeedLaunch(TorchrunLaunch):
    """One attempt of the ranks that a command of DeepSpeed's starts.

    Args:
        command: the whole command.
        control: the file in which the ranks find the way here; made for this attempt.
        everywhere: ranks may be on other hosts.
    """

    def __init__(
        self,
        launch: Launch,
        server: ForkServer,
        *,
        listener: StopListener,
        progress: Progress,
        hooks: Hooks,
        command: tuple[str, ...],
        control: str,
        everywhere: bool,
    ) -> None:
        super().__init__(launch, server, listener=listener, progress=progress, hooks=hooks)
        self._command = command
        self._control = control
        self._everywhere = everywhere
        self._token = secrets.token_hex(16)
        self._calling: dict[int, _Caller] = {}  # by file descriptor
        self._stopped_early = False  # the launcher has ended on a stop, before all ranks had begun
        self._output: RankOutput | None = None
        self._store_port: int | None = None
        self._door = socket.create_server(("" if everywhere else "127.0.0.1", 0), backlog=256)
        self._door.setblocking(False)  # who has called may be gone when it is answered

    # -- starting ----------------------------------------------------------------------------------------

    def _start_agent(self) -> None:
        """Start the command in the agent's place; ranks call by themselves."""
        self._write_control()
        self._also[self._door.fileno()] = self._answer
        self._output = RankOutput(self._launch.log_path(0), self._hooks.output)
        stdout, stderr, _ = self._output.give()
        self._agent_id = self._server.fork(
            "ckptrun.launch.deepspeed:be_launcher",
            json.dumps(self._command).encode(),
            env=self._launch.env,
            fds=[stdout, stderr],
            group_lasts=True,
        )
        self._output.given()
        for fd in self._output.fds():
            self._also[fd] = self._hearing_output(fd)

    def _write_control(self) -> None:
        port = self._door.getsockname()[1]
        names = _addresses_of_this_host() if self._everywhere else ["127.0.0.1"]
        value = {
            "addresses": [[name, port] for name in names],
            "token": self._token,
            "sys_path": [path or os.getcwd() for path in sys.path],
        }
        os.makedirs(os.path.dirname(self._control), exist_ok=True)
        before = os.umask(0o077)
        try:
            write_atomic(self._control, json.dumps(value).encode(), durable=False)
        finally:
            os.umask(before)

    def _hearing_output(self, fd: int) -> Any:
        def hear() -> None:
            output = self._output
            if output is not None and not output.hear(fd) and fd not in set(output.fds()):
                del self._also[fd]

        return hear

    def _answer(self) -> None:
        try:
            sock, address = self._door.accept()
        except OSError:
            return  # whoever called is gone again, or so many call that this process can have no more files
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fd = sock.fileno()
        self._calling[fd] = _Caller(sock, address[0])
        self._also[fd] = lambda: self._hear_caller(fd)

    def _hear_caller(self, fd: int) -> None:
        caller = self._calling[fd]
        messages = caller.hear(self._token)
        if messages is None:
            self._hang_up(fd)
        elif messages:
            del self._calling[fd], self._also[fd]
            rank = self._take_in(messages[0], caller.channel, caller.address)
            if rank is not None:
                for message in messages[1:]:
                    self._hear_rank(rank, message)

    def _hang_up(self, fd: int) -> None:
        caller = self._calling.pop(fd)
        del self._also[fd]
        caller.channel.close()

    def _watch(self) -> None:
        now = time.monotonic()
        for fd in [fd for fd, caller in self._calling.items() if now - caller.since > _HELLO_S]:
            self._hang_up(fd)
        super()._watch()

    def _take_in(self, hello: Message, channel: Channel, address: str) -> Rank | None:
        number, expected = int(hello["rank"]), self._launch.nproc
        if int(hello["world_size"]) != expected:
            self._refuse(
                channel,
                f"DeepSpeed's launcher gives a world size of {hello['world_size']}, and its command one of {expected}",
            )
            return None
        if number in self._ranks:
            self._refuse(channel, f"DeepSpeed's launcher has started two processes as rank {number}")
            return None
        path = self._launch.log_path(number)
        output = self._output if number == 0 and self._output is not None else OutputElsewhere(path)
        rank = _CalledRank(hello, channel, output, address)
        self._ranks[number] = rank
        job = self._launch.job(number, int(hello["local_rank"]), rank.world_size)
        channel.send("job", payload=pickle.dumps(job).hex(), log_path=path, env=self._env_of_ranks())
        if self._store_port is not None:
            self._tell_where(rank)
        self._tell_stop(rank)
        if self._all_here():
            here = [rank.process.pid for rank in self._called() if rank.is_here]
            self._hooks.ranks([(r.rank, r.pid or 0, r.host) for r in self._ranks.values()], here)
        return rank

    def _refuse(self, channel: Channel, why: str) -> None:
        channel.close()
        self._trouble = self._trouble or why

    def _env_of_ranks(self) -> dict[str, str]:
        return {
            "TORCHELASTIC_RESTART_COUNT": str(self._launch.attempt - 1),
            "TORCHELASTIC_RUN_ID": self._launch.run_id,
        }

    def _all_here(self) -> bool:
        return len(self._ranks) == self._launch.nproc

    def _called(self) -> list[_CalledRank]:
        return [rank for rank in self._ranks.values() if isinstance(rank, _CalledRank)]

    def _tell_where(self, rank: Rank) -> None:
        first = self._ranks[0]
        assert isinstance(first, _CalledRank)
        rank.channel.send("meet", address=first.address, port=self._store_port)

    # -- hearing -----------------------------------------------------------------------------------------

    def _forked(self, message: Message) -> None:
        self._agent_pid = message["pid"]

    def _hear_server(self) -> None:
        for message in self._server.receive():
            if message["op"] == "forked":
                self._forked(message)
            elif message["op"] == "refused":
                self._trouble = f"DeepSpeed's launcher could not be started: {message['why']}"
            elif message["op"] == "ended" and message["pid"] == self._agent_pid:
                self._launcher_ended(int(message["pid"]), int(message["code"]))

    def _launcher_ended(self, pid: int, code: int) -> None:
        """It ended by a stop signal: that counts, and ranks go on until they have saved. Else what is left of it ends,
        and where all ranks have come it is them who say how."""
        self._agent_pid = None
        while self._calling_now():
            pass
        if -code in STOP_SIGNALS:
            if self._failed_at is None:
                self._listener.count(-code, "DeepSpeed's launcher")
        else:
            try:
                os.killpg(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        if self._all_here():
            return
        if self._listener.request is not None:
            self._stopped_early = True
        elif self._trouble is None:
            self._trouble = (
                f"DeepSpeed's launcher ended with exit code {code}, and {len(self._ranks)} of {self._launch.nproc} "
                "ranks had begun"
            )
            self._hint = f"What it said is in {self._launch.log_path(0)}."

    def _calling_now(self) -> bool:
        """Let a rank in that has called and was not heard yet."""
        waiting = [self._door.fileno(), *self._calling]
        ready = select.select(waiting, [], [], 0)[0]
        for fd in ready:
            self._also[fd]()
        return bool(ready)

    def _hear_channel(self, rank: Rank) -> None:
        super()._hear_channel(rank)
        if rank.code is not None:
            return
        if rank.outcome is not None:
            # It stays until all are done, so this is its end.
            rank.code = 0 if rank.outcome["error"] is None else 1
            self._ends += 1
            rank.order = self._ends
        elif rank.channel.closed:
            self._lose(rank)

    def _lose(self, rank: Rank) -> None:
        self._ends += 1
        rank.order = self._ends
        code = _exit_code(rank.process) if isinstance(rank, _CalledRank) and rank.is_here else None
        rank.code, rank.code_unknown = code or 0, code is None
        killed = code == -signal.SIGKILL and not rank.ended_by_us
        rank.out_of_memory = killed and oom_kills() > self._oom_kills
        self._fail()

    def _hear_rank(self, rank: Rank, message: Message) -> None:
        if message["op"] == "store":
            self._store_port = int(message["port"])
            for each in self._ranks.values():
                self._tell_where(each)
            return
        if message["op"] == "signal":
            if self._failed_at is not None:
                return  # it comes from DeepSpeed's launcher, which ends the others once one is gone
            if isinstance(rank, _CalledRank) and message["signum"] in (signal.SIGINT, signal.SIGTERM):
                rank.halt_launcher()
        super()._hear_rank(rank, message)

    def _over(self) -> bool:
        if self._stopped_early:
            return True
        waits = self._failed_at is None and self._listener.request is None
        if self._trouble is None and self._ranks and not self._all_here() and waits:
            return self._server.closed  # those that have come are not all
        return super()._over()

    # -- the end -------------------------------------------------------------------------------------------

    def _outcome(self) -> Outcome:
        request = self._listener.request
        if self._stopped_early and request is not None:
            return Outcome(request.reason, self._progress.step)
        return super()._outcome()

    def _end_all(self) -> None:
        for rank in self._ranks.values():
            rank.channel.send("leave")
        deadline = time.monotonic() + _LEAVE_S
        for rank in self._ranks.values():
            if rank.outcome is not None:
                _await_end(rank.channel, deadline)
        for rank in self._ranks.values():
            rank.code = None  # whatever it said, it is to be gone now
            rank.kill()
        for caller in self._calling.values():
            caller.channel.close()
        self._door.close()
        super()._end_all()
        if self._output is not None:
            self._output.close()
        try:
            os.unlink(self._control)
        except OSError:
            pass


def _exit_code(process: ProcessName) -> int | None:
    """How a process that is not a child of this one has ended, where its parent has not asked yet."""
    deadline = time.monotonic() + _ZOMBIE_S
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{process.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return None
        if int(fields[19]) != process.start:
            return None  # it is gone, and another one has its number
        if fields[0] == b"Z":
            return os.waitstatus_to_exitcode(int(fields[-1]))
        time.sleep(0.002)
    return None


def _command_line(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()


def _await_end(channel: Channel, deadline: float) -> None:
    """Wait until the other side has closed, or the time is over."""
    while not channel.closed:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([channel.fileno()], [], [], left)[0]:
            return
        channel.receive()


def _addresses_of_this_host() -> list[str]:
    """Under which others may reach this host: its name, and what that leads to."""
    name = socket.gethostname()
    found = [name]
    try:
        found += [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        pass
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # no packet is sent; the kernel only chooses the way
            found.append(probe.getsockname()[0])
    except OSError:
        pass
    return list(dict.fromkeys([*found, "127.0.0.1"]))


def be_launcher(payload: bytes, fds: list[int]) -> int:
    """The process that becomes DeepSpeed's launcher."""
    from ckptrun.launch.parent_death import release_signals

    stdout, stderr = fds
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    command = json.loads(payload)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            signum, signal.SIG_DFL
        )  # it ends of them, which is heard; this process had them ignored
    release_signals()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"ckptrun: {command[0]} cannot be started: {error.strerror}\n".encode())
    return 127
