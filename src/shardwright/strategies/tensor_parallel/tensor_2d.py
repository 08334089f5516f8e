"""Tensor parallel in two dimensions: inputs, weights and outputs all cut on a grid of rows and columns.

::

      X (T x k)         W (k x h)         Y (T x h)         each rank holds one block of each; for Y it
    +-----+-----+     +-----+-----+     +-----+-----+       needs the X of its row and the W of its column,
    | 0,0 | 0,1 |     | 0,0 | 0,1 |     | 0,0 | 0,1 |       or whatever other roles send less
    +-----+-----+  *  +-----+-----+  =  +-----+-----+
    | 1,0 | 1,1 |     | 1,0 | 1,1 |     | 1,0 | 1,1 |
    +-----+-----+     +-----+-----+     +-----+-----+

Shapes: between layers an activation (B, ..., H) is (B / rows, ..., H / columns) on a rank; a weight has 1 / (R C) of
    its elements. A side of 1 is left out: 1x4 cuts features alone.
    With ``seq``, or where a batch is known to be too small, it is (B, T / rows, H / columns) instead: tokens
    of every sample are cut, and attention gathers keys and values over the axes that still cut its tokens.
Traffic: roles are chosen for each block so that least is sent; row t and col h, the classic choice, sends
    2 [(C-1) X + (R-1) W] / (R C) elements for each layer. ``summa`` pins that choice and keeps no gathered operand, as
    the papers do: its backward gathers X and W again: a factor of 3 for the 2. ``regather`` adds nothing to it.
Source: van de Geijn, Watts 1997 (SUMMA); Xu et al. 2021, arXiv:2104.05343 (Optimus).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from shardwright.comm.axis import Axis
from shardwright.mesh import Coord
from shardwright.plan.option import StrategyOption
from shardwright.plan.plan import Job, Plan
from shardwright.plan.traffic import StepCalls, Traffic
from shardwright.runtime.applied import Applied
from shardwright.strategies.tensor_parallel.apply import apply
from shardwright.strategies.tensor_parallel.axis import PINS
from shardwright.strategies.tensor_parallel.mode import OPTIONS, Mode, mode
from shardwright.strategies.tensor_parallel.place import place
from shardwright.strategies.tensor_parallel.roles import State
from shardwright.strategies.tensor_parallel.traffic import traffic

STREAM: Mapping[str, State] = {"row": "T", "col": "F"}
"""How activations lie along each axis between layers: rows or features cut."""


@dataclass(frozen=True)
class Tensor2D:
    """Samples over rows, features over columns; the roles that send least."""

    name: ClassVar[str] = "tensor_2d"
    axis: ClassVar[str] = "tp"
    phase: ClassVar[Literal["operators", "stages", "state"]] = "operators"
    default: ClassVar[bool] = False
    options: ClassVar[Mapping[str, StrategyOption]] = {
        "2d": StrategyOption(
            "a grid of rows and columns, tp2x3/2d; 2d:summa pins the classic roles, and gathers again",
            pins=PINS["2d"],
        ),
        **OPTIONS,
    }
    source: ClassVar[str] = "Xu et al. 2021, arXiv:2104.05343"

    def mode(self, plan: Plan) -> Mode:
        """Rows and columns, weights cut over both."""
        return mode(self.name, plan, STREAM)

    def place(self, job: Job, plan: Plan) -> Plan:
        """Cuts every layer that the grid can. Raises LayoutError when none can be."""
        return place(job, plan, self.mode(plan))

    def apply(self, job: Job, axes: Mapping[str, Axis], plan: Plan) -> Applied:
        """Gives each module the forward of its roles."""
        return apply(job, axes, plan, self.mode(plan))

    def traffic(self, plan: Plan, batch: StepCalls, coord: Coord) -> tuple[Traffic, ...]:
        """The calls of one step: each microbatch's forward and backward, then shared gradients."""
        return traffic(plan, batch, coord, self.mode(plan))


STRATEGY = Tensor2D()
