"""Which default does an argument of the user's class have, in its source alone?

Decision: read and never imported, for the commands that ask start nothing, may run where torch is missing, and answer
at once. What the source does not say plainly is not known. Turned down: importing the class, which runs the user's
code.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_DEPTH = 8  # of classes above it, and of modules that hand its name on


def default_in_source(class_path: str, argument: str, *, folder: str | None = None) -> Any:
    """The default of ``argument`` of the class's ``__init__``, or of the nearest one above it that names it.

    None where the source is not found, or does not have it as a plain value.

    Args:
        folder: where the user's modules are; the working folder when None.
    """
    module, _, name = class_path.rpartition(".")
    return _default(module, name, argument, folder or os.getcwd(), _DEPTH)


def find_module(module: str, folder: str) -> ModuleSpec | None:
    """Where a module is that is looked for in ``folder`` and among the installed ones; imports nothing."""
    # Python itself may have put the working folder in front, which is another one where the module will be imported.
    others = sys.path[1:] if sys.path and sys.path[0] in ("", os.getcwd()) else sys.path
    places: Sequence[str] | None = [folder, *others]
    found: ModuleSpec | None = None
    name = ""
    for part in module.split("."):
        if places is None:
            return None
        top, name = not name, f"{name}.{part}" if name else part
        found = PathFinder.find_spec(name, places)
        if found is None and top:  # one that is loaded need not lie in the path: an editable install
            found = getattr(sys.modules.get(name), "__spec__", None)
        if found is None:
            return None
        places = found.submodule_search_locations
    return found


def _default(module: str, name: str, argument: str, folder: str, depth: int) -> Any:
    tree = _parsed(module, folder) if depth and module else None
    if tree is None:
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _of_class(node, module, argument, folder, depth)
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _default(node.module, alias.name, argument, folder, depth - 1)
    return None


def _of_class(node: ast.ClassDef, module: str, argument: str, folder: str, depth: int) -> Any:
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            arguments = each.args
            plain = [*arguments.posonlyargs, *arguments.args]
            defaults = dict(zip((a.arg for a in reversed(plain)), reversed(arguments.defaults), strict=False))
            by_name = zip((a.arg for a in arguments.kwonlyargs), arguments.kw_defaults, strict=True)
            defaults |= {name: value for name, value in by_name if value is not None}
            if argument in defaults:
                return _value(defaults[argument])
            if arguments.kwarg is None:
                return None  # it takes no such argument
    for base in node.bases:
        if isinstance(base, ast.Name):
            found = _default(module, base.id, argument, folder, depth - 1)
            if found is not None:
                return found
    return None


def _parsed(module: str, folder: str) -> ast.Module | None:
    spec = find_module(module, folder)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        with open(spec.origin, "rb") as file:
            return ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return None


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
