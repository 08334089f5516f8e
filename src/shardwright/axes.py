"""The registry of the parallel axes (``dp``, ``tp``, ...) that a layout line such as ``dp2x4/zero3`` can name.

The file of a strategy declares an axis as ``AXIS``, and ``shardwright.strategies`` registers it here::

    strategies/data_parallel.py      AXIS = LayoutAxis("dp", order=10, mesh_axes=(("dp",), ("replica", "dp")), ...)
                                                        |                            |
    the line        dp2x4/zero3   <---------------------+                            |
    the mesh        replica=2 dp=4   <-----------------------------------------------+

The registry is empty until ``shardwright.strategies`` is imported, which ``import shardwright`` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeAlias

from shardwright.errors import LayoutError

AxisSizes: TypeAlias = tuple[int, ...]
Options: TypeAlias = tuple[tuple[str, str | None], ...]
"""The options of an axis in a layout line, as pairs of a name and a value (or None)."""

AxisKind = Literal["stages", "copies", "operators"]
"""What the ranks along an axis divide: the model into pipeline stages, the batch ("copies"), or each operator.

Along an axis of the kind "copies", each rank has a copy of the model, or ZeRO's slices of one.
"""

MAX_SIZE = 2**20
"""The largest number of ranks of one factor of a layout line, and of microbatches."""

WORDS = ("mb", "bf", "fp", "single", "recompute", "compile")
"""The words of a layout line that are not axes; no axis can have one of them as its name."""
KEYS = ("parallel", "microbatches", "precision", "recompute", "compile", "size", "options")
"""The keys of a layout given as a dictionary that are not axes; no axis can have one of them as its ``keyword``."""


class MisfitError(Exception):
    """Raised if an axis of a layout line cannot have the sizes or options given; parsing turns it into a LayoutError.

    ``what`` says what is wrong, and ``sizes`` and ``options`` are the nearest valid ones. ``allowed`` says what else is
    valid; if it is empty, the LayoutError shows the axis's :attr:`LayoutAxis.sizes` instead.
    """

    def __init__(self, what: str, sizes: AxisSizes, options: Options, allowed: str = "") -> None:
        super().__init__(what)
        self.what, self.sizes, self.options, self.allowed = what, sizes, options, allowed


@dataclass(frozen=True, eq=False)
class LayoutAxis:
    """One axis that a layout line can name (dp, tp, ...): how the line writes it, and which mesh axes it becomes.

    Args:
        name: the axis's name in the line.
        order: its position among the axes, in the line and in the mesh. The axis with the largest order varies
            fastest: its ranks have consecutive numbers.
        kind: what the ranks along the axis divide: the model ("stages"), the batch ("copies") or each operator
            ("operators").
        mesh_axes: the names of its mesh axes, if its size has one number, two, and so on. In the example, ``dp4``
            becomes the mesh axis ``dp``, and ``dp2x4`` the mesh axes ``replica`` of size 2 and ``dp`` of size 4.
        sizes: text for errors on how the sizes are written.
        settle: a function that returns the canonical sizes and options, or raises MisfitError.
        automatic: options such as ``auto`` that the library replaces by others before it chooses a strategy.
        keyword: the axis's key in a layout given as a dictionary; "" if such a layout cannot name the axis.
        keys: the keys of the axis's dictionary entry besides ``size`` and ``options``, each with the types allowed.
        written: a function that returns the options of the line for the axis's dictionary entry, in order.
        also: what other libraries call the axis, each with the options that it means: ``{"fsdp": "zero3"}``. A number
            in braces stands for the number behind the word, and is taken if there is none: ``{"zero": "zero{3}"}``.
            Errors propose the line with the axis's own words.

    >>> axis = LayoutAxis("dp", 10, "copies", (("dp",), ("replica", "dp")), "dp4, or replicas x slices: dp2x4")
    >>> axis.all_mesh_axes
    ('replica', 'dp')
    """

    name: str
    order: int
    kind: AxisKind
    mesh_axes: tuple[tuple[str, ...], ...]
    sizes: str
    settle: Callable[[AxisSizes, Options], tuple[AxisSizes, Options]] = lambda sizes, options: (sizes, options)
    automatic: tuple[str, ...] = ()
    keyword: str = ""
    keys: Mapping[str, Sequence[type]] = field(default_factory=dict)
    written: Callable[[Mapping[str, Any]], Sequence[str]] = lambda entry: [entry.get("options", "")]
    also: Mapping[str, str] = field(default_factory=dict)

    @property
    def all_mesh_axes(self) -> tuple[str, ...]:
        """The names of all mesh axes that this layout axis can become, whatever its sizes, slowest-varying first."""
        return tuple(dict.fromkeys(name for names in reversed(self.mesh_axes) for name in names))


_REGISTERED: dict[str, LayoutAxis] = {}

OPTIONS: dict[str, tuple[str, Iterable[str]]] = {}
"""The axis and the names of the options of each registered strategy, by the strategy's name; errors propose them."""


def register(axis: LayoutAxis) -> None:
    """Adds an axis to the registry, so that a layout line (``dp2 tp4``) may name it.

    Raises: LayoutError: its order or one of its names belongs to another axis; or a name is not allowed, such as one
        with other characters than a-z, or a word that a layout already uses for something else.

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
        orders = [layout_axis.order for layout_axis in layout_axes().values()]
        allowed = f"an order of its own; {', '.join(map(str, orders))} are taken"
        fix = f"give '{axis.name}' the order {1 + max(orders)}"
        raise _clash(f"two axes have the order {axis.order}", both, allowed, fix)
    shared = {axis.name, *axis.all_mesh_axes} & {other.name, *other.all_mesh_axes}
    shared |= {axis.keyword} & {other.keyword} - {""}
    if shared:
        raise _clash(f"two axes are called '{min(shared)}'", both, "names of its own", f"rename that of '{axis.name}'")


def unregister(axis: LayoutAxis) -> None:
    """Removes an axis from the registry, so that a layout line cannot name it. Raises KeyError if it is not there."""
    del _REGISTERED[axis.name]
    _clear_caches()


def _clear_caches() -> None:
    layout_axes.cache_clear()
    mesh_axes.cache_clear()


def _clash(what: str, given: object, allowed: str, fix: str) -> LayoutError:
    return LayoutError(what, given=given, allowed=allowed, fix=fix)


@cache
def layout_axes() -> Mapping[str, LayoutAxis]:
    """Returns all registered axes by name, in the order of a layout line and of the mesh: slowest-varying first."""
    return {axis.name: axis for axis in sorted(_REGISTERED.values(), key=lambda axis: axis.order)}


@cache
def mesh_axes(kind: AxisKind | None = None) -> tuple[str, ...]:
    """Returns the names of all axes that a mesh may have, slowest-varying first.

    With ``kind`` only those that come from layout axes of that kind: "stages", "copies" or "operators".
    """
    return tuple(name for axis in layout_axes().values() if kind in (None, axis.kind) for name in axis.all_mesh_axes)
