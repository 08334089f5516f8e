"""Groups parameters into flat parameters: those of a block (param group) with the same layout and dtype form one.

::

    'blocks.0', dp4           | qkv.weight    | proj.weight | up.weight    | down.weight | norm ... |
                              +---------------------------------------------------------------------+
                              | rank 0          | rank 1          | rank 2          | rank 3        |

Shards are balanced over the full sequence: their lengths differ by one element at most, and one all-gather unshards
all parameters of the sequence. Parameters that other axes (``tp``, ``pp``) shard differently have separate sequences:
in a common one, ranks with the same parameter would store different elements of it, and could not sum their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from shardwright.mesh import Coord
from shardwright.plan.plan import Plan, StateLayout
from shardwright.plan.traffic import partial_axes


class FlatGroup(NamedTuple):
    """The names of the parameters that form one flat parameter, in the order of concatenation.

    ``param_group`` is the name of the param group that they belong to. ``trained`` is False if all of them are frozen.
    """

    param_group: str
    parameters: tuple[str, ...]
    trained: bool

    def num_elements(self, plan: Plan, coord: Coord) -> int:
        """Returns the number of elements of the unsharded flat parameter on the rank at ``coord``."""
        return sum(plan.compute[name].num_elements(coord) for name in self.parameters)


def flat_groups(plan: Plan, *, frozen: bool, at: Coord | None = None) -> tuple[FlatGroup, ...]:
    """Returns the groups of parameters that are each concatenated into one flat parameter; frozen ones only if asked.

    With ``frozen`` (stage 3) frozen parameters are sharded too, in flat parameters of their own. With ``at`` only the
    groups on the pipeline stages at that coordinate are returned.
    """
    names_by_key: dict[tuple[object, ...], list[str]] = {}
    for group in plan.param_groups:
        for name in group.parameters:
            layout, trained = plan.compute[name], name not in plan.frozen
            if (trained or frozen) and (at is None or layout.is_held_at(at)):
                # One key, one sequence: its parameters are on the same stages, sharded and summed over the same axes,
                # and one collective has one dtype.
                held = layout.held_along("pp") or range(plan.mesh["pp"])
                stages = tuple(stage for stage in held if layout.pieces({"pp": stage}))
                sums, dtypes = partial_axes(plan, name), (plan.compute_dtypes[name], plan.stored_dtypes[name])
                names_by_key.setdefault((group.name, trained, layout.axes, stages, sums, dtypes), []).append(name)
    return tuple(FlatGroup(str(key[0]), tuple(names), bool(key[1])) for key, names in names_by_key.items())


def chunks_using(plan: Plan, param_group: str, coord: Coord) -> tuple[int, ...]:
    """Returns the pipeline chunks at ``coord`` that use a param group; (0,), the whole model, without a pipeline."""
    if plan.stages is None or plan.schedule is None:
        return (0,)
    names = {name for group in plan.param_groups if group.name == param_group for name in group.parameters}
    chunks = plan.schedule.chunks_of(coord["pp"])
    return tuple(chunk for chunk in chunks if names.intersection(plan.stages.chunked.weights_of(chunk)))


def shard_state(
    plan: Plan, axis: str, groups: Sequence[FlatGroup], *, reshards: bool, offload: str | None = None
) -> Plan:
    """Returns the plan with the groups' parameters, gradients and optimizer state sharded over ``axis``.

    With ``reshards`` (stage 3) parameters are unsharded only while they are used. ``offload`` is where shards and
    optimizer state are stored, if not on the rank's device.
    """
    state = dict(plan.state)
    for group in groups:
        layouts = tuple(plan.compute[name] for name in group.parameters)
        for index, name in enumerate(group.parameters):
            flat = plan.compute[name].flat(axis, plan.mesh[axis], layouts, index)
            state[name] = StateLayout(flat, flat, flat)
    names = [name for group in groups for name in group.parameters]
    on_use = plan.unsharded_on_use.union(names if reshards else ())
    offloaded = {**plan.offloaded, **(dict.fromkeys(names, offload) if offload is not None else {})}
    return replace(plan, state=state, unsharded_on_use=on_use, offloaded=offloaded)
