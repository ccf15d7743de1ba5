"""The list of commands, and how one is found."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import ckptrun
from ckptrun.cli import app
from ckptrun.cli.options import FnOptions
from ckptrun.config import support
from ckptrun.errors import UsageError

ENTRIES = {
    **app.COMMANDS,
    **{
        f"{name} {word}": entry
        for name, group in app.GROUPS.items()
        for word, entry in group.commands.items()
    },
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_help_in_the_table_is_the_docstrings_first_line(entry: app.Entry) -> None:
    doc = inspect.getdoc(app.load(entry))
    assert doc is not None
    assert entry.help == doc.splitlines()[0]


def test_help_imports_no_command(run_cli: Callable[..., Any]) -> None:
    code = (
        "import sys; from ckptrun.__main__ import main; main(['--help']);"
        "print('LOADED', *[m for m in sys.modules if m.startswith('ckptrun.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split("LOADED")[1].split())
    assert not loaded & {f"ckptrun.cli.{entry.module}" for entry in ENTRIES.values()}
    assert "ckptrun.cli.app" in loaded


def test_help_lists_every_command(run_cli: Callable[..., Any]) -> None:
    done = run_cli("--help")
    assert done.code == 0, done
    for name, entry in {**app.COMMANDS, **app.GROUPS}.items():
        assert f" {name} " in done.stdout
        assert entry.help in done.stdout


@pytest.mark.parametrize("name", app.GROUPS)
def test_help_of_a_group_lists_its_commands_and_no_others(name: str, run_cli: Callable[..., Any]) -> None:
    done, without = run_cli(name, "--help"), run_cli(name)
    assert (done.code, without.code) == (0, 2), (done, without)
    assert done.stdout == without.stdout
    for word, entry in app.GROUPS[name].commands.items():
        assert f" {word} " in done.stdout
        assert entry.help in done.stdout
    assert app.COMMANDS["fit"].help not in done.stdout


def test_no_command_shows_the_help_and_is_wrong_usage(run_cli: Callable[..., Any]) -> None:
    done = run_cli()
    assert done.code == 2, done
    assert "Usage: ckptrun" in done.stdout


def test_version(run_cli: Callable[..., Any]) -> None:
    done = run_cli("--version")
    assert (done.code, done.stdout) == (0, f"ckptrun {ckptrun.__version__}\n"), done


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("fitt", "fit"),
        ("reslove", "resolve"),
        ("stats", "status"),
        ("validat", "validate"),
        ("un-pin", "unpin"),
        ("slrum", "slurm"),
    ],
)
def test_a_mistyped_command_gets_the_nearest_name(typed: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        app.run([typed], None)
    assert typed in caught.value.message
    assert caught.value.hint == f"did you mean 'ckptrun {meant}'?"


def test_a_mistyped_command_of_a_group_gets_the_nearest_name() -> None:
    with pytest.raises(UsageError) as caught:
        app.run(["slurm", "sumbit"], None)
    assert caught.value.message == "ckptrun slurm has no command 'sumbit'"
    assert caught.value.hint == "did you mean 'ckptrun slurm submit'?"


def test_a_command_that_is_like_none(run_cli: Callable[..., Any]) -> None:
    done = run_cli("xyzzy")
    assert done.code == 2, done
    assert "there is no command 'xyzzy'" in done.stderr
    assert "ckptrun --help" in done.stderr


def test_a_mistyped_option_gets_the_nearest_name(run_cli: Callable[..., Any]) -> None:
    done = run_cli("fit", "--cpkt", "last")
    assert done.code == 2, done
    assert "--cpkt" in done.stderr
    assert "did you mean --ckpt?" in run_cli("fit", "--chkpt", "last").stderr
    assert "--ckpt" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_options(run_cli: Callable[..., Any], shell: str) -> None:
    def complete(words: str) -> str:
        env = {
            "_CKPTRUN_COMPLETE": f"complete_{shell}",
            "_TYPER_COMPLETE_ARGS": words,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        }
        return str(run_cli(env=env).stdout)

    assert "resolve" in complete("ckptrun re")
    assert "--allow-fallback" in complete("ckptrun fit --allow")
    assert "submit" in complete("ckptrun slurm su")
    assert "--gpus-per-node" in complete("ckptrun slurm submit --gpus")


def test_the_package_offers_its_names_lazily() -> None:
    code = (
        "import sys, ckptrun; assert 'torch' not in sys.modules;"
        "assert set(ckptrun.__all__) <= set(dir(ckptrun));"
        "from ckptrun import MisconfigurationException, StopTraining; assert 'torch' not in sys.modules;"
        "from ckptrun import Callback, DataModule, Module, Trainer; print(Module.__name__, Trainer.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "Module Trainer\n"), done.stderr


def test_an_unknown_name_of_the_package() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trianer'"):
        ckptrun.Trianer  # noqa: B018


@pytest.mark.parametrize("option", ["launcher", "strategy"])
def test_help_names_every_choice(option: str) -> None:
    key = {"launcher": "launch.launcher", "strategy": "strategy.name"}[option]
    annotation = FnOptions.__annotations__[option]
    for choice in support._AVAILABLE[key]:
        assert choice in annotation.__metadata__[0].help
