"""Norms over dims that ranks hold parts of, by operators whose sums over ranks a call plan knows.

::

    layer norm   x -> mean over ranks -> differences -> mean of squares over ranks -> products
    weight norm  v -> sum of squares over ranks -> products

Traffic: for a layer norm, all-reduces of two numbers for each token in the forward, and of two in the backward; for a
    weight norm, of one number for each output channel in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.sharding.tensor_part import TensorPart


def norm_of_parts(function: Any, args: Any, named: Any, part: TensorPart | None) -> Any:
    """Returns the function to plan for a call: another one if it is a norm over dims that are cut, else ``function``.

    ``part`` is the part of the call's first tensor that this rank holds, None if it is whole.
    """
    if function not in _NORMS or part is None:
        return function
    normed, of_parts = _NORMS[function]
    return of_parts if any(part.cuts[dim] is not None for dim in normed(*args, **named)) else function


def layer_norm_of_parts(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Returns ``functional.layer_norm`` of the same arguments, by operators that run on parts of the normalized dims.

    The mean and the mean of squared differences are sums over ranks. Like torch, it computes in float32 at least.

    >>> x = torch.tensor([[1.0, 2.0, 3.0, 6.0]])
    >>> torch.allclose(layer_norm_of_parts(x, (4,)), functional.layer_norm(x, (4,)))
    True
    """
    dims = [*range(-len(normalized_shape), 0)]
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    centred = x - x.mean(dims, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    normed = normed if weight is None else normed * weight
    return (normed if bias is None else normed + bias).to(input.dtype)


def weight_norm_of_parts(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Returns a weight of direction ``v`` and norms ``g``, as ``torch._weight_norm`` does, where other dims are cut.

    >>> v, g = torch.tensor([[3.0, 4.0]]), torch.tensor([[10.0]])
    >>> weight_norm_of_parts(v, g)
    tensor([[6., 8.]])
    """
    return v * (g / v.square().sum(_other_dims(v, g, dim), keepdim=True).sqrt())


def _other_dims(v: Tensor, g: Tensor, dim: int = 0) -> list[int]:
    return [each for each in range(v.dim()) if each != dim]


def _last_dims(input: Tensor, normalized_shape: Sequence[int], *_: Any, **__: Any) -> range:
    return range(-len(normalized_shape), 0)


_NORMS: Mapping[Any, tuple[Callable[..., Iterable[int]], Callable[..., Tensor]]] = {
    functional.layer_norm: (_last_dims, layer_norm_of_parts),
    torch._weight_norm: (_other_dims, weight_norm_of_parts),
}
"""Functions that normalize: the dims over which they go, and what computes the same where ranks hold parts of these."""
