"""Data loaders in the shape of Accelerate's: every rank reads the same batches, and a loop knows which is the last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler


class PreparedData:
    """A data loader that knows in a loop over it whether the batch is the last one; all else is as the loader has it.

    To know that, it reads one batch ahead. ``under_way`` lists the loaders that loops run over now, the innermost last.

    >>> under_way = []
    >>> loader = PreparedData(DataLoader(range(5), batch_size=2), under_way)
    >>> [(batch.tolist(), under_way[-1].is_at_end) for batch in loader], under_way, len(loader)
    ([([0, 1], False), ([2, 3], False), ([4], True)], [], 3)
    """

    def __init__(self, loader: DataLoader[Any], under_way: list[PreparedData]) -> None:
        self._loader, self._under_way = loader, under_way
        self.is_at_end = False

    def __iter__(self) -> Iterator[Any]:
        self.is_at_end = False
        self._under_way.append(self)
        try:
            batches = iter(self._loader)
            batch = next(batches, None)
            while batch is not None:
                following = next(batches, None)
                self.is_at_end = following is None
                yield batch
                batch = following
        finally:  # the loop may break off
            self._under_way.remove(self)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)


def first_batch(loader: DataLoader[Any]) -> Any:
    """Returns a batch of the loader's first samples, without drawing from its sampler; None for an iterable dataset."""
    dataset: Any = loader.dataset
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return None
    with torch.random.fork_rng(devices=[]):
        return loader.collate_fn([dataset[i] for i in range(min(loader.batch_size or 1, len(dataset)))])


def inputs_in(batch: Any) -> Any:
    """Returns the model's inputs in a batch: the whole of a mapping, or all but the last entry of a pair."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0]
    return batch if isinstance(batch, Mapping) else None


def same_on_every_rank(loader: DataLoader[Any], seed: int) -> DataLoader[Any]:
    """Returns the loader; if it shuffles without a generator of its own, it gets one that all ranks seed alike."""
    sampler = loader.sampler
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        sampler.generator = torch.Generator().manual_seed(seed)
    return loader
