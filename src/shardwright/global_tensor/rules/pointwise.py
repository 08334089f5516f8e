"""Sharding rules of pointwise operators: any dim may be split, and linear operators accept partial sums."""

from __future__ import annotations

from cmath import isfinite

import torch

from shardwright.global_tensor.rules.call import (
    Letter,
    OperatorCall,
    ShardingDecision,
    Way,
    decide,
    holds,
    number_of,
    refusal,
)
from shardwright.global_tensor.rules.dims import PARTIAL

# not tagged by torch
_UNTAGGED = frozenset(
    {
        "copy", "_to_copy", "detach", "alias", "lift_fresh", "softplus_backward", "leaky_relu_backward", "fill",
        "zero", "masked_fill", "elu_backward", "hardtanh_backward", "hardswish_backward", "hardsigmoid_backward",
        "log_sigmoid_backward", "_conj", "floor_divide", "positive", "smooth_l1_loss_backward", "mse_loss_backward",
        "_prelu_kernel", "_prelu_kernel_backward", "log_sigmoid_forward", "hardswish", "hardshrink_backward",
        "softshrink_backward", "_neg_view",
    }
)  # fmt: skip

_LINEAR = frozenset({"clone", "detach", "alias", "neg", "lift_fresh", "positive", "zero", "_conj", "_neg_view"})
"""Linear operators of one tensor. ``_to_copy`` is one too if the new dtype rounds nothing."""


def _base(call: OperatorCall) -> str:
    """Returns the operator's name without the underscore of in-place operators."""
    return call.name.removesuffix("_") if is_in_place(call) else call.name


def is_in_place(call: OperatorCall) -> bool:
    """Returns whether an operator returns a tensor that it has written to, as ``add_`` does."""
    returns = call.func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and returns[0].alias_info.is_write


def is_pointwise(call: OperatorCall) -> bool:
    """Returns whether an operator is elementwise: an output element depends only on input elements at its position."""
    if _base(call) in _UNTAGGED and not _is_reduced_loss(call):
        return True
    if is_in_place(call):  # torch tags only the operator that returns a new tensor
        plain = getattr(torch.ops.aten, _base(call), None)
        overloads = [] if plain is None else [getattr(plain, overload) for overload in plain.overloads()]
        return any(torch.Tag.pointwise in operator.tags for operator in (call.func, *overloads))
    return torch.Tag.pointwise in call.func.tags and not _is_reduced_loss(call)


def _is_reduced_loss(call: OperatorCall) -> bool:
    return "reduction" in call.names and call.arg("reduction") != 0


def rule(call: OperatorCall) -> ShardingDecision:
    """Returns how to shard a pointwise operator, so that the fewest elements of its inputs are moved.

    A dim may be split in all inputs that are not broadcast along it; linear operators also take partial sums.

    Raises: PlanError: the call copies a tensor to another device type than the placement's.
    """
    shape = tuple(call.outputs[0].shape) if call.outputs and call.outputs[0] is not None else call.shapes[0]
    ways: list[Way] = []
    for dim, size in enumerate(shape):
        ins: list[Letter] = []
        for in_shape in call.shapes:
            in_dim = dim - (len(shape) - len(in_shape))
            ins.append(in_dim if in_dim >= 0 and in_shape[in_dim] == size else "B")
        if not is_in_place(call) or ins[0] == dim:
            ways.append((tuple(ins), (dim,) * len(call.outputs)))
    ways += _linear_ways(call)
    _check_device(call)
    return decide(call, ways, in_place=is_in_place(call))


def _check_device(call: OperatorCall) -> None:
    wanted = call.kwargs.get("device")
    if wanted is not None and torch.device(wanted).type != call.placement.type:
        raise refusal(call, f"a copy on '{wanted}' is not on the placement's devices", "a change of dtype alone")


def _linear_ways(call: OperatorCall) -> list[Way]:
    """Returns the ways that compute the operator on each term of a partial sum."""
    base, num = _base(call), len(call.tensors)
    both: Way = (("P", "P"), ("P",))
    if base in _LINEAR and num == 1:
        return [PARTIAL]
    if not _same_kind(call) or any(argument.is_out for argument in call.func._schema.arguments):
        return []  # with ``out=`` the last tensor is no operand, but the one that is written into
    ways: list[Way] = []
    if base == "_to_copy":
        ways = [PARTIAL]
    elif base in ("copy", "add", "sub") and num == 2:
        ways = [both] if base == "copy" or isfinite(call.arg("alpha")) else []
    elif base == "mul" or (base == "div" and call.func._overloadname in ("Tensor", "Scalar")):
        ways = _scaled(call, base)
    return [way for way in ways if _keeps_terms(call, way)]


def _keeps_terms(call: OperatorCall, way: Way) -> bool:
    """Whether the output's dtype is wide enough for the terms of a partial sum.

    If each term were rounded singly, the terms would not add up to the rounded sum.
    """
    terms = [x for x, letter in zip(call.tensors, way[0], strict=True) if letter == "P"]
    return all(holds(call.output.dtype, x.dtype) for x in terms)


def _scaled(call: OperatorCall, base: str) -> list[Way]:
    """Returns the ways that multiply or divide a partial sum term by term.

    There is no way if a term of zero could become nan: with an infinite factor, with a divisor of zero, or with a
    tensor as the divisor, since the rule does not read its values.
    """
    if len(call.tensors) == 2 and call.tensors[0] is call.tensors[1]:
        return []
    numbers = [number_of(argument) for argument in call.args[:2]]
    if any(number is not None and not isfinite(number) for number in numbers):
        return []
    if base == "div" and (call.args[0] is not call.tensors[0] or not numbers[1]):
        return []
    if len(call.tensors) == 1:
        return [PARTIAL]
    first: Way = (("P", "B"), ("P",))
    second: Way = (("B", "P"), ("P",))
    return [first, second] if base == "mul" and not is_in_place(call) else [first]


def _same_kind(call: OperatorCall) -> bool:
    """Whether no value is truncated to an integer, which would make terms of a sum wrong."""
    out = call.output
    kinds = {x.dtype.is_floating_point or x.dtype.is_complex for x in (*call.tensors, out)}
    return kinds == {True} or ({x.dtype for x in call.tensors} == {out.dtype} and out.dtype != torch.bool)
