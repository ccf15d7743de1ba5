"""What is the story of a validate, test or predict?"""

from __future__ import annotations

import os

from ckptrun.checkpoint.manifest import MANIFEST_NAME
from ckptrun.environment.versions import versions
from ckptrun.errors import NoCheckpointError
from ckptrun.launch.forced_end import ForcedEnd
from ckptrun.records import CheckpointRecord, Damage, Progress, Resolution
from ckptrun.resolve.quarantine import found_damage, quarantine
from ckptrun.run.evals import EvalFolder, begin_eval
from ckptrun.run.identity import read_identity
from ckptrun.session.choose import not_the_same, refused, resolve, writer_of
from ckptrun.session.ranks import display_of, prepare_once, ready_again, run_ranks
from ckptrun.session.spec import SessionResult, SessionSpec

_MOST_CHOICES = 5  # of an evaluation beside a fit that deletes what was chosen


def _resolve_and_mark(spec: SessionSpec) -> tuple[Resolution, EvalFolder | None]:
    """Choose the checkpoint and note that it is being read, before anything slow: a live fit beside it deletes what
    it no longer wants. One that went between the choice and the note is chosen anew."""
    for _ in range(_MOST_CHOICES):
        _, resolution = resolve(spec)
        if resolution.error is not None or spec.fast_dev_run:
            return resolution, None
        evaluation = begin_eval(spec.folder, spec.fn, resolution.path)
        answer = resolution.answer
        if not isinstance(answer, CheckpointRecord) or os.path.exists(f"{answer.path}/{MANIFEST_NAME}"):
            return resolution, evaluation
        evaluation.discard()
    raise NoCheckpointError(
        f"{resolution.path} was deleted while it was chosen, and so was each of the {_MOST_CHOICES - 1} before it",
        hint="The run saves and deletes faster than a checkpoint can be opened: keep more (save_top_k).",
    )


def run_evaluation(spec: SessionSpec) -> SessionResult:
    damage: Damage | None = None
    while True:
        resolution, evaluation = _resolve_and_mark(spec)
        again = not_the_same(resolution, damage)
        if again.error is not None and evaluation is not None:
            evaluation.discard()
        spec.on_resolution(again)
        if again.error is not None:
            spec.listener.finished()
            return refused(again)
        result = _evaluate_one(spec, again, evaluation)
        damage = found_damage(None if result.outcome is None else result.outcome.error, again)
        over = damage is None or evaluation is None or spec.listener.request is not None
        if damage is not None and not over:
            spec.echo(quarantine(spec.folder, damage, writer_of(again)))
        if over or not ready_again(spec):
            spec.listener.finished()
            return result


def _evaluate_one(spec: SessionSpec, resolution: Resolution, evaluation: EvalFolder | None) -> SessionResult:
    from ckptrun.fit.context import RankContext

    prepare_once(spec)
    forced = ForcedEnd(spec.listener, None if evaluation is None else evaluation.path, spec.echo)
    identity = read_identity(spec.folder)
    progress = Progress.starting(spec.fn, resolution.answer)
    context = RankContext(
        run=spec.folder,
        run_id=identity.id if identity is not None else "",
        resolution=resolution,
        stop=spec.listener,
        progress=progress,
        trust=spec.trust,
        versions=versions(),
        save_on_stop=False,
        logs_dir=evaluation.path if evaluation is not None else None,
    )
    display = display_of(spec, progress, lambda: context.metrics())
    context.say = display.say
    outcome, code = run_ranks(spec, context, display, forced=forced)
    if evaluation is not None:
        metrics = outcome.results if spec.fn != "predict" else None
        try:
            evaluation.end(metrics=metrics, status=str(outcome.stop_reason))
        except OSError as error:
            spec.echo(f"The end could not be noted in {evaluation.path}: {error.strerror or error}.")
    return SessionResult(
        code, resolution, outcome, eval_dir=evaluation.path if evaluation is not None else None
    )
