"""``ckptrun inspect`` as a process, and what it prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptrun.cli.inspect import MOST_TENSORS, document_lines, printable, render, shortened
from ckptrun.inspect.report import inspect_checkpoint


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    weights = {f"layers.{n}.weight": torch.ones(n + 1) for n in range(30)}
    torch.save({"state_dict": weights, "epoch": 3, "loss": 0.5}, path)
    return path


def test_json_is_one_document_on_stdout(file: Path, run_cli: Callable[..., Any]) -> None:
    done = run_cli("inspect", str(file), "--json")
    document = json.loads(done.stdout)
    assert (done.code, done.stderr) == (0, "")
    assert (document["format"], document["epoch"], document["num_tensors"]) == ("torch-zip", 3, 30)
    assert document["num_parameters"] == 30 * 31 // 2
    assert document["metrics"] == {"loss": 0.5}


def test_piped_output_is_plain_and_short(file: Path, run_cli: Callable[..., Any]) -> None:
    done = run_cli("inspect", str(file))
    assert done.code == 0
    assert "\x1b" not in done.stdout
    assert done.stdout.count("layers.") == MOST_TENSORS
    assert "the 20 largest of 30 tensors; --all lists every one" in done.stdout
    lines = done.stdout.splitlines()
    assert lines[0] == str(file)
    assert any(line.startswith("resumable") and "no; missing: optimizer_states" in line for line in lines)


def test_all_lists_every_tensor(file: Path) -> None:
    lines = render(inspect_checkpoint(str(file)), every=True)
    assert sum("layers." in line for line in lines) == 30
    assert "--all" not in "\n".join(lines)


@pytest.mark.parametrize("as_json", [False, True])
def test_errors_are_one_message_and_exit_code_3(
    file: Path, run_cli: Callable[..., Any], as_json: bool
) -> None:
    file.write_bytes(file.read_bytes()[:500])
    done = run_cli("inspect", str(file), *(["--json"] if as_json else []))
    assert done.code == 3
    assert "Traceback" not in done.stderr
    assert "is damaged" in done.stderr
    if as_json:
        assert json.loads(done.stdout)["error"]["exit_code"] == 3


def test_names_from_a_file_cannot_steer_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "evil.pt"
    torch.save(
        {"state_dict": {"a\x1b[2J\nb\ud800": torch.ones(1)}, "\x1b]0;x\x07": [1], "loss\x9b": 0.5}, path
    )
    text = "\n".join(render(inspect_checkpoint(str(path)), every=True))
    assert not any(char in text for char in "\x1b\x07\x9b\ud800")
    assert printable("a\x1b\n") == "a\\x1b\\n"


def test_foreign_names_are_listed_and_nothing_is_called_safe(tmp_path: Path) -> None:
    path = tmp_path / "module.pt"
    torch.save(torch.nn.Linear(1, 1), path)
    text = "\n".join(render(inspect_checkpoint(str(path)), every=False))
    assert "torch.nn.modules.linear.Linear" in text
    assert "safe" not in text


def test_the_document_is_the_same_in_pieces(file: Path) -> None:
    document = inspect_checkpoint(str(file)).as_dict()
    assert json.loads("\n".join(document_lines(document))) == document
    assert json.loads("\n".join(document_lines({**document, "tensors": []})))["tensors"] == []


def test_long_names_lose_their_middle() -> None:
    assert shortened("short") == "short"
    assert len(shortened("a" * 50 + "b" * 50)) == 70
    assert shortened("a" * 50 + "b" * 50).startswith("aaa")
    assert shortened("a" * 50 + "b" * 50).endswith("bbb")
