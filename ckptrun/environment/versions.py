"""Which versions take part?

Decision: the packages' metadata is read. Turned down: importing them, which takes seconds for torch and
fails in the commands that must work without it.
"""

from __future__ import annotations

import platform

from ckptrun._version import __version__

PACKAGES = ("torch", "numpy")


def versions() -> dict[str, str]:
    """Versions by name: python, ckptrun, torch, numpy. One that is not installed is left out."""
    from importlib import metadata  # 20 ms that the commands that only read need not pay

    found = {"python": platform.python_version(), "ckptrun": __version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found
