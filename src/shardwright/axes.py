"""The registry of the axes that a layout line can name; the file of a strategy declares an axis and it is added here.

::

    strategies/data_parallel.py      AXIS = LayoutAxis("dp", order=10, mesh_axes=(("dp",), ("replica", "dp")), ...)
                                                        |                            |
    the line        dp2x4/zero3   <---------------------+                            |
    the mesh        replica=2 dp=4   <-----------------------------------------------+

The registry is empty until ``shardwright.strategies`` is imported, which ``import shardwright`` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeAlias

from shardwright.errors import LayoutError

Sizes: TypeAlias = tuple[int, ...]
Options: TypeAlias = tuple[tuple[str, str | None], ...]
"""The options of an axis in a layout line, as pairs of a name and a value (or None)."""

Kind = Literal["stages", "copies", "operators"]
"""The work that ranks along an axis divide: pipeline stages, the batch (each has a model or a slice), or operators."""

WORDS = ("mb", "bf", "fp", "single", "recompute", "compile")
KEYS = ("parallel", "microbatches", "precision", "recompute", "compile", "size", "options")
"""The words of a layout line, and the keys of the dictionary form, that are not axes."""


class MisfitError(Exception):
    """Raised for sizes or options that an axis cannot have; it carries the problem and the nearest ones that work."""

    def __init__(self, what: str, sizes: Sizes, options: Options, allowed: str = "") -> None:
        super().__init__(what)
        self.what, self.sizes, self.options, self.allowed = what, sizes, options, allowed


@dataclass(frozen=True, eq=False)
class LayoutAxis:
    """One axis that a layout line can name (dp, tp, ...): how it is written, and which mesh axes its sizes are.

    Args:
        name: the axis's name in the line.
        order: its position in the line and in the mesh, slowest first. Ranks of the last axis are neighbors.
        kind: what the ranks along the axis divide.
        mesh_axes: the names of its mesh axes, for a size of one number, of two, and so on.
        sizes: how the sizes are written, for error texts.
        settle: a function that returns the canonical sizes and options, or raises MisfitError.
        automatic: the options that are replaced by others before a strategy is chosen.
        keyword: the axis's key in the dictionary form; "" if that form cannot name the axis.
        keys: the keys of the dictionary entry besides ``size`` and ``options``, and the types of each: str, int.
        written: a function from a dictionary entry to the options that it means, in the order of the line.

    >>> axis = LayoutAxis("dp", 10, "copies", (("dp",), ("replica", "dp")), "dp4, or replicas x slices: dp2x4")
    >>> axis.all_mesh_axes
    ('replica', 'dp')
    """

    name: str
    order: int
    kind: Kind
    mesh_axes: tuple[tuple[str, ...], ...]
    sizes: str
    settle: Callable[[Sizes, Options], tuple[Sizes, Options]] = lambda sizes, options: (sizes, options)
    automatic: tuple[str, ...] = ()
    keyword: str = ""
    keys: Mapping[str, Sequence[type]] = field(default_factory=dict)
    written: Callable[[Mapping[str, Any]], Sequence[str]] = lambda entry: [entry.get("options", "")]

    @property
    def all_mesh_axes(self) -> tuple[str, ...]:
        """The names of all mesh axes that this layout axis may become, slowest first."""
        return tuple(dict.fromkeys(name for names in reversed(self.mesh_axes) for name in names))


_REGISTERED: dict[str, LayoutAxis] = {}


def register(axis: LayoutAxis) -> None:
    """Adds an axis to the registry, so that a layout line (``dp2 tp4``) may name it.

    Raises: LayoutError: another axis has one of its names, or its place.

    >>> xp = LayoutAxis("xp", 5, "copies", (("xp",),), "one number: xp4")
    >>> register(xp)
    >>> "xp" in layout_axes(), "xp" in mesh_axes("copies"), "xp" in mesh_axes("operators")
    (True, True, False)
    >>> register(LayoutAxis("yp", 5, "copies", (("yp",),), "one number: yp4"))
    Traceback (most recent call last):
    shardwright.errors.LayoutError: two axes have the order 5
      ...
    >>> unregister(xp)
    """
    if not re.fullmatch("[a-z]+", axis.name) or axis.name in WORDS:
        allowed = f"letters a-z; {', '.join(WORDS)} are other words of the line"
        raise _clash(f"no axis can be called '{axis.name}'", axis.name, allowed, "rename it")
    if any("world" in names or "+" in "".join(names) for names in axis.mesh_axes):
        raise _clash("no axis of the mesh can be called so", axis.mesh_axes, "no 'world', and no '+'", "rename it")
    if axis.keyword in KEYS:
        raise _clash("the dictionary form has another such key", axis.keyword, "a key of its own", "rename the keyword")
    for other in layout_axes().values():
        _check_apart(axis, other)
    _REGISTERED[axis.name] = axis
    _clear_caches()


def _check_apart(axis: LayoutAxis, other: LayoutAxis) -> None:
    """Raises LayoutError if two axes share a name or an order."""
    both = f"'{axis.name}' beside '{other.name}'"
    if axis.order == other.order:
        taken = [each.order for each in layout_axes().values()]
        allowed = f"an order of its own; {', '.join(map(str, taken))} are taken"
        fix = f"give '{axis.name}' the order {1 + max(taken)}"
        raise _clash(f"two axes have the order {axis.order}", both, allowed, fix)
    shared = {axis.name, *axis.all_mesh_axes} & {other.name, *other.all_mesh_axes}
    shared |= {axis.keyword} & {other.keyword} - {""}
    if shared:
        raise _clash(f"two axes are called '{min(shared)}'", both, "names of its own", f"rename that of '{axis.name}'")


def unregister(axis: LayoutAxis) -> None:
    """Removes an axis from the registry, so that a layout line can no longer name it."""
    del _REGISTERED[axis.name]
    _clear_caches()


def _clear_caches() -> None:
    layout_axes.cache_clear()
    mesh_axes.cache_clear()


def _clash(what: str, given: object, allowed: str, fix: str) -> LayoutError:
    return LayoutError(what, given=given, allowed=allowed, fix=fix)


@cache
def layout_axes() -> Mapping[str, LayoutAxis]:
    """Returns all registered axes that a layout line can name, by name, slowest first."""
    return {axis.name: axis for axis in sorted(_REGISTERED.values(), key=lambda axis: axis.order)}


@cache
def mesh_axes(kind: Kind | None = None) -> tuple[str, ...]:
    """Returns the names of all axes that a mesh may have, slowest first; with ``kind``, only those of that kind."""
    return tuple(name for axis in layout_axes().values() if kind in (None, axis.kind) for name in axis.all_mesh_axes)
