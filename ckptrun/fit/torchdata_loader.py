"""What becomes of torchdata's StatefulDataLoader where ckptrun can keep the position itself?

Over a map-style dataset it restores the order of samples and not what the dataset draws in its workers. Taken as the
DataLoader that it also is, both are a function of the position. Over an iterable dataset it keeps the workers' states,
which nothing else can, and is left alone.

Source: torchdata 0.11, whose loader puts samplers of its own in the place of torch's.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from ckptrun.fit.dataset_state import has_state


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The options of a loader but for its samples, their order and how they become a batch."""
    options: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    if hasattr(loader, "in_order"):
        options["in_order"] = loader.in_order
    return options


def as_data_loader(loader: Any) -> Any:
    """A DataLoader with the samples and the order of ``loader``, where that is torchdata's over a map-style dataset
    without a state of its own; else ``loader``."""
    if not _is_torchdatas(loader, "StatefulDataLoader"):
        return loader
    if isinstance(loader.dataset, IterableDataset) or has_state(loader.dataset):
        return loader
    options = {"collate_fn": loader.collate_fn, **options_of(loader)}
    batches = loader.batch_sampler
    if batches is None or _is_torchdatas(batches, "BatchSampler"):
        options |= {"batch_size": loader.batch_size, "sampler": _sampler(loader.sampler)}
        options |= {"drop_last": loader.drop_last} if batches is not None else {}
    else:
        options |= {"batch_sampler": batches}
    with warnings.catch_warnings():
        # About many workers: said already when the user made the loader.
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        return DataLoader(loader.dataset, **options)


def _sampler(sampler: Any) -> Any:
    if not _is_torchdatas(sampler, "RandomSampler"):
        return sampler
    return RandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
    )


def _is_torchdatas(value: Any, name: str) -> bool:
    kind = type(value)
    return kind.__name__ == name and kind.__module__.startswith("torchdata.")
