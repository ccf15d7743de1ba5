"""How do the ranks of a session run, and what does their end come to?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptrun.errors import IncompatibleError, UsageError
from ckptrun.launch.early import take
from ckptrun.launch.forced_end import ForcedEnd
from ckptrun.launch.fork_client import ForkServer
from ckptrun.launch.inline import run_inline
from ckptrun.launch.supervisor import Display, Supervisor
from ckptrun.records import Outcome, Progress
from ckptrun.session.spec import SessionSpec
from ckptrun.stop import exit_code

if TYPE_CHECKING:
    from ckptrun.fit.context import RankContext


IN_PROCESSES = ("torchrun", "deepspeed")  # launchers whose ranks are processes of their own
_FORCED_END_S = 60.0  # far more than a forced end takes, with a controller that is slow to answer


def start_fork_server(spec: SessionSpec) -> ForkServer:
    """The one that ranks come from, a new one where need be. It imports torch while the checkpoint is chosen."""
    if spec.fork_server is None or spec.fork_server.closed:
        # What DeepSpeed's launcher starts imports for itself; only something has to own it.
        method = "spawn" if spec.plan.launcher == "deepspeed" else spec.start_method
        spec.fork_server = take(spec.plan.env, method=method, fn=spec.fn)
    return spec.fork_server


def prepare_once(spec: SessionSpec) -> None:
    """Once."""
    prepare, spec.prepare = spec.prepare, lambda: None
    prepare()


def ready_again(spec: SessionSpec) -> bool:
    """Get what ranks need once more: a server to come from, and the other hosts. False where those do not come."""
    if spec.plan.launcher in IN_PROCESSES:
        start_fork_server(spec)
    return spec.hosts is None or spec.hosts.meet_again(start_fork_server(spec), spec.echo)


class _Quiet:
    """No bar: lines go where notices go."""

    def __init__(self, echo: Callable[[str], None]) -> None:
        self._echo = echo

    def start(self) -> None: ...

    def stop(self, final_line: str | None = None) -> None:
        if final_line is not None:
            self._echo(final_line.removeprefix("ckptrun: "))

    def say(self, text: str) -> None:
        self._echo(text)


class _Told:
    """The bar, above which lines look like all others of ckptrun."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self.start, self.stop = display.start, display.stop

    def say(self, text: str) -> None:
        self._display.say(f"ckptrun: {text}")


def display_of(spec: SessionSpec, progress: Progress, metrics: Callable[[], dict[str, float]]) -> Display:
    return _Quiet(spec.echo) if spec.make_display is None else _Told(spec.make_display(progress, metrics))


def run_ranks(
    spec: SessionSpec,
    context: RankContext,
    display: Display,
    supervisor: Supervisor | None = None,
    forced: ForcedEnd | None = None,
) -> tuple[Outcome, int]:
    context.strategy = spec.plan.strategy
    display.start()
    try:
        if spec.plan.launcher == "inline":
            outcome = run_inline(spec.rank_main, context)
        else:
            outcome = _torchrun(spec, context, supervisor, forced)
    finally:
        if spec.listener.ends_at_once:
            # Its workers were killed under it, so what it says is not how this ends: the listener's thread, which
            # shows and writes that, ends the process.
            time.sleep(_FORCED_END_S)
        display.stop()
    request = spec.listener.request
    # A rank that ended in its set-up knows of no step yet; the run is where it was.
    outcome = replace(outcome, step=max(outcome.step, context.progress.step))
    code = exit_code(outcome, request=request)
    begun = context.progress.step > context.progress.start_step
    if code == UsageError.exit_code and begun:
        code = 1  # 2 says that nothing was started
    if code == IncompatibleError.exit_code and not begun and not outcome.user_error:
        outcome = replace(
            outcome, built=False
        )  # 5 says so too: the checkpoint was refused while it was restored
    return outcome, code


def _torchrun(
    spec: SessionSpec, context: RankContext, supervisor: Supervisor | None, forced: ForcedEnd | None
) -> Outcome:
    from ckptrun.launch.start_ranks import run_torchrun

    server = spec.fork_server
    assert server is not None

    def dump_with(dump: Callable[[], None]) -> None:
        if supervisor is not None:
            supervisor.dump_stacks = dump
        if forced is not None:
            forced.dump_ranks = dump

    return run_torchrun(
        spec.rank_main,
        context,
        server,
        nproc=spec.plan.num_ranks,
        listener=spec.listener,
        hang_timeout_s=spec.hang_timeout_s,
        output=spec.output,
        started=supervisor.ranks if supervisor is not None else lambda *_: None,
        dump_with=dump_with,
        hosts=spec.hosts,
        local=spec.plan.local,
        plan=spec.plan,
    )


def one_line(outcome: Outcome) -> str | None:
    if outcome.error is None:
        return outcome.save_error
    text = str(outcome.error).strip().splitlines()
    name = getattr(outcome.error, "type_name", type(outcome.error).__name__)
    return f"{name}: {text[0]}" if text and name else (text or [name])[0]
