"""What does a supervisor do that does not lead? It starts its host's ranks as it is told, and passes their words on.

It never looks for a checkpoint, writes none of the run's files but its ranks' logs, counts no signals and ends no
sooner than the leader says, with the leader's exit code. Only one thing it decides by itself: once the leader is gone,
its ranks and it end within seconds.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptrun.environment.machine import oom_kills
from ckptrun.errors import CkptrunError
from ckptrun.launch.endpoint import interface_of
from ckptrun.launch.fork_client import ForkServer
from ckptrun.launch.hosts import host_names, rank_environment
from ckptrun.launch.inline import RankMain
from ckptrun.launch.link import Link, say_hello
from ckptrun.launch.meeting import Card, HostError, Meeting, Place, meet
from ckptrun.launch.rank_process import RankJob
from ckptrun.launch.rank_state import Rank, end_ranks
from ckptrun.launch.told import resolution_from_plain, seen_otherwise
from ckptrun.launch.torchrun import POSITION, Hooks, Launch, TorchrunLaunch, rank_logs
from ckptrun.launch.wire import Message
from ckptrun.processes import kill_descendants
from ckptrun.records import Outcome, Progress, StopReason
from ckptrun.stop import StopListener

LOST_CODE = 70
_SEEN_S = 15.0  # how long a network disk may take to show what the leader has written
_LEAVE_S = 8.0  # what is left of a follower may take to end by itself once its leader is gone
_POLL_S = 0.1


@dataclass
class Following:
    """What a follower brings along. ``fork_server`` gives a server that can be used, a new one where need be."""

    place: Place
    card: Card
    rank_main: RankMain
    listener: StopListener
    fork_server: Callable[[], ForkServer]
    say: Callable[[str], None]
    local: tuple[int, int] | None = None  # as in Launch


def follow(following: Following, meeting: Meeting) -> int:
    """Follow the leader of ``meeting`` to the end, and return the exit code that it gave.

    Raises:
        HostError: the leader cannot be reached.
    """
    leader = meeting.leader
    name = host_names(meeting.cards)[leader.id]
    sock = _call(leader, following.card)
    following.place.close()
    following.say(f"following {name}, which leads")
    return _Follower(following, meeting, sock, name).run()


def _call(leader: Card, me: Card, timeout_s: float = 30.0) -> socket.socket:
    try:
        sock = socket.create_connection((leader.address, leader.port), timeout=timeout_s)
    except OSError as error:
        raise HostError(
            f"the leader {leader.host} cannot be reached at {leader.address}:{leader.port}: {error.strerror or error}",
            hint="The hosts' supervisors and ranks need to reach each other at any port.",
        ) from None
    if not say_hello(sock, leader.token, me.id):
        sock.close()
        raise HostError(f"the leader {leader.host} at {leader.address}:{leader.port} does not answer")
    return sock


class _Follower:
    def __init__(self, following: Following, meeting: Meeting, sock: socket.socket, leader: str) -> None:
        self._of = following
        self._meeting: Meeting | None = meeting
        self._leader = leader
        self._launch: FollowerLaunch | None = None
        self._left = threading.Event()
        self._link = Link(sock, urgent=self._urgent, on_lost=self._leader_lost)

    def run(self) -> int:
        listener = self._of.listener
        listener.report = self._report
        listener.finished()  # the grace period is the leader's to keep
        if listener.request is not None and listener.request.signum is not None:
            self._report(listener.request.signum)  # it came before there was somebody to tell
        try:
            while True:
                code = self._obey_all(self._link.take())
                if code is not None:
                    return code
                if self._link.lost is not None:
                    self._of.say(
                        f"the leader {self._leader} is gone: {self._link.lost}; nothing more is done here"
                    )
                    return LOST_CODE
                time.sleep(_POLL_S)
        finally:
            self._left.set()
            listener.report = None
            listener.finished()
            self._link.close()

    def _report(self, signum: int) -> None:
        self._link.send("signal", signum=signum)

    def _obey_all(self, messages: list[Message]) -> int | None:
        """Do what the leader says; the exit code, where one of these was its last word."""
        for number, message in enumerate(messages):
            op, more = message["op"], messages[number + 1 :]
            if op == "exit":
                self._of.say(str(message["line"]))
                return int(message["code"])
            if op == "attempt":
                return self._attempt(message, more)
            if op == "again":
                return self._meet_again(more)
        return None

    def _attempt(self, told: Message, more: list[Message]) -> int | None:
        """Take part in it; ``more`` is what has come after it, its ranks' first orders among it."""
        meeting, self._meeting = self._meeting, None
        if meeting is None:
            self._link.send("swept", trouble="it did not meet the others")
            return self._obey_all(more)
        server = self._of.fork_server()
        resolution = resolution_from_plain(told["resolution"])
        facts = dict(told["facts"])
        otherwise = self._sees_otherwise(told, facts, resolution.path)
        if otherwise is not None:
            self._link.send(
                "refused",
                message=otherwise,
                hint="The run's folder has to lie on a disk that all hosts share, under the same path.",
                exit_code=2,
            )
            meeting.agent.close()
            server.sweep()
            self._link.send("swept", trouble=None)
            return self._obey_all(more)

        def job(rank: int, local_rank: int, world_size: int) -> RankJob:
            return RankJob(
                self._of.rank_main, told["run_path"], facts, resolution, rank, local_rank, world_size
            )

        attempt = int(facts["attempt"])
        launch = self._launch = FollowerLaunch(
            Launch(
                self._of.card.nproc,
                job,
                rank_logs(facts["logs_dir"], attempt),
                attempt,
                facts["run_id"] or "run",
                env=rank_environment(interface_of(self._link.own_address)),
                local=self._of.local,
            ),
            server,
            link=self._link,
            meeting=meeting,
            say=self._of.say,
            told=more,
        )
        launch.run()
        self._launch = None
        self._link.send("swept", trouble=launch.trouble)
        return self._obey_all(launch.for_later)

    def _sees_otherwise(self, told: Message, facts: dict[str, Any], checkpoint: str | None) -> str | None:
        deadline = time.monotonic() + _SEEN_S
        while True:
            found = seen_otherwise(told["run_path"], facts["lease_epoch"], checkpoint, told["fingerprint"])
            if found is None or time.monotonic() > deadline or self._link.lost is not None:
                return found
            time.sleep(_POLL_S)

    def _meet_again(self, waiting: list[Message]) -> int | None:
        """Meet the others once more; ``waiting`` is what has come since that was said."""

        def over() -> bool:
            # "attempt" says that all have met, so this host is about to: its agent says it a moment later.
            waiting.extend(self._link.take())
            return self._link.lost is not None or any(message["op"] == "exit" for message in waiting)

        try:
            self._meeting = meet(
                self._of.fork_server(), self._of.place, self._of.card, over=over, say=self._of.say
            )
        except CkptrunError as error:
            # The leader waits as long, and says how all of them end.
            self._of.say(str(error))
        return self._obey_all(waiting)

    # -- in the link's thread ------------------------------------------------------------------------------

    def _urgent(self, message: Message) -> bool:
        if message["op"] != "now":
            return False
        if message["stacks"] and self._launch is not None:
            self._launch.dump_stacks()
        self._end_at_once(int(message["code"]), f"the leader {self._leader} ended it at once")
        return True

    def _leader_lost(self, why: str) -> None:
        def watch() -> None:
            if not self._left.wait(_LEAVE_S):
                self._end_at_once(LOST_CODE, f"the leader {self._leader} is gone: {why}")

        threading.Thread(target=watch, name="ckptrun-follower-end", daemon=True).start()

    def _end_at_once(self, code: int, line: str) -> None:
        said = threading.Thread(target=self._of.say, args=(line,), daemon=True)
        said.start()
        kill_descendants()
        said.join(0.5)
        os._exit(code)


class FollowerLaunch(TorchrunLaunch):
    """One attempt of this host's ranks, as hands of the leader's loop.

    Args:
        told: what the leader has said already.

    Attributes:
        trouble: why it could not go on, where no rank is to blame.
        for_later: the leader's words that are not about this attempt.
    """

    def __init__(
        self,
        launch: Launch,
        server: ForkServer,
        *,
        link: Link,
        meeting: Meeting,
        say: Callable[[str], None],
        told: list[Message],
    ) -> None:
        def nothing(*_: object) -> None: ...

        super().__init__(
            launch,
            server,
            listener=StopListener(),  # hears nothing: stops come from the leader
            progress=Progress(),
            hooks=Hooks(nothing, nothing, nothing, nothing, say, nothing, nothing, nothing, nothing),
        )
        self._link = link
        self._meeting = meeting
        self._told = told
        self._dismissed = False
        self.for_later: list[Message] = []

    @property
    def trouble(self) -> str | None:
        return None if self._dismissed else self._trouble

    def _start_agent(self) -> None:
        meeting = self._meeting
        self._agent, self._agent_id, self._agent_pid = meeting.agent, meeting.agent_id, meeting.agent_pid
        self._also[self._link.fileno()] = self._hear_leader
        self._start_ranks(meeting.start)
        self._heed(self._told)

    def _over(self) -> bool:
        if self._server.closed:
            self._trouble = self._trouble or "the process that ranks are forked from is gone"
        return self._dismissed or self._trouble is not None

    def _hear_leader(self) -> None:
        self._heed(self._link.take())
        if self._link.lost is not None:
            self._trouble = "the leader is gone"

    def _heed(self, messages: list[Message]) -> None:
        for message in messages:
            op = message["op"]
            if op == "over":
                self._dismissed = True
            elif "rank" not in message:
                self.for_later.append(message)
            elif (rank := self._ranks.get(message["rank"])) is None:
                continue
            elif op == "to rank":
                rank.channel.send(**message["message"])
            elif op == "kill":
                end_ranks([rank], dump=False)
            elif op == "stacks":
                rank.ask_for_stacks()

    def _started(self) -> None:
        if all(state.pid is not None for state in self._ranks.values()):
            self._link.send("forked", ranks=[[state.rank, state.pid] for state in self._ranks.values()])
            if self._agent is not None:
                self._agent.send("acknowledged")

    def _hear_rank(self, rank: Rank, message: Message) -> None:
        op = message["op"]
        if op == "outcome":
            rank.output.drain()
            rank.outcome = message
        elif op == "say":
            rank.output.log(f"{message['text']}\n".encode())
            return
        elif op == "progress":
            message = {"op": op, **{name: message[name] for name in POSITION}}  # all that is watched of them
        self._link.send("rank", rank=rank.rank, message=message)

    def _ended(self, rank: Rank, code: int) -> None:
        while not rank.channel.closed:
            self._hear_channel(rank)
        rank.output.close()
        rank.code = code
        self._link.send(
            "ended",
            rank=rank.rank,
            code=code,
            out_of_memory=code == -9 and not rank.ended_by_us and oom_kills() > self._oom_kills,
        )

    def _pass_requests_on(self) -> None:
        """They come from the leader, rank by rank."""

    def _watch(self) -> None:
        """The leader watches."""

    def _outcome(self) -> Outcome:
        return Outcome(StopReason.DONE)  # nobody asks: the leader puts it together
