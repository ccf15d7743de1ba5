"""Which run is this command about, and which config holds for it?

Decision: one place answers for all commands, in the README's order (flags, then the config, then defaults), so
that ``status`` looks where ``fit`` writes. A config is only looked for where it is needed: a run that is
named together with its root needs none. Turned down: a default config file for every command, which makes
``status`` fail in a folder without one.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptrun.cli.options import FnOptions
from ckptrun.cli.output import note
from ckptrun.config.find import FoundConfig, find_config
from ckptrun.config.load import load_config
from ckptrun.config.run_config import RunConfig
from ckptrun.environment.slurm import array_task, job_facts
from ckptrun.errors import ConfigError, UnknownRunError, UsageError
from ckptrun.records import Fn, JobFacts
from ckptrun.run.folder import RunFolder
from ckptrun.run.submitted import read_submitted


@dataclass(frozen=True)
class Settled:
    """What one fn command, or ``resolve`` on its behalf, is about."""

    fn: Fn
    config: RunConfig
    folder: RunFolder
    name_was_given: bool
    job: JobFacts | None


def settle_fn(fn: Fn, options: FnOptions, env: Mapping[str, str]) -> Settled:
    """Find and read the config of an fn command, and name its run.

    Evaluation of a run that has a stored config uses that one, unless a config was given now; one that was
    only found names the run and its root.

    Raises:
        ConfigError: no config, or something wrong in it.
    """
    slurm_env = {} if options.no_slurm else env
    task = array_task(slurm_env)
    overrides = options.overrides or ()
    flags = _flags(options)
    # An evaluation may do without: a run that is named has the config it was trained with.
    found = _find(options.config, env, optional=fn != "fit" and options.run is not None)
    if found.was_given or fn == "fit":
        config = _load(found, overrides, flags, env)
        name, given = config.run_name(task), config.name_was_given
    else:
        naming = [text for text in overrides if text.startswith("run.")]
        names = _load(found, naming, flags, env)
        name, given = names.run_name(task), names.name_was_given
        if options.run is not None and not RunFolder.at(names.root, name).exists():
            raise UnknownRunError(
                f"there is no run {name!r} under {names.root}",
                hint=_near(names.root, name)
                or "'ckptrun runs' lists the runs of a root; --root names another one.",
            )
        stored = RunFolder.at(names.root, name).config_yaml
        if _is_there(stored):
            whose = {**flags, "run.name": name, "run.root": names.root}
            if flags["launch.nnodes"] is None and not any(o.startswith("launch.nnodes=") for o in overrides):
                # However many hosts it was trained on: nobody else has been started now.
                whose |= {"launch.nnodes": 1, "launch.rdzv_endpoint": options.rdzv_endpoint or ""}
            config = _load(FoundConfig((stored,), "flag"), overrides, whose, env)
        elif found.paths:
            config = _load(found, overrides, flags, env)
        else:
            raise UnknownRunError(
                f"there is no run {name!r} under {names.root}, and no config to evaluate with",
                hint=_near(names.root, name) or "Give its root with --root, or a config with -c.",
            )
    for text in config.notices:
        note(f"ckptrun: {text}")
    return Settled(fn, config, RunFolder.at(config.root, name), given, job_facts(slurm_env))


def named_once(argument: str | None, option: str | None) -> str | None:
    """The run that is named as ``RUN`` or with ``--run``.

    Raises:
        UsageError: both are given and differ.
    """
    if argument is not None and option is not None and argument != option:
        raise UsageError(f"two runs are named: {argument!r} and --run {option!r}", hint="Name one.")
    return argument if argument is not None else option


def settle_run(
    run: str | None,
    root: str | None,
    config: list[str] | None,
    env: Mapping[str, str],
    *,
    or_submitted: bool = False,
) -> RunFolder:
    """The folder of the run that a command about a run means; it exists.

    Args:
        run: the name given, None for that of the config.
        root: the root given, None for that of the config, or ``./runs`` where a run is named and there is
        none.
        or_submitted: it may also be a run for which a job was handed in.

    Raises:
        UnknownRunError: there is no such run.
        ConfigError: no run is named and there is no config either, or something is wrong in it.
    """
    if run is None or root is None:
        named = _load(_find(config, env, optional=run is not None), (), {"run.root": root}, env)
        run = run if run is not None else named.run_name(array_task(env))
        root = named.root
    folder = RunFolder.at(root, run)
    if not folder.exists() and not (or_submitted and read_submitted(folder)):
        raise UnknownRunError(
            f"there is no run {run!r} under {root}",
            hint=_near(root, run) or "'ckptrun runs' lists the runs of a root; --root names another one.",
        )
    return folder


def settle_root(root: str | None, config: list[str] | None, env: Mapping[str, str]) -> str:
    """The folder that holds runs: ``--root``, else the config's, else ``./runs``.

    Raises:
        ConfigError: a config that was found or given is wrong.
        UsageError: the root is a URL.
    """
    if root is None:
        root = _load(_find(config, env, optional=True), (), {}, env).root
    if "://" in root:
        raise UsageError(
            f"the root {root} is a URL; remote roots are not available in this version",
            hint="Give a local folder with --root.",
        )
    return root


def _find(config: list[str] | None, env: Mapping[str, str], *, optional: bool) -> FoundConfig:
    """The config files; no paths where there are none and they are optional."""
    try:
        return find_config(config or (), os.getcwd(), env)
    except ConfigError as error:
        if not optional or error.place is not None:  # with a place, a file is wrong; without, there is none
            raise
        return FoundConfig((), "ckptrun.yaml")


def _load(
    found: FoundConfig, overrides: Sequence[str], flags: Mapping[str, Any], env: Mapping[str, str]
) -> RunConfig:
    return load_config(files=found.paths, overrides=overrides, flags=flags, env=env, how=found.how)


def _is_there(path: str) -> bool:
    """Whether there is such a file; an error of the disk is an error and never "not there"."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UsageError(f"the run's config {path} cannot be read: {error.strerror}") from error
    return True


def _flags(options: FnOptions) -> dict[str, Any]:
    """The options that are config values, under their keys; the config types them and says where they are
    wrong."""
    return {
        "run.name": options.run,
        "run.root": options.root,
        "strategy.name": options.strategy,
        "launch.launcher": options.launcher,
        "launch.nproc": _number(options.nproc),
        "launch.nnodes": _number(options.nnodes),
        "launch.rdzv_endpoint": options.rdzv_endpoint,
        "launch.grace_s": _number(options.grace_s),
        "launch.time_limit": _number(options.time_limit),
        "launch.max_restarts": _number(options.max_restarts),
        "launch.hang_timeout_s": _number(options.hang_timeout_s),
    }


def _number(text: str | None) -> int | float | str | None:
    """The number that a text is, else the text."""
    for kind in (int, float):
        try:
            return None if text is None else kind(text)
        except ValueError:
            continue
    return text


def _near(root: str, name: str) -> str | None:
    """A hint with the runs under the root that are named most like ``name``."""
    try:
        names = [entry.name for entry in os.scandir(os.path.expanduser(root)) if entry.is_dir()]
    except OSError:
        return None  # the message says what is missing; this is only a help to find it
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    return f"Did you mean {' or '.join(near)}?" if near else None
