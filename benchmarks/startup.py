"""How soon do commands that do not train answer?

Peers, each measured in the same run and in turn with ours: ``--help`` of a bare application made with Typer
and rich, and ``torchrun --help``. Prints medians and ratios, and ends with 1 where one is over its limit.

    python benchmarks/startup.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

LIMIT_TO_BARE_APP = 1.4  # at most so many times as long as the bare application
LIMIT_TO_TORCHRUN = 6.0  # at least so many times sooner than torchrun

BARE_APP = '''
import rich
import typer

app = typer.Typer()


@app.command()
def hello(name: str, count: int = 1) -> None:
    """Say hello."""
    rich.print(f"hello {name}" * count)


if __name__ == "__main__":
    app()
'''

CONFIG = """
run: {name: demo}
model: {class_path: model.Model}
data: {class_path: model.Data}
trainer: {max_steps: 1000}
"""

STATE = """
import sys, torch
weights = {f"layers.{i}.weight": torch.zeros(64, 64) for i in range(24)}
torch.save({"state_dict": weights, "global_step": 3, "epoch": 0}, sys.argv[1])
"""

NUM_CHECKPOINTS = 20


def make_project(folder: Path) -> Path:
    """A config and a run with checkpoints; returns the newest checkpoint."""
    (folder / "bare_app.py").write_text(BARE_APP)
    (folder / "ckptrun.yaml").write_text(CONFIG)
    run = folder / "runs" / "demo"
    checkpoint = run
    line: list[str | None] = [None]
    for sequence in range(1, NUM_CHECKPOINTS + 1):
        name = f"{sequence:08d}-step-{sequence * 10:08d}"
        checkpoint = run / "checkpoints" / name
        checkpoint.mkdir(parents=True)
        state = checkpoint / "state.ckpt"
        if sequence == 1:
            subprocess.run([sys.executable, "-c", STATE, str(state)], check=True)
        else:
            os.link(run / "checkpoints" / str(line[1]) / "state.ckpt", state)
        manifest = {
            "format": 1,
            "run_id": "r",
            "attempt": 1,
            "sequence": sequence,
            "parent": line[-1],
            "line": [[1, sequence]],
            "lease_epoch": 1,
            "step": sequence * 10,
            "epoch": 0,
            "fn": "fit",
            "exact": True,
            "reason": "periodic",
            "weights_only": False,
            "strategy": "single",
            "world_size": 1,
            "metrics": {"val_loss": 1.0 / sequence},
            "saved_at": 1.0e9 + sequence,
            "save_s": 0.1,
            "versions": {},
            "files": [{"path": "state.ckpt", "size_bytes": state.stat().st_size, "checksum": "xxh3_64:0"}],
            "saved_for": [],
            "job": None,
            "callbacks": [],
            "loops": {},
        }
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
        line.append(name)
    identity = {
        "id": "r",
        "name": "demo",
        "created": "2026-01-01T00:00:00+00:00",
        "command": ["ckptrun", "fit"],
        "cwd": str(folder),
        "python": "3",
        "versions": {},
        "git": None,
    }
    (run / "run.json").write_text(json.dumps(identity))
    return checkpoint


def seconds_of(command: Sequence[str], folder: Path) -> float:
    """Wall-clock seconds of one process, from start to end."""
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="how often each command is run")
    rounds = parser.parse_args().rounds

    scripts = Path(sys.executable).parent
    ckptrun = str(scripts / "ckptrun")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = make_project(folder)
        bare = [sys.executable, "bare_app.py", "--help"]
        torchrun = [str(scripts / "torchrun"), "--help"]
        ours = {
            "ckptrun --help": [ckptrun, "--help"],
            "ckptrun resolve": [ckptrun, "resolve", "--ckpt", "last"],
            "ckptrun status": [ckptrun, "status", "demo"],
            "ckptrun inspect": [ckptrun, "inspect", str(checkpoint)],
        }
        commands = {"bare Typer app --help": bare, "torchrun --help": torchrun, **ours}
        for command in commands.values():
            seconds_of(command, folder)  # fills the page cache and writes bytecode
        taken: dict[str, list[float]] = {label: [] for label in commands}
        for _ in range(rounds):
            for label, command in commands.items():
                taken[label].append(seconds_of(command, folder))

    median = {label: statistics.median(seconds) for label, seconds in taken.items()}
    bare_s, torchrun_s = median["bare Typer app --help"], median["torchrun --help"]
    print(f"{rounds} rounds in turn, medians")
    print(f"{'command':24}{'ms':>8}{'of bare app':>14}{'torchrun / it':>16}")
    over = []
    for label, seconds in median.items():
        to_bare, to_torchrun = seconds / bare_s, torchrun_s / seconds
        print(f"{label:24}{seconds * 1000:8.0f}{to_bare:14.2f}{to_torchrun:16.1f}")
        if label in ours and to_bare > LIMIT_TO_BARE_APP:
            over.append(f"{label}: {to_bare:.2f} times the bare application")
        if label in ours and to_torchrun < LIMIT_TO_TORCHRUN:
            over.append(f"{label}: only {to_torchrun:.1f} times sooner than torchrun")
    print(f"limits: at most {LIMIT_TO_BARE_APP} of the bare app, at least {LIMIT_TO_TORCHRUN} torchrun / it")
    for line in over:
        print(f"OVER: {line}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
