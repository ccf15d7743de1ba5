"""The README's table "Which checkpoint" as a table: what is given, and what comes out."""

# ruff: noqa: E501 - a case of the table is read as one row

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from resolve_helpers import ListView, bad, callback, ck, registry_of

from ckptrun.errors import NoCheckpointError
from ckptrun.records import AttemptRecord, CheckpointRecord, FreshStart, JobFacts
from ckptrun.resolve.facts import OtherFile, ResolveFacts
from ckptrun.resolve.rules import RULES, given_reference, resolve
from ckptrun.run.registry import Registry

FIRST, SECOND, THIRD = ck(1), ck(2), ck(3)
RUN = (FIRST, SECOND, THIRD)
HPC = ck(3, reason="hpc", job="7")
OTHER_JOB = ck(2, reason="hpc", job="8")
# The run was rewound to save 1: saves 2 and 3 are abandoned, save 4 goes on from 1.
REWOUND = (FIRST, SECOND, THIRD, ck(4, 150, line=((1, 1), (4, 4)), parent=FIRST.name))
EXCEPTION = replace(THIRD, reason="exception")
ON_EXCEPTION = callback(None, on_exception=True, state_key="OnExceptionCheckpoint")
BEST = callback(best_k={FIRST.name: 0.3, SECOND.name: 0.1, THIRD.name: 0.2})
JOB = JobFacts("7", batch=True)
REQUEUED = JobFacts("7", batch=True, restart_count=1)
RESUBMITTED = JobFacts("9", batch=True, previous=("8", "7"))
SHELL = JobFacts("7", batch=False)
PIN = {"reference": "step:100", "path": FIRST.path, "pinned_at": 50.0}


def attempt(reference: str | None, *, start: int = 0, at: float = 100.0, **more: Any) -> AttemptRecord:
    return AttemptRecord(1, "fit", at, reference=reference, start_sequence=start, **more)


@dataclass
class Case:
    """What is given, and what is expected of the resolution."""

    given: str
    facts: ResolveFacts
    rule: int
    disk: tuple = ()
    registry: Registry | None = None
    ref: str | None = None
    path: str | None = None
    fresh: bool = False
    init_from: str | None = None
    exit_code: int = 0
    says: tuple[str, ...] = ()  # in a notice, a warning or the error
    quiet: bool = False  # no warning at all
    removes_pin: bool = False
    others: tuple[OtherFile, ...] = field(default=())


def fit(reference: str | None = None, **more: Any) -> ResolveFacts:
    return ResolveFacts(fn="fit", reference=reference, run_name="gpt", run_dir="/runs/gpt", **more)


def evaluate(reference: str | None = None, **more: Any) -> ResolveFacts:
    return ResolveFacts(fn="test", reference=reference, run_name="gpt", run_dir="/runs/gpt", **more)


SAVED_ALL = registry_of(*RUN)

CASES = [
    # ---- 0: the same job or command already started from what is given, and saved since
    Case("0 step:1 again in the requeued job", fit("step:100", job=REQUEUED, attempts=(attempt("step:100", start=1, job="7"),)),
         0, RUN, ref="last", path=THIRD.path, says=("already started from step:100",)),
    Case("0 none again in the requeued job", fit("none", job=REQUEUED, attempts=(attempt("none", job="7"),)),
         0, RUN, ref="last", path=THIRD.path),
    Case("0 not before anything is committed since", fit("step:100", job=REQUEUED, attempts=(attempt("step:100", start=3, job="7"),)),
         2, RUN, ref="step:100", path=FIRST.path),
    Case("0 another reference is another wish", fit("step:200", job=REQUEUED, attempts=(attempt("step:100", start=1, job="7"),)),
         2, RUN, ref="step:200", path=SECOND.path),
    Case("0 another job starts from it anew", fit("step:100", job=JOB, attempts=(attempt("step:100", start=1, job="6"),)),
         2, RUN, ref="step:100", path=FIRST.path),
    Case("0 not for evaluation", evaluate("step:100", job=REQUEUED, attempts=(attempt("step:100", start=1, job="7"),)),
         2, RUN, ref="step:100", path=FIRST.path),
    Case("0 a pin in the requeued job", fit(job=REQUEUED, attempts=(attempt("step:100", start=1, job="7"),)),
         0, RUN, registry_of(*RUN, pin=PIN), ref="last", path=THIRD.path),
    Case("0 a pin set anew since is followed", fit(job=REQUEUED, attempts=(attempt("step:100", start=1, job="7", at=40.0),)),
         3, RUN, registry_of(*RUN, pin=PIN), ref="step:100", path=FIRST.path),
    Case("0 outside SLURM the same command after a crash", fit("step:100", command_key="k", attempts=(attempt("step:100", start=1, command_key="k"),)),
         0, RUN, ref="last", path=THIRD.path),
    Case("0 outside SLURM not after Ctrl-C", fit("step:100", command_key="k", attempts=(attempt("step:100", start=1, command_key="k", stop_reason="keyboard"),)),
         2, RUN, ref="step:100", path=FIRST.path),
    Case("0 an interactive shell in a job is outside SLURM", fit("step:100", job=SHELL, command_key="k", attempts=(attempt("step:100", start=1, command_key="k"),)),
         0, RUN, ref="last", path=THIRD.path),
    Case("0 outside SLURM not for another command", fit("step:100", command_key="k", attempts=(attempt("step:100", start=1, command_key="l"),)),
         2, RUN, ref="step:100", path=FIRST.path),
    Case("0 a pin on what was last once", fit(job=REQUEUED, attempts=(attempt("last", start=1, job="7"),)),
         0, RUN, registry_of(*RUN, pin={**PIN, "reference": "last"}), ref="last", path=THIRD.path),
    Case("0 last itself needs no such rule", fit("last", job=REQUEUED, attempts=(attempt("last", job="7"),)),
         2, RUN, ref="last", path=THIRD.path),
    Case("0 committed since, and gone: never a rewind", fit("none", job=REQUEUED, attempts=(attempt("none", job="7"),)),
         0, (), SAVED_ALL, ref="last", exit_code=3, says=("gone from the disk",)),
    Case("0 step:1 again in a job of the same chain", fit("step:100", job=RESUBMITTED, attempts=(attempt("step:100", start=1, job="7"),)),
         0, RUN, ref="last", path=THIRD.path, says=("job 9 (before it 8, 7) already started from step:100",)),
    Case("0 none again in a job of the same chain", fit("none", job=RESUBMITTED, attempts=(attempt("none", job="8"),)),
         0, RUN, ref="last", path=THIRD.path),
    Case("0 a pin in a job of the same chain", fit(job=RESUBMITTED, attempts=(attempt("step:100", start=1, job="7"),)),
         0, RUN, registry_of(*RUN, pin=PIN), ref="last", path=THIRD.path),
    Case("0 a job beside the chain is another", fit("none", job=RESUBMITTED, attempts=(attempt("none", job="6"),)), 1, RUN, ref="none", fresh=True),
    # ---- 1: none
    Case("1 none with nothing there", fit("none"), 1, ref="none", fresh=True, quiet=True),
    Case("1 none leaves what is there", fit("none"), 1, RUN, ref="none", fresh=True, says=("a line that is abandoned",)),
    Case("1 none takes --init-from", fit("none", init_from="w.pt"), 1, RUN, ref="none", fresh=True, init_from="w.pt"),
    Case("1 none past a pin", fit("none"), 1, RUN, registry_of(*RUN, pin=PIN), ref="none", fresh=True, says=("pin", "stays")),
    Case("1 none for evaluation", evaluate("none"), 1, RUN, ref="none", fresh=True),
    # ---- 2: a reference
    Case("2 a reference", fit("last"), 2, RUN, ref="last", path=THIRD.path, quiet=True),
    Case("2 it beats a pin", fit("last"), 2, RUN, registry_of(*RUN, pin=PIN), ref="last", path=THIRD.path,
         says=("beats the pin on step:100", "first step"), removes_pin=True),
    Case("2 evaluation leaves the pin", evaluate("last"), 2, RUN, registry_of(*RUN, pin=PIN), ref="last", path=THIRD.path,
         says=("the pin stays",)),
    Case("2 a reference that fails leaves the pin", fit("step:9"), 2, RUN, registry_of(*RUN, pin=PIN), ref="step:9", exit_code=3),
    Case("2 --init-from is passed over", fit("last", init_from="w.pt"), 2, RUN, ref="last", path=THIRD.path,
         says=("--init-from w.pt is passed over",)),
    Case("2 last in a new run takes --init-from", fit("last", init_from="w.pt"), 2, ref="last", fresh=True, init_from="w.pt"),
    # ---- 3: a pin
    Case("3 a pin", fit(), 3, RUN, registry_of(*RUN, pin=PIN), ref="step:100", path=FIRST.path),
    Case("3 a pin beats the implicit choice", fit(job=REQUEUED), 3, (*RUN[:2], HPC), registry_of(*RUN[:2], HPC, callbacks=[ON_EXCEPTION], pin=PIN),
         ref="step:100", path=FIRST.path),
    Case("3 a pin for evaluation", evaluate(), 3, RUN, registry_of(*RUN, callbacks=[BEST], pin=PIN), ref="step:100", path=FIRST.path),
    Case("3 a pin that is gone", fit(), 3, RUN[1:], registry_of(*RUN, pin=PIN), ref="step:100", exit_code=3, says=("pin on step:100", "unpin")),
    Case("3 a pin that is damaged", fit(), 3, (bad(1), *RUN[1:]), registry_of(*RUN, pin=PIN), ref="step:100", exit_code=3,
         says=("lacks its file",)),
    # ---- 4: an hpc checkpoint of this job
    Case("4 hpc is the newest save", fit(job=REQUEUED), 4, (FIRST, SECOND, HPC), registry_of(FIRST, SECOND, HPC),
         ref="hpc", path=HPC.path, says=("hpc checkpoint of job 7",)),
    Case("4 a newer save of the line wins", fit(job=REQUEUED), 4, (FIRST, HPC, ck(4)), registry_of(FIRST, HPC, ck(4)),
         ref="last", path=ck(4).path, says=("not the newest save",)),
    Case("4 not with another job's", fit(job=JOB), 6, (FIRST, OTHER_JOB), registry_of(FIRST, OTHER_JOB), exit_code=2),
    Case("4 not in an interactive shell", fit(job=SHELL), 6, (FIRST, HPC), registry_of(FIRST, HPC), exit_code=2),
    Case("4 not for evaluation", evaluate(job=REQUEUED), 8, (FIRST, SECOND, HPC), registry_of(FIRST, SECOND, HPC, callbacks=[BEST]),
         ref="best", path=SECOND.path),
    Case("4 a damaged hpc falls to last", fit(job=REQUEUED), 4, (FIRST, SECOND, bad(3)), registry_of(FIRST, SECOND, HPC),
         ref="last", path=SECOND.path),
    Case("4 that of a job it was resubmitted from", fit(job=RESUBMITTED), 4, (FIRST, SECOND, HPC), registry_of(FIRST, SECOND, HPC),
         ref="hpc", path=HPC.path, says=("hpc checkpoint of job 9 (before it 8, 7)",)),
    # ---- 5: on-exception callback, or requeued
    Case("5 an on-exception callback stands", fit(), 5, RUN, registry_of(*RUN, callbacks=[ON_EXCEPTION]), ref="last", path=THIRD.path,
         says=("--ckpt best", "--ckpt last", "PATH")),
    Case("5 the job was requeued", fit(job=REQUEUED), 5, RUN, ref="last", path=THIRD.path, says=("requeued",)),
    Case("5 the job was resubmitted", fit(job=RESUBMITTED), 5, RUN, ref="last", path=THIRD.path, says=("resubmitted from job 8",)),
    Case("5 not with nothing committed", fit(job=REQUEUED), 7, fresh=True),
    Case("5 requeued, and all is gone", fit(job=REQUEUED), 5, (), SAVED_ALL, ref="last", exit_code=3),
    # ---- 6: refused
    Case("6 committed checkpoints and no word", fit(), 6, RUN, exit_code=2, says=("--ckpt last", "--ckpt none", "--run")),
    Case("6 damaged ones are committed too", fit(), 6, (bad(1),), exit_code=2),
    # ---- 7: fresh
    Case("7 a new run", fit(), 7, fresh=True, quiet=True),
    Case("7 a new run with --init-from", fit(init_from="w.pt"), 7, fresh=True, init_from="w.pt"),
    Case("7 only an uncommitted save", fit(), 7, (bad(1, "not committed", committed=False),), fresh=True),
    Case("7 a root that does not exist yet", fit(root_state="absent"), 7, fresh=True),
    Case("7 a requeued job makes no root", fit(job=REQUEUED, root_state="absent"), 7, exit_code=3, says=("requeued",)),
    Case("7 nor does one that was resubmitted", fit(job=RESUBMITTED, root_state="absent"), 7, exit_code=3, says=("resubmitted from job 8",)),
    Case("7 a new run in an empty root", fit(root_state="empty"), 7, fresh=True, quiet=True),
    Case("7 a requeued job begins nothing in an empty root", fit(job=REQUEUED, root_state="empty"), 7, exit_code=3,
         says=("is empty, though the job was requeued",)),
    Case("7 a root that cannot be read", fit(root_state="unreadable: Permission denied"), 7, exit_code=3, says=("Permission denied",)),
    # ---- 8: evaluation
    Case("8 best", evaluate(), 8, RUN, registry_of(*RUN, callbacks=[BEST]), ref="best", path=SECOND.path, says=("uses the best",)),
    Case("8 an on-exception checkpoint is only for fitting", evaluate(), 8, (FIRST, SECOND, EXCEPTION),
         registry_of(FIRST, SECOND, EXCEPTION, callbacks=[BEST, ON_EXCEPTION]), ref="best", path=SECOND.path,
         says=("used by default only when fitting",)),
    # ---- best
    Case("best by a metric of its own", evaluate("best:acc"), 2, RUN,
         registry_of(*RUN, callbacks=[BEST, callback("acc", "max", best_k={FIRST.name: 0.9, THIRD.name: 0.8})]),
         ref="best:acc", path=FIRST.path, quiet=True),
    Case("best of several callbacks warns", evaluate("best"), 2, RUN,
         registry_of(*RUN, callbacks=[callback(None), BEST, callback("acc", "max", best_k={FIRST.name: 0.9})]),
         ref="best", path=SECOND.path, says=("monitor='val_loss'", "best:acc")),
    Case("best without a monitor", evaluate("best"), 2, RUN, registry_of(*RUN, callbacks=[callback(None)]), ref="best", exit_code=2,
         says=("has a monitor",)),
    Case("best before any save", evaluate("best"), 2, (), registry_of(callbacks=[callback()]), ref="best", exit_code=3,
         says=("has saved nothing yet",)),
    Case("best of a run that never was", evaluate("best"), 2, ref="best", exit_code=3, says=("saved nothing yet",)),
    Case("best in fast_dev_run", evaluate("best", fast_dev_run=True), 2, RUN, registry_of(*RUN, callbacks=[BEST]), ref="best", exit_code=2,
         says=("fast_dev_run",)),
    Case("best never falls to the second", evaluate("best"), 2, (FIRST, bad(2), THIRD), registry_of(*RUN, callbacks=[BEST]), ref="best",
         exit_code=3, says=(THIRD.name, "--allow-fallback", "lacks its file")),
    Case("best falls where it is allowed", evaluate("best", allow_fallback=True), 2, (FIRST, bad(2), THIRD),
         registry_of(*RUN, callbacks=[BEST]), ref="best", path=THIRD.path, says=("the next best was taken",)),
    Case("best that is gone", evaluate("best"), 2, (FIRST, THIRD), registry_of(*RUN, callbacks=[BEST]), ref="best", exit_code=3,
         says=("gone",)),
    Case("best is on the line", evaluate("best"), 2, REWOUND, registry_of(*REWOUND, callbacks=[BEST]), ref="best", path=FIRST.path),
    Case("best is nothing when all are abandoned", evaluate("best"), 2, REWOUND,
         registry_of(*REWOUND, callbacks=[callback(best_k={SECOND.name: 0.1})]), ref="best", exit_code=3, says=("current line",)),
    Case("best from the manifests where the registry has no scores", evaluate("best"), 2,
         tuple(replace(r, metrics={"val_loss": s}, saved_for=("ModelCheckpoint(val_loss)",)) for r, s in zip(RUN, (3.0, 1.0, 2.0), strict=True)),
         registry_of(callbacks=[callback()]), ref="best", path=SECOND.path),
    Case("best is never NaN", evaluate("best"), 2, RUN, registry_of(*RUN, callbacks=[callback(best_k={THIRD.name: float("nan"), FIRST.name: 5.0})]),
         ref="best", path=FIRST.path),
    Case("best of a metric nobody monitors", evaluate("best:acc"), 2, (replace(FIRST, metrics={"acc": 0.5}), replace(SECOND, metrics={"acc": 0.7})),
         registry_of(*RUN, callbacks=[BEST]), ref="best:acc", exit_code=2, says=("seq:1", "seq:2", "val_loss")),
    Case("best of weights only cannot be trained on", fit("best"), 2, (FIRST, replace(SECOND, weights_only=True), THIRD),
         registry_of(*RUN, callbacks=[BEST]), ref="best", exit_code=5, says=("--init-from",)),
    Case("best of weights only can be tested", evaluate("best"), 2, (FIRST, replace(SECOND, weights_only=True), THIRD),
         registry_of(*RUN, callbacks=[BEST]), ref="best", path=SECOND.path),
    # ---- last and auto
    Case("last is fresh in a run that never committed", fit("last"), 2, ref="last", fresh=True, says=("never committed", "fresh")),
    Case("last is fresh in a root that is not there yet", fit("last", root_state="absent"), 2, ref="last", fresh=True, says=("does not exist yet",)),
    Case("last is fresh past an uncommitted save", fit("last"), 2, (bad(1, "not committed", committed=False),), ref="last", fresh=True),
    Case("auto is fresh out loud", fit("auto"), 2, ref="auto", fresh=True, says=("starting fresh",)),
    Case("auto is as last", fit("auto"), 2, RUN, ref="auto", path=THIRD.path),
    Case("last is not fresh where the registry knows saves", fit("last"), 2, (), SAVED_ALL, ref="last", exit_code=3, says=(THIRD.name, "gone")),
    Case("auto neither", fit("auto"), 2, (), SAVED_ALL, ref="auto", exit_code=3),
    Case("last is not fresh where the ledger knows saves", fit("last", attempts=(attempt("last", end_sequence=3, end_step=300),)), 2,
         ref="last", exit_code=3, says=("ledger", "step 300")),
    Case("last is not fresh where a later attempt had started from saves", fit("last", attempts=(attempt("last", start=3),)), 2,
         ref="last", exit_code=3),
    Case("last is fresh after attempts that never committed", fit("last", attempts=(attempt("last", end_sequence=0),)), 2, ref="last", fresh=True),
    Case("last with all damaged", fit("last"), 2, (bad(1), bad(2)), ref="last", exit_code=3, says=("none can be used", "lacks its file")),
    Case("last in a root that cannot be read", fit("last", root_state="unreadable: Input/output error"), 2, ref="last", exit_code=3,
         says=("Input/output error",)),
    Case("last in a requeued job whose root is gone", fit("last", job=REQUEUED, root_state="absent"), 2, ref="last", exit_code=3),
    Case("last in a resubmitted job whose root is gone", fit("last", job=RESUBMITTED, root_state="absent"), 2, ref="last", exit_code=3),
    Case("last in a requeued job whose root is empty", fit("last", job=REQUEUED, root_state="empty"), 2, ref="last", exit_code=3),
    Case("last is fresh in an empty root", fit("last", root_state="empty"), 2, ref="last", fresh=True, says=("never committed", "nothing in")),
    Case("none in a resubmitted job whose root is gone", fit("none", job=RESUBMITTED, root_state="absent"), 1, ref="none", exit_code=3),
    Case("last in a resubmitted job that had not saved yet", fit("last", job=RESUBMITTED), 2, ref="last", fresh=True),
    Case("last in a requeued job that had not saved yet", fit("last", job=REQUEUED), 2, ref="last", fresh=True),
    Case("last for a test of a run that never was", evaluate("last"), 2, ref="last", exit_code=3, says=("test needs one",)),
    Case("last falls past what is not committed", fit("last"), 2, (*RUN, bad(4, "not committed", committed=False)), ref="last", path=THIRD.path),
    Case("last falls past damage", fit("last"), 2, (FIRST, SECOND, bad(3)), ref="last", path=SECOND.path),
    Case("last falls along the line only", fit("last"), 2, (*REWOUND[:3], replace(bad(4), line=((1, 1), (4, 4)))), ref="last", path=FIRST.path),
    Case("last never falls past what cannot be read", fit("last"), 2, (*RUN, bad(4, "cannot be read: Permission denied", unreadable=True)),
         ref="last", exit_code=3, says=("Permission denied",)),
    Case("last falls past weights only when fitting", fit("last"), 2, (*RUN, ck(4, weights_only=True)), ref="last", path=THIRD.path),
    Case("last takes weights only when testing", evaluate("last"), 2, (*RUN, ck(4, weights_only=True)), ref="last", path=ck(4).path),
    Case("last falls past an inexact one", fit("last"), 2, (*RUN, ck(4, exact=False)), ref="last", path=THIRD.path, quiet=True),
    Case("last takes an inexact one when it is all there is", fit("last"), 2, (ck(1, exact=False),), ref="last", path=FIRST.path, says=("exact: false",)),
    Case("last compares numbers", fit("last"), 2, (ck(9), ck(10), ck(99_999_999), ck(100_000_000)), ref="last", path=ck(100_000_000).path),
    Case("last is the highest counter, not the highest step", fit("last"), 2, (ck(1, 500), ck(2, 300)), ref="last", path=ck(2, 300).path),
    Case("last warns of a newer one that is gone", fit("last"), 2, RUN[:2], SAVED_ALL, ref="last", path=SECOND.path, says=("gone from the disk",)),
    # ---- hpc
    Case("hpc of this job", fit("hpc", job=JOB), 2, (OTHER_JOB, HPC), registry_of(OTHER_JOB, HPC), ref="hpc", path=HPC.path),
    Case("hpc of another job is never taken", fit("hpc", job=JOB), 2, (FIRST, OTHER_JOB), registry_of(FIRST, OTHER_JOB), ref="hpc", exit_code=3,
         says=("auto", "other jobs (8)")),
    Case("hpc of the job it was resubmitted from", fit("hpc", job=JobFacts("9", True, previous=("8",))), 2, (FIRST, OTHER_JOB),
         registry_of(FIRST, OTHER_JOB), ref="hpc", path=OTHER_JOB.path),
    Case("hpc outside a job is the run's", fit("hpc"), 2, (OTHER_JOB, HPC, ck(4)), registry_of(OTHER_JOB, HPC, ck(4)), ref="hpc", path=HPC.path),
    Case("hpc 33 beats 3", fit("hpc", job=JOB), 2, (HPC, ck(33, reason="hpc", job="7")), registry_of(HPC, ck(33, reason="hpc", job="7")),
         ref="hpc", path=ck(33).path),
    Case("hpc falls past damage", fit("hpc", job=JOB), 2, (HPC, bad(33)), registry_of(HPC, ck(33, reason="hpc", job="7")), ref="hpc", path=HPC.path),
    Case("hpc without one names auto", fit("hpc", job=JOB), 2, ref="hpc", exit_code=3, says=("--ckpt auto",)),
    # ---- step, epoch, seq
    Case("step:N", fit("step:200"), 2, RUN, ref="step:200", path=SECOND.path),
    Case("seq:N", fit("seq:2"), 2, RUN, ref="seq:2", path=SECOND.path),
    Case("epoch:N is the newest of the epoch", fit("epoch:0"), 2, RUN, ref="epoch:0", path=THIRD.path),
    Case("step:N on the current line first", fit("step:200"), 2, (*REWOUND, ck(5, 200, line=((1, 1), (4, 5)))), ref="step:200", path=ck(5, 200).path),
    Case("step:N of an abandoned line says so", fit("step:200"), 2, REWOUND, ref="step:200", path=SECOND.path, says=("abandoned",)),
    Case("step:N that is not there names the nearest", fit("step:210"), 2, RUN, ref="step:210", exit_code=3, says=("step:200", "step:300")),
    Case("step:N that is damaged", fit("step:200"), 2, (FIRST, bad(2), THIRD), ref="step:200", exit_code=3, says=("lacks its file",)),
    Case("step:N of weights only", fit("step:200"), 2, (FIRST, replace(SECOND, weights_only=True)), ref="step:200", exit_code=5),
    Case("step:N is a number", fit("step:two"), 2, RUN, ref="step:two", exit_code=2, says=("number",)),
    # ---- paths, and what is not there yet
    Case("a path", fit(FIRST.path), 2, RUN, ref=FIRST.path, path=FIRST.path),
    Case("an explicit missing path is an error", fit("/no/where"), 2, RUN, ref="/no/where", exit_code=3, says=("no such file",)),
    Case("... also in a run that never was", fit("/no/where"), 2, ref="/no/where", exit_code=3),
    Case("a damaged path names the nearest good one", fit(bad(2).path), 2, (FIRST, bad(2)), ref=bad(2).path, exit_code=3, says=(FIRST.path,)),
    Case("a typo of a word", fit("lst"), 2, RUN, ref="lst", exit_code=3, says=("Did you mean --ckpt last",)),
    Case("a torch file cannot be trained on", fit("/w.pt"), 2, ref="/w.pt", exit_code=5, says=("--init-from /w.pt",),
         others=(OtherFile("/w.pt", "torch-file", "a file of torch.save"),)),
    Case("a torch file can be tested", evaluate("/w.pt"), 2, ref="/w.pt", path="/w.pt", says=("weights",),
         others=(OtherFile("/w.pt", "torch-file", "a file of torch.save"),)),
    Case("a file that is no checkpoint", fit("/a.txt"), 2, ref="/a.txt", exit_code=3, says=("not written",),
         others=(OtherFile("/a.txt", "not-a-checkpoint", "a file that torch.save has not written"),)),
    Case("another run's by name is not available yet", fit("run:other"), 2, ref="run:other", exit_code=2, says=("not available yet",)),
    Case("a URL is not available yet", fit("s3://b/run"), 2, ref="s3://b/run", exit_code=2, says=("not available yet",)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.given)
def test_rule(case: Case) -> None:
    registry = case.registry or registry_of(*(r for r in case.disk if isinstance(r, CheckpointRecord)))
    view = ListView(case.disk, case.others)
    resolution = resolve(case.facts, registry, view)

    error = resolution.error
    said = " | ".join((*resolution.notices, *resolution.warnings))
    if error is not None:
        said += f" | {error.message} {error.hint}"
    assert (error.exit_code if error else 0) == case.exit_code, said
    assert (resolution.rule, resolution.ref) == (case.rule, case.ref)
    assert resolution.path == case.path
    assert resolution.fresh == case.fresh
    if case.fresh:
        assert resolution.answer == FreshStart(case.init_from)
    for word in case.says:
        assert word in said
    if case.quiet:
        assert not resolution.warnings
    assert resolution.removes_pin == case.removes_pin
    taken = [candidate.path for candidate in resolution.candidates if candidate.verdict == "taken"]
    assert taken == ([case.path] if isinstance(resolution.answer, CheckpointRecord) else [])


def test_the_rules_stand_in_the_order_of_the_table() -> None:
    assert [rule.__name__ for rule in RULES] == [f"rule_{number}" for number in range(9)]


def test_best_fails_in_three_different_ways() -> None:
    cases = {case.given: case for case in CASES}
    messages = []
    for given in ("best without a monitor", "best before any save", "best in fast_dev_run"):
        case = cases[given]
        resolution = resolve(case.facts, case.registry or Registry(), ListView(case.disk))
        assert resolution.error is not None
        messages.append((resolution.error.exit_code, resolution.error.message))
    assert [code for code, _ in messages] == [2, 3, 2]
    assert len({message for _, message in messages}) == 3


def test_last_looks_only_at_the_newest() -> None:
    view = ListView(ck(number) for number in range(1, 200))
    resolution = resolve(fit("last"), Registry(), view)
    assert set(view.examined) == {ck(199).name}
    assert resolution.num_not_reached == 198
    assert len(resolution.candidates) == 21


def test_all_candidates_are_listed_where_asked() -> None:
    resolution = resolve(
        fit("last", num_listed=None), Registry(), ListView(ck(number) for number in range(1, 200))
    )
    assert len(resolution.candidates) == 199


def test_turned_down_candidates_come_before_the_taken_one_with_their_reasons() -> None:
    disk = (
        FIRST,
        SECOND,
        bad(3, "state.ckpt has 3 bytes, its manifest says 4"),
        bad(4, "not committed", committed=False),
    )
    resolution = resolve(fit("last"), Registry(), ListView(disk))
    assert [(c.sequence, c.verdict, c.why) for c in resolution.candidates] == [
        (4, "rejected", "not committed"),
        (3, "rejected", "state.ckpt has 3 bytes, its manifest says 4"),
        (2, "taken", "the newest save of the line"),
        (1, "not reached", "not needed"),
    ]


def test_what_is_not_reached_is_told_from_registry_and_name_alone() -> None:
    view = ListView((FIRST, replace(SECOND, reason="stop"), THIRD))
    resolution = resolve(fit("last"), registry_of(replace(SECOND, reason="stop")), view)
    rest = [(c.step, c.reason_saved) for c in resolution.candidates if c.verdict == "not reached"]
    assert rest == [(200, "stop"), (100, None)]
    assert view.examined == [THIRD.name]


def test_a_folder_that_cannot_be_listed_is_an_error_of_the_rule_that_asked() -> None:
    class Broken(ListView):
        def names(self) -> list[str]:
            raise NoCheckpointError(
                "/runs/gpt/checkpoints cannot be listed: Permission denied", hint="Mend it."
            )

    for question in (fit("last"), fit("auto"), fit("best"), fit("step:1"), fit(), evaluate()):
        resolution = resolve(question, registry_of(callbacks=[BEST]), Broken())
        assert resolution.error is not None
        assert resolution.error.exit_code == 3
        assert "Permission denied" in resolution.error.message
        assert not resolution.fresh


def test_the_ledger_keeps_what_was_given() -> None:
    assert given_reference(fit("best"), registry_of(pin=PIN)) == "best"
    assert given_reference(fit(), registry_of(pin=PIN)) == "step:100"
    assert given_reference(fit(), Registry()) is None


@pytest.mark.parametrize(
    "facts",
    [fit("last", job=REQUEUED, root_state="absent"), fit("last", root_state="unreadable: Permission denied")],
    ids=["absent", "unreadable"],
)
def test_where_a_fresh_start_is_refused_nothing_says_that_it_begins(facts: ResolveFacts) -> None:
    assert resolve(facts, Registry(), ListView(())).warnings == ()
