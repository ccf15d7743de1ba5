"""Which label does a filename template give at this step? ``{epoch}-{loss:.2f}`` gives ``epoch=3-loss=0.25``.

Decision: the template is parsed once, by Python's own format parser, and tried out when the callback is made,
so a wrong one is refused before the first step and not at the first save, hours later. Turned down: replacing
names in the string by regular expressions, where ``{loss}`` also hits ``{loss_test}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter

from ckptrun.errors import MisconfigurationException

Number = int | float


class FilenameTemplate:
    """A template with metric names in braces, each with an optional format as ``str.format`` has it.

    Args:
        template: for example ``"{epoch}-{step}-{val/loss:.2f}"``.
        auto_insert_metric_name: put ``name=`` before each value.

    Raises:
        MisconfigurationException: a brace is not closed, a name is empty, or a format fits no number.
    """

    def __init__(self, template: str, *, auto_insert_metric_name: bool = True) -> None:
        self._auto_insert = auto_insert_metric_name
        try:
            # (literal, None, None, None) is the text after the last brace; conversions (!r) are passed over.
            self._parts = [(text, name, spec or "") for text, name, spec, _ in Formatter().parse(template)]
        except ValueError as error:
            raise MisconfigurationException(
                f"ModelCheckpoint(filename={template!r}): {error}.",
                hint="Write metric names in braces, such as '{epoch}-{val_loss:.2f}'.",
            ) from None
        for _, name, spec in self._parts:
            if name is not None and (not name or not _fits_a_number(spec)):
                raise MisconfigurationException(
                    f"ModelCheckpoint(filename={template!r}): {{{name}:{spec}}} is not the name "
                    "of a metric with a format for numbers.",
                    hint="Write metric names in braces, such as '{epoch}-{val_loss:.2f}'.",
                )

    def format(self, metrics: Mapping[str, Number]) -> str:
        """The label. A metric that is missing counts as 0, as in Lightning."""
        out = []
        for text, name, spec in self._parts:
            out.append(text)
            if name is not None:
                value = _format(metrics.get(name, 0), spec)
                out.append(f"{name}={value}" if self._auto_insert else value)
        return "".join(out)


def _format(value: Number, spec: str) -> str:
    try:
        return format(value, spec)
    except ValueError:  # {acc:d} of 1.0, {step:.1f} is fine; {loss:d} of nan ends here too
        try:
            return format(int(value), spec)
        except (ValueError, OverflowError):
            return str(value)


def _fits_a_number(spec: str) -> bool:
    for number in (0, 0.0):
        try:
            format(number, spec)
        except ValueError:
            continue
        return True
    return False
