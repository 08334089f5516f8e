"""New tensors after the form of another: constants, and copies of what has no values yet."""

from __future__ import annotations

from typing import Any

from shardwright.global_tensor.rules.call import Decision, OperatorCall
from shardwright.global_tensor.sbp import broadcast


def _like(call: OperatorCall) -> Decision:
    """Lies as the other does: a constant over the copies of a sum is no sum."""
    x = call.tensors[0]
    out = tuple(broadcast if one.is_partial() else one for one in x.sbp)
    return Decision([x.sbp], [out], _cut)


def _cut(call: OperatorCall, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call.func(*args, **{**kwargs, **_here(call, kwargs)})


def _new(call: OperatorCall) -> Decision:
    """Whole on every member; it is of another shape than the other is."""
    x = call.tensors[0]
    return Decision([x.sbp], [(broadcast,) * call.placement.ndim], _cut)


def _here(call: OperatorCall, kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": call.tensors[0]._local_tensor.device} if kwargs.get("device") is not None else {}


RULES = {
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "empty_like"), _like),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"), _new),
}
