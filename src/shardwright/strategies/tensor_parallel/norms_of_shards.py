"""Norms over dims that ranks hold shards of, by operators whose sums over ranks a call plan knows.

::

    layer norm   x -> mean over ranks -> differences -> mean of squares over ranks -> products
    weight norm  v -> sum of squares over ranks -> products
    variance     x -> mean over ranks -> differences -> mean of squares over ranks
    2-norm       x -> sum of squares over ranks -> root

Traffic: for a layer norm or a variance, all-reduces of two numbers for each token in the forward, and of two in the
    backward; for a 2-norm, of one in each; for a weight norm, of one number for each output channel in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.sharding.tensor_shard import TensorShard

DimNumbers = int | Sequence[int] | None
"""The dims that a reduction goes over; None for all."""


def norm_of_shards(function: Any, args: Any, named: Any, shard: TensorShard | None) -> Any:
    """Returns the function to plan for a call: another one if it is a norm over dims that are cut, else ``function``.

    ``shard`` is the shard of the call's first tensor that this rank holds, None if it is whole.
    """
    if function not in _NORMS or shard is None or not args or args[0].is_complex():
        return function
    normed, of_shards = _NORMS[function]
    try:
        dims = normed(*args, **named)
    except TypeError:  # an argument that is rarely given, such as a dtype
        return function
    return of_shards if any(shard.cuts[dim] is not None for dim in dims) else function


def layer_norm_of_shards(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Returns ``functional.layer_norm`` of the same arguments, by operators that run on shards of the normalized dims.

    The mean and the mean of squared differences are sums over ranks. Like torch, it computes in float32 at least.

    >>> x = torch.tensor([[1.0, 2.0, 3.0, 6.0]])
    >>> torch.allclose(layer_norm_of_shards(x, (4,)), functional.layer_norm(x, (4,)))
    True
    """
    dims = [*range(-len(normalized_shape), 0)]
    x = input.to(torch.promote_types(input.dtype, torch.float32))
    centred = x - x.mean(dims, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    normed = normed if weight is None else normed * weight
    return (normed if bias is None else normed + bias).to(input.dtype)


def weight_norm_of_shards(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Returns the weight with direction ``v`` and norms ``g``, as ``torch._weight_norm`` does, from shards.

    The norms go over all dims but ``dim``; ranks hold shards of these dims.

    >>> v, g = torch.tensor([[3.0, 4.0]]), torch.tensor([[10.0]])
    >>> weight_norm_of_shards(v, g)
    tensor([[6., 8.]])
    """
    return v * (g / v.square().sum(_other_dims(v, g, dim), keepdim=True).sqrt())


def norm_over(x: Tensor, dim: DimNumbers, keepdim: bool = False) -> Tensor:
    """Returns the 2-norm over ``dim``, all dims if it is None, by operators that run on shards; in float32 at least.

    >>> norm_over(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), 1)
    tensor([5., 0.])
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return _root(wide.square().sum(_listed(dim, x), keepdim=keepdim)).to(x.dtype)


def var_mean_over(
    input: Tensor, dim: DimNumbers | bool = None, unbiased: bool = True, keepdim: bool = False, *,
    correction: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns ``torch.var_mean`` of the same arguments, by operators that run on shards; in float32 at least.

    >>> x = torch.tensor([[1.0, 2.0, 6.0]])
    >>> [each.item() for each in var_mean_over(x, 1)], round(var_mean_over(x, correction=0)[0].item(), 2)
    ([7.0, 3.0], 4.67)
    """
    over, unbiased = (None, dim) if isinstance(dim, bool) else (dim, unbiased)
    dims, x = _listed(over, input), input.to(torch.promote_types(input.dtype, torch.float32))
    mean = x.mean(dims, keepdim=True)
    taken_off = (1 if unbiased else 0) if correction is None else correction
    count = max(0, prod(input.shape[number] for number in dims) - taken_off)
    var = (x - mean).square().sum(dims, keepdim=keepdim) / count
    return var.to(input.dtype), (mean if keepdim else mean.sum(dims)).to(input.dtype)


def _root(x: Tensor) -> Tensor:
    """Returns the square root. Its gradient at 0 is 0, as in torch's own norms, where that of ``sqrt`` is infinite."""
    return x.clamp_min(torch.finfo(x.dtype).tiny).sqrt() * (x > 0)


def _normalize(input: Tensor, p: float = 2.0, dim: DimNumbers = 1, eps: float = 1e-12) -> Tensor:
    return input / norm_over(input, dim, True).clamp_min(eps)


def _norm(input: Tensor, p: Any = "fro", dim: DimNumbers = None, keepdim: bool = False) -> Tensor:
    return norm_over(input, dim, keepdim)


def _vector_norm(x: Tensor, ord: Any = 2, dim: DimNumbers = None, keepdim: bool = False) -> Tensor:
    return norm_over(x, dim, keepdim)


def _var(*args: Any, **named: Any) -> Tensor:
    return var_mean_over(*args, **named)[0]


def _std(*args: Any, **named: Any) -> Tensor:
    return _root(var_mean_over(*args, **named)[0])


def _std_mean(*args: Any, **named: Any) -> tuple[Tensor, Tensor]:
    var, mean = var_mean_over(*args, **named)
    return _root(var), mean


def _listed(dim: DimNumbers, x: Tensor) -> list[int]:
    """Returns the dims that a reduction goes over: all, if it names none."""
    return [*range(x.dim())] if dim is None or dim == () or dim == [] else [dim] if isinstance(dim, int) else [*dim]


def _normalized_dims(input: Tensor, p: float = 2.0, dim: DimNumbers = 1, eps: float = 1e-12) -> list[int]:
    return _listed(dim, input) if p == 2 else []


def _normed_dims(input: Tensor, p: Any = "fro", dim: DimNumbers = None, keepdim: bool = False) -> list[int]:
    return _listed(dim, input) if p in (2, "fro", None) else []


def _vector_dims(x: Tensor, ord: Any = 2, dim: DimNumbers = None, keepdim: bool = False) -> list[int]:
    return _listed(dim, x) if ord == 2 else []


def _varied_dims(
    input: Tensor,
    dim: DimNumbers | bool = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> list[int]:
    return _listed(None if isinstance(dim, bool) else dim, input)


def _other_dims(v: Tensor, g: Tensor, dim: int = 0) -> list[int]:
    return [other for other in range(v.dim()) if other != dim]


def _last_dims(input: Tensor, normalized_shape: Sequence[int], *_: Any, **__: Any) -> range:
    return range(-len(normalized_shape), 0)


_NORMS: Mapping[Any, tuple[Callable[..., Iterable[int]], Callable[..., Any]]] = {
    functional.layer_norm: (_last_dims, layer_norm_of_shards),
    torch._weight_norm: (_other_dims, weight_norm_of_shards),
    functional.normalize: (_normalized_dims, _normalize),
    torch.linalg.vector_norm: (_vector_dims, _vector_norm),
    **dict.fromkeys((torch.norm, Tensor.norm), (_normed_dims, _norm)),
    **dict.fromkeys((torch.var, Tensor.var), (_varied_dims, _var)),
    **dict.fromkeys((torch.std, Tensor.std), (_varied_dims, _std)),
    torch.var_mean: (_varied_dims, var_mean_over),
    torch.std_mean: (_varied_dims, _std_mean),
}
"""For each function that normalizes: what gives the dims that it goes over, and what computes it on shards of these."""
