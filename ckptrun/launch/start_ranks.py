"""How do a supervisor's context and a session's wishes become ranks, on this host or led from it?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptrun.launch.deepspeed import DeepSpeedLaunch
from ckptrun.launch.fork_client import ForkServer
from ckptrun.launch.hosts import Hosts, LeaderLaunch, rank_environment
from ckptrun.launch.inline import RankMain
from ckptrun.launch.plan import LaunchPlan
from ckptrun.launch.rank_process import RankJob
from ckptrun.launch.told import fingerprint, resolution_to_plain
from ckptrun.launch.torchrun import Hooks, Launch, TorchrunLaunch, rank_logs
from ckptrun.records import Outcome
from ckptrun.stop import StopListener

if TYPE_CHECKING:
    from ckptrun.fit.context import RankContext

_FACTS = (
    "run_id", "attempt", "lease_epoch", "job", "save_on_stop", "hpc_for", "on_save_error", "async_save", "trust",
    "override", "exact", "strategy", "versions", "resume_past_early_stop", "logs_dir",
)  # fmt: skip


def run_torchrun(
    work: RankMain,
    context: RankContext,
    server: ForkServer,
    *,
    nproc: int,
    listener: StopListener,
    hang_timeout_s: float | None,
    output: Callable[[str, bool], None],
    started: Callable[[list[tuple[int, int, str]], list[int]], None],
    dump_with: Callable[[Callable[[], None]], None],
    hosts: Hosts | None = None,
    local: tuple[int, int] | None = None,
    plan: LaunchPlan | None = None,
) -> Outcome:
    """Run ``work`` in ``nproc`` ranks on this host, as the supervisor's ``context`` says.

    Args:
        output: takes each line that rank 0 prints, and whether it came on stderr.
        started: takes (rank, process, host) of every rank once they are there, and this host's processes.
        dump_with: is given the function that makes every rank write its stacks.
        hosts: the others, where this host leads several; ``nproc`` are then this one's.
        local: local rank and how many there are, where this host's only rank is one of several there.
        plan: where it is DeepSpeed's launcher that starts them.
    """
    facts = {name: getattr(context, name) for name in _FACTS}
    run_path = None if context.run is None else context.run.path

    def job(rank: int, local_rank: int, world_size: int) -> RankJob:
        return RankJob(work, run_path, facts, context.resolution, rank, local_rank, world_size)

    def restored(seconds: float) -> None:
        context.restore_s = seconds

    context.metrics = lambda: context.progress.metrics
    spec = Launch(
        nproc,
        job,
        rank_logs(context.logs_dir, context.attempt),
        context.attempt,
        context.run_id or "run",
        hang_timeout_s,
        env={} if hosts is None else rank_environment(hosts.interface),
        local=local,
    )
    hooks = Hooks(
        saved=context.saved,
        stage_changed=context.stage_changed,
        saving=context.saving,
        save_served=context.save_served,
        say=context.say,
        output=output,
        first_step=context.first_step_done,
        restore_s=restored,
        ranks=started,
    )
    if plan is not None and plan.control is not None:
        launch: TorchrunLaunch = DeepSpeedLaunch(
            replace(spec, env=plan.env),
            server,
            listener=listener,
            progress=context.progress,
            hooks=hooks,
            command=plan.argv,
            control=plan.control,
            everywhere=plan.everywhere,
        )
    elif hosts is None:
        launch = TorchrunLaunch(spec, server, listener=listener, progress=context.progress, hooks=hooks)
    else:
        seen = None
        with contextlib.suppress(OSError):  # the ranks say what is wrong with it
            seen = fingerprint(context.resolution.path)
        told = {
            "facts": facts,
            "run_path": run_path,
            "resolution": resolution_to_plain(context.resolution),
            "fingerprint": seen,
        }
        launch = LeaderLaunch(
            spec, server, listener=listener, progress=context.progress, hooks=hooks, hosts=hosts, told=told
        )
    dump_with(launch.dump_stacks)
    return launch.run()
