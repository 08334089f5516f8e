"""A dataset of a user's own, as ``--data package.module:factory`` names it: map-style, of text, pictures or numbers."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from shardwright.analysis.objects.marked_inputs import is_mark, sample_tensors
from shardwright.errors import PlanError
from shardwright.models import FACTORY, load_named
from shardwright.parallelize.batches import TARGETS, named_parts

LAST_SHARE = 0.05
"""The share of a dataset without splits of its own that is read as the split "eval"; it is taken from the end."""


class MapDataset:
    """One split of a user's map-style dataset: an object with ``len()`` and ``[index]``, as torch's ``Dataset`` is.

    A sample is a pair (inputs, targets), each a tensor, an array or a number, or a mapping or dataclass of named parts,
    among them the targets, by one of the names ``labels``, ``targets``, ``target``, ``label`` and ``y``. The inputs may
    be a dict themselves. All samples have one shape, unless the dataset has a method ``collate(samples)``, which makes
    a whole batch of them, for example padded to the longest (:meth:`batch`). ``name`` is that of the factory, for
    errors. ``pair``, if it is set, is a function that makes (inputs, targets) of a sample's named parts instead, as a
    loss that the model computes itself needs it. A method ``decode(ids)`` of the dataset turns predicted tokens into
    text.

    >>> data = MapDataset([(torch.ones(3), 1), (torch.zeros(3), 0)], range(1, 2), "mine:data")
    >>> len(data), data.sample(0)
    (1, (tensor([0., 0., 0.]), tensor(0)))
    """

    def __init__(self, dataset: Any, indices: range, name: str) -> None:
        self.dataset, self.indices, self.name = dataset, indices, name
        self.pair: Callable[[dict[str, Any]], tuple[Any, Any]] | None = None
        self.collate: Callable[[list[Any]], Any] | None = getattr(dataset, "collate", None)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of a sample's parts; empty if a sample is a pair."""
        parts = self._read(0)
        return tuple(parts) if isinstance(parts, dict) else ()

    def __len__(self) -> int:
        return len(self.indices)

    def sample(self, index: int) -> tuple[Any, Any]:
        """Returns (inputs, targets) of one sample: tensors, or dicts of them.

        Raises: IndexError: there is no such sample; PlanError: a sample is no pair and has no named targets, or a part
            of it is no tensor.
        """
        if self.collate is not None:
            first: tuple[Any, Any] = tree_map(lambda leaf: leaf if is_mark(leaf) else leaf[0], self.batch([index]),
                                              is_leaf=is_mark)  # fmt: skip
            return first
        return self._paired(self._read(index))

    def batch(self, indices: Sequence[int]) -> tuple[Any, Any]:
        """Returns (inputs, targets) of the samples with these indices, as the dataset's ``collate`` makes a batch.

        Inputs may be marked, by ``sw.whole`` and ``sw.packed``.

        Raises: as :meth:`sample`; PlanError: ``collate`` fails, or makes a batch of another number of samples.
        """
        samples = [self._found(index) for index in indices]
        pair = self._paired(self._parts(self._joined(samples)))
        sizes = {tensor.shape[0] if tensor.dim() else None for tensor in sample_tensors(pair)}
        if sizes != {len(samples)}:
            raise self._collated(f"{', '.join(map(str, sizes)) or 'no'} samples in dim 0, of {len(samples)}")
        return pair

    def _joined(self, samples: list[Any]) -> Any:
        """Returns the batch that the dataset's ``collate`` makes of samples."""
        assert self.collate is not None
        try:
            return self.collate(samples)
        except Exception as failure:  # any Python code may run here
            raise self._collated(f"{type(failure).__name__}: {failure}".splitlines()[0]) from failure

    def _collated(self, given: str) -> PlanError:
        return PlanError(
            f"the method collate of '{self.name}' makes no batch of its samples",
            given=given,
            allowed="(inputs, targets), or a dict with labels, targets, target, label or y: tensors with the samples "
            "in dim 0",
            fix="mend it: it is given a list of samples, as the dataset's [index] returns them",
        )

    def _paired(self, sample: tuple[Any, Any] | dict[str, Any]) -> tuple[Any, Any]:
        if not isinstance(sample, dict):
            return sample
        if self.pair is not None:
            return self.pair(sample)
        targets = next((name for name in TARGETS if name in sample), None)
        if targets is None or len(sample) < 2:
            raise self._wrong(f"a sample with {', '.join(sample)}")
        return {name: value for name, value in sample.items() if name != targets}, sample[targets]

    def _read(self, index: int) -> tuple[Any, Any] | dict[str, Any]:
        """Returns a sample as a pair or a dict of named parts; with ``collate``, a batch of that sample alone."""
        sample = self._found(index)
        return self._parts(sample if self.collate is None else self._joined([sample]))

    def _found(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}: they count from 0")
        return self.dataset[self.indices[index]]

    def _parts(self, sample: Any) -> tuple[Any, Any] | dict[str, Any]:
        if isinstance(sample, tuple | list) and len(sample) == 2:
            return self._tensors(sample[0]), self._tensors(sample[1])
        if not (named := named_parts(sample)):
            raise self._wrong(type(sample).__name__)
        return {str(name): self._tensors(value, str(name)) for name, value in named.items()}

    def _tensors(self, value: Any, name: str = "") -> Any:
        if isinstance(value, Mapping):
            return {str(key): self._tensors(part, str(key)) for key, part in value.items()}
        if isinstance(value, Tensor) or is_mark(value):
            return value
        try:
            tensor = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            where = f"'{name}' is" if name else "a pair with"
            raise self._wrong(f"{where} a {type(value).__name__}") from None
        return tensor.float() if tensor.dtype == torch.float64 else tensor

    def _wrong(self, given: str) -> PlanError:
        return PlanError(
            f"a sample of '{self.name}' is a pair of tensors, or has named ones, its targets among them",
            given=given,
            allowed="(inputs, targets), or a dict with labels, targets, target, label or y; each a tensor, an array or "
            "a number",
            fix="return tokens[:-1], tokens[1:] for text, picture, label for pictures, or a dict of tensors with "
            "'labels'",
        )


def open_given(name: str, split: str) -> MapDataset:
    """Returns a split of the dataset that the factory ``package.module:factory`` returns.

    A factory with a parameter ``split`` is called with "train" or "eval". Without one, it returns the whole dataset, of
    which the last 5 % are the split "eval", or both: a mapping with them, or a pair of torch's datasets.

    Raises: PlanError: the factory cannot be imported or fails, returns no map-style dataset, or the split is empty.
    """
    factory = load_named(name)
    try:
        takes_split = "split" in inspect.signature(factory).parameters
        with FACTORY:
            dataset = factory(split=split) if takes_split else factory()
    except PlanError:
        raise
    except Exception as failure:  # any Python code may run here
        raise PlanError(
            f"'{name}' failed to make its dataset",
            given=f"{type(failure).__name__}: {failure}".splitlines()[0],
            allowed="a function that needs no argument but split, and returns a map-style dataset",
            fix="mend it, or give what it needs a default",
        ) from failure
    if isinstance(dataset, tuple | list) and len(dataset) == 2 and all(isinstance(part, Dataset) for part in dataset):
        dataset = {"train": dataset[0], "eval": dataset[1]}  # what random_split returns
    if isinstance(dataset, Mapping) and split in dataset:
        dataset, takes_split = dataset[split], True
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise PlanError(
            f"'{name}' makes no map-style dataset",
            given=type(dataset).__name__,
            allowed="an object with len() and [index]: each rank reads its own samples, in the order of the run",
            fix="return a torch.utils.data.Dataset with __len__ and __getitem__, or a list of pairs",
        )
    count = operator.index(len(dataset))
    cut = count - max(1, round(count * LAST_SHARE)) if count > 1 else count
    indices = range(count) if takes_split else range(cut) if split == "train" else range(cut, count)
    if not indices:
        raise PlanError(
            f"the {split} split of '{name}' is empty",
            given=f"{count} samples",
            allowed="one sample or more in each split; without splits of its own, eval is the last 5 %",
            fix="return more samples, or take a parameter split",
        )
    return MapDataset(dataset, indices, name)
