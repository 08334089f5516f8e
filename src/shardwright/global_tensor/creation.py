"""New global tensors: from a value, from random numbers that do not depend on the layout, from each rank's own part."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.boxes import Box, plan_transfer
from shardwright.comm import once
from shardwright.comm.here import everyone_here, here
from shardwright.comm.values import gather_json
from shardwright.errors import LayoutError, PlanError, explain
from shardwright.global_tensor import sbp as words
from shardwright.global_tensor.lying import Where, boxes, is_partial, local_shape, terms, whole_piece
from shardwright.global_tensor.moving import carry, move
from shardwright.global_tensor.placement import Placement, check_in_world
from shardwright.global_tensor.sbp import Sbp, is_split
from shardwright.global_tensor.tensor import GlobalTensor, without_sums, wrap

Sbps = Sbp | Sequence[Sbp]


# ---- values


def full(
    size: Sequence[int], value: complex, *, placement: Placement, sbp: Sbps, dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> GlobalTensor:  # fmt: skip
    """A tensor of one value. Of a sum in parts, the first member holds it and the others hold zeros.

    >>> from shardwright.global_tensor import placement, sbp
    >>> full((2,), 7, placement=placement("cpu", ranks=[0]), sbp=sbp.split(0)).tolist()
    [7, 7]
    """
    return _made(size, lambda shape: torch.full(shape, value, dtype=dtype), placement, sbp, requires_grad)


def zeros(
    *size: Any, placement: Placement, sbp: Sbps, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """A tensor of zeros.

    >>> from shardwright.global_tensor import placement, sbp
    >>> zeros(2, placement=placement("cpu", ranks=[0]), sbp=sbp.split(0)).tolist()
    [0.0, 0.0]
    """
    return _made(_size(size), lambda shape: torch.zeros(shape, dtype=dtype), placement, sbp, requires_grad)


def ones(
    *size: Any, placement: Placement, sbp: Sbps, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """A tensor of ones.

    >>> from shardwright.global_tensor import placement, sbp
    >>> ones(2, placement=placement("cpu", ranks=[0]), sbp=sbp.partial_sum).tolist()
    [1.0, 1.0]
    """
    return _made(_size(size), lambda shape: torch.ones(shape, dtype=dtype), placement, sbp, requires_grad)


def empty(
    *size: Any, placement: Placement, sbp: Sbps, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """A tensor of whatever was there; copies of it are equal only once something is written.

    >>> from shardwright.global_tensor import placement, sbp
    >>> empty(2, 3, placement=placement("cpu", ranks=[0]), sbp=sbp.broadcast).shape
    torch.Size([2, 3])
    """
    return _made(_size(size), lambda shape: torch.empty(shape, dtype=dtype), placement, sbp, requires_grad)


def arange(
    *bounds: float, placement: Placement, sbp: Sbps, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """``torch.arange(*bounds)``; each rank computes its own slice.

    >>> from shardwright.global_tensor import placement, sbp
    >>> arange(1, 7, 2, placement=placement("cpu", ranks=[0]), sbp=sbp.split(0)).tolist()
    [1, 3, 5]
    """
    whole = torch.arange(*bounds, dtype=dtype)
    return _cut(whole, placement, sbp, requires_grad)


def randn(
    *size: Any, placement: Placement, sbp: Sbps, dtype: torch.dtype | None = None, requires_grad: bool = False,
    seed: int | None = None,
) -> GlobalTensor:  # fmt: skip
    """Normal random numbers: the same tensor under any placement and sbp, for one seed.

    Without ``seed`` one is drawn from torch's default generator, and the first rank's counts.

    >>> from shardwright.global_tensor import placement, sbp
    >>> everywhere = dict(placement=placement("cpu", ranks=[0]), seed=3)
    >>> a, b = randn(4, sbp=sbp.split(0), **everywhere), randn(4, sbp=sbp.partial_sum, **everywhere)
    >>> torch.equal(a.full_tensor(), b.full_tensor())
    True
    """
    return _drawn("normal_", size, placement, sbp, dtype, requires_grad, seed)


def rand(
    *size: Any, placement: Placement, sbp: Sbps, dtype: torch.dtype | None = None, requires_grad: bool = False,
    seed: int | None = None,
) -> GlobalTensor:  # fmt: skip
    """Random numbers from 0 to 1, in all else as :func:`randn`.

    >>> from shardwright.global_tensor import placement, sbp
    >>> x = rand(9, placement=placement("cpu", ranks=[0]), sbp=sbp.split(0))
    >>> 0 <= x.min().item() <= x.max().item() < 1
    True
    """
    return _drawn("uniform_", size, placement, sbp, dtype, requires_grad, seed)


def agreed_seed() -> int:
    """A seed from torch's default generator; where ranks would draw different ones, the first rank's.

    >>> 0 <= agreed_seed() < 2**62
    True
    """
    mine = torch.randint(2**62, (1,))
    return int(everyone_here().broadcast(mine.to(here().device)).item())


def _drawn(
    fill: str, size: Any, placement: Placement, sbp: Sbps, dtype: torch.dtype | None, requires_grad: bool,
    seed: int | None,
) -> GlobalTensor:  # fmt: skip
    shape = _size(size)
    _checked(shape, placement, sbp)  # before the first collective
    generator = torch.Generator().manual_seed(agreed_seed() if seed is None else seed)
    # the whole is drawn on every rank: a stream of numbers cannot be entered in its middle
    whole = getattr(torch.empty(shape, dtype=dtype), fill)(generator=generator)
    return _cut(whole, placement, sbp, requires_grad)


def _size(size: tuple[Any, ...]) -> tuple[int, ...]:
    if len(size) == 1 and isinstance(size[0], Sequence):
        size = tuple(size[0])
    return size


def _checked(shape: Sequence[int], placement: Placement, sbp: Sbps) -> Where:
    if not isinstance(placement, Placement):
        raise LayoutError(
            explain("not a placement", given=repr(placement), allowed="placement(type, ranks)", fix="import placement")
        )
    check_in_world(placement)
    if any(not isinstance(size, int) or size < 0 for size in shape):
        raise LayoutError(explain("no such shape", given=shape, allowed="sizes from 0 on", fix="give whole numbers"))
    return Where(placement, words.checked(sbp, placement, len(shape)))


def _made(
    size: Sequence[int], make: Callable[[tuple[int, ...]], Tensor], placement: Placement, sbp: Sbps,
    requires_grad: bool,
) -> GlobalTensor:  # fmt: skip
    shape = tuple(size)
    where = _checked(shape, placement, sbp)
    local = make(local_shape(shape, where, here().rank)).to(_device(placement))
    if terms(where).get(here().rank, 0):
        local = torch.zeros_like(local)
    return wrap(local, shape, where, requires_grad=requires_grad)


def _cut(whole: Tensor, placement: Placement, sbp: Sbps, requires_grad: bool) -> GlobalTensor:
    where, shape = _checked(whole.shape, placement, sbp), tuple(whole.shape)
    held = boxes(shape, where).get(here().rank)
    local = whole.new_empty(local_shape(shape, where, here().rank)) if held is None else whole[held.slices].clone()
    if terms(where).get(here().rank, 0):
        local = torch.zeros_like(local)
    return wrap(local.to(_device(placement)), shape, where, requires_grad=requires_grad)


def _device(placement: Placement) -> torch.device:
    return here().device if here().device.type == placement.type else torch.device(placement.type)


# ---- each rank's own part


def from_local(
    local: Tensor | None,
    placement: Placement,
    sbp: Sbps,
    *,
    grad_sbp: Sbps | None = None,
    check: bool = False,
) -> GlobalTensor:
    """The global tensor of which each rank of the placement gives its part, and the others give anything or None.

    Parts need not be cut as ``torch.chunk`` cuts: others are cut anew. Every rank of the world calls it.

    Traffic: each rank's shape; what lies elsewhere after cutting anew; digests of the parts with ``check``.
    Raises: LayoutError: parts that do not fit together; copies that differ, where ``check`` is set. On every rank.

    >>> from shardwright.global_tensor import placement, sbp
    >>> from_local(torch.ones(2, 3), placement("cpu", ranks=[0]), sbp.split(0)).shape
    torch.Size([2, 3])
    """
    mine = torch.empty(0) if local is None else local
    wrong = "a global tensor" if isinstance(mine, GlobalTensor) else "" if isinstance(mine, Tensor) else repr(mine)
    if isinstance(placement, Placement):
        check_in_world(placement)
    told = {
        "shape": [] if wrong else list(mine.shape),
        "dtype": "" if wrong else str(mine.dtype).removeprefix("torch."),
        "here": local is not None,
        "wrong": wrong,
        "grad": not wrong and mine.requires_grad,
        "digest": _digest(mine) if check and not wrong else "",
    }
    facts = _told(told)
    members = {rank: facts[rank] for rank in placement.ranks}
    _check_parts(members, placement)
    first = members[placement.ranks[0]]
    where = Where(placement, words.checked(sbp, placement, len(first["shape"])))
    given = _given_boxes({rank: tuple(fact["shape"]) for rank, fact in members.items()}, where)
    if check:
        _check_copies(members, where)
    back = None if grad_sbp is None else words.checked(grad_sbp, placement, len(first["shape"]))
    if here().rank not in placement:  # its gradient is as empty as it is
        requires_grad = any(fact["grad"] for fact in members.values())
        mine = torch.empty(0, dtype=getattr(torch, first["dtype"]), requires_grad=requires_grad)
    return _FromLocal.apply(mine, where, given, back)  # type: ignore[no-any-return, no-untyped-call]


def _told(mine: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank says of its part: one message where it is short, as it is."""
    axis, room = everyone_here(), 256
    text = json.dumps(mine).encode()
    short = text if len(text) < room else b"long"
    padded = torch.frombuffer(bytearray(short.ljust(room)), dtype=torch.uint8).to(axis.device)
    said = [bytes(each.tolist()) for each in axis.all_gather(padded).cpu().split(room)]
    if any(each.strip() == b"long" for each in said):
        return gather_json(axis, mine)
    return [json.loads(each) for each in said]


def _digest(local: Tensor) -> str:
    data = local.detach().contiguous().cpu().flatten().view(torch.uint8)
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=16).hexdigest()


def _check_parts(members: dict[int, dict[str, Any]], placement: Placement) -> None:
    for rank, fact in members.items():
        if fact["wrong"]:
            raise PlanError(
                explain(
                    f"rank {rank} gives no local tensor",
                    given=fact["wrong"],
                    allowed="a plain tensor, the rank's own part",
                    fix="write x.to_global(placement, sbp) for a tensor that is global already",
                )
            )
    kinds = {rank: (fact["dtype"], len(fact["shape"]), fact["here"], fact["grad"]) for rank, fact in members.items()}
    if len(set(kinds.values())) > 1 or not all(here for _, _, here, _ in kinds.values()):
        given = ", ".join(
            f"rank {rank} {dtype} of {dims} dims" if here else f"rank {rank} None"
            for rank, (dtype, dims, here, _) in kinds.items()
        )
        raise LayoutError(
            explain(
                f"the parts on {placement} are not of one kind",
                given=given,
                allowed="one dtype, one number of dims and one requires_grad on every member",
                fix="give every member's part, of one dtype",
            )
        )


def _given_boxes(shapes: dict[int, tuple[int, ...]], where: Where) -> tuple[tuple[int, ...], dict[int, Box]]:
    """The whole's shape, and the box that each member's part is, the parts lying in the order of the axes."""
    num_dims = len(next(iter(shapes.values())))
    starts: dict[int, list[int]] = {rank: [0] * num_dims for rank in shapes}
    whole = []
    for dim in range(num_dims):
        axes = [i for i, one in enumerate(where.sbp) if is_split(one) and one.dim == dim]  # type: ignore[attr-defined]
        sizes: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for rank, coord in where.placement.coords:
            sizes[tuple(coord[i] for i in axes)].add(shapes[rank][dim])
        if any(len(found) > 1 for found in sizes.values()):
            raise LayoutError(
                explain(
                    f"the parts on {where.placement} do not fit together in dim {dim}",
                    given=", ".join(f"rank {rank} {list(shape)}" for rank, shape in shapes.items()),
                    allowed=f"for {words.text(where.sbp)}, sizes that differ only along an axis that cuts dim {dim}",
                    fix="give parts of equal size there, or name the dim that is cut with sbp.split",
                )
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


def _check_copies(members: dict[int, dict[str, Any]], where: Where) -> None:
    copies: defaultdict[tuple[int, ...], dict[int, str]] = defaultdict(dict)
    for rank, coord in where.placement.coords:
        kept = tuple(i for i, one in zip(coord, where.sbp, strict=True) if not one.is_replicate())
        copies[kept][rank] = members[rank]["digest"]
    differ = [sorted(found) for found in copies.values() if len(set(found.values())) > 1]
    if differ:
        raise LayoutError(
            explain(
                "ranks give different values for what 'broadcast' says is equal",
                given=f"{where.placement} {words.text(where.sbp)}: ranks {differ} differ",
                allowed="the same bits on every rank of a broadcast axis",
                fix="seed every rank alike, or send one rank's values: to_global from a placement of that rank",
            )
        )


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, where: Where, given: tuple[tuple[int, ...], dict[int, Box]],
        back: tuple[Sbp, ...] | None,
    ) -> GlobalTensor:  # fmt: skip
        shape, held = given
        cut = boxes(shape, where)
        ctx.shape, ctx.where, ctx.held, ctx.local = shape, where, held, tuple(local.shape)
        ctx.back, ctx.anew = Where(where.placement, back or without_sums(where.sbp)), held != cut
        mine = local.view_as(local)
        if here().rank not in where.placement:
            mine = local.new_empty(local_shape(shape, where, here().rank))
        elif ctx.anew:  # parts of any sizes become those of torch.chunk
            mine = _cut_anew(mine, held, cut, where, local_shape(shape, where, here().rank))
        return wrap(mine, shape, where)

    @staticmethod
    @once
    def backward(ctx: Any, grad: GlobalTensor) -> Any:
        local = move(grad._local_tensor, ctx.shape, Where(grad.placement, grad.sbp), ctx.back)
        if here().rank not in ctx.where.placement:
            local = local.new_empty(ctx.local)
        elif ctx.anew:
            local = _cut_anew(local, boxes(ctx.shape, ctx.where), ctx.held, ctx.where, ctx.local)
        return local, None, None, None


def _cut_anew(
    local: Tensor, held: dict[int, Box], wanted: dict[int, Box], where: Where, shape: tuple[int, ...]
) -> Tensor:
    """The same tensor, cut at other places: each term and each copy within its own ranks."""
    of_rank = dict(where.placement.coords)
    mine = _apart(where, of_rank[here().rank])
    ranks = [rank for rank, coord in where.placement.coords if _apart(where, coord) == mine]
    source = {rank: (whole_piece(held[rank]),) for rank in ranks}
    transfer = plan_transfer(source, {rank: (whole_piece(wanted[rank]),) for rank in ranks})
    assert not is_partial(where) or len({_apart(where, of_rank[rank]) for rank in ranks}) == 1
    return carry(transfer, local, shape, zeros=False)


def _apart(where: Where, coord: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i for i, one in zip(coord, where.sbp, strict=True) if not is_split(one))
