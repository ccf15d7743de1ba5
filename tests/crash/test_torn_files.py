"""A file of the run that a disk has cut off, or a disk that is full: the same line goes on, or says clearly why not."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crash_play import committed, look, make_project, picture, same

pytestmark = pytest.mark.crash

LINE = ("fit", "-c", "demo.yaml", "--ckpt", "last")


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run that all tests start from is, once it was made: stopped half-way, after an earlier kill."""
    return tmp_path_factory.mktemp("base") / "project"


@pytest.fixture
def stopped(made_once: Path, start_cli: Callable[..., Any], tmp_path: Path) -> Path:
    """A project of its own whose run was killed at a save, and killed again at a later one."""
    if not made_once.exists():
        make_project(made_once)
        for point in ("commit:start:4", "commit:start:8"):
            done = start_cli(*LINE, cwd=made_once, env={"CKPTRUN_FAULT": f"{point}=kill"}).wait()
            assert done.code == -9, done
    return Path(shutil.copytree(made_once, tmp_path / "project"))


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """The end of a run that nothing happened to, once it was made."""
    return {}


def assert_ends_rightly(
    project: Path,
    run_cli: Callable[..., Any],
    undisturbed: dict[str, Any],
    tmp_path: Path,
    *,
    damaged: Path | None = None,
) -> Any:
    """The same line again, and its end compared with that of a run that nothing happened to.

    Args:
        damaged: a checkpoint that is still there afterwards, and is not looked at.
    """
    if not undisturbed:
        plain = make_project(tmp_path / "undisturbed")
        assert run_cli(*LINE, cwd=plain).code == 0
        undisturbed.update(picture(plain))
    done = run_cli(*LINE, cwd=project)
    assert done.code == 0, done
    assert "Traceback" not in done.stderr, done
    if damaged is not None:
        shutil.rmtree(damaged)
    # A torn line of the ledger stays where it is, and is passed over.
    assert [line for line in look(project, None) if "attempts.jsonl" not in line] == []
    found = picture(project)
    different = [name for name in _COMPARED if not same(found[name], undisturbed[name])]
    assert not different, done
    again = run_cli("resolve", *LINE[1:], "--json", cwd=project)
    assert Path(again.document["path"]).name == max(committed(project)), again
    return done


_COMPARED = ("weights", "optimizer states", "lr schedulers", "random states", "metrics.csv")


def cut(path: Path, rng: random.Random) -> None:
    """Take away the end of a file, at least one byte and often all of it."""
    os.truncate(path, rng.choice((0, rng.randrange(path.stat().st_size), path.stat().st_size - 2)))


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("registry.json", 1),
        ("status.json", 2),
        ("lease.json", 3),
        ("attempts.jsonl", 4),
        ("logs/metrics.csv", 6),
    ],
)
def test_a_small_file_is_torn(
    name: str,
    seed: int,
    stopped: Path,
    run_cli: Callable[..., Any],
    undisturbed: dict[str, Any],
    tmp_path: Path,
) -> None:
    path = stopped / "runs/demo" / name
    rng = random.Random(seed)
    if name == "attempts.jsonl":
        os.truncate(path, path.stat().st_size - rng.randrange(2, 60))  # only the last line can be torn
    elif name == "logs/metrics.csv":
        # A row that was being written; rows before the checkpoint are of the past, and said to be lost.
        with path.open("a") as file:
            file.write("9,0,0.")
    else:
        cut(path, rng)
    before = max(committed(stopped))
    done = assert_ends_rightly(stopped, run_cli, undisturbed, tmp_path)
    assert before in done.stderr


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["manifest.json", "state.ckpt", "rank-0000.ckpt"])
def test_a_file_of_the_newest_checkpoint_is_torn(
    name: str,
    seed: int,
    stopped: Path,
    run_cli: Callable[..., Any],
    undisturbed: dict[str, Any],
    tmp_path: Path,
) -> None:
    """It is turned down with its reason, the one before it is taken, and the run ends as it should."""
    folder = stopped / "runs/demo/checkpoints"
    before, newest = sorted(committed(stopped))[-2:]
    cut(folder / newest / name, random.Random(f"{name} {seed}"))
    done = run_cli("resolve", *LINE[1:], "--json", cwd=stopped)
    assert done.code == 0, done
    assert Path(done.document["path"]).name == before
    (turned_down,) = (each for each in done.document["candidates"] if Path(each["path"]).name == newest)
    assert turned_down["verdict"] not in ("taken", "not reached"), turned_down
    if seed == 0:
        assert_ends_rightly(stopped, run_cli, undisturbed, tmp_path, damaged=folder / newest)


def test_the_stored_config_is_torn(
    stopped: Path, run_cli: Callable[..., Any], undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    path = stopped / "runs/demo/config.yaml"
    whole, before = path.read_bytes(), committed(stopped)
    for size in (len(whole) // 3, 0):
        path.write_bytes(whole[:size])
        done = run_cli(*LINE, cwd=stopped)
        assert done.code in (2, 5), done  # no YAML, or a part of it that differs from what is given
        _assert_one_clear_error(done, "config")
    assert committed(stopped) == before
    path.unlink()  # as the hint says
    assert_ends_rightly(stopped, run_cli, undisturbed, tmp_path)


def test_the_runs_identity_is_torn(
    stopped: Path, run_cli: Callable[..., Any], undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """Whose checkpoints these are is not known then; the manifests say it, and the message says so."""
    path = stopped / "runs/demo/run.json"
    whole, before = path.read_bytes(), committed(stopped)
    cut(path, random.Random(1))
    done = run_cli(*LINE, cwd=stopped)
    assert done.code == 2, done
    _assert_one_clear_error(done, "run.json")
    assert committed(stopped) == before
    path.write_bytes(whole)
    assert_ends_rightly(stopped, run_cli, undisturbed, tmp_path)


def _assert_one_clear_error(done: Any, about: str) -> None:
    errors = [line for line in done.stderr.splitlines() if line.startswith("ckptrun: error:")]
    assert len(errors) == 1 and about in errors[0], done
    assert "hint:" in done.stderr and "Traceback" not in done.stderr, done


# -- a full disk ---------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A disk that has room for a few checkpoints and no more; None where this process may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    yield folder if mounted.returncode == 0 else None
    if mounted.returncode == 0:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("policy", ["retry", "warn", "stop"])
def test_a_full_disk(
    policy: str,
    small_disk: Path | None,
    run_cli: Callable[..., Any],
    undisturbed: dict[str, Any],
    tmp_path: Path,
) -> None:
    """The save fails, what was saved stays, no temporary file does, and with room again the run goes on."""
    project = make_project((small_disk or tmp_path) / "project")
    options = (f"run.on_save_error={policy}", "trainer.max_steps=10")
    first = run_cli(*LINE, options[0], cwd=project, env={"CKPTRUN_FAULT": "commit:start:3=kill"})
    assert first.code == -9, first
    saved = committed(project)
    assert saved
    env = {}
    if small_disk is None:
        env = {"CKPTRUN_FAULT": "commit:file-half:1+=raise:ENOSPC"}
    else:
        _fill(small_disk, but=16 << 10)
    done = run_cli(*LINE, *options, cwd=project, env=env)
    assert done.code == 1, done
    assert "No space left on device" in done.stderr, done
    assert "Traceback" not in done.stderr, done
    assert committed(project) == saved
    assert look(project, None) == []
    assert [name for name in os.listdir(project / "runs/demo/checkpoints") if name.startswith(".")] == []
    assert ("step 10" in done.stderr) == (policy != "stop"), done
    assert ("Trying again" in done.stderr) == (policy == "retry"), done
    if small_disk is not None:
        (small_disk / "filler").unlink()
    assert_ends_rightly(project, run_cli, undisturbed, tmp_path)


def _fill(disk: Path, *, but: int) -> None:
    """Take all room but a little."""
    stat = os.statvfs(disk)
    (disk / "filler").write_bytes(b"x" * max(0, stat.f_bavail * stat.f_frsize - but))
