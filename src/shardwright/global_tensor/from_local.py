"""``from_local``: makes a global tensor from one local tensor on each rank.

Ranks may give tensors of unequal sizes, and gradients flow back to the tensors that were given.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.comm.agreement import gather_json, text_digest
from shardwright.comm.autograd import once
from shardwright.comm.current_world import current_world, everyone_here
from shardwright.errors import LayoutError, PlanError
from shardwright.global_tensor.boxing import materialized, redistribute_local, run_transfer
from shardwright.global_tensor.geometry import GlobalLayout, boxes, local_shape, whole_piece
from shardwright.global_tensor.placement import Placement, check_placement
from shardwright.global_tensor.same_arguments import disagreement
from shardwright.global_tensor.sbp import Sbp, Sbps, checked_grad_sbp, checked_sbp, is_split, sbp_text
from shardwright.global_tensor.tensor import GlobalTensor, check_gradient, without_sums, wrap
from shardwright.sharding.box import Box
from shardwright.sharding.transfer import plan_transfer
from shardwright.tensor_bytes import bytes_of

_ROOM_BYTES = 256
"""The room for one rank's description of its tensor, so that they are exchanged by a single all-gather."""


def from_local(
    local: Tensor | None, placement: Placement, sbp: Sbps, *, grad_sbp: Sbps | None = None, check: bool = False
) -> GlobalTensor:
    """Returns the global tensor that the ranks' tensors ``local`` make up under ``placement`` and ``sbp``.

    Every rank of the world calls it; on a rank outside the placement ``local`` is ignored and may be None. Local
    tensors are copied, so later writes to them have no effect. Parts of other sizes than those of ``torch.chunk`` are
    cut anew, and the gradient comes back in the sizes that were given. ``grad_sbp`` is the sbp of the gradient that
    each rank gets: by default ``sbp`` with ``broadcast`` in place of ``partial_sum``. With ``check``, local tensors
    that must be equal are compared by a digest.

    Traffic: one all-gather of 256 bytes from each rank, which describe its tensor, and two more if a description is
        longer; point-to-point messages of the elements that move if parts are cut anew.
    Raises: LayoutError, on every rank: a placement or sbp that does not fit, a missing part, parts that do not fit
        together or differ in dtype or ``requires_grad``, arguments that differ between ranks, or copies that differ if
        ``check`` is set. PlanError, on every rank: a part that is no dense plain tensor on the placement's device type.

    >>> from shardwright.global_tensor import placement, sbp
    >>> from_local(torch.ones(2, 3), placement("cpu", ranks=[0]), sbp.split(0)).shape
    torch.Size([2, 3])
    """
    part = torch.empty(0) if local is None else local
    wrong = f"a {type(part).__name__}" if isinstance(part, DTensor) else "" if isinstance(part, Tensor) else repr(part)
    check_placement(placement)
    if not wrong and (part.layout != torch.strided or part.device.type != placement.type):
        wrong = f"a tensor of {part.layout} on {part.device.type}"
    description = {
        "call": text_digest(f"{placement} {sbp} {grad_sbp} {check}"),
        "shape": [] if wrong else list(part.shape),
        "dtype": "" if wrong else str(part.dtype).removeprefix("torch."),
        "here": local is not None,
        "wrong": wrong,
        "grad": not wrong and part.requires_grad,
        "digest": _digest(part) if check and not wrong else "",
    }
    facts = gather_json(everyone_here(), description, room=_ROOM_BYTES)
    # from here on every rank sees the same descriptions, so all ranks raise the same error
    others = [rank for rank, fact in enumerate(facts) if fact["call"] != facts[0]["call"]]
    if others:
        raise disagreement("the placement, an sbp or 'check'", f"ranks {others} differ from rank 0")
    members = {rank: facts[rank] for rank in placement.ranks}
    _check_parts(members, placement)
    first = members[placement.ranks[0]]
    layout = GlobalLayout(placement, checked_sbp(sbp, placement, len(first["shape"])))
    shape_and_boxes = _given_boxes({rank: tuple(fact["shape"]) for rank, fact in members.items()}, layout)
    if check:
        _check_copies(members, layout)
    back = None if grad_sbp is None else checked_grad_sbp(grad_sbp, layout.sbp, placement, len(first["shape"]))
    if current_world().rank not in placement:  # it needs an autograd node, to take part in the backward's messages
        requires_grad = any(fact["grad"] for fact in members.values())
        part = torch.empty(0, dtype=getattr(torch, first["dtype"]), requires_grad=requires_grad)
    return _FromLocal.apply(part, layout, shape_and_boxes, back)  # type: ignore[no-any-return]


def _digest(local: Tensor) -> str:
    """Returns a hash of all bytes in order.

    ``tensor_digest`` would be faster, but it sums rows and columns, so that permuted one-hot labels may look equal.
    """
    data = bytes_of(materialized(local.detach()).cpu())
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
        kinds_text = ", ".join(
            f"rank {rank} {dtype} of {dims} dims" if here else f"rank {rank} None"
            for rank, (dtype, dims, here, _) in kinds.items()
        )
        raise LayoutError(
            f"the parts on {placement} are not of one kind",
            given=kinds_text,
            allowed="one dtype, one number of dims and one requires_grad on every member",
            fix="give every member's part, of one dtype",
        )


def _given_boxes(shapes: dict[int, tuple[int, ...]], layout: GlobalLayout) -> tuple[tuple[int, ...], dict[int, Box]]:
    """Returns the global shape, and the box (a range of each dim) of it that each rank's local tensor is.

    Along a dim that axes cut, the ranks' parts follow each other, in the order of these axes.
    """
    num_dims = len(next(iter(shapes.values())))
    starts: dict[int, list[int]] = {rank: [0] * num_dims for rank in shapes}
    global_shape = []
    for dim in range(num_dims):
        # Ranks with equal indices on the axes that cut the dim must have parts of equal size. The sizes at different
        # indices add up to the global size.
        axes = [i for i, one in enumerate(layout.sbp) if is_split(one) and one.dim == dim]
        sizes: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for rank, coord in layout.placement.coords:
            sizes[tuple(coord[i] for i in axes)].add(shapes[rank][dim])
        if any(len(place_sizes) > 1 for place_sizes in sizes.values()):
            raise LayoutError(
                f"the parts on {layout.placement} do not fit together in dim {dim}",
                given=", ".join(f"rank {rank} {list(shape)}" for rank, shape in shapes.items()),
                allowed=f"for {sbp_text(layout.sbp)}, sizes that differ only along an axis that cuts dim {dim}",
                fix="give parts of equal size there, or name the dim that is cut with sbp.split",
            )
        at, start = {}, 0
        for key in sorted(sizes):
            at[key] = start
            start += next(iter(sizes[key]))
        global_shape.append(start)
        for rank, coord in layout.placement.coords:
            starts[rank][dim] = at[tuple(coord[i] for i in axes)]
    box_of = {rank: Box.of(shape).shift(starts[rank]) for rank, shape in shapes.items()}
    return tuple(global_shape), box_of


def _check_copies(members: dict[int, dict[str, Any]], layout: GlobalLayout) -> None:
    copies: defaultdict[tuple[int, ...], dict[int, str]] = defaultdict(dict)
    for rank, coord in layout.placement.coords:
        place = tuple(i for i, one in zip(coord, layout.sbp, strict=True) if not one.is_replicate())
        copies[place][rank] = members[rank]["digest"]
    differ = [sorted(digests) for digests in copies.values() if len(set(digests.values())) > 1]
    if differ:
        raise LayoutError(
            "the ranks of a broadcast axis give different values",
            given=f"{layout.placement} {sbp_text(layout.sbp)}: ranks {differ} differ",
            allowed="the same bits on every rank of a broadcast axis",
            fix="seed every rank alike, or send one rank's values: to_global from a placement of that rank",
        )


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, layout: GlobalLayout, shape_and_boxes: tuple[tuple[int, ...], dict[int, Box]],
        back: tuple[Sbp, ...] | None,
    ) -> GlobalTensor:  # fmt: skip
        shape, held = shape_and_boxes
        ctx.set_materialize_grads(False)
        cut = boxes(shape, layout)
        ctx.shape, ctx.layout, ctx.held, ctx.local = shape, layout, held, tuple(local.shape)
        ctx.back, ctx.anew = GlobalLayout(layout.placement, back or without_sums(layout.sbp)), held != cut
        if current_world().rank not in layout.placement:
            out = local.new_empty(local_shape(shape, layout, current_world().rank))
        elif not ctx.anew:  # a copy: autograd would not notice later writes to the part
            out = local.clone(memory_format=torch.contiguous_format)
        else:  # cuts parts of other sizes anew, as torch.chunk does
            out = _cut_anew(local, held, cut, layout, local_shape(shape, layout, current_world().rank))
        return wrap(out, shape, layout)

    @staticmethod
    @once
    def backward(ctx: Any, grad: GlobalTensor | None) -> Any:
        if grad is None:
            return None, None, None, None
        check_gradient(grad, ctx.layout.placement)
        local = redistribute_local(grad._local_tensor, ctx.shape, GlobalLayout(grad.placement, grad.sbp), ctx.back)
        if current_world().rank not in ctx.layout.placement:
            local = local.new_empty(ctx.local)
        elif ctx.anew:
            local = _cut_anew(local, boxes(ctx.shape, ctx.layout), ctx.held, ctx.layout, ctx.local)
        return local, None, None, None


def _cut_anew(
    local: Tensor, held: dict[int, Box], wanted: dict[int, Box], layout: GlobalLayout, shape: tuple[int, ...]
) -> Tensor:
    """Returns this rank's part after ranks have exchanged elements, from the boxes ``held`` to the boxes ``wanted``.

    Only ranks with slices of the same term and the same copy exchange elements.
    """
    coord_of = dict(layout.placement.coords)

    def unsplit(rank: int) -> tuple[int, ...]:
        return tuple(i for i, one in zip(coord_of[rank], layout.sbp, strict=True) if not is_split(one))

    # ranks with equal indices on the axes that do not split hold slices of the same term and the same copy
    place = unsplit(current_world().rank)
    ranks = [rank for rank in coord_of if unsplit(rank) == place]
    source = {rank: (whole_piece(held[rank]),) for rank in ranks}
    transfer = plan_transfer(source, {rank: (whole_piece(wanted[rank]),) for rank in ranks})
    return run_transfer(transfer, local, shape, zeros=False)
