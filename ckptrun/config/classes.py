"""Which class does a ``class_path`` name, and whose fault is it where there is none?

Decision: the class is imported here, before any library that builds it sees the path, so that an error
inside the user's module keeps its traceback and a wrong name gets the nearest right one. Turned down:
leaving the import to jsonargparse, which turns both into one flat word.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Iterable
from types import ModuleType, TracebackType
from typing import Any

from ckptrun.config.nearest import did_you_mean, nearest
from ckptrun.errors import CkptrunError, ConfigError

_HOMES = ("ckptrun.callbacks", "ckptrun.loggers")
# Frames of these are between the user's code and ours and explain nothing.
_MACHINERY = tuple(
    f"{os.sep}{folder}{os.sep}" for folder in ("importlib", "jsonargparse", f"ckptrun{os.sep}config")
)


class UserCodeError(Exception):
    """The user's own module or class raised; ``original`` is shown with its traceback, exit code 1.

    Args:
        original: what was raised; the frames before the user's own are taken off its traceback.
        doing: what was being done, e.g. ``importing the module tasks.gpt``.
    """

    exit_code = 1

    def __init__(self, original: BaseException, doing: str) -> None:
        super().__init__(f"{type(original).__name__} while {doing}: {original}")
        self.original = original.with_traceback(_from_user_code(original.__traceback__))
        self.doing = doing


def _from_user_code(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith("<frozen importlib") and not any(part in file for part in _MACHINERY):
            break
        traceback = traceback.tb_next
    return traceback


def look_in_working_folder() -> None:
    """Let classes be found in the working folder first, from now on: loader workers look for them too."""
    folder = os.getcwd()
    if not sys.path or sys.path[0] not in ("", folder):
        sys.path.insert(0, folder)


def import_class(class_path: str, *, place: str | None, base: type | None = None) -> type:
    """Return the class that ``package.module.Class`` names, from the working folder or an installed package.

    Args:
        place: where the class path was given, for messages.
        base: what it must be a subclass of.

    Raises:
        ConfigError: there is no such module or class, with the nearest right name, or it is no class of
            that kind.
        UserCodeError: the module is there and raised while it was imported.
    """
    look_in_working_folder()
    parts = class_path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(
            f"class_path {class_path!r} is no dotted name, expected package.module.Class",
            place=place,
            hint=_known_under_other_name(parts[-1]) or "Write the module too, e.g. tasks.gpt.GPT.",
        )
    module, rest = _import_longest(parts, place)
    found: Any = module
    for index, name in enumerate(rest):
        try:
            found = getattr(found, name)
        except AttributeError:
            owner = ".".join(parts[: len(parts) - len(rest) + index])
            raise _unknown_name(found, owner, name, parts[-1], place) from None
        except CkptrunError:
            raise
        except Exception as error:  # a module may import lazily, in __getattr__
            raise UserCodeError(error, f"importing {class_path}") from error
    if not inspect.isclass(found):
        kind = "a module" if isinstance(found, ModuleType) else f"a {type(found).__name__}"
        hint = _classes_hint(found, class_path) if isinstance(found, ModuleType) else None
        raise ConfigError(f"{class_path} is {kind}, expected a class", place=place, hint=hint)
    if base is not None and not issubclass(found, base):
        raise ConfigError(
            f"{class_path} is not a subclass of {_public_name(base)}, which is expected here", place=place
        )
    return found


def _import_longest(parts: list[str], place: str | None) -> tuple[ModuleType, list[str]]:
    """Import the longest beginning of the path that is a module; return it with the names left."""
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        try:
            return importlib.import_module(name), parts[length:]
        except ModuleNotFoundError as error:
            # Ours only where what was not found is a beginning of the path; else the module itself lacks
            # something.
            if error.name is None or not (name + ".").startswith(error.name + "."):
                raise UserCodeError(error, f"importing the module {name}") from error
        except CkptrunError:
            raise
        except (Exception, SystemExit) as error:  # a script that exits has no `if __name__ == "__main__"`
            raise UserCodeError(error, f"importing the module {name}") from error
    hint = _known_under_other_name(parts[-1]) or _near_module(parts)
    where = "classes are looked for in the working folder and in installed packages"
    raise ConfigError(f"there is no module '{parts[0]}': {where}", place=place, hint=hint)


def _near_module(parts: list[str]) -> str | None:
    import pkgutil

    rest = "." + ".".join(parts[1:])
    for paths in ([os.getcwd()], None):
        names = [module.name for module in pkgutil.iter_modules(paths) if not module.name.startswith("_")]
        found = nearest(parts[0], names)
        if found is not None:
            return f"Did you mean {found}{rest}?"
    return None


def _unknown_name(owner: Any, path: str, name: str, last: str, place: str | None) -> ConfigError:
    if not isinstance(owner, ModuleType):
        hint = did_you_mean(name, _public(owner), prefix=path + ".")
        return ConfigError(f"{path} has no {name!r}", place=place, hint=hint)
    submodules: list[str] = []
    if hasattr(owner, "__path__"):
        import pkgutil

        submodules = [module.name for module in pkgutil.iter_modules(owner.__path__)]
    if name != last:  # a module in the middle of the path
        hint = did_you_mean(name, [*submodules, *_public(owner)], prefix=path + ".")
        return ConfigError(f"there is no module '{path}.{name}'", place=place, hint=hint)
    if name in submodules:
        hint = f"Write the class too: {path}.{name}.Class."
        return ConfigError(f"{path}.{name} is a module, expected a class", place=place, hint=hint)
    hint = did_you_mean(name, _public(owner), prefix=path + ".") or _known_under_other_name(name)
    return ConfigError(
        f"the module {path} has no class {name!r}", place=place, hint=hint or _classes_hint(owner, path)
    )


def _public(owner: Any) -> list[str]:
    listed = getattr(owner, "__all__", None) or dir(owner)
    return [name for name in listed if not name.startswith("_")]


def _classes_hint(module: ModuleType, path: str) -> str | None:
    names = [
        name
        for name in _public(module)
        if inspect.isclass(value := vars(module).get(name)) and value.__module__.startswith(module.__name__)
    ]
    return f"Classes of {path}: {', '.join(names[:12])}." if names else None


def _known_under_other_name(name: str) -> str | None:
    """``ModelCheckpoint`` alone, or another library's path to it: where the class is here."""
    known: dict[str, str] = {}
    for home in _HOMES:
        try:
            known.update((each, home) for each in _public(importlib.import_module(home)))
        except ImportError:
            continue
    found = nearest(name, known)
    return None if found is None else f"Did you mean {known[found]}.{found}?"


def _public_name(cls: type) -> str:
    """A class as users import it: ``ckptrun.Module`` rather than where it is defined."""
    top = cls.__module__.partition(".")[0]
    names: Iterable[str] = getattr(sys.modules.get(top), "__all__", ())
    return f"{top}.{cls.__name__}" if cls.__name__ in names else f"{cls.__module__}.{cls.__qualname__}"
