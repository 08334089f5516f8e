"""Sharding rules of reshapes, permutations, slices and their backwards; partial sums stay partial sums.

A reshape keeps a split if the slices of the input are slices of the output; otherwise the dim is gathered first::

    (6, 4) split(0) over 2 -> (24,) split(0): rows 0:3 are elements 0:12, the first half
    (6, 4) split(0) over 4 -> (24,) broadcast: rows 0:2 are elements 0:8, but the first quarter is 0:6
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch.distributed.tensor import Shard

from shardwright.global_tensor.geometry import GlobalLayout, boxes
from shardwright.global_tensor.rules.call import OperatorCall, RunOperator, ShardingDecision, Way, decide, refusal
from shardwright.global_tensor.rules.dims import PARTIAL
from shardwright.global_tensor.sbp import broadcast, split

# ---- reshapes


def _reshape(call: OperatorCall) -> ShardingDecision:
    if call.func._overloadname == "dtype":
        raise refusal(call, "it reads the bytes as another dtype")
    before, after = call.shapes[0], call.out_shape
    sbp = tuple(call.tensors[0].sbp)
    ins, outs = list(sbp), list(sbp)
    for dim in {one.dim for one in sbp if isinstance(one, Shard)}:
        axes = [i for i, one in enumerate(sbp) if isinstance(one, Shard) and one.dim == dim]
        # gathers along the fastest axis, then along the next, until the slices that remain are slices of the output too
        while axes:
            new_dim = _same_slices(call, before, after, dim, axes)
            if new_dim is not None:
                outs = [split(new_dim) if axis in axes else one for axis, one in enumerate(outs)]
                break
            ins[axes.pop()] = broadcast
    outs = [one if ins[i] == sbp[i] else broadcast for i, one in enumerate(outs)]
    return ShardingDecision([tuple(ins)], [tuple(outs)], _run_reshape)


def _same_slices(
    call: OperatorCall, before: tuple[int, ...], after: tuple[int, ...], dim: int, axes: Sequence[int]
) -> int | None:
    """Returns the dim of ``after`` whose slices over ``axes`` hold the same elements as the slices of dim ``dim``."""
    sbp = tuple(split(0) if axis in axes else broadcast for axis in range(call.placement.ndim))
    layout = GlobalLayout(call.placement, sbp)
    for other in range(len(after)):
        if prod(before[:dim]) != prod(after[:other]) or (after[other] == 1 and before[dim] != 1):
            continue
        old_row, new_row = prod(before[dim + 1 :]), prod(after[other + 1 :])  # elements for each index of the dim
        if old_row * before[dim] != new_row * after[other]:
            continue
        old, new = boxes((before[dim],), layout), boxes((after[other],), layout)
        if all(
            (a.start[0] * old_row, a.stop[0] * old_row) == (b.start[0] * new_row, b.stop[0] * new_row)
            for a, b in zip(old.values(), new.values(), strict=True)
        ):
            return other
    return None


def _run_reshape(call: OperatorCall, decision: ShardingDecision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shape = decision.local_shape_of(call)
    return args[0].view(shape) if _can_view(args[0], shape) else args[0].reshape(shape)


def _can_view(local: Any, shape: tuple[int, ...]) -> bool:
    try:
        local.view(shape)
    except RuntimeError:
        return False
    return True


# ---- dims renamed


def _renamed(call: OperatorCall, new: Callable[[int], int | None], run: RunOperator | None = None) -> ShardingDecision:
    """Returns the decision of an operator that moves dim ``d`` to ``new(d)``: None if the dim must be whole."""
    ways: list[Way] = [((dim,), (to,)) for dim in range(len(call.shapes[0])) if (to := new(dim)) is not None]
    ways = [(ins, outs * max(len(call.outputs), 1)) for ins, outs in [*ways, PARTIAL]]
    return decide(call, ways, run)


def _permute(call: OperatorCall) -> ShardingDecision:
    order = [dim % len(call.shapes[0]) for dim in call.arg("dims")]
    return _renamed(call, order.index)


def _transpose(call: OperatorCall) -> ShardingDecision:
    a, b = call.dim("dim0"), call.dim("dim1")
    return _renamed(call, lambda dim: {a: b, b: a}.get(dim, dim))


def _t(call: OperatorCall) -> ShardingDecision:
    return _renamed(call, lambda dim: 1 - dim if len(call.shapes[0]) == 2 else dim)


def _unsqueeze(call: OperatorCall) -> ShardingDecision:
    at = call.dim(num_dims=len(call.shapes[0]) + 1)
    return _renamed(call, lambda dim: dim + (dim >= at))


def _squeeze(call: OperatorCall) -> ShardingDecision:
    shape = call.shapes[0]
    argument = call.arg("dim") if "dim" in call.names else None
    dims = range(len(shape)) if argument is None else [argument] if isinstance(argument, int) else argument
    gone = [dim for dim in {d % max(len(shape), 1) for d in dims} if shape and shape[dim] == 1]

    def run(call: OperatorCall, decision: ShardingDecision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0].squeeze(tuple(gone))  # dims of size 1 in the global tensor, not in the local one

    return _renamed(call, lambda dim: None if dim in gone else dim - sum(d < dim for d in gone), run)


def _expand(call: OperatorCall) -> ShardingDecision:
    before, after = call.shapes[0], call.out_shape
    more = len(after) - len(before)

    def run(call: OperatorCall, decision: ShardingDecision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0].expand(decision.local_shape_of(call))

    return _renamed(call, lambda dim: dim + more if before[dim] == after[dim + more] else None, run)


# ---- elements chosen along one dim, which cannot stay split


def _chunks(call: OperatorCall) -> ShardingDecision:
    along = call.dim("dimension" if call.name == "unfold" else "dim")
    return _renamed(call, lambda dim: None if dim == along else dim)


def _slice(call: OperatorCall) -> ShardingDecision:
    if call.out_shape == call.shapes[0] and call.arg("step") == 1:  # x[:], whose split dim stays split
        return _renamed(call, lambda dim: dim, lambda call, decision, args, kwargs: args[0][...])
    return _chunks(call)


def _select(call: OperatorCall) -> ShardingDecision:
    along = call.dim()
    return _renamed(call, lambda dim: None if dim == along else dim - (dim > along))


def _diagonal(call: OperatorCall) -> ShardingDecision:
    gone = (call.dim("dim1"), call.dim("dim2"))
    return _renamed(call, lambda dim: None if dim in gone else dim - sum(d < dim for d in gone))


def _diag_embed(call: OperatorCall) -> ShardingDecision:
    num = len(call.out_shape)
    left = [dim for dim in range(num) if dim not in (call.dim("dim1", num), call.dim("dim2", num))]
    return _renamed(call, lambda dim: left[dim] if dim < len(left) else None)


def _complex(call: OperatorCall) -> ShardingDecision:
    # view_as_complex joins the two numbers in the last dim to one
    gone = len(call.shapes[0]) - 1 if call.name == "view_as_complex" else None
    return _renamed(call, lambda dim: None if dim == gone else dim)


def _slice_scatter(call: OperatorCall) -> ShardingDecision:
    """The rule of ``slice_scatter`` and ``select_scatter``: splits a dim that is not written along, in both tensors."""
    along, is_select = call.dim(), call.name == "select_scatter"
    dims = [dim for dim in range(len(call.shapes[0])) if dim != along]
    ways: list[Way] = [((dim, dim - (is_select and dim > along)), (dim,)) for dim in dims]
    return decide(call, [*ways, (("P", "P"), ("P",))])


def _repeat(call: OperatorCall) -> ShardingDecision:
    more = len(call.out_shape) - len(call.shapes[0])
    times = call.arg("repeats")
    return _renamed(call, lambda dim: dim + more if times[dim + more] == 1 else None)


def _pad(call: OperatorCall) -> ShardingDecision:
    pad, num = call.arg("pad"), len(call.shapes[0])
    widened = {num - 1 - i // 2 for i, width in enumerate(pad) if width}  # torch lists the last dim's widths first
    ways: list[Way] = [((dim,), (dim,)) for dim in range(num) if dim not in widened]
    return decide(call, ways + ([PARTIAL] if call.arg("value") == 0 else []))


# ---- their backwards, which take the input's size as an argument


def _slice_backward(call: OperatorCall) -> ShardingDecision:
    """The rule of the backwards of ``slice``, ``select`` and ``diagonal``: a gradient among zeros of input size."""
    num = len(call.arg("input_sizes"))
    dims = ("dim1", "dim2") if call.name == "diagonal_backward" else ("dim",)
    gone = {call.dim(name, num) for name in dims}
    order = [dim for dim in range(num) if dim not in gone or call.name == "slice_backward"]

    def run(call: OperatorCall, decision: ShardingDecision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shape = decision.local_shape_of(call)
        return call.func(*call.with_arg("input_sizes", list(shape), args), **kwargs)

    return _renamed(call, lambda dim: order[dim] if dim < len(order) and order[dim] not in gone else None, run)


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
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes", "unfold"), _chunks),
    "unbind": _select,
    "diagonal": _diagonal,
    "diag_embed": _diag_embed,
    **dict.fromkeys(("view_as_complex", "view_as_real"), _complex),
    **dict.fromkeys(("slice_scatter", "select_scatter"), _slice_scatter),
    "repeat": _repeat,
    "constant_pad_nd": _pad,
    **dict.fromkeys(("slice_backward", "select_backward", "diagonal_backward"), _slice_backward),
    **dict.fromkeys(("lift_fresh", "alias", "detach"), lambda call: _renamed(call, lambda dim: dim)),
}
