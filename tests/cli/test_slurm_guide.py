"""The guide in ``docs/slurm.md`` explains messages that are said, and names scripts and options that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import ckptrun
from ckptrun.cli.slurm_job import JobOptions
from ckptrun.config.options import SlurmOptions

REPOSITORY = Path(ckptrun.__file__).resolve().parents[1]
GUIDE = (REPOSITORY / "docs" / "slurm.md").read_text()
SPOKEN_BY = (
    "launch/sbatch.py", "launch/sbatch_options.py", "launch/script_quoting.py", "launch/task_check.py",
    "launch/plan.py", "launch/requeue.py", "launch/walltime.py", "launch/slurm_tasks.py", "environment/slurm.py",
    "cli/job_check.py", "cli/slurm_job.py", "cli/slurm_submit.py", "cli/status.py",
    "cli/drift.py", "cli/ending.py", "launch/meeting.py", "launch/follower.py", "session/several_hosts.py",
    "run/folder.py",
)  # fmt: skip
# Of these every error is explained.
ALL_OF = ("launch/sbatch.py", "launch/sbatch_options.py", "launch/script_quoting.py", "launch/task_check.py",
          "cli/slurm_job.py", "cli/slurm_submit.py")  # fmt: skip
HOLE = "\0"


def said_by(module: str, *, errors_alone: bool = False) -> list[str]:
    """The texts of a module, with a hole for each value in them; without docstrings."""
    tree = ast.parse((REPOSITORY / "ckptrun" / module).read_text())
    roots: list[ast.AST] = [tree]
    if errors_alone:
        raised = (node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise))
        roots = [call.args[0] for call in raised if isinstance(call, ast.Call) and call.args]
    texts = []
    for root in roots:
        # What stands in the holes of a text is no text of its own.
        inside = {
            id(part)
            for node in ast.walk(root)
            if isinstance(node, ast.JoinedStr)
            for value in node.values
            for part in ast.walk(value)
        }
        for node in ast.walk(root):
            if isinstance(node, ast.JoinedStr) and id(node) not in inside:
                texts.append("".join(p.value if isinstance(p, ast.Constant) else HOLE for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                texts.append(node.value)
    return texts


def explained() -> list[str]:
    return re.findall(r"^\| `(.+?)` \|", GUIDE.partition("## Messages")[2], re.MULTILINE)


def is_in(message: str, text: str) -> bool:
    """Whether the guide's message is this text: its words in their order, with anything where it has …"""
    pattern = ".*".join(re.escape(part.strip()) for part in message.split("…"))
    return re.search(pattern, re.sub(r"\s+", " ", text), re.DOTALL) is not None


TEXTS = [text for module in SPOKEN_BY for text in said_by(module)]


@pytest.mark.parametrize("message", explained())
def test_a_message_that_is_explained_is_said(message: str) -> None:
    # Some are made of two texts: "job … is not requeued: …" and "a save … s, and …".
    parts = re.split(r"(?<=is not requeued): |(?<=has taken … s)(?=, and)", message)
    assert all(any(is_in(part, text) for text in TEXTS) for part in parts if part)


@pytest.mark.parametrize("module", ALL_OF)
def test_an_error_that_can_be_said_is_explained(module: str) -> None:
    messages = explained()
    errors = said_by(module, errors_alone=True)
    assert errors
    assert not [text for text in errors if not any(is_in(message, text) for message in messages)]


def test_the_ready_scripts_and_the_options_are_named() -> None:
    assert all(f"`{path.name}`" in GUIDE for path in (REPOSITORY / "configs" / "slurm").iterdir())
    assert all(f"`slurm.{name}`" in GUIDE for name in SlurmOptions.__dataclass_fields__)
    own = JobOptions.__annotations__
    assert all(f"--{name.replace('_', '-')}" in GUIDE for name in own)
