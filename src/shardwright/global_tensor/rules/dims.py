"""Operators that work along some dims and treat the others alone: reductions, softmax, sorting, running sums.

What they work along is never cut; every other dim may be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwright.global_tensor.rules.call import Decision, OperatorCall, Way, decide, is_wider, refusal


def named(call: OperatorCall, name: str = "dim") -> tuple[int, ...]:
    """The dims an argument names, counted from the first; all of them when it is left out or empty."""
    given, num = call.arg(name), len(call.shapes[0])
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return tuple(range(num))
    return tuple(dim % max(num, 1) for dim in ([given] if isinstance(given, int) else given))


def kept(call: OperatorCall, along: Sequence[int], *, removed: bool) -> list[Way]:
    """The ways that cut a dim which is not in ``along``; ``removed``: the output lacks those dims."""
    ways: list[Way] = []
    for dim in range(len(call.shapes[0])):
        if dim in along:
            continue
        after = dim - sum(other < dim for other in along) if removed else dim
        ways.append(((dim,) * len(call.tensors), (after,) * len(call.outputs)))
    return ways


def _reduced(call: OperatorCall) -> Decision:
    names = {argument.name for argument in call.func._schema.arguments}
    along = named(call) if "dim" in names else tuple(range(len(call.shapes[0])))
    keeps = "keepdim" in names and call.arg("keepdim")
    if call.name in _OF_SOMETHING and not call.tensors[0].numel() and not all(call.shapes[0][d] for d in along):
        raise refusal(call, "there is nothing along these dims to choose from", "tensors that have elements there")
    return decide(call, kept(call, along, removed=not keeps))


def _along(name: str = "dim") -> Callable[[OperatorCall], Decision]:
    def rule(call: OperatorCall) -> Decision:
        return decide(call, kept(call, named(call, name), removed=False))

    return rule


def _last(num: int, *, linear: bool) -> Callable[[OperatorCall], Decision]:
    """Along the last ``num`` dims."""

    def rule(call: OperatorCall) -> Decision:
        size = len(call.shapes[0])
        along = tuple(range(size - num, size))
        sums: list[Way] = [(("P",), ("P",))] if linear else []
        return decide(call, kept(call, along, removed=False) + sums)

    return rule


def _linear_along(name: str) -> Callable[[OperatorCall], Decision]:
    def rule(call: OperatorCall) -> Decision:
        ways = kept(call, named(call, name), removed=False)
        out = call.outputs[0]
        keeps = out is not None and is_wider(out.dtype, call.tensors[0].dtype)
        return decide(call, [*ways, (("P",), ("P",))] if keeps else ways)  # a rounded term is no term

    return rule


def _cross(call: OperatorCall) -> Decision:
    """Both tensors are broadcast to each other."""
    shape = call.out_shape
    along = call.arg("dim") % len(shape)
    ways: list[Way] = []
    for dim, size in enumerate(shape):
        if dim != along:
            ways.append((tuple(dim if given[dim] == size else "B" for given in call.shapes), (dim,)))
    return decide(call, ways)


_OF_SOMETHING = ("amax", "amin", "max", "min", "argmax", "argmin", "aminmax", "kthvalue")

_REDUCED = (
    "amax", "amin", "max", "min", "argmax", "argmin", "all", "any", "prod", "var", "std", "var_mean", "std_mean",
    "logsumexp", "linalg_vector_norm", "norm", "median", "nanmedian", "mode", "kthvalue", "count_nonzero", "aminmax",
)  # fmt: skip

RULES: dict[str, Any] = {
    **dict.fromkeys(_REDUCED, _reduced),
    **dict.fromkeys(
        ("_softmax", "_log_softmax", "_safe_softmax", "_softmax_backward_data", "_log_softmax_backward_data"), _along()
    ),
    **dict.fromkeys(("sort", "topk", "cumprod", "cummax", "cummin", "logcumsumexp", "glu", "glu_backward"), _along()),
    "linalg_cross": _cross,
    **dict.fromkeys(("cumsum",), _linear_along("dim")),
    **dict.fromkeys(("flip", "roll", "rot90"), _linear_along("dims")),
    **dict.fromkeys(("tril", "triu"), _last(2, linear=True)),
}
