"""What is the story of one command that trains or evaluates?

    lease  ->  resolve  ->  is anything left to do?  ->  ledger  ->  ranks  ->  ledger, status, lease back

Both the command line and ``ckptrun.Trainer`` in a script tell it through here, so that rules, exit codes and files
are the same. Nothing heavy is imported before it is known that ranks will run.

Decision: a fit resolves while it holds the lease, so that nobody saves between the choice and the start; where the
run's folder does not exist yet it resolves once before, so that a reference that cannot be served creates nothing.
"""

from __future__ import annotations

from dataclasses import replace

from ckptrun.errors import RunInUseError
from ckptrun.launch.universal import needs_conversion
from ckptrun.records import Resolution, ResolutionError
from ckptrun.run.lease import live_holder
from ckptrun.session.choose import nothing_left_in, resolve, wanted
from ckptrun.session.evaluate import run_evaluation
from ckptrun.session.fit import fit_without_a_trace, run_fit
from ckptrun.session.job import see_to_the_job
from ckptrun.session.ranks import IN_PROCESSES, start_fork_server
from ckptrun.session.several_hosts import run_on_several_hosts
from ckptrun.session.spec import SessionResult, SessionSpec


def preview(spec: SessionSpec) -> tuple[Resolution, int, str | None]:
    """The answer that running ``spec`` would begin with, changing nothing.

    Returns:
        The resolution, the exit code that the command would end with where it would not start (else 0), and why
        there is nothing left to do (else None).
    """
    holder = None
    if spec.fn == "fit" and not spec.fast_dev_run:
        holder = live_holder(spec.folder.lease)
    gathered, resolution = resolve(spec)
    if holder is not None and resolution.error is None:
        error = ResolutionError(
            RunInUseError.exit_code,
            f"run {spec.folder.name!r} is in use by {holder}",
            f"Wait for it to end, ask it to stop with `ckptrun stop {spec.folder.name}`, or choose another name with "
            "--run.",
        )
        return replace(resolution, error=error), error.exit_code, None
    fits = spec.fn == "fit" and resolution.error is None
    differs = needs_conversion(resolution, wanted(spec)) if fits else None
    if differs is not None:
        notice = f"{differs}: it will be converted to DeepSpeed's universal format, once"
        resolution = replace(resolution, notices=(*resolution.notices, notice))
    code = 0 if resolution.error is None else resolution.error.exit_code
    return resolution, code, nothing_left_in(spec, gathered, resolution)


def run_session(spec: SessionSpec) -> SessionResult:
    """Do it.

    Raises:
        CkptrunError: nothing was started, and there is no resolution that could say why.
    """
    spec.listener.grace_s = spec.grace_s
    if spec.plan.launcher in IN_PROCESSES:
        start_fork_server(spec)
    try:
        return _run(spec) if spec.plan.num_hosts == 1 else run_on_several_hosts(spec, _run)
    finally:
        if spec.fork_server is not None:
            spec.fork_server.close()


def _run(spec: SessionSpec) -> SessionResult:
    if spec.walltime is None:
        return _work(spec)
    with spec.walltime:
        return see_to_the_job(spec, _work(spec))


def _work(spec: SessionSpec) -> SessionResult:
    if spec.fn != "fit":
        return run_evaluation(spec)
    if spec.fast_dev_run:
        return fit_without_a_trace(spec)
    return run_fit(spec)
