"""Kills a run that trains through the real command line, at one moment after the other, and says what is wrong then.

    chain     start, kill, look at what is left; start again (which is the next victim), ...; a last start that nobody
              disturbs; then compare the end with that of a run that was never killed, bit for bit
    moment    a named point of ckptrun.faults (the process halts there), a random instant of the start-up or of the run,
              or one right after a checkpoint's temporary folder was seen
    victim    the supervisor, a rank, a loader worker, the fork server, the agent, the supervisor's process group, or
              every process at once

Nothing here relies on ckptrun's own readers to say that a checkpoint is whole: manifest, sizes and checksums are read
anew. That training stands still during a save is not assumed either: a process is stopped as a whole where it halts.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
import yaml
from live_cli import Live

from ckptrun import faults

CONFIG = """\
run: {name: demo}
trainer: {max_epochs: 3, val_check_interval: 8, log_every_n_steps: 1, num_threads: 1}
launch: {grace_s: 10}
model: {class_path: task.Model}
data: {class_path: task.Data}
callbacks:
  - class_path: ckptrun.callbacks.ModelCheckpoint
    init_args: {monitor: val_loss, save_top_k: 2}
  - class_path: ckptrun.callbacks.ModelCheckpoint
    init_args: {every_n_train_steps: 2}
"""
SURVIVES_AT_MOST_S = 2.0  # after the supervisor is gone
ENDS_WITHIN_S = 60.0  # a supervisor that lost a rank; generous, as the machine may be busy
_POLL_S = 0.003
_TOO_FAST = (
    0.25  # so much further than expected, as a share of what was left, a run is hit before its moment comes
)
_BURST_S = 0.02  # how long after its temporary folder was seen a save may be hit

_LINE = ("-c", "demo.yaml", "--ckpt", "last")

Start = Callable[..., Live]


@dataclass(frozen=True)
class Setup:
    """One way to train, with the victims that it has."""

    name: str
    arguments: tuple[str, ...]
    victims: tuple[str, ...]
    num_ranks: int = 1


_SINGLE = ("supervisor", "group", "all")
_RANKS = ("rank 0", "rank 1", "fork server", "agent", *_SINGLE)
_WORKERS = ("data.init_args.num_workers=2",)
_TWO = ("--strategy", "ddp", "--nproc", "2")
_ZERO = ("--strategy", "deepspeed", "--nproc", "2")
SETUPS = (
    Setup("single", (), _SINGLE),
    Setup("single, 2 workers", _WORKERS, ("loader worker", *_SINGLE)),
    Setup("ddp x2", _TWO, _RANKS, 2),
    Setup("ddp x2, 2 workers", (*_TWO, *_WORKERS), ("loader worker", *_RANKS), 2),
    Setup("ZeRO 1 x2", (*_ZERO, "strategy.stage=1"), _RANKS, 2),
    Setup("ZeRO 3 x2", (*_ZERO, "strategy.stage=3"), _RANKS, 2),
)
# A victim beside these: "who is there", the process that has reached the point.
AT_THE_POINT = "who is there"


@dataclass(frozen=True)
class Kill:
    """When, and whom. ``when`` is a point, ``start-up``, ``run`` or ``save``.

    Attributes:
        nth: which arrival at the point, or which save of this attempt; None: the one that ``share`` gives, of those
            that are left to come.
        share: of the start-up, of what is left of the run, or of the saves that are left, 0 to 1.
    """

    when: str
    victim: str
    nth: int | None = 1
    share: float = 0.0

    @property
    def at_point(self) -> bool:
        return self.when in faults.POINTS

    def __str__(self) -> str:
        how = f" at {self.share:.3f}" if self.nth is None or not self.at_point else f":{self.nth}"
        return f"{self.when}{how}, {self.victim}"


@dataclass
class Struck:
    """What came of one kill. ``victim`` is who was really killed, None where the moment never came."""

    kill: Kill
    victim: str | None
    trouble: list[str] = field(default_factory=list)
    output: str = ""
    wall_s: float = 0.0


@dataclass(frozen=True)
class Undisturbed:
    """A run that nobody killed: how it ended, and how long its parts took in seconds."""

    picture: dict[str, Any]
    start_s: float
    run_s: float
    num_steps: int
    num_saves: int


@dataclass
class Chain:
    """What came of a chain. ``trouble`` is about its end; each kill has its own."""

    setup: Setup
    struck: list[Struck] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    output: str = ""

    @property
    def all_trouble(self) -> list[str]:
        return [f"{each.kill}: {line}" for each in self.struck for line in each.trouble] + self.trouble


def make_project(folder: Path) -> Path:
    """The config and the user's module, ready to run in ``folder``."""
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("crash_task.py"), folder / "task.py")
    (folder / "demo.yaml").write_text(CONFIG)
    return folder


def fit(start: Start, setup: Setup, project: Path, **env: str) -> Live:
    """The line that stands in every script."""
    return start("fit", *_LINE, *setup.arguments, cwd=project, env={"OMP_NUM_THREADS": "1", **env})


def play_undisturbed(start: Start, setup: Setup, project: Path) -> Undisturbed:
    """What every chain of this set-up has to end like."""
    make_project(project)
    began = time.monotonic()
    live = fit(start, setup, project, CRASH_FIRST_STEP=str(project / "first-step"))
    live.wait_for((project / "first-step").exists, what="its first step")
    stepped = time.monotonic()
    done = live.wait()
    assert done.code == 0, done
    ended = time.monotonic()
    shown = picture(project)
    return Undisturbed(
        shown, stepped - began, ended - stepped, shown["manifest"]["step"], shown["manifest"]["sequence"]
    )


def play_chain(
    setup: Setup, kills: Iterator[Kill] | list[Kill], start: Start, undisturbed: Undisturbed, project: Path
) -> Chain:
    """Kill one start after the other, until a start is not hit or ``kills`` are through; then compare the end."""
    make_project(project)
    chain = Chain(setup)
    for number, kill in enumerate(kills):
        struck = strike(setup, kill, start, undisturbed, project, project / f"first-step-{number}")
        chain.struck.append(struck)
        if struck.trouble:
            return chain
        if struck.victim is None:
            break
    live = fit(start, setup, project)
    done = live.wait()
    chain.output = str(live)
    if done.code != 0:
        chain.trouble = [f"the same line again: exit {done.code}"]
    else:
        chain.trouble = [*_outlived(live), *look(project, None), *_differences(picture(project), undisturbed)]
        chain.trouble += _ended_rightly(start, project)
    return chain


def _differences(found: dict[str, Any], undisturbed: Undisturbed) -> list[str]:
    return [
        f"{name} differs from the undisturbed run's"
        for name in undisturbed.picture
        if name != "manifest" and not same(found.get(name), undisturbed.picture[name])
    ]


# -- one kill ------------------------------------------------------------------------------------------------


def strike(
    setup: Setup, kill: Kill, start: Start, undisturbed: Undisturbed, project: Path, first_step: Path
) -> Struck:
    """Start the run, kill at the moment, and look at what is left."""
    began = time.monotonic()
    left = 1.0 - max(0, newest_step(project)) / undisturbed.num_steps
    nth = kill.nth or 1 + int(kill.share * left * 0.9 * undisturbed.num_saves)
    env = {"CRASH_FIRST_STEP": str(first_step)}
    if kill.at_point:
        env[faults.VARIABLE] = f"{kill.when}:{nth}=halt"
    live = fit(start, setup, project, **env)
    known = Known(project)
    halted = _await_moment(kill, live, known, undisturbed, left, nth, first_step)
    struck = Struck(kill, None)
    if halted is not None:
        struck.victim = _kill(kill, live, known, project, halted)
    _await_end(live, struck)
    struck.output = str(live)
    if not struck.trouble:
        struck.trouble += [*_outlived(live), *look(project, known), *_told(start, setup, project)]
    struck.wall_s = time.monotonic() - began
    return struck


def _await_moment(
    kill: Kill, live: Live, known: Known, undisturbed: Undisturbed, left: float, nth: int, first_step: Path
) -> list[int] | None:
    """Wait for the moment; the processes that halt there. None where the run ended before it came.

    A moment that is a time comes early where the run is much faster than the undisturbed one was: before its steps are
    through.
    """
    latest = (1.0 - left + min(kill.share + _TOO_FAST, 0.9) * left) * undisturbed.num_steps
    began, deadline = time.monotonic(), time.monotonic() + ENDS_WITHIN_S
    temporaries: set[str] = set(known.leftovers)
    due: float | None = None
    if kill.when == "start-up":
        due = began + kill.share * undisturbed.start_s
    while time.monotonic() < deadline:
        if live.process.poll() is not None:
            return None
        known.look()
        now = time.monotonic()
        if not kill.at_point and (
            first_step.exists() if kill.when == "start-up" else known.newest_step >= latest
        ):
            return []
        if due is not None:
            if now >= due:
                return []
            time.sleep(min(_POLL_S, max(0.0, due - now)))
            continue
        if kill.at_point:
            halted = [pid for pid, state in _session(live.pid) if state == "T"]
            if halted:
                return halted
        elif kill.when == "run" and first_step.exists():
            due = now + kill.share * left * undisturbed.run_s
            continue
        elif kill.when == "save":
            temporaries |= known.leftovers
            if len(temporaries) - known.old_leftovers >= nth:
                due = now + kill.share * 17 % 1 * _BURST_S
                continue
        time.sleep(0.0005 if kill.when == "save" else _POLL_S)
    raise AssertionError(f"{kill} did not come, and the run did not end\n{live}")


def _kill(kill: Kill, live: Live, known: Known, project: Path, halted: list[int]) -> str:
    """Kill the victim, or the supervisor where there is no such process at this moment; says who it was."""
    found = roles(live, project)
    victim, pids = kill.victim, found.get(kill.victim, [])
    if victim == AT_THE_POINT:
        pids = halted
        victim = next((name for name, those in found.items() if halted[0] in those), "another process")
    elif victim == "all":
        pids = [pid for pid, _ in _session(live.pid)]
    elif victim == "group":
        pids = [pid for pid, _ in _session(live.pid) if _group_of(pid) == live.pid]
    if not pids:
        victim, pids = "supervisor", [live.pid]
    known.look()
    for pid in pids:
        _signal(pid, signal.SIGKILL)
    for pid in halted:
        _signal(pid, signal.SIGCONT)
    return victim


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _await_end(live: Live, struck: Struck) -> None:
    """The supervisor ends: at once where it was killed, by itself where it lost a rank or a worker."""
    deadline = time.monotonic() + ENDS_WITHIN_S
    while live.process.poll() is None and time.monotonic() < deadline:
        for pid, state in _session(live.pid):
            if state == "T":  # it has come to the point after the kill
                _signal(pid, signal.SIGCONT)
        time.sleep(_POLL_S)
    code = live.process.poll()
    if code is None:
        struck.trouble.append(
            f"the supervisor has not ended {ENDS_WITHIN_S:g} s after {struck.victim} was killed"
        )
        return
    # 0: the victim had done its work. 1: an error in user code, which is how a lost loader worker looks to torch.
    # 70: a rank was lost.
    allowed = {
        None: (0,),
        "loader worker": (0, 1, 70),
        "supervisor": (0, -9),
        "group": (0, -9),
        "all": (0, -9),
    }
    if code not in allowed.get(struck.victim, (0, 70)):
        struck.trouble.append(f"exit {code} after {struck.victim} was killed")


def _outlived(live: Live) -> list[str]:
    deadline = time.monotonic() + SURVIVES_AT_MOST_S
    while (alive := live.survivors()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [f"outlived the supervisor by {SURVIVES_AT_MOST_S:g} s: {line}" for line in alive]


# -- processes -----------------------------------------------------------------------------------------------


def _session(leader: int) -> list[tuple[int, str]]:
    """The processes of the session and their states, those that have ended left out."""
    return [(pid, stat[0]) for pid, stat in _stats() if int(stat[3]) == leader and stat[0] not in "ZX"]


def _stats() -> Iterator[tuple[int, list[str]]]:
    """(pid, [state, parent, group, session, ...]) of every process."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    yield int(entry), file.read().rpartition(b")")[2].decode().split()
            except (FileNotFoundError, ProcessLookupError):
                continue


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def roles(live: Live, project: Path) -> dict[str, list[int]]:
    """Who is who among the processes of the command that runs now."""
    members = {pid for pid, _ in _session(live.pid)}
    parents = {pid: int(stat[1]) for pid, stat in _stats() if pid in members}
    found: dict[str, list[int]] = {"supervisor": [live.pid]}
    server = next((pid for pid, parent in parents.items() if parent == live.pid and _serves(pid)), None)
    if server is None:
        found["loader worker"] = [pid for pid, parent in parents.items() if parent == live.pid]
        return found
    found["fork server"] = [server]
    noted = _read_json(project / "runs/demo/control/ranks.json") or {"processes": []}
    ranks = [pid for pid, _ in noted["processes"] if pid in members]
    children = sorted(pid for pid, parent in parents.items() if parent == server)
    for number, pid in enumerate(ranks):
        found[f"rank {number}"] = [pid]
    if ranks or len(children) == 1:
        found["agent"] = [pid for pid in children if pid not in ranks][:1]
    found["loader worker"] = [pid for pid, parent in parents.items() if parent in ranks]
    return found


def _serves(pid: int) -> bool:
    try:
        return b"fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


# -- what is on disk -----------------------------------------------------------------------------------------


class Known:
    """What was seen committed while the run lived; :meth:`look` is called until the very moment of the kill."""

    def __init__(self, project: Path) -> None:
        self.folder = project / "runs/demo/checkpoints"
        self.newest = ""
        self.best = float("inf")  # val_loss of the best one that the callback wanted
        self.leftovers: set[str] = set()  # temporary folders
        self._read: set[str] = set()
        self.look()
        self.old_leftovers = len(self.leftovers)

    @property
    def newest_step(self) -> int:
        return int(self.newest.rpartition("-")[2] or 0)

    def look(self) -> None:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return
        self.leftovers = {name for name in names if name.startswith(".tmp-")}
        for name in names:
            if name in self._read or name.startswith("."):
                continue
            try:
                manifest = json.loads((self.folder / name / "manifest.json").read_bytes())
            except FileNotFoundError:
                continue  # not committed yet, or deleted a moment ago
            self._read.add(name)
            self.newest = max(self.newest, name)
            self.best = min(self.best, _score(manifest))


def _score(manifest: dict[str, Any]) -> float:
    wanted = any("val_loss" in key for key in manifest["saved_for"])
    return float(manifest["metrics"]["val_loss"]) if wanted else float("inf")


def committed(project: Path) -> dict[str, dict[str, Any]]:
    """Manifests of the committed checkpoints by name, oldest first."""
    folder = project / "runs/demo/checkpoints"
    paths = sorted(folder.glob("[0-9]*/manifest.json"))
    return {path.parent.name: json.loads(path.read_bytes()) for path in paths}


def newest_step(project: Path) -> int:
    return max((manifest["step"] for manifest in committed(project).values()), default=0)


def look(project: Path, known: Known | None) -> list[str]:
    """What is wrong with the run's folder, read by this module's own means."""
    trouble = [*_damaged_files(project)]
    manifests = committed(project)
    for name, manifest in manifests.items():
        trouble += _damaged_checkpoint(project / "runs/demo/checkpoints" / name, manifest)
    if known is not None:
        newest = max(manifests, default="")
        if newest < known.newest:
            trouble.append(
                f"{known.newest} was committed before the kill, and now {newest or 'nothing'} is the newest"
            )
        if known.best < min(map(_score, manifests.values()), default=float("inf")):
            trouble.append(
                f"the best checkpoint (val_loss {known.best:g}) was committed before the kill, and is gone"
            )
    return trouble


def _damaged_checkpoint(folder: Path, manifest: dict[str, Any]) -> list[str]:
    import torch

    trouble = []
    for entry in manifest["files"]:
        path = folder / entry["path"]
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            trouble.append(f"{folder.name} is committed and lacks {entry['path']}")
            continue
        if len(data) != entry["size_bytes"]:
            trouble.append(
                f"{path.name} of {folder.name} has {len(data)} bytes, the manifest {entry['size_bytes']}"
            )
        elif entry["checksum"] != f"xxh3_64:{xxhash.xxh3_64_hexdigest(data)}":
            trouble.append(f"{path.name} of {folder.name} has another checksum than the manifest says")
        elif entry["path"] != "latest":
            # DeepSpeed's files hold a few of its own classes.
            torch.load(path, weights_only=not entry["path"].startswith("global_step"))
    ranks = range(manifest["world_size"])
    wanted = {"state.ckpt", *(f"rank-{rank:04d}.ckpt" for rank in ranks)}
    if manifest["strategy"] == "deepspeed":
        tag, part = f"global_step{manifest['step']}", "zero_pp_rank_{}_mp_rank_00_{}_states.pt"
        models = [part.format(rank, "model") for rank in ranks]
        if manifest["deepspeed"]["stage"] < 3:
            models = ["mp_rank_00_model_states.pt"]
        wanted |= {"latest", *(f"{tag}/{name}" for name in models)}
        wanted |= {f"{tag}/{part.format(rank, 'optim')}" for rank in ranks}
    if {entry["path"] for entry in manifest["files"]} != wanted:
        trouble.append(f"{folder.name} lists other files than {sorted(wanted)}")
    return trouble


def _damaged_files(project: Path) -> list[str]:
    run, trouble = project / "runs/demo", []
    for name in ("run.json", "registry.json", "status.json", "lease.json", "control/ranks.json"):
        try:
            _read_json(run / name)
        except ValueError as error:
            trouble.append(f"{name} is not JSON: {error}")
    if (run / "config.yaml").exists() and not isinstance(
        yaml.safe_load((run / "config.yaml").read_text()), dict
    ):
        trouble.append("config.yaml is not what was written")
    if (run / "attempts.jsonl").exists():
        for line in (run / "attempts.jsonl").read_text().splitlines():
            try:
                json.loads(line)
            except ValueError:
                trouble.append(f"a line of attempts.jsonl is torn: {line!r}")
    return trouble


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def _told(start: Start, setup: Setup, project: Path) -> list[str]:
    """What `resolve` and `status` say of the run that was killed, where it is wrong."""
    resolving = start("resolve", *_LINE, *setup.arguments, "--json", cwd=project)
    asking = start("status", "demo", "--json", cwd=project)
    resolved, status = resolving.wait(), asking.wait()
    trouble, newest = [], max(committed(project), default=None)
    try:
        if resolved.code != 0:
            trouble.append(f"`resolve --ckpt last` ends with {resolved.code}")
        path = resolved.document["path"]
        if (None if path is None else Path(path).name) != newest:
            trouble.append(f"`resolve --ckpt last` says {path}, the newest committed is {newest}")
        if (project / "runs/demo/status.json").exists():
            if status.code != 0:
                trouble.append(f"`status` ends with {status.code}")
            elif status.document["status"] in ("RUNNING", "INITIALIZING"):
                trouble.append(f"`status` says {status.document['status']}, and nothing lives")
    except ValueError as error:
        trouble.append(f"not JSON: {error}")
    if trouble:
        trouble += [str(resolved), str(status)]
    return trouble


def _ended_rightly(start: Start, project: Path) -> list[str]:
    """What is wrong with how the run's files say that it has ended."""
    status = start("status", "demo", "--json", cwd=project).wait()
    trouble = []
    if (status.code, status.document.get("status")) != (0, "FINISHED"):
        trouble.append(f"after its end `status` says {status}")
    left = [path.name for path in (project / "runs/demo").rglob(".*") if re.search(r"tmp-|trash-", path.name)]
    if left:
        trouble.append(f"left over at the end: {left}")
    return trouble


# -- the end of a chain --------------------------------------------------------------------------------------


def picture(project: Path) -> dict[str, Any]:
    """What training ended with, but for what tells of the way there: save counters, attempts, times."""
    import torch

    manifests = committed(project)
    name = max(manifests)
    folder = project / "runs/demo/checkpoints" / name
    state = torch.load(folder / "state.ckpt", weights_only=True)
    ranks = [torch.load(path, weights_only=True) for path in sorted(folder.glob("rank-*.ckpt"))]
    loop = {key: value for key, value in state["loops"]["fit_loop"].items() if key != "elapsed_s"}
    return {
        "manifest": manifests[name],
        "weights": dict(state["state_dict"]) if "state_dict" in state else _deepspeeds_weights(folder),
        "optimizer states": state.get("optimizer_states", state.get("optimizer_groups")),
        "parts": {path.name: _part(path) for path in sorted(folder.glob("global_step*/*.pt"))},
        "lr schedulers": state["lr_schedulers"],
        "position": (state["epoch"], state["global_step"], loop, [_data(rank) for rank in ranks]),
        "random states": [rank["random"] for rank in ranks],
        "logged values": state["ckptrun"]["logs"],
        "callbacks": _without_the_way(state["callbacks"]),
        "kept checkpoints": _kept(project, manifests),
        "metrics.csv": (project / "runs/demo/logs/metrics.csv").read_text(),
    }


def _part(path: Path) -> dict[str, Any]:
    """What one of DeepSpeed's files holds of weights and optimizer."""
    import torch

    state = torch.load(path, weights_only=False)  # written by the chain itself
    inner = state.get("optimizer_state_dict") or {}
    # Not the flat weights of stage 3: what fills them up behind the last one was never written to.
    names = ("single_partition_of_fp32_groups", "base_optimizer_state", "optimizer_state_dict")
    return {"module": state.get("module"), **{name: inner.get(name) for name in names}}


def _deepspeeds_weights(folder: Path) -> dict[str, Any]:
    """All weights, put together by DeepSpeed's own tool."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return dict(get_fp32_state_dict_from_zero_checkpoint(str(folder)))


def _data(rank: dict[str, Any]) -> dict[str, Any]:
    """The position in the data; two are the same where the epoch's first batch is at the same sample."""
    data = dict(rank["data"])
    position = data.pop("position")
    return {
        **data,
        "first sample": position["sample"] - position["batch"] * position["global_batch"],
        "global batch": position["global_batch"],
    }


def _kept(project: Path, manifests: dict[str, dict[str, Any]]) -> list[tuple[int, float]]:
    """Step and score of what is kept, but for the checkpoint that the last attempt began from, which retention spares
    as long as that attempt lives."""
    # The last line of all may be torn, and that is not for this to judge.
    lines = (project / "runs/demo/attempts.jsonl").read_text().splitlines()
    starts = [json.loads(line) for line in lines if '"event": "start"' in line and line.endswith("}")]
    began_from = starts[-1]["resolved"]
    spared = None if began_from is None else Path(began_from).name
    callbacks = _read_json(project / "runs/demo/registry.json")["callbacks"]
    wanted = {name for entry in callbacks for name in (entry["best"], *entry["best_k"])}
    return [(m["step"], _score(m)) for name, m in manifests.items() if name in wanted or name != spared]


def _without_the_way(value: Any) -> Any:
    """Paths of checkpoints without the folder they stand in and the save counter in front; no run id."""
    if isinstance(value, dict):
        return {
            _without_the_way(key): _without_the_way(each) for key, each in value.items() if key != "run_id"
        }
    if isinstance(value, (list, tuple)):
        return [_without_the_way(each) for each in value]
    return re.sub(r"(.*/)?\d{8}-step-", "step-", value) if isinstance(value, str) else value


def same(a: Any, b: Any) -> bool:
    """Whether two values are the same, tensors bit for bit."""
    import torch

    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return bool(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


# -- what is played ------------------------------------------------------------------------------------------

_POINTS_OF_A_SAVE = tuple(point for point in faults.POINTS if point.startswith(("commit:", "delete:")))


def draw(rng: random.Random, setup: Setup) -> Kill:
    """A kill at random: at a named point, in the start-up, in the run, or right after a save has begun."""
    what = rng.random()
    victim = rng.choice(setup.victims)
    if what < 0.2:
        return Kill("start-up", victim, share=rng.random())
    if what < 0.5:
        return Kill("run", victim, share=rng.random())
    if what < 0.7:
        return Kill("save", victim, nth=None, share=rng.random())
    point = rng.choice(_POINTS_OF_A_SAVE if what < 0.85 else faults.POINTS)
    nth = None if point in _POINTS_OF_A_SAVE else rng.choice((1, 1, 2))
    return Kill(point, rng.choice((AT_THE_POINT, victim)), nth=nth, share=rng.random())
