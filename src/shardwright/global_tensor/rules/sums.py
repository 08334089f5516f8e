"""Sums and means: over a cut dim each member has a term."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed.tensor import Shard

from shardwright.global_tensor.rules.call import Decision, OperatorCall, Way, decide, is_wider, wide
from shardwright.global_tensor.rules.dims import kept, named


def _along(call: OperatorCall) -> tuple[tuple[int, ...], bool]:
    names = {argument.name for argument in call.func._schema.arguments}
    along = named(call) if "dim" in names else tuple(range(len(call.shapes[0])))
    return along, not ("keepdim" in names and call.arg("keepdim"))


def _sum(call: OperatorCall) -> Decision:
    along, removed = _along(call)
    ways: list[Way] = [*kept(call, along, removed=removed), *(((dim,), ("P",)) for dim in along)]
    # a term that is no number is left out by nansum, and must not be
    if call.name == "sum" and call.tensors[0].dtype == call.outputs[0].dtype:  # type: ignore[union-attr]
        ways.append((("P",), ("P",)))
    return decide(call, ways)


def _mean(call: OperatorCall) -> Decision:
    along, removed = _along(call)
    ways: list[Way] = [*kept(call, along, removed=removed), *(((dim,), ("P",)) for dim in along)]
    if is_wider(call.outputs[0].dtype, call.tensors[0].dtype):  # type: ignore[union-attr]
        ways.append((("P",), ("P",)))
    return decide(call, ways, _mean_here)


def _mean_here(call: OperatorCall, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    along, removed = _along(call)
    if not any(isinstance(one, Shard) and one.dim in along for one in decision.ins[0]):
        return call.func(*args, **kwargs)
    count = prod(call.shapes[0][dim] for dim in along)  # of the whole: members may hold unequal parts
    dtype = kwargs.get("dtype") or args[0].dtype
    added = torch.sum(args[0], along, keepdim=not removed, dtype=wide(dtype))
    return (added / count).to(dtype)


RULES = {"sum": _sum, "mean": _mean, "nansum": _sum}
