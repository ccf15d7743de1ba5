"""Workers of a loader end with the work, also where it ends before they were anybody's."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, dataloader

from ckptrun.fit.loader_workers import end_workers, shield_workers, start_iterator


def make_loader() -> DataLoader[Any]:
    loader = DataLoader(TensorDataset(torch.arange(8)), num_workers=2)
    shield_workers(loader)
    return loader


def test_the_workers_of_an_iterator_end() -> None:
    iterator = start_iterator(make_loader())
    assert len(multiprocessing.active_children()) == 2
    next(iterator)
    end_workers()
    assert multiprocessing.active_children() == []


def test_the_workers_of_an_iterator_that_was_never_made_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that dies at once makes torch raise inside the iterator's constructor; the others ignore SIGTERM, so
    that multiprocessing would wait for them at exit for ever."""
    reset = dataloader._MultiProcessingDataLoaderIter._reset

    def killed(self: Any, *args: Any, **options: Any) -> None:
        reset(self, *args, **options)
        os.kill(self._workers[0].pid, signal.SIGKILL)
        while True:  # torch raises here, at SIGCHLD
            signal.pause()

    monkeypatch.setattr(dataloader._MultiProcessingDataLoaderIter, "_reset", killed)
    with pytest.raises(RuntimeError, match="killed by signal"):
        start_iterator(make_loader())
    assert multiprocessing.active_children() == []
