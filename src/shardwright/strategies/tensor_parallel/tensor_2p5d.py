"""Tensor parallel in two and a half dimensions: a depth of 2D grids, weights copied over it.

::

      depth 0: samples of the first half     depth 1: samples of the second half
      +-----+-----+                          +-----+-----+
      | 0,0 | 0,1 |   <- same weights ->     | 0,0 | 0,1 |     weight gradients are summed over depth
      +-----+-----+                          +-----+-----+
      | 1,0 | 1,1 |                          | 1,0 | 1,1 |
      +-----+-----+                          +-----+-----+

Shapes: between layers an activation (B, ..., H) is (B / (depth rows), ..., H / columns) on a rank; a weight has
    1 / (R C) of its elements. Depth 1 is 2D.
    With ``seq``, or where a batch is known to be too small, it is (B, T / (depth rows), H / columns) instead: tokens
    of every sample are cut, and attention gathers keys and values over the axes that still cut its tokens.
Traffic: of each 2D grid on its share of the samples, and 2 (D-1)/D W / (R C) elements for each weight's gradient.
Source: Solomonik, Demmel 2011 (2.5D); Wang et al. 2021, arXiv:2105.14500 (Tesseract).
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

STREAM: Mapping[str, State] = {"depth": "T", "row": "T", "col": "F"}
"""How activations lie along each axis between layers: rows or features cut."""


@dataclass(frozen=True)
class Tensor2p5D:
    """A depth of 2D grids: depth cuts samples and copies weights."""

    name: ClassVar[str] = "tensor_2p5d"
    axis: ClassVar[str] = "tp"
    phase: ClassVar[Literal["operators", "stages", "state"]] = "operators"
    default: ClassVar[bool] = False
    options: ClassVar[Mapping[str, StrategyOption]] = {
        "2.5d": StrategyOption(
            "depth x rows x columns: tp2x2x2/2.5d, tp8/2.5d:d2; 2.5d:summa pins, and gathers again",
            ("2.5d:d2", "2.5d:d3", "2.5d:d1"),
            pins=PINS["2.5d"],
        ),
        **OPTIONS,
    }
    source: ClassVar[str] = "Wang et al. 2021, arXiv:2105.14500"

    def mode(self, plan: Plan) -> Mode:
        """Depth, rows and columns; weights cut over the last two."""
        return mode(self.name, plan, STREAM, copied=("depth",))

    def place(self, job: Job, plan: Plan) -> Plan:
        """Cuts every layer that the grid can. Raises LayoutError when none can be."""
        return place(job, plan, self.mode(plan))

    def apply(self, job: Job, axes: Mapping[str, Axis], plan: Plan) -> Applied:
        """Gives each module the forward of its roles."""
        return apply(job, axes, plan, self.mode(plan))

    def traffic(self, plan: Plan, batch: StepCalls, coord: Coord) -> tuple[Traffic, ...]:
        """The calls of one step: each microbatch's forward and backward, then shared gradients."""
        return traffic(plan, batch, coord, self.mode(plan))


STRATEGY = Tensor2p5D()
