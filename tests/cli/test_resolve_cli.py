"""``resolve``, ``pin`` and ``keep`` on a run with checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunCli = Callable[..., Any]


def test_the_document_is_the_one_that_programs_rely_on(trained: Path, run_cli: RunCli) -> None:
    done = run_cli("resolve", "--ckpt", "last", "trainer.max_steps=9", "--json")
    assert done.code == 0, done
    document = done.document
    assert {
        "ref", "rule", "fresh", "path", "step", "warnings", "candidates", "num_not_reached", "error",
    } <= set(document)  # fmt: skip
    assert (document["ref"], document["rule"], document["fresh"], document["step"]) == ("last", 2, False, 6)
    assert Path(document["path"]).is_absolute()
    assert Path(document["path"]).is_dir()
    first, second = document["candidates"]
    assert set(first) == {"path", "step", "sequence", "reason_saved", "verdict", "why"}
    assert (first["verdict"], first["step"], first["path"]) == ("taken", 6, document["path"])
    assert (second["verdict"], document["num_not_reached"]) == ("not reached", 1)
    assert document["error"] is None


def test_it_exits_as_the_command_would_and_changes_nothing(
    trained: Path, run_cli: RunCli, snapshot: Callable[[Path], dict[str, bytes]]
) -> None:
    before = snapshot(trained)
    for args, code in [
        ((), 2),
        (("--ckpt", "last"), 0),
        (("--ckpt", "none"), 0),
        (("--fn", "validate"), 0),
        (("--fn", "validate", "--ckpt", "best:accuracy"), 2),
        (("--ckpt", "nowhere/at/all"), 3),
        (("--ckpt", "step:5"), 3),
        (("--run", "another"), 0),
        (("--run", "another", "--fn", "test", "-c", "ckptrun.yaml"), 3),
    ]:
        done = run_cli("resolve", *args)
        assert done.code == code, done
        as_json = run_cli("resolve", *args, "--json")
        error = as_json.document["error"]
        assert (as_json.code, 0 if error is None else error["exit_code"]) == (code, code), as_json
    assert snapshot(trained) == before


def test_a_wrong_config_still_gives_a_document(project: Path, run_cli: RunCli) -> None:
    done = run_cli("resolve", "trainer.seeed=1", "--json")
    assert done.code == 2, done
    assert done.document["rule"] is None
    assert "trainer.seeed" in done.document["error"]["message"]
    assert done.document["error"]["hint"] == "Did you mean trainer.seed?"


def test_an_unknown_fn(project: Path, run_cli: RunCli) -> None:
    done = run_cli("resolve", "--fn", "train")
    assert done.code == 2, done
    assert "fit, validate, test, predict" in done.stderr


def test_all_lists_every_candidate(trained: Path, run_cli: RunCli) -> None:
    checkpoints = trained / "runs" / "demo" / "checkpoints"
    for number in range(50, 90):
        (checkpoints / f"{number:08d}-step-{number:08d}").mkdir()
    few = run_cli("resolve", "--ckpt", "seq:1", "trainer.max_steps=9", "--json").document
    every = run_cli("resolve", "--ckpt", "seq:1", "trainer.max_steps=9", "--json", "--all").document
    not_reached = [c for c in every["candidates"] if c["verdict"] == "not reached"]
    assert len(not_reached) == every["num_not_reached"] == few["num_not_reached"]
    assert sum(c["verdict"] == "not reached" for c in few["candidates"]) <= 20
    shown = run_cli("resolve", "--ckpt", "seq:1", "trainer.max_steps=9")
    assert "--all lists them" in shown.stdout


def test_a_pin_is_used_until_it_is_taken_away(trained: Path, run_cli: RunCli) -> None:
    pinned = run_cli("pin", "step:4", "--json")
    assert pinned.code == 0, pinned
    assert (pinned.document["reference"], pinned.document["step"]) == ("step:4", 4)
    document = run_cli("resolve", "--fn", "test", "--json").document
    assert (document["rule"], document["path"]) == (3, pinned.document["path"])
    assert "beats the pin" in " ".join(run_cli("resolve", "--ckpt", "last", "--json").document["warnings"])
    taken = run_cli("unpin")
    assert (taken.code, pinned.document["path"] in taken.stdout) == (0, True), taken
    assert run_cli("resolve", "--fn", "test", "--json").document["rule"] == 8
    assert run_cli("unpin", "--json").document == {"run": "demo", "was": None}


@pytest.mark.parametrize(("reference", "code"), [("step:5", 3), ("none", 2), ("best:", 2), ("nowhere", 3)])
def test_what_cannot_be_pinned(trained: Path, run_cli: RunCli, reference: str, code: int) -> None:
    done = run_cli("pin", reference)
    assert done.code == code, done
    assert run_cli("unpin", "--json").document["was"] is None


def test_what_is_kept_and_pinned_is_shown(trained: Path, run_cli: RunCli) -> None:
    kept = run_cli("keep", "step:4", "--json")
    assert kept.code == 0, kept
    name = os.path.basename(kept.document["path"])
    assert run_cli("keep", "last", "--run", "demo", "--root", "runs").code == 0
    assert run_cli("pin", "best").code == 0
    shown = run_cli("status").stdout
    facts = {line.split()[0]: line for line in shown.splitlines()}
    assert name in facts["kept"]
    assert "best: " in facts["pin"]
    gone = run_cli("unkeep", "step:4", "--json")
    assert gone.document == {
        "run": "demo",
        "reference": "step:4",
        "was_kept": True,
        "path": kept.document["path"],
    }
    assert "did not keep" in run_cli("unkeep", "step:4").stdout
    assert run_cli("unkeep", "step:77").code == 3
    assert run_cli("keep", "none").code == 2
