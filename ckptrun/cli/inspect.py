"""``ckptrun inspect``: what is inside a checkpoint of any format, and whether training can go on from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptrun.cli import output
from ckptrun.cli.options import DebugOption, JsonOption
from ckptrun.inspect.deepspeed_files import in_words

if TYPE_CHECKING:
    from ckptrun.inspect.report import Report

MOST_TENSORS = 20
MOST_NAMES = 10
_LABEL_WIDTH = 12
_LONGEST_NAME = 70  # characters of a tensor's name, unless --all
_LINES = 500  # written at a time


def inspect(
    ckpt: Annotated[
        str,
        typer.Argument(
            metavar="CKPT", help="A checkpoint's folder, its state.ckpt, or any file of torch.save."
        ),
    ],
    json: JsonOption = False,
    every: Annotated[bool, typer.Option("--all", help="List every tensor, not just the largest 20.")] = False,
    debug: DebugOption = False,  # noqa: ARG001 - main() reads it
) -> None:
    """Show what is inside a checkpoint of any format.

    And whether training can go on from it. Nothing in the file is run, and torch is not needed.
    """
    from ckptrun.inspect.report import inspect_checkpoint

    report = inspect_checkpoint(ckpt)
    if json:
        for text in document_lines(report.as_dict()):
            output.say(text)
        return
    for line in render(report, every=every):
        output.say(line)


def document_lines(document: dict[str, Any]) -> Iterator[str]:
    """The JSON document with a line for each tensor, in pieces: there may be a hundred thousand of them."""
    from json import dumps

    yield "{"
    left = len(document)
    for key, value in document.items():
        left -= 1
        comma = "," if left else ""
        if key != "tensors" or not value:
            yield f"  {dumps(key)}: " + dumps(value, indent=2).replace("\n", "\n  ") + comma
            continue
        yield f"  {dumps(key)}: ["
        last = len(value) - 1
        for first in range(0, len(value), _LINES):
            chunk = enumerate(value[first : first + _LINES], first)
            yield "\n".join(f"    {dumps(tensor)}{'' if n == last else ','}" for n, tensor in chunk)
        yield f"  ]{comma}"
    yield "}"


def render(report: Report, *, every: bool) -> list[str]:
    """The report as lines of text; at most 20 tensors unless ``every``."""
    lines = [output.style(printable(report.path), "bold"), *_facts(report, every=every), ""]
    lines += output.table(
        ("part", "entries", "tensors", "size"),
        [
            (
                printable(name),
                str(part["num_entries"]),
                str(part["num_tensors"]),
                output.size(part["size_bytes"]) if part["size_bytes"] else "-",
            )
            for name, part in report.parts.items()
        ],
        right=(1, 2, 3),
    )
    shown = report.tensors if every else report.tensors[:MOST_TENSORS]
    if shown:
        lines += ["", *_tensors(report, len(shown), whole_names=every)]
    if len(shown) < len(report.tensors):
        lines.append(f"the {len(shown)} largest of {len(report.tensors)} tensors; --all lists every one")
    return lines


def _tensors(report: Report, count: int, *, whole_names: bool) -> list[str]:
    rows = []
    for name, tensor in report.tensors[:count]:
        shape = " × ".join("?" if size is None else str(size) for size in tensor.shape) or "scalar"
        dtype = tensor.dtype if tensor.layout == "strided" else f"{tensor.dtype} ({tensor.layout})"
        shown = printable(name)
        rows.append(
            (shown if whole_names else shortened(shown), shape, dtype, output.size(tensor.size_bytes))
        )
    return output.table(("tensor", "shape", "dtype", "size"), rows, right=(3,))


def _facts(report: Report, *, every: bool) -> list[str]:
    facts = [("format", _format(report))]
    if report.step is not None or report.epoch is not None:
        at = [
            f"{name} {value}"
            for name, value in (("step", report.step), ("epoch", report.epoch))
            if value is not None
        ]
        facts.append(("at", ", ".join(at)))
    if report.saved:
        facts.append(("saved", _saved(report)))
    if report.deepspeed is not None:
        facts.append(("deepspeed", printable(in_words(report.deepspeed))))
    metrics = {printable(name): value for name, value in report.metrics.items() if value is not None}
    if metrics:
        facts.append(("metrics", output.metrics_text(metrics, most=len(metrics) if every else 4)))
    if report.resumable:
        facts.append(("resumable", output.style("yes", "green")))
    else:
        facts.append(("resumable", f"{output.style('no', 'yellow')}; missing: {', '.join(report.missing)}"))
    facts.append(
        (
            "holds",
            "weights and optimizer in DeepSpeed's files"
            if report.deepspeed is not None
            else f"{report.num_parameters:,} parameters; {len(report.tensors)} tensors in all, "
            f"{output.size(report.size_bytes)}",
        )
    )
    facts += [
        (
            "wrapper",
            f"{w.prefix} in {w.num_names} names (saved inside {w.by}; to load it bare, take that out)",
        )
        for w in report.wrappers
    ]
    names = report.foreign_globals
    if names:
        shown = names if every else names[:MOST_NAMES]
        more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
        facts.append(
            (
                "names",
                f"{printable(', '.join(shown))}{more}: code that a load without weights_only=True runs",
            )
        )
    facts += [("note", notice) for notice in report.notices]
    return [f"{label:<{_LABEL_WIDTH}}{text}" for label, text in facts]


def _format(report: Report) -> str:
    name = report.format if report.format == report.container else f"{report.format} ({report.container})"
    versions = ", ".join(f"{label} {value}" for label, value in report.writer.items() if label != "byteorder")
    return printable(f"{name}; {versions}" if versions else name)


def _saved(report: Report) -> str:
    saved = report.saved
    facts = [f"save {saved['sequence']}"] if "sequence" in saved else []
    if "reason" in saved:
        facts.append(str(saved["reason"]))
    if isinstance(saved.get("saved_at"), (int, float)) and 0 < saved["saved_at"] < 1e11:
        facts.append(output.when(saved["saved_at"]))
    if "world_size" in saved and "strategy" in saved:
        facts.append(f"{saved['world_size']} rank(s), {saved['strategy']}")
    if saved.get("weights_only") is True:
        facts.append("weights only")
    return printable(", ".join(facts))


def shortened(text: str) -> str:
    """A long text without its middle."""
    if len(text) <= _LONGEST_NAME:
        return text
    half = _LONGEST_NAME // 2
    return f"{text[: half - 1]}…{text[-half:]}"


def printable(text: str) -> str:
    """Text from a file, with all that could steer a terminal written as an escape."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
