"""What ends a job, and how it comes again: through the command line, in jobs of a real SLURM."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from live_cli import Finished
from rank_work import checkpoints
from slurm_cluster import CPUS, NODES, SlurmCluster
from slurm_project import FOREVER, Project

from ckptrun.run.attempts import read_attempts

pytestmark = pytest.mark.slurm


@pytest.fixture
def project(slurm_cluster: SlurmCluster, in_tmp_path: Path) -> Project:
    return Project(in_tmp_path, slurm_cluster)


def happens(event: str) -> str:
    """The override that lets an event happen."""
    return f"callbacks.3={{class_path: rank_work.HappensHere, init_args: {event}}}"


def ends(project: Project, run: str = "demo") -> list[tuple[str, int, str | None]]:
    """How the attempts of a run ended: stop reason, exit code, and what SLURM said that SIGTERM was for."""
    return [
        (each["stop_reason"], each["exit_code"], each.get("slurm")) for each in project.ledger(run, "end")
    ]


def exit_codes(project: Project, run: str = "demo") -> list[int | None]:
    """What the run's ledger says that each attempt's command exited with."""
    return [each.exit_code for each in read_attempts(project.run(run).attempts)]


def requeues(project: Project, run: str = "demo") -> list[tuple[str, str]]:
    return [(each["by"], each["why"]) for each in project.ledger(run, "requeue")]


def test_signalled_it_comes_again_and_cancelled_it_does_not(
    slurm_cluster: SlurmCluster, project: Project, run_cli: Callable[..., Finished]
) -> None:
    job = project.submit(f"srun ckptrun fit --ckpt last {FOREVER}; echo not reached", "--requeue")
    project.wait_for_step(job, 5)
    assert "runs on n1" in run_cli("status", "demo", env=slurm_cluster.env).stdout
    slurm_cluster.run("scancel", "--signal=USR1", job)
    slurm_cluster.wait_for_state(job, "PENDING")
    pending = run_cli("status", "demo", "--json", env=slurm_cluster.env).document
    assert (pending["status"], pending["stop_reason"]) == ("INTERRUPTED", "walltime")
    assert (pending["job"]["id"], pending["job"]["restarts"]) == (job, 1)
    assert pending["exit_code"] == exit_codes(project)[0] == 143, "75 would say: not requeued"
    slurm_cluster.wait_for_restart(job, 1)
    project.wait_for_attempt(job, 2)
    assert requeues(project) == [("scontrol", "SIGUSR1")]
    newest = checkpoints(project.run())[0]
    assert (newest.reason, newest.job, newest.exact) == ("hpc", job, True)
    started = project.ledger(event="start")[1]
    assert (started["start_step"], started["resolved"]) == (newest.step, newest.path)
    slurm_cluster.run("scancel", job)
    slurm_cluster.wait_for_state(job, "CANCELLED")
    assert ends(project) == [("walltime", 75, None), ("sigterm", 143, "cancelled")]
    assert len(requeues(project)) == 1
    assert checkpoints(project.run())[0].reason == "hpc"
    output = project.output(job)
    assert f"job {job} is requeued (SIGUSR1); SLURM ends it now" in output
    assert "run 'demo' stopped, as its job was cancelled, at step" in output
    assert "Traceback" not in output
    assert "not reached" not in output
    assert "task 0: Killed" not in output  # it went by itself, when it was told to


def test_cancelled_while_it_saves_it_does_not_come_again(
    slurm_cluster: SlurmCluster, project: Project
) -> None:
    # The other one's controller tells nothing of the job, but would requeue it.
    programs = project.folder / "bin"
    programs.mkdir()
    scontrol, silent = shutil.which("scontrol", path=slurm_cluster.env["PATH"]), project.folder / "silent"
    (programs / "scontrol").write_text(
        f'#!/bin/sh\ncase "$*" in *"show job"*) [ ! -e "{silent}" ] || exit 1;; esac\nexec {scontrol} "$@"\n'
    )
    (programs / "scontrol").chmod(0o755)
    slow = FOREVER.replace("seconds: 0.05", "seconds: 1.5")
    saves = project.submit(f"srun ckptrun fit --ckpt last --run saves {slow}", "--requeue")
    busy = project.submit(
        f'PATH="{programs}:$PATH"\nsrun ckptrun fit --ckpt last --run busy {FOREVER}', "--requeue"
    )
    project.wait_for_step(saves, 1, "saves")
    project.wait_for_step(busy, 3, "busy")
    slurm_cluster.run("scancel", "--signal=USR1", saves)
    silent.touch()
    slurm_cluster.run("scancel", busy, saves)
    for job, run in ((saves, "saves"), (busy, "busy")):
        state = slurm_cluster.wait_for_state(job, "CANCELLED", "PENDING", "COMPLETED", "FAILED")
        assert (state["JobState"], state["Restarts"]) == ("CANCELLED", "0"), project.output(job)
        assert [each for each in requeues(project, run) if each[0] == "scontrol"] == []
    assert f"job {saves} was cancelled, and is not requeued" in project.output(saves)
    assert (ends(project, "saves"), exit_codes(project, "saves")) == ([("walltime", 75, None)], [143])
    assert (ends(project, "busy"), exit_codes(project, "busy")) == ([("walltime", 75, "unknown")], [75])
    assert checkpoints(project.run("saves"))[0].reason == "hpc"


def test_what_is_no_reason_to_come_again(slurm_cluster: SlurmCluster, project: Project) -> None:
    raises = happens("{hook: on_train_batch_end, nth: 5, what: raise}")
    jobs = {
        "signal": project.submit(f"srun ckptrun fit --run signal {FOREVER}", "--requeue"),
        "crash": project.submit(f"srun ckptrun fit --run crash {FOREVER} '{raises}'", "--requeue"),
    }
    project.wait_for_step(jobs["signal"], 5, "signal")
    slurm_cluster.run("scancel", "--signal=TERM", jobs["signal"])
    for job in jobs.values():
        slurm_cluster.wait_for_state(job, "FAILED")
    assert ends(project, "signal") == [("sigterm", 143, "signal")]
    assert ends(project, "crash") == [("exception", 1, None)]
    assert requeues(project, "signal") == requeues(project, "crash") == []


def test_one_that_hangs_is_ended_before_the_limit_and_comes_again(
    slurm_cluster: SlurmCluster, project: Project
) -> None:
    hangs = happens(f"{{hook: on_train_batch_end, nth: 20, what: hang, once: {project.folder}/once}}")
    job = project.submit(f"srun ckptrun fit --ckpt last {FOREVER} '{hangs}'", "--requeue", "--time=1")
    project.wait_for_step(job, 19)
    slurm_cluster.end_in(job, 15)
    slurm_cluster.wait_for_restart(job, 1)
    project.wait_for_attempt(job, 2)
    assert ends(project) == [("walltime", 75, None)]
    assert requeues(project) == [("scontrol", "walltime")]
    assert exit_codes(project)[0] == 143
    assert "the work did not end within the grace period" in project.output(job)
    assert project.ledger(event="start")[1]["start_step"] > 0


def test_a_node_that_is_lost_brings_the_job_back(slurm_cluster: SlurmCluster, project: Project) -> None:
    job = project.submit(f"srun ckptrun fit --ckpt last {FOREVER}", "--nodes=2", "--requeue")
    project.wait_for_step(job, 20)
    slurm_cluster.kill_node("n2")
    slurm_cluster.wait_for_state(job, "COMPLETING", "PENDING")
    slurm_cluster.declare_down("n2")
    # A node that comes back while its job is still being ended there is told to end the next start of it.
    slurm_cluster.wait_for_state(job, "PENDING")
    slurm_cluster.start_node("n2")
    slurm_cluster.wait_for_restart(job, 1)
    project.wait_for_attempt(job, 2)
    assert (ends(project), exit_codes(project)[0]) == ([("rank-lost", 70, None)], 143)
    assert requeues(project) == [("scontrol", "node-lost")]
    assert project.ledger(event="start")[1]["start_step"] > 0


def test_where_nobody_requeues_the_exit_code_says_what_to_do(
    slurm_cluster: SlurmCluster, project: Project
) -> None:
    usr1 = happens("{hook: on_train_batch_end, nth: 5, what: sigusr1}")
    fit = f"srun ckptrun fit --ckpt last {FOREVER} '{usr1}'"
    lines = [
        f"{fit} --run asked slurm.requeue=exit-code",
        f"{fit} --run none slurm.requeue=none slurm.hpc_save=false",
        f"{fit} --run refused",
        f"{fit} --run often slurm.max_requeues=0",
        f"{fit} --run idle --time-limit 0.1",
    ]
    job = project.submit("\n".join(f"{line}; echo exit code $?" for line in lines), "--no-requeue")
    slurm_cluster.wait_for_state(job, "COMPLETED", timeout_s=90)
    output = project.output(job)
    codes = [line.rpartition(" ")[2] for line in output.splitlines() if line.startswith("exit code")]
    assert codes == ["75", "75", "75", "1", "1"], output
    assert [requeues(project, run) for run in ("asked", "none", "refused", "often", "idle")] == [
        [("exit-code", "SIGUSR1")],
        [("none", "SIGUSR1")],
        [("exit-code", "SIGUSR1")],
        [],
        [],
    ]
    said = [exit_codes(project, run) for run in ("asked", "none", "refused", "often", "idle")]
    assert said == [[75], [75], [75], [1], [1]]
    assert [project.status(run)["exit_code"] for run in ("asked", "often", "idle")] == [75, 1, 1]
    assert project.ledger("refused", "requeue")[0]["problem"]
    assert checkpoints(project.run("none"))[0].reason == "stop"
    assert checkpoints(project.run("asked"))[0].reason == "hpc"
    assert f"job {job} is not requeued: it was requeued 0 times, and slurm.max_requeues is 0" in output
    assert f"job {job} is not requeued: nothing was done and saved in this start" in output


def test_preempted_in_each_way_that_there_is(slurm_cluster: SlurmCluster, project: Project) -> None:
    partitions = ("low", "low_grace", "low_cancel", "low_cancel_grace")
    jobs = {
        name: project.submit(
            f"srun ckptrun fit --ckpt last --run {name} {FOREVER}", f"--partition={name}", "--requeue"
        )
        for name in partitions
    }
    for name, job in jobs.items():
        project.wait_for_step(job, 3, name)
    everything = (f"--nodes={len(NODES)}", "--ntasks-per-node=1", f"--cpus-per-task={CPUS}")
    high = project.submit("true", "--partition=high", *everything)
    slurm_cluster.wait_for_state(high, "COMPLETED")
    for name, job in jobs.items():
        slurm_cluster.wait_for_restart(job, 1)
        project.wait_for_attempt(job, 2, name)
    slurm_cluster.cancel_all()
    for name in partitions:
        reason, code, said = ends(project, name)[0]
        assert (reason, code) == ("walltime", 75), project.output(jobs[name])
        assert said == ("requeued" if name == "low" else "preempted")
        # Without grace time SLURM does it by itself, and does not say what for.
        assert requeues(project, name) == [
            ("slurm", "requeued") if name == "low" else ("scontrol", "preempted")
        ]
        first, second = project.ledger(name, "start")[:2]
        assert second["start_step"] == project.ledger(name, "end")[0]["step"] > first["start_step"]


def test_signalled_before_the_tasks_have_met(slurm_cluster: SlurmCluster, project: Project) -> None:
    # Task 2 never comes, so the others wait for it; srun ends with the highest exit code of the three.
    (project.folder / "task.sh").write_text(
        "#!/bin/bash\n"
        f"[ $SLURM_PROCID = 2 ] || exec ckptrun fit --ckpt last {FOREVER}\n"
        "trap '' USR1\nwhile [ ! -e go ]; do sleep 0.1; done\n"
    )
    job = project.submit("srun bash task.sh; code=$?; echo code $code; exit $code", "--ntasks-per-node=3")
    project.wait_until(job, lambda: project.output(job).count("waiting up to") == 2, "two that wait")
    slurm_cluster.run("scancel", "--signal=USR1", f"{job}.0")
    project.wait_until(job, lambda: project.output(job).count("stopped before all") == 2, "the end of both")
    (project.folder / "go").touch()
    slurm_cluster.wait_for_state(job, "FAILED")
    output = project.output(job)
    assert f"job {job} is not requeued: nothing was done and saved in this start" in output
    assert "code 1\n" in output
    assert not (project.folder / "runs").exists()
