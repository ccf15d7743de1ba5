"""A small training for jobs: its config, its script, and what can be seen of it from outside."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_work
from slurm_cluster import SlurmCluster

from ckptrun.run.folder import RunFolder

CONFIG = """\
run: {name: demo}
trainer: {max_steps: 60, max_epochs: -1, num_threads: 1, log_every_n_steps: 1, enable_progress_bar: false}
model: {class_path: rank_work.Model}
data: {class_path: rank_work.Data}
callbacks:
  - {class_path: ckptrun.callbacks.ModelCheckpoint, init_args: {monitor: val_loss}}
  - {class_path: ckptrun.callbacks.EarlyStopping, init_args: {monitor: val_loss, patience: 1000}}
"""
SLOWLY = "callbacks.2={class_path: rank_work.Slowly, init_args: {seconds: 0.05}}"
FOREVER = f"trainer.max_steps=1000000 '{SLOWLY}'"


class Project:
    """A folder with a config, from which jobs are handed in."""

    def __init__(self, folder: Path, cluster: SlurmCluster) -> None:
        self.folder, self.cluster = folder, cluster
        shutil.copy(rank_work.__file__, folder / "rank_work.py")
        (folder / "ckptrun.yaml").write_text(CONFIG)

    def run(self, name: str = "demo") -> RunFolder:
        return RunFolder(str(self.folder / "runs" / name))

    def submit(self, line: str, *options: str) -> str:
        """Hand in a script whose last line is ``line``."""
        return self.cluster.submit(f"#!/bin/bash\n{line}\n", *options, cwd=self.folder)

    def output(self, job: str) -> str:
        path = self.folder / f"slurm-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def status(self, run: str = "demo") -> dict[str, Any]:
        try:
            document: dict[str, Any] = json.loads(Path(self.run(run).status).read_text())
        except FileNotFoundError:
            return {}
        return document

    def ledger(self, run: str = "demo", event: str | None = None) -> list[dict[str, Any]]:
        """The lines of the run's ledger, or those of one kind."""
        try:
            lines = Path(self.run(run).attempts).read_text().splitlines()
        except FileNotFoundError:
            return []
        events = [json.loads(line) for line in lines]
        return [each for each in events if event in (None, each["event"])]

    def wait_for_step(self, job: str, step: int, run: str = "demo") -> None:
        """Wait until training of a job that runs has reached ``step``."""
        self.wait_until(job, lambda: (self.status(run).get("step") or 0) >= step, f"step {step} of {run}")

    def wait_for_attempt(self, job: str, attempt: int, run: str = "demo") -> None:
        """Wait until that attempt of the run trains."""

        def trains() -> bool:
            status = self.status(run)
            return status.get("attempt") == attempt and status.get("status") == "RUNNING"

        self.wait_until(job, trains, f"attempt {attempt} of {run}")

    def wait_until(self, job: str, condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
        """Wait for a condition while the job has not ended."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            state = self.cluster.state(job)
            if time.monotonic() > deadline or state in ("FAILED", "CANCELLED", "TIMEOUT", "COMPLETED"):
                pytest.fail(f"{what} has not come, and the job is {state}\n{self.cluster.told(job)}")
            time.sleep(0.05)
