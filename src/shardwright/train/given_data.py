"""A dataset of a user's own, as ``--data package.module:factory`` names it: map-style, of text, pictures or numbers."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import PlanError
from shardwright.models import load_named

LAST_SHARE = 0.05
"""The share of a dataset without splits of its own that is read as the split "eval"; it is taken from the end."""


class MapDataset:
    """One split of a user's map-style dataset: an object with ``len()`` and ``[index]``, as torch's ``Dataset`` is.

    A sample is a pair (inputs, targets), each a tensor, an array or a number; all samples have one shape. ``name`` is
    that of the factory, for errors.

    >>> data = MapDataset([(torch.ones(3), 1), (torch.zeros(3), 0)], range(1, 2), "mine:data")
    >>> len(data), data.sample(0)
    (1, (tensor([0., 0., 0.]), tensor(0)))
    """

    def __init__(self, dataset: Any, indices: range, name: str) -> None:
        self.dataset, self.indices, self.name = dataset, indices, name

    def __len__(self) -> int:
        return len(self.indices)

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns (inputs, targets) of one sample as tensors.

        Raises: IndexError: there is no such sample; PlanError: a sample is no pair, or a part of it no tensor.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}: they count from 0")
        found = self.dataset[self.indices[index]]
        if not isinstance(found, tuple | list) or len(found) != 2:
            named = f" with {', '.join(map(str, found))}" if isinstance(found, Mapping) else ""
            raise self._wrong(f"{type(found).__name__}{named}")
        return self._tensor(found[0]), self._tensor(found[1])

    def _tensor(self, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value
        try:
            found = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            raise self._wrong(f"a pair with a {type(value).__name__}") from None
        return found.float() if found.dtype == torch.float64 else found

    def _wrong(self, given: str) -> PlanError:
        return PlanError(
            f"a sample of '{self.name}' is a pair of tensors",
            given=given,
            allowed="(inputs, targets), each a tensor, an array or a number",
            fix="return tokens[:-1], tokens[1:] for text, or picture, label for pictures",
        )


def open_given(name: str, split: str) -> MapDataset:
    """Returns a split of the dataset that the factory ``package.module:factory`` returns.

    A factory with a parameter ``split`` is called with "train" or "eval". Without one, it returns the whole dataset, of
    which the last 5 % are the split "eval", or a mapping with both.

    Raises: PlanError: the factory cannot be imported or fails, returns no map-style dataset, or the split is empty.
    """
    factory = load_named(name)
    try:
        takes_split = "split" in inspect.signature(factory).parameters
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
