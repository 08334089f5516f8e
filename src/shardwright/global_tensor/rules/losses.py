"""Sharding rules of losses: samples may be split, and a mean divides by the count (or weight) of all ranks' targets."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from shardwright.global_tensor.boxing import redistribute_local
from shardwright.global_tensor.geometry import GlobalLayout
from shardwright.global_tensor.rules import pointwise
from shardwright.global_tensor.rules.call import OperatorCall, RunOperator, ShardingDecision, Way, decide, sum_dtype
from shardwright.global_tensor.sbp import broadcast

NONE, MEAN, SUM = 0, 1, 2


def _samples(call: OperatorCall) -> list[tuple[int, int]]:
    """Returns pairs of a dim of the scores and the same dim of the targets, which lack the classes (dim 1)."""
    scores = call.shapes[call.place("self") or 0]
    if len(scores) == 1:
        return []
    return [(0, 0), *((dim, dim - 1) for dim in range(2, len(scores)))]


def _nll(call: OperatorCall) -> ShardingDecision:
    reduction = call.arg("reduction")
    ways: list[Way] = []
    for dim, own in _samples(call):
        outs = (own, "P") if reduction == NONE else ("P", "P")
        ways.append((call.letters(self=dim, target=own), outs))
    decision = decide(call, ways, _run_nll)
    # for a mean the loss all-reduces the weights, so even a member without samples takes part
    decision.communicates = reduction == MEAN
    if reduction in (MEAN, NONE):
        decision.outs[1] = (broadcast,) * call.placement.ndim
    return decision


def _run_nll(call: OperatorCall, decision: ShardingDecision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes the loss of the local samples; a mean divides their sum by the weight of all targets: one all-reduce."""
    if call.arg("reduction") == NONE or all(one == broadcast for one in decision.outs[0]):
        return call.func(*args, **kwargs)
    loss, weight = call.func(*call.with_arg("reduction", SUM, args), **kwargs)
    if call.arg("reduction") == SUM:
        return loss, weight
    layout = GlobalLayout(call.placement, decision.outs[0])
    weight = redistribute_local(weight, (), layout, GlobalLayout(call.placement, decision.outs[1]))
    return loss / weight, weight


def _nll_backward(call: OperatorCall) -> ShardingDecision:
    ways: list[Way] = []
    for dim, own in _samples(call):
        grad = {"grad_output": own} if call.arg("reduction") == NONE else {}
        ways.append((call.letters(self=dim, target=own, **grad), (dim,)))
    return decide(call, ways)


def _elementwise(call: OperatorCall) -> ShardingDecision:
    shape = call.shapes[0]
    if call.arg("reduction") == NONE:
        return pointwise.rule(call)
    alike = all(in_shape == shape for in_shape in call.shapes)
    ways: list[Way] = [((dim,) * len(call.tensors), ("P",)) for dim in range(len(shape))] if alike else []
    return decide(call, ways, _mean_over(shape))


def _elementwise_backward(call: OperatorCall) -> ShardingDecision:
    """The rule of an elementwise loss's backward, which for a mean divides by the number of all elements."""
    shape, reduction = call.out_shape, call.arg("reduction")
    ways: list[Way] = []
    for dim in range(len(shape)):
        alike = all(in_shape == shape for in_shape in call.shapes[1:])
        if alike and (reduction != NONE or call.shapes[0] == shape):
            ways.append(((dim if reduction == NONE else "B", *(dim,) * (len(call.tensors) - 1)), (dim,)))
    return decide(call, ways, _mean_over(shape))


def _mean_over(shape: tuple[int, ...]) -> RunOperator:
    """Returns the function that computes a loss with a mean over ``shape``: the local sum by the global count."""

    def run(call: OperatorCall, decision: ShardingDecision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if call.arg("reduction") != MEAN or all(one == broadcast for one in decision.outs[0]):
            return call.func(*args, **kwargs)
        arguments = call.with_arg("reduction", SUM, args), kwargs
        args, kwargs = tree_map(lambda x: x.to(sum_dtype(x.dtype)) if isinstance(x, Tensor) else x, arguments)
        return (call.func(*args, **kwargs) / prod(shape)).to(call.output.dtype)

    return run


def _with_logits(call: OperatorCall) -> ShardingDecision:
    """The rule that splits scores and targets alike, and weights too unless they are broadcast along the dim."""
    shape = call.shapes[0]
    ways: list[Way] = []
    for dim, size in enumerate(shape):
        dims = [dim - len(shape) + len(in_shape) for in_shape in call.shapes]
        ins = [at if at >= 0 and in_shape[at] == size else "B" for at, in_shape in zip(dims, call.shapes, strict=True)]
        if ins[:2] == [dim, dim]:
            ways.append((tuple(ins), (dim if call.arg("reduction") == NONE else "P",)))
    return decide(call, ways, _mean_over(shape))


_ELEMENTWISE = ("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy")

RULES: dict[str, Any] = {
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _nll_backward),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys((f"{name}_backward" for name in _ELEMENTWISE), _elementwise_backward),
    "binary_cross_entropy_with_logits": _with_logits,
}
