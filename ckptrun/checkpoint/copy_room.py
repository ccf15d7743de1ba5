"""Where in memory does the copy of a storage lie?

Decision: a large one in memory that is mapped for it alone.

- It begins at a page, so that the kernel hands it to a disk as it lies (:mod:`ckptrun.checkpoint.past_cache`).
- Forked children find it empty (``MADV_WIPEONFORK``). Loader workers are forked at every epoch, and as long as such a
  child lives the kernel copies each page at its first change: the next save would stop training for nine times as
  long as the copy itself (seen with 1 GB).

What comes from a GPU lies in torch's pinned memory, which the driver keeps for this process anyway.

Turned down: torch's own allocation, which promises neither; one mapping for all copies, which has to be made anew
where a single storage changes its size; ``MADV_DONTFORK``, which leaves a hole that the child may use for something
else, and unmap again when its collector finds what it inherited.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from typing import Final

import torch

from ckptrun.checkpoint.past_cache import LARGE_BYTES

MAPPED_BYTES: Final = LARGE_BYTES
"""Storages from here on get a mapping of their own. The kernel allows a process 65,530 of them."""

_MADV_WIPEONFORK: Final = 18  # of Linux's madvise(2), for which mmap has no name


def room_for(source: torch.UntypedStorage) -> torch.UntypedStorage:
    """A new storage on the CPU for a copy of ``source``; pinned for a GPU's, which then copies at the bus's full speed.

    Raises:
        MemoryError, RuntimeError: there is no memory for it.
    """
    size_bytes = source.nbytes()
    on_device = source.device.type == "cuda"
    if on_device or size_bytes < MAPPED_BYTES:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=on_device).untyped_storage()
    try:
        mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for a copy of {size_bytes} bytes: {error.strerror}") from error
    if sys.platform == "linux":
        # Refused before Linux 4.14, and near the limit of mappings; a save after a fork is slower then.
        with contextlib.suppress(OSError):
            mapped.madvise(_MADV_WIPEONFORK)
    return torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()
