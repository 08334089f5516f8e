"""Sharding rules of operators such as ``zeros_like``, which create a constant or empty tensor from another one."""

from __future__ import annotations

from typing import Any

from shardwright.global_tensor.rules.call import OperatorCall, ShardingDecision
from shardwright.global_tensor.sbp import broadcast
from shardwright.global_tensor.tensor import without_sums


def _like(call: OperatorCall) -> ShardingDecision:
    """Keeps the input's sbp for the result, but makes partial sums broadcast, since each rank fills in the constant."""
    x = call.tensors[0]
    return ShardingDecision([x.sbp], [without_sums(x.sbp)], _run)


def _new(call: OperatorCall) -> ShardingDecision:
    """Places the result whole on every rank (broadcast), since the new shape may not split as the input's does."""
    return ShardingDecision([call.tensors[0].sbp], [(broadcast,) * call.placement.ndim], _run)


def _run(call: OperatorCall, decision: ShardingDecision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("device") is not None:  # torch names the device type; this rank's device has an index
        kwargs = {**kwargs, "device": call.tensors[0]._local_tensor.device}
    return call.func(*args, **kwargs)


RULES = {
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "empty_like"), _like),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"), _new),
}
