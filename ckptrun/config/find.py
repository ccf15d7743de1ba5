"""Which config files does this command read, and who named them?

Decision: the four places of the README's order, each asked in turn, and the answer says which one it was.
Turned down: looking for ``ckptrun.yaml`` upwards too, which would make what a command does depend on
folders nobody thinks of.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ckptrun.errors import ConfigError

How = Literal["flag", "CKPTRUN_CONFIG", "ckptrun.yaml", "pyproject.toml"]


@dataclass(frozen=True)
class FoundConfig:
    """The config files, and who named them: ``flag`` and ``CKPTRUN_CONFIG`` were given, the others found."""

    paths: tuple[str, ...]
    how: How

    @property
    def was_given(self) -> bool:
        """Whether the user asked for it now, so that it also beats the config stored with a run."""
        return self.how in ("flag", "CKPTRUN_CONFIG")


def find_config(explicit: Sequence[str], cwd: str, env: Mapping[str, str]) -> FoundConfig:
    """Return the config files: those of ``-c``, else of the environment, else found in ``cwd`` or above it.

    Raises:
        ConfigError: there is none, or a ``pyproject.toml`` on the way cannot be read.
    """
    if explicit:
        return FoundConfig(tuple(explicit), "flag")
    paths = tuple(path for path in env.get("CKPTRUN_CONFIG", "").split(os.pathsep) if path)
    if paths:
        return FoundConfig(paths, "CKPTRUN_CONFIG")
    if os.path.exists(os.path.join(cwd, "ckptrun.yaml")):
        return FoundConfig((_shown(os.path.join(cwd, "ckptrun.yaml"), cwd),), "ckptrun.yaml")
    folder = os.path.abspath(cwd)
    while True:
        project = os.path.join(folder, "pyproject.toml")
        if os.path.exists(project):
            named = _named_in(project)
            if named:
                found = (_shown(os.path.normpath(os.path.join(folder, path)), cwd) for path in named)
                return FoundConfig(tuple(found), "pyproject.toml")
        folder, child = os.path.dirname(folder), folder
        if folder == child:
            break
    raise ConfigError(
        "found no config: no -c, no CKPTRUN_CONFIG, no ckptrun.yaml here,"
        " and no pyproject.toml with [tool.ckptrun] config",
        hint="`ckptrun init` writes a small project with a config to start from.",
    )


def _named_in(project: str) -> list[str]:
    import tomllib

    try:
        with open(project, "rb") as file:
            document: dict[str, Any] = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", place=project) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"this is not TOML: {error}", place=project) from None
    tool = document.get("tool")
    section = tool.get("ckptrun") if isinstance(tool, dict) else None
    config = section.get("config") if isinstance(section, dict) else None
    paths = [config] if isinstance(config, str) else config
    if paths is None:
        return []
    if not isinstance(paths, list) or not paths or not all(isinstance(path, str) and path for path in paths):
        raise ConfigError(
            f"[tool.ckptrun] config is {config!r}, expected a path or a list of paths", place=project
        )
    return paths


def _shown(path: str, cwd: str) -> str:
    """Below the working folder a path is shown relative to it, which is shorter and opens as well."""
    relative = os.path.relpath(path, cwd)
    return path if relative.startswith("..") or os.path.abspath(cwd) != os.getcwd() else relative
