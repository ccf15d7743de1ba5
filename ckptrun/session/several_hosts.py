"""How does a session take part in one on several hosts?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckptrun.session.job import stopped_before_all_had_met
from ckptrun.session.ranks import one_line, start_fork_server
from ckptrun.session.spec import SessionResult, SessionSpec

if TYPE_CHECKING:
    from ckptrun.launch.hosts import Hosts


def run_on_several_hosts(
    spec: SessionSpec, tell_story: Callable[[SessionSpec], SessionResult]
) -> SessionResult:
    """Meet the others; then lead them through the story that ``tell_story`` tells, or follow the one that does."""

    def lead(hosts: Hosts) -> SessionResult:
        spec.hosts = hosts
        return tell_story(spec)

    task = spec.plan.task
    watches = spec.walltime if task is not None and task.number == 0 else None
    with watches or contextlib.nullcontext():
        return _take_part(spec, lead)


def _take_part(spec: SessionSpec, lead: Callable[[Hosts], SessionResult]) -> SessionResult:
    from ckptrun.launch.together import Part, take_part

    return take_part(
        Part(
            spec.plan,
            spec.fn,
            spec.folder.path,
            spec.reference,
            spec.config_text,
            spec.rank_main,
            spec.listener,
            lambda: start_fork_server(spec),
            spec.echo,
            spec.job,
        ),
        lead=lead,
        last_word=lambda result: (result.exit_code, _told_to_followers(result)),
        ended=SessionResult,
        stopped=lambda code: stopped_before_all_had_met(spec, code),
    )


def _told_to_followers(result: SessionResult) -> str:
    if result.outcome is not None:
        how = f"{result.outcome.stop_reason} at step {result.outcome.step}"
        why = one_line(result.outcome)
        return f"the leader ended: {how}{'' if why is None else f', {why}'}"
    if result.resolution is not None and result.resolution.error is not None:
        return f"the leader ended: {result.resolution.error.message}"
    return f"the leader ended: {result.nothing_left or 'nothing was started'}"
