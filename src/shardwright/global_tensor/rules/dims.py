"""Sharding rules of operators along some dims: reductions, softmax, sorting, running sums, cat and stack.

The dims that an operator does not work along may be split. For sums and means the reduced dims may be split too: each
rank then has a partial sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import Shard

from shardwright.global_tensor.rules.call import OperatorCall, ShardingDecision, Way, decide, holds, refusal, sum_dtype

PARTIAL: Way = (("P",), ("P",))
"""The way of a linear operator on one tensor: from a partial sum to a partial sum, term by term."""


def _named(call: OperatorCall, name: str = "dim") -> tuple[int, ...]:
    """Returns the dims that an argument names, counted from the first; all dims if it is None or empty."""
    dims, num = call.arg(name), len(call.shapes[0])
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return tuple(range(num))
    return tuple(dim % max(num, 1) for dim in ([dims] if isinstance(dims, int) else dims))


def _other_dims(call: OperatorCall, along: Sequence[int], *, removed: bool = False) -> list[Way]:
    """Returns the ways that split a dim which is not in ``along``; ``removed``: the output lacks the dims ``along``."""
    ways: list[Way] = []
    for dim in range(len(call.shapes[0])):
        if dim not in along:
            after = dim - sum(other < dim for other in along) if removed else dim
            ways.append(((dim,) * len(call.tensors), (after,) * len(call.outputs)))
    return ways


# ---- reductions


def _reduced_dims(call: OperatorCall) -> tuple[tuple[int, ...], bool]:
    """Returns the dims that a reduction reduces, and whether the output lacks them."""
    along = _named(call) if "dim" in call.names else tuple(range(len(call.shapes[0])))
    return along, not ("keepdim" in call.names and call.arg("keepdim"))


def _reduction(call: OperatorCall) -> ShardingDecision:
    along, removed = _reduced_dims(call)
    if call.name in _SELECTIONS and not call.tensors[0].numel() and not all(call.shapes[0][d] for d in along):
        raise refusal(call, "these dims have no elements to choose from", "tensors that have elements there")
    return decide(call, _other_dims(call, along, removed=removed))


def _sum(call: OperatorCall) -> ShardingDecision:
    along, removed = _reduced_dims(call)
    ways = [*_other_dims(call, along, removed=removed), *(((dim,), ("P",)) for dim in along)]
    # sum is linear, but nansum is not: in a partial sum, it would leave out a term that is nan
    if call.name == "sum" and call.tensors[0].dtype == call.output.dtype:
        ways.append(PARTIAL)
    return decide(call, ways)


def _mean(call: OperatorCall) -> ShardingDecision:
    along, removed = _reduced_dims(call)
    ways = [*_other_dims(call, along, removed=removed), *(((dim,), ("P",)) for dim in along)]
    if holds(call.output.dtype, call.tensors[0].dtype):
        ways.append(PARTIAL)
    return decide(call, ways, _run_mean)


def _run_mean(call: OperatorCall, decision: ShardingDecision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    along, removed = _reduced_dims(call)
    if not any(isinstance(one, Shard) and one.dim in along for one in decision.ins[0]):
        return call.func(*args, **kwargs)
    count = prod(call.shapes[0][dim] for dim in along)  # of the global tensor, as members may hold unequal slices
    dtype = kwargs.get("dtype") or args[0].dtype
    total = torch.sum(args[0], along, keepdim=not removed, dtype=sum_dtype(dtype))
    return (total / count).to(dtype)


# ---- the other operators


def _along(name: str = "dim", *, is_linear: bool = False) -> Callable[[OperatorCall], ShardingDecision]:
    def rule(call: OperatorCall) -> ShardingDecision:
        ways = _other_dims(call, _named(call, name))
        # in a narrower dtype each term would be rounded singly, and rounded terms do not add up to the rounded sum
        if is_linear and holds(call.output.dtype, call.tensors[0].dtype):
            ways.append(PARTIAL)
        return decide(call, ways)

    return rule


def _triangle(call: OperatorCall) -> ShardingDecision:
    num = len(call.shapes[0])
    return decide(call, [*_other_dims(call, (num - 2, num - 1)), PARTIAL])


def _cross(call: OperatorCall) -> ShardingDecision:
    shape = call.out_shape
    along = call.dim(num_dims=len(shape))
    ways: list[Way] = []
    for dim, size in enumerate(shape):  # both inputs are broadcast to the output's shape
        if dim != along:
            ways.append((tuple(dim if in_shape[dim] == size else "B" for in_shape in call.shapes), (dim,)))
    return decide(call, ways)


def _cat(call: OperatorCall) -> ShardingDecision:
    num, shape = len(call.tensors), call.out_shape
    along = call.dim(num_dims=len(shape))
    ways: list[Way] = [((dim,) * num, (dim,)) for dim in range(len(shape)) if dim != along]
    if any(len(in_shape) != len(shape) for in_shape in call.shapes):  # torch lets an empty 1-D tensor join any
        ways = []
    return decide(call, [*ways, (("P",) * num, ("P",))])


def _stack(call: OperatorCall) -> ShardingDecision:
    num, num_dims = len(call.tensors), len(call.shapes[0])
    along = call.dim(num_dims=num_dims + 1)
    ways: list[Way] = [((dim,) * num, (dim + (dim >= along),)) for dim in range(num_dims)]
    return decide(call, [*ways, (("P",) * num, ("P",))])


_SELECTIONS = ("amax", "amin", "max", "min", "argmax", "argmin", "aminmax", "kthvalue")

_REDUCTIONS = (
    "amax", "amin", "max", "min", "argmax", "argmin", "all", "any", "prod", "var", "std", "var_mean", "std_mean",
    "logsumexp", "linalg_vector_norm", "norm", "median", "nanmedian", "mode", "kthvalue", "count_nonzero", "aminmax",
)  # fmt: skip

_ALONG = (
    "_softmax", "_log_softmax", "_safe_softmax", "_softmax_backward_data", "_log_softmax_backward_data",
    "sort", "topk", "cumprod", "cummax", "cummin", "logcumsumexp", "glu", "glu_backward",
)  # fmt: skip

RULES: dict[str, Any] = {
    "sum": _sum,
    "nansum": _sum,
    "mean": _mean,
    **dict.fromkeys(_REDUCTIONS, _reduction),
    **dict.fromkeys(_ALONG, _along()),
    "linalg_cross": _cross,
    "cumsum": _along(is_linear=True),
    **dict.fromkeys(("flip", "roll", "rot90"), _along("dims", is_linear=True)),
    **dict.fromkeys(("tril", "triu"), _triangle),
    "cat": _cat,
    "stack": _stack,
}
