"""Computes which box (a range of every dim) of a global tensor each rank holds and, for partial sums, which term."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from torch.distributed.tensor import Shard

from shardwright.global_tensor.placement import HierarchyIndex, Placement
from shardwright.global_tensor.sbp import Sbp
from shardwright.sharding.box import Box, Piece


class GlobalLayout(NamedTuple):
    """The layout of a global tensor: its placement, and an sbp (split, broadcast, partial sum) for each of its axes."""

    placement: Placement
    sbp: tuple[Sbp, ...]


def chunk(size: int, parts: int, part: int) -> tuple[int, int]:
    """Returns the range (start, stop) that part number ``part`` has when ``torch.chunk`` cuts ``size`` into ``parts``.

    If ``torch.chunk`` makes fewer than ``parts`` chunks, the remaining parts are empty, so that every rank has a part.

    >>> [chunk(5, 4, part) for part in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    full = -(-size // parts)
    return min(part * full, size), min((part + 1) * full, size)


@lru_cache(maxsize=4096)
def boxes(shape: tuple[int, ...], layout: GlobalLayout) -> dict[int, Box]:
    """Maps each rank of the placement to the box (a range of every dim) of the global tensor that the rank holds."""
    return {rank: _box_at(shape, layout, coord) for rank, coord in layout.placement.coords}


def _box_at(shape: tuple[int, ...], layout: GlobalLayout, coord: HierarchyIndex) -> Box:
    start, stop = [0] * len(shape), list(shape)
    # axes that cut the same dim cut it one after the other, the slowest axis first, as DTensor does
    for one, parts, part in zip(layout.sbp, layout.placement.shape, coord, strict=True):
        if isinstance(one, Shard):
            first, last = chunk(stop[one.dim] - start[one.dim], parts, part)
            stop[one.dim] = start[one.dim] + last
            start[one.dim] += first
    return Box(tuple(start), tuple(stop))


def whole_piece(box: Box) -> Piece:
    """Returns a :class:`Piece` (a box, and its offset in a local tensor) for a local tensor that holds just ``box``."""
    return Piece(box, (0,) * len(box.start))


@lru_cache(maxsize=4096)
def terms(layout: GlobalLayout) -> dict[int, int]:
    """Maps each rank of the placement to the number of the ``partial_sum`` term that the rank holds, counted from 0.

    All numbers are 0 for a layout without partial sums.
    """
    term_of = {}
    for rank, coord in layout.placement.coords:
        term = 0
        for one, size, index in zip(layout.sbp, layout.placement.shape, coord, strict=True):
            if one.is_partial():
                term = term * size + index
        term_of[rank] = term
    return term_of


def is_partial(layout: GlobalLayout) -> bool:
    """Returns whether a layout is ``partial_sum`` on any axis, so that ranks hold terms to be added."""
    return any(one.is_partial() for one in layout.sbp)


@lru_cache(maxsize=4096)
def local_shape(shape: tuple[int, ...], layout: GlobalLayout, rank: int) -> tuple[int, ...]:
    """Returns the shape of a rank's local tensor of a global tensor of ``shape``.

    On a rank outside the placement it is the shape of an empty tensor with as many dims, or with one dim if ``shape``
    has none.

    >>> from shardwright.global_tensor import placement, sbp
    >>> [local_shape((5,), GlobalLayout(placement("cpu", [0, 2]), (sbp.split(0),)), rank) for rank in range(3)]
    [(3,), (0,), (2,)]
    """
    held = boxes(shape, layout).get(rank)
    return held.shape if held is not None else (0,) * max(len(shape), 1)
