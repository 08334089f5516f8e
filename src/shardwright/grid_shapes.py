"""Shapes of tensor-parallel grids (2d, 2.5d, 3d): the shapes that a mode allows, and its default for some ranks."""

from __future__ import annotations

from math import isqrt, prod

NUM_SIDES = {"2d": 2, "2.5d": 3, "3d": 3}
"""Maps a mode of tensor parallelism to the number of sides of its grid."""


def default_shape(mode: str, num_ranks: int, depth: int = 1) -> tuple[int, ...]:
    """Returns the default shape of a tensor-parallel mode's grid of ``num_ranks``, with sides as equal as possible.

    A 2.5D grid has the depth nearest to ``depth`` of those that divide ``num_ranks``.

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
    """Returns every shape that the grid of a tensor-parallel mode can have with ``num_ranks`` ranks, most even first.

    An empty ``mode`` means 1-D.

    >>> shapes("2d", 4), len(shapes("3d", 8)), shapes("", 4)
    ([(2, 2), (1, 4), (4, 1)], 10, [(4,)])
    """
    found: list[tuple[int, ...]] = [()]
    for _ in range(NUM_SIDES.get(mode, 1) - 1):
        remaining = {sides: num_ranks // prod(sides) for sides in found}
        found = [(*sides, n) for sides, left in remaining.items() for n in range(1, left + 1) if left % n == 0]
    return sorted(((*sides, num_ranks // prod(sides)) for sides in found), key=lambda sides: (max(sides), sides))
