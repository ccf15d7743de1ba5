"""How does one begin? ``ckptrun init`` writes a project that runs as it stands, to be changed piece by piece.

    DIR/ckptrun.yaml    a complete, commented config
    DIR/task.py         the Module and DataModule that it names
    DIR/job.sbatch      the same for a cluster
    DIR/.gitignore      runs/ is not for version control

Decision: the files are whole and lie in ``templates/`` as the user gets them; they end in ``.txt`` there,
because they are data of this package and not modules of it. Nothing is asked, nothing is filled in. Turned
down: a questionnaire and placeholders, which give each user a file that no test has run.
"""

from __future__ import annotations

import os
import shlex
from typing import Annotated

import typer

from ckptrun.cli.options import DebugOption
from ckptrun.cli.output import say
from ckptrun.errors import UsageError

_TEMPLATES = {
    "ckptrun.yaml": "ckptrun.yaml.txt",
    "task.py": "task.py.txt",
    "job.sbatch": "job.sbatch.txt",
    ".gitignore": "gitignore.txt",
}


def init(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="The project's folder; made where it does not exist.")
    ] = ".",
    debug: DebugOption = False,  # noqa: ARG001 - main() reads it
) -> int:
    """Write a small working project to edit.

    It writes a commented config and the model and data that it trains. Nothing that exists is overwritten.
    """
    written = write_project(directory)
    say(f"wrote {', '.join(written)} in {os.path.abspath(directory)}")
    if ".gitignore" not in written:
        say("kept the .gitignore that is there; add the line 'runs/' to it")
    say("next:")
    if os.path.abspath(directory) != os.getcwd():
        say(f"    cd {shlex.quote(directory)}")
    say("    ckptrun fit --ckpt last    trains, in seconds; after a stop the same line goes on")
    say("    ckptrun test               measures the best checkpoint")
    say("then put your own model and data into task.py, and their arguments into ckptrun.yaml")
    return 0


def write_project(directory: str) -> list[str]:
    """Write the project's files and return their names. A ``.gitignore`` that exists is left as it is.

    Raises:
        UsageError: one of the other files exists, or the folder cannot be written; nothing was written then.
    """
    if os.path.lexists(directory) and not os.path.isdir(directory):
        raise UsageError(
            f"{directory} is not a folder.", hint="Name a folder, or one that is yet to be made."
        )
    existing = [name for name in _TEMPLATES if os.path.lexists(os.path.join(directory, name))]
    in_the_way = [name for name in existing if name != ".gitignore"]
    if in_the_way:
        raise UsageError(
            f"{', '.join(in_the_way)} {'exists' if len(in_the_way) == 1 else 'exist'} already in "
            f"{os.path.abspath(directory)}; nothing was written.",
            hint="Name another folder: ckptrun init DIR",
        )
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "templates")
    texts = {}
    for name in _TEMPLATES.keys() - existing:
        with open(os.path.join(folder, _TEMPLATES[name]), "rb") as file:
            texts[name] = file.read()
    wanted = [name for name in _TEMPLATES if name in texts]
    written: list[str] = []
    try:
        os.makedirs(directory, exist_ok=True)
        for name in wanted:
            # "x": what appeared since the look above is not overwritten either.
            with open(os.path.join(directory, name), "xb") as file:
                written.append(name)
                file.write(texts[name])
    except OSError as error:
        for name in written:
            os.unlink(os.path.join(directory, name))
        raise UsageError(
            f"{error.filename or directory}: {error.strerror or error}; nothing was written.",
            hint="Name a folder that you may write in: ckptrun init DIR",
        ) from error
    return wanted
