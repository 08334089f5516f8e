"""Grids of ranks as numbers: which shapes a mode may have, and which one it has when only the ranks are given."""

from __future__ import annotations

from math import isqrt

NUM_SIDES = {"2d": 2, "2.5d": 3, "3d": 3}
"""How many numbers the grid of a mode has."""


def default_shape(mode: str, num_ranks: int, depth: int = 1) -> tuple[int, ...]:
    """The grid a mode makes of so many ranks; of depths that divide them, the one nearest to ``depth``.

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
    """Every grid that a mode can have with so many ranks, the most even first; without a mode, the one line of them.

    >>> shapes("2d", 4), len(shapes("3d", 8)), shapes("", 4)
    ([(2, 2), (1, 4), (4, 1)], 10, [(4,)])
    """
    found: list[tuple[int, ...]] = [()]
    for _ in range(NUM_SIDES.get(mode, 1) - 1):
        found = [(*sides, n) for sides in found for n in _divisors(_left(num_ranks, sides))]
    return sorted(((*sides, _left(num_ranks, sides)) for sides in found), key=lambda sides: (max(sides), sides))


def _left(num_ranks: int, sides: tuple[int, ...]) -> int:
    for side in sides:
        num_ranks //= side
    return num_ranks


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
