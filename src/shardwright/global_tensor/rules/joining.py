"""Tensors joined into one: every dim but the one they are joined along may be cut, in all of them alike."""

from __future__ import annotations

from shardwright.global_tensor.rules.call import Decision, OperatorCall, Way, decide


def _cat(call: OperatorCall) -> Decision:
    num, shape = len(call.tensors), call.out_shape
    along = call.arg("dim") % max(len(shape), 1)
    ways: list[Way] = [((dim,) * num, (dim,)) for dim in range(len(shape)) if dim != along]
    if any(len(given) != len(shape) for given in call.shapes):  # torch lets an empty 1-D tensor join any
        ways = []
    return decide(call, [*ways, (("P",) * num, ("P",))])


def _stack(call: OperatorCall) -> Decision:
    num = len(call.tensors)
    along = call.arg("dim") % (len(call.shapes[0]) + 1)
    ways: list[Way] = [((dim,) * num, (dim + (dim >= along),)) for dim in range(len(call.shapes[0]))]
    return decide(call, [*ways, (("P",) * num, ("P",))])


RULES = {"cat": _cat, "stack": _stack}
