"""The ``data`` of a weight of a run's model that is a copy of what the optimizer updates: it can be read alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.operator_schemas import writes


class ReadOnlyData(Tensor):
    """A tensor into which nothing may be written, because it would be lost: what ``parameter.data`` gives.

    Writes through ``data`` leave no trace in the parameter, as a version count, so they are refused at once. Results of
    operators on it, copies, and what a file of it holds, are plain tensors.

    >>> data = ReadOnlyData.of(torch.ones(2), lambda: ValueError("would be lost"))
    >>> data + 1
    tensor([2., 2.])
    >>> data.zero_()
    Traceback (most recent call last):
    ValueError: would be lost
    """

    refusal: Callable[[], Exception]

    @staticmethod
    def of(tensor: Tensor, refusal: Callable[[], Exception]) -> ReadOnlyData:
        """Returns a view of ``tensor`` that raises what ``refusal`` returns where code writes into it."""
        found = tensor.as_subclass(ReadOnlyData)
        found.refusal = refusal
        return found

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Runs ``func``, with plain tensors as results. Raises the refusal if it writes into such data."""
        written = args[0] if args and writes(func) else (kwargs or {}).get("out")
        if isinstance(written, ReadOnlyData):
            raise written.refusal()
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            return found.as_subclass(Tensor) if isinstance(found, ReadOnlyData) else found

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Returns a plain tensor with a copy of the values."""
        memo[id(self)] = found = self.as_subclass(Tensor).clone()
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Returns how a plain tensor of the same values is made."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)
