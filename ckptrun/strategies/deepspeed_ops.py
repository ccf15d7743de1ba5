"""Which operations of DeepSpeed have to be compiled on this machine before anything can be trained?

DeepSpeed compiles what it needs with g++ and ninja when it is first used, for half a minute or more, and nobody can
stop it: whoever imports what comes of it waits. So it is compiled here beforehand, by a process of its own that ends
at once when a stop comes, and it is said.

Facts: ``torch.utils.cpp_extension`` keeps what it compiles in a folder for each operation, where a file ``lock`` makes
the others wait; one that a killed compiler left there makes them wait for ever.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptrun.errors import MisconfigurationException
from ckptrun.processes import last_line, process_stat, run_unless_stopped

_LOCK = "lock"
_COMPILE = (
    "import os, sys\n"
    "from deepspeed.accelerator import get_accelerator\n"
    "get_accelerator().create_op_builder(sys.argv[1]).load(verbose=False)\n"
)


def find_ninja() -> None:
    """Put the ``ninja`` that was installed beside this Python on the path, where no other is there."""
    if shutil.which("ninja") is None:
        beside = os.path.dirname(sys.executable)
        if os.path.exists(os.path.join(beside, "ninja")):
            os.environ["PATH"] = f"{os.environ.get('PATH', '')}{os.pathsep}{beside}"


def not_compiled(config: Mapping[str, Any]) -> list[str]:
    """Names of the builders whose operation is needed for this config and was not compiled yet."""
    from deepspeed.accelerator import get_accelerator

    found = []
    for name in _needed(config, on_cpu=get_accelerator().device_name() == "cpu"):
        builder = get_accelerator().create_op_builder(name)
        if builder is None or not builder.is_compatible(verbose=False):
            continue  # DeepSpeed does without, or says itself what is missing
        folder = _folder(builder.name)
        sources = [builder.deepspeed_src_path(source) for source in builder.sources()]
        if _is_locked(folder) or not _is_built_from(folder, builder.name, sources):
            found.append(name)
    return found


def _is_built_from(folder: str, name: str, sources: Sequence[str]) -> bool:
    """Whether a library is there that ninja would not build anew when it is loaded: of these very sources, and of this
    torch. All environments of a user share the folder."""
    import torch

    try:
        with open(os.path.join(folder, "build.ninja"), encoding="utf-8") as file:
            told = file.read()
        built = os.stat(os.path.join(folder, f"{name}.so")).st_mtime
        versions = [*sources, os.path.join(os.path.dirname(torch.__file__), "version.py")]
        return all(os.stat(path).st_mtime <= built for path in versions) and all(s in told for s in sources)
    except OSError:
        return False


def _needed(config: Mapping[str, Any], *, on_cpu: bool) -> list[str]:
    names = ["ShareMemCommBuilder"] if on_cpu else []
    optimizer = config.get("optimizer") or {}
    kind = str(optimizer.get("type", "")).lower()
    offloaded = "offload_optimizer" in config.get("zero_optimization", {})
    if kind in ("adam", "adamw") and not optimizer.get("params", {}).get("torch_adam"):
        names.append("CPUAdamBuilder" if offloaded else "FusedAdamBuilder")
    elif kind == "lion":
        names.append("CPULionBuilder" if offloaded else "FusedLionBuilder")
    elif kind == "adagrad" and offloaded:
        names.append("CPUAdagradBuilder")
    elif kind == "lamb":
        names.append("FusedLambBuilder")
    return names


def forget_shared_memory(rank: int) -> None:
    """Take the name away from memory that ranks on one CPU share, once all have it: 66 MB each that nobody would ever
    take away, since no two runs meet at the same port."""
    where = f"{os.getuid()}_{os.environ.get('MASTER_ADDR', '')}_{os.environ.get('MASTER_PORT', '')}"
    try:
        os.unlink(f"/dev/shm/deepspeed_allreduce_buffer_{where}_{rank}")
    except OSError:
        pass  # they share none


def compile_op(name: str, stop_requested: Callable[[], bool]) -> bool:
    """Compile one builder's operation; False where a stop came first, which leaves nothing behind.

    Raises:
        MisconfigurationException: it does not compile.
    """
    from deepspeed.accelerator import get_accelerator

    folder = _folder(get_accelerator().create_op_builder(name).name)
    if _is_locked(folder) and not _somebody_compiles(folder):
        os.unlink(os.path.join(folder, _LOCK))
    was_locked = _is_locked(folder)
    done = None
    try:
        done = run_unless_stopped([sys.executable, "-c", _COMPILE, name], stop_requested)
    finally:
        if done is None and not was_locked:
            _unlock(folder)
    if done is None:
        return False
    code, said = done
    if code != 0:
        raise MisconfigurationException(
            f"DeepSpeed's operation {name.removesuffix('Builder')} does not compile: {last_line(said)}",
            hint="It needs g++, ninja and Python's headers; `ds_report` tells what is missing.",
        )
    return True


def _folder(name: str) -> str:
    from torch.utils.cpp_extension import _get_build_directory

    return str(_get_build_directory(name, verbose=False))


def _is_locked(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, _LOCK))


def _unlock(folder: str) -> None:
    try:
        os.unlink(os.path.join(folder, _LOCK))
    except FileNotFoundError:
        pass


def _somebody_compiles(folder: str) -> bool:
    """Whether a process of this machine works in that folder, or is about to."""
    began = time.time() - os.stat(folder).st_mtime
    if began < 2.0:
        return True
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.path.realpath(os.readlink(f"/proc/{pid}/cwd")) == os.path.realpath(folder):
                stat = process_stat(int(pid))
                return stat is not None
        except OSError:
            continue
    return False
