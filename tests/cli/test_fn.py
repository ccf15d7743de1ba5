"""``fit``, ``validate``, ``test`` and ``predict`` from the shell: what is asked, refused, told and
written."""

from __future__ import annotations

import json
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptrun.cli.options import FnOptions, ResolveOptions, command_line
from ckptrun.cli.rank import RankWork
from ckptrun.config.load import load_config
from ckptrun.errors import ConfigError
from ckptrun.run.attempts import read_attempts
from ckptrun.run.folder import RunFolder
from ckptrun.run.registry import NO_JOB, Registry

RunCli = Callable[..., Any]


# --- asked


def test_a_first_fit_then_nothing_left(project: Path, run_cli: RunCli) -> None:
    first = run_cli("fit", "--ckpt", "last")
    assert first.code == 0, first
    assert "starting fresh" in first.stderr
    assert "finished at step 6 (max_steps)" in first.stderr
    checkpoints = project / "runs" / "demo" / "checkpoints"
    newest = max(path.name for path in checkpoints.iterdir())
    assert str(checkpoints / newest) in first.stderr

    again = run_cli("fit", "--ckpt", "last")
    assert again.code == 0, again
    assert "nothing left to do" in again.stderr
    assert len((project / "runs" / "demo" / "attempts.jsonl").read_text().splitlines()) == 2

    further = run_cli("fit", "trainer.max_steps=8", "--ckpt", "last")
    assert further.code == 0, further
    assert "step 6 from" in further.stderr
    assert "finished at step 8" in further.stderr


def test_evaluation_of_the_best_checkpoint_with_the_runs_own_config(trained: Path, run_cli: RunCli) -> None:
    (trained / "ckptrun.yaml").write_text("run: {name: demo}\nmodel: {class_path: no.such.Model}\n")
    done = run_cli("test", "--json")
    assert done.code == 0, done
    assert (done.document["fn"], done.document["exit_code"]) == ("test", 0)
    assert list(done.document["results"][0]) == ["test_loss"]
    assert done.document["resolution"]["rule"] == 8
    table = run_cli("validate")
    assert table.code == 0, table
    assert table.stdout.splitlines()[1].split()[0] == "val_loss"


def test_evaluation_with_another_number_of_ranks_than_training(trained: Path, run_cli: RunCli) -> None:
    def plan(*args: str) -> tuple[int, str, str]:
        document = run_cli("validate", "--dry-run", "--json", *args).document
        return document["num_ranks"], document["launcher"], document["strategy"]

    done = run_cli("validate", "--nproc", "2", "--json")
    assert done.code == 0, done
    done = run_cli("fit", "--nproc", "2", "--ckpt", "none")
    assert done.code == 0, done
    assert plan() == (2, "torchrun", "ddp")
    assert plan("--nproc", "1") == (1, "inline", "single")
    chosen = run_cli("validate", "--strategy", "single", "--dry-run")
    assert chosen.code == 2, chosen
    assert "use --strategy ddp, or --nproc 1" in chosen.stderr


def test_predictions_are_printed_where_they_are_text_and_always_kept(trained: Path, run_cli: RunCli) -> None:
    done = run_cli("predict", env={"PREDICT_TEXT": "1"})
    assert done.code == 0, done
    assert "text 0\n\ntext 1\n" in done.stdout
    (written,) = (trained / "runs" / "demo" / "evals").glob("*-predict/predictions.txt")
    assert written.read_text() == "text 0\n\ntext 1\n\ntext 2\n\ntext 3\n"
    other = run_cli("predict", "--json")
    assert other.code == 0, other
    assert len(list((trained / "runs" / "demo" / "evals").glob("*-predict/predictions.pt"))) == 1


def test_ctrl_c_says_how_to_go_on(project: Path, start_cli: Callable[..., Any]) -> None:
    live = start_cli("fit", "trainer.max_steps=1000000", cwd=project)
    live.wait_for_step(5, "demo")
    live.signal(signal.SIGINT)
    done = live.wait()
    assert done.code == 130, done
    assert "stopped by Ctrl-C at step" in done.stderr
    assert "to go on: ckptrun fit trainer.max_steps=1000000 --ckpt last" in done.stderr


def test_a_time_limit_and_the_signals_of_the_config_save_and_say_start_me_again(
    project: Path, start_cli: Callable[..., Any]
) -> None:
    forever = "trainer.max_steps=1000000"
    limited = start_cli("fit", forever, "--run", "limited", "--time-limit", "6", cwd=project)
    named = start_cli("fit", forever, "--run", "named", "slurm.signals=[SIGUSR2]", cwd=project)
    named.wait_for_step(5, "named")
    named.signal(signal.SIGUSR1)  # not one of them
    named.signal(signal.SIGUSR2)
    for live, run in ((limited, "limited"), (named, "named")):
        done = live.wait()
        assert done.code == 75, done
        folder = RunFolder(str(project / "runs" / run))
        assert [each.stop_reason for each in read_attempts(folder.attempts)] == ["walltime"]
    assert list(Registry.load(folder.registry).hpc) == [NO_JOB]  # the other may have had no time for a step


# --- told


def test_json_is_one_document_whatever_the_user_prints(project: Path, run_cli: RunCli) -> None:
    done = run_cli("fit", "--json")
    assert done.code == 0, done
    assert (done.document["run"], done.document["stop_reason"]) == ("demo", "done")
    assert (done.document["step"], done.document["finished_by"]) == (6, "max_steps")
    assert "the user prints" in done.stderr


def test_a_fault_of_the_users_is_their_traceback_from_their_first_frame(
    project: Path, run_cli: RunCli
) -> None:
    done = run_cli("fit", "--json", env={"FAIL_AT_STEP": "3"})
    assert done.code == 1, done
    assert done.stderr.count("Traceback (most recent call last)") == 1
    frames = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    assert len(frames) == 1
    assert "task.py" in frames[0]
    assert "failed at step 3" in done.stderr
    assert done.document["stop_reason"] == "exception"
    assert "a fault of the user's" in done.document["error"]["message"]


# --- shown only


def test_dry_run_shows_the_resolution_and_the_command_and_writes_nothing(
    trained: Path, run_cli: RunCli, snapshot: Callable[[Path], dict[str, bytes]]
) -> None:
    before = snapshot(trained)
    done = run_cli("fit", "--dry-run", "--ckpt", "last", "trainer.max_steps=9")
    assert done.code == 0, done
    assert "would run: ckptrun fit trainer.max_steps=9 --ckpt last\n" in done.stdout
    assert "1 rank in this process, strategy single" in done.stdout
    assert "taken" in done.stdout
    as_json = run_cli("fit", "--dry-run", "--ckpt", "last", "trainer.max_steps=9", "--json")
    assert as_json.document["command"] == ["ckptrun", "fit", "trainer.max_steps=9", "--ckpt", "last"]
    assert as_json.document["resolution"]["step"] == 6
    refused = run_cli("fit", "--dry-run")
    assert refused.code == 2, refused
    assert "would run" not in refused.stdout
    assert snapshot(trained) == before


def test_dry_run_of_a_new_run_creates_nothing(project: Path, run_cli: RunCli) -> None:
    done = run_cli("fit", "--dry-run")
    assert done.code == 0, done
    assert not (project / "runs").exists()


def test_print_config_shows_where_each_value_comes_from(project: Path, run_cli: RunCli) -> None:
    done = run_cli("fit", "--print-config", "trainer.seed=3", "--root", "elsewhere")
    assert done.code == 0, done
    lines = {line.split(":")[0].strip(): line for line in done.stdout.splitlines()}
    assert lines["seed"].endswith("# override 'trainer.seed=3'")
    assert lines["root"].endswith("# --root")
    assert lines["max_steps"].endswith("# ckptrun.yaml:3")
    assert run_cli("fit", "--print-config", "--json").document["trainer"]["max_steps"] == 6
    assert not (project / "runs").exists()


# --- refused


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--nproc", "0"), "launch.nproc is 0"),
        (("--nproc", "2", "--launcher", "inline"), "--launcher"),
        (("--launcher", "slurm"), "launch.launcher is 'slurm'"),
        (("--nnodes", "2"), "2 hosts are asked for, and no place where they meet"),
        (("--nnodes", "2", "--rdzv-endpoint", "h:0"), "it takes HOST:PORT with a port from 1 to 65535"),
        (("--nnodes", "2", "--rdzv-endpoint", "nowhere.invalid"), "'nowhere.invalid' is not known here"),
        (("slurm.signals=[SIGRTMIN]",), "slurm.signals is a list, expected some of SIGUSR1"),
        (("slurm.max_requeues=-1",), "slurm.max_requeues is -1"),
        (("--root", "s3://bucket/runs"), "is a URL"),
        (("--grace-s", "soon"), "launch.grace_s is 'soon'"),
        (("--strategy", "dpp"), "strategy.name is 'dpp'"),
        (("trainer.max_step=3",), "unknown key 'trainer.max_step'"),
        (("last",), "override 'last': expected key=value"),
        (("-c", "nope.yaml"), "nope.yaml"),
        (("--ckpt",), "--ckpt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_done_is_said_and_nothing_is_started(
    args: tuple[str, ...], said: str, project: Path, run_cli: RunCli
) -> None:
    done = run_cli("fit", *args)
    assert done.code == 2, done
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project / "runs").exists()


def test_a_config_that_changes_the_result_is_refused_with_the_difference(
    trained: Path, run_cli: RunCli, snapshot: Callable[[Path], dict[str, bytes]]
) -> None:
    before = snapshot(trained / "runs" / "demo" / "checkpoints")
    config = (trained / "runs" / "demo" / "config.yaml").read_text()
    args = ("--ckpt", "last", "trainer.seed=7", "model.init_args.lr=0.2", "trainer.max_steps=8")
    for command in ("fit", "resolve"):
        refused = run_cli(command, *args)
        assert refused.code == 5, refused
        assert "trainer.seed: 0 in the run, 7 given" in refused.stderr
        assert "model.init_args.lr: nothing in the run, 0.2 given" in refused.stderr
        assert "--override" in refused.stderr
        assert "--run NAME" in refused.stderr
    assert snapshot(trained / "runs" / "demo" / "checkpoints") == before
    assert (trained / "runs" / "demo" / "config.yaml").read_text() == config
    forced = run_cli("fit", *args, "--override")
    assert forced.code == 0, forced
    assert "trainer.seed: 0 in the run, 7 given" in forced.stderr


def test_a_mistake_in_the_classes_leaves_the_run_as_it_was(trained: Path, run_cli: RunCli) -> None:
    run = trained / "runs" / "demo"
    before = {name: (run / name).read_text() for name in ("config.yaml", "attempts.jsonl", "status.json")}
    typo = run_cli("fit", "--ckpt", "none", "model.init_args.widht=5")
    assert typo.code == 2, typo
    assert "Did you mean model.init_args.width?" in typo.stderr
    (trained / "broken.py").write_text("import torch\nraise RuntimeError('at import')\n")
    fault = run_cli("fit", "--ckpt", "none", "model.class_path=broken.Model", "--json")
    assert fault.code == 1, fault
    assert 'File "' in fault.stderr
    assert "broken.py" in fault.stderr
    assert fault.document["error"]["exit_code"] == 1
    assert {name: (run / name).read_text() for name in before} == before


def test_two_at_once_the_second_is_told_who_holds_the_run(
    project: Path, start_cli: Callable[..., Any], run_cli: RunCli
) -> None:
    live = start_cli("fit", "trainer.max_steps=1000000", cwd=project)
    live.wait_for_step(1, "demo")
    second = run_cli("fit", "--ckpt", "last", "trainer.max_steps=1000000")
    assert second.code == 4, second
    assert f"process {live.pid} on" in second.stderr
    shown = run_cli("resolve", "--ckpt", "last", "trainer.max_steps=1000000", "--json")
    assert (shown.code, shown.document["error"]["exit_code"]) == (4, 4), shown
    stopped = run_cli("stop", "demo")
    assert stopped.code == 0, stopped
    assert live.wait().code == 143


# What Python does last is to forget the modules; by then it has given up all handlers.
LAST_MOMENT = """
import os, signal

class PressedWhenAllIsOver:
    def __del__(self, kill=os.kill, me=os.getpid(), number=signal.SIGINT):
        kill(me, number)

pressed = PressedWhenAllIsOver()
"""


def test_a_press_when_all_is_over_changes_nothing(trained: Path, run_cli: RunCli) -> None:
    with open(trained / "task.py", "a") as task:
        task.write(LAST_MOMENT)
    done = run_cli("validate")
    assert done.code == 0, done


# --- pieces


def test_the_command_line_is_what_was_asked_without_what_only_shows() -> None:
    options = FnOptions(
        overrides=["a.b=1"], config=["x.yaml", "y.yaml"], ckpt="last", grace_s="5", exact=True, json=True,
        dry_run=True,
    )  # fmt: skip
    assert command_line("fit", options) == [
        "ckptrun", "fit", "a.b=1", "--config", "x.yaml", "--config", "y.yaml", "--ckpt", "last", "--exact",
        "--grace-s", "5",
    ]  # fmt: skip
    assert command_line("test", ResolveOptions(fn="test", all=True, run="r")) == [
        "ckptrun",
        "test",
        "--run",
        "r",
    ]


def test_the_ranks_work_can_be_sent_to_another_process(project: Path) -> None:
    config = load_config(files=[str(project / "ckptrun.yaml")])
    work = pickle.loads(pickle.dumps(RankWork("fit", config)))
    assert isinstance(work, RankWork)


def test_a_config_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("run: {name: a}")
    with pytest.raises(ConfigError, match=r"c\.yaml: the config has no model to fit"):
        RankWork("fit", load_config(files=[str(tmp_path / "c.yaml")]))


def test_status_after_the_end_is_what_programs_rely_on(trained: Path, run_cli: RunCli) -> None:
    document = run_cli("status", "--json").document
    assert (document["status"], document["stop_reason"], document["exit_code"]) == ("FINISHED", "done", 0)
    assert (document["step"], document["max_steps"], document["fn"]) == (6, 6, "fit")
    assert Path(document["checkpoint"]).is_dir()
    assert json.loads((Path(document["checkpoint"]) / "manifest.json").read_text())["step"] == 6
