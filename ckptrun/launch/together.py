"""How does one command among several hosts take part: leading the others, or following the one that leads?"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ckptrun.environment.versions import versions
from ckptrun.errors import CkptrunError
from ckptrun.launch.follower import Following, follow
from ckptrun.launch.fork_client import ForkServer
from ckptrun.launch.hosts import Hosts
from ckptrun.launch.inline import RankMain
from ckptrun.launch.meeting import Place, meet, new_card
from ckptrun.launch.plan import LaunchPlan
from ckptrun.records import Fn, Outcome
from ckptrun.stop import StopListener, exit_code

ResultT = TypeVar("ResultT")


@dataclass
class Part:
    """What this host was asked to do. ``fork_server`` gives a server that can be used, a new one where need be."""

    plan: LaunchPlan
    fn: Fn
    run_path: str
    reference: str | None
    config: str | None
    rank_main: RankMain
    listener: StopListener
    fork_server: Callable[[], ForkServer]
    say: Callable[[str], None]


def take_part(
    part: Part,
    *,
    lead: Callable[[Hosts], ResultT],
    last_word: Callable[[ResultT], tuple[int, str]],
    ended: Callable[[int], ResultT],
) -> ResultT:
    """Meet the others; then lead them through ``lead``, or follow the one that does.

    Args:
        last_word: the exit code and the line that all others end with.
        ended: makes a result of an exit code, where this host does not lead.

    Raises:
        CkptrunError: nothing was started. Where this host leads, the others end with the same code.
    """
    place = Place(part.plan.rdzv_endpoint or "", part.plan.num_hosts, part.plan.rdzv_timeout_s)
    try:
        card = new_card(
            place,
            nproc=part.plan.num_ranks,
            fn=part.fn,
            run=os.path.abspath(part.run_path),
            ckpt=part.reference or "left out",
            version="{ckptrun} with torch {torch}".format_map({"torch": "none", **versions()}),
            config=part.config or "",
        )
        met = meet(
            part.fork_server(), place, card, over=lambda: part.listener.request is not None, say=part.say
        )
        if met is None:
            return ended(_stopped(part))
        if not met.leads:
            following = Following(place, card, part.rank_main, part.listener, part.fork_server, part.say)
            return ended(follow(following, met))
        with Hosts(place, part.listener) as hosts:
            try:
                hosts.gather(met)
                result = lead(hosts)
            except CkptrunError as error:
                hosts.dismiss(error.exit_code, f"the leader ended: {error.message}")
                raise
            hosts.dismiss(*last_word(result))
            return result
    finally:
        place.close()


def _stopped(part: Part) -> int:
    request = part.listener.request
    assert request is not None
    part.listener.finished()
    part.say("stopped before all hosts had met")
    return exit_code(Outcome(request.reason), request=request)
