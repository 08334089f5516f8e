"""Derives gradient sync from how parameters are used, and states the collective calls of a step.

A parameter's gradient is a partial sum along exactly those axes that, in one of its uses, cut a dim which the gradient
sums over (:func:`partial_axes`). A strategy that shards gradients over such an axis, as ZeRO does, sums over it itself.
``runtime/gradient_sync.py`` sums over the others, with one message for each param group and set of ranks
(:func:`sync_groups`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from shardwright.analysis.on_meta.module_calls import ModuleCalls
from shardwright.comm.recorder import Record, ring_factor
from shardwright.mesh import Coord
from shardwright.plan.batch_shard import BatchShard
from shardwright.plan.param_groups import ParamGroup
from shardwright.plan.plan import ParameterUse, Plan
from shardwright.sharding.box import Box

T = TypeVar("T")


def different(entries: Iterable[T]) -> list[T]:
    """Returns each object once, by identity: objects that are equal but not the same are all kept."""
    return list({id(entry): entry for entry in entries}.values())


# ---- gradient sync, derived


class GradientShare(NamedTuple):
    """A box (a range of each dim) of a parameter's gradient that gradient sync sums over several ranks.

    ``ranks`` are these ranks, and ``axes`` the mesh axes along which they differ.
    """

    box: Box
    axes: tuple[str, ...]
    ranks: tuple[int, ...]


def partial_axes(plan: Plan, name: str) -> tuple[str, ...]:
    """Returns the axes along which each rank has only a partial sum of a parameter's gradient, slowest axis first.

    Axes of one rank are left out.
    """
    partial = plan.partial_axes.get(name, frozenset())
    return tuple(axis for axis in plan.mesh.axes if axis in partial and plan.mesh[axis] > 1)


def summed_axes(plan: Plan, name: str) -> tuple[str, ...]:
    """Returns the axes over which gradient sync sums a parameter's gradient, slowest axis first.

    These are the axes along which the gradient is a partial sum and is not sharded in storage. A strategy that shards
    the stored gradient along an axis, as ZeRO does, sums over that axis itself.
    """
    cut = set(plan.state[name].gradient.axes) - set(plan.compute[name].axes)
    return tuple(axis for axis in partial_axes(plan, name) if axis not in cut)


def sync_axes(plan: Plan, name: str) -> tuple[str, ...]:
    """Returns the axes that span the ranks which sum a parameter's gradient together.

    These are the axes that :func:`summed_axes` returns. If one of them also cuts the parameter into parts that overlap,
    ranks with the same elements may store them in different shards of the gradient; the axes of these shards are then
    included.
    """
    axes = summed_axes(plan, name)
    if not set(axes) & set(plan.compute[name].axes):
        return axes
    sliced = set(plan.state[name].gradient.axes) - set(plan.compute[name].axes)
    return tuple(axis for axis in plan.mesh.axes if axis in {*axes, *sliced})


def whole_uses(plan: Plan) -> tuple[tuple[ParameterUse, tuple[str, ...]], ...]:
    """Returns uses of parameters that give every rank the whole gradient, where another use gives a partial sum.

    Each use comes with the axes along which this is so. Along these axes only index 0 contributes the use's gradient
    and other indices contribute zero, so that one sum is right for all uses of the parameter.
    """
    uses = []
    for use in plan.uses:
        missing = set(partial_axes(plan, use.parameter)) - use.partial_axes()
        if missing:
            uses.append((use, tuple(axis for axis in plan.mesh.axes if axis in missing)))
    return tuple(uses)


def gradient_shares(plan: Plan, name: str, coord: Coord) -> tuple[GradientShare, ...]:
    """Returns the boxes of a parameter's gradient that gradient sync sums on the rank at ``coord``, with their ranks.

    Ranks may hold overlapping parts of a parameter; each box is summed over the ranks that hold it. The tuple is empty
    if nothing is summed there.
    """
    axes = sync_axes(plan, name)
    if not axes or not plan.state[name].gradient.num_elements(coord):  # most stages hold none of most parameters
        return ()
    here = plan.mesh.rank(coord)
    shares = plan.state[name].gradient.holders(plan.mesh, axes, coord)
    return tuple(GradientShare(box, axes, ranks) for box, ranks in shares if here in ranks and len(ranks) > 1)


# ---- traffic


class Traffic(NamedTuple):
    """A number of equal collective calls or p2p messages in one step.

    ``kind`` names the call, such as "all_reduce" or "send". ``axis`` is the mesh axis, or several joined by "+".
    ``num_bytes`` is the payload of each call, the size of the whole tensor. ``num_ranks`` is the number of ranks that
    take part, and ``times`` the number of calls. ``layer`` is the module, or the param group, for which they are made;
    "" if that is not known.
    """

    kind: str
    axis: str
    num_bytes: int
    num_ranks: int
    times: int = 1
    layer: str = ""

    @property
    def sent_bytes(self) -> float:
        """The bytes that one rank sends in all these calls, if collectives use ring algorithms."""
        return float(ring_factor(self.kind, self.num_ranks) * self.num_bytes * self.times)


class BoundaryTensor(NamedTuple):
    """A tensor that one pipeline chunk sends another: its bytes on one rank, and whether its gradient is sent back.

    ``is_scattered`` says that each rank of ``Plan.scatter_axis`` sends only a part of it. ``element_bytes`` is the size
    of an element.
    """

    num_bytes: int
    needs_gradient: bool
    element_bytes: int = 1
    is_scattered: bool = False


Sent = Counter[Record]
"""How often each collective is called: calls of equal kind, axis, bytes, strategy and layer are counted together."""


class StepCalls(NamedTuple):
    """The module calls that one rank makes in a step, from which ``Strategy.traffic`` computes the messages.

    The tuples have one entry for each microbatch, the same object for microbatches with as many samples on every rank:
    :meth:`kinds` counts those. ``module_calls`` are the calls of this rank, and ``everywhere`` those of all stages.
    ``shards`` gives the rank's samples and tokens, and ``inputs`` its inputs on the meta device. ``crossing`` holds the
    tensors that pipeline chunks send each other, by the name of the value. ``sent`` counts the collectives of each
    chunk, by its number, if stages run the model's own forward on tensor-parallel shards; else it is empty.
    """

    module_calls: tuple[ModuleCalls, ...]
    shards: tuple[BatchShard, ...] = ()
    crossing: tuple[Mapping[str, tuple[BoundaryTensor, ...]], ...] = ()
    everywhere: tuple[ModuleCalls, ...] = ()
    inputs: tuple[Any, ...] = ()
    sent: tuple[Mapping[int, Sent], ...] = ()

    def kinds(self) -> dict[int, int]:
        """Returns, by the number of the first of equal microbatches, how many are equal to it and send as much.

        >>> one, other = {"up": ()}, {"up": ()}
        >>> StepCalls((one, one, other)).kinds()
        {0: 2, 2: 1}
        """
        first: dict[tuple[int, ...], int] = {}
        times: dict[int, int] = {}
        for number, entries in enumerate(zip(*filter(None, self), strict=True)):
            same = first.setdefault(tuple(map(id, entries)), number)
            times[same] = times.get(same, 0) + 1
        return times


def repeated(traffic: Iterable[Traffic], times: int) -> Iterator[Traffic]:
    """Yields collectives or messages, each as many times as in ``times`` equal microbatches."""
    return (message._replace(times=message.times * times) for message in traffic)


SyncGroup = tuple[tuple[str, ...], tuple[int, ...], str]
"""The key of one all-reduce of gradient sync: the axes along which its ranks differ, the ranks, and the dtype."""


def sum_dtype(plan: Plan, name: str) -> torch.dtype:
    """Returns the dtype in which a parameter's gradient is summed over ranks.

    It is the stored dtype if the gradient is sharded in storage or under the option ``fp32-sums``, and else the compute
    dtype.
    """
    sliced = plan.state[name].gradient != plan.compute[name]
    return plan.stored_dtypes[name] if sliced or name in plan.fp32_sums else plan.compute_dtypes[name]


def sync_groups(plan: Plan, group: ParamGroup, coord: Coord) -> dict[SyncGroup, dict[str, list[Box]]]:
    """Returns the all-reduces of one param group in gradient sync: for each, the boxes of each parameter's gradient.

    The rank is the one at ``coord``. The key of an all-reduce gives its axes, ranks and dtype, and all its ranks
    compute the same boxes.
    """
    groups: dict[SyncGroup, dict[str, list[Box]]] = {}
    for name in group.parameters:
        for share in gradient_shares(plan, name, coord):
            key = (share.axes, share.ranks, str(sum_dtype(plan, name)))
            groups.setdefault(key, {}).setdefault(name, []).append(share.box)
    return dict(sorted(groups.items()))


def is_shared_whole(plan: Plan, name: str, axes: Collection[str]) -> bool:
    """Returns whether ranks that differ only along ``axes`` hold the same part of a parameter.

    The answer comes from the plan and not from one rank's boxes, so that all ranks agree.
    """
    return not set(axes) & set(plan.compute[name].axes)


def sync_traffic(plan: Plan, coord: Coord, axis: str) -> tuple[Traffic, ...]:
    """Returns the gradient all-reduces of one step, on the rank at ``coord``, over ``axis`` alone or with faster axes.

    A param group has one for each set of ranks and dtype, or two if the ranks hold some parameters alike and
    overlapping parts of others.
    """
    sums: list[Traffic] = []
    for group in plan.param_groups:
        held = (name for name in group.parameters if plan.state[name].gradient.is_held_at(coord))
        here = tuple(name for name in held if sync_axes(plan, name)[:1] == (axis,))
        sums += group_sums(plan, group._replace(parameters=here), coord) if here else ()
    return tuple(sums)


def group_sums(plan: Plan, group: ParamGroup, coord: Coord) -> Iterator[Traffic]:
    """Yields the all-reduces of one param group in gradient sync, on the rank at ``coord``."""
    for (axes, ranks, _), shares in sync_groups(plan, group, coord).items():
        element_bytes = sum_dtype(plan, next(iter(shares))).itemsize
        sizes = {True: 0, False: 0}  # elements by whether all ranks of the message hold the same part
        for name, boxes in shares.items():
            if name not in plan.frozen:
                sizes[is_shared_whole(plan, name, axes)] += sum(box.size for box in boxes)
        for size in filter(None, sizes.values()):
            yield Traffic("all_reduce", "+".join(axes), size * element_bytes, len(ranks), layer=group.name)


def statistics_traffic(plan: Plan, batch: StepCalls, coord: Coord, axis: str) -> tuple[Traffic, ...]:
    """Returns the all-gathers and all-reduces by which BatchNorms are synchronized over ``axis`` in one step.

    In the forward, ranks all-gather their count and, for each channel, a mean and a sum of squares; in the backward,
    they all-reduce two sums for each channel. There are none if the axis has one rank.
    """
    collectives: list[Traffic] = []
    for number, times in batch.kinds().items():
        for path in plan.statistics:
            cuts = {dim_slice.dim: dim_slice.ranges for dim_slice in plan.slices(coord).get(path, ())}
            for call in batch.module_calls[number].get(path, ()):
                held = sum(b - a for a, b in cuts.get(1, ((0, call.x_shape[1]),)))
                num_bytes = max(call.element_bytes, 4)  # statistics are no narrower than float32
                size = plan.mesh[axis]
                sent = [Traffic("all_gather", axis, size * (2 * held + 1) * num_bytes, size, call.num_forwards, path)]
                if call.needs_gradient:
                    sent.append(Traffic("all_reduce", axis, 2 * held * num_bytes, size, layer=path))
                collectives += repeated(sent, times)
    return tuple(collective for collective in collectives if collective.num_ranks > 1)
