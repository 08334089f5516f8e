"""Computes the shapes of tensor-parallel grids (2d, 2.5d, 3d) for a number of ranks: all possible, and the default."""

from __future__ import annotations

from math import isqrt, prod

NUM_SIDES = {"2d": 2, "2.5d": 3, "3d": 3}
"""Maps a mode of tensor parallelism to the number of sides of its grid."""


def default_shape(mode: str, num_ranks: int, depth: int = 1) -> tuple[int, ...]:
    """Returns the default grid shape of tensor-parallel ``mode`` for ``num_ranks`` ranks: sides as equal as possible.

    ``mode`` is "2d", "2.5d" or "3d". The first side of a 2.5D grid is its depth: the divisor of ``num_ranks`` that is
    nearest to ``depth``.

    >>> default_shape("2d", 8), default_shape("2.5d", 8, 2), default_shape("3d", 12)
    ((2, 4), (2, 2, 2), (2, 2, 3))
    """
    low = [size for size in range(1, isqrt(num_ranks) + 1) if num_ranks % size == 0]
    if mode == "2d":
        return low[-1], num_ranks // low[-1]
    if mode == "2.5d":
        divisors = sorted({*low, *(num_ranks // size for size in low)})
        depth = min(divisors, key=lambda divisor: abs(divisor - depth))
        return (depth, *default_shape("2d", num_ranks // depth))
    cubes = [(size, *default_shape("2d", num_ranks // size)) for size in low if size**3 <= num_ranks]
    return tuple(sorted(min(cubes, key=sum)))


def shapes(mode: str, num_ranks: int) -> list[tuple[int, ...]]:
    """Returns every grid shape that tensor-parallel ``mode`` can have with ``num_ranks`` ranks, most even first.

    The order is by the longest side, then by the sides. An empty ``mode`` means 1-D: one side of ``num_ranks``.

    >>> shapes("2d", 4), len(shapes("3d", 8)), shapes("", 4)
    ([(2, 2), (1, 4), (4, 1)], 10, [(4,)])
    """
    prefixes: list[tuple[int, ...]] = [()]
    for _ in range(NUM_SIDES.get(mode, 1) - 1):
        remaining = {sides: num_ranks // prod(sides) for sides in prefixes}
        prefixes = [(*sides, n) for sides, left in remaining.items() for n in range(1, left + 1) if left % n == 0]
    return sorted(((*sides, num_ranks // prod(sides)) for sides in prefixes), key=lambda sides: (max(sides), sides))
