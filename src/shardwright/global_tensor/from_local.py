"""Global tensors from each rank's own part, cut in any way, and the gradient back to where the part was given."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.comm.agreement import gather_json, text_digest
from shardwright.comm.autograd import once
from shardwright.comm.current_world import everyone_here, here
from shardwright.errors import LayoutError, PlanError
from shardwright.global_tensor import sbp as words
from shardwright.global_tensor.agreement import check_alike
from shardwright.global_tensor.boxing import carry, move, resolved
from shardwright.global_tensor.geometry import GlobalLayout, boxes, is_partial, local_shape, whole_piece
from shardwright.global_tensor.placement import Placement, check_placement
from shardwright.global_tensor.sbp import Sbp, is_split
from shardwright.global_tensor.tensor import GlobalTensor, Sbps, check_gradient, without_sums, wrap
from shardwright.sharding.box import Box
from shardwright.sharding.transfer import plan_transfer

_ROOM_BYTES = 256
"""Enough for what a rank says of its part, so that one message does."""


def from_local(
    local: Tensor | None,
    placement: Placement,
    sbp: Sbps,
    *,
    grad_sbp: Sbps | None = None,
    check: bool = False,
) -> GlobalTensor:
    """The global tensor of which each rank of the placement gives its part, and the others give anything or None.

    Parts need not be cut as ``torch.chunk`` cuts: others are cut anew. Every rank of the world calls it. The parts are
    copied: what is written to them later is not seen.

    Traffic: each rank's shape; what lies elsewhere after cutting anew; digests of the parts with ``check``.
    Raises: LayoutError: parts that do not fit together; copies that differ, where ``check`` is set. On every rank.

    >>> from shardwright.global_tensor import sbp
    >>> from shardwright.global_tensor.placement import placement
    >>> from_local(torch.ones(2, 3), placement("cpu", ranks=[0]), sbp.split(0)).shape
    torch.Size([2, 3])
    """
    mine = torch.empty(0) if local is None else local
    wrong = f"a {type(mine).__name__}" if isinstance(mine, DTensor) else "" if isinstance(mine, Tensor) else repr(mine)
    check_placement(placement)
    if not wrong and (mine.layout != torch.strided or mine.device.type != placement.type):
        wrong = f"a tensor of {mine.layout} on {mine.device.type}"
    told = {
        "where": text_digest(f"{placement} {sbp} {grad_sbp} {check}"),
        "shape": [] if wrong else list(mine.shape),
        "dtype": "" if wrong else str(mine.dtype).removeprefix("torch."),
        "here": local is not None,
        "wrong": wrong,
        "grad": not wrong and mine.requires_grad,
        "digest": _digest(mine) if check and not wrong else "",
    }
    facts = gather_json(everyone_here(), told, room=_ROOM_BYTES)
    check_alike("the placement, an sbp or 'check'", [fact["where"] for fact in facts])
    members = {rank: facts[rank] for rank in placement.ranks}
    _check_parts(members, placement)
    first = members[placement.ranks[0]]
    where = GlobalLayout(placement, words.checked(sbp, placement, len(first["shape"])))
    given = _given_boxes({rank: tuple(fact["shape"]) for rank, fact in members.items()}, where)
    if check:
        _check_copies(members, where)
    back = None if grad_sbp is None else words.checked_gradient(grad_sbp, where.sbp, placement, len(first["shape"]))
    if here().rank not in placement:  # its gradient is as empty as it is
        requires_grad = any(fact["grad"] for fact in members.values())
        mine = torch.empty(0, dtype=getattr(torch, first["dtype"]), requires_grad=requires_grad)
    return _FromLocal.apply(mine, where, given, back)  # type: ignore[no-any-return, no-untyped-call]


def _digest(local: Tensor) -> str:
    """Hashes every byte: ``tensor_digest`` adds rows and columns, which is equal for two orders of one-hot labels."""
    data = resolved(local.detach()).contiguous().cpu().flatten().view(torch.uint8)
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=16).hexdigest()


def _check_parts(members: dict[int, dict[str, Any]], placement: Placement) -> None:
    for rank, fact in members.items():
        if fact["wrong"]:
            raise PlanError(
                f"rank {rank} gives no local tensor",
                given=fact["wrong"],
                allowed=f"a dense plain tensor on {placement.type}, the rank's own part",
                fix="write to_global(x, placement, sbp) for a tensor that is global already",
            )
    kinds = {rank: (fact["dtype"], len(fact["shape"]), fact["here"], fact["grad"]) for rank, fact in members.items()}
    if len(set(kinds.values())) > 1 or not all(here for _, _, here, _ in kinds.values()):
        given = ", ".join(
            f"rank {rank} {dtype} of {dims} dims" if here else f"rank {rank} None"
            for rank, (dtype, dims, here, _) in kinds.items()
        )
        raise LayoutError(
            f"the parts on {placement} are not of one kind",
            given=given,
            allowed="one dtype, one number of dims and one requires_grad on every member",
            fix="give every member's part, of one dtype",
        )


def _given_boxes(shapes: dict[int, tuple[int, ...]], where: GlobalLayout) -> tuple[tuple[int, ...], dict[int, Box]]:
    """The whole's shape, and the box that each member's part is, the parts lying in the order of the axes."""
    num_dims = len(next(iter(shapes.values())))
    starts: dict[int, list[int]] = {rank: [0] * num_dims for rank in shapes}
    whole = []
    for dim in range(num_dims):
        axes = [i for i, one in enumerate(where.sbp) if is_split(one) and one.dim == dim]
        sizes: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for rank, coord in where.placement.coords:
            sizes[tuple(coord[i] for i in axes)].add(shapes[rank][dim])
        if any(len(found) > 1 for found in sizes.values()):
            raise LayoutError(
                f"the parts on {where.placement} do not fit together in dim {dim}",
                given=", ".join(f"rank {rank} {list(shape)}" for rank, shape in shapes.items()),
                allowed=f"for {words.text(where.sbp)}, sizes that differ only along an axis that cuts dim {dim}",
                fix="give parts of equal size there, or name the dim that is cut with sbp.split",
            )
        at, start = {}, 0
        for key in sorted(sizes):
            at[key] = start
            start += next(iter(sizes[key]))
        whole.append(start)
        for rank, coord in where.placement.coords:
            starts[rank][dim] = at[tuple(coord[i] for i in axes)]
    given = {rank: Box.of(shape).shift(starts[rank]) for rank, shape in shapes.items()}
    return tuple(whole), given


def _check_copies(members: dict[int, dict[str, Any]], where: GlobalLayout) -> None:
    copies: defaultdict[tuple[int, ...], dict[int, str]] = defaultdict(dict)
    for rank, coord in where.placement.coords:
        kept = tuple(i for i, one in zip(coord, where.sbp, strict=True) if not one.is_replicate())
        copies[kept][rank] = members[rank]["digest"]
    differ = [sorted(found) for found in copies.values() if len(set(found.values())) > 1]
    if differ:
        raise LayoutError(
            "ranks give different values for what 'broadcast' says is equal",
            given=f"{where.placement} {words.text(where.sbp)}: ranks {differ} differ",
            allowed="the same bits on every rank of a broadcast axis",
            fix="seed every rank alike, or send one rank's values: to_global from a placement of that rank",
        )


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, where: GlobalLayout, given: tuple[tuple[int, ...], dict[int, Box]],
        back: tuple[Sbp, ...] | None,
    ) -> GlobalTensor:  # fmt: skip
        shape, held = given
        ctx.set_materialize_grads(False)
        cut = boxes(shape, where)
        ctx.shape, ctx.where, ctx.held, ctx.local = shape, where, held, tuple(local.shape)
        ctx.back, ctx.anew = GlobalLayout(where.placement, back or without_sums(where.sbp)), held != cut
        if here().rank not in where.placement:
            mine = local.new_empty(local_shape(shape, where, here().rank))
        elif not ctx.anew:  # a copy: the backward could not tell that somebody wrote to the part in between
            mine = local.clone(memory_format=torch.contiguous_format)
        else:  # parts of any sizes become those of torch.chunk
            mine = _cut_anew(local, held, cut, where, local_shape(shape, where, here().rank))
        return wrap(mine, shape, where)

    @staticmethod
    @once
    def backward(ctx: Any, grad: GlobalTensor | None) -> Any:
        if grad is None:
            return None, None, None, None
        check_gradient(grad, ctx.where.placement)
        local = move(grad._local_tensor, ctx.shape, GlobalLayout(grad.placement, grad.sbp), ctx.back)
        if here().rank not in ctx.where.placement:
            local = local.new_empty(ctx.local)
        elif ctx.anew:
            local = _cut_anew(local, boxes(ctx.shape, ctx.where), ctx.held, ctx.where, ctx.local)
        return local, None, None, None


def _cut_anew(
    local: Tensor, held: dict[int, Box], wanted: dict[int, Box], where: GlobalLayout, shape: tuple[int, ...]
) -> Tensor:
    """The same tensor, cut at other places: each term and each copy within its own ranks."""
    of_rank = dict(where.placement.coords)
    mine = _apart(where, of_rank[here().rank])
    ranks = [rank for rank, coord in where.placement.coords if _apart(where, coord) == mine]
    source = {rank: (whole_piece(held[rank]),) for rank in ranks}
    transfer = plan_transfer(source, {rank: (whole_piece(wanted[rank]),) for rank in ranks})
    assert not is_partial(where) or len({_apart(where, of_rank[rank]) for rank in ranks}) == 1
    return carry(transfer, local, shape, zeros=False)


def _apart(where: GlobalLayout, coord: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i for i, one in zip(coord, where.sbp, strict=True) if not is_split(one))
