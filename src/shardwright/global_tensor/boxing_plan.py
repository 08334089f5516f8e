"""Plans boxing (the redistribution of a global tensor): the steps between two layouts, and how many elements they move.

A plan has one step, or two if it moves fewer elements to reduce-scatter partial sums first. A step is a single
collective if it changes how the tensor lies along one axis of one placement, and no other axis cuts the same dims.
Otherwise it is a set of point-to-point messages, in which each rank fetches the elements that it lacks once::

    partial_sum -> broadcast    all-reduce         split(0) -> broadcast   all-gather
    partial_sum -> split        reduce-scatter     split(0) -> split(1)    all-to-all
    anything    -> partial_sum  messages: a rank keeps elements that it holds, if no other term has them already;
                                the other terms are zero there
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from torch.distributed.tensor import Shard

from shardwright.global_tensor.geometry import GlobalLayout, boxes, is_partial, terms, whole_piece
from shardwright.global_tensor.placement import Placement
from shardwright.global_tensor.sbp import Sbp, Sbps, broadcast, checked_sbp, is_split, sbp_text, split
from shardwright.sharding.box import Box, Piece
from shardwright.sharding.transfer import BoxMessage, TensorTransfer, plan_transfer

BoxingKind = Literal["messages", "all_reduce", "reduce_scatter", "all_gather", "all_to_all"]

Pieces = Mapping[int, tuple[Piece, ...]]


@dataclass(frozen=True)
class BoxingStep:
    """One step of a :class:`BoxingPlan`: a collective, or messages, that bring a tensor from one layout to another.

    ``shape`` is the global shape. ``kind`` names the collective, or is "messages". The last two fields matter for a
    collective only: ``axis`` is the placement's axis over which it runs, and ``dims`` are the dims that this axis cuts
    before and after. If only one of the two layouts cuts a dim along the axis, ``dims`` has that dim twice. An
    all-reduce does not use ``dims``.
    """

    shape: tuple[int, ...]
    source: GlobalLayout
    destination: GlobalLayout
    kind: BoxingKind = "messages"
    axis: int = 0
    dims: tuple[int, int] = (0, 0)

    @cached_property
    def transfer(self) -> TensorTransfer:
        """The point-to-point messages that have the effect of this step, even if it runs a collective instead.

        The collective moves at most as many elements as these messages.
        """
        shape, source, destination = self.shape, self.source, self.destination
        source_pieces = {rank: (whole_piece(box),) for rank, box in boxes(shape, source).items()}
        term_of = terms(source)
        if not is_partial(destination):
            destination_pieces = {rank: (whole_piece(box),) for rank, box in boxes(shape, destination).items()}
            return plan_transfer(source_pieces, destination_pieces, terms=term_of if is_partial(source) else None)
        messages: list[BoxMessage] = []
        for term in sorted(set(term_of.values())):
            holders = {rank: pieces for rank, pieces in source_pieces.items() if term_of[rank] == term}
            shares = _term_shares(shape, destination, holders, term)
            messages += [message._replace(adds=True) for message in plan_transfer(holders, shares).messages]
        return TensorTransfer(tuple(messages))

    @cached_property
    def kept(self) -> dict[int, tuple[slice, ...]]:
        """Maps each rank whose new local tensor is one slice of its old one, and that sends nothing, to that slice.

        Ranks whose new tensor is empty are left out, as are all ranks if the destination is a partial sum.
        """
        slices = {}
        for rank in self.destination.placement.ranks:
            messages = self.transfer.messages_to(rank)
            if len(messages) == 1 and self.transfer.messages_from(rank) == messages and not messages[0].adds:
                slices[rank] = messages[0].source_piece.parts(messages[0].box)[0].local_box.slices
        return slices

    @cached_property
    def moved_elements(self) -> int:
        """The number of elements that this step sends between different ranks; an all-reduce is taken to be a ring."""
        if self.kind != "all_reduce":
            return self.transfer.moved_elements
        size = self.source.placement.shape[self.axis]
        held = sum(box.size for box in boxes(self.shape, self.source).values())
        # a ring: each rank sends 2 (size - 1) / size of its tensor
        return 2 * (size - 1) * held // size


@dataclass(frozen=True)
class BoxingPlan:
    """The steps that redistribute a global tensor from one layout to another, as :func:`plan_to_global` returns them.

    >>> from shardwright.global_tensor import placement, sbp
    >>> here, there = placement("cpu", [0, 1]), placement("cpu", [2, 3])
    >>> plan_to_global((4, 6), here, sbp.partial_sum, there, sbp.split(1)).moved_elements
    48
    >>> print(plan_to_global((4, 6), here, sbp.split(0), here, sbp.broadcast))
    placement("cpu", ranks=[0, 1]) split(0) -> broadcast: all_gather, 24 elements move
    """

    steps: tuple[BoxingStep, ...]

    @property
    def moved_elements(self) -> int:
        """The number of elements that all steps send between different ranks."""
        return sum(step.moved_elements for step in self.steps)

    def moved_bytes(self, element_bytes: int) -> int:
        """Returns the number of bytes that all steps send between different ranks.

        ``element_bytes`` is the size of one element.
        """
        return self.moved_elements * element_bytes

    def __str__(self) -> str:
        return "\n".join(
            f"{step.source.placement} {sbp_text(step.source.sbp)} -> "
            f"{'' if step.source.placement == step.destination.placement else f'{step.destination.placement} '}"
            f"{sbp_text(step.destination.sbp)}: {step.kind}, {step.moved_elements} elements move"
            for step in self.steps
        )


def plan_to_global(
    shape: tuple[int, ...], source: Placement, source_sbp: Sbps, destination: Placement, destination_sbp: Sbps
) -> BoxingPlan:
    """Returns the plan by which ``to_global`` redistributes a tensor of ``shape`` between two layouts; sends nothing.

    Print the plan to see which collectives run and how many elements move.

    Raises: LayoutError: an sbp that does not fit its placement or the number of dims.
    """
    before = GlobalLayout(source, checked_sbp(source_sbp, source, len(shape)))
    after = GlobalLayout(destination, checked_sbp(destination_sbp, destination, len(shape)))
    return cheapest_plan(tuple(shape), before, after)


@lru_cache(maxsize=4096)
def cheapest_plan(shape: tuple[int, ...], source: GlobalLayout, destination: GlobalLayout) -> BoxingPlan:
    """Returns the plan to redistribute a tensor of ``shape`` between two layouts: of those tried, the cheapest one.

    The plan is the direct step if that is a collective or moves nothing. From a layout with partial sums, direct
    messages are compared with plans of two steps, which first reduce-scatter the sums along a dim: the plan that moves
    the fewest elements is returned, and among equals the one with fewer steps. Plans are cached.
    """
    direct = _step(shape, source, destination)
    if not is_partial(source) or direct.kind != "messages" or direct.moved_elements == 0:
        return BoxingPlan((direct,))
    plans = [BoxingPlan((direct,))]
    # if many ranks need a sum, it is cheaper to reduce-scatter it first, on the old ranks or on the new ones
    for dim in _dims_to_sum_over(shape, destination):
        summed = GlobalLayout(source.placement, tuple(split(dim) if one.is_partial() else one for one in source.sbp))
        cut = GlobalLayout(
            destination.placement, tuple(one if is_split(one) else split(dim) for one in destination.sbp)
        )
        for middle in (summed, cut):
            if middle not in (source, destination):
                plans.append(BoxingPlan((_step(shape, source, middle), _step(shape, middle, destination))))
    return min(plans, key=lambda plan: (plan.moved_elements, len(plan.steps)))


def _dims_to_sum_over(shape: tuple[int, ...], destination: GlobalLayout) -> list[int]:
    """Returns the dims along which to try a first reduce-scatter: those that the destination cuts, and the longest."""
    cut = [one.dim for one in destination.sbp if isinstance(one, Shard)]
    longest = [max(range(len(shape)), key=lambda dim: shape[dim])] if shape else []
    return list(dict.fromkeys((*cut, *longest)))


def _step(shape: tuple[int, ...], source: GlobalLayout, destination: GlobalLayout) -> BoxingStep:
    plain = BoxingStep(shape, source, destination)
    if source.placement != destination.placement:
        return plain
    # one collective can change the sbp of one axis only, and only if no other axis cuts the same dims
    differ = [i for i, (a, b) in enumerate(zip(source.sbp, destination.sbp, strict=True)) if a != b]
    if len(differ) != 1 or source.placement.shape[differ[0]] == 1:
        return plain
    axis = differ[0]
    before, after = source.sbp[axis], destination.sbp[axis]
    others = {one.dim for i, one in enumerate(source.sbp) if i != axis and isinstance(one, Shard)}
    dims = [one.dim for one in (before, after) if isinstance(one, Shard)]
    kind = _collective_kind(before, after)
    if kind is None or others & {*dims}:
        return plain
    return BoxingStep(shape, source, destination, kind, axis, (dims[0], dims[-1]) if dims else (0, 0))


def _collective_kind(before: Sbp, after: Sbp) -> BoxingKind | None:
    if before.is_partial():
        return "all_reduce" if after == broadcast else "reduce_scatter" if is_split(after) else None
    if is_split(before):
        return "all_gather" if after == broadcast else "all_to_all" if is_split(after) else None
    return None


def _term_shares(
    shape: tuple[int, ...], destination: GlobalLayout, holders: Pieces, term: int
) -> dict[int, tuple[Piece, ...]]:
    """Returns the pieces of one source term that each rank of a partial destination adds to its own term.

    An element stays on a destination rank that holds it already, if there is one, and else goes to one of the terms.
    All copies of a destination term get the same elements, because a later sum may read a term from any of its copies.
    """
    sums: defaultdict[tuple[int, ...], defaultdict[tuple[int, ...], list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, coord in destination.placement.coords:
        both = list(zip(coord, destination.sbp, strict=True))
        cut, partial = tuple(i for i, one in both if is_split(one)), tuple(i for i, one in both if one.is_partial())
        sums[cut][partial].append(rank)
    shares: defaultdict[int, list[Piece]] = defaultdict(list)
    held = boxes(shape, destination)
    # one round for each slice of the tensor: the terms divide the slice's box among them, without overlap
    for members in sums.values():
        copies = list(members.values())
        box = held[copies[0][0]]
        missing = [box] if box.size else []
        parts: list[list[Box]] = [[] for _ in copies]
        for number, ranks in enumerate(copies):
            for piece in (piece for rank in ranks for piece in holders.get(rank, ())):
                parts[number] += [part for rest in missing if (part := rest.intersect(piece.whole)) is not None]
                missing = [part for rest in missing for part in rest.minus(piece.whole)]
        parts[term % len(copies)] += missing
        for number, ranks in enumerate(copies):
            for rank in ranks:
                for part in parts[number]:
                    shares[rank].append(Piece(part, tuple(a - b for a, b in zip(part.start, box.start, strict=True))))
    return {rank: tuple(pieces) for rank, pieces in shares.items()}
