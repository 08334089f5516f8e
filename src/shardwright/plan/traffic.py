"""Gradient sync, derived from how parameters are used; and what a plan sends, in calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch

from shardwright.analysis.module_calls import ModuleCalls
from shardwright.comm.recorder import ring_factor
from shardwright.mesh import Coord
from shardwright.plan.batch_shard import BatchShard
from shardwright.plan.param_groups import ParamGroup
from shardwright.plan.plan import Plan, Use
from shardwright.sharding.box import Box

# ---- gradient sync, derived


class GradientShare(NamedTuple):
    """A box of a parameter whose gradient is the sum over ``ranks``, which differ along ``axes``."""

    box: Box
    axes: tuple[str, ...]
    ranks: tuple[int, ...]


def partial_axes(plan: Plan, name: str) -> tuple[str, ...]:
    """The axes over which some use of the parameter gives only a term of its gradient, slowest first."""
    partial = frozenset[str]().union(*(use.partial_axes() for use in plan.uses if use.parameter == name))
    return tuple(axis for axis in plan.mesh.axes if axis in partial and plan.mesh[axis] > 1)


def summed_axes(plan: Plan, name: str) -> tuple[str, ...]:
    """The axes over which the core sums a gradient: partial in compute, and not cut at rest.

    A strategy that cuts a gradient at rest along an axis, as ZeRO does, sums it there itself.
    """
    cut = set(plan.state[name].gradient.axes) - set(plan.compute[name].axes)
    return tuple(axis for axis in partial_axes(plan, name) if axis not in cut)


def sync_axes(plan: Plan, name: str) -> tuple[str, ...]:
    """The axes along which those lie who share a gradient that the core sums.

    Where ranks share a part of a parameter and it rests in slices, the ranks that hold the same of it may have other
    slices: they lie along the axis of the slices too.
    """
    axes = summed_axes(plan, name)
    if not set(axes) & set(plan.compute[name].axes):
        return axes
    sliced = set(plan.state[name].gradient.axes) - set(plan.compute[name].axes)
    return tuple(axis for axis in plan.mesh.axes if axis in {*axes, *sliced})


def whole_uses(plan: Plan) -> tuple[tuple[Use, tuple[str, ...]], ...]:
    """The uses that give a whole gradient over axes where another use of the same parameter gives a term.

    There one index contributes the whole use and the others nothing, so that one sum serves both.
    """
    found = []
    for use in plan.uses:
        missing = set(partial_axes(plan, use.parameter)) - use.partial_axes()
        if missing:
            found.append((use, tuple(axis for axis in plan.mesh.axes if axis in missing)))
    return tuple(found)


def gradient_shares(plan: Plan, name: str, coord: Coord) -> tuple[GradientShare, ...]:
    """What this rank sums with whom to make the gradient of one parameter whole, as it rests.

    Partial exactly where the contraction is cut; where ranks hold overlapping parts of the parameter, each box is
    summed among those that hold it.
    """
    axes = sync_axes(plan, name)
    if not axes:
        return ()
    here = plan.mesh.rank(coord)
    shares = plan.state[name].gradient.holders(plan.mesh, axes, coord)
    return tuple(GradientShare(box, axes, ranks) for box, ranks in shares if here in ranks and len(ranks) > 1)


# ---- traffic


class Traffic(NamedTuple):
    """Calls a strategy says it makes in one step: kind, axis, payload bytes of each, members, how many."""

    kind: str
    axis: str
    num_bytes: int
    num_ranks: int
    times: int = 1

    @property
    def sent_bytes(self) -> float:
        """What one rank sends, ranks forming a ring."""
        return float(ring_factor(self.kind, self.num_ranks) * self.num_bytes * self.times)


class BoundaryTensor(NamedTuple):
    """A tensor that one chunk hands to another, as this rank holds it."""

    num_bytes: int
    needs_gradient: bool


class StepCalls(NamedTuple):
    """What one rank's step sees: the calls of every module, for each microbatch; and what crosses between chunks.

    ``crossing`` holds, by a value's name in the model's code, its tensors. ``everywhere`` are the calls that all stages
    make, where ``module_calls`` are this rank's. ``shards`` are what each rank has of each microbatch.
    """

    module_calls: tuple[ModuleCalls, ...]
    gradient_bytes: int
    shards: tuple[BatchShard, ...] = ()
    crossing: tuple[Mapping[str, tuple[BoundaryTensor, ...]], ...] = ()
    everywhere: tuple[ModuleCalls, ...] = ()


SyncGroup = tuple[tuple[str, ...], tuple[int, ...], str]
"""Who sums what in one message: the axes along which they differ, their ranks, and the dtype."""


def sum_dtype(plan: Plan, name: str) -> torch.dtype:
    """What the core sums a gradient in: as it is computed, unless it rests in slices or wider sums are asked for."""
    sliced = plan.state[name].gradient != plan.compute[name]
    return plan.stored_dtypes[name] if sliced or name in plan.fp32_sums else plan.compute_dtypes[name]


def sync_groups(plan: Plan, unit: ParamGroup, coord: Coord) -> dict[SyncGroup, dict[str, list[Box]]]:
    """The unit's shares by who sums them: parameter -> boxes, the same on every member."""
    groups: dict[SyncGroup, dict[str, list[Box]]] = {}
    for name in unit.parameters:
        for share in gradient_shares(plan, name, coord):
            key = (share.axes, share.ranks, str(sum_dtype(plan, name)))
            groups.setdefault(key, {}).setdefault(name, []).append(share.box)
    return dict(sorted(groups.items()))


def is_shared_whole(plan: Plan, name: str, axes: Collection[str]) -> bool:
    """Whether ranks that differ only on ``axes`` hold the same part of a parameter, all of it shared.

    Asked of the plan and not of one rank's shares, so that all members give the same answer.
    """
    return not set(axes) & set(plan.compute[name].axes)


def sync_traffic(plan: Plan, batch: StepCalls, coord: Coord, axis: str) -> tuple[Traffic, ...]:
    """The all-reduces of gradients whose slowest axis is ``axis``.

    One for each unit and group of sharers; two where a unit has both parameters shared whole and shared in part.
    """
    found = []
    for unit in plan.param_groups:
        for (axes, ranks, _), shares in sync_groups(plan, unit, coord).items():
            if axes[0] != axis:
                continue
            element_bytes = sum_dtype(plan, next(iter(shares))).itemsize
            whole = part = 0
            for name, boxes in shares.items():
                size = sum(box.size for box in boxes) if name not in plan.frozen else 0
                if is_shared_whole(plan, name, axes):
                    whole += size
                else:
                    part += size
            found += [
                Traffic("all_reduce", "+".join(axes), size * element_bytes, len(ranks))
                for size in (whole, part)
                if size
            ]
    return tuple(found)


def statistics_traffic(plan: Plan, batch: StepCalls, coord: Coord, axis: str) -> tuple[Traffic, ...]:
    """What the BatchNorms send over ``axis``, which cuts their samples.

    Forward, each member's count, means and sums of squares; backward, two sums for each channel held.
    """
    found = []
    for module_calls in batch.module_calls:
        for path in plan.statistics:
            cuts = {each.dim: each.ranges for each in plan.slices(coord).get(path, ())}
            for visit in module_calls.get(path, ()):
                held = sum(b - a for a, b in cuts.get(1, ((0, visit.x_shape[1]),)))
                num_bytes = max(visit.element_bytes, 4)  # statistics are no narrower than float32
                size = plan.mesh[axis]
                found.append(Traffic("all_gather", axis, size * (2 * held + 1) * num_bytes, size, visit.num_forwards))
                if visit.needs_gradient:
                    found.append(Traffic("all_reduce", axis, 2 * held * num_bytes, size))
    return tuple(each for each in found if each.num_ranks > 1)
