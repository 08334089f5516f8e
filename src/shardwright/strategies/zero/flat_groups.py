"""Which parameters form one flat sequence: those of a unit that have the same layout, so that one cut serves all.

::

    unit 'blocks.0', dp4      | qkv.weight    | proj.weight | up.weight    | down.weight | norm ... |
                              +---------------------------------------------------------------------+
                              | rank 0          | rank 1          | rank 2          | rank 3        |

Shards are balanced over the whole sequence, so their lengths differ by one element at most, and one all-gather puts
them where the parameters are. Parameters that other axes (``tp``, ``pp``) split differently have sequences of their
own: in a common one, ranks that hold the same parameter would hold shards of different elements of it, and could not
sum them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from shardwright.mesh import Coord
from shardwright.plan.plan import Plan, StateLayout
from shardwright.plan.traffic import partial_axes
from shardwright.sharding.tensor_layout import TensorLayout


class FlatGroup(NamedTuple):
    """The parameters of one flat sequence, in order; ``trained`` is false where all of them are frozen."""

    unit: str
    parameters: tuple[str, ...]
    trained: bool

    def num_elements(self, plan: Plan, coord: Coord) -> int:
        """The length of the unsharded sequence on the rank at ``coord``."""
        return sum(plan.compute[name].num_elements(coord) for name in self.parameters)


def flat_groups(plan: Plan, *, frozen: bool) -> tuple[FlatGroup, ...]:
    """The flat sequences of every unit; those of frozen parameters only with ``frozen``.

    >>> from torch import nn
    >>> from shardwright.layout import Layout
    >>> from shardwright.plan.plan import Job
    >>> model = nn.Linear(2, 2)
    >>> _ = model.bias.requires_grad_(False)
    >>> for group in flat_groups(Plan.of(Job(model, nn.Identity()), Layout.parse("dp2")), frozen=True):
    ...     print(group)
    FlatGroup(unit='', parameters=('weight',), trained=True)
    FlatGroup(unit='', parameters=('bias',), trained=False)
    """
    found: dict[tuple[object, ...], list[str]] = {}
    for unit in plan.param_groups:
        for name in unit.parameters:
            lies, trained = plan.compute[name], name not in plan.frozen
            if trained or frozen:
                # One key, one sequence: its parameters are on the same stages, split and summed over the same axes,
                # and one collective has one dtype.
                stages = tuple(stage for stage in range(plan.mesh["pp"]) if lies.pieces(_first(lies, stage)))
                sums, dtypes = partial_axes(plan, name), (plan.compute_dtypes[name], plan.stored_dtypes[name])
                found.setdefault((unit.name, trained, lies.axes, stages, sums, dtypes), []).append(name)
    return tuple(FlatGroup(str(key[0]), tuple(names), bool(key[1])) for key, names in found.items())


def _first(lies: TensorLayout, stage: int) -> Coord:
    return {"pp": stage} if "pp" in lies.axes else {}


def chunks_using(plan: Plan, unit: str, coord: Coord) -> tuple[int, ...]:
    """The chunks at ``coord`` that use parameters of a unit; without a pipeline the model is one chunk, 0."""
    if plan.stages is None or plan.schedule is None:
        return (0,)
    names = {name for each in plan.param_groups if each.name == unit for name in each.parameters}
    mine = plan.schedule.chunks_of(coord["pp"])
    return tuple(chunk for chunk in mine if names.intersection(plan.stages.chunked.weights_of(chunk)))


def shard_state(
    plan: Plan, axis: str, groups: Sequence[FlatGroup], *, reshards: bool, offload: str | None = None
) -> Plan:
    """The plan with the groups' parameters, gradients and optimizer state sharded over ``axis``.

    ``reshards`` says that parameters are unsharded only while they are used (stage 3). ``offload`` is where shards and
    optimizer state are kept, if not on the rank's device.
    """
    rest = dict(plan.state)
    for group in groups:
        beside = tuple(plan.compute[name] for name in group.parameters)
        for index, name in enumerate(group.parameters):
            flat = plan.compute[name].flat(axis, plan.mesh[axis], beside, index)
            rest[name] = StateLayout(flat, flat, flat)
    names = [name for group in groups for name in group.parameters]
    dropped = plan.unsharded_on_use.union(names if reshards else ())
    offloaded = {**plan.offloaded, **(dict.fromkeys(names, offload) if offload is not None else {})}
    return replace(plan, state=rest, unsharded_on_use=dropped, offloaded=offloaded)
