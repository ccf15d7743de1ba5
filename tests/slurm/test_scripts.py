"""The ready scripts, and what `ckptrun slurm` writes and hands in, in a real SLURM."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from live_cli import wait_until_true
from slurm_cluster import SlurmCluster
from slurm_project import Project

import ckptrun
from ckptrun.cli import app
from ckptrun.environment.slurm_successor import find_successor
from ckptrun.launch.sbatch import BatchJob, batch_script, log_path
from ckptrun.launch.sbatch_options import parse_sbatch_options
from ckptrun.launch.script_quoting import sbatch_quote

pytestmark = pytest.mark.slurm

REPOSITORY = Path(ckptrun.__file__).resolve().parents[1]
READY = sorted((REPOSITORY / "configs" / "slurm").glob("*.sbatch"))


# -- the ready scripts -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HandedIn:
    """A job of a ready script: its id, its folder, and its log's name up to the job's number."""

    job: str
    folder: Path

    def log(self, end: str = "") -> str:
        return (self.folder / "slurm-logs" / f"digits-{self.job}{end}.out").read_text(errors="replace")


def hand_in_as_it_says(cluster: SlurmCluster, name: str, folder: Path, env: Mapping[str, str]) -> HandedIn:
    """Do what the head of a ready script says."""
    shutil.copytree(REPOSITORY / "configs", folder / "configs")
    script = folder / "configs" / "slurm" / f"{name}.sbatch"
    (before,) = re.findall(r"^#     (mkdir .*)$", script.read_text(), re.MULTILINE)
    cluster.run("bash", "-c", before, cwd=folder)
    return HandedIn(cluster.run("sbatch", "--parsable", script, cwd=folder, env=env).strip(), folder)


def path_with(folder: Path, cluster: SlurmCluster, **programs: str) -> dict[str, str]:
    """An environment that finds these scripts first."""
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{cluster.env['PATH']}"}


# Stands in for a container's program: there is no scontrol in what it runs, and all else is as in the real one.
APPTAINER = """#!/bin/bash
[ "$1" = exec ] && [ "$2" = ckptrun.sif ] || exit 64
shift 2
hide='for each in scontrol sbatch squeue; do mount --bind /dev/null "$(command -v $each)"; done; exec "$@"'
exec unshare --mount bash -c "$hide" container "$@"
"""


@pytest.mark.parametrize("path", READY, ids=lambda path: path.stem)
def test_each_is_what_the_command_in_its_head_writes(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_is_what_its_head_says(path, REPOSITORY, monkeypatch, capsys)
    subprocess.run(["bash", "-n", path], check=True)


def test_that_of_a_new_project_too(
    in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["init"], None) == 0
    capsys.readouterr()
    assert_is_what_its_head_says(Path("job.sbatch"), in_tmp_path, monkeypatch, capsys)


def assert_is_what_its_head_says(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = re.findall(r"^# Written by: ckptrun (.*)$", path.read_text(), re.MULTILINE)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert app.run(shlex.split(line), None) == 0
    assert capsys.readouterr().out == path.read_text()


def test_those_that_need_no_gpu_train_to_the_end_as_they_stand(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """All at once: each is a program or two that imports torch and little else."""
    env = path_with(tmp_path / "bin", slurm_cluster, apptainer=APPTAINER)
    jobs = {
        name: hand_in_as_it_says(slurm_cluster, name, tmp_path / name, env)
        for name in ("several_nodes", "task_per_rank", "job_array", "container")
    }
    for name, end, run in (
        ("several_nodes", "", "digits"),
        ("task_per_rank", "", "digits"),
        ("container", "", "digits"),
        *(("job_array", f"_{task}", f"digits-a{task}") for task in range(2)),
    ):
        slurm_cluster.wait_for_state(f"{jobs[name].job}{end}", "COMPLETED", "FAILED", timeout_s=120)
        assert f"run '{run}' finished" in jobs[name].log(end), jobs[name].log(end)
    for name in ("several_nodes", "task_per_rank"):
        status = json.loads((jobs[name].folder / "runs" / "digits" / "status.json").read_text())
        assert [each["host"].split()[0] for each in status["ranks"]] == ["n1", "n1", "n2", "n2"]
    runs = jobs["job_array"].folder / "runs"
    configs = [(runs / f"digits-a{task}" / "config.yaml").read_text() for task in range(2)]
    assert [re.findall(r"seed: (\d+)", text) for text in configs] == [["0"], ["1"]]


# -- exit code 75 ----------------------------------------------------------------------------------------------

# In place of ckptrun: writes down which job it runs in, and is not done before its third start.
STAND_IN = """
key="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
echo "$key ${SLURM_RESTART_COUNT:-0} ${CKPTRUN_PREVIOUS_JOBS:--} $SLURM_CPUS_PER_TASK $PWD" >> "$1"
[ "$(wc -l < "$1")" -ge 3 ] || exit 75
"""


def starts(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def test_75_is_a_requeue_or_where_that_is_refused_a_new_job_of_the_same_run(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    (tmp_path / "stand_in.sh").write_text(STAND_IN)
    for folder in ("slurm-logs", "there/slurm-logs"):
        (tmp_path / folder).mkdir(parents=True)

    def submit(name: str, array: str | None, *options: str) -> str:
        out = "%a" if array else "out"
        job = BatchJob(
            ("bash", f"{tmp_path}/stand_in.sh", f"{tmp_path}/{name}-{out}"),
            name,
            cpus_per_task="2",
            set_up=("set -euo pipefail",),
            array=array,
            options=parse_sbatch_options(options),
        )
        (tmp_path / f"{name}.sbatch").write_text(batch_script(job))
        return slurm_cluster.run("sbatch", "--parsable", f"{name}.sbatch", cwd=tmp_path).strip()

    again = submit("again", None)
    again_array = submit("again-array", "3,5")
    anew = submit("anew", None, "--no-requeue", "--chdir=there")
    anew_array = submit("anew-array", "3,5", "--no-requeue")
    files = [tmp_path / name for name in ("again-out", "again-array-3", "again-array-5")]

    requeued = (again, f"{again_array}_3", f"{again_array}_5")
    for restart in (1, 2):
        for job in requeued:
            slurm_cluster.wait_for_restart(job, restart)
    others = [tmp_path / name for name in ("anew-out", "anew-array-3", "anew-array-5")]
    wait_until_true(
        lambda: all(len(starts(path)) >= 3 for path in [*files, *others]), what="the third start of each"
    )
    where = ["2", str(tmp_path)]
    for path, key in zip(files, requeued, strict=True):
        assert starts(path) == [[key, str(restart), "-", *where] for restart in range(3)]
    for name, first in (
        ("anew-out", anew),
        ("anew-array-3", f"{anew_array}_3"),
        ("anew-array-5", f"{anew_array}_5"),
    ):
        one, two, three = starts(tmp_path / name)
        where = ["2", str(tmp_path / "there" if name == "anew-out" else tmp_path)]
        assert one == [first, "0", "-", *where]
        assert two[1:] == ["0", first, *where]
        assert three[1:] == ["0", f"{two[0]},{first}", *where]
        assert len({one[0], two[0], three[0]}) == 3
        assert {key[0].partition("_")[2] for key in (one, two, three)} == {first.partition("_")[2]}


# -- submit ----------------------------------------------------------------------------------------------------


def test_a_signal_reaches_ckptrun_in_a_container_and_in_place_of_the_shell(
    slurm_cluster: SlurmCluster, tmp_path: Path, run_cli: Callable[..., Any]
) -> None:
    """The container's ckptrun cannot requeue the job, and the script outside of it does. Where ckptrun has
    taken the shell's place (``exec``, with ``B:`` before the signal) it does so itself. Training goes on in both.
    """
    folder = tmp_path / "it's $here; 100%"
    folder.mkdir()
    project = Project(folder, slurm_cluster)
    env = {**slurm_cluster.env, **path_with(tmp_path / "bin", slurm_cluster, apptainer=APPTAINER)}
    # As from a shell inside of another job, which is none of the new one's business.
    inside = {"SLURM_RESTART_COUNT": "4", "SLURM_ARRAY_TASK_ID": "1", "CKPTRUN_PREVIOUS_JOBS": "9"}

    def waits(run: str) -> str:
        """The first start of a run waits at its fifth step for the signal."""
        event = f"{{hook: on_train_batch_end, nth: 5, what: wait, once: {tmp_path}/{run}-waits}}"
        return f"callbacks.2={{class_path: rank_work.HappensHere, init_args: {event}}}"

    words = (
        "trainer.max_steps=40",
        waits("demo"),
        "--container",
        "apptainer exec ckptrun.sif",
        "--log-dir",
        "lo gs/%j",
    )
    done = run_cli(
        "slurm", "submit", *words, "--json", "--", "--comment=a 'b'", cwd=folder, env={**env, **inside}
    )
    assert done.code == 0, done
    told = json.loads(done.stdout)
    contained, log = told["job_id"], Path(told["log"])
    assert log == folder / "lo gs/%j" / f"demo-{contained}.out"
    assert slurm_cluster.run("squeue", "--noheader", "--job", contained, "--format", "%k").strip() == "a 'b'"
    fit = f"exec ckptrun fit --ckpt last --run exec trainer.max_steps=40 '{waits('exec')}'"
    replaced = project.submit(fit, "--signal=B:USR1@60", "--requeue")
    jobs = {"demo": contained, "exec": replaced}
    for run, job in jobs.items():
        wait_until_true((tmp_path / f"{run}-waits").exists, what=f"the fifth step of {run}")
        slurm_cluster.run("scancel", "--signal=USR1", *(["--batch"] if run == "exec" else []), job)
    for job in jobs.values():
        slurm_cluster.wait_for_restart(job, 1)
    for run, said in (("demo", log), ("exec", folder / f"slurm-{replaced}.out")):
        slurm_cluster.wait_for_state(jobs[run], "COMPLETED", "FAILED", timeout_s=120)
        assert f"run '{run}' finished at step 40" in said.read_text(), said.read_text()
        assert said.read_text().count("fresh start") == 1
        _, second = project.ledger(run, event="start")
        assert second["resolved"]
    assert "exited with exit code 75" in log.read_text().lower()
    assert "stands between" not in (folder / f"slurm-{replaced}.out").read_text()


def test_submit_says_where_to_look(
    slurm_cluster: SlurmCluster, tmp_path: Path, run_cli: Callable[..., Any]
) -> None:
    Project(tmp_path, slurm_cluster)
    one = run_cli("slurm", "submit", "--time", "5", "--", "--hold", env=slurm_cluster.env)
    assert one.code == 0, one
    job = re.match(r"submitted job (\d+): run demo\n", one.stdout)[1]  # type: ignore[index]
    log = tmp_path / "slurm-logs" / f"demo-{job}.out"
    assert log.parent.is_dir()
    assert slurm_cluster.job(job)["StdOut"] == str(log)
    for line in (
        f"log: {log}",
        f"tail -F {log}",
        "ckptrun status demo",
        f"squeue --job {job}",
        f"scancel {job}",
    ):
        assert line in one.stdout
    waiting = run_cli("status", "demo", env=slurm_cluster.env)
    assert (waiting.code, waiting.stdout) == (0, f"demo: job {job} waits for its first start, JobHeldUser\n")
    tested = run_cli("slurm", "submit", "--", "--test-only", env=slurm_cluster.env)
    assert (tested.code, tested.stdout) == (0, "tested alone (--test-only); nothing was handed in\n"), tested
    assert f"job {job} waits to start, JobHeldUser, and is of the same run: demo." in tested.stderr
    assert "to start at" in tested.stderr
    refused = run_cli("slurm", "submit", "--", "--partition=nowhere", env=slurm_cluster.env)
    assert refused.code == 2
    assert "sbatch refused the job; nothing was handed in" in refused.stderr
    assert "nowhere" in refused.stderr


def test_a_job_that_a_script_has_handed_in_anew_is_found(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "a job.sh").write_text("#!/bin/bash\n")
    script = tmp_path / "a job.sh"
    one = slurm_cluster.run("sbatch", "--parsable", "--hold", script, "7,5").strip()
    task = slurm_cluster.run("sbatch", "--parsable", "--hold", "--array=3", script, "8_3").strip()
    queue = slurm_cluster.run("squeue", "--me", "--array", "--noheader", "--format=%i|%o")
    found = [find_successor(queue, key) for key in ("7", "8_3", "5", "8")]
    assert found == [one, f"{task}_3", None, None]


# -- quoting ---------------------------------------------------------------------------------------------------

VALUE = st.text(
    st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")) | st.just("\t"), min_size=1, max_size=25
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=VALUE)
@example(value="a \"b\" 'c' \\d\\ #e $(f) `g` %j;|&<>*?~!")
@example(value="\\")
@example(value=' #\t" ')
def test_any_value_survives_a_directive(slurm_cluster: SlurmCluster, tmp_path: Path, value: str) -> None:
    script = f"#!/bin/bash\n#SBATCH --hold\n#SBATCH --comment={sbatch_quote(value)} --job-name=after\ntrue\n"
    (tmp_path / "job.sbatch").write_text(script)
    job = slurm_cluster.run("sbatch", "--parsable", tmp_path / "job.sbatch").strip()
    said = slurm_cluster.run("squeue", "--noheader", "--job", job, "--format", "%j|%k")
    assert said == f"after|{value}\n"
    slurm_cluster.run("scancel", job)


def test_a_log_is_where_it_is_said_to_be(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    folder = tmp_path / "100%j 'of' \"it\" #1"
    folder.mkdir()
    jobs = [
        BatchJob(("echo", "$HOME `id`\n#SBATCH -H"), 'a %x "b" #c', log_dir=str(folder)),
        BatchJob(("echo", "$HOME `id`\n#SBATCH -H"), "x/y%A", log_dir=str(folder)),
    ]
    for number, job in enumerate(jobs):
        (tmp_path / f"{number}.sbatch").write_text(batch_script(job))
        job_id = slurm_cluster.run("sbatch", "--parsable", tmp_path / f"{number}.sbatch").strip()
        slurm_cluster.wait_for_state(job_id, "COMPLETED", "FAILED")
        assert Path(log_path(job, job_id)).read_text() == "$HOME `id`\n#SBATCH -H\n"


# -- what a command is told at its start -----------------------------------------------------------------------


def test_a_shell_in_the_way_and_too_few_cores_are_told(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    project = Project(tmp_path, slurm_cluster)
    lines = [
        "ckptrun fit --dry-run --ckpt last",
        "srun --ntasks=1 --nodes=1 bash -c 'ckptrun fit --dry-run --ckpt last; true'",
        "srun --ntasks=1 --nodes=1 taskset --cpu-list 0 ckptrun fit --dry-run --ckpt last data.init_args.num_workers=3",
        "exec ckptrun fit --dry-run --ckpt last",
    ]
    job = project.submit("\n".join(f"echo == >&2\n{line}" for line in lines), "--nodes=2")
    slurm_cluster.wait_for_state(job, "COMPLETED", "FAILED")
    output = project.output(job)
    warnings = [
        [line for line in part.splitlines() if "warning: " in line and "fresh" not in line]
        for part in output.split("==\n")[1:]
    ]
    assert [len(each) for each in warnings] == [2, 1, 1, 1], output
    assert "the script's shell (bash)" in warnings[0][0]
    assert "'srun ckptrun …'" in warnings[0][0]
    assert "the job has 2 tasks, none of which runs" in warnings[0][1]
    assert warnings[3] == warnings[0][1:]
    assert "a shell (bash) that srun started" in warnings[1][0]
    assert "1 rank with 3 loader workers each on 1 core" in warnings[2][0]
