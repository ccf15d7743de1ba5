"""Where in memory does the copy of a storage lie?

Decision: a large one in memory that is mapped for it alone.

- It begins at a page, so that the kernel hands it to a disk as it lies (:mod:`ckptrun.checkpoint.past_cache`).
- Forked children do not get it (``MADV_DONTFORK``). Loader workers are forked at every epoch, and as long as such a
  child lives the kernel copies each page at its first change: the next save would stop training for nine times as
  long as the copy itself (seen with 1 GB).

Turned down: torch's own allocation, which promises neither; one mapping for all copies, which has to be made anew
where a single storage changes its size.
"""

from __future__ import annotations

import mmap
from typing import Final

import torch

MAPPED_BYTES: Final = 1 << 20
"""Storages from here on get a mapping of their own. The kernel allows a process 65,530 of them."""


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
    if hasattr(mmap, "MADV_DONTFORK"):  # Linux
        mapped.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()
