"""What do ranks import, and how is it imported in the least time?

Decision: the garbage collector pauses meanwhile. What imports make stays for good, and looking through it again and
again takes a quarter of the time. Where nothing else has been made yet, ``gc.freeze()`` has it left alone afterwards
too: in a process that forks, or whose loader workers are forked, looking at it would copy its pages.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator, Sequence

FOR_THE_AGENT = ("torch", "torch.distributed", "ckptrun.launch.elastic_agent")
FOR_RANKS = (
    "torch.nn.parallel",
    "ckptrun.launch.rank_process",
    "ckptrun.fit.rank_main",
    "ckptrun.strategies.ddp",
)
FOR_ONE_RANK = ("torch", "ckptrun.fit.rank_main")
FOR_OPTIMIZERS = (
    "torch._dynamo",
)  # by which torch's optimizers are decorated; the first one that is made imports it
# The last one is imported by the first engine that is made, and takes three times as long as the rest of DeepSpeed.
FOR_STRATEGY = {
    "deepspeed": (
        "ckptrun.strategies.deepspeed",
        "deepspeed",
        "deepspeed.runtime.zero.muon.muon_optimizer",
    )
}
_REQUIRED = {*FOR_THE_AGENT, *FOR_RANKS, *FOR_ONE_RANK}


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector, where it works."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_all(names: Sequence[str]) -> None:
    """Import these, as far as they are there.

    Raises:
        ImportError: one is missing that no rank can do without. Of others, whoever needs it says what is missing.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            if name in _REQUIRED:
                raise
            return
