"""Sharding rules of matrix products: rows, columns or the contraction dim may be split.

A split contraction gives partial sums, and a factor that is a partial sum is multiplied term by term.
"""

from __future__ import annotations

from cmath import isfinite
from collections.abc import Callable

from shardwright.global_tensor.rules.call import OperatorCall, ShardingDecision, Way, check_dtypes, decide

_LINEAR: list[Way] = [(("P", "B"), ("P",)), (("B", "P"), ("P",))]
_MM: list[Way] = [((0, "B"), (0,)), (("B", 1), (1,)), ((1, 0), ("P",)), *_LINEAR]
_MV: list[Way] = [((0, "B"), (0,)), ((1, 0), ("P",)), *_LINEAR]
_BMM: list[Way] = [((0, 0), (0,)), ((1, "B"), (1,)), (("B", 2), (2,)), ((2, 1), ("P",))]
_DOT: list[Way] = [((0, 0), ("P",)), *_LINEAR]


def _product(ways: list[Way]) -> Callable[[OperatorCall], ShardingDecision]:
    def rule(call: OperatorCall) -> ShardingDecision:
        check_dtypes(call)
        return decide(call, ways)

    return rule


def _added_product(ways: list[Way]) -> Callable[[OperatorCall], ShardingDecision]:
    """Returns the rule of a product, with these ways, that is added to a first tensor, as ``addmm`` does."""

    def rule(call: OperatorCall) -> ShardingDecision:
        check_dtypes(call)
        shape, added = call.out_shape, call.shapes[0]
        added_ways: list[Way] = []
        for ins, (out,) in ways:
            if out == "P":
                # a factor that is infinite would turn a term of zero into nan
                if isfinite(call.arg("alpha")) and isfinite(call.arg("beta")):
                    added_ways.append((("P", *ins), (out,)))
                continue
            at = int(out) - (len(shape) - len(added))  # dims are aligned from the last one on
            added_ways.append(((at if at >= 0 and added[at] == shape[int(out)] else "B", *ins), (out,)))
        return decide(call, added_ways)

    return rule


RULES = {
    "mm": _product(_MM),
    "bmm": _product([*_BMM, *_LINEAR]),
    "mv": _product(_MV),
    **dict.fromkeys(("dot", "vdot"), _product(_DOT)),
    "addmm": _added_product(_MM),
    "baddbmm": _added_product(_BMM),
    "addmv": _added_product(_MV),
    "addbmm": _added_product([((1, "B"), (0,)), (("B", 2), (1,)), ((0, 0), ("P",)), ((2, 1), ("P",))]),
    "addr": _added_product([((0, "B"), (0,)), (("B", 0), (1,)), *_LINEAR]),
}
