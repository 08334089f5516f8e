"""Runs a model whose feature maps are sharded by rows over ranks, and states the collectives that this needs.

Every rank holds all weights, and some rows (dim 2) of each map that :mod:`shardwright.strategies.spatial.maps` decides
to shard. Where a weight is used on sharded maps, each rank's gradient is one term of a sum; where maps are whole, all
ranks compute the same.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwright.analysis.on_meta.module_calls import ModuleCall, given_to
from shardwright.analysis.traced.batch_norms import batch_norms
from shardwright.comm.autograd import once, sum_gradient, whole_to_cut
from shardwright.comm.axis import Axis
from shardwright.errors import LayoutError, PlanError
from shardwright.forward_stack import Forward, Rung, record, wrap
from shardwright.keyed_dropout import drop_out_slice
from shardwright.mesh import Coord
from shardwright.operators.batch_norm import share_statistics, sharing
from shardwright.operators.halo import whole_rows
from shardwright.operators.picture_rows import balanced_rows, reading_of, row_ranges
from shardwright.plan.plan import ForwardFrame, Job, Plan
from shardwright.plan.traffic import StepCalls, Traffic, repeated, statistics_traffic, sync_traffic
from shardwright.rng import DimSlice
from shardwright.strategies.spatial.map_operators import compute
from shardwright.strategies.spatial.maps import CutMaps, FeatureMaps, MapStep

MODEL = ""  # the path of the plan's note that holds the maps of the model

SPATIAL = "spatial"  # the name of the strategy, recorded for each forward that it wraps


def maps_of(plan: Plan) -> FeatureMaps | None:
    """Returns the plan's :class:`FeatureMaps`, which say what feature maps are sharded by rows; None if none are."""
    maps: FeatureMaps | None = plan.notes.get(MODEL)
    return maps


# ---- forwards


def apply_maps(job: Job, axis: Axis, maps: FeatureMaps, staged: bool = False) -> ForwardFrame:
    """Makes a model's modules run on row-sharded feature maps; hooks shard its input and all-gather its output.

    With ``staged`` there are no such hooks, since pipeline stages never call the model's forward: they call the
    returned object, which shards and all-gathers in the same way.
    """
    frame = _CutForward(job.model, axis, maps)
    share_statistics((norm for _, norm in batch_norms(job.model)), (), by=SPATIAL)
    settled = maps.settled()
    for path, numbers in maps.calls.items():
        if any(settled.touches(number) for number in numbers):
            frame.change(path, job.model.get_submodule(path), any(number in settled.work for number in numbers))
    if not staged:
        job.model.register_forward_pre_hook(frame.before, with_kwargs=True)
        job.model.register_forward_hook(frame.after, always_call=True)
        record(job.model, Rung.FRAME, "cuts the picture, gathers the output", by=SPATIAL)
    return frame


class _CutForward:
    """The state of one rank's forward: how the current picture is sharded, and how often each module was called."""

    def __init__(self, model: nn.Module, axis: Axis, maps: FeatureMaps) -> None:
        self.axis, self.maps = axis, maps
        self.signature = inspect.signature(model.forward)
        self.settled: CutMaps | None = None
        self.num_calls: Counter[str] = Counter()

    def sizes(self, number: int) -> tuple[int, ...]:
        """Returns the number of rows of a value on each rank."""
        assert self.settled is not None, "a forward is under way"
        rows = self.settled.rows[number]
        assert rows is not None, "the rows of a cut value are known"
        return balanced_rows(rows, self.axis.size)

    @contextmanager
    def within(self, inputs: Any) -> Iterator[Mapping[str, Any]]:
        """A context around a forward that pipeline stages run in parts; yields the arguments, the picture sharded."""
        args, named = given_to(inputs)
        try:
            yield self.begin(self.signature.bind(*args, **named)).arguments
        finally:
            self.settled = None

    def calls(self, used: Collection[str], read: Collection[str]) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Returns a context that does nothing and yields no weights: all are whole."""
        return nullcontext({})

    def repeat(self, path: str, times: int, total: int) -> None:
        """Counts the calls of a module, and of those inside it, that other stages make: ``times`` of ``total``."""
        for name, numbers in self.maps.calls.items():
            if f"{name}.".startswith(f"{path}."):
                self.num_calls[name] = len(numbers) // total * times

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that restores the present decision which maps are cut, and the call counts."""
        settled, num_calls = self.settled, Counter(self.num_calls)

        def restore() -> None:
            self.settled, self.num_calls = settled, Counter(num_calls)

        return restore

    def before(self, model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Slices the model's input to this rank's rows; the model's forward pre-hook."""
        bound = self.begin(self.signature.bind(*args, **named))
        return bound.args, bound.kwargs

    def after(self, model: nn.Module, args: Any, output: Any) -> Any:
        """All-gathers the model's output; its forward hook. After a failed forward it only resets the state."""
        try:
            return output if self.settled is None else self.give(output)
        finally:
            self.settled = None

    def begin(self, bound: inspect.BoundArguments) -> inspect.BoundArguments:
        """Chooses each rank's rows of every feature map for this picture's size, and slices the input to them.

        Raises PlanError for other arguments than the traced ones, LayoutError for a picture of too few rows.
        """
        x = bound.arguments.get(self.maps.inputs[0])
        if tuple(bound.arguments) != self.maps.inputs or not isinstance(x, Tensor) or x.dim() < 3:
            spelled = {
                n: list(v.shape) if isinstance(v, Tensor) else type(v).__name__ for n, v in bound.arguments.items()
            }
            raise PlanError(
                "the model was called with other arguments than its code was traced with",
                given=", ".join(f"{name} {value}" for name, value in spelled.items()) or "nothing",
                allowed=f"{', '.join(self.maps.inputs)}; the first of shape (samples, channels, rows, ...)",
                fix="give these and no others: an argument with a default is left out",
            )
        check_rows(self.maps, x)
        self.settled, self.num_calls = self.maps.settled(x.shape[2]), Counter()
        if 0 in self.settled.cut:
            start, stop = row_ranges(self.sizes(0))[self.axis.index]
            mine = whole_to_cut(x, self.axis, 2, self.sizes(0)) if x.requires_grad else x[:, :, start:stop]
            bound.arguments[self.maps.inputs[0]] = mine
        return bound

    def give(self, output: Any) -> Any:
        """Returns the model's output with its row-sharded tensors all-gathered."""
        assert self.settled is not None, "a forward is under way"
        cut = {p: v for p, v in (self.maps.steps[-1].arguments or {}).items() if v in self.settled.cut}
        if cut:
            leaves, spec = tree_flatten(output)
            for place, value in cut.items():
                leaves[cast(int, place)] = whole_rows(leaves[cast(int, place)], self.axis, self.sizes(value))
            output = tree_unflatten(leaves, spec)
        return output

    def change(self, path: str, module: Any, may_work: bool) -> None:
        """Wraps a module's forward; with ``may_work`` it may run on sharded rows, and its gradients are summed then."""
        kind = self.maps.steps[self.maps.calls[path][0]].kind

        def around(whole: Forward) -> Forward:
            cut = sharing(module, whole, [self.axis]) if kind == "batch norm" else whole
            return partial(self.call, path, module, whole, cut, may_work)

        wrap(module, Rung.OPERATOR, f"{kind}, on this rank's rows", by=SPATIAL, around=around)

    def call(
        self, path: str, module: Any, whole: Callable[..., Any], cut: Callable[..., Any], may_work: bool,
        *args: Any, **named: Any,
    ) -> Any:  # fmt: skip
        """Runs one call of a module on this rank's rows, or on whole maps, where only rank 0 contributes gradients."""
        if self.settled is None:
            return whole(*args, **named)  # called outside the model's forward
        numbers = self.maps.calls[path]
        number = numbers[self.num_calls[path] % len(numbers)]
        self.num_calls[path] += 1
        step = self.maps.steps[number]
        if number in self.settled.work:
            y = self.work(step, number, module, cut, *args, **named)
        else:
            if number in self.settled.take:
                args, named = self.taken(step, args, named)
            with _contributing_nothing(module, may_work and self.axis.index > 0):
                y = whole(*args, **named)
        if number in self.settled.give:
            y = whole_rows(y, self.axis, self.sizes(number))
        return sum_gradient(y, self.axis) if number in self.settled.share else y

    def taken(
        self, step: MapStep, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with row-sharded maps all-gathered."""
        arguments: dict[int | str, Any] = dict([*enumerate(args), *named.items()])
        for place, value in (step.arguments or {}).items():
            if self.settled is not None and value in self.settled.cut:
                arguments[place] = whole_rows(arguments[place], self.axis, self.sizes(value))
        return tuple(arguments[place] for place in range(len(args))), {name: arguments[name] for name in named}

    def work(self, step: MapStep, number: int, module: Any, cut: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Runs the module on this rank's rows of its input, with the halo exchange or reduction that it needs."""
        (x,) = (*args, *named.values())
        sizes = self.sizes(step.takes[0])
        if step.kind == "dropout":
            return drop_out_slice(module, x, DimSlice(2, sum(sizes), (row_ranges(sizes)[self.axis.index],)))
        if step.kind in ("alone", "batch norm"):
            return cut(x)
        return compute(module, step, x, self.axis, sizes, cut)


class _NoGradient(Function):
    """An autograd function: the identity in the forward; no gradient in the backward: another rank contributes it."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    @once
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


@contextmanager
def _contributing_nothing(module: nn.Module, silent: bool) -> Iterator[None]:
    """A context in which the module's parameters get no gradients if ``silent``: another rank contributes them."""
    kept: dict[str, Any] = dict(module._parameters)
    if silent:
        for name, parameter in kept.items():
            if parameter is not None and parameter.requires_grad and torch.is_grad_enabled():
                module._parameters[name] = _NoGradient.apply(parameter)
    try:
        yield
    finally:
        module._parameters.update(kept)


def check_rows(maps: FeatureMaps, x: Tensor) -> None:
    """Raises LayoutError if the picture ``x`` has fewer rows than the axis has ranks."""
    if x.shape[2] < maps.parts:
        raise LayoutError(
            "the picture has fewer rows than axis 'tp' has ranks",
            given=f"'{maps.inputs[0]}' of shape {list(x.shape)}, tp={maps.parts}",
            allowed=f"tp from 1 to {x.shape[2]}",
            fix=f"write tp{x.shape[2]}/spatial, and move the other ranks to 'dp'",
        )


# ---- traffic


def price_maps(plan: Plan, batch: StepCalls, coord: Coord, maps: FeatureMaps) -> Iterator[Traffic]:
    """Yields one step's collectives and messages of the rank at ``coord``: each microbatch's, then gradient sync's."""
    for number, times in batch.kinds().items():
        yield from repeated(_MapPricing(plan, batch.everywhere[number], coord, maps).everything(), times)
    yield from sync_traffic(plan, coord, "tp")


class _MapPricing:
    """The collectives of one microbatch; shapes come from the module calls on all stages, traffic from this stage's."""

    def __init__(
        self, plan: Plan, module_calls: Mapping[str, tuple[ModuleCall, ...]], coord: Coord, maps: FeatureMaps
    ) -> None:
        self.plan, self.coord, self.maps = plan, coord, maps
        self.module_calls: dict[int, ModuleCall] = {
            number: module_calls[path][call]
            for path, numbers in maps.calls.items()
            for call, number in enumerate(numbers)
            if call < len(module_calls.get(path, ()))
        }
        first = next(n for n in sorted(maps.settled().work) if n in self.module_calls)  # before it come functions alone
        self.shapes: dict[int, tuple[int, ...]] = {0: self.module_calls[first].x_shape}
        self.settled = maps.settled(self.module_calls[first].x_shape[2])
        self.element_bytes = self.module_calls[first].element_bytes
        self.times = self._times()
        for number, step in enumerate(maps.steps):
            if number in self.module_calls:
                self.shapes[number] = self.module_calls[number].y_shape
            elif number in self.settled.cut and step.takes:  # a function of cut values
                self.shapes[number] = self._shape(step)

    def _times(self) -> dict[int, int]:
        """Returns how many times this rank runs each step of the maps: its module calls, and the output."""
        stages, schedule, steps = self.plan.stages, self.plan.schedule, self.maps.steps
        if stages is None or schedule is None:
            return dict.fromkeys(range(len(steps)), 1)
        chunks = schedule.chunks_of(self.coord["pp"])
        times = {len(steps) - 1: int(schedule.num_chunks - 1 in chunks)}
        for path, numbers in self.maps.calls.items():
            times.update(zip(numbers, stages.chunked.times(path, len(numbers), chunks), strict=True))
        return times

    def _shape(self, step: MapStep) -> tuple[int, ...]:
        shapes = [self.shapes[value] for value in step.takes if value in self.shapes]
        if step.joins:
            return shapes[0][0], sum(shape[1] for shape in shapes), *shapes[0][2:]
        return tuple(torch.broadcast_shapes(*shapes))

    def everything(self) -> Iterator[Traffic]:
        """Yields the collectives and messages of one microbatch's forward and backward."""
        for number, step in enumerate(self.maps.steps):
            for traffic in self._step(number, step) if self.times.get(number) else ():
                yield traffic._replace(times=traffic.times * self.times[number], layer=step.path)

    def _step(self, number: int, step: MapStep) -> Iterator[Traffic]:
        if number in self.settled.take:
            for value in (step.arguments or {}).values():
                if value in self.settled.cut:
                    yield self._whole("all_gather", value, self._num_forwards(number))
        if number in self.settled.work and step.call is not None:
            yield from self._work(number, step, self.module_calls[number])
        if number in self.settled.give:
            yield self._whole("all_gather", number, self._num_forwards(number))
        if number in self.settled.share:
            learns = any(use.module == step.path and use.parameter not in self.plan.frozen for use in self.plan.uses)
            if learns or self.module_calls[number].needs_gradient:
                yield self._whole("all_reduce", number)

    def _num_forwards(self, number: int) -> int:
        return self.module_calls[number].num_forwards if number in self.module_calls else 1

    def _whole(self, kind: str, value: int, times: int = 1) -> Traffic:
        return Traffic(kind, "tp", prod(self.shapes[value]) * self.element_bytes, self.maps.parts, times)

    def _work(self, number: int, step: MapStep, visit: ModuleCall) -> Iterator[Traffic]:
        if step.kind == "resize":
            yield from self._halo(step, visit)
        elif step.kind == "mean":
            yield self._whole("all_reduce", number, visit.num_forwards)
        elif step.kind == "batch norm" and step.path in self.plan.statistics:
            plan = replace(self.plan, statistics=(step.path,))
            yield from statistics_traffic(plan, StepCalls(({step.path: (visit,)},)), self.coord, "tp")
        elif step.kind == "group norm":
            num_groups = visit.x_shape[0] * (step.num_groups or visit.x_shape[1])
            num_bytes = max(visit.element_bytes, 4)  # statistics are no narrower than float32
            parts = self.maps.parts
            if num_groups:
                yield Traffic("all_gather", "tp", parts * (2 * num_groups + 1) * num_bytes, parts, visit.num_forwards)
            if num_groups and visit.needs_gradient:
                yield Traffic("all_reduce", "tp", 2 * num_groups * num_bytes, parts)

    def _halo(self, step: MapStep, visit: ModuleCall) -> Iterator[Traffic]:
        assert step.resize is not None, "it reads rows"
        me, parts, size = self.coord["tp"], self.maps.parts, visit.x_shape[2]
        reading = reading_of(balanced_rows(size, parts), step.resize)
        row_bytes = prod(visit.x_shape) // size * visit.element_bytes
        for other in range(parts):
            if other != me:
                gives, gets = reading.num_given(me, other) * row_bytes, reading.num_given(other, me) * row_bytes
                yield Traffic("send", "tp", gives, parts, visit.num_forwards)
                yield Traffic("receive", "tp", gets, parts, visit.num_forwards)
                if visit.needs_gradient:
                    yield Traffic("send", "tp", gets, parts)
                    yield Traffic("receive", "tp", gives, parts)
