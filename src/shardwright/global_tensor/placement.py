"""``placement``: the device type and the ranks of a global tensor, nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwright.comm.current_world import here
from shardwright.errors import LayoutError

Coord = tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """Which ranks hold a tensor, as a grid of one or more axes, in the order given.

    ``ranks`` are all of them, the last axis fastest; ``shape`` is the grid's. Made by :func:`placement`.
    """

    type: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        """How many axes it has: a tensor has one sbp for each."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)

    @cached_property
    def coords(self) -> tuple[tuple[int, Coord], ...]:
        """Every rank and its coordinate, in the order of the grid."""
        return tuple(zip(self.ranks, product(*map(range, self.shape)), strict=True))

    @cached_property
    def _coord_of(self) -> dict[int, Coord]:
        return dict(self.coords)

    def coord(self, rank: int) -> Coord | None:
        """The coordinate of ``rank``; None when it is not a member.

        >>> placement("cpu", [[0, 1], [2, 3]]).coord(2), placement("cpu", [1]).coord(0)
        ((1, 0), None)
        """
        return self._coord_of.get(rank)

    def __contains__(self, rank: int) -> bool:
        return rank in self._coord_of

    def group(self, axis: int, rank: int) -> tuple[int, ...]:
        """The ranks that differ from ``rank``, a member, only on ``axis``, in the order of the axis.

        >>> placement("cpu", [[0, 1], [2, 3]]).group(0, 3)
        (1, 3)
        """
        at = self._coord_of[rank]
        return tuple(other for other, c in self.coords if c[:axis] + c[axis + 1 :] == at[:axis] + at[axis + 1 :])

    def nested(self) -> Any:
        """The ranks as nested lists of the grid's shape."""
        return torch.tensor(self.ranks).view(self.shape).tolist()

    def __str__(self) -> str:
        return f'placement("{self.type}", ranks={self.nested()})'

    __repr__ = __str__


def placement(type: str, ranks: Any) -> Placement:
    """Where a global tensor lies: a device type, and ranks as a list or a grid (nested lists), order kept.

    Raises: LayoutError: ranks that are no grid of different numbers; ranks or a type that the world does not have.

    >>> placement("cpu", ranks=[0, 1, 3])
    placement("cpu", ranks=[0, 1, 3])
    >>> placement("cpu", ranks=[[0, 1], [2, 3]]).shape
    (2, 2)
    """
    if not _is_type(type):
        raise _wrong("no such device type", type, '"cpu", "cuda" or another type torch knows', 'write "cpu"')
    if isinstance(ranks, DeviceMesh):
        ranks = ranks.mesh
    if hasattr(ranks, "tolist"):  # a tensor, or an array of numpy's
        ranks = ranks.tolist()
    shape, flat = _shape(ranks, ranks), tuple(_numbers(ranks))
    if not flat:
        raise _wrong("a placement without ranks", ranks, "one rank or more", "give the ranks: [0, 1]")
    if prod(shape) != len(flat):  # a grid has as many numbers in every row
        raise _wrong("ranks that are no grid", ranks, "nested lists of equal lengths", "fill up the shorter rows")
    twice = sorted({rank for rank in flat if flat.count(rank) > 1})
    if twice:
        raise _wrong("a rank is there twice", f"{ranks}: {twice}", "each rank once", "leave out the second one")
    made = Placement(type, flat, shape)
    if torch.distributed.is_initialized():
        check_in_world(made)
    return made


def check_placement(given: object) -> None:
    """Raises LayoutError for what is no placement, or none of this world."""
    if not isinstance(given, Placement):
        raise _wrong("not a placement", repr(given), "placement(type, ranks)", 'write placement("cpu", ranks=[0])')
    check_in_world(given)


def check_in_world(given: Placement) -> None:
    """Raises LayoutError when the placement has ranks or a device type that the world does not have."""
    size, has = here().size, here().device.type
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
    """The placement as torch's DeviceMesh, without process groups: making it sends nothing, on any rank."""
    return DeviceMesh(given.type, torch.tensor(given.ranks).view(given.shape), _init_backend=False, _rank=here().rank)


@lru_cache(maxsize=1024)
def placement_of(mesh: DeviceMesh) -> Placement:
    """The placement of a DeviceMesh."""
    return Placement(mesh.device_type, tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape))


def _shape(ranks: Any, given: Any) -> tuple[int, ...]:
    if isinstance(ranks, (list, tuple, range)):
        inner = {_shape(each, given) for each in ranks}
        if len(inner) > 1:
            raise _wrong("ranks that are no grid", given, "nested lists of equal lengths", "fill up the shorter rows")
        return (len(ranks), *inner.pop()) if inner else (0,)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 0:
        raise _wrong("not a rank", f"{ranks!r} in {given!r}", "numbers from 0 on", "give ranks=[0, 1], or nested lists")
    if ranks is given:
        raise _wrong("ranks that are no list", repr(given), "a list or nested lists", f"write ranks=[{given}]")
    return ()


def _numbers(ranks: Sequence[Any] | int) -> Iterator[int]:
    if isinstance(ranks, int):
        yield ranks
    else:
        for each in ranks:
            yield from _numbers(each)


def _is_type(type: object) -> bool:
    try:
        return isinstance(type, str) and torch.device(type).index is None
    except RuntimeError:
        return False


def _is_usable(type: str) -> bool:
    """Whether this process, alone, can compute on such a device."""
    try:
        return bool(torch.get_device_module(type).is_available())
    except RuntimeError:  # torch has no such devices here
        return False


def _wrong(what: str, given: object, allowed: object, fix: object) -> LayoutError:
    return LayoutError(what, given=given, allowed=allowed, fix=fix)
