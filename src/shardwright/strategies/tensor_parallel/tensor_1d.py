"""Tensor parallel in one dimension: pairs of layers, the first cut by columns, the second by rows.

::

    x --copied--> | W1 columns | --f features--> gelu --> | W2 rows | --terms of a sum--> all-reduce --> y
      rank 0      | [:, 0:2]   |                          | [0:2, :] |
      rank 1      | [:, 2:4]   |                          | [2:4, :] |

    tp4/sp: between the pairs each rank keeps its own samples; an all-gather before W1, a reduce-scatter after W2
    tp4/seq: the same with its own tokens of every sample, also where there are fewer samples than ranks

Shapes: activations between pairs are whole on every rank, or with ``sp`` the rank's own samples, with ``seq`` its own
    tokens; inside a pair features and heads are cut.
Traffic: for each pair one all-reduce of its output forward and one of its input's gradient backward: 2 (p-1)/p T h
    elements each; with ``sp`` an all-gather and a reduce-scatter in place of each, which is the same.
Source: Shoeybi et al. 2019, arXiv:1909.08053; sequence parallel: Korthikanti et al. 2022, arXiv:2205.05198.
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
from shardwright.strategies.tensor_parallel.mode import OPTIONS, Mode, mode
from shardwright.strategies.tensor_parallel.place import place
from shardwright.strategies.tensor_parallel.traffic import traffic


@dataclass(frozen=True)
class Tensor1D:
    """Roles h, then k, over one axis: activations between them copied, or with ``sp`` cut by samples.

    With ``seq`` they are cut by tokens.
    """

    name: ClassVar[str] = "tensor_1d"
    axis: ClassVar[str] = "tp"
    phase: ClassVar[Literal["operators", "stages", "state"]] = "operators"
    default: ClassVar[bool] = True
    options: ClassVar[Mapping[str, StrategyOption]] = {
        "sp": StrategyOption("activations between pairs of layers cut by samples", ("sp", "sp/regather")),
        **OPTIONS,
    }
    source: ClassVar[str] = "Shoeybi et al. 2019, arXiv:1909.08053"

    def mode(self, plan: Plan) -> Mode:
        """The grid of one axis."""
        factor = plan.layout.factor("tp")
        cut = factor is not None and (factor.option("sp") is not None or factor.option("seq") is not None)
        return mode(self.name, plan, {"tp": "T" if cut else "C"})

    def place(self, job: Job, plan: Plan) -> Plan:
        """Cuts pairs of layers, heads, tables and the head. Raises LayoutError when nothing can be cut."""
        return place(job, plan, self.mode(plan))

    def apply(self, job: Job, axes: Mapping[str, Axis], plan: Plan) -> Applied:
        """Gives each module the forward of its roles."""
        return apply(job, axes, plan, self.mode(plan))

    def traffic(self, plan: Plan, batch: StepCalls, coord: Coord) -> tuple[Traffic, ...]:
        """The calls of one step: each microbatch's forward and backward, then shared gradients."""
        return traffic(plan, batch, coord, self.mode(plan))


STRATEGY = Tensor1D()
