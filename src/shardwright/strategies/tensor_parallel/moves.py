"""The collectives of a layer's input and output as data, which ``apply`` binds to axes and ``traffic`` counts."""

from __future__ import annotations

from typing import Literal, NamedTuple

from shardwright.mesh import Coord
from shardwright.plan.batch_shard import RowMoves, rows_after
from shardwright.strategies.tensor_parallel.features import Features
from shardwright.strategies.tensor_parallel.roles import GridAxis, RoleStep


class AxisMove(NamedTuple):
    """One all-gather, reduce-scatter or all-reduce along an axis: of an operand's rows, its features, or all of it.

    ``rows`` and ``features`` say how rows or features are cut where the operand is cut over the axis: before an
    all-gather, after a reduce-scatter. ``over`` are the axes over which the features are whole at that time.
    """

    axis: str
    kind: Literal["rows", "features", "whole"]
    rows: RowMoves = ()
    features: Features | None = None
    over: tuple[str, ...] = ()

    def feature_sizes(self, coord: Coord) -> tuple[int, ...]:
        """Returns the number of features of each rank along the axis, where they are whole over the axes ``over``."""
        assert self.features is not None, "features are cut"
        return self.features.sizes(coord, self.axis, self.over)


def input_moves(step: RoleStep, axes: tuple[GridAxis, ...], x: Features) -> tuple[AxisMove, ...]:
    """Returns the collectives of a layer's input (:class:`AxisMove`) in order; ``step`` says how each axis cuts it.

    They are all-gathers of rows in the order of ``step.gathers``, then of features, fastest axis first. Before these
    come the moves "whole", for axes that copy the input: such a move gathers nothing, and all-reduces the input's
    gradient in the backward.
    """
    moves = [
        AxisMove(axis.name, "whole")
        for axis, state, role in zip(axes, step.before, step.roles, strict=True)
        if role == "h" and state == "C"
    ]
    rows = step.rows_before
    for name in step.gathers:
        moves.append(AxisMove(name, "rows", rows))
        rows = rows_after(rows, "gather", [name])
    joined: tuple[str, ...] = ()
    for axis, state, role in reversed(list(zip(axes, step.before, step.roles, strict=True))):
        if role == "h" and state == "F":
            moves.append(AxisMove(axis.name, "features", features=x, over=joined))
            joined += (axis.name,)
    return tuple(moves)


def output_moves(step: RoleStep, axes: tuple[GridAxis, ...], y: Features) -> tuple[AxisMove, ...]:
    """Returns the collectives that sum a layer's output, in order; ``step`` says how each axis cuts the layer.

    They are reduce-scatters over features (slowest axis first), reduce-scatters over rows, then all-reduces.
    """
    cutting = [a.name for a, s, r in zip(axes, step.after, step.roles, strict=True) if r == "k" and s == "F"]
    moves = [
        AxisMove(name, "features", features=y, over=tuple(cutting[number + 1 :])) for number, name in enumerate(cutting)
    ]
    rows = step.rows_gathered
    for name in step.cuts:
        rows = rows_after(rows, "cut", [name])
        moves.append(AxisMove(name, "rows", rows))
    moves += [
        AxisMove(axis.name, "whole")
        for axis, state, role in zip(axes, step.after, step.roles, strict=True)
        if role == "k" and state == "C"
    ]
    return tuple(moves)
