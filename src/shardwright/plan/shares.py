"""Computes the share of a model's parameter bytes and FLOPs that each factor of a layout divides over ranks.

A layout that cuts nothing also gives the right result, so a right result does not show that work is divided. Therefore
``show`` and ``verify`` print the shares beside the result, and ``parallelize`` warns of small ones. FLOPs are those of
the forward's matrix products, convolutions and attentions. Pipeline stages together hold everything, so for pipelines
the shares of the largest stages are given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from math import prod

from shardwright.analysis.chunks.chunks_by_parameter import chunks_by_parameter
from shardwright.axes import layout_axes
from shardwright.plan.event_stages import UNEVEN, EventStages
from shardwright.plan.plan import Plan
from shardwright.plan.stages import Stages

LEAST = 0.5
"""The share below which ``show`` and warnings name the modules that a factor leaves whole, if it should cut them."""

_NAMED = 3
_PICTURE_ROWS = 2


@dataclass(frozen=True)
class CutShare:
    """The share of a model's parameter bytes and of its FLOPs that one factor of a layout, such as ``tp2``, divides.

    ``share`` is the share of the parameter bytes that is cut over ranks, in computation or between steps. ``flops`` is
    the share of the FLOPs, the mean over the factor's axes; None if the model's operators are not known or the factor
    cuts picture rows. ``is_low`` says that the factor should cut parameters but cuts less than half of the bytes or the
    FLOPs. For a pipeline it says that one stage has so much that the others have less than half of what they would have
    if stages were even. ``large`` is text on the stages that have more than 1.25 times an even share of the parameters
    or of the work. ``whole`` lists the largest modules, at most three, whose parameters the factor does not cut: name,
    share of all bytes, and the reason. If ``flops`` is below half, ``whole_work`` lists the modules with the most FLOPs
    that every rank repeats, at most three: name, share of all FLOPs, and the reason. ``unrecorded`` is the error of the
    model's code if its forward could not be recorded, so that operators are not known; else "".
    """

    factor: str
    share: float
    is_low: bool
    whole: tuple[tuple[str, float, str], ...]
    flops: float | None = None
    whole_work: tuple[tuple[str, float, str], ...] = ()
    unrecorded: str = ""
    large: str = ""

    def __str__(self) -> str:
        work = "" if self.flops is None else f" and {_percent(self.flops)} of the FLOPs"
        text = f"{self.factor} cuts {_percent(self.share)} of the parameters{work}"
        text = f"{text}; {self.large}" if self.large else text
        if not self.is_low:
            return text
        left = self.whole if self.share < LEAST else ()
        named = [f"{path} ({_percent(size)}: {why})" for path, size, why in left]
        named += [
            f"{path} ({_percent(size)} of the FLOPs: {why})"
            for path, size, why in self.whole_work
            if all(path != other for other, _, _ in left)
        ]
        text = f"{text}; whole are {'; '.join(named)}" if named else text
        return f"{text}; the forward cannot be recorded: {self.unrecorded}" if self.unrecorded else text


def shares(plan: Plan, unrecorded: str = "") -> tuple[CutShare, ...]:
    """Returns the :class:`CutShare` of each factor of a plan's layout that cuts parameters, or that should cut them.

    ``unrecorded`` is what the model's code raised where its forward could not be recorded.

    >>> from torch import nn
    >>> from shardwright.layout import Layout
    >>> from shardwright.parallelize.planning import job_for, make_plan
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Softmax(-1), nn.Linear(4, 96))
    >>> for share in shares(make_plan(job_for(model, nn.Identity(), (line := Layout.parse("dp2 tp2"))), line)[0]):
    ...     print(share)
    tp2 cuts 12.9 % of the parameters; whole are 4 (86.3 %: Linear: every rank computes it whole)
    """
    cut_shares = tuple(_shares(plan))
    return tuple(replace(share, unrecorded=unrecorded) if share.is_low else share for share in cut_shares)


def _shares(plan: Plan) -> Iterator[CutShare]:
    sizes = {name: prod(layout.shape) * plan.stored_dtypes[name].itemsize for name, layout in plan.compute.items()}
    total = sum(sizes.values()) or 1
    for factor in plan.layout.factors:
        axes = {axis for axis in factor.mesh_axes if plan.mesh[axis] > 1}
        whole = [name for name in plan.compute if not axes.intersection(_axes_of(plan, name))]
        share = 1 - sum(sizes[name] for name in whole) / total
        spatial = any(plan.inputs.get(axis) == _PICTURE_ROWS for axis in axes)
        kind = layout_axes()[factor.axis].kind
        cuts = kind != "copies" and not spatial and bool(axes)
        if share or cuts:
            left = tuple((path, size / total, why) for path, size, why in _largest(plan, set(whole), sizes))
            everywhere = axes if kind == "stages" else axes.intersection(plan.inputs)
            flops, work = (None, ()) if spatial else _flops(plan, axes, everywhere)
            stages = stage_loads(plan) if kind == "stages" else ()
            least = min(share, 1.0 if flops is None else flops, *(load.left for load in stages))
            named = work if flops is not None and flops < LEAST else ()
            large = "; ".join(f"stage {number} has {load}" for number, load in enumerate(stages) if load.is_large)
            yield CutShare(str(factor), share, cuts and least < LEAST, left, flops, named, large=large)


@dataclass(frozen=True)
class StageLoad:
    """The share of a model's parameter bytes and of its forward's work that one of ``num_stages`` pipeline stages has.

    ``why`` names the module or call that makes the stage large, where it is known.
    """

    parameters: float
    work: float
    num_stages: int
    why: str = ""

    @property
    def is_large(self) -> bool:
        """Whether the stage has more than 1.25 times an even share of the parameters or of the work."""
        return max(self.parameters, self.work) * self.num_stages > UNEVEN

    @property
    def left(self) -> float:
        """What all stages but the largest hold, relative to even stages: 1 if all are even, 0 if the largest has all.

        If one of two stages has three quarters of the model, the other has 0.5 of its even share.
        """
        return (1 - max(self.parameters, self.work)) / (1 - 1 / self.num_stages) if self.num_stages > 1 else 1.0

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"{_percent(self.parameters)} of the parameters and {_percent(self.work)} of the work{why}"


def stage_loads(plan: Plan) -> tuple[StageLoad, ...]:
    """Returns the :class:`StageLoad` of each pipeline stage of a plan; () without a pipeline."""
    schedule, stages = plan.schedule, plan.stages
    if schedule is None or stages is None:
        return ()
    all_work = sum(cost.work for cost in stages.costs) or 1.0
    sizes = {name: p.nbytes for name, p in stages.model.named_parameters()}
    all_bytes = sum(sizes.values()) or 1
    homes, loads = chunks_by_parameter(stages.chunked), []
    for stage in range(schedule.num_stages):
        chunks, why = schedule.chunks_of(stage), list[str]()
        work = sum(stages.costs[chunk].work for chunk in chunks) / all_work
        # a parameter that chunks of several stages use is on each of them
        held = sum(sizes.get(name, 0) for name, at in homes.items() if not set(chunks).isdisjoint(at)) / all_bytes
        if isinstance(stages, EventStages):
            why += [stages.costliest(chunks)] if work * schedule.num_stages > UNEVEN else []
        if held * schedule.num_stages > UNEVEN:
            why += _largest_called(stages, chunks)
        loads.append(StageLoad(held, work, schedule.num_stages, ", ".join(why)))
    return tuple(loads)


def _largest_called(stages: Stages | EventStages, chunks: Collection[int]) -> list[str]:
    """Returns a list with a phrase on the largest of the modules that the pipeline ``chunks`` call; [] for none."""
    sizes = {name: p.nbytes for name, p in stages.model.named_parameters()}
    called = dict.fromkeys(module for chunk in chunks for module in stages.chunked.calls_of(chunk))
    held = {module: sum(sizes.get(name, 0) for name in stages.chunked.names.get(module, ())) for module in called}
    most = max(sorted(held), key=lambda module: held[module], default=None)
    return [] if most is None else [f"'{most}' holds {held[most] / (sum(sizes.values()) or 1):.0%} of the parameters"]


def _flops(
    plan: Plan, axes: Collection[str], everywhere: Collection[str]
) -> tuple[float | None, tuple[tuple[str, float, str], ...]]:
    """Returns the share of FLOPs that some axes divide, and the modules with the most FLOPs that none of them divides.

    The axes in ``everywhere`` divide all FLOPs, since they cut the samples or the layers. A share of None: unknown.
    """
    if set(axes) == set(everywhere):
        return 1.0, ()
    total = sum(operator.flops for operator in plan.work)
    if not total:
        return None, ()
    left: Counter[str] = Counter()
    cut = 0.0
    for operator in plan.work:
        dividing = operator.axes.intersection(axes) | set(everywhere)
        cut += operator.flops * len(dividing) / len(axes)
        if not dividing:
            left[operator.module] += operator.flops
    largest = tuple((path or "the model", n / total, _why(plan, path)) for path, n in left.most_common(_NAMED))
    return cut / total, largest


def _axes_of(plan: Plan, name: str) -> set[str]:
    """Returns the axes that cut a parameter in computation, or the stored parameter, gradient or optimizer state."""
    state = plan.state[name]
    layouts = (plan.compute[name], state.parameter, state.gradient, state.optimizer)
    return {axis for layout in layouts for axis in layout.axes}


def _largest(plan: Plan, whole: set[str], sizes: dict[str, int]) -> list[tuple[str, int, str]]:
    """Returns the largest modules with all their parameters in ``whole``, their bytes, and why they are whole."""
    users: dict[str, str] = {}
    for use in plan.uses:
        users.setdefault(use.parameter, use.module)
    partly = {users.get(name, name) for name in plan.compute if name not in whole}
    whole_sizes: dict[str, int] = {}
    for path, size in ((users.get(name, name), sizes[name]) for name in plan.compute if name in whole):
        if path not in partly:  # the bias of a row-parallel layer is whole, the layer is not
            whole_sizes[path] = whole_sizes.get(path, 0) + size
    ordered = sorted(whole_sizes.items(), key=lambda pair: -pair[1])[:_NAMED]
    return [(path or "the model", size, _why(plan, path)) for path, size in ordered]


def _why(plan: Plan, path: str) -> str:
    role = plan.roles.get(path)
    return role.why if role is not None else "no strategy cuts it"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
