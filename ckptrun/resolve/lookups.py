"""Which checkpoint does a reference mean?

Decision: one pure function per reference, each from the facts and the view of the disk to a `Found`; which
reference applies is not their business but the rules'. Turned down: one search with a sort key per reference,
in which the differences that matter (strict, falling back, line or not) become flags.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ckptrun.checkpoint import naming
from ckptrun.errors import NoCheckpointError
from ckptrun.records import Candidate, CheckpointRecord, FreshStart, RejectedRecord, ResolutionError
from ckptrun.resolve.candidates import ABANDONED, Line, Trail, current_line
from ckptrun.resolve.facts import CatalogueView, Examined, ResolveFacts
from ckptrun.resolve.reference import KNOWN_FORMS, Reference, nearest_word
from ckptrun.run.registry import Registry

_STARTS_FRESH = "starting fresh from step 0"


@dataclass
class Found:
    """What a lookup found: an answer or an error, and how it came to it."""

    answer: CheckpointRecord | FreshStart | str | None = None
    error: ResolutionError | None = None
    warnings: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    trail: Trail = field(default_factory=Trail)
    not_reached: dict[str, str] = field(default_factory=dict)  # name -> why, where it is not simply older

    def fail(self, exit_code: int, message: str, hint: str | None = None) -> Found:
        self.answer = None
        self.warnings = [
            text for text in self.warnings if not text.endswith(_STARTS_FRESH)
        ]  # now it does not
        self.error = ResolutionError(exit_code, message, hint)
        return self


def newest_first(view: CatalogueView) -> Iterator[Examined]:
    """Every checkpoint, each examined when its turn comes."""
    return (view.by_name(name) for name in view.names())


def committed_before(facts: ResolveFacts, registry: Registry) -> bool:
    """Whether registry or ledger know of a commit, whatever the disk says."""
    return registry.committed_ever or any(
        attempt.start_sequence > 0 or (attempt.end_sequence or 0) > 0 for attempt in facts.attempts
    )


def has_committed(facts: ResolveFacts, registry: Registry, view: CatalogueView) -> bool:
    """Whether the run has committed checkpoints, usable or not, on disk or known to be gone."""
    if committed_before(facts, registry):
        return True
    return any(isinstance(record, CheckpointRecord) or record.committed for record in newest_first(view))


def abandoned(name: str, view: CatalogueView) -> RejectedRecord:
    """A checkpoint off the line, told by its name alone: whatever it holds, it is not the answer."""
    parsed = naming.parse(name)
    sequence, step = (parsed.sequence, parsed.step) if parsed else (None, None)
    return RejectedRecord(name, view.path_of(name), sequence, ABANDONED, step, committed=True)


# ---- last and auto


def find_last(facts: ResolveFacts, registry: Registry, view: CatalogueView) -> Found:
    """The newest save of the current line that can be used."""
    found = Found()
    answer = _newest_usable(found, view.names(), None, facts, view, "the newest save of the line")
    if found.error is not None:
        return found
    if answer is None:
        return _nothing_usable(found, facts, registry)
    return _warn_of_gone(found, answer, registry, view)


def _newest_usable(
    found: Found, names: Iterable[str], line: Line | None, facts: ResolveFacts, view: CatalogueView, why: str
) -> CheckpointRecord | None:
    """The first of ``names`` (newest first) that is on the line and can be used; it is put into ``found``.

    Without ``line`` the first committed one of ``names`` tells it.
    """
    inexact: list[CheckpointRecord] = []
    answer: CheckpointRecord | None = None
    for name in names:
        parsed = naming.parse(name)
        if line is not None and not line.holds(name, parsed.sequence if parsed else None):
            found.trail.turn_down(abandoned(name, view))
            continue
        record = view.by_name(name)
        line = line or Line.of(record)
        if isinstance(record, RejectedRecord):
            found.trail.turn_down(record)
            if record.unreadable:
                unreadable(found, record)
                return None
        elif facts.fn == "fit" and record.weights_only:
            found.trail.turn_down(record, "weights only: training cannot go on from it")
        elif not record.exact:
            inexact.append(record)
        else:
            answer = record
            break
    if answer is None and inexact:
        answer = inexact.pop(0)
        why += "; not exact, but there is no other"
        found.warnings.append(
            f"{answer.name} does not stand at a boundary (exact: false), and there is no other"
        )
    if answer is not None:
        for record in inexact:
            found.trail.turn_down(record, f"not exact, and {answer.name} is there")
        found.answer = answer
        found.trail.take(answer, why)
    return answer


def _warn_of_gone(found: Found, answer: CheckpointRecord, registry: Registry, view: CatalogueView) -> Found:
    """Say which newer saves the registry knows that are not on disk; the disk is right all the same."""
    newer = [save for save in registry.saves if save["sequence"] > answer.sequence]
    gone = [
        save for save in newer if save["name"] not in found.trail.seen and save["name"] not in view.names()
    ]
    for save in gone:
        found.trail.turn_down_gone(save, view.path_of(save["name"]))
    if gone:
        newest = gone[-1]
        found.warnings.append(
            f"The registry knows a newer save, {newest['name']} (step {newest.get('step')}), which is "
            "gone from the disk"
        )
    return found


def unreadable(found: Found, record: RejectedRecord) -> Found:
    return found.fail(
        3,
        f"The newest checkpoint {record.name} {record.why}. It may be whole, so no older one is taken in "
        "its place.",
        "Mend the access to it and try again; or name the checkpoint to start from, as in --ckpt step:N.",
    )


def _nothing_usable(found: Found, facts: ResolveFacts, registry: Registry) -> Found:
    """No candidate is left: fresh where nothing was ever committed, else an error that says what is known."""
    known = committed_before(facts, registry)
    if not known and not found.trail.committed:
        if facts.fn != "fit":
            return found.fail(
                3,
                f"Run {facts.run_name!r} has committed no checkpoint, and {facts.fn} needs one.",
                "Train it first with `ckptrun fit`; `--ckpt none` takes the untrained model.",
            )
        found.answer = FreshStart(facts.init_from)
        found.warnings.append(
            f"Run {facts.run_name!r} has never committed a checkpoint ({_where(facts)}): {_STARTS_FRESH}"
        )
        return found
    if registry.saves and not found.trail.committed:
        newest = registry.saves[-1]
        what = f"its newest known save, {newest['name']} (step {newest.get('step')}), is gone from the disk"
    elif not found.trail.committed:
        steps = [attempt.end_step for attempt in facts.attempts if attempt.end_step]
        reached = f" and reached step {max(steps)}" if steps else ""
        what = f"its ledger says that it committed checkpoints{reached}, and none is on the disk"
    else:
        what = f"none can be used: {found.trail.rejections()}"
    return found.fail(
        3,
        f"Run {facts.run_name!r} has committed checkpoints, but {what}.",
        f"Look at {facts.run_dir or 'the run'}: bring the files back, give a path, or start over with "
        "--ckpt none.",
    )


def _where(facts: ResolveFacts) -> str:
    return (
        f"{facts.run_dir} does not exist yet"
        if facts.root_state == "absent"
        else f"nothing in {facts.run_dir}"
    )


# ---- hpc


def find_hpc(facts: ResolveFacts, registry: Registry, view: CatalogueView) -> Found:
    """The newest hpc checkpoint of this job or those it was resubmitted from; outside a job, of the run."""
    found = Found()
    job = facts.job if facts.job is not None and facts.job.batch else None
    keys = list(registry.hpc) if job is None else list(job.keys)
    names = {name for key in keys for name in registry.hpc.get(key, ())}
    line = current_line(newest_first(view))
    newest = sorted(names, key=_sequence, reverse=True)
    why = "the newest hpc checkpoint of " + ("this job" if job else "the run")
    if _newest_usable(found, newest, line, facts, view, why) is not None or found.error is not None:
        return found
    whose = f"job {job.key}" if job else f"run {facts.run_name!r}"
    others = sorted({key for key in registry.hpc if key not in keys and key})
    if found.trail.candidates:
        message = f"No hpc checkpoint of {whose} can be used: {found.trail.rejections()}."
    else:
        message = f"There is no hpc checkpoint of {whose}."
    if others:
        message += f" Those of other jobs ({', '.join(others)}) are only taken by their path."
    return found.fail(
        3, message, "For one line that serves the first start and every requeue, say --ckpt auto."
    )


def _sequence(name: str) -> int:
    parsed = naming.parse(name)
    return parsed.sequence if parsed else 0


# ---- step:N, epoch:N, seq:N


def find_numbered(reference: Reference, facts: ResolveFacts, view: CatalogueView) -> Found:
    """Exactly the checkpoint of that step, epoch or save counter: on the current line first."""
    found = Found()
    kind, number = reference.kind, reference.number
    line: Line | None = None
    off_line: CheckpointRecord | None = None
    damaged = False  # the one on the line was committed, so one of another line is no answer in its place
    numbers: set[int] = set()
    for name in view.names():
        parsed = naming.parse(name)
        if kind == "seq" and line is not None and (parsed is None or parsed.sequence != number):
            if parsed is not None:
                numbers.add(parsed.sequence)
            continue
        record = view.by_name(name)
        line = line or Line.of(record)
        value = {"step": record.step, "seq": record.sequence, "epoch": getattr(record, "epoch", None)}[kind]
        if value is not None:
            numbers.add(value)
        if value != number:
            continue
        if isinstance(record, RejectedRecord):
            found.trail.turn_down(record)
            damaged |= record.committed and (line is None or line.holds(record.name, record.sequence))
        elif line is None or line.holds(record.name, record.sequence):
            return take_exactly(found, record, facts, f"the newest with {kind} {number} on the line")
        elif off_line is None:
            off_line = record
    if off_line is not None and not damaged:
        found.notices.append(
            f"{off_line.name} is on an abandoned line, as the current one has no {kind} {number}: "
            "starting from it begins a new line"
        )
        return take_exactly(found, off_line, facts, f"{kind} {number}, on an abandoned line")
    if found.trail.candidates:
        return found.fail(
            3,
            f"The checkpoint of {kind} {number} cannot be used: {found.trail.rejections()}.",
            _good_instead(found.trail.candidates[-1], facts, view),
        )
    message = f"Run {facts.run_name!r} has no checkpoint of {kind} {number}."
    return found.fail(3, message, _nearest(kind, number, numbers))


def _nearest(kind: str, number: int | None, numbers: Iterable[int]) -> str:
    near = sorted(sorted(set(numbers) - {number}, key=lambda n: abs(n - (number or 0)))[:4])
    if not near:
        return "It has no checkpoints at all."
    return (
        f"The nearest are {', '.join(f'{kind}:{n}' for n in near)}; `ckptrun resolve --all` lists every one."
    )


def take_exactly(found: Found, record: CheckpointRecord, facts: ResolveFacts, why: str) -> Found:
    """``record`` and no other, or why it will not do."""
    if facts.fn == "fit" and record.weights_only:
        found.trail.turn_down(record, "weights only: training cannot go on from it")
        return found.fail(
            5,
            f"{record.name} holds weights only, so training cannot go on from it.",
            f"To begin a training from its weights: --ckpt none --init-from {record.path}",
        )
    if not record.exact:
        found.warnings.append(f"{record.name} does not stand at a boundary (exact: false)")
    found.answer = record
    found.trail.take(record, why)
    return found


# ---- a path


def find_path(reference: Reference, facts: ResolveFacts, view: CatalogueView) -> Found:
    """Exactly what the path names; missing or damaged is an error, never a fresh start."""
    found = Found()
    path = reference.value or reference.text
    thing = view.by_path(path)
    if isinstance(thing, CheckpointRecord):
        return take_exactly(found, thing, facts, "the path that was given")
    if isinstance(thing, RejectedRecord):
        found.trail.turn_down(thing)
        return found.fail(3, f"{path} cannot be used: {thing.why}.", _good_instead(thing, facts, view))
    if thing.kind == "torch-file":
        if facts.fn == "fit":
            return found.fail(
                5,
                f"{path} is a file of torch.save without a manifest: whether it holds all that training "
                "needs "
                "is not known, and going on from files of other tools is not available yet.",
                f"To begin a training from its weights: --ckpt none --init-from {path}",
            )
        found.answer = thing.path
        found.warnings.append(f"{path} is no checkpoint of ckptrun: only its weights are used")
        return found
    if thing.kind == "deepspeed":
        return found.fail(
            5,
            f"{path} is {thing.why}: where in the data and in which state of randomness it stands is not known, so "
            "nothing can go on from it.",
            f"To begin a training from its weights: --ckpt none --init-from {thing.path}",
        )
    hint = f"Near it: {', '.join(thing.near)}" if thing.near else None
    word = nearest_word(path) if thing.kind == "missing" else None
    if word is not None:
        hint = f"Did you mean --ckpt {word}?" + (f" {hint}" if hint else "")
    elif thing.kind == "missing" and "/" not in path and hint is None:
        hint = f"--ckpt takes {KNOWN_FORMS}."
    return found.fail(3, f"{path}: {thing.why}.", hint)


def _good_instead(record: RejectedRecord | Candidate, facts: ResolveFacts, view: CatalogueView) -> str:
    """The good checkpoint nearest to a damaged one, for the hint."""
    try:
        names = sorted(view.names(), key=lambda name: abs(_sequence(name) - (record.sequence or 0)))
    except NoCheckpointError:
        names = []
    for name in names[:20]:
        other = view.by_name(name)
        if isinstance(other, CheckpointRecord) and other.path != record.path:
            return f"The nearest good one of run {facts.run_name!r} is {other.path} (step {other.step})."
    return f"Run {facts.run_name!r} has no good one near it."
