"""Which parameters form one flat sequence: those of a unit that lie alike, so that slices of all are cut alike.

::

    unit 'blocks.0', dp4      | qkv.weight    | proj.weight | up.weight    | down.weight | norm ... |
                              +---------------------------------------------------------------------+
                              | rank 0          | rank 1          | rank 2          | rank 3        |

Slices are balanced over the whole sequence, so that they differ by one element at most, and gathering them is one
message that lands where the parameters are. Parameters that other axes cut differently have sequences of their own:
there ranks beside each other would hold slices of different elements, which could not be summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from shardwright.mesh import Coord
from shardwright.plan.plan import Plan, StateLayout
from shardwright.plan.traffic import partial_axes
from shardwright.sharding.tensor_layout import TensorLayout


class Group(NamedTuple):
    """Parameters that form one flat sequence, in order."""

    unit: str
    parameters: tuple[str, ...]
    trained: bool

    def num_elements(self, plan: Plan, coord: Coord) -> int:
        """How long the sequence is at ``coord``."""
        return sum(plan.compute[name].num_elements(coord) for name in self.parameters)


def groups(plan: Plan, *, frozen: bool) -> tuple[Group, ...]:
    """The sequences of every unit; those of frozen parameters only where these are wanted.

    >>> from torch import nn
    >>> from shardwright.layout import Layout
    >>> from shardwright.plan.plan import Job
    >>> model = nn.Linear(2, 2)
    >>> _ = model.bias.requires_grad_(False)
    >>> for group in groups(Plan.of(Job(model, nn.Identity()), Layout.parse("dp2")), frozen=True):
    ...     print(group)
    Group(unit='', parameters=('weight',), trained=True)
    Group(unit='', parameters=('bias',), trained=False)
    """
    found: dict[tuple[object, ...], list[str]] = {}
    for unit in plan.units:
        for name in unit.parameters:
            lies, trained = plan.compute[name], name not in plan.frozen
            if trained or frozen:
                held = tuple(stage for stage in range(plan.mesh["pp"]) if lies.pieces(_first(lies, stage)))
                key = (
                    unit.name,
                    trained,
                    lies.axes,
                    held,
                    partial_axes(plan, name),
                    plan.dtypes[name],
                    plan.masters[name],
                )
                found.setdefault(key, []).append(name)
    return tuple(Group(str(key[0]), tuple(names), bool(key[1])) for key, names in found.items())


def _first(lies: TensorLayout, stage: int) -> Coord:
    return {"pp": stage} if "pp" in lies.axes else {}


def chunks_with(plan: Plan, unit: str, coord: Coord) -> tuple[int, ...]:
    """Which chunks at ``coord`` use some of a unit; where nothing is cut into chunks, the one that there is."""
    if plan.stages is None or plan.schedule is None:
        return (0,)
    names = {name for each in plan.units if each.name == unit for name in each.parameters}
    mine = plan.schedule.chunks_of(coord["pp"])
    return tuple(chunk for chunk in mine if names.intersection(plan.stages.chunked.weights_of(chunk)))


def rest_in_slices(plan: Plan, axis: str, chosen: Sequence[Group], *, drops: bool, away: str | None = None) -> Plan:
    """The plan with each group's parameters, gradients and optimizer state at rest in slices over ``axis``.

    ``drops`` says that the parameters are whole only while something computes with them. ``away`` is where slices
    and optimizer state rest, if that is not the rank's device.
    """
    rest = dict(plan.rest)
    for group in chosen:
        beside = tuple(plan.compute[name] for name in group.parameters)
        for place, name in enumerate(group.parameters):
            flat = plan.compute[name].flat(axis, plan.mesh[axis], beside, place)
            rest[name] = StateLayout(flat, flat, flat)
    names = [name for group in chosen for name in group.parameters]
    dropped = plan.dropped.union(names if drops else ())
    offloaded = {**plan.offloaded, **(dict.fromkeys(names, away) if away is not None else {})}
    return replace(plan, rest=rest, dropped=dropped, offloaded=offloaded)
