"""Operators that only rename, reorder or choose elements, and what their backward puts back. All are linear.

A reshape keeps a cut where the slices stay slices::

    (6, 4) split(0) over 2 -> (24,) split(0): rows 0:3 are elements 0:12
    (6, 4) split(0) over 4 -> (24,) split(0): rows 0:2 are elements 0:8, and a quarter is 0:6: gathered first
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch.distributed.tensor import Shard

from shardwright.global_tensor.geometry import GlobalLayout, boxes
from shardwright.global_tensor.rules.call import Decision, OperatorCall, Run, Way, decide, refusal
from shardwright.global_tensor.sbp import broadcast, split

PARTIAL: Way = (("P",), ("P",))


# ---- reshapes


def _reshape(call: OperatorCall) -> Decision:
    if call.func._overloadname == "dtype":  # other bytes: of whole tensors only
        raise refusal(call, "it reads the bytes as another dtype")
    before, after = call.shapes[0], call.out_shape
    sbp = tuple(call.tensors[0].sbp)
    ins, outs = list(sbp), list(sbp)
    for dim in {one.dim for one in sbp if isinstance(one, Shard)}:
        axes = [i for i, one in enumerate(sbp) if isinstance(one, Shard) and one.dim == dim]
        while axes:
            found = _same_slices(call, before, after, dim, axes)
            if found is not None:
                outs = [split(found) if axis in axes else one for axis, one in enumerate(outs)]
                break
            ins[axes.pop()] = broadcast
    outs = [one if ins[i] == sbp[i] else broadcast for i, one in enumerate(outs)]
    return Decision([tuple(ins)], [tuple(outs)], _reshaped)


def _same_slices(
    call: OperatorCall, before: tuple[int, ...], after: tuple[int, ...], dim: int, axes: Sequence[int]
) -> int | None:
    """The dim of ``after`` whose slices over ``axes`` are the same elements as those of ``dim`` before."""
    for other in range(len(after)):
        if prod(before[:dim]) != prod(after[:other]) or (after[other] == 1 and before[dim] != 1):
            continue
        was, is_ = prod(before[dim + 1 :]), prod(after[other + 1 :])
        if was * before[dim] != is_ * after[other]:
            continue
        old = boxes((before[dim],), _only(call, axes, 0))
        new = boxes((after[other],), _only(call, axes, 0))
        if all(
            (a.start[0] * was, a.stop[0] * was) == (b.start[0] * is_, b.stop[0] * is_)
            for a, b in zip(old.values(), new.values(), strict=True)
        ):
            return other
    return None


def _only(call: OperatorCall, axes: Sequence[int], dim: int) -> GlobalLayout:
    sbp = tuple(split(dim) if axis in axes else broadcast for axis in range(call.placement.ndim))
    return GlobalLayout(call.placement, sbp)


def _reshaped(call: OperatorCall, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shape = decision.local_shape_of(call)
    return args[0].view(shape) if _can_view(args[0], shape) else args[0].reshape(shape)


def _can_view(local: Any, shape: tuple[int, ...]) -> bool:
    try:
        local.view(shape)
    except RuntimeError:
        return False
    return True


# ---- dims renamed


def renamed(call: OperatorCall, new: Callable[[int], int | None], run: Run | None = None) -> Decision:
    """Dim ``d`` becomes ``new(d)``; None where it cannot stay cut."""
    ways: list[Way] = [((dim,), (to,)) for dim in range(len(call.shapes[0])) if (to := new(dim)) is not None]
    ways = [(ins, outs * max(len(call.outputs), 1)) for ins, outs in [*ways, PARTIAL]]
    return decide(call, ways, run)


def _permute(call: OperatorCall) -> Decision:
    order = [dim % len(call.shapes[0]) for dim in call.arg("dims")]
    return renamed(call, order.index)


def _transpose(call: OperatorCall) -> Decision:
    num = max(len(call.shapes[0]), 1)
    a, b = call.arg("dim0") % num, call.arg("dim1") % num
    return renamed(call, lambda dim: {a: b, b: a}.get(dim, dim))


def _t(call: OperatorCall) -> Decision:
    return renamed(call, lambda dim: 1 - dim if len(call.shapes[0]) == 2 else dim)


def _unsqueeze(call: OperatorCall) -> Decision:
    at = call.arg("dim") % (len(call.shapes[0]) + 1)
    return renamed(call, lambda dim: dim + (dim >= at))


def _squeeze(call: OperatorCall) -> Decision:
    shape = call.shapes[0]
    given = call.arg("dim") if any(a.name == "dim" for a in call.func._schema.arguments) else None
    named = range(len(shape)) if given is None else [given] if isinstance(given, int) else given
    gone = [dim for dim in {d % max(len(shape), 1) for d in named} if shape and shape[dim] == 1]

    def squeezed(call: OperatorCall, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0].squeeze(tuple(gone))  # those of size 1 in the whole, and not those of size 1 here

    return renamed(call, lambda dim: None if dim in gone else dim - sum(d < dim for d in gone), squeezed)


def _expand(call: OperatorCall) -> Decision:
    before, after = call.shapes[0], call.out_shape
    more = len(after) - len(before)

    def expanded(call: OperatorCall, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0].expand(decision.local_shape_of(call))

    return renamed(call, lambda dim: dim + more if before[dim] == after[dim + more] else None, expanded)


# ---- elements chosen along one dim


def _dim(call: OperatorCall, name: str = "dim") -> int:
    return int(call.arg(name)) % max(len(call.shapes[0]), 1)


def _chosen(call: OperatorCall) -> Decision:
    """Other dims stay cut; so does this one where all of it is chosen."""
    along = _dim(call)
    return renamed(call, lambda dim: None if dim == along else dim)


def _slice(call: OperatorCall) -> Decision:
    if call.out_shape == call.shapes[0] and call.arg("step") == 1:
        return renamed(call, lambda dim: dim, lambda call, decision, args, kwargs: args[0][...])
    return _chosen(call)


def _select(call: OperatorCall) -> Decision:
    along = _dim(call)
    return renamed(call, lambda dim: None if dim == along else dim - (dim > along))


def _diagonal(call: OperatorCall) -> Decision:
    num = len(call.shapes[0])
    gone = sorted((call.arg("dim1") % num, call.arg("dim2") % num))
    return renamed(call, lambda dim: None if dim in gone else dim - sum(d < dim for d in gone))


def _diag_embed(call: OperatorCall) -> Decision:
    num = len(call.out_shape)
    made = {call.arg("dim1") % num, call.arg("dim2") % num}
    left = [dim for dim in range(num) if dim not in made]
    return renamed(call, lambda dim: left[dim] if dim < len(left) else None)


def _complex(call: OperatorCall) -> Decision:
    """Two numbers in the last dim are one, or the other way round."""
    gone = len(call.shapes[0]) - 1 if call.name == "view_as_complex" else None
    return renamed(call, lambda dim: None if dim == gone else dim)


def _put(call: OperatorCall) -> Decision:
    """``slice_scatter``, ``select_scatter``: what is put in has the other dims too."""
    along, is_select = _dim(call), call.name == "select_scatter"
    dims = [dim for dim in range(len(call.shapes[0])) if dim != along]
    ways: list[Way] = [((dim, dim - (is_select and dim > along)), (dim,)) for dim in dims]
    return decide(call, [*ways, (("P", "P"), ("P",))])


def _unfold(call: OperatorCall) -> Decision:
    along = _dim(call, "dimension")
    return renamed(call, lambda dim: None if dim == along else dim)


def _repeat(call: OperatorCall) -> Decision:
    more = len(call.out_shape) - len(call.shapes[0])
    times = call.arg("repeats")
    return renamed(call, lambda dim: dim + more if times[dim + more] == 1 else None)


def _padded(call: OperatorCall) -> Decision:
    pad, num = call.arg("pad"), len(call.shapes[0])
    widened = {num - 1 - i // 2 for i, width in enumerate(pad) if width}
    ways: list[Way] = [((dim,), (dim,)) for dim in range(num) if dim not in widened]
    return decide(call, ways + ([PARTIAL] if call.arg("value") == 0 else []))


# ---- their backward: the size of the input is an argument


def _put_back(call: OperatorCall) -> Decision:
    """``slice_backward``, ``select_backward``, ``diagonal_backward``: from a chosen part to a whole of zeros."""
    sizes = tuple(call.arg("input_sizes"))
    if call.name == "diagonal_backward":
        gone = {call.arg("dim1") % len(sizes), call.arg("dim2") % len(sizes)}
    else:
        gone = {int(call.arg("dim")) % len(sizes)}
    left = [dim for dim in range(len(sizes)) if dim not in gone]
    order = left if call.name != "slice_backward" else list(range(len(sizes)))

    def put(call: OperatorCall, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shape = decision.local_shape_of(call)
        return call.func(*call.with_arg("input_sizes", list(shape), args), **kwargs)

    return renamed(call, lambda dim: order[dim] if dim < len(order) and order[dim] not in gone else None, put)


def _same(call: OperatorCall) -> Decision:
    return renamed(call, lambda dim: dim)


RULES: dict[str, Any] = {
    **dict.fromkeys(("view", "_unsafe_view", "_reshape_alias", "reshape"), _reshape),
    "permute": _permute,
    "transpose": _transpose,
    "t": _t,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"), _chosen),
    "unbind": _select,
    "diagonal": _diagonal,
    "diag_embed": _diag_embed,
    **dict.fromkeys(("view_as_complex", "view_as_real"), _complex),
    **dict.fromkeys(("slice_scatter", "select_scatter"), _put),
    "unfold": _unfold,
    "repeat": _repeat,
    "constant_pad_nd": _padded,
    **dict.fromkeys(("slice_backward", "select_backward", "diagonal_backward"), _put_back),
    **dict.fromkeys(("lift_fresh", "alias", "detach"), _same),
}
