"""A command of ckptrun as a process of its own, for tests: started, watched, signalled, and nothing of it left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_until_true(
    condition: Callable[[], object], timeout_s: float = 60.0, *, what: str | None = None
) -> Any:
    """Wait until ``condition()`` is true and return what it returned."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s:g} s in vain for {what or condition}")
        time.sleep(0.01)
    return value


@dataclass(frozen=True)
class Finished:
    """A command that has ended. ``document`` is the JSON that a command with ``--json`` wrote."""

    args: tuple[str, ...]
    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        return json.loads(self.stdout)

    def __str__(self) -> str:
        return (
            f"ckptrun {' '.join(self.args)}: exit {self.code}"
            f"\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )


class Live:
    """A command that runs, in a session of its own, so that its whole process group can be signalled.

    Its output goes to files; ``stdout`` and ``stderr`` give what has been written so far. ``within`` are words that
    stand in front of the command and become it (``ip netns exec NAME``).
    """

    def __init__(
        self,
        args: tuple[str, ...],
        folder: Path,
        cwd: Path,
        env: dict[str, str],
        within: tuple[str, ...] = (),
    ) -> None:
        self.args = args
        self.cwd = cwd
        self._out, self._err = folder / "stdout", folder / "stderr"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*within, *command_of_cli(args)],
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.pid = self.process.pid

    @property
    def stdout(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    def wait_for(
        self, condition: Callable[[], object], timeout_s: float = 60.0, *, what: str = "a condition"
    ) -> Any:
        """Wait until ``condition()`` is true; fails, with the output, where the command ends first."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.process.poll() is not None
            if value := condition():
                return value
            if ended or time.monotonic() > deadline:
                pytest.fail(f"{'it ended' if ended else f'{timeout_s:g} s went by'} before {what}\n{self}")
            time.sleep(0.01)

    def status(self, run: str, root: str | Path = "runs") -> dict[str, Any]:
        """The run's status.json, empty while there is none."""
        try:
            document: dict[str, Any] = json.loads((self.cwd / root / run / "status.json").read_text())
        except FileNotFoundError:
            return {}
        return document

    def wait_for_step(self, step: int, run: str, root: str | Path = "runs", timeout_s: float = 60.0) -> None:
        """Wait until status.json says that training has reached ``step``."""
        self.wait_for(
            lambda: (self.status(run, root).get("step") or 0) >= step,
            timeout_s,
            what=f"step {step} of run {run}",
        )

    def wait_for_output(self, text: str, timeout_s: float = 60.0) -> None:
        """Wait until ``text`` stands in stdout or stderr."""
        self.wait_for(
            lambda: text in self.stdout or text in self.stderr, timeout_s, what=f"it wrote {text!r}"
        )

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the command, or to its whole process group as a terminal does at Ctrl-C."""
        if group:
            os.killpg(self.pid, number)
        else:
            os.kill(self.pid, number)

    def wait(self, timeout_s: float = 60.0) -> Finished:
        """Wait for the end of the command and return how it ended."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it has not ended after {timeout_s:g} s\n{self}")
        return Finished(self.args, code, self.stdout, self.stderr)

    def survivors(self) -> list[str]:
        """What is alive of the command's session, the command itself included."""
        alive = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if int(fields[3]) == self.pid and fields[0] not in ("Z", "X"):
                    alive.append(f"{entry} {command_of(int(entry))}")
        return alive

    def close(self) -> list[str]:
        """Kill whatever is left; returns what had outlived the command."""
        outlived = []
        if self.process.poll() is not None:
            deadline = time.monotonic() + 2.0
            while (outlived := self.survivors()) and time.monotonic() < deadline:
                time.sleep(0.01)
        for entry in self.survivors():
            try:
                os.kill(int(entry.split()[0]), signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()
        return outlived

    def __str__(self) -> str:
        return f"ckptrun {' '.join(self.args)}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


def command_of_cli(args: tuple[str, ...]) -> list[str]:
    # -P: the working folder is not put on sys.path, as it is not for the installed script `ckptrun`.
    return [sys.executable, "-P", "-m", "ckptrun", *args]


def child_environment(extra: dict[str, str] | None) -> dict[str, str]:
    # Wide enough that no message is wrapped, and without anything that would make output depend on the
    # machine.
    return {**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1", "TERM": "dumb", **(extra or {})}
