"""Which rule applies, and what does it say?

Decision: the README's table is a table here too, one function a rule, tried in its order; a rule that does not
apply returns None. Errors are values in the resolution, so that `resolve` can explain them and a test can
list them. Turned down: one function with the order in its branches, and exceptions, which lose the
candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckptrun.errors import NoCheckpointError, UsageError
from ckptrun.records import AttemptRecord, CheckpointRecord, FreshStart, JobFacts, Resolution, StopReason
from ckptrun.resolve.best import find_best
from ckptrun.resolve.candidates import QUARANTINED, not_reached
from ckptrun.resolve.facts import CatalogueView, ResolveFacts
from ckptrun.resolve.lookups import (
    Found,
    find_hpc,
    find_last,
    find_numbered,
    find_path,
    has_committed,
    newest_first,
)
from ckptrun.resolve.reference import Reference, parse
from ckptrun.run.folder import root_is_gone
from ckptrun.run.registry import Registry


@dataclass
class Ruled:
    """What a rule answered: the reference it applied (None for a fresh start) and what was found."""

    ref: str | None
    found: Found
    removes_pin: bool = False


def given_reference(facts: ResolveFacts, registry: Registry) -> str | None:
    """The reference or pin that is given: what the ledger keeps as an attempt's ``reference``."""
    if facts.reference is not None:
        return facts.reference
    return None if registry.pin is None else str(registry.pin.get("reference") or registry.pin["path"])


# ---- the rules, in the order of the table


def rule_0(facts: ResolveFacts, registry: Registry, view: CatalogueView) -> Ruled | None:
    """fit, and this job or command already started from what is given and committed since: last."""
    given = given_reference(facts, registry)
    # `last` and `auto` go on from the newest save anyway; a pin on what they meant once does not.
    if facts.fn != "fit" or given is None or facts.reference in ("last", "auto"):
        return None
    started = [
        attempt.start_sequence for attempt in facts.attempts if _same_start(attempt, given, facts, registry)
    ]
    if not started or not _committed_past(min(started), registry, view):
        return None
    found = find_last(facts, registry, view)
    whose = _whose(facts.job) if facts.job is not None and facts.job.batch else "this command"
    found.notices.append(
        f"An earlier attempt of {whose} already started from {given} and has saved since: going on from "
        "the last "
        "save. To start from it once more, "
        f"{'pin it again' if facts.reference is None else 'give its path'}, "
        "or take another --run"
    )
    return Ruled("last", found)


def _same_start(attempt: AttemptRecord, given: str, facts: ResolveFacts, registry: Registry) -> bool:
    """Whether ``attempt`` is an earlier one of this job or command that started a fit from ``given``."""
    if attempt.fn != "fit" or attempt.reference != given:
        return False
    pinned_at = float((registry.pin or {}).get("pinned_at") or 0.0)
    if facts.reference is None and attempt.started_at < pinned_at:
        return False  # the same words pinned again are a new wish
    if facts.job is not None and facts.job.batch:
        return attempt.job in facts.job.keys
    # The ledger names the job of a batch job only.
    if attempt.job is not None or facts.command_key is None or attempt.command_key != facts.command_key:
        return False
    # Outside SLURM only a restart counts, after a kill or a stop by the machine: who stopped it, or saw it
    # finish or fail, and types it again means it again.
    return attempt.stop_reason not in _ENDED_BY_THE_USER


def _whose(job: JobFacts) -> str:
    """A job as a notice names it, with those it was resubmitted from."""
    before = [*job.previous[:3], *("…" for _ in job.previous[3:4])]
    return f"job {job.key}" + (f" (before it {', '.join(before)})" if before else "")


_ENDED_BY_THE_USER = frozenset(
    (StopReason.DONE, StopReason.KEYBOARD, StopReason.REQUESTED, StopReason.EXCEPTION)
)


def _committed_past(sequence: int, registry: Registry, view: CatalogueView) -> bool:
    if any(save["sequence"] > sequence for save in registry.saves):
        return True
    for record in newest_first(view):
        if record.sequence is not None and record.sequence <= sequence:
            return False
        if isinstance(record, CheckpointRecord) or record.committed:
            return True
    return False


def rule_1(facts: ResolveFacts, registry: Registry, view: CatalogueView) -> Ruled | None:
    """--ckpt none: a fresh start; earlier checkpoints stay, as an abandoned line."""
    if facts.reference != "none":
        return None
    found = Found(FreshStart(facts.init_from))
    if registry.pin is not None:
        found.warnings.append(
            f"The pin on {_pinned(registry)} is passed over, and stays until `ckptrun unpin`"
        )
    if facts.fn == "fit" and facts.root_state == "listed" and has_committed(facts, registry, view):
        found.notices.append(
            "Starting fresh: the checkpoints that are there stay, on a line that is abandoned with the "
            "first save"
        )
    return Ruled("none", found)


def rule_2(facts: ResolveFacts, registry: Registry, view: CatalogueView) -> Ruled | None:
    """--ckpt REF: REF, which beats a pin."""
    if facts.reference is None:
        return None
    found = find(facts.reference, facts, registry, view)
    if registry.pin is None:
        return Ruled(facts.reference, found)
    removes = facts.fn == "fit" and found.error is None
    after = "it is removed once training has completed its first step" if removes else "the pin stays"
    found.warnings.append(f"--ckpt {facts.reference} beats the pin on {_pinned(registry)}; {after}")
    return Ruled(facts.reference, found, removes_pin=removes)


def rule_3(facts: ResolveFacts, registry: Registry, view: CatalogueView) -> Ruled | None:
    """No --ckpt, and a pin stands: the pin."""
    if registry.pin is None:
        return None
    path = registry.pin["path"]
    found = find_path(Reference(path, "path", value=path), facts, view)
    if found.error is not None and found.error.exit_code == 3:
        found.fail(
            3,
            f"The pin on {_pinned(registry)} leads nowhere: {found.error.message}",
            "`ckptrun unpin` removes it; --ckpt REF goes past it.",
        )
    return Ruled(given_reference(facts, registry), found)


def rule_4(facts: ResolveFacts, registry: Registry, view: CatalogueView) -> Ruled | None:
    """fit in a SLURM batch job that saved an hpc checkpoint: hpc where it is the newest save, else last."""
    if facts.fn != "fit" or facts.job is None or not facts.job.batch:
        return None
    own = {name for key in facts.job.keys for name in registry.hpc.get(key, ())}
    if not own:
        return None
    whose = _whose(facts.job)
    found = find_last(facts, registry, view)
    if isinstance(found.answer, CheckpointRecord) and found.answer.name in own:
        found.notices.append(f"Going on from the hpc checkpoint of {whose}, the newest save")
        return Ruled("hpc", found)
    if found.error is None:
        found.notices.append(
            f"{whose[0].upper()}{whose[1:]} saved an hpc checkpoint, but it is not the newest save: last is used"
        )
    return Ruled("last", found)


def rule_5(facts: ResolveFacts, registry: Registry, view: CatalogueView) -> Ruled | None:
    """fit, with committed checkpoints, an on-exception callback or a requeued job: last."""
    if facts.fn != "fit" or not (registry.on_exception or facts.requeued):
        return None
    if not has_committed(facts, registry, view):
        return None
    found = find_last(facts, registry, view)
    again = facts.job if facts.requeued else None
    why = "a callback saves on exceptions" if again is None else f"the job {again.came_back}"
    found.notices.append(
        f"Without --ckpt, and as {why}, the last save is used. Say --ckpt best, --ckpt last or --ckpt "
        "PATH to choose"
    )
    return Ruled("last", found)


def rule_6(facts: ResolveFacts, registry: Registry, view: CatalogueView) -> Ruled | None:
    """fit, with committed checkpoints all the same: refused."""
    if facts.fn != "fit" or not has_committed(facts, registry, view):
        return None
    there = "" if view.names() else ", though none is on the disk now"
    found = Found().fail(
        2,
        f"Run {facts.run_name!r} has checkpoints{there}, and nothing says what to do with them.",
        "Say --ckpt last to go on, --ckpt none to start over, or another --run.",
    )
    return Ruled(None, found)


def rule_7(facts: ResolveFacts, _registry: Registry, view: CatalogueView) -> Ruled | None:
    """fit otherwise: a fresh start."""
    if facts.fn != "fit":
        return None
    found = Found(FreshStart(facts.init_from))
    for record in newest_first(view):
        found.trail.turn_down(record)
    return Ruled(None, found)


def rule_8(facts: ResolveFacts, registry: Registry, view: CatalogueView) -> Ruled | None:
    """validate, test and predict: best."""
    found = find("best", facts, registry, view)
    notice = f"Without --ckpt, {facts.fn} uses the best checkpoint. Say --ckpt last or --ckpt PATH to choose"
    if "exception" in registry.holds:
        exception = registry.holds["exception"]
        notice += f". The on-exception checkpoint {exception} is used by default only when fitting"
    found.notices.append(notice)
    return Ruled("best", found)


Rule = Callable[[ResolveFacts, Registry, CatalogueView], "Ruled | None"]
RULES: tuple[Rule, ...] = (rule_0, rule_1, rule_2, rule_3, rule_4, rule_5, rule_6, rule_7, rule_8)


# ---- references


def find(text: str, facts: ResolveFacts, registry: Registry, view: CatalogueView) -> Found:
    """What the reference ``text`` means, whichever rule applied it."""
    try:
        reference = parse(text)
    except UsageError as error:
        return Found().fail(2, error.message, error.hint)
    match reference.kind:
        case "best":
            return find_best(reference, facts, registry, view)
        case "last" | "auto":
            return find_last(facts, registry, view)
        case "hpc":
            return find_hpc(facts, registry, view)
        case "step" | "epoch" | "seq":
            return find_numbered(reference, facts, view)
        case "none":
            return Found(FreshStart(facts.init_from))
        case "run":
            return Found().fail(
                2,
                f"--ckpt {text}: checkpoints of another run are not available yet by the run's name.",
                "Give the path of the checkpoint's folder instead.",
            )
        case "url":
            return Found().fail(
                2,
                f"--ckpt {text}: checkpoints behind a URL are not available yet.",
                "Copy the checkpoint's folder here and give its path.",
            )
        case "path":
            return find_path(reference, facts, view)


# ---- the whole


def resolve(facts: ResolveFacts, registry: Registry, view: CatalogueView) -> Resolution:
    """The answer to what is asked; an error is a value in it, with its exit code."""
    for number, rule in enumerate(RULES):
        try:
            ruled = rule(facts, registry, view)
        except NoCheckpointError as error:  # the folder is there and cannot be listed
            return _finish(
                number,
                Ruled(facts.reference, Found().fail(3, error.message, error.hint)),
                facts,
                registry,
                view,
            )
        if ruled is not None:
            return _finish(number, ruled, facts, registry, view)
    raise AssertionError("rule 8 always applies")


def _finish(
    number: int, ruled: Ruled, facts: ResolveFacts, registry: Registry, view: CatalogueView
) -> Resolution:
    found = ruled.found
    _check_root(found, facts)
    if facts.init_from is not None and isinstance(found.answer, CheckpointRecord | str):
        found.notices.append(f"--init-from {facts.init_from} is passed over: a checkpoint is used")
    candidates, num = list(found.trail.candidates), 0
    for candidate in candidates:
        if candidate.verdict == "rejected" and candidate.why.startswith(QUARANTINED):
            found.notices.append(
                f"Quarantine ends where `ckptrun verify {candidate.path}` finds the checkpoint good"
            )
    try:
        names = view.names()
    except NoCheckpointError:
        names = ()
    others, num = not_reached(
        names, found.trail, registry, view.path_of, facts.num_listed, lambda name: _why_not(name, found)
    )
    return Resolution(
        ref=ruled.ref,
        rule=number,
        answer=found.answer,
        warnings=tuple(found.warnings),
        notices=tuple(found.notices),
        candidates=(*candidates, *others),
        num_not_reached=num,
        error=found.error,
        removes_pin=ruled.removes_pin and found.error is None,
    )


def _check_root(found: Found, facts: ResolveFacts) -> None:
    """A fresh start needs a root of which it is known that nothing is in it."""
    if not isinstance(found.answer, FreshStart) or facts.fn != "fit":
        return
    state, _, why = facts.root_state.partition(": ")
    if state == "unreadable":
        found.fail(
            3,
            f"The root of {facts.run_dir} cannot be read: {why}. Whether the run has checkpoints is not "
            "known.",
            "Mend the access to it, or give another --root.",
        )
    elif state in ("absent", "empty") and facts.job is not None and facts.requeued:
        error = root_is_gone(f"of {facts.run_dir}", state, facts.job)
        found.fail(error.exit_code, error.message, error.hint)


def _why_not(name: str, found: Found) -> str:
    if name in found.not_reached:
        return found.not_reached[name]
    if isinstance(found.answer, FreshStart):
        return "a fresh start was asked for"
    return "not needed"


def _pinned(registry: Registry) -> str:
    pin = registry.pin or {}
    reference, path = pin.get("reference"), pin.get("path")
    return str(path) if reference in (None, path) else f"{reference} ({path})"
