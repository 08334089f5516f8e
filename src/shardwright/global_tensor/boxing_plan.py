"""Boxing, planned: how a tensor gets from where it lies to where it shall lie, and what that moves.

A route has one leg, or two where a sum in parts is cheaper summed slice by slice on the way. A leg is a collective
where ranks and boxes form one; else messages, each destination box fetched once from the nearest holder::

    partial_sum -> broadcast    all-reduce         split(0) -> broadcast   all-gather
    partial_sum -> split        reduce-scatter     split(0) -> split(1)    all-to-all
    anything    -> partial_sum  each member keeps what it holds; the others hold zeros there
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from torch.distributed.tensor import Shard

from shardwright.global_tensor.geometry import GlobalLayout, boxes, is_partial, terms, whole_piece
from shardwright.global_tensor.placement import Placement
from shardwright.global_tensor.sbp import Sbp, broadcast, checked, is_split, split, text
from shardwright.sharding.box import Box, Piece
from shardwright.sharding.transfer import BoxMessage, Transfer, plan_transfer

Kind = Literal["messages", "all_reduce", "reduce_scatter", "all_gather", "all_to_all"]

Pieces = Mapping[int, tuple[Piece, ...]]


@dataclass(frozen=True)
class BoxingStep:
    """One step of a route: from one layout of a tensor of ``shape`` to another, by messages or by a collective.

    ``axis`` is the placement's axis that the collective is over, ``dims`` what it cuts before and after.
    """

    shape: tuple[int, ...]
    source: GlobalLayout
    destination: GlobalLayout
    kind: Kind = "messages"
    axis: int = 0
    dims: tuple[int, int] = (0, 0)

    @cached_property
    def transfer(self) -> Transfer:
        """Its messages; a collective moves as much, or less."""
        return _messages(self.shape, self.source, self.destination)

    @cached_property
    def kept(self) -> dict[int, tuple[slice, ...]]:
        """The ranks that send nothing and get one box, their own: what of their local tensor it is."""
        found = {}
        for rank in self.destination.placement.ranks:
            got = self.transfer.messages_to(rank)
            if len(got) == 1 and self.transfer.messages_from(rank) == got and not got[0].adds:
                found[rank] = got[0].source_piece.parts(got[0].box)[0].local_box.slices
        return found

    @cached_property
    def moved_elements(self) -> int:
        """How many elements go from one rank to another."""
        if self.kind != "all_reduce":
            return self.transfer.moved_elements
        size = self.source.placement.shape[self.axis]
        held = sum(box.size for box in boxes(self.shape, self.source).values())
        return 2 * (size - 1) * held // size


@dataclass(frozen=True)
class BoxingPlan:
    """How a tensor gets from one layout to another, priced before it runs.

    >>> from shardwright.global_tensor import sbp
    >>> from shardwright.global_tensor.placement import placement
    >>> here, there = placement("cpu", [0, 1]), placement("cpu", [2, 3])
    >>> route = plan_to_global((4, 6), here, sbp.partial_sum, there, sbp.split(1))
    >>> route.moved_elements
    48
    >>> print(plan_to_global((4, 6), here, sbp.split(0), here, sbp.broadcast))
    placement("cpu", ranks=[0, 1]) split(0) -> broadcast: all_gather, 24 elements move
    """

    legs: tuple[BoxingStep, ...]

    @property
    def moved_elements(self) -> int:
        """How many elements go from one rank to another."""
        return sum(leg.moved_elements for leg in self.legs)

    def moved_bytes(self, element_bytes: int) -> int:
        """The same in bytes."""
        return self.moved_elements * element_bytes

    def __str__(self) -> str:
        return "\n".join(
            f"{leg.source.placement} {text(leg.source.sbp)} -> "
            f"{'' if leg.source.placement == leg.destination.placement else f'{leg.destination.placement} '}"
            f"{text(leg.destination.sbp)}: {leg.kind}, {leg.moved_elements} elements move"
            for leg in self.legs
        )


def plan_to_global(
    shape: tuple[int, ...], source: Placement, source_sbp: Sbp | Sequence[Sbp],
    destination: Placement, destination_sbp: Sbp | Sequence[Sbp],
) -> BoxingPlan:  # fmt: skip
    """The route that ``to_global`` takes between two layouts of a tensor of this shape; nothing is sent."""
    here = GlobalLayout(source, checked(source_sbp, source, len(shape)))
    there = GlobalLayout(destination, checked(destination_sbp, destination, len(shape)))
    return route(tuple(shape), here, there)


@lru_cache(maxsize=4096)
def route(shape: tuple[int, ...], source: GlobalLayout, destination: GlobalLayout) -> BoxingPlan:
    """The cheapest route by elements moved; among equals the one with fewer legs."""
    whole = _leg(shape, source, destination)
    if not is_partial(source) or whole.kind != "messages" or whole.moved_elements == 0:
        return BoxingPlan((whole,))
    found = [BoxingPlan((whole,))]
    for dim in _worth_cutting(shape, destination):
        summed = GlobalLayout(source.placement, tuple(split(dim) if one.is_partial() else one for one in source.sbp))
        cut = GlobalLayout(
            destination.placement, tuple(one if is_split(one) else split(dim) for one in destination.sbp)
        )
        for middle in (summed, cut):
            if middle not in (source, destination):
                found.append(BoxingPlan((_leg(shape, source, middle), _leg(shape, middle, destination))))
    return min(found, key=lambda each: (each.moved_elements, len(each.legs)))


def _worth_cutting(shape: tuple[int, ...], destination: GlobalLayout) -> list[int]:
    """Dims to sum a tensor slice by slice over: what will be cut, and the longest."""
    cut = [one.dim for one in destination.sbp if isinstance(one, Shard)]
    longest = [max(range(len(shape)), key=lambda dim: shape[dim])] if shape else []
    return list(dict.fromkeys((*cut, *longest)))


def _leg(shape: tuple[int, ...], source: GlobalLayout, destination: GlobalLayout) -> BoxingStep:
    plain = BoxingStep(shape, source, destination)
    if source.placement != destination.placement:
        return plain
    differ = [i for i, (a, b) in enumerate(zip(source.sbp, destination.sbp, strict=True)) if a != b]
    if len(differ) != 1 or source.placement.shape[differ[0]] == 1:
        return plain
    axis = differ[0]
    before, after = source.sbp[axis], destination.sbp[axis]
    others = {one.dim for i, one in enumerate(source.sbp) if i != axis and isinstance(one, Shard)}
    dims = [one.dim for one in (before, after) if isinstance(one, Shard)]
    kind = _collective(before, after)
    if kind is None or others & {*dims}:
        return plain
    return BoxingStep(shape, source, destination, kind, axis, (dims[0], dims[-1]) if dims else (0, 0))


def _collective(before: Sbp, after: Sbp) -> Kind | None:
    if before.is_partial():
        return "all_reduce" if after == broadcast else "reduce_scatter" if is_split(after) else None
    if is_split(before):
        return "all_gather" if after == broadcast else "all_to_all" if is_split(after) else None
    return None


# ---- messages


def _messages(shape: tuple[int, ...], source: GlobalLayout, destination: GlobalLayout) -> Transfer:
    held = {rank: (whole_piece(box),) for rank, box in boxes(shape, source).items()}
    term_of = terms(source)
    if not is_partial(destination):
        wanted = {rank: (whole_piece(box),) for rank, box in boxes(shape, destination).items()}
        return plan_transfer(held, wanted, terms=term_of if is_partial(source) else None)
    messages: list[BoxMessage] = []
    for term in sorted(set(term_of.values())):
        holders = {rank: pieces for rank, pieces in held.items() if term_of[rank] == term}
        shares = _shares(shape, destination, holders, term)
        messages += [each._replace(adds=True) for each in plan_transfer(holders, shares).messages]
    return Transfer(tuple(messages))


def _shares(
    shape: tuple[int, ...], destination: GlobalLayout, holders: Pieces, term: int
) -> dict[int, tuple[Piece, ...]]:
    """Which term of each sum takes which part of a term: where it is held already; the rest goes to one of them.

    All copies of a term take the same parts: whoever adds terms up may fetch each from another copy.
    """
    sums: defaultdict[tuple[int, ...], defaultdict[tuple[int, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, coord in destination.placement.coords:
        both = list(zip(coord, destination.sbp, strict=True))
        cut, partial = tuple(i for i, one in both if is_split(one)), tuple(i for i, one in both if one.is_partial())
        sums[cut][partial].append(rank)
    shares: defaultdict[int, list[Piece]] = defaultdict(list)
    held = boxes(shape, destination)
    for members in sums.values():
        copies = list(members.values())
        box = held[copies[0][0]]
        missing = [box] if box.size else []
        parts: list[list[Box]] = [[] for _ in copies]
        for number, ranks in enumerate(copies):
            for piece in (piece for rank in ranks for piece in holders.get(rank, ())):
                parts[number] += [
                    part for part in (rest.intersect(piece.whole) for rest in missing) if part is not None
                ]
                missing = [part for rest in missing for part in rest.minus(piece.whole)]
        parts[term % len(copies)] += missing
        for number, ranks in enumerate(copies):
            for rank in ranks:
                shares[rank] += [_inside(box, part) for part in parts[number]]
    return {rank: tuple(pieces) for rank, pieces in shares.items()}


def _inside(box: Box, part: Box) -> Piece:
    return Piece(part, tuple(a - b for a, b in zip(part.start, box.start, strict=True)))
