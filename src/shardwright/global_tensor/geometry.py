"""Which box of the whole each rank of a placement holds, and which term of a sum: integers only."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from torch.distributed.tensor import Shard

from shardwright.global_tensor.placement import Coord, Placement
from shardwright.global_tensor.sbp import Sbp
from shardwright.sharding.box import Box, Piece


class GlobalLayout(NamedTuple):
    """A placement, and how a tensor lies on it."""

    placement: Placement
    sbp: tuple[Sbp, ...]


def chunk(size: int, parts: int, part: int) -> tuple[int, int]:
    """The part's range of ``size``, as ``torch.chunk`` cuts: full parts first, then a shorter one, then none.

    >>> [chunk(5, 4, part) for part in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    full = -(-size // parts)
    return min(part * full, size), min((part + 1) * full, size)


def box_at(shape: tuple[int, ...], where: GlobalLayout, coord: Coord) -> Box:
    """The box that the member at ``coord`` holds; axes that cut the same dim cut it one after the other."""
    start, stop = [0] * len(shape), list(shape)
    for one, parts, part in zip(where.sbp, where.placement.shape, coord, strict=True):
        if isinstance(one, Shard):
            first, last = chunk(stop[one.dim] - start[one.dim], parts, part)
            stop[one.dim] = start[one.dim] + last
            start[one.dim] += first
    return Box(tuple(start), tuple(stop))


@lru_cache(maxsize=4096)
def boxes(shape: tuple[int, ...], where: GlobalLayout) -> dict[int, Box]:
    """The box of every member."""
    return {rank: box_at(shape, where, coord) for rank, coord in where.placement.coords}


def whole_piece(box: Box) -> Piece:
    """The only piece of a local tensor that holds ``box``."""
    return Piece(box, (0,) * len(box.start))


@lru_cache(maxsize=4096)
def terms(where: GlobalLayout) -> dict[int, int]:
    """Which term of the sum each member holds; 0 everywhere without ``partial_sum``."""
    found = {}
    for rank, coord in where.placement.coords:
        term = 0
        for one, size, index in zip(where.sbp, where.placement.shape, coord, strict=True):
            if one.is_partial():
                term = term * size + index
        found[rank] = term
    return found


def is_partial(where: GlobalLayout) -> bool:
    """Whether it is a sum in parts."""
    return any(one.is_partial() for one in where.sbp)


@lru_cache(maxsize=4096)
def local_shape(shape: tuple[int, ...], where: GlobalLayout, rank: int) -> tuple[int, ...]:
    """The shape of the rank's local tensor; a rank that is not a member holds an empty one of the same dims.

    >>> from shardwright.global_tensor import sbp
    >>> from shardwright.global_tensor.placement import placement
    >>> [local_shape((5,), GlobalLayout(placement("cpu", [0, 2]), (sbp.split(0),)), rank) for rank in range(3)]
    [(3,), (0,), (2,)]
    """
    held = boxes(shape, where).get(rank)
    return held.shape if held is not None else (0,) * max(len(shape), 1)
