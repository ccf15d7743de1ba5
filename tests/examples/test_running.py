"""The examples from the shell: trained, stopped, resumed, evaluated. Small, but whole."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ckptrun

CONFIGS = Path(ckptrun.__file__).parents[1] / "configs"
SMALL = [
    "trainer.val_check_interval=20",
    "trainer.num_threads=1",
    "model.init_args.width=16",
    "model.init_args.depth=1",
    "model.init_args.heads=2",
    "model.init_args.num_bytes=20",
    "data.init_args.num_val_windows=16",
]


def test_digits_are_learned_tested_and_predicted(run_cli: Callable[..., Any]) -> None:
    pytest.importorskip("sklearn")
    config = CONFIGS / "digits.yaml"
    fitted = run_cli("fit", "-c", config, "--ckpt", "last", "trainer.max_epochs=8")
    assert fitted.code == 0, fitted
    tested = run_cli("test", "--run", "digits", "--ckpt", "best", "--json")
    assert tested.code == 0, tested
    status = run_cli("status", "digits", "--json").document
    assert status["status"] == "FINISHED"
    assert status["metrics"]["val_acc"] > 0.9
    assert run_cli("predict", "--run", "digits").code == 0


def test_the_gpt_is_stopped_resumed_and_writes(
    run_cli: Callable[..., Any], start_cli: Callable[..., Any]
) -> None:
    line = ("fit", "-c", CONFIGS / "stdlib_gpt.yaml", "--ckpt", "last")
    live = start_cli(*line, *SMALL, "trainer.max_steps=100000")
    live.wait_for_step(5, "stdlib_gpt")
    live.signal(signal.SIGINT)
    stopped = live.wait()
    assert stopped.code == 130, stopped
    step = run_cli("status", "stdlib_gpt", "--json").document["step"]
    resumed = run_cli(*line, *SMALL, f"trainer.max_steps={step + 20 - step % 20}")
    assert resumed.code == 0, resumed
    told = re.search(
        r"validation: ([\d.]+) bits per byte; a byte-frequency model needs ([\d.]+)", str(resumed)
    )
    assert told is not None, resumed
    assert float(told[1]) < 8
    assert 3 < float(told[2]) < 6
    again = run_cli(*line, *SMALL, f"trainer.max_steps={step + 20 - step % 20}")
    assert again.code == 0, again
    assert "nothing left to do" in str(again)
    predicted = run_cli("predict", "--run", "stdlib_gpt", "--ckpt", "best")
    assert predicted.code == 0, predicted
    assert "import " in predicted.stdout
