"""Versions, without importing what they are of."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata

from ckptrun._version import __version__
from ckptrun.environment import versions as module


def test_versions() -> None:
    assert module.versions() == {
        "python": platform.python_version(),
        "ckptrun": __version__,
        "torch": metadata.version("torch"),
        "numpy": metadata.version("numpy"),
    }


def test_what_is_not_installed_is_left_out(monkeypatch) -> None:
    monkeypatch.setattr(module, "PACKAGES", ("no-such-package-as-this",))
    assert set(module.versions()) == {"python", "ckptrun"}


def test_nothing_is_imported() -> None:
    code = (
        "import sys; from ckptrun.environment.versions import versions; versions(); "
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
