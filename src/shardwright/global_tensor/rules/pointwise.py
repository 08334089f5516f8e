"""Operators that compute each element alone: torch marks them; what is linear passes sums in parts on."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.global_tensor.rules.call import (
    Decision,
    Letter,
    OperatorCall,
    Way,
    decide,
    is_finite,
    is_wider,
    number_of,
    refusal,
)

# beside those that torch marks
MORE = frozenset(
    {
        "copy", "_to_copy", "detach", "alias", "lift_fresh", "softplus_backward", "leaky_relu_backward", "fill",
        "zero", "masked_fill", "elu_backward", "hardtanh_backward", "hardswish_backward", "hardsigmoid_backward",
        "log_sigmoid_backward", "_conj", "floor_divide", "positive", "smooth_l1_loss_backward", "mse_loss_backward",
        "_prelu_kernel", "_prelu_kernel_backward", "log_sigmoid_forward", "hardswish", "hardshrink_backward",
        "softshrink_backward", "_neg_view",
    }
)  # fmt: skip

LINEAR = frozenset({"clone", "detach", "alias", "neg", "lift_fresh", "positive", "zero", "_conj", "_neg_view"})
"""Of one tensor; ``_to_copy`` too, to a type that rounds nothing."""


def _base(call: OperatorCall) -> str:
    return call.name.removesuffix("_") if is_in_place(call) else call.name


def is_in_place(call: OperatorCall) -> bool:
    """Whether it writes to its first argument and returns it."""
    returns = call.func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and returns[0].alias_info.is_write


def is_pointwise(call: OperatorCall) -> bool:
    """Whether it computes each element of its output from the elements there."""
    if _base(call) in MORE and not _by_reduction(call):
        return True
    if is_in_place(call):
        plain = getattr(torch.ops.aten, _base(call), None)
        tagged = plain is not None and any(
            torch.Tag.pointwise in getattr(plain, overload).tags for overload in plain.overloads()
        )
        return tagged or torch.Tag.pointwise in call.func.tags
    return torch.Tag.pointwise in call.func.tags and not _by_reduction(call)


def _by_reduction(call: OperatorCall) -> bool:
    """A loss is pointwise only when it is not reduced."""
    return any(argument.name == "reduction" for argument in call.func._schema.arguments) and call.arg("reduction") != 0


def rule(call: OperatorCall) -> Decision:
    """Every dim may be cut, in all tensors that have it."""
    shape = tuple(call.outputs[0].shape) if call.outputs and call.outputs[0] is not None else call.shapes[0]
    ways: list[Way] = []
    for dim, size in enumerate(shape):
        ins: list[Letter] = []
        for given in call.shapes:
            own = dim - (len(shape) - len(given))
            ins.append(own if own >= 0 and given[own] == size else "B")
        if not is_in_place(call) or ins[0] == dim:
            ways.append((tuple(ins), (dim,) * len(call.outputs)))
    ways += _linear(call)
    _check_device(call)
    return decide(call, ways, in_place=is_in_place(call))


def _check_device(call: OperatorCall) -> None:
    wanted = call.kwargs.get("device")
    if wanted is not None and torch.device(wanted).type != call.placement.type:
        raise refusal(call, f"a copy on '{wanted}' is not on the placement's devices", "dtypes only")


def _linear(call: OperatorCall) -> list[Way]:
    """The ways that compute each term of a sum apart."""
    base, num = _base(call), len(call.tensors)
    alone: Way = (("P",), ("P",))
    both: Way = (("P", "P"), ("P",))
    if base in LINEAR and num == 1:
        return [alone]
    if not _same_kind(call):
        return []
    if base == "_to_copy":
        found = [alone]
    elif base in ("copy", "add", "sub") and num == 2:
        found = [both] if base == "copy" or is_finite(call.arg("alpha")) else []
    elif base == "mul" or (base == "div" and call.func._overloadname in ("Tensor", "Scalar")):
        found = _scaled(call, base)
    else:
        found = []
    return [way for way in found if _keeps_terms(call, way)]


def _keeps_terms(call: OperatorCall, way: Way) -> bool:
    """Whether the terms fit into what is returned: each rounded alone, they would not add up to their rounded sum."""
    out = call.outputs[0]
    assert out is not None
    terms = [x for x, letter in zip(call.tensors, way[0], strict=True) if letter == "P"]
    return all(is_wider(out.dtype, x.dtype) for x in terms)


def _scaled(call: OperatorCall, base: str) -> list[Way]:
    """A sum times a factor, or by a divisor, term by term: not where a term of zero becomes no number.

    That is by infinity, by zero, and by a divisor that is a tensor, whose zeros nobody knows.
    """
    if len(call.tensors) == 2 and call.tensors[0] is call.tensors[1]:
        return []
    numbers = [number_of(each) for each in call.args[:2]]
    if any(each is not None and not is_finite(each) for each in numbers):
        return []
    if base == "div" and (call.args[0] is not call.tensors[0] or not numbers[1]):
        return []
    if len(call.tensors) == 1:
        return [(("P",), ("P",))]
    first: Way = (("P", "B"), ("P",))
    second: Way = (("B", "P"), ("P",))
    return [first, second] if base == "mul" and not is_in_place(call) else [first]


def _same_kind(call: OperatorCall) -> bool:
    """Whether nothing is rounded to whole numbers on the way, so that terms may be computed apart."""
    out = call.outputs[0]
    assert out is not None
    kinds = {x.dtype.is_floating_point or x.dtype.is_complex for x in (*call.tensors, out)}
    return kinds == {True} or ({x.dtype for x in call.tensors} == {out.dtype} and out.dtype != torch.bool)


RULES: dict[str, Any] = {}
