"""Losses: samples may be cut; a mean divides by the weight of all targets, not of those here."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from shardwright.global_tensor.boxing import move
from shardwright.global_tensor.geometry import GlobalLayout
from shardwright.global_tensor.rules import pointwise
from shardwright.global_tensor.rules.call import Decision, OperatorCall, Way, decide, wide
from shardwright.global_tensor.sbp import broadcast

NONE, MEAN, SUM = 0, 1, 2


def _samples(call: OperatorCall) -> list[tuple[int, int]]:
    """The dims of the scores and of the targets that may be cut together: all but the classes."""
    scores = call.shapes[call.place("self") or 0]
    if len(scores) == 1:
        return []
    return [(0, 0), *((dim, dim - 1) for dim in range(2, len(scores)))]


def _nll(call: OperatorCall) -> Decision:
    reduction = call.arg("reduction")
    ways: list[Way] = []
    for dim, own in _samples(call):
        outs = (own, "P") if reduction == NONE else ("P", "P")
        ways.append((call.letters(self=dim, target=own), outs))
    decision = decide(call, ways, _nll_here)
    decision.talks = reduction == MEAN
    if reduction in (MEAN, NONE):
        decision.outs[1] = (broadcast,) * call.placement.ndim
    return decision


def _nll_here(call: OperatorCall, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The sum over what is here, and the weight of all targets."""
    if call.arg("reduction") == NONE or all(one == broadcast for one in decision.outs[0]):
        return call.func(*args, **kwargs)
    loss, weight = call.func(*call.with_arg("reduction", SUM, args), **kwargs)
    if call.arg("reduction") == SUM:
        return loss, weight
    where = GlobalLayout(call.placement, decision.outs[0])
    weight = move(weight, (), where, GlobalLayout(call.placement, decision.outs[1]))
    return loss / weight, weight


def _nll_backward(call: OperatorCall) -> Decision:
    ways: list[Way] = []
    for dim, own in _samples(call):
        cut = call.letters(self=dim, target=own)
        if call.arg("reduction") == NONE:
            cut = call.letters(self=dim, target=own, grad_output=own)
        ways.append((cut, (dim,)))
    return decide(call, ways)


def _reduced(call: OperatorCall) -> Decision:
    """``mse_loss`` and its like, summed or averaged over all elements."""
    shape = call.shapes[0]
    alike = all(given == shape for given in call.shapes)
    if call.arg("reduction") == NONE:
        return pointwise.rule(call)
    ways: list[Way] = [((dim,) * len(call.tensors), ("P",)) for dim in range(len(shape))] if alike else []
    return decide(call, ways, _reduced_here)


def _reduced_here(call: OperatorCall, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _averaged(call, decision, args, kwargs, call.shapes[0])


def _averaged(
    call: OperatorCall, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]
) -> Any:
    """A mean over all of ``shape``, of which a part is here: a sum, in wide floats, and divided."""
    if call.arg("reduction") != MEAN or all(one == broadcast for one in decision.outs[0]):
        return call.func(*args, **kwargs)
    given = call.with_arg("reduction", SUM, args), kwargs
    args, kwargs = tree_map(lambda x: x.to(wide(x.dtype)) if isinstance(x, Tensor) else x, given)
    assert call.outputs[0] is not None
    return (call.func(*args, **kwargs) / prod(shape)).to(call.outputs[0].dtype)


def _reduced_backward(call: OperatorCall) -> Decision:
    """The backward of a mean divides by how many elements there are in all."""
    shape, reduction = call.out_shape, call.arg("reduction")
    ways: list[Way] = []
    for dim in range(len(shape)):
        alike = all(given == shape for given in call.shapes[1:])
        if alike and (reduction != NONE or call.shapes[0] == shape):
            ways.append(((dim if reduction == NONE else "B", *(dim,) * (len(call.tensors) - 1)), (dim,)))
    return decide(call, ways, _backward_here)


def _backward_here(call: OperatorCall, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _averaged(call, decision, args, kwargs, call.out_shape)


def _with_logits(call: OperatorCall) -> Decision:
    """Scores and targets of one shape; weights have it, or are broadcast to it from the last dims."""
    shape = call.shapes[0]
    out = "P" if call.arg("reduction") != NONE else None
    ways: list[Way] = []
    for dim, size in enumerate(shape):
        own = [dim - len(shape) + len(given) for given in call.shapes]
        cut = [at if at >= 0 and given[at] == size else "B" for at, given in zip(own, call.shapes, strict=True)]
        if cut[:2] == [dim, dim]:
            ways.append((tuple(cut), (dim if out is None else out,)))
    return decide(call, ways, _reduced_here)


_ELEMENTWISE = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy")

RULES: dict[str, Any] = {
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _nll_backward),
    **dict.fromkeys(_ELEMENTWISE, _reduced),
    **dict.fromkeys((f"{name}_backward" for name in _ELEMENTWISE), _reduced_backward),
    "binary_cross_entropy_with_logits": _with_logits,
}
