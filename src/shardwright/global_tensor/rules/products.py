"""Matrix products: rows, columns or the contraction cut; a product is linear in each factor."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.global_tensor.rules.call import Decision, OperatorCall, Way, check_dtypes, decide, is_finite


def _mm(call: OperatorCall) -> Decision:
    return decide(
        call, [((0, "B"), (0,)), (("B", 1), (1,)), ((1, 0), ("P",)), (("P", "B"), ("P",)), (("B", "P"), ("P",))]
    )


def _bmm(call: OperatorCall) -> Decision:
    ways: list[Way] = [((0, 0), (0,)), ((1, "B"), (1,)), (("B", 2), (2,)), ((2, 1), ("P",))]
    return decide(call, [*ways, (("P", "B"), ("P",)), (("B", "P"), ("P",))])


def _added(call: OperatorCall, ways: list[Way]) -> Decision:
    """A product added to a first tensor, which is broadcast to it from the last dims."""
    shape, added = call.out_shape, call.shapes[0]
    found: list[Way] = []
    for ins, outs in ways:
        out = outs[0]
        if out == "P":
            if not (is_finite(call.arg("alpha")) and is_finite(call.arg("beta"))):
                continue  # a term of zero would be no number
            found.append((("P", *ins), outs))
            continue
        own = int(out) - (len(shape) - len(added))
        found.append(((own if own >= 0 and added[own] == shape[int(out)] else "B", *ins), outs))
    return decide(call, found)


def _addmm(call: OperatorCall) -> Decision:
    return _added(
        call, [((0, "B"), (0,)), (("B", 1), (1,)), ((1, 0), ("P",)), (("P", "B"), ("P",)), (("B", "P"), ("P",))]
    )


def _baddbmm(call: OperatorCall) -> Decision:
    return _added(call, [((0, 0), (0,)), ((1, "B"), (1,)), (("B", 2), (2,)), ((2, 1), ("P",))])


def _addmv(call: OperatorCall) -> Decision:
    return _added(call, [((0, "B"), (0,)), ((1, 0), ("P",)), (("P", "B"), ("P",)), (("B", "P"), ("P",))])


def _addbmm(call: OperatorCall) -> Decision:
    return _added(call, [((1, "B"), (0,)), (("B", 2), (1,)), ((0, 0), ("P",)), ((2, 1), ("P",))])


def _addr(call: OperatorCall) -> Decision:
    return _added(call, [((0, "B"), (0,)), (("B", 0), (1,)), (("P", "B"), ("P",)), (("B", "P"), ("P",))])


def _mv(call: OperatorCall) -> Decision:
    return decide(call, [((0, "B"), (0,)), ((1, 0), ("P",)), (("P", "B"), ("P",)), (("B", "P"), ("P",))])


def _dot(call: OperatorCall) -> Decision:
    return decide(call, [((0, 0), ("P",)), (("P", "B"), ("P",)), (("B", "P"), ("P",))])


def _of_one_dtype(rule: Callable[[OperatorCall], Decision]) -> Callable[[OperatorCall], Decision]:
    def checked(call: OperatorCall) -> Decision:
        check_dtypes(call)
        return rule(call)

    return checked


_RULES = {
    "mm": _mm,
    "bmm": _bmm,
    "mv": _mv,
    **dict.fromkeys(("dot", "vdot"), _dot),
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "addmv": _addmv,
    "addbmm": _addbmm,
    "addr": _addr,
}
RULES = {name: _of_one_dtype(rule) for name, rule in _RULES.items()}
