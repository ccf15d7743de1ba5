"""How do a supervisor's context and a session's wishes become ranks on this host?"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckptrun.launch.fork_client import ForkServer
from ckptrun.launch.inline import RankMain
from ckptrun.launch.rank_process import RankJob
from ckptrun.launch.torchrun import Hooks, Launch, TorchrunLaunch
from ckptrun.records import Outcome
from ckptrun.stop import StopListener

if TYPE_CHECKING:
    from ckptrun.fit.context import RankContext

_FACTS = (
    "run_id", "attempt", "lease_epoch", "job", "save_on_stop", "on_save_error", "async_save", "trust", "override",
    "exact", "strategy", "versions", "resume_past_early_stop", "logs_dir",
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
    started: Callable[[list[tuple[int, int, str]]], None],
    dump_with: Callable[[Callable[[], None]], None],
) -> Outcome:
    """Run ``work`` in ``nproc`` ranks on this host, as the supervisor's ``context`` says.

    Args:
        output: takes each line that rank 0 prints, and whether it came on stderr.
        started: takes (rank, process, host) of every rank once they are there.
        dump_with: is given the function that makes every rank write its stacks.
    """
    facts = {name: getattr(context, name) for name in _FACTS}

    def job(rank: int, local_rank: int, world_size: int) -> RankJob:
        run_path = None if context.run is None else context.run.path
        return RankJob(work, run_path, facts, context.resolution, rank, local_rank, world_size)

    def log_path(rank: int) -> str:
        if context.logs_dir is None:
            return os.devnull
        return os.path.join(context.logs_dir, f"attempt-{context.attempt:04d}-rank-{rank:04d}.log")

    def restored(seconds: float) -> None:
        context.restore_s = seconds

    context.metrics = lambda: context.progress.metrics
    launch = TorchrunLaunch(
        Launch(nproc, job, log_path, context.attempt, context.run_id or "run", hang_timeout_s),
        server,
        listener=listener,
        progress=context.progress,
        hooks=Hooks(
            saved=context.saved,
            stage_changed=context.stage_changed,
            saving=context.saving,
            save_served=context.save_served,
            say=context.say,
            output=output,
            first_step=context.first_step_done,
            restore_s=restored,
            ranks=started,
        ),
    )
    dump_with(launch.dump_stacks)
    return launch.run()
