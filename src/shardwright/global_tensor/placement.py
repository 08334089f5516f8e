"""``placement``: the device type and the grid of ranks of a global tensor, like a DeviceMesh without process groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm.current_world import current_world
from shardwright.errors import LayoutError

HierarchyIndex = tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """The device type and the ranks of a global tensor; the ranks are a grid of one or more axes.

    Use :func:`placement` to make one. ``ranks`` lists the grid flattened with the last axis fastest, and ``shape`` is
    the grid's shape.
    """

    type: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        """The number of axes of the grid; a tensor has one sbp (split, broadcast, partial sum) for each."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of ranks in the placement."""
        return len(self.ranks)

    @cached_property
    def coords(self) -> tuple[tuple[int, HierarchyIndex], ...]:
        """The pairs (rank, coordinate) of all ranks, in the order of the grid."""
        return tuple(zip(self.ranks, product(*map(range, self.shape)), strict=True))

    @cached_property
    def _coord_of(self) -> dict[int, HierarchyIndex]:
        return dict(self.coords)

    def coord(self, rank: int) -> HierarchyIndex | None:
        """Returns the coordinate of ``rank`` in the grid, or None if the placement does not contain the rank."""
        return self._coord_of.get(rank)

    def __contains__(self, rank: int) -> bool:
        return rank in self._coord_of

    def group(self, axis: int, rank: int) -> tuple[int, ...]:
        """Returns ``rank`` and the ranks whose grid coordinates differ from its own on axis number ``axis`` alone.

        They are sorted by their coordinate on that axis, which is counted from 0. ``rank`` must be in the placement.

        >>> placement("cpu", [[0, 1], [2, 3]]).group(0, 3)
        (1, 3)
        """
        at = self._coord_of[rank]
        return tuple(other for other, c in self.coords if c[:axis] + c[axis + 1 :] == at[:axis] + at[axis + 1 :])

    def nested(self) -> Any:
        """Returns the ranks as nested lists of the grid's shape."""
        return torch.tensor(self.ranks).view(self.shape).tolist()

    def __str__(self) -> str:
        return f'placement("{self.type}", ranks={self.nested()})'

    __repr__ = __str__


def placement(type: str, ranks: Any) -> Placement:
    """Returns a :class:`Placement` of a device type and a grid of ranks.

    ``ranks`` is a nested list, a tensor or a DeviceMesh; the order of the ranks is kept.

    Raises: LayoutError: no such device type, or ranks that are not a grid of one or more distinct numbers. If
        ``torch.distributed`` is initialized also: ranks or a device type that the world does not have.

    >>> placement("cpu", ranks=[0, 1, 3])
    placement("cpu", ranks=[0, 1, 3])
    >>> placement("cpu", ranks=[[0, 1], [2, 3]]).shape
    (2, 2)
    """
    if not _is_type(type):
        raise _wrong("no such device type", type, '"cpu", "cuda" or another device type of torch', 'write "cpu"')
    if isinstance(ranks, DeviceMesh):
        ranks = ranks.mesh
    if hasattr(ranks, "tolist"):  # a tensor, or an array of numpy's
        ranks = ranks.tolist()
    shape, flat = _grid(ranks, ranks)
    if not flat:
        raise _wrong("a placement without ranks", ranks, "one rank or more", "give the ranks: [0, 1]")
    twice = sorted({rank for rank in flat if flat.count(rank) > 1})
    if twice:
        raise _wrong("a rank is given twice", f"{ranks}: {twice}", "each rank once", "leave out the second one")
    made = Placement(type, flat, shape)
    if torch.distributed.is_initialized():
        _check_in_world(made)
    return made


def check_placement(given: object) -> None:
    """Raises LayoutError unless ``given`` is a :class:`Placement` that this world of ranks can have.

    Its ranks must be ranks of the world, and its device type that of the world. A world of one rank also takes any
    other device type that the process can use.
    """
    if not isinstance(given, Placement):
        raise _wrong("not a placement", repr(given), "placement(type, ranks)", 'write placement("cpu", ranks=[0])')
    _check_in_world(given)


def _check_in_world(given: Placement) -> None:
    size, has = current_world().size, current_world().device.type
    if given.type != has and not (size == 1 and _is_usable(given.type)):
        raise _wrong(
            "a device type that the world does not have", f'{given}, a world on "{has}"', f'"{has}"',
            f'write placement("{has}", ranks={given.nested()}), or start the ranks on "{given.type}"',
        )  # fmt: skip
    outside = [rank for rank in given.ranks if rank >= size]
    if outside:
        raise _wrong(
            "ranks outside the world", f"{given}, a world of {size}", f"ranks from 0 to {size - 1}",
            f"start {max(outside) + 1} ranks, or leave out {outside}",
        )  # fmt: skip


@lru_cache(maxsize=1024)
def mesh_of(given: Placement) -> DeviceMesh:
    """Returns torch's DeviceMesh with the ranks of a placement; it has no process groups, so nothing is sent."""
    return DeviceMesh(
        given.type, torch.tensor(given.ranks).view(given.shape), _init_backend=False, _rank=current_world().rank
    )


@lru_cache(maxsize=1024)
def placement_of(mesh: DeviceMesh) -> Placement:
    """Returns the placement that has the ranks of a DeviceMesh."""
    return Placement(mesh.device_type, tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape))


def _grid(ranks: Any, outermost: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of nested lists, and their ranks in order; ``given`` is the outermost list, for errors."""
    if isinstance(ranks, (list, tuple, range)):
        rows = [_grid(entry, outermost) for entry in ranks]
        shapes = {shape for shape, _ in rows} or {()}
        if len(shapes) > 1:
            raise _wrong(
                "ranks that are no grid", outermost, "nested lists of equal lengths", "fill up the shorter rows"
            )
        return (len(rows), *shapes.pop()), tuple(rank for _, row in rows for rank in row)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 0:
        raise _wrong(
            "not a rank", f"{ranks!r} in {outermost!r}", "numbers from 0 on", "give ranks=[0, 1], or nested lists"
        )
    if ranks is outermost:
        raise _wrong("ranks that are no list", repr(outermost), "a list or nested lists", f"write ranks=[{outermost}]")
    return (), (ranks,)


def _is_type(type: object) -> bool:
    try:
        return isinstance(type, str) and torch.device(type).index is None
    except RuntimeError:
        return False


def _is_usable(type: str) -> bool:
    """Returns whether this process can compute on a device of the type."""
    try:
        return bool(torch.get_device_module(type).is_available())
    except RuntimeError:  # torch has no such devices here
        return False


def _wrong(what: str, given: object, allowed: object, fix: object) -> LayoutError:
    return LayoutError(what, given=given, allowed=allowed, fix=fix)
