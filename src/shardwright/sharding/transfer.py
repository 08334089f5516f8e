"""Plans the messages that redistribute a tensor from one layout to another.

Gathering a tensor, loading a checkpoint, resuming on other ranks and changing a layout all use this one plan. This file
sends nothing: the caller reads each message with ``read``, sends it by its own means, and writes it with ``deliver``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.errors import PlanError
from shardwright.sharding.box import Box, Piece, cells, read, write


class BoxMessage(NamedTuple):
    """One message of a redistribution: a box of the tensor that one rank sends to another, or keeps for itself.

    ``source_piece`` and ``destination_piece`` are the pieces of the two local tensors that contain the box. ``adds``
    says that the receiver adds the box to its tensor, because it is a second or later term of a sum.
    """

    source: int
    destination: int
    box: Box
    source_piece: Piece
    destination_piece: Piece
    adds: bool


@dataclass(frozen=True)
class TensorTransfer:
    """The point-to-point messages that redistribute a tensor from one layout to another.

    A receiver writes its messages in their order, so that sums are equal to the bit on every rank.
    """

    messages: tuple[BoxMessage, ...]

    def messages_from(self, rank: int) -> tuple[BoxMessage, ...]:
        """Returns the messages that ``rank`` sends, including those to itself."""
        return self._by_rank[0].get(rank, ())

    def messages_to(self, rank: int) -> tuple[BoxMessage, ...]:
        """Returns the messages that ``rank`` receives, including those from itself, in the order to write them."""
        return self._by_rank[1].get(rank, ())

    @property
    def moved_elements(self) -> int:
        """The number of elements sent between different ranks."""
        return sum(message.box.size for message in self.messages if message.source != message.destination)

    @cached_property
    def _by_rank(self) -> tuple[dict[int, tuple[BoxMessage, ...]], dict[int, tuple[BoxMessage, ...]]]:
        sent: defaultdict[int, list[BoxMessage]] = defaultdict(list)
        received: defaultdict[int, list[BoxMessage]] = defaultdict(list)
        for message in self.messages:
            sent[message.source].append(message)
            received[message.destination].append(message)
        return {rank: tuple(m) for rank, m in sent.items()}, {rank: tuple(m) for rank, m in received.items()}


RankPiece = tuple[int, Piece]
"""A rank, and a piece that it stores."""


class _PieceIndex:
    """Finds the pieces that intersect a box by binary search along the dim with the most distinct starts."""

    def __init__(self, held: Sequence[RankPiece]) -> None:
        by_box: defaultdict[Box, list[RankPiece]] = defaultdict(list)
        for rank, piece in held:
            if piece.whole.size:
                by_box[piece.whole].append((rank, piece))
        num_dims = len(held[0][1].whole.start) if held else 0
        spread = [len({box.start[dim] for box in by_box}) for dim in range(num_dims)]
        self.dim = spread.index(max(spread)) if spread else None
        self.entries = list(by_box.items())
        if self.dim is not None:
            dim = self.dim
            self.entries.sort(key=lambda entry: entry[0].start[dim])
            self.starts = [box.start[dim] for box, _ in self.entries]
            self.ends = list(accumulate((box.stop[dim] for box, _ in self.entries), max))

    def intersecting(self, box: Box) -> Iterator[tuple[Box, list[RankPiece]]]:
        """Yields the intersection of ``box`` with each distinct stored box, and the (rank, piece) pairs of that box."""
        # starts are sorted, and ends are running maxima: both searches skip boxes that cannot intersect
        low, high = 0, len(self.entries)
        if self.dim is not None:
            low = bisect_right(self.ends, box.start[self.dim])
            high = bisect_left(self.starts, box.stop[self.dim])
        for held_box, holders in self.entries[low:high]:
            common = box.intersect(held_box)
            if common is not None:
                yield common, holders


class _Planner:
    """Plans the messages for one term of a sum: chooses a source for each box so that ranks send about equally much."""

    def __init__(self, held: Sequence[RankPiece], sent: defaultdict[int, int]) -> None:
        self._by_rank: defaultdict[int, list[RankPiece]] = defaultdict(list)
        for rank, piece in held:
            self._by_rank[rank].append((rank, piece))
        self.all_pieces = _PieceIndex(held)
        self._own: dict[int, _PieceIndex] = {}  # for ranks that fetch only, since most ranks of a checkpoint do not
        self.sent = sent

    def fetch(self, rank: int, box: Box) -> tuple[list[tuple[Box, RankPiece]], list[Box]]:
        """Returns disjoint parts of ``box``, each with its source for ``rank``, and the parts that no rank holds."""
        fetched: list[tuple[Box, RankPiece]] = []
        missing = [box] if box.size else []
        if rank in self._by_rank:  # elements that the rank already holds are not sent
            if rank not in self._own:
                self._own[rank] = _PieceIndex(self._by_rank[rank])
            for mine, holders in self._own[rank].intersecting(box):
                here = [part for part in (rest.intersect(mine) for rest in missing) if part is not None]
                fetched += [(part, holders[0]) for part in here]
                missing = [part for rest in missing for part in rest.minus(mine)] if here else missing
        not_held: list[Box] = []
        for rest in missing:
            others = self._fetch_from_others(rank, rest)
            fetched += others
            if sum(part.size for part, _ in others) < rest.size:
                left = [rest]
                for part, _ in others:
                    left = [piece for box in left for piece in box.minus(part)]
                not_held += left
        return fetched, not_held

    def _fetch_from_others(self, rank: int, box: Box) -> list[tuple[Box, RankPiece]]:
        # of several holders, the one that has sent the least so far, then the nearest: so no holder serves all ranks
        fetched = []
        intersecting = list(self.all_pieces.intersecting(box))
        for cell, numbers in cells((number, [common]) for number, (common, _) in enumerate(intersecting)):
            holders = [holder for number in numbers for holder in intersecting[number][1]]
            nearest = min(holders, key=lambda held: (self.sent[held[0]], abs(held[0] - rank), held))
            self.sent[nearest[0]] += cell.size
            fetched.append((cell, nearest))
        return fetched


def plan_transfer(
    source: Mapping[int, Sequence[Piece]],
    destination: Mapping[int, Sequence[Piece]],
    *,
    terms: Mapping[int, int] | None = None,
) -> TensorTransfer:
    """Returns the messages that fill every destination rank's pieces from the pieces that the source ranks hold.

    Each element is fetched once for each piece that needs it: from the rank itself if it holds the element, else from
    the holder that sends the least so far, the nearest rank among equals. The plan depends on the arguments only, so
    ranks that plan separately agree.

    ``terms`` says that the source is a sum, and maps each source rank to the number of the term that it holds (0 for
    ranks that are left out). Ranks with the same number hold copies of that term. Each term is fetched once for a
    destination, and the terms are added in order.

    Raises: PlanError: no source rank holds a part of a destination (of some term).

    >>> from shardwright.sharding.box import balanced_ranges
    >>> from shardwright.sharding.tensor_layout import TensorLayout
    >>> from shardwright.mesh import Mesh
    >>> whole, mesh = TensorLayout.whole((6,)), Mesh(tp=2)
    >>> halves = whole.cut("tp", 0, balanced_ranges(6, 2)).by_rank(mesh)
    >>> gather = plan_transfer(halves, whole.by_rank(mesh))
    >>> [(m.source, m.destination, str(m.box)) for m in gather.messages_to(1)], gather.moved_elements
    ([(1, 1, '[3:6]'), (0, 1, '[0:3]')], 6)
    >>> reduce_scatter = plan_transfer(whole.by_rank(mesh), halves, terms={0: 0, 1: 1})
    >>> [(m.source, m.destination, str(m.box), m.adds) for m in reduce_scatter.messages_to(1)]
    [(0, 1, '[3:6]', False), (1, 1, '[3:6]', True)]
    """
    of_term: defaultdict[int, list[RankPiece]] = defaultdict(list)
    for rank in sorted(source):
        if source[rank] or rank in (terms or {}):
            of_term[(terms or {}).get(rank, 0)] += [(rank, piece) for piece in source[rank]]
    sent: defaultdict[int, int] = defaultdict(int)
    planners = {term: _Planner(of_term[term], sent) for term in sorted(of_term)} or {0: _Planner([], sent)}
    messages: list[BoxMessage] = []
    for rank in sorted(destination):
        for piece in destination[rank]:
            for number, (term, planner) in enumerate(planners.items()):
                fetched, missing = planner.fetch(rank, piece.whole)
                if missing:
                    raise PlanError(
                        f"no source rank{f' of term {term}' if terms else ''} holds {missing[0]}, a part of "
                        f"{piece.whole} for rank {rank}",
                        given="source pieces that leave it out",
                        allowed="source pieces that together cover every destination piece",
                        fix="give the pieces of every source rank, and check the whole tensor's shape",
                    )
                messages += [BoxMessage(holder, rank, box, held, piece, number > 0) for box, (holder, held) in fetched]
    return TensorTransfer(tuple(messages))


def deliver(message: BoxMessage, local: Tensor, values: Tensor) -> None:
    """Writes the ``values`` of a message into the receiving rank's local tensor, or adds them if ``message.adds``.

    >>> box = Box((0,), (2,))
    >>> message = BoxMessage(0, 1, box, Piece(box, (0,)), Piece(box, (0,)), adds=True)
    >>> local = torch.ones(2)
    >>> deliver(message, local, torch.ones(2)); local
    tensor([2., 2.])
    """
    with torch.no_grad():
        if message.adds:
            read(local, message.destination_piece, message.box).add_(values)
        else:
            write(local, message.destination_piece, message.box, values)
