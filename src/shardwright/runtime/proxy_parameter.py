"""Parameters of a run's model that stand for what the optimizer updates, and their ``data``, which is only read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

DATA = vars(torch._C.TensorBase)["data"].__get__
"""The ``func`` that ``__torch_function__`` gets when code reads ``tensor.data``."""
GRAD, SET_GRAD, DROP_GRAD = (
    getattr(vars(torch._C.TensorBase)["grad"], name) for name in ("__get__", "__set__", "__delete__")
)
"""The ``func`` that ``__torch_function__`` gets when code reads, sets or deletes ``tensor.grad``; compare by ``==``."""


class ProxyParameter(nn.Parameter):
    """A parameter of a run's model that stands for what the optimizer updates, which has the gradient.

    A copy is a plain parameter, and so is what ``torch.save`` writes.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Returns a plain parameter with a copy of the values."""
        memo[id(self)] = parameter = nn.Parameter(self.detach().clone(), self.requires_grad)
        return parameter

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Returns how a plain parameter of the same values is made."""
        with torch._C.DisableTorchFunctionSubclass():
            return nn.Parameter, (self.detach(), self.requires_grad)


class ReadOnlyData(Tensor):
    """A tensor into which nothing may be written, because it would be lost: what ``parameter.data`` gives.

    Writes through ``data`` do not change the parameter's version count, so they are refused at once. So are writes
    through views of it. Other results of operators on it, copies, and what ``torch.save`` writes, are plain tensors.

    >>> data = ReadOnlyData.of(torch.ones(2), lambda: ValueError("would be lost"))
    >>> data + 1
    tensor([2., 2.])
    >>> data[0].zero_()
    Traceback (most recent call last):
    ValueError: would be lost
    """

    refusal: Callable[[], Exception]

    @staticmethod
    def of(tensor: Tensor, refusal: Callable[[], Exception]) -> ReadOnlyData:
        """Returns a view of ``tensor`` that raises what ``refusal`` returns where code writes into it."""
        data = tensor.as_subclass(ReadOnlyData)
        data.refusal = refusal
        return data

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Runs ``func``; results that are views of the data are read-only too, and all others are plain tensors.

        Raises the refusal if the data, or a view of it, has been written into.
        """
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ReadOnlyData)]
        with torch._C.DisableTorchFunctionSubclass():
            before = [data._version for data in inputs]
            results = func(*args, **(kwargs or {}))
            if before != [data._version for data in inputs]:
                raise inputs[0].refusal()
            places = {data.untyped_storage()._cdata for data in inputs}

            def marked(result: Tensor) -> Tensor:
                plain = result.as_subclass(Tensor) if isinstance(result, ReadOnlyData) else result
                is_view = plain.layout is torch.strided and plain.untyped_storage()._cdata in places
                return ReadOnlyData.of(plain, inputs[0].refusal) if is_view else plain

            return tree_map_only(Tensor, marked, results) if inputs else results

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Returns a plain tensor with a copy of the values."""
        memo[id(self)] = copy = self.as_subclass(Tensor).clone()
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Returns how a plain tensor of the same values is made."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)
