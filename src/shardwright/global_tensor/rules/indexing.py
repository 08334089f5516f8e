"""Sharding rules of indexing by tensors: dims that are not indexed may be split, and in look-ups the indices too.

``index_put`` is computed on broadcast tensors. An embedding's table may be split along its rows as well: look-ups are
then partial sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.comm.current_world import current_world
from shardwright.errors import explain
from shardwright.global_tensor.geometry import GlobalLayout, boxes
from shardwright.global_tensor.rules import pointwise
from shardwright.global_tensor.rules.call import Letter, OperatorCall, ShardingDecision, Way, decide


def is_by_mask(call: OperatorCall) -> bool:
    """Returns whether an indexing call uses a boolean mask, so that the shape of its result depends on values."""
    return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in call.arg("indices"))


# ---- embedding


def _embedding(call: OperatorCall) -> ShardingDecision:
    """The rule that splits the indices, the table's columns, or its rows; with rows, lookups are partial sums."""
    num = len(call.shapes[1])
    ways: list[Way] = [(("B", dim), (dim,)) for dim in range(num)]
    return decide(call, [*ways, ((1, "B"), (num,)), (("P", "B"), ("P",)), ((0, "B"), ("P",))], _run_embedding)


def _run_embedding(
    call: OperatorCall, decision: ShardingDecision, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    table: Tensor = args[0]
    index: Tensor = args[1]
    held = boxes(call.shapes[0], GlobalLayout(call.placement, decision.ins[0]))[current_world().rank]
    if held.shape[0] == call.shapes[0][0]:
        return torch.nn.functional.embedding(index, table)
    first, last = held.start[0], held.stop[0]
    fix = "look up rows that the table has, or make it larger"
    _check_range(index, call.shapes[0][0], "an index of a table", "the table's rows", fix)
    out: Tensor = table.new_zeros((*index.shape, table.shape[1]))
    is_here = (index >= first) & (index < last)
    out[is_here] = table[index[is_here] - first]
    return out


def _check_range(index: Tensor, size: int, what: str, allowed: str, fix: str) -> None:
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
        index_range = f"{int(index.min())} to {int(index.max())}"
        raise IndexError(
            explain(f"{what} is out of range", given=index_range, allowed=f"0 to {size - 1}, {allowed}", fix=fix)
        )


def _embedding_backward(call: OperatorCall) -> ShardingDecision:
    num = len(call.shapes[1])
    ways: list[Way] = [((num, "B"), (1,)), (("P", "B"), ("P",))]
    if not call.arg("scale_grad_by_freq"):
        ways += [((dim, dim), ("P",)) for dim in range(num)]
    return decide(call, ways)


def _equal(call: OperatorCall) -> ShardingDecision:
    """The pointwise rule; if the comparison with 0, 1, 2 and so on is ``one_hot``'s, the classes are checked too."""
    decision, numbers = pointwise.rule(call), call.tensors[-1]._plain
    if numbers is not None and numbers.ndim and call.shapes[0][-1:] == (1,):
        decision.run = _run_one_hot
    return decision


def _run_one_hot(call: OperatorCall, decision: ShardingDecision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _check_range(args[0], call.shapes[1][0], "a class of one_hot", "the classes", "give more classes with num_classes")
    return call.func(*args, **kwargs)


# ---- along one dim


def _index_select(call: OperatorCall) -> ShardingDecision:
    along, num = call.dim(), len(call.shapes[0])
    ways: list[Way] = [((dim, "B"), (dim,)) for dim in range(num) if dim != along]
    return decide(call, [*ways, (("B", 0), (along,)), (("P", "B"), ("P",))] if num else [])


def _gather(call: OperatorCall) -> ShardingDecision:
    along, (shape, index) = call.dim(), call.shapes
    ways: list[Way] = [((d, d), (d,)) for d in range(len(shape)) if d != along and shape[d] == index[d]]
    return decide(call, [*ways, (("P", "B"), ("P",))])


def _scatter(call: OperatorCall) -> ShardingDecision:
    """The rule that splits a dim that is not written along, in all tensors alike, if its sizes are equal."""
    along, shape = call.dim(), call.shapes[0]
    ways: list[Way] = [
        ((d,) * len(call.tensors), (d,))
        for d in range(len(shape))
        if d != along and all(in_shape[d] == shape[d] for in_shape in call.shapes)
    ]
    in_place = call.name.endswith("_")
    return decide(call, [w for w in ways if not in_place or w[0][0] == w[1][0]], in_place=in_place)


def _index_add(call: OperatorCall) -> ShardingDecision:
    along, in_place = call.dim(), call.name.endswith("_")
    ways: list[Way] = [
        (call.letters(self=dim, source=dim), (dim,)) for dim in range(len(call.shapes[0])) if dim != along
    ]
    sums: list[Way] = [(call.letters(self="P", source="P"), ("P",))]
    return decide(call, ways + ([] if call.name.startswith("index_fill") else sums), in_place=in_place)


def _bucketize(call: OperatorCall) -> ShardingDecision:
    name = "self" if call.place("self") is not None else "input"
    return decide(call, [(call.letters(**{name: dim}), (dim,)) for dim in range(len(call.out_shape))])


# ---- several index tensors


def _index(call: OperatorCall) -> ShardingDecision:
    """The rule of ``x[i, :, j]``: splits a dim without an index, or the index if it is the only one."""
    indices = list(call.arg("indices"))
    num = len(call.shapes[0])
    indexed = [dim for dim, entry in enumerate(indices) if isinstance(entry, Tensor)]
    width = max(x.ndim for x in call.tensors[1:])
    # torch puts the indices' dims in the place of the indexed dims if these are adjacent, else first
    adjacent = indexed == list(range(indexed[0], indexed[0] + len(indexed)))
    first = indexed[0] if adjacent else 0
    rest: tuple[Letter, ...] = ("B",) * (len(call.tensors) - 1)
    ways: list[Way] = []
    for dim in range(num):
        if dim not in indexed:
            before = sum(d < dim and d not in indexed for d in range(num))
            ways.append(((dim, *rest), (before + width if before >= first else before,)))
    if len(indexed) == 1:
        index = call.shapes[1]
        ways += [(("B", d), (first + d,)) for d in range(len(index))]
    return decide(call, [*ways, (("P", *rest), ("P",))])


RULES: dict[str, Any] = {
    "eq": _equal,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "index_select": _index_select,
    "gather": _gather,
    **dict.fromkeys(("scatter", "scatter_", "scatter_add", "scatter_add_"), _scatter),
    **dict.fromkeys(("scatter_reduce", "scatter_reduce_"), _scatter),
    **dict.fromkeys((f"index_{verb}{end}" for verb in ("add", "copy", "fill") for end in ("", "_")), _index_add),
    "bucketize": _bucketize,
    "index": _index,
    **dict.fromkeys(
        ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"),
        lambda call: decide(call, [], in_place=call.name.endswith("_")),
    ),
}
