"""The layout axis ``tp``: how a layout line writes it, as a number of ranks or as a grid in one of the modes.

::

    tp8/2d         becomes  tp2x4/2d          the most square grid with rows <= columns
    tp8/2.5d:d2    becomes  tp2x2x2/2.5d      the same under the given depth, which moves from the option into the sizes
    tp8/3d         becomes  tp2x2x2/3d        the most cubic one
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from shardwright.axes import AxisSizes, LayoutAxis, MisfitError, Options
from shardwright.errors import LayoutError, nearest
from shardwright.grid_shapes import NUM_SIDES, default_shape

PINS = {"2d": ("summa",), "2.5d": ("summa",), "3d": ("classic",)}
"""By mode, the option values that fix each layer's roles to the classic algorithm, in place of the cheapest roles."""


def _settle(sizes: AxisSizes, options: Options) -> tuple[AxisSizes, Options]:
    """Returns the explicit grid of a factor, and its options; a factor without a mode is returned unchanged.

    Raises MisfitError if the numbers, mode and options do not fit.
    """
    modes = [option for option in options if option[0] in NUM_SIDES]
    if not modes and len(sizes) == 1:
        return sizes, options
    mode, value = modes[0] if modes else ("2d" if len(sizes) == 2 else "3d", None)
    pinned = value in PINS[mode]
    kept = (mode, nearest(value or "", PINS[mode]) or None)
    settled = (kept, *(option for option in options if option[0] not in NUM_SIDES))
    num_numbers, deep = NUM_SIDES[mode], mode == "2.5d"
    written = re.fullmatch("d([1-9][0-9]{0,6})", value or "")
    depth = int(written[1]) if written else 2
    grid = sizes if len(sizes) == num_numbers else default_shape(mode, prod(sizes), depth)
    if not modes and any(name == "auto" for name, _ in options):
        raise MisfitError("'auto' chooses the grid itself", (prod(sizes),), options, allowed="tp4/auto")
    for wrong, what in (
        (not modes, "two or three numbers need a grid mode"),
        (len(modes) > 1, "a grid has one mode"),
        (value and not pinned and not (deep and written), f"{mode} has no such value: {_values(mode)}"),
        (len(sizes) not in (1, num_numbers), f"a {mode} grid has {num_numbers} numbers"),
        (deep and len(sizes) == 1 and not written, "a 2.5d grid needs its depth"),
        (written and depth != grid[0], "the depth does not fit the ranks"),
    ):
        if wrong:
            raise MisfitError(what, grid, settled)
    return grid, settled


def _values(mode: str) -> str:
    return " or ".join(f"{mode}:{value}" for value in (*PINS[mode], *(["d2"] if mode == "2.5d" else [])))


def _written(entry: Mapping[str, Any]) -> Sequence[str]:
    """Returns the option texts of a layout in dictionary form, such as ``{"size": 8, "mode": "2.5d", "depth": 2}``.

    This one gives ``2.5d:d2``. A depth in another mode raises LayoutError.
    """
    mode, depth = entry.get("mode", "1d"), entry.get("depth")
    if depth is not None and mode != "2.5d":
        raise LayoutError(
            "only mode 2.5d has a depth", given=depth, allowed="no depth", fix="leave out 'depth', or write mode 2.5d"
        )
    return ["" if mode == "1d" else mode if depth is None else f"{mode}:d{depth}", entry.get("options", "")]


AXIS = LayoutAxis(
    "tp",
    order=30,
    kind="operators",
    mesh_axes=(("tp",), ("row", "col"), ("depth", "row", "col")),
    sizes="tp4 tp2x4/2d tp8/2d tp2x2x2/2.5d tp8/2.5d:d2 tp8/3d",
    settle=_settle,
    automatic=("auto",),
    keyword="tensor",
    keys={"mode": (str,), "depth": (int,)},
    written=_written,
    also={"mp": "", "model": "", "megatron": "", "sequence": "sp"},
)
"""The layout axis ``tp`` of tensor parallelism: one mesh axis, or a grid (row, col) or (depth, row, col)."""
