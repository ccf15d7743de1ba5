"""What an attempt that died leaves behind goes; what others wrote stays."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from ckptrun.run import control
from ckptrun.run.folder import RunFolder
from ckptrun.run.sweep import sweep

DEAD = 1 << 22


def test_leftovers_go_and_everything_else_stays(tmp_path: Path) -> None:
    folder = RunFolder.at(str(tmp_path), "demo")
    assert sweep(folder) == []
    folder.create()
    stays = [
        f"{folder.path}/.status.json.tmp-{os.getpid()}",  # somebody is writing it
        f"{folder.path}/.registry.json.tmp-{os.getpid()}-{threading.get_native_id()}",
        f"{folder.path}/.lease.lock",
        f"{folder.path}/run.json",
        f"{folder.path}/notes.tmp-1",
        f"{folder.control_dir}/mine.save.json",
    ]
    goes = [
        f"{folder.path}/.status.json.tmp-{DEAD}-7",
        f"{folder.path}/.status.json.tmp-{os.getpid()}-{DEAD}",  # another process has that number now
        f"{folder.control_dir}/.a.save.json.tmp-{DEAD}",
    ]
    for path in stays + goes:
        Path(path).write_text("")
    asked = [control.ask(folder, "save"), control.ask(folder, "stop")]
    control.answer(folder, asked[0], {"state": "done"})
    goes += [f"{folder.control_dir}/{asked[0]}.{what}.json" for what in ("save", "answer")]
    goes += [f"{folder.control_dir}/{asked[1]}.stop.json"]
    assert sorted(sweep(folder)) == sorted(goes)
    assert all(Path(path).exists() for path in stays)
    assert control.take(folder) == []
    assert sweep(folder) == []
