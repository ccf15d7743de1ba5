"""Plays one cell of the stop matrix through the real command line, and says what came of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from live_cli import Live
from stop_cells import LAST_STEP, Cell, Expected, Launcher, expected

from ckptrun.checkpoint.catalogue import Catalogue
from ckptrun.records import CheckpointRecord
from ckptrun.run.attempts import read_attempts
from ckptrun.run.folder import RunFolder
from ckptrun.run.status import read_status
from ckptrun.stop import SAME_PRESS_S

CONFIG = """\
run: {name: demo}
trainer: {max_epochs: 2, accumulate_grad_batches: 2, val_check_interval: 6, num_threads: 1}
model: {class_path: task.Model}
data: {class_path: task.Data}
callbacks:
  - class_path: ckptrun.callbacks.ModelCheckpoint
    init_args: {every_n_train_steps: 4, save_top_k: -1}
"""
Start = Callable[..., Live]


def make_project(folder: Path) -> Path:
    """The config and the user's module, ready to run in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("stop_task.py"), folder / "task.py")
    (folder / "demo.yaml").write_text(CONFIG)
    return folder


def run_folder(project: Path) -> RunFolder:
    return RunFolder(str(project / "runs" / "demo"))


def fit(start: Start, launcher: Launcher, project: Path, **env: str) -> Live:
    """The line that stands in every script."""
    return _start(start, launcher, "fit", project, env)


def _start(
    start: Start, launcher: Launcher, fn: str, project: Path, env: dict[str, str], *arguments: str
) -> Live:
    line = (fn, "-c", "demo.yaml", "--ckpt", "last", *launcher.arguments, *arguments)
    return start(*line, cwd=project, env=_environment(env))


def _environment(env: dict[str, str]) -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", **env}


@dataclass
class Played:
    """What was found after a cell, and what differs from what is expected."""

    cell: Cell
    found: Expected
    output: str
    trouble: list[str] = field(default_factory=list)


def play(cell: Cell, start: Start, bases: Bases, project: Path, *, resume: bool) -> Played:
    """Play ``cell`` in ``project``, a folder that is made for it.

    Args:
        resume: start the same line again, where the run was stopped, and compare its end with that of a run which
            was never stopped.
    """
    phase, event, launcher, want = cell.phase, cell.event, cell.launcher, expected(cell)
    bases.copy(launcher, phase.starts_from, project)
    gate = project / "gate"
    gate.mkdir()
    env = {"STOP_PHASE": phase.name, "STOP_GATE": str(gate)}
    if event.ends == "error":
        env["STOP_RAISE"] = "all" if event.only_rank is None else str(event.only_rank)
    if event.hooks_save:
        env["STOP_ON_EXCEPTION"] = "1"
    if cell.hears and event.name != "SIGHUP under nohup" and want.asked == 0:
        env["STOP_HEARD"] = "save" if event.keeps == "manual" else "request"
    live = _start_ignoring(
        event.ignored, lambda: _start(start, launcher, phase.fn, project, env, *event.arguments)
    )
    trouble: list[str] = []
    pids = _wait_at_gate(cell, live, gate)
    if phase.has_workers and event.ends != "error":
        workers = len(live.survivors()) - launcher.num_processes
        if workers < 2 * launcher.num_ranks:
            trouble.append(f"{workers} loader workers at the gate, expected 2 a rank or more")
    if phase.before is not None and event.ends != "error":
        # Saves are written in the background. An error does not wait at the gate, and lets them land.
        live.wait_for(lambda: _newest(project) == phase.before, what=f"{phase.before} is committed")
    if (event.ends == "killed" or event.sticks) and phase.at:
        live.wait_for_step(phase.at, "demo")  # its last word is up to a second old
    stuck = _make_stick(run_folder(project).attempts) if event.sticks else None
    asking = _bring(cell, live, pids, start, project)
    if asking is not None and want.asked:
        asking.wait()
    if cell.opens:
        (gate / "go").touch()
    asked = asking.wait() if asking is not None else None
    live.wait()
    if stuck is not None:
        os.close(stuck)
    deadline = time.monotonic() + 2.0
    while (alive := live.survivors()) and time.monotonic() < deadline:
        time.sleep(0.01)
    trouble += [f"outlived it: {line}" for line in alive]
    played = _judge(cell, live, asked.code if asked is not None else 0, project, trouble)
    if resume and phase.fn == "fit" and not event.sticks and played.found.status != "FINISHED":
        played.trouble += _resumed(launcher, start, bases, project)
    return played


def _wait_at_gate(cell: Cell, live: Live, gate: Path) -> dict[int, int]:
    """Wait until every rank is at the gate, or one has come there to raise; the ranks' processes."""
    ranks = range(cell.launcher.num_ranks) if cell.event.only_rank is None else [cell.event.only_rank]
    enough = any if cell.event.ends == "error" else all
    files = {rank: gate / f"reached-{rank}" for rank in ranks}
    live.wait_for(
        lambda: enough(file.exists() for file in files.values()), what=f"all reached {cell.phase.name}"
    )
    return {rank: int(file.read_text()) for rank, file in files.items() if file.exists()}


def _resumed(launcher: Launcher, start: Start, bases: Bases, project: Path) -> list[str]:
    """What is wrong with the run once the same line has been started again."""
    again = fit(start, launcher, project).wait()
    if again.code != 0:
        return [f"the same line again: exit {again.code}\n{again}"]
    if not same(end_state(project), end_state(bases.get(launcher, "the end"))):
        return ["resumed, it ended with another state than a run that was never stopped"]
    return []


def _start_ignoring(ignored: tuple[signal.Signals, ...], start: Callable[[], Live]) -> Live:
    """Start a process that finds ``ignored`` signals ignored, as under nohup or behind ``&``, and no others."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if number in ignored:
                signal.signal(number, signal.SIG_IGN)
            elif handler == signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        return start()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _bring(cell: Cell, live: Live, pids: dict[int, int], start: Start, project: Path) -> Live | None:
    """What the cell is about comes to the run."""
    event = cell.event
    for index, number in enumerate(event.signals):
        if index and number == signal.SIGINT:
            time.sleep(SAME_PRESS_S + 0.1)  # closer together they are one press
        if live.process.poll() is not None:
            break
        if event.to == "rank 1":
            os.kill(pids[1], number)
        else:
            live.signal(number, group=event.to == "its group")
    if event.asks is None:
        return None
    return start(event.asks, "demo", cwd=project)


def _make_stick(path: str) -> int:
    """Put a full pipe that nobody reads in a file's place: appending to it never returns.

    Returns:
        A descriptor to close once the pipe is no longer needed.
    """
    os.unlink(path)
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        while True:
            os.write(fd, bytes(4096))
    except BlockingIOError:
        return fd


def checkpoints(project: Path) -> list[CheckpointRecord]:
    """The committed checkpoints, newest first."""
    catalogue = Catalogue(run_folder(project).checkpoints_dir)
    examined = [catalogue.examine(name) for name in catalogue.names()]
    return [record for record in examined if isinstance(record, CheckpointRecord)]


def _newest(project: Path) -> tuple[str, int] | None:
    saved = checkpoints(project)
    return (saved[0].reason, saved[0].step) if saved else None


def _judge(cell: Cell, live: Live, asked: int, project: Path, trouble: list[str]) -> Played:
    want, folder = expected(cell), run_folder(project)
    status = read_status(folder)
    saved = checkpoints(project)
    newest = saved[0] if saved else None
    reasons = {(record.reason, record.step) for record in saved}
    found = Expected(
        code=live.process.returncode,
        status=None if status is None else str(status.status),
        stop_reason=None if status is None else status.stop_reason,
        step=None if status is None else status.step,
        newest=_newest(project),
        noted=want.noted if want.noted in _notes(folder, newest) else None,
        has=want.has if want.has in reasons else None,
        asked=asked,
    )
    trouble = [*trouble, *_differences(want, found)]
    if cell.event.sticks:
        return Played(cell, found, str(live), trouble)
    if status is not None and cell.phase.fn == "fit":
        last = read_attempts(folder.attempts)[-1]
        if (last.status, last.stop_reason) != (
            (None, None) if want.status == "LOST" else (want.status, want.stop_reason)
        ):
            trouble.append(f"the ledger says {last.status}, {last.stop_reason}")
        if want.status != "LOST" and (last.exit_code, last.end_step) != (want.code, want.step):
            trouble.append(f"the ledger says exit {last.exit_code} at step {last.end_step}")
        if status.exit_code != (None if want.status == "LOST" else want.code):
            trouble.append(f"status.json says exit {status.exit_code}")
        if newest is not None and status.checkpoint != newest.path and want.status != "LOST":
            trouble.append(f"status.json names {status.checkpoint}, the newest is {newest.path}")
    left = [name for name in _listing(folder) if name.startswith((".tmp-", ".trash-"))]
    if left and cell.event.ends != "killed" and cell.event.ends != "at once":
        trouble.append(f"left over: {left}")
    told = live.stderr
    if cell.event.ends == "error":
        if told.count("Traceback") != 1 or f"the user's own error in {cell.phase.name}" not in told:
            trouble.append("the user's error is not told once")
        if cell.event.only_rank is not None and told.count(f"Rank {cell.event.only_rank} on ") != 1:
            trouble.append("it does not say once which rank raised it")
    elif "Traceback" in told:
        trouble.append("a traceback")
    if cell.event.ends == "lost" and told.count("rank 1 on ") != 1:
        trouble.append("it does not say once that rank 1 is lost")
    if cell.event.ends == "at once" and not cell.before_attempt:
        why = "grace period" if cell.event.arguments else "second Ctrl-C"
        if told.count(why) != 1:
            trouble.append(f"it does not say once that it was ended for the {why}")
    if cell.event.arguments and not cell.before_attempt:
        logs = [
            text
            for name in ("logs/attempt-*.log", "evals/*/*.log")
            for path in Path(folder.path).glob(name)
            if "in gate" in (text := path.read_text()) and "task.py" in text
        ]
        if len(logs) != cell.launcher.num_ranks:
            trouble.append(f"the stacks of {len(logs)} ranks are in a log")
    return Played(cell, found, str(live), trouble)


def _differences(want: Expected, found: Expected) -> list[str]:
    return [
        f"{name} is {getattr(found, name)!r}, expected {value!r}"
        for name, value in vars(want).items()
        if getattr(found, name) != value
    ]


def _notes(folder: RunFolder, newest: CheckpointRecord | None) -> list[str]:
    if newest is None or not Path(folder.registry).exists():
        return []
    registry: dict[str, Any] = json.loads(Path(folder.registry).read_text())
    return [
        str(note)
        for save in registry["saves"]
        if save["name"] == newest.name
        for note in save.get("notes", ())
    ]


def _listing(folder: RunFolder) -> list[str]:
    try:
        return os.listdir(folder.checkpoints_dir)
    except FileNotFoundError:
        return []


def end_state(project: Path) -> dict[str, Any]:
    """What training ended with: what the newest checkpoint says of weights, optimizer, scheduler and randomness."""
    import torch

    newest = checkpoints(project)[0]
    assert newest.step == LAST_STEP, newest
    state = torch.load(Path(newest.path) / "state.ckpt", weights_only=True)
    ranks = sorted(Path(newest.path).glob("rank-*.ckpt"))
    names = ("state_dict", "optimizer_states", "optimizer_groups", "lr_schedulers", "global_step", "epoch")
    random = {path.name: torch.load(path, weights_only=True)["random"] for path in ranks}
    parts = {path.name: _part(path) for path in sorted(Path(newest.path).glob("global_step*/*.pt"))}
    return {**{name: state.get(name) for name in names}, "random": random, "parts": parts}


def _part(path: Path) -> Any:
    """What one of DeepSpeed's files holds of weights and optimizer; its objects say nothing more."""
    import torch

    state = torch.load(path, weights_only=False)  # written by the cell itself
    inner = state.get("optimizer_state_dict") or {}
    names = ("single_partition_of_fp32_groups", "base_optimizer_state", "fp32_flat_groups")
    return {"module": state.get("module"), **{name: inner.get(name) for name in names}}


def same(a: Any, b: Any) -> bool:
    """Whether two states are the same, tensors bit for bit."""
    import torch

    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class Bases:
    """What phases start from: projects that are made once for each launcher, and copied for each cell."""

    def __init__(self, folder: Path, start: Start, made: dict[str, Path]) -> None:
        self._folder = folder
        self._start = start
        self._made = made  # those that exist

    def copy(self, launcher: Launcher, starts_from: str, target: Path) -> Path:
        """A project of its own that stands at ``starts_from``."""
        if starts_from == "nothing":
            return make_project(target)
        shutil.copytree(self.get(launcher, starts_from), target)
        return target

    def get(self, launcher: Launcher, starts_from: str) -> Path:
        name = f"{launcher.name}-{starts_from.replace(' ', '-')}"
        if name not in self._made:
            project = make_project(self._folder / name)
            if starts_from == "the end":
                done = fit(self._start, launcher, project).wait()
                assert done.code == 0, done
            else:
                self._stop_at_5(launcher, project)
            self._made[name] = project
        return self._made[name]

    def _stop_at_5(self, launcher: Launcher, project: Path) -> None:
        gate = project / "first-gate"
        gate.mkdir()
        live = fit(
            self._start, launcher, project, STOP_PHASE="train", STOP_GATE=str(gate), STOP_HEARD="request"
        )
        live.wait_for((gate / "reached-0").exists, what="it reached step 4")
        live.signal(signal.SIGINT)
        (gate / "go").touch()
        done = live.wait()
        assert done.code == 130, done
