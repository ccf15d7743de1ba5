"""What is asked for on the command line becomes the right job. What SLURM does with it: ``tests/slurm/``."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptrun.cli import app
from ckptrun.errors import CkptrunError, ConfigError, IncompatibleError, UsageError
from ckptrun.run.folder import RunFolder
from ckptrun.run.submitted import SubmittedJob, read_submitted


@pytest.fixture(autouse=True)
def in_project(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config in the working folder, and a ``ckptrun`` in the PATH."""
    monkeypatch.chdir(project)
    (project / "ckptrun").write_text("#!/bin/true\n")
    (project / "ckptrun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{project}:/usr/bin:/bin")


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> Any:
    """``script(*words)``: what ``ckptrun slurm script`` prints, as its directives and its last command."""

    def run(*words: str) -> tuple[dict[str, str | None], list[str]]:
        assert app.run(["slurm", "script", *words], None) == 0
        printed = capsys.readouterr().out
        directives = {}
        for line in printed.splitlines():
            if line.startswith("#SBATCH "):
                name, _, value = shlex.split(line.removeprefix("#SBATCH "))[0].partition("=")
                directives[name] = value or None
        command = next(line for line in printed.splitlines() if line.startswith("srun "))
        return directives, shlex.split(command.removesuffix(" || code=$?"))[2:]

    return run


@pytest.fixture
def sbatch(project: Path) -> Any:
    """``sbatch(text)``: an ``sbatch`` in the PATH that does this, and keeps what it is given."""

    def make(text: str) -> Path:
        (project / "sbatch").write_text(f"#!/bin/bash\ncat > handed-in\n{text}\n")
        (project / "sbatch").chmod(0o755)
        return project / "handed-in"

    return make


FIT = ["ckptrun", "fit"]


def test_with_nothing_but_a_config(script: Any) -> None:
    directives, command = script()
    assert directives == {
        "--job-name": "demo",
        "--output": "slurm-logs/%x-%j.out",
        "--open-mode": "append",
        "--nodes": "1",
        "--ntasks-per-node": "1",
        "--cpus-per-task": "1",
        "--requeue": None,
        "--signal": "USR1@120",
    }
    assert command == [*FIT, "--ckpt", "last"]


@pytest.mark.parametrize(
    ("words", "expected", "command"),
    [
        # What is asked of ckptrun is passed on.
        (["trainer.max_steps=5", "-c", "ckptrun.yaml"], {},
         ["trainer.max_steps=5", "--config", "ckptrun.yaml", "--ckpt", "last"]),
        (["--run", "my run", "--ckpt", "best", "--exact"], {"--job-name": "my run"},
         ["--run", "my run", "--ckpt", "best", "--exact"]),
        # Ranks, tasks, GPUs and cores.
        (["--gpus-per-node", "1"], {"--gpus-per-node": "1", "--cpus-per-task": "1"}, ["--ckpt", "last"]),
        (["--nodes", "2", "--gpus-per-node", "8"], {"--nodes": "2", "--cpus-per-task": "8"},
         ["--ckpt", "last", "--nproc", "8"]),
        (["--gpus-per-node", "a100:4"], {"--gpus-per-node": "a100:4"}, ["--ckpt", "last", "--nproc", "4"]),
        (["--gpus-per-node", "4", "--nproc", "4"], {}, ["--ckpt", "last", "--nproc", "4"]),
        (["--gpus-per-node", "4", "--nproc", "auto"], {"--cpus-per-task": "4"}, ["--ckpt", "last", "--nproc", "auto"]),
        (["--nproc", "2"], {"--cpus-per-task": "2"}, ["--ckpt", "last", "--nproc", "2"]),
        (["--nproc", "2", "data.init_args.num_workers=3"], {"--cpus-per-task": "8"},
         ["data.init_args.num_workers=3", "--ckpt", "last", "--nproc", "2"]),
        (["trainer.num_threads=5"], {"--cpus-per-task": "5"}, ["trainer.num_threads=5", "--ckpt", "last"]),
        (["--cpus-per-task", "12"], {"--cpus-per-task": "12"}, ["--ckpt", "last"]),
        (["--ntasks-per-node", "4", "--gpus-per-node", "4", "data.init_args.num_workers=2"],
         {"--ntasks-per-node": "4", "--cpus-per-task": "3"}, ["data.init_args.num_workers=2", "--ckpt", "last"]),
        # Time.
        (["--time", "4:00:00", "--lead-s", "300"], {"--time": "4:00:00", "--signal": "USR1@300"}, ["--ckpt", "last"]),
        (["slurm.signals=[SIGUSR2]"], {"--signal": "USR2@120"}, ["slurm.signals=[SIGUSR2]", "--ckpt", "last"]),
        (["slurm.signals=[]"], {"--signal": None}, ["slurm.signals=[]", "--ckpt", "last"]),
        # Arrays: each task is a run of its own, however it is named.
        (["--array", "0-3"], {"--array": "0-3", "--output": "slurm-logs/%x-%A_%a.out"},
         ["--run", "demo-a$SLURM_ARRAY_TASK_ID", "--ckpt", "last"]),
        (["--array", "0-3", "--run", "chain", "trainer.seed=%a"], {"--job-name": "chain"},
         ["trainer.seed=$SLURM_ARRAY_TASK_ID", "--run", "chain-a$SLURM_ARRAY_TASK_ID", "--ckpt", "last"]),
        (["--array", "0-3", "run.name=n"], {"--job-name": "n"},
         ["run.name=n", "--run", "n-a$SLURM_ARRAY_TASK_ID", "--ckpt", "last"]),
        (["--array", "3-5", "run.name=n%a"], {"--job-name": "n"},
         ["run.name=n$SLURM_ARRAY_TASK_ID", "--run", "n$SLURM_ARRAY_TASK_ID", "--ckpt", "last"]),
        (["--run", "r-%a", "--", "-a", "2,4"], {"--job-name": "r", "--array": "2,4"},
         ["--run", "r-$SLURM_ARRAY_TASK_ID", "--ckpt", "last"]),
        # Options of sbatch: passed on, and in place of ours.
        (["--", "--account=x", "-J", "n"], {"--account": "x", "--job-name": "n"}, ["--ckpt", "last"]),
        (["--gpus-per-node", "2", "--", "--gpus-per-node=4"], {"--gpus-per-node": "4"},
         ["--ckpt", "last", "--nproc", "4"]),
        # A container has a ckptrun of its own.
        (["--container", "apptainer exec 'a b.sif'"], {}, ["--ckpt", "last"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_jobs(script: Any, words: list[str], expected: dict[str, str | None], command: list[str]) -> None:
    directives, started = script(*words)
    assert {name: directives.get(name) for name in expected} == expected
    container = ["apptainer", "exec", "a b.sif"] if "--container" in words else []
    assert started == [*container, *FIT, *command]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus-per-node", "4", "--nproc", "8"], "4 GPUs on each node are asked for, and --nproc is 8"),
        (["--gpus-per-node", "4", "--ntasks-per-node", "8"],
         "8 tasks on each node are asked for, a rank each, and 4 GPUs"),
        (["--nproc", "2", "--ntasks-per-node", "2"], "2 tasks on each node are asked for, and 2 ranks in each of them"),
        (["--gpus-per-node", "a100"], "--gpus-per-node is 'a100', expected a whole number"),
        (["--nodes", "0"], "--nodes is '0', expected a whole number"),
        (["--lead-s", "2m"], "--lead-s is '2m'"),
        (["--lead-s", "60", "slurm.signals=[]"], "--lead-s is given, and slurm.signals is empty"),
        (["--time", "4h"], "the time limit is '4h'"),
        (["--", "account=x"], "no option of sbatch"),
        (["--", "--comment=a\nb"], "cannot stand in a #SBATCH line"),
        (["--cpus-per-task", "0"], "--cpus-per-task is '0', expected a whole number"),
        (["--", "-c", "two"], "--cpus-per-task is 'two', expected a whole number"),
        (["--ntasks-per-node", "2", "--strategy", "single"], "single is for one rank, and the job would have 2"),
        (["--nproc", "2", "--nodes", "2", "--strategy", "single"], "single is for one rank, and the job would have 4"),
        (["--run", "x%a"], "the run is named 'x%a', where %a is the number of an array's task"),
        (["run.name=x%a"], "the run is named 'x%a', where %a is the number of an array's task"),
        (["trainer.max_step=5"], "max_step"),
        (["-c", "missing.yaml"], "missing.yaml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_refused_before_the_queue(words: list[str], message: str) -> None:
    with pytest.raises(CkptrunError) as caught:
        app.run(["slurm", "script", *words], None)
    assert caught.value.exit_code == 2
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (["--", "--signal=USR2@30"], "--signal=USR2@30 is none of the signals that announce the end (slurm.signals: "
         "SIGUSR1): it does not have the job requeued. Name it there, or write --signal=USR1@30"),
        (["slurm.signals=[]", "--", "--signal=USR1"], "slurm.signals: none"),
        (["--", "--signal=usr1@30"], None),
        (["--", "--signal=SIGUSR1"], None),
        (["--", "--signal=R:10@30"], None),
        (["slurm.signals=[SIGUSR1, SIGUSR2]", "--", "--signal=USR2@30"], None),
        (["--", "--gpus=4"], "--gpus=4 asks for 4 GPUs, and one rank is started in each task: ask for them with "
         "--gpus-per-node, or say how many ranks a node has with --nproc"),
        (["--", "-G", "a100:2"], "--gpus=a100:2 asks for 2 GPUs"),
        (["--", "--gres=tmp:9,gpu:a100:2"], "--gres=tmp:9,gpu:a100:2 asks for 2 GPUs"),
        (["--", "--gres=gpu"], None),
        (["--", "--gres=tmp:9"], None),
        (["--nproc", "4", "--", "--gpus=4"], None),
        (["--nproc", "auto", "--", "--gpus=4"], None),
        (["--ntasks-per-node", "4", "--", "--gpus=4"], None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_what_is_hardly_meant_so(
    words: list[str], warning: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["slurm", "script", *words], None) == 0
    said = capsys.readouterr().err
    assert said == "" if warning is None else warning in said


@pytest.mark.parametrize(
    ("requeue", "acts"), [("null", True), ("scontrol", True), ("exit-code", True), ("none", False)]
)
def test_who_acts_on_exit_75(requeue: str, acts: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["slurm", "script", f"slurm.requeue={requeue}"], None) == 0
    assert ("scontrol requeue" in capsys.readouterr().out) == acts


def test_the_config_of_the_environment_stands_in_the_script(
    script: Any, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "other.yaml").write_text((project / "ckptrun.yaml").read_text())
    monkeypatch.setenv("CKPTRUN_CONFIG", "other.yaml")
    assert script()[1] == [*FIT, "--config", "other.yaml", "--ckpt", "last"]


def test_in_another_folder_the_config_is_the_one_that_was_read(script: Any, project: Path) -> None:
    (project / "there").mkdir()
    config = str(project / "ckptrun.yaml")
    assert script("--", "--chdir=there")[1] == [*FIT, "--config", config, "--ckpt", "last"]
    assert script("--", "-D", str(project))[1] == [*FIT, "--ckpt", "last"]


def test_in_another_folder_modules_may_be_missing(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "there").mkdir()
    assert app.run(["slurm", "script", "--", "--chdir=there"], None) == 0
    said = capsys.readouterr().err
    assert said.count("the module 'task' is in this folder, and the job runs in") == 1
    assert f"--set-up 'export PYTHONPATH={project}'" in said
    monkeypatch.syspath_prepend(str(project))
    monkeypatch.setattr("sys.path", ["/usr/bin", *sys.path])  # as where PYTHONPATH has it
    assert app.run(["slurm", "script", "--", "--chdir=there"], None) == 0
    (project / "there" / "task.py").touch()
    monkeypatch.setattr("sys.path", [each for each in sys.path if each != str(project)])
    assert app.run(["slurm", "script", "--", "--chdir=there"], None) == 0
    assert app.run(["slurm", "script", "--container", "x", "--", "--chdir=/"], None) == 0
    assert app.run(["slurm", "script"], None) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["demo", "demo-a3"])
def test_a_run_that_cannot_go_on_with_this_config_is_told_before_the_queue(
    project: Path, sbatch: Any, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    handed_in = sbatch("echo 12")
    array = ["--array", "3-4"] if name == "demo-a3" else []
    run = project / "runs" / name
    assert app.run(["fit", "--print-config", "--json"], None) == 0
    stored = capsys.readouterr().out  # JSON is YAML
    (run / "checkpoints" / "00000001-step-00000004").mkdir(parents=True)
    (run / "config.yaml").write_text(stored)
    assert app.run(["slurm", "submit", *array, "trainer.max_steps=9"], None) == 0
    handed_in.unlink()
    with pytest.raises(IncompatibleError) as caught:
        app.run(["slurm", "submit", *array, "model.init_args.lr=0.5"], None)
    assert caught.value.exit_code == 5
    assert f"the config differs from that of run {name!r} in what changes the result:" in caught.value.message
    assert "model.init_args.lr: nothing in the run, 0.5 given" in caught.value.message
    assert not handed_in.exists()
    capsys.readouterr()
    assert app.run(["slurm", "script", *array, "model.init_args.lr=0.5"], None) == 0
    assert "the config differs from that of run" in capsys.readouterr().err
    for words in (["--override"], ["--ckpt", "none"], ["--run", "other"]):
        assert app.run(["slurm", "submit", *array, "model.init_args.lr=0.5", *words], None) == 0
    (run / "checkpoints" / "00000001-step-00000004").rmdir()
    assert app.run(["slurm", "submit", *array, "model.init_args.lr=0.5"], None) == 0


def test_without_a_ckptrun_in_the_path_it_is_named_by_this_python(
    script: Any, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "ckptrun").unlink()
    assert script()[1] == [sys.executable, "-m", "ckptrun", "fit", "--ckpt", "last"]
    assert script("--container", "apptainer exec x")[1][3:] == [*FIT, "--ckpt", "last"]


def test_inside_of_a_job_the_script_is_the_same(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = script()
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "2"}.items():
        monkeypatch.setenv(name, value)
    assert script() == outside


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["slurm", "script", "--array", "1-2", "--json"], None) == 0
    document = json.loads(capsys.readouterr().out)
    text = document.pop("script")
    assert document == {
        "run": "demo-a*",
        "job_name": "demo",
        "log": "slurm-logs/%x-%A_%a.out",
        "log_folder": "slurm-logs",
    }
    assert text.startswith("#!/bin/bash\n# Written by: ckptrun slurm script --array 1-2\n")


def test_the_folder_for_the_log_is_named_from_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["slurm", "script", "--json", "--", "--chdir=there"], None) == 0
    assert json.loads(capsys.readouterr().out)["log_folder"] == "there/slurm-logs"


def test_submit_without_sbatch(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(project))
    with pytest.raises(UsageError, match="there is no sbatch on this machine"):
        app.run(["slurm", "submit"], None)


def test_submit_where_the_logs_folder_cannot_be_made(project: Path) -> None:
    with pytest.raises(UsageError, match="the folder for the log cannot be made"):
        app.run(["slurm", "submit", "--log-dir", "task.py"], None)


def test_submit_hands_the_script_in(sbatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    handed_in = sbatch("echo 'sbatch: warning: so and so' >&2; echo '12;far'")
    assert app.run(["slurm", "submit", "--time", "5"], None) == 0
    told = capsys.readouterr()
    assert told.out.startswith("submitted job 12 on cluster far: run demo\n")
    assert told.err == "sbatch: warning: so and so\n"
    assert "#SBATCH --time=5\n" in handed_in.read_text()


def test_submit_reads_a_name_in_another_encoding(sbatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sbatch(r"printf '12;f\351r\n'")
    assert app.run(["slurm", "submit"], None) == 0
    assert capsys.readouterr().out.startswith("submitted job 12 on cluster f\ufffdr: run demo\n")


@pytest.mark.parametrize("text", ["exit 1", "exec <&-; exit 1", "exit 0"])
def test_submit_where_there_is_no_job(sbatch: Any, text: str) -> None:
    sbatch(f"echo 'sbatch: error: invalid' >&2; {text}")
    with pytest.raises(UsageError, match="nothing was handed in:\nsbatch: error: invalid"):
        app.run(["slurm", "submit"], None)


def test_submit_with_test_only_hands_nothing_in(sbatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sbatch("echo 'sbatch: Job 9 to start at 2030-01-01T00:00:00' >&2")
    assert app.run(["slurm", "submit", "--", "--test-only"], None) == 0
    told = capsys.readouterr()
    assert told.out == "tested alone (--test-only); nothing was handed in\n"
    assert told.err == "sbatch: Job 9 to start at 2030-01-01T00:00:00\n"
    assert app.run(["slurm", "submit", "--json", "--", "--test-only"], None) == 0
    assert json.loads(capsys.readouterr().out)["job_id"] is None


def test_submit_with_wait_tells_of_the_job_at_once_and_ends_as_it_does(
    sbatch: Any, project: Path, start_cli: Any
) -> None:
    sbatch("echo 12; until [ -e ended ]; do sleep 0.05; done; echo 'sbatch: over' >&2; exit 75")
    live = start_cli("slurm", "submit", "--", "--wait", env={"PATH": f"{project}:/usr/bin:/bin"})
    live.wait_for_output("submitted job 12")
    (project / "ended").touch()
    done = live.wait()
    assert done.code == 75, done
    assert "sbatch: over" in done.stderr
    assert "nothing was handed in" not in done.stderr


def test_submit_notes_the_job_and_tells_of_one_that_waits(
    sbatch: Any, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "scontrol").write_text("#!/bin/sh\necho JobId=12 JobState=PENDING\n")
    (project / "scontrol").chmod(0o755)
    sbatch("echo 12")
    assert app.run(["slurm", "submit"], None) == 0
    assert capsys.readouterr().err == ""
    assert read_submitted(RunFolder.at("runs", "demo")) == SubmittedJob(
        "demo", "12", log=str(project / "slurm-logs" / "demo-12.out")
    )
    assert app.run(["slurm", "submit"], None) == 0
    assert "job 12 waits to start, and is of the same run: demo." in capsys.readouterr().err
    assert app.run(["slurm", "submit", "--", "--dependency=afterany:12"], None) == 0
    assert capsys.readouterr().err == ""
    assert app.run(["slurm", "submit", "--run", "other"], None) == 0
    assert capsys.readouterr().err == ""


def test_submit_makes_the_folders_of_both_logs(sbatch: Any, project: Path) -> None:
    handed_in = sbatch("echo 12")
    (project / "there").mkdir()
    words = ["--output=foo/%x-%j.out", "-e", "bar/y.err", "--chdir=there"]
    assert app.run(["slurm", "submit", "--", *words], None) == 0
    assert {path.name for path in (project / "there").iterdir()} >= {"foo", "bar"}
    assert "#     mkdir -p there/foo there/bar\n" in handed_in.read_text()


def test_no_config(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
    with pytest.raises(ConfigError, match="found no config"):
        app.run(["slurm", "submit"], None)
