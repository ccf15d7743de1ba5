"""Whole scripts, as text; ``tests/slurm/test_scripts.py`` gives such scripts to a real SLURM."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ckptrun.errors import UsageError
from ckptrun.launch.sbatch import (
    BatchJob,
    batch_script,
    lead_s,
    limit_s,
    log_folder,
    log_folders,
    log_path,
    log_pattern,
    with_options,
)
from ckptrun.launch.sbatch_options import parse_sbatch_options

FIT = ("ckptrun", "fit", "-c", "gpt.yaml", "--ckpt", "last")

ON_EXIT_75 = """\
 || code=$?

# 75: saved, and not requeued by ckptrun, which has no scontrol (in a container, say), was refused, or has
# slurm.requeue=exit-code. So it is done from here, and where that is refused too, this script is handed in anew.
if [ "$code" -eq 75 ]; then
    task="${SLURM_ARRAY_TASK_ID-}"
    job="${task:+${SLURM_ARRAY_JOB_ID}_$task}"
    job="${job:-$SLURM_JOB_ID}"
    # It may have been requeued though the answer to that was lost: then it has more restarts than this start had.
    requeued() {
        case "$(scontrol --oneliner show job "$job")" in
            *" Restarts=${SLURM_RESTART_COUNT:-0} "*) return 1 ;;
            *" Restarts="*) return 0 ;;
        esac
        return 1
    }
    if ! scontrol requeue "$job" && ! requeued; then
        # The new job was never restarted, whatever this one was.
        env -u SLURM_RESTART_COUNT sbatch --chdir="$started_in" ${task:+"--array=$task"} "$0" \\
            "$job${CKPTRUN_PREVIOUS_JOBS:+,$CKPTRUN_PREVIOUS_JOBS}" ||
            echo "job $job could not be put back into the queue; hand it in again to go on" >&2
    fi
fi
exit "$code"
"""

TWO_NODES = BatchJob(
    command=(*FIT, "--nproc", "8"),
    job_name="gpt",
    nodes="2",
    gpus_per_node="8",
    cpus_per_task="24",
    time_limit="4:00:00",
    written_by=("ckptrun", "slurm", "script", "-c", "gpt.yaml", "--nodes", "2"),
)
TWO_NODES_SCRIPT = f"""\
#!/bin/bash
# Written by: ckptrun slurm script -c gpt.yaml --nodes 2
# The same script for the first start and for every one after it: each goes on where the last one stopped.
# SLURM does not make the folder of the log, and a job without it dies without a word. Before sbatch:
#     mkdir -p slurm-logs
#
#SBATCH --job-name=gpt
#SBATCH --output=slurm-logs/%x-%j.out
# Every start goes on in the same log.
#SBATCH --open-mode=append
#SBATCH --nodes=2
# One ckptrun a node, which starts the ranks there.
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
# Cores for the ranks of a task and their loader workers.
#SBATCH --cpus-per-task=24
#SBATCH --time=4:00:00
# Back into the queue after a preemption and after the loss of a node.
#SBATCH --requeue
# 120 s before the time limit ckptrun gets SIGUSR1, saves, and has the job requeued.
# No 'B:' in front of it: that would reach this shell alone, which would die of it.
#SBATCH --signal=USR1@120

# The jobs whose work this one goes on with, where the end of this script handed it in.
export CKPTRUN_PREVIOUS_JOBS="${{1-}}"
# The folder of this job, and of one that the end of this script hands in.
started_in="$PWD"
# Since SLURM 22.05 srun does not take over --cpus-per-task, and would give each task a single core.
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"

code=0
srun --export=ALL ckptrun fit -c gpt.yaml --ckpt last --nproc 8{ON_EXIT_75}"""

# A task for each rank, an array in a container, and values that every reader takes for something else.
AWKWARD = BatchJob(
    command=("ckptrun", "fit", "-c", "it's.yaml", "--run", "a-%a", "x=%a$%%a\n#SBATCH -H"),
    job_name='a/b "c" #1 50%',
    nodes="1-2",
    ntasks_per_node="4",
    array="0-3%2",
    log_dir="/scratch/my logs/100%",
    signal="USR2",
    lead_s=300,
    container=("apptainer", "exec", "--nv", "my i.sif"),
    set_up=("module load 'cuda'", 'export A="$PWD"'),
    options=parse_sbatch_options(["--comment=a \"b\" 'c' \\d #e", "-H", "--exclusive", "-A", "me"]),
)
AWKWARD_SCRIPT = rf"""#!/bin/bash
# The same script for the first start and for every one after it: each goes on where the last one stopped.
# SLURM does not make the folder of the log, and a job without it dies without a word. Before sbatch:
#     mkdir -p '/scratch/my logs/100%'
#
#SBATCH --job-name="a/b \"c\" #1 50%"
#SBATCH --output="/scratch/my logs/100%%/a_b \"c\" #1 50%%-%A_%a.out"
# Every start goes on in the same log.
#SBATCH --open-mode=append
#SBATCH --array=0-3%2
#SBATCH --nodes=1-2
# A task for each rank.
#SBATCH --ntasks-per-node=4
# Back into the queue after a preemption and after the loss of a node.
#SBATCH --requeue
# 300 s before the time limit ckptrun gets SIGUSR2, saves, and has the job requeued.
# No 'B:' in front of it: that would reach this shell alone, which would die of it.
#SBATCH --signal=USR2@300
#SBATCH --comment="a \"b\" 'c' \\d #e"
#SBATCH -H
#SBATCH --exclusive
#SBATCH --account=me

# The jobs whose work this one goes on with, where the end of this script handed it in.
export CKPTRUN_PREVIOUS_JOBS="${{1-}}"
# The folder of this job, and of one that the end of this script hands in.
started_in="$PWD"

module load 'cuda'
export A="$PWD"

code=0
srun --export=ALL apptainer exec --nv 'my i.sif' ckptrun fit -c 'it'"'"'s.yaml' --run a-"$SLURM_ARRAY_TASK_ID" x="$SLURM_ARRAY_TASK_ID"$'$%a\n#SBATCH -H'{ON_EXIT_75}"""  # noqa: E501

# The user's own options in place of everything that the script would say itself, and no requeueing.
OWN = with_options(
    BatchJob(command=FIT, job_name="gpt", requeues=False),
    parse_sbatch_options(
        [
            "-J",
            "mine",
            "-o",
            "/logs/%j.txt",
            "--open-mode=truncate",
            "--no-requeue",
            "--signal=USR1@30",
            "-t",
            "5",
        ]
    ),
)
OWN_SCRIPT = """\
#!/bin/bash
# The same script for the first start and for every one after it: each goes on where the last one stopped.
# SLURM does not make the folder of the log, and a job without it dies without a word. Before sbatch:
#     mkdir -p /logs
#
#SBATCH --job-name=mine
#SBATCH --nodes=1
# One ckptrun a node, which starts the ranks there.
#SBATCH --ntasks-per-node=1
#SBATCH --time=5
#SBATCH --output=/logs/%j.txt
#SBATCH --open-mode=truncate
#SBATCH --no-requeue
#SBATCH --signal=USR1@30

srun --export=ALL ckptrun fit -c gpt.yaml --ckpt last
"""

SCRIPTS = {
    "two nodes": (TWO_NODES, TWO_NODES_SCRIPT),
    "awkward": (AWKWARD, AWKWARD_SCRIPT),
    "own": (OWN, OWN_SCRIPT),
}


@pytest.mark.parametrize(("job", "script"), SCRIPTS.values(), ids=SCRIPTS)
def test_whole_scripts(job: BatchJob, script: str) -> None:
    assert batch_script(job) == script


@pytest.mark.parametrize("script", [script for _, script in SCRIPTS.values()], ids=SCRIPTS)
def test_bash_can_read_them(script: str) -> None:
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_gets_its_words_from_bash(tmp_path: Path) -> None:
    """The script is run by bash, with a `srun` that writes down what it is given."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\0" "$@" > given\n')
    srun.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": "3"}
    script = batch_script(AWKWARD).replace("module load", "true")
    subprocess.run(["bash"], input=script, text=True, cwd=tmp_path, env=env, check=True)
    words = (tmp_path / "given").read_text().split("\0")[:-1]
    assert words == [
        "--export=ALL", "apptainer", "exec", "--nv", "my i.sif",
        "ckptrun", "fit", "-c", "it's.yaml", "--run", "a-3", "x=3$%a\n#SBATCH -H",
    ]  # fmt: skip


REQUEUE, SHOW, ANEW = "scontrol requeue 7", "scontrol --oneliner show job 7", "sbatch --chdir=HERE job.sh 7,5"


def says(words: str) -> str:
    """A scontrol that refuses to requeue, and says this of the job."""
    return f'[ "$1" != requeue ] && echo "{words}"'


@pytest.mark.parametrize(
    ("scontrol", "does"),
    [
        pytest.param("exit 0", [REQUEUE], id="requeued"),
        # A second job would be one too many. While this script lives such a job is COMPLETING.
        pytest.param(says("JobId=7 JobState=COMPLETING Restarts=3 Reboot=0"), [REQUEUE, SHOW],
                     id="requeued, and the answer was lost"),
        pytest.param(says("JobId=7 JobState=PENDING Reason=BeginTime Restarts=3 Reboot=0"), [REQUEUE, SHOW],
                     id="SLURM itself has put it back"),
        pytest.param(says("JobId=7 JobState=RUNNING Restarts=2 Reboot=0"), [REQUEUE, SHOW, ANEW],
                     id="refused"),
        pytest.param("exit 127", [REQUEUE, SHOW, ANEW], id="no scontrol"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("set_up", [(), ("set -euo pipefail", "cd /")], ids=["plain", "a strict set-up"])
def test_what_becomes_of_exit_75(
    set_up: tuple[str, ...], scontrol: str, does: list[str], tmp_path: Path
) -> None:
    """Beside the tests with a real SLURM: what is called where it says what it seldom says."""
    called = tmp_path / "called"
    programs = {
        "srun": "exit 75",
        "scontrol": f'echo "scontrol $*" >> {called}\n{scontrol}',
        "sbatch": f'echo "sbatch $1 ${{2##*/}} $3${{SLURM_RESTART_COUNT-}}" >> {called}',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(batch_script(replace(TWO_NODES, set_up=set_up)))
    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": "/there",
        "SLURM_RESTART_COUNT": "2",
        "SLURM_CPUS_PER_TASK": "24",
    }
    done = subprocess.run(["bash", str(tmp_path / "job.sh"), "5"], cwd=tmp_path, env=env, check=False)
    assert done.returncode == 75
    assert called.read_text().replace(str(tmp_path), "HERE").splitlines() == does


def test_a_set_up_that_is_strict_leaves_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("#!/bin/bash\nexit 3\n")
    (tmp_path / "srun").chmod(0o755)
    script = batch_script(BatchJob(FIT, "gpt", set_up=("set -euo pipefail",)))
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert subprocess.run(["bash"], input=script, text=True, env=env, check=False).returncode == 3


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (["--chdir=/tmp"], "/tmp/slurm-logs"),
        (["-D", "a b"], "'a b/slurm-logs'"),
        (["--chdir=/tmp", "-o", "/logs/%j"], "/logs"),
    ],
)
def test_the_head_names_the_folder_for_the_log_from_where_sbatch_is_called(
    words: list[str], folder: str
) -> None:
    script = batch_script(BatchJob(FIT, "gpt", options=parse_sbatch_options(words)))
    assert f"\n#     mkdir -p {folder}\n" in script


def test_without_a_signal_in_the_config_none_is_asked_for() -> None:
    job = BatchJob(FIT, "gpt", signal=None)
    assert "--signal" not in batch_script(job)
    assert "SIG" not in batch_script(job)
    assert "(slurm.signals is empty)" in batch_script(job)
    own = batch_script(replace(job, options=parse_sbatch_options(["--signal=USR2@9"])))
    assert "#SBATCH --signal=USR2@9\n" in own
    assert "is empty" not in own


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:10", 1810),
        ("4:00:00", 14400),
        ("0:0:5", 5),
        ("1-0", 86400),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-12:30:05", 131405),
        ("UNLIMITED", None),
        ("infinite", None),
        ("0", None),
        ("0:00:00", None),
        ("0-0", None),
    ],
)
def test_time_limits(text: str, seconds: int | None) -> None:
    assert limit_s(text) == seconds


@pytest.mark.parametrize("text", ["", "4h", "1:2:3:4", "-5", "1.5", "1-", "٣"])
def test_no_time_limits(text: str) -> None:
    with pytest.raises(UsageError, match="expected minutes, minutes:seconds"):
        limit_s(text)


@pytest.mark.parametrize(
    ("time_limit", "asked", "lead"),
    [
        (None, None, 120),
        (None, 600, 600),
        ("UNLIMITED", None, 120),
        ("0", None, 120),
        ("0", 60, 60),
        ("4:00:00", None, 120),
        ("8", None, 120),
        ("4", None, 60),
        ("1", None, 15),
        ("1", 59, 59),
    ],
)
def test_the_lead_of_the_signal(time_limit: str | None, asked: int | None, lead: int) -> None:
    assert lead_s(BatchJob(command=FIT, job_name="gpt", time_limit=time_limit, lead_s=asked)) == lead


def test_a_lead_as_long_as_the_job_is_refused() -> None:
    with pytest.raises(UsageError, match="60 s before the end of a job of 60 s"):
        batch_script(BatchJob(command=FIT, job_name="gpt", time_limit="1", lead_s=60))


@pytest.mark.parametrize(
    ("job", "pattern", "path", "folder"),
    [
        (BatchJob(FIT, "gpt"), "slurm-logs/%x-%j.out", "slurm-logs/gpt-7.out", "slurm-logs"),
        (
            BatchJob(FIT, "gpt", array="0-3"),
            "slurm-logs/%x-%A_%a.out",
            "slurm-logs/gpt-7_*.out",
            "slurm-logs",
        ),
        (BatchJob(FIT, "50%j", log_dir="a%j"), "a%%j/%x-%j.out", "a%j/50%j-7.out", "a%j"),
        (BatchJob(FIT, "a/b%j", log_dir="."), "a_b%%j-%j.out", "a_b%j-7.out", ""),
        (BatchJob(FIT, "gpt", options=parse_sbatch_options(["-o", "x.out"])), "x.out", "x.out", ""),
        (
            BatchJob(FIT, "gpt", options=parse_sbatch_options(["-o", "%u/%4j.out"])),
            "%u/%4j.out",
            "*/*.out",
            None,
        ),
        (
            BatchJob(FIT, "gpt", array="1", options=parse_sbatch_options(["-o", "%j.out"])),
            "%j.out",
            "*.out",
            "",
        ),
        (BatchJob(FIT, "gpt", options=parse_sbatch_options(["-o", "a\\/%j"])), "a\\/%j", "a\\/%j", "a\\"),
    ],
    ids=lambda value: value.job_name if isinstance(value, BatchJob) else str(value),
)
def test_where_the_log_is(job: BatchJob, pattern: str, path: str, folder: str | None) -> None:
    assert (log_pattern(job), log_path(job, "7"), log_folder(job)) == (pattern, path, folder)


@pytest.mark.parametrize(
    ("options", "folders"),
    [
        (["-e", "err/%j"], ("slurm-logs", "err")),
        (["-e", "slurm-logs/%j.err"], ("slurm-logs",)),
        (["-o", "a/%j", "--error=%j/x"], ("a",)),
        (["-o", "x.out", "-e", "100%%/e"], ("100%",)),
        (["-o", "x.out", "-e", "x.err"], ()),
    ],
)
def test_the_folders_that_have_to_be_there(options: list[str], folders: tuple[str, ...]) -> None:
    assert log_folders(BatchJob(FIT, "gpt", options=parse_sbatch_options(options))) == folders


def test_a_backslash_in_the_logs_folder_is_refused() -> None:
    with pytest.raises(UsageError, match="has a backslash"):
        batch_script(BatchJob(command=FIT, job_name="gpt", log_dir="a\\b"))
