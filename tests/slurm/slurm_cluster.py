"""A real SLURM on this machine, for tests: one controller and two nodes, as processes of this one.

Everything is in one folder under /tmp (the names of sockets may not be long) and on ports that were free. What the
daemons start, jobs included, carries a mark in its environment, by which what is left is found and killed at the end;
a warden does that where the tests themselves were killed.

Partitions (all with nodes n1 and n2):

    main             the default; nobody preempts it
    low              preempted by ``high``: requeued, at once (GraceTime 0)
    low_grace        … requeued, after 60 s of grace
    low_cancel       … cancelled, at once
    low_cancel_grace … cancelled, after 60 s of grace
    high             preempts all partitions whose names begin with ``low``
"""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from live_cli import command_of, wait_until_true

NODES = ("n1", "n2")
CPUS = 8  # of each node, whatever this machine has
KILL_WAIT_S = 10
LIMITS_LOOKED_AT_EVERY_S = 30  # the controller's own; nothing can change it
_MARK = "CKPTRUN_TEST_CLUSTER"
_NODE_MARK = "CKPTRUN_TEST_NODE"  # of a node's daemons; what they run has SLURMD_NODENAME
_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "squeue", "scancel")
# Jobs find the tests' own python and ckptrun, and this process the daemons.
_PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

_CONF = """
ClusterName=ckptrun
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
# How long a requeued job waits before it starts again is the lifetime of its credential.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
JobRequeue=1
KillWait={kill_wait}
BatchStartTimeout=20
MessageTimeout=30
SlurmdTimeout=20
SlurmctldTimeout=60
InactiveLimit=0
MinJobAge=3600
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmctldDebug=info
SlurmdDebug=info
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_n1} CPUs={cpus} State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port_n2} CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=OFF
PartitionName=low Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=low_grace Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=low_cancel Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=CANCEL GraceTime=0
PartitionName=low_cancel_grace Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=CANCEL GraceTime=60
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""

_WARDEN = """
import os, shutil, signal, sys, time
sys.stdin.buffer.read()  # ends when the tests do
mark = sys.argv[1].encode()
for _ in range(50):
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    if mark in file.read().split(b"\\0"):
                        found.append(int(entry))
            except OSError:
                pass
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    if not found:
        break
    time.sleep(0.1)
shutil.rmtree(sys.argv[2], ignore_errors=True)
"""


def missing_programs() -> list[str]:
    """The programs of SLURM and munge that this machine lacks."""
    return [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]


class SlurmCluster:
    """The cluster, and its command line. ``env`` is the environment in which SLURM's commands reach it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ckptrun-slurm-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.mark = f"{_MARK}={self.folder.name}"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._live_nodes: set[str] = set()
        self._warden: subprocess.Popen[bytes] | None = None
        self._conf = self.folder / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        return {**kept, "PATH": _PATH, "SLURM_CONF": str(self._conf), _MARK: self.folder.name}

    # -- the daemons ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything, and wait until both nodes are idle."""
        user = pwd.getpwuid(os.geteuid()).pw_name
        ctld_port, port_n1, port_n2 = _free_ports(3)
        self._conf.write_text(
            _CONF.format(
                host=socket.gethostname(),
                user=user,
                folder=self.folder,
                ctld_port=ctld_port,
                port_n1=port_n1,
                port_n2=port_n2,
                cpus=CPUS,
                kill_wait=KILL_WAIT_S,
            ).lstrip()
        )
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        self._warden = subprocess.Popen(
            [sys.executable, "-S", "-c", _WARDEN, self.mark, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._start_munge()
        self._start_daemon("slurmctld", ["slurmctld", "-D", "-i"])
        wait_until_true(
            lambda: self._quietly("scontrol", "ping").returncode == 0, what="the controller's answer"
        )
        for node in NODES:
            self.start_node(node)

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        folder.mkdir(mode=0o700)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        user = None
        if os.geteuid() == 0:
            user = "munge"
            account = pwd.getpwnam(user)
            for path in (folder, key):
                os.chown(path, account.pw_uid, account.pw_gid)
            os.chown(self.folder, account.pw_uid, account.pw_gid)
        self._start_daemon(
            "munged",
            [
                "munged",
                "--foreground",
                f"--key-file={key}",
                f"--socket={self.folder}/munge.socket",
                f"--pid-file={folder}/munged.pid",
                f"--seed-file={folder}/munged.seed",
                f"--log-file={folder}/munged.log",
            ],
            user=user,
        )
        wait_until_true((self.folder / "munge.socket").exists, what="munged's socket")
        if user is not None:
            os.chown(self.folder, 0, 0)  # SLURM's own folders want a safe way to them

    def start_node(self, node: str) -> None:
        """Start a node's slurmd, and wait until jobs can run there."""
        with (self.folder / f"slurmd-{node}.log").open("ab") as log:
            # Not a child of this process: a test that lets a node come back would seem to leave one behind.
            subprocess.run(
                ["setsid", "--fork", "slurmd", "-D", "-N", node],
                cwd=self.folder,
                env={**self.env, _NODE_MARK: node},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=True,
            )
        self._live_nodes.add(node)
        wait_until_true(
            lambda: self.node_state(node).partition("+")[0] in ("IDLE", "MIXED", "ALLOCATED"),
            what=f"node {node}, whose state is {self.node_state(node)}\n{self.log(f'slurmd-{node}')}",
        )

    def dead_nodes(self) -> list[str]:
        """The nodes whose slurmd does not run."""
        return [node for node in NODES if node not in self._live_nodes]

    def kill_node(self, node: str) -> None:
        """Let a node die: its slurmd and everything of its jobs, all at once and without a word to anybody."""
        self._live_nodes.discard(node)
        # First those that would tell the controller what became of the others.
        of_daemons = self._marked(f"{_NODE_MARK}={node}")
        for pid in of_daemons:
            os.kill(pid, signal.SIGSTOP)
        for pid in {*of_daemons, *self._marked(f"SLURMD_NODENAME={node}")}:
            _kill(pid)
        wait_until_true(lambda: not self._marked(f"{_NODE_MARK}={node}"), what=f"the end of {node}")

    def declare_down(self, node: str) -> None:
        """Tell the controller what it would find out by itself within a minute: that a node is dead."""
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=killed by a test")

    def _start_daemon(
        self,
        name: str,
        command: Sequence[str],
        *,
        user: str | None = None,
    ) -> None:
        # SLURM_CONF in the environment is all they need to find each other.
        pid = os.getpid()

        def die_with_tests() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != pid:
                os._exit(1)

        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                list(command),
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
                preexec_fn=die_with_tests,
            )

    def log(self, name: str) -> str:
        """What a daemon has written: ``slurmctld``, ``slurmd-n1``, ``slurmd-n2``, ``munged``."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def stop(self) -> list[str]:
        """End everything; returns what had to be killed though no job was there any more."""
        self.cancel_all()
        for node in tuple(self._live_nodes):
            for pid in self._marked(f"{_NODE_MARK}={node}"):
                os.kill(pid, signal.SIGTERM)
        wait_until_true(
            lambda: not any(self._marked(f"{_NODE_MARK}={node}") for node in NODES), what="the nodes' end"
        )
        for name in ("slurmctld", "munged"):
            daemon = self._daemons.pop(name, None)
            if daemon is None:
                continue
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            if all(command_of(pid).startswith("srun ") for pid in self._marked()):
                break
            time.sleep(0.05)
        # An srun whose script was killed goes on asking a node that is dead.
        found = {pid: command_of(pid) for pid in self._marked()}
        left = [f"{pid} {command}" for pid, command in found.items() if not command.startswith("srun ")]
        for pid in found:
            _kill(pid)
        if self._warden is not None:
            assert self._warden.stdin is not None
            self._warden.stdin.close()
            self._warden.wait(30)
        shutil.rmtree(self.folder, ignore_errors=True)
        return left

    def _marked(self, also: str = "") -> list[int]:
        """The processes of this cluster that have ``also`` in their environment."""
        wanted = {self.mark.encode(), also.encode()} - {b""}
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        return [pid for pid in pids if pid != os.getpid() and wanted <= _environment_of(pid)]

    # -- its command line ----------------------------------------------------------------------------------

    def run(
        self,
        *command: str | Path,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
    ) -> str:
        """Run one of SLURM's commands (or any other, in its environment) and return what it printed.

        Fails the test where it fails, unless ``check`` is false.
        """
        done = subprocess.run(
            list(map(str, command)),
            cwd=cwd,
            env={**self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            pytest.fail(f"{command} failed with {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def _quietly(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )

    def submit(
        self, script: str | Path, *options: str, cwd: Path, env: Mapping[str, str] | None = None
    ) -> str:
        """Hand in a script (its path, or its text) and return the job's id.

        The job's output is in ``slurm-<id>.out`` in ``cwd``, appended to, unless the script says otherwise.
        """
        if isinstance(script, str):
            path = cwd / f"job-{len(list(cwd.glob('job-*.sh')))}.sh"
            path.write_text(script)
            script = path
        printed = self.run("sbatch", "--parsable", "--open-mode=append", *options, script, cwd=cwd, env=env)
        return printed.strip().partition(";")[0]

    def told(self, job_id: str) -> str:
        """The job, its output so far and the controller's last words, for the message of a test that fails."""
        job = self.job(job_id)
        output = Path(job.get("StdOut", "/nonexistent"))
        text = output.read_text(errors="replace") if output.is_file() else "(no output)"
        logs = [f"--- {name}\n{self.log(name)[-2000:]}" for name in ("slurmctld", "slurmd-n1", "slurmd-n2")]
        return "\n".join([str(job), "--- output", text, *logs])

    def job(self, job_id: str) -> dict[str, str]:
        """What ``scontrol show job`` says of it, by key; empty where the controller does not know it."""
        done = self._quietly("scontrol", "--oneliner", "show", "job", job_id)
        if done.returncode != 0 or not done.stdout.strip():
            return {}
        return _words(done.stdout.splitlines()[0])

    def state(self, job_id: str) -> str:
        """The job's state: ``PENDING``, ``RUNNING``, ``COMPLETED`` …; empty where it is not known."""
        return self.job(job_id).get("JobState", "")

    def wait_for_state(self, job_id: str, *states: str, timeout_s: float = 120.0) -> dict[str, str]:
        """Wait until the job is in one of ``states``, and return what the controller says of it."""

        def there() -> dict[str, str] | None:
            job = self.job(job_id)
            return job if job.get("JobState") in states else None

        deadline = time.monotonic() + timeout_s
        while (job := there()) is None:
            if time.monotonic() > deadline:
                pytest.fail(f"job {job_id} is not {' or '.join(states)}\n{self.told(job_id)}")
            time.sleep(0.05)
        return job

    def wait_for_restart(self, job_id: str, restarts: int, timeout_s: float = 180.0) -> dict[str, str]:
        """Wait until the job has started for the ``restarts + 1``-th time, which comes sooner than it would by itself.

        Not at once: in the second in which a node ended the job it would not let it start.
        """
        deadline, hurried = time.monotonic() + timeout_s, False
        while True:
            job = self.job(job_id)
            if int(job.get("Restarts", "0")) >= restarts:
                if job["JobState"] not in ("PENDING", "COMPLETING", "REQUEUED", "CONFIGURING"):
                    return job
                if job["JobState"] == "PENDING" and not hurried:
                    hurried = True
                    self._end_old_srun(job["JobId"])
                    self._quietly("scontrol", "update", f"JobId={job_id}", "StartTime=now+2")
            if time.monotonic() > deadline:
                pytest.fail(f"job {job_id} has not started again\n{self.told(job_id)}")
            time.sleep(0.1)

    def _end_old_srun(self, job_id: str) -> None:
        """End what srun has left of the job's last start: one that waits for a node that is dead would, once it gives
        up, end the step of the same number in the next start. Where processes are tracked by cgroup it is ended."""
        for pid in self._marked(f"SLURM_JOB_ID={job_id}"):
            if command_of(pid).startswith("srun "):
                _kill(pid)

    def end_in(self, job_id: str, seconds: float) -> None:
        """Move the job's time limit to ``seconds`` from now. The controller looks at limits every 30 s only."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))
        self.run("scontrol", "update", f"JobId={job_id}", f"EndTime={at}")

    def node_state(self, node: str) -> str:
        done = self._quietly("scontrol", "--oneliner", "show", "node", node)
        return _words(done.stdout).get("State", "")

    def cancel_all(self) -> None:
        """Cancel all jobs, and wait until nothing of them runs."""
        if "slurmctld" not in self._daemons:
            return
        for node in self.dead_nodes():
            self.declare_down(node)
        self._quietly("scancel", "--signal=KILL", "--state=RUNNING", "--user", _user())
        self._quietly("scancel", "--user", _user())
        deadline = time.monotonic() + 30.0
        while self._quietly("squeue", "--noheader").stdout.strip():
            if time.monotonic() > deadline:
                pytest.fail("jobs are still there: " + self._quietly("squeue").stdout)
            time.sleep(0.05)


def _words(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def _user() -> str:
    return pwd.getpwuid(os.geteuid()).pw_name


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _environment_of(pid: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports
