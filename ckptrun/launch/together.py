"""How does one command among several hosts take part: leading the others, or following the one that leads?"""

from __future__ import annotations

import contextlib
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
from ckptrun.launch.slurm_tasks import Gathering, endpoint_of_tasks, forget
from ckptrun.records import Fn, JobFacts, Outcome
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
    job: JobFacts | None = None  # where SLURM's tasks take part

    @property
    def gathering(self) -> Gathering | None:
        """Where SLURM's tasks meet, unless an endpoint is given."""
        if self.plan.task is None or self.job is None or self.plan.rdzv_endpoint:
            return None
        root = os.path.dirname(os.path.abspath(self.run_path))
        return Gathering(self.plan.task, self.job, root, self.plan.rdzv_timeout_s)

    def over(self) -> bool:
        """Whether there is no more reason to meet."""
        return self.listener.request is not None


def take_part(
    part: Part,
    *,
    lead: Callable[[Hosts], ResultT],
    last_word: Callable[[ResultT], tuple[int, str]],
    ended: Callable[[int], ResultT],
    stopped: Callable[[int], ResultT],
) -> ResultT:
    """Meet the others; then lead them through ``lead``, or follow the one that does.

    Args:
        last_word: the exit code and the line that all others end with.
        ended: makes a result of an exit code, where this host does not lead.
        stopped: the same, where a stop came before all had met.

    Raises:
        CkptrunError: nothing was started. Where this host leads, the others end with the same code.
    """
    with _endpoint(part) as endpoint:
        if endpoint is None:
            return stopped(_stopped(part))
        of = "hosts" if part.plan.task is None else "tasks"
        place = Place(endpoint, part.plan.num_hosts, part.plan.rdzv_timeout_s, of)
        try:
            return _take_part(part, place, lead=lead, last_word=last_word, ended=ended, stopped=stopped)
        finally:
            place.close()


def _endpoint(part: Part) -> contextlib.AbstractContextManager[str | None]:
    if part.gathering is None:
        return contextlib.nullcontext(part.plan.rdzv_endpoint or "")
    return endpoint_of_tasks(part.gathering, over=part.over, say=part.say)


def _take_part(
    part: Part,
    place: Place,
    *,
    lead: Callable[[Hosts], ResultT],
    last_word: Callable[[ResultT], tuple[int, str]],
    ended: Callable[[int], ResultT],
    stopped: Callable[[int], ResultT],
) -> ResultT:
    card = new_card(
        place,
        nproc=part.plan.num_ranks,
        fn=part.fn,
        run=os.path.abspath(part.run_path),
        ckpt=part.reference or "left out",
        version="{ckptrun} with torch {torch}".format_map({"torch": "none", **versions()}),
        config=part.config or "",
        task=part.plan.task,
    )
    met = meet(part.fork_server(), place, card, over=part.over, say=part.say)
    if met is None:
        return stopped(_stopped(part))
    if not met.leads:
        following = Following(
            place, card, part.rank_main, part.listener, part.fork_server, part.say, part.plan.local
        )
        return ended(follow(following, met))
    if part.gathering is not None:
        forget(part.gathering)
    with Hosts(place, part.listener) as hosts:
        try:
            hosts.gather(met)
            result = lead(hosts)
        except CkptrunError as error:
            hosts.dismiss(error.exit_code, f"the leader ended: {error.message}")
            raise
        hosts.dismiss(*last_word(result))
        return result


def _stopped(part: Part) -> int:
    request = part.listener.request
    assert request is not None
    part.listener.finished()
    part.say("stopped before all hosts had met")
    return exit_code(Outcome(request.reason), request=request)
