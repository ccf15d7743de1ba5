"""Which checkpoint is the best?

Decision: the scores are the registry's, as the callback that monitors them kept them, and whether the
checkpoint is there is the disk's to say; the second best is named and not taken, because a user who says
`best` publishes what comes out. Turned down: ranking all manifests by the metric, which ignores what the
callback was told (mode, cadence) and reads every manifest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ckptrun.checkpoint import naming
from ckptrun.records import CheckpointRecord, RejectedRecord
from ckptrun.resolve.candidates import Line, current_line
from ckptrun.resolve.facts import CatalogueView, ResolveFacts
from ckptrun.resolve.lookups import Found, abandoned, committed_before, newest_first, take_exactly, unreadable
from ckptrun.resolve.reference import Reference
from ckptrun.run.registry import Registry


def find_best(reference: Reference, facts: ResolveFacts, registry: Registry, view: CatalogueView) -> Found:
    """The best on the line, by the callback that monitors the metric asked for, else by the first."""
    found = Found()
    if facts.fast_dev_run:
        return found.fail(
            2,
            f"--ckpt {reference.text} has no meaning with fast_dev_run, which saves nothing.",
            "Give the path of a checkpoint, or leave fast_dev_run out.",
        )
    entry = _callback(found, reference, facts, registry, view)
    if entry is None:
        return found
    line = current_line(newest_first(view))
    scores = _scores(entry, line, view)
    if not scores:
        return found.fail(
            3,
            f"{_who(entry)} has saved nothing yet in run {facts.run_name!r}, so there is no best.",
            "Let it save first; --ckpt last takes the newest save of any kind.",
        )
    ranked = _ranked(scores, entry)
    for place, name in enumerate(ranked):
        found.not_reached[name] = f"{entry['monitor']} {scores[name]:.6g}, place {place + 1}"
    return _first_good(found, entry, ranked, scores, line, facts, view)


def _callback(
    found: Found, reference: Reference, facts: ResolveFacts, registry: Registry, view: CatalogueView
) -> dict[str, Any] | None:
    """The entry of the callback that decides what is best; None with the error in ``found``."""
    monitored = [entry for entry in registry.checkpoint_callbacks if entry.get("monitor")]
    metrics = sorted({entry["monitor"] for entry in monitored})
    if reference.value is not None:
        for entry in monitored:
            if entry["monitor"] == reference.value:
                return entry
        if monitored or registry.callbacks:
            _no_such_metric(found, reference.value, metrics, facts, view)
            return None
    if monitored:
        if len(monitored) > 1:
            others = ", ".join(f"best:{metric}" for metric in metrics if metric != monitored[0]["monitor"])
            found.warnings.append(
                f"Several checkpoint callbacks have a monitor; the first, {_who(monitored[0])}, was used"
                + (f". Name another as in --ckpt {others}" if others else "")
            )
        return monitored[0]
    if not registry.callbacks and not committed_before(facts, registry) and not view.names():
        found.fail(
            3,
            f"Run {facts.run_name!r} has saved nothing yet, so there is no best.",
            "Train it first with `ckptrun fit`.",
        )
    else:
        found.fail(
            2,
            f"No checkpoint callback of run {facts.run_name!r} has a monitor, so none of its saves is "
            "the best.",
            "Give ModelCheckpoint a monitor, as in monitor: val_loss; or say --ckpt last or a path.",
        )
    return None


def _no_such_metric(
    found: Found, metric: str, metrics: list[str], facts: ResolveFacts, view: CatalogueView
) -> None:
    """Nobody monitors ``metric``, so whether low or high is good is not known: name both ends."""
    line = current_line(newest_first(view))
    scored = [
        (record.metrics[metric], record)
        for record in newest_first(view)
        if isinstance(record, CheckpointRecord)
        and metric in record.metrics
        and (line is None or line.holds(record.name, record.sequence))
    ]
    message = f"No checkpoint callback of run {facts.run_name!r} monitors {metric!r}"
    message += f"; monitored: {', '.join(metrics)}." if metrics else "."
    hint = f"Say --ckpt {' or '.join(f'best:{known}' for known in metrics)}." if metrics else None
    if scored:
        low = min(scored, key=lambda pair: pair[0])[1]
        high = max(scored, key=lambda pair: pair[0])[1]
        hint = (
            f"By what the checkpoints recorded, its lowest value is that of seq:{low.sequence} "
            f"({low.metrics[metric]:.6g}), its highest that of seq:{high.sequence} "
            f"({high.metrics[metric]:.6g})."
        )
    found.fail(2, message, hint)


def _scores(entry: Mapping[str, Any], line: Line | None, view: CatalogueView) -> dict[str, float]:
    """Name to score: the callback's own, or else from the manifests of what was saved for it."""
    if entry.get("best_k"):
        return dict(entry["best_k"])
    if entry.get("best") and entry.get("best_score") is not None:
        return {entry["best"]: entry["best_score"]}
    metric, key = entry["monitor"], entry.get("state_key")
    return {
        record.name: record.metrics[metric]
        for record in newest_first(view)
        if isinstance(record, CheckpointRecord)
        and metric in record.metrics
        and key in record.saved_for
        and (line is None or line.holds(record.name, record.sequence))
    }


def _ranked(scores: Mapping[str, float], entry: Mapping[str, Any]) -> list[str]:
    """The names, best first; NaN is last; of equals the callback's own best comes first, then the newer."""
    sign = -1.0 if entry.get("mode") == "max" else 1.0

    def key(name: str) -> tuple[bool, float, bool, int]:
        score = scores[name]
        parsed = naming.parse(name)
        nan = math.isnan(score)
        return (
            nan,
            0.0 if nan else sign * score,
            name != entry.get("best"),
            -(parsed.sequence if parsed else 0),
        )

    return sorted(scores, key=key)


def _first_good(
    found: Found,
    entry: Mapping[str, Any],
    ranked: list[str],
    scores: Mapping[str, float],
    line: Line | None,
    facts: ResolveFacts,
    view: CatalogueView,
) -> Found:
    """The first of ``ranked`` on the line; a later one only where the user allows it."""
    metric = entry["monitor"]
    lost: RejectedRecord | None = None
    for name in ranked:
        parsed = naming.parse(name)
        if line is not None and not line.holds(name, parsed.sequence if parsed else None):
            found.trail.turn_down(abandoned(name, view))
            continue
        record = view.by_name(name)
        if isinstance(record, CheckpointRecord):
            if lost is None:
                return take_exactly(found, record, facts, f"the best {metric}: {scores[name]:.6g}")
            if not facts.allow_fallback:
                return found.fail(
                    3,
                    f"The best by {metric}, {lost.name}, cannot be used: {lost.why}.",
                    f"The next best is {name} (step {record.step}, {metric} {scores[name]:.6g}): "
                    "--allow-fallback takes it.",
                )
            found.warnings.append(
                f"The best by {metric}, {lost.name}, cannot be used ({lost.why}); the next best was taken"
            )
            return take_exactly(found, record, facts, f"the next best {metric}: {scores[name]:.6g}")
        found.trail.turn_down(record)
        if record.unreadable:
            return unreadable(found, record)
        lost = lost or record
    if lost is not None:
        return found.fail(
            3,
            f"None of the best by {metric} can be used: {found.trail.rejections()}.",
            "--ckpt last may still do.",
        )
    return found.fail(
        3,
        f"{_who(entry)} has saved nothing yet on the current line of run {facts.run_name!r}; "
        "its earlier saves are on an abandoned one.",
        "Let it save first, or name one of them by its path or as seq:N.",
    )


def _who(entry: Mapping[str, Any]) -> str:
    name = str(entry.get("class") or "ModelCheckpoint").rsplit(".", 1)[-1]
    return f"{name}(monitor={entry['monitor']!r})"
