"""What every test stands on: a clean environment, a check for leaks, and ways to run the command line.

For those who write tests:

``run_cli("status", "demo", cwd=folder)``
    runs ``ckptrun status demo`` as a process of its own and returns its code, stdout and stderr.
``start_cli("fit", "-c", "c.yaml", cwd=folder)``
    starts it and returns a :class:`Live`: ``wait_for(condition)``, ``wait_for_step(n)``, ``signal(SIGINT)``,
    ``wait()``. Whatever is left of it at the end of the test is killed, and fails the test.
``wait_until(condition)``
    waits for a condition of any kind. Tests wait for conditions, never for seconds.

Each test gets an environment without SLURM's, torchrun's and ckptrun's own variables, and fails where it
leaves a changed environment, working folder or signal handler, a thread or a child process behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_cli import Finished, Live, child_environment, command_of, command_of_cli, wait_until_true

# One thread a test: the suite runs beside other work, and the number of threads changes bits. It has to stand
# before anybody imports torch.
os.environ["OMP_NUM_THREADS"] = "1"

# Run in the background of a script, or under nohup, pytest comes with these ignored, and its children would inherit it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

_SCRUBBED_PREFIXES = ("SLURM_", "SRUN_", "CKPTRUN_", "TORCHELASTIC_", "PMI_", "OMPI_")
_SCRUBBED_NAMES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NO_COLOR",
)
# Set by pytest itself, and by libraries when they are first imported.
_NOT_LEAKS = (
    "PYTEST_CURRENT_TEST",
    "KMP_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "TF_",
    "GRPC_",
    "CUDA_MODULE_LOADING",
    "PYTORCH_NVML_",
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture
def wait_until() -> Callable[..., Any]:
    """``wait_until(condition, timeout_s=60, what="...")``; fails the test when it never comes true."""
    return wait_until_true


# --- leaks ----------------------------------------------------------------------------------------


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_NOT_LEAKS)}


def _children() -> set[int]:
    """Ids of this process's children, zombies included. multiprocessing's resource tracker is not counted."""
    found = set()
    for task in os.listdir("/proc/self/task"):
        try:
            found.update(int(pid) for pid in Path(f"/proc/self/task/{task}/children").read_text().split())
        except FileNotFoundError:
            continue  # the thread has ended
    return {pid for pid in found if "resource_tracker" not in command_of(pid)}


def _threads() -> set[threading.Thread]:
    """Threads that would matter: those that keep the process alive, and our own by name."""
    return {t for t in threading.enumerate() if not t.daemon or t.name.startswith("ckptrun")}


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves something behind: environment, working folder, handlers, threads, children."""
    environment, folder = _environment(), os.getcwd()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    threads, children = _threads(), _children()
    yield
    deadline = time.monotonic() + 5.0
    while (_threads() - threads or _children() - children) and time.monotonic() < deadline:
        time.sleep(0.01)
    leaks = []
    after = _environment()
    for name in sorted({*environment, *after}):
        if environment.get(name) != after.get(name):
            leaks.append(f"environment variable {name}: {environment.get(name)!r} became {after.get(name)!r}")
            if name in environment:
                os.environ[name] = environment[name]
            else:
                del os.environ[name]
    if os.getcwd() != folder:
        leaks.append(f"working folder: {folder} became {os.getcwd()}")
        os.chdir(folder)
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            leaks.append(f"handler of {number.name}: {handler} became {signal.getsignal(number)}")
            signal.signal(number, handler)
    leaks += [f"thread {thread.name}" for thread in _threads() - threads]
    leaks += [
        f"child process {pid}: {command_of(pid) or 'ended, but not waited for'}"
        for pid in _children() - children
    ]
    if leaks:
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture(autouse=True)
def forget_modules_of_the_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A module that a test wrote and imported is not there for the next one, nor is its folder on ``sys.path``."""
    before = list(sys.path)
    yield
    sys.path[:] = before
    written = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(written):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def clean_environment(no_leaks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of a scheduler, a launcher or ckptrun itself reaches a test that did not set it."""
    for name in list(os.environ):
        if name.startswith(_SCRUBBED_PREFIXES) or name in _SCRUBBED_NAMES:
            monkeypatch.delenv(name)


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own folder, made the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- the command line -----------------------------------------------------------------------------


@pytest.fixture
def run_cli(tmp_path: Path) -> Callable[..., Finished]:
    """``run_cli(*args, cwd=tmp_path, env={}, timeout_s=120)``: run ckptrun to its end, in its own process."""

    def run(
        *args: str | Path,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float = 120.0,
    ) -> Finished:
        words = tuple(map(str, args))
        done = subprocess.run(
            command_of_cli(words),
            cwd=cwd or tmp_path,
            env=child_environment(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Finished(words, done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def start_cli(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Live]]:
    """``start_cli(*args, cwd=tmp_path, env={}, within=())``: start ckptrun and return it as :class:`Live`."""
    started: list[Live] = []

    def start(
        *args: str | Path,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        within: tuple[str, ...] = (),
    ) -> Live:
        folder = tmp_path_factory.mktemp("output")
        live = Live(tuple(map(str, args)), folder, cwd or tmp_path, child_environment(env), within)
        started.append(live)
        return live

    yield start
    outlived = [line for live in started for line in live.close()]
    if outlived:
        pytest.fail(
            "these outlived the command that started them:\n  " + "\n  ".join(outlived), pytrace=False
        )


# --- skips ----------------------------------------------------------------------------------------


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With CI=true a skipped test of a marker is a failure: CI's machine has what they need."""
    if os.environ.get("CI") != "true":
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    markers = {line.partition(":")[0] for line in session.config.getini("markers") if "pytest" not in line}
    ours = markers & {"slurm", "crash", "deepspeed", "s3", "netns"}
    skipped = [
        report.nodeid
        for report in (reporter.stats.get("skipped", []) if reporter is not None else [])
        if ours & set(getattr(report, "keywords", {}))
    ]
    if skipped:
        reporter.write_line("")
        reporter.write_line(
            "skipped, which CI does not allow for these markers: " + ", ".join(skipped), red=True
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
