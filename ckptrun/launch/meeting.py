"""How do the supervisors of several hosts find each other, and which of them leads?

Each forks an elastic agent, which takes part in the rendezvous at the endpoint; the endpoint's host serves its store.
With its agent each sends a card: who it is, what it was asked to do, and where it can be called with which token. All
get all cards, in the order of ranks: the first leads. In a later attempt the one that has led goes on leading.

Decision: what the agents exchange is enough to start, so the rendezvous' store is needed only until all have met.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from ckptrun.environment.process import host_name
from ckptrun.errors import CkptrunError, UsageError
from ckptrun.launch.endpoint import (
    Endpoint,
    addresses,
    await_answer,
    is_here,
    own_address,
    parse_endpoint,
    port_is_free,
    refusal,
)
from ckptrun.launch.fork_client import ForkServer
from ckptrun.launch.wire import Channel, Message
from ckptrun.records import TaskFacts

_RENDEZVOUS_ID = "ckptrun"  # the same for all, so that who meets the wrong ones learns it from their cards
_ANSWER_S = 15  # what a store may take to answer
_SAID_AFTER_S = 5.0
_POLL_S = 0.1
_AGAIN_S = 1.0
_LEAVE_S = 1.5  # longer than agents take to look whether all have come
_NO_ANSWER = "RendezvousConnectionError"
_NOT_ALL = "RendezvousTimeoutError"


class HostError(CkptrunError):
    """The hosts cannot work together, and none of the options is wrong: one is gone, or has not come."""

    exit_code = 70
    type_name = ""  # its message says it all


@dataclass(frozen=True)
class Card:
    """What a supervisor tells the others. From ``nnodes`` on it is what they must have in common."""

    id: str
    host: str
    address: str
    port: int
    token: str
    nproc: int
    nnodes: int
    fn: str
    run: str
    ckpt: str
    version: str
    config: str
    leads: bool = False
    order: int = 0  # among those that do not lead, where somebody (SLURM) has numbered them


@dataclass
class Meeting:
    """All have met. ``cards`` stand in the order of ranks, the leader's first; ``start`` is the agent's word on which
    ranks are this host's."""

    cards: list[Card]
    me: int
    start: Message
    agent: Channel
    agent_id: int
    agent_pid: int

    @property
    def leader(self) -> Card:
        return self.cards[0]

    @property
    def leads(self) -> bool:
        return self.me == 0


class Place:
    """Where hosts meet, as this host sees it, and the door at which the others can call it.

    Args:
        timeout_s: within which all must have come.
        of: what they are to their user: ``hosts``, or SLURM's ``tasks``, of which one host may have several.

    Raises:
        UsageError: the endpoint cannot be one.
    """

    def __init__(self, endpoint: str, num_hosts: int, timeout_s: float, of: str = "hosts") -> None:
        self.endpoint: Endpoint = parse_endpoint(endpoint)
        self.num_hosts = num_hosts
        self.timeout_s = timeout_s
        self.of = of
        found = addresses(self.endpoint)
        here = [address for address in found if is_here(address)]
        self.address = (here or found)[0]
        self.is_here = bool(here)
        self.own_address = own_address(self.endpoint, self.address)
        self.door = self._open_door()

    def _open_door(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        # The others reach this host by a name only where the endpoint's is its own.
        own = "" if self.own_address == self.endpoint.host else self.own_address
        return socket.create_server((own, 0), family=family)

    @property
    def port(self) -> int:
        return int(self.door.getsockname()[1])

    def close(self) -> None:
        self.door.close()


def meet(
    server: ForkServer, place: Place, card: Card, *, over: Callable[[], bool], say: Callable[[str], None]
) -> Meeting | None:
    """Meet the other hosts.

    Args:
        over: asked now and then: is there no more reason to meet?
        say: is told what is waited for, once it takes long.

    Returns:
        None where ``over`` said so first.

    Raises:
        UsageError: nobody serves the endpoint, something else does, or it cannot be served from here.
        HostError: not all came in time.
    """
    deadline = time.monotonic() + place.timeout_s
    who = f"{place.num_hosts} {place.of}"
    says = _Once(say, f"waiting up to {place.timeout_s:.0f} s for {who} to meet at {place.endpoint}")
    while True:
        serves = place.is_here and _can_serve(place, over)
        remaining_s = max(1.0, deadline - time.monotonic())
        if not place.is_here and not await_answer(
            place.endpoint,
            place.address,
            timeout_s=remaining_s,
            left=lambda s: _pause(s, over),
            say=says.instead,
        ):
            return None
        attempt = _Attempt(server, place, card, serves=serves, timeout_s=remaining_s)
        try:
            left_at = None
            while (started := attempt.hear()) is None and attempt.failed is None:
                says.after(_SAID_AFTER_S)
                if left_at is None and over():
                    # The last may have come a moment ago: then the others count on this one, and stop with it.
                    left_at = time.monotonic() + _LEAVE_S
                if left_at is not None and time.monotonic() > left_at:
                    break
        except BaseException:
            attempt.give_up()
            raise
        if started is not None:
            return started
        attempt.give_up()
        if attempt.failed is None or over():
            return None
        kind, why = attempt.failed
        if not attempt.reached and kind == _NO_ANSWER and refusal(place.endpoint, place.address) is None:
            raise _stranger(place)
        if kind == _NOT_ALL or time.monotonic() + _AGAIN_S >= deadline:
            raise HostError(
                f"{who} were to meet at {place.endpoint}, and not all came within "
                f"{place.timeout_s:.0f} s{'' if kind == _NOT_ALL else f' ({why})'}",
                hint="Start the same command on each of them; --nnodes says how many there are."
                if place.of == "hosts"
                else "What the others say stands in the job's log.",
            )
        # The one that served it has left, or its time for another try has come: so has everybody's.
        if _pause(_AGAIN_S, over):
            return None


def new_card(
    place: Place,
    *,
    nproc: int,
    fn: str,
    run: str,
    ckpt: str,
    version: str,
    config: str,
    task: TaskFacts | None = None,
) -> Card:
    """This supervisor's card, with a token of its own; ``task`` says which of SLURM's tasks it is."""
    return Card(
        id=secrets.token_hex(8),
        host=host_name() if task is None else task.node,
        leads=task is not None and task.number == 0,
        order=0 if task is None else task.number,
        address=place.own_address,
        port=place.port,
        token=secrets.token_hex(16),
        nproc=nproc,
        nnodes=place.num_hosts,
        fn=fn,
        run=run,
        ckpt=ckpt,
        version=version,
        config=config,
    )


class _Once:
    """Something that is said once, when it takes long."""

    def __init__(self, say: Callable[[str], None], text: str) -> None:
        self._say = say
        self._text = text
        self._began = time.monotonic()
        self._said = False

    def after(self, seconds: float) -> None:
        if not self._said and time.monotonic() - self._began >= seconds:
            self.instead(self._text)

    def instead(self, text: str) -> None:
        if not self._said:
            self._said = True
            self._say(text)


class _Attempt:
    """One agent's try to meet the others."""

    def __init__(
        self, server: ForkServer, place: Place, card: Card, *, serves: bool, timeout_s: float
    ) -> None:
        self._server = server
        self._card = card
        self._agent, theirs = Channel.pair()
        self._pid = 0
        self._began = time.monotonic()
        self.reached = False
        self.failed: tuple[str, str] | None = None
        options: dict[str, Any] = {
            "backend": "c10d",
            "endpoint": str(replace(place.endpoint, host=place.address)),
            "serves": serves,
            "run_id": _RENDEZVOUS_ID,
            "nnodes": place.num_hosts,
            "nproc": card.nproc,
            "local_addr": card.address,
            "card": asdict(card),
            "rdzv_options": {"join_timeout": max(1, int(timeout_s)), "read_timeout": _ANSWER_S},
        }
        self._id = server.fork(
            "ckptrun.launch.elastic_agent:agent_main",
            json.dumps(options).encode(),
            env={},
            fds=[theirs.fileno()],
        )
        theirs.close()

    def hear(self) -> Meeting | None:
        """Wait a moment for news; the meeting, once it has come about."""
        poll = select.poll()
        poll.register(self._server, select.POLLIN)
        if not self._agent.closed:
            poll.register(self._agent, select.POLLIN)
        heard = {fd for fd, _ in poll.poll(_POLL_S * 1000)}
        if self._server.fileno() in heard:
            self._hear_server()
        if not self._agent.closed and self._agent.fileno() in heard:
            for message in self._agent.receive():
                if message["op"] == "start":
                    return self._met(message)
                if message["op"] == "reached":
                    self.reached = True
                elif message["op"] == "failed":
                    self.failed = message["kind"], message["error"]
        if self._pid and not self.reached and time.monotonic() - self._began > 2 * _ANSWER_S:
            self.failed = _NO_ANSWER, "it does not answer"
        return None

    def _hear_server(self) -> None:
        for message in self._server.receive():
            if message["op"] == "forked" and message["id"] == self._id:
                self._pid, self._began = message["pid"], time.monotonic()
            elif message["op"] == "refused" and message["id"] == self._id:
                raise HostError(f"a process could not be started: {message['why']}")
            elif message["op"] == "ended" and message["pid"] == self._pid and self.failed is None:
                self.failed = "ended", f"torch's elastic agent ended with {message['code']}"
        if self._server.closed:
            raise HostError("the process that ranks are forked from is gone")

    def _met(self, message: Message) -> Meeting:
        try:
            cards = [Card(**card) for card in message["cards"]]
        except TypeError:
            raise UsageError(
                "the hosts disagree: one of them has another version of ckptrun",
                hint="Install the same version on every host.",
            ) from None
        me = next(index for index, card in enumerate(cards) if card.id == self._card.id)
        return Meeting(cards, me, message, self._agent, self._id, self._pid)

    def give_up(self) -> None:
        """End the agent; it may be in a call that does not return."""
        self._agent.close()
        if self._pid:
            try:
                os.kill(self._pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def _pause(seconds: float, over: Callable[[], bool]) -> bool:
    """Wait, or return True as soon as ``over`` says so."""
    end = time.monotonic() + seconds
    while not over():
        left_s = end - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(_POLL_S, left_s))
    return True


def _can_serve(place: Place, over: Callable[[], bool]) -> bool:
    """Whether the port is free here. One at which nobody answers is about to be: its process has just ended."""
    while not port_is_free(place.endpoint.port):
        if refusal(place.endpoint, place.address) is None or _pause(_POLL_S, over):
            return False
    return True


def _stranger(place: Place) -> UsageError:
    if place.is_here:
        return UsageError(
            f"port {place.endpoint.port} of this host is in use by something that is no rendezvous",
            hint=f"Choose another port in --rdzv-endpoint {place.endpoint}, the same on every host.",
        )
    return UsageError(
        f"what answers at {place.endpoint} is no rendezvous of ckptrun or torchrun",
        hint="Choose another port in --rdzv-endpoint, the same on every host.",
    )
