"""What do ``fit``, ``validate``, ``test`` and ``predict`` have in common? Their whole story, in three acts.

    resolve   which config, run and checkpoint: no class of the user's is imported for it
    print     what was decided and why, on stderr; with --dry-run or --print-config the story ends here
    launch    the ranks do the work, the supervisor watches, and what came of it is told

Decision: the command line gathers what is asked and hands it to :mod:`ckptrun.session`, which a Trainer in
Python goes through as well. Turned down: a path of its own for each command, with its own idea of stopping.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

from ckptrun.cli.drift import config_check, early_stopping_changed
from ckptrun.cli.job_check import job_warnings
from ckptrun.cli.options import FnOptions, command_line
from ckptrun.cli.output import note, print_json, say, stdout_kept_for_json
from ckptrun.cli.rank import RankWork
from ckptrun.cli.report import tell_problem
from ckptrun.cli.resolution import lines
from ckptrun.cli.settle import Settled, settle_fn
from ckptrun.config.support import check_supported, without_effect
from ckptrun.config.yaml_format import dump
from ckptrun.deepspeed_config import stage_of
from ckptrun.errors import UsageError
from ckptrun.launch.deepspeed_command import DeepSpeedOptions
from ckptrun.launch.plan import TAKE_TURNS, LaunchPlan, make_plan
from ckptrun.launch.requeue import Policy
from ckptrun.launch.walltime import Walltime
from ckptrun.records import Fn, Progress, Resolution
from ckptrun.resolve.explain import headline, passed_over, to_json
from ckptrun.resolve.finished import Limits
from ckptrun.session.job import meaning_of_sigterm
from ckptrun.session.spec import SessionSpec
from ckptrun.session.story import preview, run_session
from ckptrun.stop import DEFAULT_GRACE_S, StopListener

if TYPE_CHECKING:
    from ckptrun.launch.supervisor import Display

_DEFAULT_MAX_EPOCHS = 1000  # Lightning's, where nothing else limits training


def run_fn(fn: Fn, options: FnOptions, listener: StopListener | None) -> int:
    """Run one fn command and return its exit code.

    Args:
        listener: the one that has recorded signals since the process began.

    Raises:
        CkptrunError: nothing was started.
    """
    settled = settle_fn(fn, options, os.environ)
    if options.print_config:
        return _print_config(settled, as_json=options.json)
    spec = make_spec(settled, options, listener or StopListener())
    for text in job_warnings(settled, spec.plan, os.environ):
        note(f"ckptrun: warning: {text}")
    if options.dry_run:
        return _dry_run(spec, as_json=options.json)
    return _launch(spec, options)


def make_spec(settled: Settled, options: FnOptions, listener: StopListener) -> SessionSpec:
    """What the session has to know, from the options and the config.

    Raises:
        ConfigError: the config asks for something that is not available yet, or has no model.
        UsageError: there is no launcher for it.
    """
    config, fn = settled.config, settled.fn
    check_supported(config)
    for text in without_effect(config):
        note(f"ckptrun: warning: {text}")
    if options.trust:
        raise UsageError(
            "--trust is not available in this version: nothing is ever loaded that could run code.",
            hint="Leave it out.",
        )
    work = RankWork(fn, config)
    command = command_line(fn, options)
    grace_s = config.launch.grace_s
    plan = _plan(settled, command, {} if options.no_slurm else os.environ)
    return SessionSpec(
        fn=fn,
        folder=settled.folder,
        rank_main=work,
        listener=listener,
        plan=plan,
        reference=options.ckpt,
        init_from=options.init_from,
        allow_fallback=options.allow_fallback,
        override=options.override,
        exact=options.exact,
        fast_dev_run=bool(config.trainer.fast_dev_run),
        limits=_limits(settled),
        early_stopping_changed=early_stopping_changed(config),
        config_text=None if options.dry_run else dump(config.resolved_tree()),
        check_config=config_check(
            config,
            override=options.override,
            exact=options.exact,
            look_at_code=not options.dry_run,
        )
        if fn == "fit"
        else None,
        grace_s=DEFAULT_GRACE_S if grace_s is None else grace_s,
        save_on_stop=config.run.save_on_stop,
        on_save_error=config.run.on_save_error,
        async_save=config.run.async_save,
        job=settled.job,
        requeue=Policy(config.slurm.requeue, config.slurm.max_requeues),
        hpc_save=config.slurm.hpc_save,
        walltime=_walltime(settled, listener, dry_run=options.dry_run),
        command=command,
        on_resolution=tell_resolution,
        prepare=work.prepare if plan.launcher == "inline" else lambda: None,
        echo=_echo,
        max_restarts=config.launch.max_restarts,
        hang_timeout_s=config.launch.hang_timeout_s,
        start_method=config.launch.start_method,
        output=lambda line, is_error: (note if is_error else say)(line),
        make_display=_display_of(settled),
        zero_stage=stage_of(config.strategy.options) if plan.strategy == "deepspeed" else None,
        takes_full_weights=bool(config.strategy.options.get("load_full_weights")),
    )


def _echo(text: str) -> None:
    note(f"ckptrun: {text}")


def _walltime(settled: Settled, listener: StopListener, *, dry_run: bool) -> Walltime | None:
    """What watches the time; None where there is no end to watch for. The listener hears of the signals for it."""
    from ckptrun.environment.slurm import end_time

    config, job = settled.config, settled.job
    listener.walltime_signals = tuple(int(getattr(signal, name)) for name in config.slurm.signals)
    in_job = job is not None and job.batch and settled.fn == "fit" and not config.trainer.fast_dev_run
    limit_s = config.launch.time_limit
    if dry_run or not (in_job or limit_s is not None):
        return None
    return Walltime(
        listener,
        job=job if in_job else None,
        say=_echo,
        limit_s=limit_s,
        job_end=end_time(os.environ) if in_job else None,
        grace_given=config.launch.grace_s is not None,
    )


def _plan(settled: Settled, command: list[str], slurm_env: Mapping[str, str]) -> LaunchPlan:
    from ckptrun.environment.machine import num_cores, num_gpus
    from ckptrun.environment.slurm import task_facts

    config = settled.config
    task = task_facts(slurm_env, at_terminal=os.isatty(0))
    deepspeed = "deepspeed" in (config.strategy.name, config.launch.launcher)
    asks_for_gpus = config.launch.nproc != 1 or task is not None or deepspeed
    gpus = num_gpus(os.environ) if asks_for_gpus else 0
    # DeepSpeed's launcher chooses among all that are there, and says itself which of them a rank sees.
    gpus_to_have = num_gpus({}) if gpus and config.launch.launcher == "deepspeed" else gpus
    one_each = config.launch.nproc == "auto" and task is not None and task.is_rank
    plan = make_plan(
        launcher=config.launch.launcher,
        strategy=config.strategy.name,
        num_ranks=1
        if one_each
        else max(1, gpus)
        if config.launch.nproc == "auto"
        else int(config.launch.nproc),
        command=command,
        num_cores=num_cores(),
        num_gpus=gpus_to_have,
        num_threads=config.trainer.num_threads,
        supervised=config.launch.max_restarts > 0,
        watched=config.launch.hang_timeout_s is not None,
        num_hosts=config.launch.nnodes,
        rdzv_endpoint=config.launch.rdzv_endpoint,
        rdzv_timeout_s=config.launch.rdzv_timeout_s,
        task=task,
        deepspeed=DeepSpeedOptions(
            hostfile=config.launch.hostfile,
            include=config.launch.include,
            exclude=config.launch.exclude,
            backend=config.launch.deepspeed_launcher,
            master_addr=config.launch.master_addr,
            further=config.launch.deepspeed_args,
        ),
        control=_control_file(settled),
        counted=config.launch.nproc == "auto",
    )
    in_job = settled.job is not None and (settled.job.batch or task is not None)
    for text in plan.warnings:
        if not (in_job and text.endswith(TAKE_TURNS)):  # of a job's cores job_warnings tells, with the remedy
            note(f"ckptrun: warning: {text}")
    return plan


def _control_file(settled: Settled) -> str:
    """Where ranks that DeepSpeed starts find this process; of a fit there is one, of evaluations there may be many."""
    which = "fit" if settled.fn == "fit" else f"{settled.fn}-{os.getpid()}"
    return os.path.join(settled.folder.control_dir, f"deepspeed-{which}.json")


def tell_resolution(resolution: Resolution) -> None:
    """Say on stderr where the work begins, and why."""
    for text in (*resolution.warnings, *passed_over(resolution)):
        note(f"ckptrun: warning: {text}")
    for text in resolution.notices:
        note(f"ckptrun: {text}")
    if resolution.error is None:
        note(f"ckptrun: {headline(resolution)}")


def _print_config(settled: Settled, *, as_json: bool) -> int:
    from ckptrun.config.show import show_config

    if as_json:
        print_json(settled.config.resolved_tree())
    else:
        say(show_config(settled.config).rstrip("\n"))
    return 0


def _dry_run(spec: SessionSpec, *, as_json: bool) -> int:
    resolution, code, nothing_left = preview(spec)
    if as_json:
        print_json(
            {
                "run": spec.folder.name,
                "fn": spec.fn,
                "exit_code": code,
                "nothing_left": nothing_left,
                "command": list(spec.plan.argv),
                "launcher": spec.plan.launcher,
                "strategy": spec.plan.strategy,
                "num_ranks": spec.plan.num_ranks,
                "num_hosts": spec.plan.num_hosts,
                "rdzv_endpoint": spec.plan.rdzv_endpoint,
                "resolution": to_json(resolution),
            }
        )
        return code
    show_preview(resolution, nothing_left)
    if resolution.error is None and nothing_left is None:
        say(f"\nwould run: {spec.plan}")
    return code


def show_preview(resolution: Resolution, nothing_left: str | None, *, all_candidates: bool = False) -> None:
    """The resolution explained on stdout, what speaks against it on stderr."""
    for line in lines(resolution, all_candidates=all_candidates):
        say(line)
    for text in resolution.warnings:
        note(f"ckptrun: warning: {text}")
    for text in resolution.notices:
        note(f"ckptrun: {text}")
    if resolution.error is not None:
        tell_problem(resolution.error.message, resolution.error.hint)
    elif nothing_left is not None:
        say(f"nothing left to do: {nothing_left}")


def _launch(spec: SessionSpec, options: FnOptions) -> int:
    from ckptrun.cli.ending import document, print_results, save_predictions, tell

    with stdout_kept_for_json() if options.json else nullcontext() as write:
        result = run_session(spec)
        tell(
            spec.fn,
            spec.folder,
            result,
            spec.command,
            num_hosts=spec.plan.num_hosts,
            debug=options.debug,
            cancelled=meaning_of_sigterm(spec) == "cancelled",
        )
        predictions = save_predictions(result) if spec.fn == "predict" else None
        if predictions is not None:
            note(f"ckptrun: predictions are in {predictions}")
        if write is not None:
            write(document(spec.fn, spec.folder, result))
        elif result.outcome is not None:
            print_results(spec.fn, result.outcome)
    return result.exit_code


def _display_of(settled: Settled) -> Callable[[Progress, Callable[[], dict[str, float]]], Display] | None:
    if not settled.config.trainer.enable_progress_bar:
        return None

    def make(progress: Progress, metrics: Callable[[], dict[str, float]]) -> Display:
        from ckptrun.launch.progress_bar import make_display

        return make_display(progress, metrics, run=settled.folder.name)

    return make


def _limits(settled: Settled) -> Limits:
    trainer = settled.config.trainer
    max_epochs = trainer.max_epochs
    if max_epochs is None and trainer.max_steps == -1 and trainer.max_time is None:
        max_epochs = _DEFAULT_MAX_EPOCHS
    return Limits(max_steps=trainer.max_steps, max_epochs=max_epochs, max_time_s=trainer.max_time)
