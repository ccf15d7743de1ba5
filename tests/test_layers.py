"""Does every module import only what lies below it, and do commands that do not train work without torch?

The order of the layers is the reading order in docs/structure.md; this is where it is held.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "ckptrun"

# Highest first; a layer may import itself and what stands on a later line.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("config",),
    ("trainer",),
    ("session",),
    ("resolve",),
    ("launch",),
    ("examples",),
    ("fit",),
    ("strategies",),
    ("checkpoint",),
    ("inspect",),
    ("run",),
    ("environment",),
    ("storage",),
    ("stop", "processes", "faults", "records", "deepspeed_config", "errors", "_version"),
)
# Lazy aliases for users, which may name anything.
EXEMPT = {"ckptrun", "ckptrun.callbacks", "ckptrun.loggers"}

HEAVY = {"torch", "numpy", "deepspeed", "jsonargparse", "fsspec", "sklearn", "tensorboard", "lightning"}
# The parts marked † in docs/structure.md: they may import torch and NumPy. All else answers without them.
MARKED = (
    "ckptrun.fit",
    "ckptrun.strategies",
    "ckptrun.examples",
    "ckptrun.trainer",
    # torch's own elastic agent, and the server that forks ranks with torch loaded.
    "ckptrun.launch.elastic_agent",
    "ckptrun.launch.fork_server",
    # What DeepSpeed's launcher starts, which makes the store that ranks meet at.
    "ckptrun.launch.deepspeed_rank",
    "ckptrun.launch.universal_convert",  # a process of its own
    "ckptrun.checkpoint.safe_classes",
    "ckptrun.checkpoint.safe_codec",
    "ckptrun.checkpoint.safe_state",
    "ckptrun.checkpoint.safe_values",
    "ckptrun.checkpoint.copy_room",
    "ckptrun.checkpoint.snapshot",
    "ckptrun.checkpoint.storages",
    "ckptrun.checkpoint.state_file",
)
ALLOWED_ELSEWHERE = {"jsonargparse": ("ckptrun.config",), "fsspec": ("ckptrun.storage",)}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["ckptrun", *path.relative_to(PACKAGE).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = path
    return found


def imports(path: Path, name: str, *, at_import_time: bool = False) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, also inside functions, with the line.

    Args:
        at_import_time: only those that are executed when the module is imported.
    """
    tree = ast.parse(path.read_text())
    later: set[ast.AST] = set()
    if at_import_time:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_type_checking(
                node
            ):
                later.update(ast.walk(node))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if node in later:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def layer_of(module: str) -> int | None:
    parts = module.split(".")
    if parts[0] != "ckptrun" or len(parts) == 1:
        return None
    for number, layer in enumerate(LAYERS):
        if parts[1] in layer:
            return number
    return None


def test_every_module_has_a_layer() -> None:
    homeless = [name for name in modules() if name not in EXEMPT and layer_of(name) is None]
    assert not homeless


def test_imports_only_go_down() -> None:
    wrong = []
    for name, path in modules().items():
        own = layer_of(name)
        if name in EXEMPT or own is None:
            continue
        for imported, line in imports(path, name):
            other = layer_of(imported)
            if other is not None and other < own:
                wrong.append(
                    f"{path.relative_to(PACKAGE.parent)}:{line}: {name} imports {imported}, which is higher"
                )
    assert not wrong, "\n".join(wrong)


def is_marked(name: str) -> bool:
    return any(name == part or name.startswith(part + ".") for part in MARKED)


def test_what_is_heavy_is_imported_where_it_is_allowed() -> None:
    wrong = []
    for name, path in modules().items():
        for imported, line in imports(path, name):
            top = imported.split(".")[0]
            if top in HEAVY and not is_marked(name) and not name.startswith(ALLOWED_ELSEWHERE.get(top, "-")):
                wrong.append(f"{path.relative_to(PACKAGE.parent)}:{line}: {name} imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_importing_a_module_that_is_not_marked_imports_nothing_heavy() -> None:
    """It may use a marked part inside a function; rich too is imported where it is used."""
    wrong = []
    for name, path in modules().items():
        if name in EXEMPT or is_marked(name):
            continue
        for imported, line in imports(path, name, at_import_time=True):
            if imported.split(".")[0] in {"rich", *HEAVY} or is_marked(imported.rpartition(".")[0]):
                wrong.append(f"{path.relative_to(PACKAGE.parent)}:{line}: {name} imports {imported}")
    assert not wrong, "\n".join(wrong)


# --- commands that do not train answer on a machine without torch ---------------------------------

BLOCKER = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "numpy", "deepspeed", "jsonargparse", "fsspec"}:
            raise ModuleNotFoundError(f"{name} must not be needed here", name=name)

sys.meta_path.insert(0, Blocked())
"""

CONFIG = """
run: {name: demo}
model: {class_path: somewhere.not_here.Model}
data: {class_path: somewhere.not_here.Data}
trainer: {max_steps: 3}
"""


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which torch, NumPy, deepspeed, jsonargparse and fsspec cannot be imported."""
    blocker = tmp_path / "blocker"
    blocker.mkdir()
    (blocker / "sitecustomize.py").write_text(BLOCKER)
    given = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{blocker}{os.pathsep}{given}" if given else str(blocker)}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A working folder with a config whose classes do not exist, and a run with one checkpoint."""
    folder = tmp_path / "project"
    checkpoint = folder / "runs" / "demo" / "checkpoints" / "00000001-step-00000003"
    checkpoint.mkdir(parents=True)
    (folder / "ckptrun.yaml").write_text(CONFIG)
    (checkpoint / "state.ckpt").write_bytes(b"x" * 10)
    manifest = {
        "format": 1, "run_id": "r", "attempt": 1, "sequence": 1, "parent": None, "line": [[1, 1]],
        "lease_epoch": 1, "step": 3, "epoch": 0, "fn": "fit", "exact": True, "reason": "final",
        "weights_only": False,
        "strategy": "single", "world_size": 1, "metrics": {}, "saved_at": 1.0, "save_s": 0.1, "versions": {},
        "files": [{"path": "state.ckpt", "size_bytes": 10, "checksum": "xxh3_64:0"}], "saved_for": [],
        "job": None, "callbacks": [], "loops": {},
    }  # fmt: skip
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    run_json = {
        "id": "r", "name": "demo", "created": "2026-01-01T00:00:00+00:00", "command": ["ckptrun", "fit"],
        "cwd": "/", "python": "3", "versions": {}, "git": None,
    }  # fmt: skip
    (folder / "runs" / "demo" / "run.json").write_text(json.dumps(run_json))
    return folder


def test_the_blocker_blocks(without_torch: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import torch"], env=without_torch, capture_output=True, check=False
    )
    assert done.returncode != 0
    assert b"must not be needed here" in done.stderr


@pytest.mark.parametrize(
    ("args", "codes"),
    [
        (("--help",), {0}),
        (("--version",), {0}),
        (("fit", "--help"), {0}),
        (("resolve", "--ckpt", "last"), {0}),
        (("resolve", "--ckpt", "best", "--json"), {2}),
        (("fit", "--dry-run", "--ckpt", "last"), {0}),
        (("fit", "--print-config"), {0}),
        (("validate", "--dry-run", "--ckpt", "step:3"), {0}),
        (("status", "demo"), {0}),
        (("status", "--json"), {0}),
        (("runs",), {0}),
        (("pin", "step:3"), {0}),
        (("unpin",), {0}),
        (("keep", "step:3"), {0}),
        (("unkeep", "step:3"), {0}),
        (("verify", "demo"), {3}),
        (("save", "demo"), {2}),
        (("stop", "demo"), {2}),
        (("init", "fresh"), {0}),
        (("slurm", "script", "--nodes", "2", "--", "--account=x"), {0}),
        (("inspect", "runs/demo/checkpoints/00000001-step-00000003"), {0, 3}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_commands_that_do_not_train_need_no_torch(
    args: tuple[str, ...], codes: set[int], without_torch: dict[str, str], project: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ckptrun", *args],
        cwd=project,
        env=without_torch,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode in codes, f"{args}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert "must not be needed here" not in done.stderr
    assert "internal error" not in done.stderr
