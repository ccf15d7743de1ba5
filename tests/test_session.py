"""The story of one command, told with a rank that only plays: what is written, when, and what is never started."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptrun.checkpoint.commit import commit
from ckptrun.checkpoint.manifest import Manifest, read_manifest
from ckptrun.errors import DamagedCheckpointError, RunInUseError, UsageError
from ckptrun.fit.context import RankContext
from ckptrun.launch.plan import make_plan
from ckptrun.launch.universal import Writing
from ckptrun.records import (
    CheckpointRecord,
    Damage,
    JobFacts,
    Outcome,
    Resolution,
    ResolutionError,
    SavedCheckpoint,
    Stage,
    StopReason,
)
from ckptrun.resolve.finished import Limits
from ckptrun.run.attempts import read_attempts
from ckptrun.run.folder import RunFolder
from ckptrun.run.lease import Holder, Lease, read_lease
from ckptrun.run.registry import Registry, edit
from ckptrun.session import attempt
from ckptrun.session.spec import SessionResult, SessionSpec
from ckptrun.session.story import preview, run_session
from ckptrun.stop import StopListener

DONE = Outcome(StopReason.DONE)
LEFT = "training ended at step 5 by max_steps 5, which has not been raised"


class Rank:
    """Plays a training: saves a checkpoint at each of ``steps`` and ends with ``outcome``."""

    def __init__(
        self, *steps: int, outcome: Outcome = DONE, then: Callable[[RankContext], Any] | None = None
    ) -> None:
        self.steps, self.outcome, self.then = steps, outcome, then
        self.contexts: list[RankContext] = []

    def __call__(self, context: RankContext) -> Outcome:
        self.contexts.append(context)
        context.progress.stage = Stage.TRAINING
        context.stage_changed()
        for step in self.steps:
            self._save(context, step)
            context.progress.step = step
            context.first_step_done()
        if self.then is not None:
            self.then(context)
        return replace(self.outcome, step=max((0, *self.steps)))

    def _save(self, context: RankContext, step: int) -> None:
        run = context.run
        assert run is not None

        def note(registry: Registry) -> None:
            sequence = registry.reserve_sequence()
            name = f"{sequence:08d}-step-{step:08d}"
            manifest = commit(
                run.checkpoints_dir,
                name,
                {"state.ckpt": lambda file: file.write(b"x")},
                Manifest(
                    run_id=context.run_id, sequence=sequence, step=step, epoch=0, reason="periodic",
                    line=((1, sequence),), lease_epoch=context.lease_epoch,
                ),
            )  # fmt: skip
            record = manifest.to_record(f"{run.checkpoints_dir}/{name}")
            registry.note_saved(record, [])
            registry.finished = {"name": name, "sequence": sequence, "by": "max_steps", "max_steps": step}
            context.saved(SavedCheckpoint(name, record.path, sequence, step, 0, "periodic", 0.1, 1))

        edit(run.registry, note)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.at(str(tmp_path / "runs"), "demo")


def spec(folder: RunFolder, rank: Any = None, **options: Any) -> SessionSpec:
    command = ("ckptrun", "fit")
    plan = make_plan(launcher="inline", strategy="single", num_ranks=1, command=command)
    chosen: dict[str, Any] = {"fn": "fit", "command": command, "plan": plan, **options}
    return SessionSpec(folder=folder, rank_main=rank or Rank(), listener=StopListener(), **chosen)


def run(folder: RunFolder, rank: Any = None, **options: Any) -> SessionResult:
    return run_session(spec(folder, rank, **options))


# -- a fit that starts ---------------------------------------------------------------------------------------


def test_what_a_fit_leaves_in_the_runs_folder(folder: RunFolder) -> None:
    result = run(folder, Rank(5, 10), config_text="model: x\n")
    assert (result.exit_code, result.outcome and result.outcome.step) == (0, 10)
    assert result.resolution is not None
    assert (result.resolution.fresh, result.resolution.rule) == (True, 7)
    assert Path(folder.config_yaml).read_text() == "model: x\n"
    assert json.loads(Path(folder.run_json).read_text())["name"] == "demo"
    status = json.loads(Path(folder.status).read_text())
    assert (status["status"], status["stop_reason"], status["exit_code"], status["step"]) == (
        "FINISHED",
        "done",
        0,
        10,
    )
    (attempt,) = read_attempts(folder.attempts)
    assert (attempt.attempt, attempt.start_step, attempt.end_step, attempt.end_sequence) == (1, 0, 10, 2)
    lease = read_lease(folder.lease)
    assert lease is not None
    assert lease.holder is None, "it is given back"


def test_a_second_attempt_goes_on_from_the_last_save(folder: RunFolder) -> None:
    run(folder, Rank(5))
    rank = Rank(10)
    result = run(folder, rank, reference="last")
    (context,) = rank.contexts
    assert (context.attempt, context.lease_epoch, context.resolution.step) == (2, 2, 5)
    assert result.resolution is not None
    assert result.resolution.path == f"{folder.checkpoints_dir}/00000001-step-00000005"
    assert [(a.attempt, a.start_step, a.reference) for a in read_attempts(folder.attempts)] == [
        (1, 0, None), (2, 5, "last"),
    ]  # fmt: skip
    takeover = {"lease_epoch": 2, "sequence": 1}
    assert takeover in Registry.load(folder.registry).takeovers


def test_what_the_rank_is_given(folder: RunFolder) -> None:
    may_save = []
    rank = Rank(then=lambda context: may_save.append(context.may_save()))
    job = JobFacts("12_3", batch=True)
    run(folder, rank, job=job, save_on_stop=False, on_save_error="warn", trust=True)
    (context,) = rank.contexts
    assert (context.job, context.save_on_stop, context.on_save_error, context.trust) == (
        "12_3",
        False,
        "warn",
        True,
    )
    assert context.run is folder
    assert context.run_id == json.loads(Path(folder.run_json).read_text())["id"]
    assert context.logs_dir == folder.logs_dir
    assert (may_save, context.may_save()) == ([True], False), "only while the lease is held"


@pytest.mark.parametrize(
    ("outcome", "code", "status"),
    [
        (Outcome(StopReason.KEYBOARD), 130, "INTERRUPTED"),
        (Outcome(StopReason.SIGTERM), 143, "INTERRUPTED"),
        (Outcome(StopReason.WALLTIME), 75, "INTERRUPTED"),
        (Outcome(StopReason.EXCEPTION, error=ValueError("mine"), user_error=True), 1, "INTERRUPTED"),
        (Outcome(StopReason.DONE, save_error="the disk is full"), 1, "FINISHED"),
    ],
)
def test_exit_code_status_and_ledger_say_the_same(
    folder: RunFolder, outcome: Outcome, code: int, status: str
) -> None:
    assert run(folder, Rank(outcome=outcome)).exit_code == code
    (attempt,) = read_attempts(folder.attempts)
    assert (attempt.exit_code, attempt.status, attempt.stop_reason) == (
        code,
        status,
        str(outcome.stop_reason),
    )
    assert json.loads(Path(folder.status).read_text())["exit_code"] == code


def test_an_exception_that_escapes_the_rank_is_its_outcome(folder: RunFolder) -> None:
    def fails(_: RankContext) -> Outcome:
        raise ValueError("mine")

    result = run(folder, fails)
    assert result.exit_code == 1
    assert result.outcome is not None
    assert result.outcome.user_error
    assert json.loads(Path(folder.attempts).read_text().splitlines()[-1])["error"] == "ValueError: mine"


def test_leftovers_of_a_killed_attempt_are_swept(folder: RunFolder) -> None:
    run(folder, Rank(5))
    leftover = Path(folder.checkpoints_dir) / ".tmp-00000002-step-00000007"
    leftover.mkdir()
    run(folder, Rank(10), reference="last")
    assert not leftover.exists()


def test_a_save_that_was_killed_before_its_manifest_is_swept(folder: RunFolder) -> None:
    run(folder, Rank(5))
    run_id = json.loads(Path(folder.run_json).read_text())["id"]
    left = Path(folder.checkpoints_dir, "00000002-step-00000010")
    left.mkdir()
    (left / "state.ckpt").write_bytes(b"x")
    (left / ".manifest.json.tmp").write_bytes(Manifest(run_id, 2, 10, 0, "periodic").to_json())
    said: list[str] = []
    run(folder, Rank(15), reference="last", echo=said.append)
    assert any("00000002-step-00000010 was never committed and is removed" in text for text in said)
    assert sorted(os.listdir(folder.checkpoints_dir)) == ["00000001-step-00000005", "00000003-step-00000015"]


def test_epochs_go_on_where_the_lease_was_deleted(folder: RunFolder) -> None:
    run(folder, Rank(5))
    run(folder, Rank(10), reference="last")
    os.unlink(folder.lease)
    run(folder, Rank(15), reference="last")
    lease = read_lease(folder.lease)
    assert lease is not None
    assert lease.epoch == 3
    newest = max(os.listdir(folder.checkpoints_dir))
    assert read_manifest(f"{folder.checkpoints_dir}/{newest}").lease_epoch == 3


def test_a_takeover_is_noted_though_the_registry_is_gone(folder: RunFolder) -> None:
    run(folder, Rank(5, 10))
    os.unlink(folder.registry)
    run(folder, Rank(15), reference="last")
    registry = Registry.load(folder.registry)
    assert [save["step"] for save in registry.saves] == [5, 10, 15]
    assert registry.run_id == json.loads(Path(folder.run_json).read_text())["id"]


# -- damage --------------------------------------------------------------------------------------------------


class FindsDamage(Rank):
    """Finds each checkpoint damaged that is in ``bad``, by step."""

    def __init__(self, *steps: int, bad: set[int]) -> None:
        super().__init__(*steps)
        self.bad = bad

    def __call__(self, context: RankContext) -> Outcome:
        taken = context.resolution
        if taken.step in self.bad and taken.path is not None:
            self.contexts.append(context)
            damage = Damage(taken.path, "state.ckpt", f"step {taken.step} is damaged")
            return Outcome(StopReason.EXCEPTION, error=DamagedCheckpointError(damage.why, damage=damage))
        return super().__call__(context)


def test_damage_takes_no_restart_and_comes_to_an_end(folder: RunFolder) -> None:
    run(folder, Rank(5, 10, 15))
    rank = FindsDamage(20, bad={15, 10})
    result = run(folder, rank, reference="last", max_restarts=0)
    assert (result.exit_code, result.resolution and result.resolution.step) == (0, 5)
    assert [context.resolution.step for context in rank.contexts] == [15, 10, 5]
    assert [attempt.exit_code for attempt in read_attempts(folder.attempts)] == [0, 3, 3, 0]
    # The new save is good; what came before it is on its line or in quarantine.
    rank = FindsDamage(bad={20, 5})
    result = run(folder, rank, reference="last")
    assert result.exit_code == 3
    assert result.resolution is not None
    assert result.resolution.error is not None
    assert "none can be used" in result.resolution.error.message
    assert len(Registry.load(folder.registry).quarantine) == 4


@pytest.mark.parametrize("reference", ["step:10", "seq:2", "{path}"])
def test_exactly_the_damaged_one_was_asked_for(folder: RunFolder, reference: str) -> None:
    run(folder, Rank(5, 10, 15))
    path = f"{folder.checkpoints_dir}/00000002-step-00000010"
    rank = FindsDamage(20, bad={10})
    result = run(folder, rank, reference=reference.format(path=path))
    assert (result.exit_code, len(rank.contexts)) == (3, 1)
    assert result.resolution is not None
    error = result.resolution.error
    assert error is not None
    assert "step 10 is damaged" in error.message
    assert "nearest good one" in (error.hint or "")


class Copies:
    """In place of the conversion to another number of ranks: each answer's copy, which a rank finds damaged."""

    def __init__(self, num_damaged: int) -> None:
        self.num_damaged = num_damaged
        self.made: list[str] = []

    def adapted(self, resolution: Resolution, _: Any, by: Writing) -> Resolution:
        answer, registry = resolution.answer, Registry.load(by.folder.registry)
        assert isinstance(answer, CheckpointRecord)
        sequence = registry.committed_sequence + 1
        name = f"{sequence:08d}-step-{answer.step:08d}"
        manifest = replace(
            read_manifest(answer.path), sequence=sequence, files=(), parent=answer.name, line=((1, sequence),)
        )
        commit(by.folder.checkpoints_dir, name, {"state.ckpt": lambda file: file.write(b"x")}, manifest)
        record = manifest.to_record(f"{by.folder.checkpoints_dir}/{name}")
        edit(by.folder.registry, lambda registry: registry.note_saved(record, []))
        self.made.append(name)
        return replace(resolution, answer=record)

    def rank(self, context: RankContext) -> Outcome:
        taken = context.resolution
        if len(self.made) > self.num_damaged:
            return DONE
        damage = Damage(str(taken.path), "tag/zero/a/fp32.pt", "it is damaged")
        return Outcome(StopReason.EXCEPTION, error=DamagedCheckpointError(damage.why, damage=damage))


@pytest.mark.parametrize(("num_damaged", "code", "num_made"), [(1, 0, 2), (5, 3, 2)])
def test_a_damaged_copy_is_made_anew_once_from_what_was_asked_for(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, num_damaged: int, code: int, num_made: int
) -> None:
    run(folder, Rank(5, 10))
    copies = Copies(num_damaged)
    monkeypatch.setattr(attempt, "adapted", copies.adapted)
    result = run(folder, copies.rank, reference="step:5")
    assert result.exit_code == code
    assert copies.made == [f"{sequence:08d}-step-00000005" for sequence in range(3, 3 + num_made)]
    assert list(Registry.load(folder.registry).quarantine) == copies.made[:num_damaged]


# -- what is never started -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "code"), [("step:5", 3), ("/nowhere/at/all", 3), ("best", 3), ("lsat", 3)]
)
def test_a_reference_that_cannot_be_served_creates_nothing(
    folder: RunFolder, reference: str, code: int
) -> None:
    rank, heard = Rank(), list[Resolution]()
    result = run(folder, rank, reference=reference, on_resolution=heard.append)
    assert (result.exit_code, result.outcome) == (code, None)
    assert rank.contexts == []
    assert [found.error for found in heard] == [result.resolution and result.resolution.error]
    assert not os.path.exists(folder.root)


def test_nothing_left_to_do(folder: RunFolder) -> None:
    run(folder, Rank(5))
    said: list[str] = []
    rank = Rank(10)
    result = run(folder, rank, reference="last", limits=Limits(max_steps=5), echo=said.append)
    assert (result.exit_code, result.nothing_left) == (0, LEFT)
    assert said == [f"nothing left to do: {LEFT}"]
    assert rank.contexts == []
    assert len(read_attempts(folder.attempts)) == 1
    assert run(folder, rank, reference="last", limits=Limits(max_steps=6)).nothing_left is None


def test_nothing_left_to_do_settles_what_a_killed_attempt_could_not_say(folder: RunFolder) -> None:
    run(folder, Rank(5))
    status = json.loads(Path(folder.status).read_text())
    dead = {**status, "status": "RUNNING", "stop_reason": None, "exit_code": None, "pid": 2**22 + 1}
    Path(folder.status).write_text(json.dumps(dead))
    assert run(folder, reference="last", limits=Limits(max_steps=5)).nothing_left == LEFT
    now = json.loads(Path(folder.status).read_text())
    assert {**now, **{name: status[name] for name in ("counter", "written_at")}} == status


def test_an_epoch_is_not_used_twice_where_the_lease_was_lost(folder: RunFolder) -> None:
    """Readers would ignore what is saved under it, as the writing of one who was taken over."""
    run(folder, Rank(5))
    run(folder, Rank(10), reference="last")
    Path(folder.lease).write_bytes(b"")
    result = run(folder, Rank(15), reference="last")
    assert result.exit_code == 0
    assert preview(spec(folder, reference="last"))[0].step == 15
    Path(folder.lease).unlink()
    Path(folder.registry).write_text("{")
    run(folder, Rank(20), reference="last")
    lease = read_lease(folder.lease)
    assert lease is not None and lease.epoch == 4
    assert preview(spec(folder, reference="last"))[0].step == 20


def test_a_fit_without_a_reference_is_refused_where_there_are_checkpoints(folder: RunFolder) -> None:
    run(folder, Rank(5))
    result = run(folder, Rank())
    assert result.exit_code == 2
    assert len(read_attempts(folder.attempts)) == 1


def test_a_config_that_does_not_fit_starts_nothing(folder: RunFolder) -> None:
    error = ResolutionError(5, "it differs", "use --override")
    result = run(folder, Rank(), check_config=lambda folder, resolution: (error, ["and a warning"]))
    assert result.exit_code == 5
    assert result.resolution is not None
    assert (result.resolution.error, result.resolution.warnings) == (error, ("and a warning",))
    assert not os.path.exists(folder.path)


def test_a_run_in_use(folder: RunFolder) -> None:
    def second(_: RankContext) -> None:
        with pytest.raises(RunInUseError, match=f"process {os.getpid()}"):
            run(folder, Rank())
        resolution, code, _ = preview(spec(folder, reference="last"))
        assert code == 4
        assert resolution.error is not None
        assert "is in use by" in resolution.error.message

    result = run(folder, Rank(5, then=second))
    assert result.exit_code == 0
    assert result.outcome is not None
    assert result.outcome.error is None


def test_a_dead_holder_is_taken_over(folder: RunFolder) -> None:
    folder.create()
    me = Holder.this_process(job=None, command="x")
    Lease.acquire(folder.lease, replace(me, pid_start=me.pid_start - 1), noted=lambda: (0, 0))
    assert run(folder, Rank(5)).exit_code == 0


def test_a_root_that_cannot_be_written() -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        run(RunFolder.at("/proc/nothing-can-be-made-here", "demo"), Rank())


def test_preview_changes_nothing(folder: RunFolder) -> None:
    assert preview(spec(folder))[1:] == (0, None)
    assert not os.path.exists(folder.root)
    run(folder, Rank(5))
    before = sorted(os.walk(folder.path))
    resolution, code, left = preview(spec(folder, reference="last", limits=Limits(max_steps=5)))
    assert (resolution.step, code, left) == (5, 0, LEFT)
    assert sorted(os.walk(folder.path)) == before


# -- pins ----------------------------------------------------------------------------------------------------


def pin(folder: RunFolder, step: int) -> None:
    name = next(name for name in os.listdir(folder.checkpoints_dir) if name.endswith(f"step-{step:08d}"))
    path = f"{folder.checkpoints_dir}/{name}"
    edit(
        folder.registry,
        lambda registry: setattr(
            registry, "pin", {"reference": f"step:{step}", "path": path, "pinned_at": 1.0}
        ),
    )


def test_a_pin_is_used_and_stays(folder: RunFolder) -> None:
    run(folder, Rank(5, 10))
    pin(folder, 5)
    rank = Rank(7)
    run(folder, rank)
    assert (rank.contexts[0].resolution.step, rank.contexts[0].resolution.rule) == (5, 3)
    assert Registry.load(folder.registry).pin is not None


def test_a_reference_beats_the_pin_which_goes_after_the_first_step(folder: RunFolder) -> None:
    run(folder, Rank(5, 10))
    pin(folder, 5)
    result = run(folder, Rank(), reference="last")
    assert result.resolution is not None
    assert any("pin" in text for text in result.resolution.warnings)
    assert Registry.load(folder.registry).pin is not None, "no step was made"
    run(folder, Rank(11), reference="last")
    assert Registry.load(folder.registry).pin is None


# -- without a trace, and evaluation -------------------------------------------------------------------------


def test_fast_dev_run_leaves_no_trace(folder: RunFolder) -> None:
    rank = Rank()
    assert run(folder, rank, fast_dev_run=True).exit_code == 0
    (context,) = rank.contexts
    assert (context.run, context.logs_dir, context.save_on_stop) == (None, None, False)
    assert not os.path.exists(folder.root)


def test_an_evaluation_runs_beside_a_live_fit(folder: RunFolder) -> None:
    results = []

    def evaluate(_: RankContext) -> None:
        outcome = Outcome(StopReason.DONE, results=[{"loss": 1.0}])
        results.append(run(folder, Rank(outcome=outcome), fn="test", reference="last"))

    run(folder, Rank(5, then=evaluate))
    (result,) = results
    assert result.exit_code == 0
    assert result.eval_dir == f"{folder.evals_dir}/0001-test"
    record = json.loads((Path(folder.evals_dir) / "0001-test" / "eval.json").read_text())
    assert (record["metrics"], record["status"]) == ([{"loss": 1.0}], "done")
    assert record["checkpoint"].endswith("00000001-step-00000005")
    assert len(read_attempts(folder.attempts)) == 1, "the ledger is of fits"


def test_predictions_do_not_stand_in_the_evaluations_record(folder: RunFolder) -> None:
    run(folder, Rank(5))
    run(folder, Rank(outcome=Outcome(StopReason.DONE, results=[object()])), fn="predict", reference="last")
    record = json.loads((Path(folder.evals_dir) / "0001-predict" / "eval.json").read_text())
    assert record["metrics"] is None


def test_an_evaluation_that_has_nothing_to_read_leaves_nothing(folder: RunFolder) -> None:
    result = run(folder, Rank(), fn="test")
    assert result.exit_code in (2, 3)
    assert not os.path.exists(folder.root)


def test_init_from_is_for_fresh_starts(folder: RunFolder) -> None:
    rank = Rank(5)
    run(folder, rank, init_from="/some/weights.pt")
    assert getattr(rank.contexts[0].resolution.answer, "init_from", None) == "/some/weights.pt"
    result = run(folder, Rank(6), init_from="/some/weights.pt", reference="last")
    assert result.resolution is not None
    assert any("--init-from" in text for text in result.resolution.notices)


class Shown:
    """A bar that remembers what was said above it."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def start(self) -> None: ...
    def stop(self, final_line: str | None = None) -> None: ...
    def say(self, text: str) -> None:
        self.lines.append(text)


def test_what_a_rank_says_looks_like_all_else(folder: RunFolder) -> None:
    shown = Shown()
    rank = Rank(5, then=lambda context: context.say("something"))
    run(folder, rank, make_display=lambda *_: shown)
    assert "ckptrun: something" in shown.lines
