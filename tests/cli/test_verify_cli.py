"""`ckptrun verify`: a checkpoint by path and by reference, a run by name and by path, and what it says where."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from live_cli import Finished

Cli = Callable[..., Finished]


def flip(path: Path) -> None:
    """Change one byte in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_all_good(trained: Path, run_cli: Cli, snapshot: Callable[[Path], dict[str, bytes]]) -> None:
    before = snapshot(trained / "runs")
    whole = run_cli("verify")
    assert whole.code == 0, whole
    assert "2 checkpoints" in whole.stdout
    assert "all good" in whole.stdout
    by_name = run_cli("verify", "demo", "--root", "runs", "--json", cwd=trained)
    assert by_name.code == 0, by_name
    document = by_name.document
    assert (document["kind"], document["good"], document["leftovers"]) == ("run", True, [])
    assert {each["state"] for each in document["checkpoints"]} == {"good"}
    assert {os.path.basename(each["path"]) for each in document["files"]} == {
        "registry.json", "run.json", "lease.json", "status.json", "attempts.jsonl", "config.yaml",
    }  # fmt: skip
    assert snapshot(trained / "runs") == before


def test_damage_is_named_with_what_would_be_used_instead(trained: Path, run_cli: Cli) -> None:
    checkpoints = trained / "runs" / "demo" / "checkpoints"
    best, final = sorted(os.listdir(checkpoints))
    flip(checkpoints / final / "state.ckpt")
    whole = run_cli("verify", trained / "runs" / "demo")
    assert whole.code == 3, whole
    assert "not all good" in whole.stdout
    assert "found the checksum xxh3_64:" in whole.stderr
    assert f"--ckpt last would use {checkpoints}/{best}" in whole.stderr
    one = run_cli("verify", "last", "--json")
    assert one.code == 3, one
    document = one.document
    (found,) = document["checkpoints"]
    assert (document["kind"], found["name"], found["state"]) == ("checkpoint", final, "damaged")
    assert found["damage"][0]["file"] == "state.ckpt"
    assert found["damage"][0]["expected"] != found["damage"][0]["found"]
    assert document["instead"]["last"] == f"{checkpoints}/{best}"
    good = run_cli("verify", "best", "--run", "demo", "--root", "runs")
    assert good.code == 0, good


def test_what_was_mended_is_taken_out_of_quarantine(trained: Path, run_cli: Cli) -> None:
    run = trained / "runs" / "demo"
    final = sorted(os.listdir(run / "checkpoints"))[-1]
    state = run / "checkpoints" / final / "state.ckpt"
    flip(state)
    assert run_cli("validate", "--ckpt", "last").code == 0
    assert run_cli("verify", state.parent).code == 3
    assert set(json.loads((run / "registry.json").read_text())["quarantine"]) == {final}
    flip(state)
    mended = run_cli("verify", state.parent)
    assert mended.code == 0, mended
    assert f"{final} was found good and is out of quarantine" in mended.stderr
    assert json.loads((run / "registry.json").read_text())["quarantine"] == {}
    taken = run_cli("resolve", "--ckpt", "last", "--fn", "validate", "--json").document
    assert taken["path"] == str(state.parent)


def test_what_is_not_there(trained: Path, run_cli: Cli) -> None:
    for target, code, says in (
        ("nobody", 2, "neither a checkpoint nor a run"),
        ("runs/nobody", 3, "no checkpoint"),
        ("step:77", 3, "no checkpoint of step 77"),
        ("none", 2, "no checkpoint of ckptrun"),
    ):
        done = run_cli("verify", target)
        assert done.code == code, done
        assert says in done.stderr


def test_a_run_whose_checkpoints_are_gone_is_not_good(trained: Path, run_cli: Cli) -> None:
    checkpoints = trained / "runs" / "demo" / "checkpoints"
    best, final = sorted(os.listdir(checkpoints))
    shutil.rmtree(checkpoints / best)
    one = run_cli("verify")
    assert one.code == 0, one
    assert "1 checkpoint, " in one.stdout
    assert "all good; 1 more, known to the registry, gone" in one.stdout
    assert f"gone from the disk: {best}" in one.stderr
    shutil.rmtree(checkpoints / final)
    whole = run_cli("verify")
    assert whole.code == 3, whole
    assert "none of the 2 that the registry knows is there" in whole.stdout
    assert "all good" not in whole.stdout
