"""Tensor parallel in three dimensions: a cube, every operand cut over all three axes.

::

            col                    X: samples over depth and row, features over col
           +---+---+               W: cut over all three, no element held twice
      row /   /   /|               Y: as X; from layer to layer the axes change their roles
         +---+---+ +
         |   |   |/| depth
         +---+---+ +
         |   |   |/
         +---+---+

Shapes: between blocks an activation (B, ..., H) is (B / (depth rows), ..., H / columns) on a rank; a weight has
    1 / (depth rows columns) of its elements. A side of 1 is left out.
    With ``seq``, or where a batch is known to be too small, it is (B, T / (depth rows), H / columns) instead: tokens
    of every sample are cut, and attention gathers keys and values over the axes that still cut its tokens.
Traffic: roles are chosen for each block so that least is sent; t, h and k on one axis each, k and h changing places
    from layer to layer, the classic choice, sends 2 (l-1)/l^3 (X + W + Y) elements for each layer of a cube.
Source: Agarwal et al. 1995 (3D multiplication); Bian et al. 2021, arXiv:2105.14450.
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
class Tensor3D:
    """A cube: samples over two axes, features over the third, weights over all."""

    name: ClassVar[str] = "tensor_3d"
    axis: ClassVar[str] = "tp"
    phase: ClassVar[Literal["operators", "stages", "state"]] = "operators"
    default: ClassVar[bool] = False
    options: ClassVar[Mapping[str, StrategyOption]] = {
        "3d": StrategyOption(
            "a cube, tp2x2x2/3d, tp8/3d; 3d:classic pins",
            pins=PINS["3d"],
        ),
        **OPTIONS,
    }
    source: ClassVar[str] = "Bian et al. 2021, arXiv:2105.14450"

    def mode(self, plan: Plan) -> Mode:
        """A cube, weights cut over all of it."""
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


STRATEGY = Tensor3D()
