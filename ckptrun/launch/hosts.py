"""How does one supervisor lead the ranks of several hosts? As its own, with the others' supervisors for hands.

    leader                                   follower (:mod:`.follower`)
      attempt, to a rank, kill, stacks  -->
      over, again, exit, now            -->
                                        <--  a rank's words, forked, ended, swept, refused, signal

A follower decides nothing: it starts the ranks of its host and passes their words on. So whatever the loop of
:mod:`.torchrun` knows about ranks (blame, hanging, stopping) holds for those of all hosts alike. A host whose
supervisor is gone, or silent for ten seconds, is lost with its ranks.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ckptrun.errors import CkptrunError, UsageError
from ckptrun.launch.endpoint import interface_of
from ckptrun.launch.fork_client import ForkServer
from ckptrun.launch.link import Link, hear_hello
from ckptrun.launch.meeting import Card, HostError, Meeting, Place, meet
from ckptrun.launch.rank_output import OutputElsewhere
from ckptrun.launch.rank_state import Rank
from ckptrun.launch.told import first_difference
from ckptrun.launch.torchrun import Hooks, Launch, TorchrunLaunch
from ckptrun.launch.wire import Channel, Message
from ckptrun.records import Outcome, Progress, StopReason
from ckptrun.stop import StopListener, StopRequest, exit_code

_CALL_S = 60.0  # how long a host that has met the others may take to call the leader
_CALL_ANYWAY_S = 5.0  # after a stop
_POLL_S = 0.2
_LEAVE_S = 2.0  # to take its last order
_GONE_S = 1.0  # where this host ends at once as well
_SWEEP_S = 15.0  # how long it may take to end its ranks


class RefusedError(CkptrunError):
    """A follower cannot take part; the exit code is the one that it gave."""

    type_name = ""  # its message says it all

    def __init__(self, message: str, hint: str | None, exit_code: int) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


@dataclass
class Follower:
    """Another host, as the leader sees it. ``swept``: nothing of its ranks is left."""

    card: Card
    link: Link
    name: str
    swept: bool = True


class Hosts:
    """The other hosts of a run that this one leads.

    Args:
        listener: counts the signals that come to any of them.
    """

    def __init__(self, place: Place, listener: StopListener) -> None:
        self.place = place
        self._listener = listener
        self._followers: dict[str, Follower] = {}
        self.meeting: Meeting | None = None
        listener.on_ending = self._end_now

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.dismiss(1, "the leader ended")  # only where nothing was said yet

    def gather(self, meeting: Meeting) -> None:
        """Take ``meeting`` for the next attempt, and have every other host on the line.

        Raises:
            UsageError: one of them was asked for something else.
            HostError: one does not call.
        """
        self.meeting = meeting
        ids = [card.id for card in meeting.cards]
        for each in self.followers:
            if each.card.id not in ids or each.link.lost is not None:
                self.drop(each)
        names = host_names(meeting.cards)
        deadline = time.monotonic() + _CALL_S
        while missing := [card for card in meeting.cards[1:] if card.id not in self._followers]:
            self.place.door.settimeout(_POLL_S)
            try:
                sock, _ = self.place.door.accept()
            except TimeoutError:
                if self._listener.request is not None:
                    deadline = min(deadline, self._listener.request.at_monotonic + _CALL_ANYWAY_S)
                if time.monotonic() < deadline:
                    continue
                raise HostError(
                    f"{', '.join(names[card.id] for card in missing)} met the others, and did not call this host",
                    hint=f"Can it reach {meeting.leader.address}:{meeting.leader.port}? Ranks need such ports too.",
                ) from None
            called = hear_hello(sock, meeting.leader.token)
            caller = next((card for card in missing if card.id == called), None)
            if caller is None:
                sock.close()
                continue
            link = Link(sock, urgent=partial(self._urgent, caller.id))
            self._followers[caller.id] = Follower(caller, link, names[caller.id])
        for card in meeting.cards[1:]:
            self._check(meeting.leader, card, names)

    def _check(self, mine: Card, other: Card, names: dict[str, str]) -> None:
        for what, ours, theirs in (
            ("version of ckptrun", mine.version, other.version),
            ("--nnodes", mine.nnodes, other.nnodes),
            ("command", mine.fn, other.fn),
            ("run's folder", mine.run, other.run),
            ("--ckpt", mine.ckpt, other.ckpt),
        ):
            if ours != theirs:
                raise UsageError(
                    f"the hosts disagree: {what} is {ours} on {names[mine.id]} and {theirs} on {names[other.id]}",
                    hint="Start the same command on every host, in the same folder of a disk that they share.",
                )
        difference = first_difference(mine.config, other.config)
        if difference is not None:
            raise UsageError(
                f"the hosts disagree: the config of {names[mine.id]} has {difference}, as that of {names[other.id]}",
                hint="Start the same command with the same config on every host.",
            )

    def _urgent(self, host: str, message: Message) -> bool:
        if message["op"] != "signal":
            return False
        self._listener.count(int(message["signum"]), f"host {host}")
        return True

    @property
    def followers(self) -> list[Follower]:
        return list(self._followers.values())

    @property
    def interface(self) -> str | None:
        """This host's network interface on the way to the others, where one is known; ``lo`` if they are here."""
        found = [interface_of(each.link.own_address) for each in self.followers]
        return next((name for name in found if name not in (None, "lo")), found[0] if found else None)

    def drop(self, host: Follower) -> None:
        """Have nothing more to do with it; it ends once it has noticed."""
        self._followers.pop(host.card.id, None)
        host.link.close()

    def meet_again(self, server: ForkServer, say: Callable[[str], None]) -> bool:
        """Before another attempt: with those who are there, and whoever comes in place of a host that was lost.

        Returns:
            False where a stop was asked for, or not all came, which ``say`` is told.
        """
        assert self.meeting is not None
        for each in self.followers:
            each.link.send("again")
        card = replace(self.meeting.leader, leads=True)
        try:
            met = meet(server, self.place, card, over=lambda: self._listener.request is not None, say=say)
            if met is not None:
                self.gather(met)
        except CkptrunError as error:
            say(f"no other attempt: {error}")
            return False
        return met is not None

    def dismiss(self, code: int, line: str) -> None:
        """All is written: the others end with the same exit code, saying ``line``."""
        self._listener.on_ending = lambda *_: None
        self._listener.finished()
        for each in self.followers:
            each.link.send("exit", code=code, line=line)
        self._let_go(_LEAVE_S)
        for each in self.followers:
            each.link.close()
        self._followers.clear()
        self.place.close()

    def _end_now(self, request: StopRequest, stacks: bool) -> None:
        code = exit_code(Outcome(request.reason), request=request)
        for each in self.followers:
            each.link.send("now", code=code, stacks=stacks)
        self._let_go(_GONE_S)

    def _let_go(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for each in self.followers:
            each.link.let_go(max(0.0, deadline - time.monotonic()))


def host_names(cards: list[Card]) -> dict[str, str]:
    """What each host is called in messages, by id: with its address, or a number, where several have the same name."""
    names: dict[str, str] = {}
    hosts = [card.host for card in cards]
    for card in cards:
        name = card.host if hosts.count(card.host) == 1 else f"{card.host} ({card.address})"
        taken = sum(each == name or each.startswith(f"{name} #") for each in names.values())
        names[card.id] = f"{name} #{taken + 1}" if taken else name
    return names


class _Relay(Channel):
    """The way to a rank on another host; its words come with those of its supervisor."""

    def __init__(self, link: Link, rank: int) -> None:
        self._link = link
        self._rank = rank
        self.closed = True  # there is nothing here to wait for

    def send(self, op: str, **fields: Any) -> bool:
        return self._link.send("to rank", rank=self._rank, message={"op": op, **fields})

    def close(self) -> None:
        """The link goes on."""


class RemoteRank(Rank):
    """A rank on another host."""

    def on(self, follower: Follower) -> RemoteRank:
        self.follower, self.host = follower, follower.name
        return self

    def kill(self) -> None:
        if self.code is None:
            self.follower.link.send("kill", rank=self.rank)

    def ask_for_stacks(self) -> None:
        self.follower.link.send("stacks", rank=self.rank)


class LeaderLaunch(TorchrunLaunch):
    """One attempt of the ranks of all hosts.

    Args:
        told: what followers need to know of the attempt, as plain data.
    """

    def __init__(
        self,
        launch: Launch,
        server: ForkServer,
        *,
        listener: StopListener,
        progress: Progress,
        hooks: Hooks,
        hosts: Hosts,
        told: dict[str, Any],
    ) -> None:
        super().__init__(launch, server, listener=listener, progress=progress, hooks=hooks)
        self._hosts = hosts
        self._told = told
        self._refused: RefusedError | None = None

    def _start_agent(self) -> None:
        meeting = self._hosts.meeting
        assert meeting is not None
        self._agent, self._agent_id, self._agent_pid = meeting.agent, meeting.agent_id, meeting.agent_pid
        if self._listener.request is not None:
            return
        for each in self._hosts.followers:
            each.swept = False
            each.link.send("attempt", **self._told)
            self._also[each.link.fileno()] = self._hearing(each)
        self._start_ranks(meeting.start)
        first = len(self._ranks)
        world_size = int(meeting.start["ranks"][0][2])
        here = host_names(meeting.cards)[meeting.leader.id]
        for rank in self._ranks.values():
            rank.host = here
        by_id = {each.card.id: each for each in self._hosts.followers}
        for card in meeting.cards[1:]:
            each = by_id[card.id]
            for number in range(first, first + card.nproc):
                output = OutputElsewhere(self._launch.log_path(number))
                rank = RemoteRank(number, _Relay(each.link, number), output).on(each)
                self._ranks[number] = rank
                self._tell_stop(rank)
            first += card.nproc
        assert first == world_size

    def _hearing(self, host: Follower) -> Callable[[], None]:
        def hear() -> None:
            for message in host.link.take():
                self._hear_host(host, message)
            if host.link.lost is not None:
                self._also.pop(host.link.fileno(), None)
                self._lose(host, host.link.lost)

        return hear

    def _hear_host(self, host: Follower, message: Message) -> None:
        op = message["op"]
        if op == "forked":
            for number, pid in message["ranks"]:
                self._of(host, number).pid = pid
                self._of(host, number).moved_at = time.monotonic()
            self._started()
        elif op == "rank":
            self._hear_rank(self._of(host, message["rank"]), message["message"])
        elif op == "ended":
            rank = self._of(host, message["rank"])
            self._ended(rank, message["code"])
            rank.out_of_memory = message["out_of_memory"]
        elif op == "refused":
            self._refused = RefusedError(
                f"{host.name} cannot take part: {message['message']}", message["hint"], message["exit_code"]
            )
            self._trouble = str(self._refused)
        elif op == "swept":
            host.swept = True
            if message["trouble"] is not None:
                self._trouble = f"on {host.name}, {message['trouble']}"

    def _of(self, host: Follower, number: int) -> Rank:
        rank = self._ranks[number]
        assert isinstance(rank, RemoteRank)
        assert rank.follower is host
        return rank

    def _lose(self, host: Follower, why: str) -> None:
        host.swept = True
        for rank in self._ranks.values():
            if isinstance(rank, RemoteRank) and rank.follower is host and rank.code is None:
                rank.host_lost = f"{host.name} is gone ({why})"
                self._ended(rank, -signal.SIGKILL)
                rank.out_of_memory = False

    def _outcome(self) -> Outcome:
        if self._refused is not None:
            return Outcome(StopReason.EXCEPTION, self._progress.step, error=self._refused, built=False)
        return super()._outcome()

    def _end_all(self) -> None:
        for each in self._hosts.followers:
            if not each.swept:
                each.link.send("over")
        super()._end_all()
        deadline = time.monotonic() + _SWEEP_S
        for each in self._hosts.followers:
            while not each.swept and each.link.lost is None and time.monotonic() < deadline:
                each.swept = any(message["op"] == "swept" for message in each.link.take())
                if not each.swept:
                    time.sleep(0.01)
            if not each.swept:
                # What it still says about this attempt must not be heard in the next one.
                self._hosts.drop(each)


def rank_environment(interface: str | None) -> dict[str, str]:
    """What ranks of several hosts need in their environment: the interface that leads to the others."""
    if interface is None or "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    return {"GLOO_SOCKET_IFNAME": interface}
