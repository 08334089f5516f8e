"""``Mesh``: the grid of all ranks with named axes, like a DeviceMesh without process groups or devices.

The slowest axis comes first, so that ranks which communicate most (``tp``) are neighbors::

    Mesh(dp=2, tp=3)        tp ->   0  1  2
                        dp  0       0  1  2
                        |   1       3  4  5
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod

from shardwright.axes import mesh_axes
from shardwright.errors import LayoutError, fix_for

Coord = Mapping[str, int]
"""A rank's index on every axis of the mesh, by axis name."""


def balanced(size: int, parts: int) -> tuple[int, ...]:
    """Returns the ``parts + 1`` cut points that split ``size`` items into ``parts`` contiguous runs of equal length.

    If they cannot be equal, the first ``size % parts`` runs have one item more.

    >>> balanced(10, 4)
    (0, 3, 6, 8, 10)
    """
    base, extra = divmod(size, parts)
    return tuple(part * base + min(part, extra) for part in range(parts + 1))


def balanced_part(size: int, parts: int, part: int) -> range:
    """Returns the index range of one of the runs that :func:`balanced` cuts, without computing the others.

    >>> balanced_part(10, 4, 1), len(balanced_part(10**12, 10**9, 7))
    (range(3, 6), 1000)
    """
    base, extra = divmod(size, parts)
    return range(part * base + min(part, extra), (part + 1) * base + min(part + 1, extra))


@dataclass(frozen=True, init=False)
class Mesh:
    """A grid of ranks with named axes; ranks are numbered so that the last axis varies fastest.

    Axes are put in the order of :func:`shardwright.axes.mesh_axes`, in whatever order they are given. ``mesh[axis]`` is
    the size of an axis, 1 for one that the mesh lacks.

    Raises: LayoutError: there is no such axis, or a size is below 1.

    >>> mesh = Mesh(tp=3, dp=2)
    >>> mesh.size, mesh.axes, mesh.coord(4)
    (6, ('dp', 'tp'), {'dp': 1, 'tp': 1})
    >>> mesh.group("tp", 4), mesh.group("dp", 4)
    ((3, 4, 5), (1, 4))
    """

    sizes: tuple[tuple[str, int], ...]

    def __init__(self, **sizes: int) -> None:
        known = mesh_axes()
        for axis, size in sizes.items():
            if axis not in known:
                raise LayoutError("no such axis", given=axis, allowed=", ".join(known), fix=fix_for(axis, known))
            if size < 1:
                raise LayoutError(f"axis '{axis}' is empty", given=size, allowed="1 or more", fix=f"leave out {axis}")
        object.__setattr__(self, "sizes", tuple((axis, sizes[axis]) for axis in known if axis in sizes))

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, slowest-varying first."""
        return tuple(axis for axis, _ in self.sizes)

    @property
    def size(self) -> int:
        """The number of ranks of the mesh."""
        return prod(size for _, size in self.sizes)

    def __getitem__(self, axis: str) -> int:
        return self._size_of.get(axis, 1)

    @cached_property
    def _size_of(self) -> dict[str, int]:
        return dict(self.sizes)

    def coord(self, rank: int) -> dict[str, int]:
        """Returns the coordinate of ``rank``: its index on every axis of the mesh."""
        coord = {}
        for axis, size in reversed(self.sizes):
            rank, coord[axis] = divmod(rank, size)
        return dict(reversed(coord.items()))

    def rank(self, coord: Coord) -> int:
        """Returns the rank at ``coord``, in which an axis that is left out counts as index 0."""
        rank = 0
        for axis, size in self.sizes:
            rank = rank * size + coord.get(axis, 0)
        return rank

    def first_rank(self, axes: Iterable[str], index: int) -> int:
        """Returns the lowest rank whose index is ``index`` on each of ``axes``; axes that the mesh lacks are ignored.

        >>> Mesh(pp=2, dp=2).first_rank(("pp",), 1)
        2
        """
        return self.rank(dict.fromkeys(axes, index))

    def coords(self, axes: Iterable[str] | None = None) -> tuple[dict[str, int], ...]:
        """Returns every combination of indices on ``axes``, by default on all axes of the mesh, in rank order."""
        wanted = set(self.axes if axes is None else axes)
        names = [axis for axis in self.axes if axis in wanted]
        return tuple(dict(zip(names, index, strict=True)) for index in product(*(range(self[a]) for a in names)))

    def group(self, axes: str | Iterable[str], rank: int) -> tuple[int, ...]:
        """Returns the process group of ``rank`` along ``axes``, in ascending order.

        These are the ranks, itself included, whose index is the same as its own on every other axis.
        """
        return _group(self.sizes, frozenset({axes} if isinstance(axes, str) else axes), rank)

    def groups(self, axes: str | Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Returns all process groups along ``axes``, each as a tuple of ranks; every rank is in exactly one group."""
        varied = {axes} if isinstance(axes, str) else set(axes)
        first = (self.rank(coord) for coord in self.coords(set(self.axes) - varied))
        return tuple(self.group(varied, rank) for rank in first)

    def __str__(self) -> str:
        return " ".join(f"{axis}={size}" for axis, size in self.sizes) or "one rank"


@lru_cache(maxsize=4)  # consecutive parameters need the same group, and groups may be large
def _group(sizes: tuple[tuple[str, int], ...], varied: frozenset[str], rank: int) -> tuple[int, ...]:
    ranks, stride = [0], prod(size for _, size in sizes)
    for axis, size in sizes:
        stride //= size
        indices = range(size) if axis in varied else (rank // stride % size,)
        ranks = [first + index * stride for first in ranks for index in indices]
    return tuple(ranks)
