"""A layout as plain data: what each rank holds and sends, each parameter's layout, each layer's role and why."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

from shardwright.analysis.costs import FLOPS_PER_S
from shardwright.analysis.structure import owners
from shardwright.axes import mesh_axes
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.mesh import Coord
from shardwright.parallelize.planning import StepTraffic, make_plan, microbatch_shards, num_rows
from shardwright.plan.batch_shard import microbatch_samples, num_tokens_of
from shardwright.plan.plan import INPUT, Job, LayerRole, Plan
from shardwright.plan.schedule import Action
from shardwright.plan.traffic import partial_axes
from shardwright.runtime.timeline import Span, Timeline
from shardwright.sharding.tensor_layout import TensorLayout
from shardwright.sharding.words import cut_words, numbers
from shardwright.strategies.pipeline.predict import predict
from shardwright.strategy import Strategy

Description = Mapping[str, Any]
"""What ``describe`` returns."""

DRAWN = 8
"""So many indices of an axis may be drawn one by one, and the last."""

MOST_RANKS = 4096
"""Up to so many ranks are described one by one; of more, those that are alike by the first of them."""

MOST_IN_ALL = 2**20
"""A layout for more ranks is not described."""

STATES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
"""The keys of a rank that add up to what its state takes; what it has offloaded is ``offloaded_bytes``."""

_ADAMW_MOMENTS = 2

"""The axes of data parallelism: no samples are sent over them, so what a rank's neighbours hold does not matter."""


def describe(job: Job, layout: Layout, *, inputs: Any = None) -> dict[str, Any]:
    """What each rank holds, what is done at each layer and why; with ``inputs``, also what each rank sends in a step.

    Pure: it plans on the meta device, and neither values nor ranks are needed. The optimizer is taken to be AdamW.
    Of more than ``MOST_RANKS`` ranks only some have an entry, which says under ``alike`` how many it stands for.

    Returns: plain dicts, lists, numbers and text, ready for JSON. ``inputs`` is a global batch, without targets.
    Raises: LayoutError: what cannot be laid out, or more than ``MOST_IN_ALL`` ranks.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    >>> found = describe(Job(model, nn.Identity()), Layout.parse("dp2 tp2"), inputs=torch.zeros(3, 4))
    >>> found["mesh"], [rank["samples"] for rank in found["ranks"]]
    ({'dp': 2, 'tp': 2}, [2, 2, 1, 1])
    >>> found["parameters"][0]
    {'name': '0.weight', 'shape': [8, 4], 'cut': 'dim 0 over tp', 'local_shapes': [[4, 4]], 'sync': ['dp'],
     'rest': {'parameter': 'dim 0 over tp', 'gradient': 'dim 0 over tp', 'optimizer': 'dim 0 over tp'}}
    >>> found["layers"][1]["role"], found["layers"][1]["why"]
    ('tp:k', '8 features to 4; sends 64.0 KiB for 4.1 k tokens')
    """
    if layout.num_ranks > MOST_IN_ALL:
        raise LayoutError(
            "the layout has too many ranks to describe",
            given=f"{layout}: {layout.num_ranks:,} ranks",
            allowed=f"up to {MOST_IN_ALL:,}",
            fix="describe the same layout with fewer data-parallel ranks",
        )
    plan, strategies = make_plan(job, layout)
    return {
        "layout": str(plan.layout),
        "world_size": plan.mesh.size,
        "mesh": dict(plan.mesh.sizes),
        "num_parameters": sum(parameter.numel() for parameter in job.model.parameters()),
        "strategies": [{"name": s.name, "axis": s.axis, "source": s.source} for s in strategies],
        "ranks": _ranks(job, plan, strategies, inputs),
        "parameters": [_parameter(plan, name) for name in plan.compute],
        "layers": _layers(job, plan),
        **_pipeline(plan, timed=bool(job.seconds)),
    }


def _pipeline(plan: Plan, *, timed: bool) -> dict[str, Any]:
    """How a pipeline cuts the model, its schedule, and the timeline that follows from what the chunks cost."""
    schedule, stages = plan.schedule, plan.stages
    if schedule is None or stages is None:
        return {}
    work = sum(cost.work for cost in stages.costs) or 1.0
    found = []
    for stage in range(schedule.num_stages):
        chunks = schedule.chunks_of(stage)
        costs = [stages.costs[chunk] for chunk in chunks]
        found.append(
            {
                "stage": stage,
                "chunks": [{"chunk": chunk, "calls": list(stages.chunked.calls_of(chunk))} for chunk in chunks],
                "share_of_time": sum(cost.work for cost in costs) / work,
                "parameter_bytes": sum(cost.parameter_bytes for cost in costs),
                "activation_bytes": sum(cost.activation_bytes for cost in costs),
            }
        )
    timeline = predict(schedule, stages.costs)
    return {
        "schedule": schedule.name,
        "bubble": timeline.bubble,
        "seconds_from": "timed layers" if timed else f"{FLOPS_PER_S / 1e9:.0f} GFLOP/s, a guess",
        "stages": found,
        "timeline": timeline_data(timeline),
    }


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """A timeline as JSON takes it."""
    return {
        "bubble": timeline.bubble,
        "makespan_s": timeline.makespan_s,
        "spans": [[[str(s.action), s.start_s, s.end_s] for s in stage] for stage in timeline.spans],
        "memory": [[list(each) for each in stage] for stage in timeline.memory],
    }


def timeline_of(description: Description) -> Timeline | None:
    """The predicted timeline of a described pipeline; None where there is none."""
    if "timeline" not in description:
        return None
    drawn = description["timeline"]
    spans = tuple(tuple(Span(_action(a), start, end) for a, start, end in stage) for stage in drawn["spans"])
    memory = tuple(tuple((at, num_bytes) for at, num_bytes in stage) for stage in drawn["memory"])
    return Timeline(f"{description['layout']}, predicted", spans, memory)


def _action(text: str) -> Action:
    chunk, kind, microbatch = re.split("([FBIW])", text)
    return Action(kind, int(microbatch), int(chunk))  # type: ignore[arg-type]


class _Held(NamedTuple):
    """What a rank holds; and the elements of each parameter, in compute and at rest of each of the three states."""

    entry: Mapping[str, int]
    counts: tuple[tuple[int, ...], ...]


def _held(plan: Plan, coord: Coord, sizes: Mapping[str, int]) -> _Held:
    def bytes_of(names: Iterable[str], counts: Iterable[int]) -> int:
        return sum(sizes[name] * count for name, count in zip(names, counts, strict=True))

    trained = [name for name in plan.compute if name not in plan.frozen]
    compute = tuple(lies.num_elements(coord) for lies in plan.compute.values())
    parameter = tuple(rest.parameter.num_elements(coord) for rest in plan.state.values())
    gradient = tuple(plan.state[name].gradient.num_elements(coord) for name in trained)
    optimizer = tuple(plan.state[name].optimizer.num_elements(coord) for name in trained)
    away = [name for name in plan.compute if name in plan.offloaded]
    here = [0 if name in plan.offloaded else count for name, count in zip(trained, optimizer, strict=True)]
    owned = (piece for rest in plan.state.values() for piece in rest.parameter.owned(coord, plan.mesh))
    entry = {
        "num_parameters": sum(parameter),
        "num_owned": sum(piece.whole.size for piece in owned),
        "parameter_bytes": sum(plan.parameter_bytes(name, coord) for name in plan.state),
        "gradient_bytes": bytes_of(trained, gradient),
        "optimizer_bytes": bytes_of(trained, here) * _ADAMW_MOMENTS,
    }
    if away:
        slices = bytes_of(away, (plan.state[name].parameter.num_elements(coord) for name in away))
        moments = bytes_of(trained, optimizer) * _ADAMW_MOMENTS - entry["optimizer_bytes"]
        entry["offloaded_bytes"] = slices + moments
    return _Held(entry, (compute, parameter, gradient, optimizer))


def _ranks(job: Job, plan: Plan, strategies: Sequence[Strategy], inputs: Any) -> list[dict[str, Any]]:
    sizes = {name: parameter.element_size() for name, parameter in job.model.named_parameters()}
    states = [lies for rest in plan.state.values() for lies in (rest.parameter, rest.gradient, rest.optimizer)]
    cut_axes = _axes(plan, [*plan.compute.values(), *states])
    slice_axes = _axes(plan, [rest.parameter for rest in plan.state.values()])
    held_at: dict[tuple[int, ...], _Held] = {}  # ranks with equal keys hold the same: thousands have few
    slices: dict[tuple[int, ...], int] = {}
    sent = None if inputs is None else _Sent(job, plan, strategies, inputs)
    ranks = []
    for coord, alike in _coords(plan, cut_axes, 0 if inputs is None else num_rows(inputs)):
        rank = plan.mesh.rank(coord)
        key = tuple(coord[a] if a in cut_axes else min(coord[a], 1) for a in plan.mesh.axes)
        if key not in held_at:
            held_at[key] = _held(plan, coord, sizes)
        letter = slices.setdefault(tuple(coord[a] for a in slice_axes), len(slices))
        entry: dict[str, Any] = {"rank": rank, "coord": coord, "slice": letter, **held_at[key].entry}
        entry |= {"alike": alike} if _is_large(plan) else {}
        ranks.append(entry if sent is None else entry | sent.of(coord, held_at[key]))
    return ranks


def _is_large(plan: Plan) -> bool:
    return plan.mesh.size > MOST_RANKS


def _coords(plan: Plan, cut_axes: Collection[str], num_samples: int) -> Iterator[tuple[Coord, int]]:
    """The coordinates to describe, in rank order, and how many ranks are like each."""
    sizes, row_axes = dict(plan.mesh.sizes), plan.row_axes
    starts: dict[str, list[int]] = {}
    counts = {num_samples}
    for axis, size in sizes.items():
        firsts = set(range(size))
        if _is_large(plan) and axis in mesh_axes("copies") and axis in row_axes and axis not in cut_axes:
            # where a share of the samples ends one smaller begins; the first ones and the last are there to be drawn
            firsts = {*range(min(size, DRAWN)), size - 1, *(count % size for count in counts)}
        if axis in row_axes:
            counts = {count // size + more for count in counts for more in {0, min(count % size, 1)}}
        starts[axis] = sorted(firsts)
    if prod(map(len, starts.values())) > MOST_RANKS:
        raise LayoutError(
            "the layout has too many ranks that differ from each other to describe",
            given=f"{plan.layout}: {plan.mesh.size:,} ranks",
            allowed=f"up to {MOST_RANKS:,} ranks that differ",
            fix="describe the same layout with fewer ranks that cut parameters",
        )
    runs = [[*zip(firsts, [*firsts[1:], sizes[axis]], strict=True)] for axis, firsts in starts.items()]
    for ends in product(*runs):
        yield dict(zip(sizes, (first for first, _ in ends), strict=True)), prod(end - first for first, end in ends)


def _axes(plan: Plan, every: Iterable[TensorLayout]) -> tuple[str, ...]:
    named = {axis for lies in every for axis in lies.axes}
    return tuple(axis for axis in plan.mesh.axes if axis in named)


class _Sent:
    """What each rank computes and sends in one step on a global batch."""

    def __init__(self, job: Job, plan: Plan, strategies: Sequence[Strategy], inputs: Any) -> None:
        self.plan, self.traffic = plan, StepTraffic(job, plan, strategies, inputs)
        self.num_samples = num_rows(inputs)
        self.num_tokens = num_tokens_of(inputs) if plan.token_axes else 0
        self.found: dict[object, dict[str, float]] = {}

    def of(self, coord: Coord, held: _Held) -> dict[str, Any]:
        """The samples of the rank at ``coord``, and the bytes by strategy; of cut sequences also the tokens of each.

        Ranks that differ only on axes that cut the samples send the same when they hold as much and compute as many,
        and so do those whose samples they gather.
        """
        samples = self.plan.batch_shard(coord).local_samples(self.num_samples)
        microbatches = microbatch_samples(samples, self.plan.layout.num_microbatches)
        apart = tuple(coord[axis] for axis in self.plan.mesh.axes if self.plan.inputs.get(axis) != 0)
        shards = microbatch_shards(self.plan, coord, self.num_samples, self.num_tokens)
        together = tuple(
            each.sizes((), axis)
            for each in shards
            for axis in sorted(self.plan.row_axes.difference(mesh_axes("copies")))
        )
        key = (apart, held.counts, tuple(map(len, microbatches)), together)
        if key not in self.found:
            said = self.traffic.at(coord)
            self.found[key] = {name: sum(t.sent_bytes for t in calls) for name, calls in said.items()}
        found = {"samples": len(samples), "sent_bytes": self.found[key]}
        return found | ({"tokens_of_each": len(shards[0].tokens(()))} if self.plan.token_axes else {})


def _parameter(plan: Plan, name: str) -> dict[str, Any]:
    lies, rest = plan.compute[name], plan.state[name]
    return {
        "name": name,
        "shape": list(lies.shape),
        "cut": cut_words(lies),
        "local_shapes": [list(shape) for shape in dict.fromkeys(map(lies.local_shape, plan.mesh.coords(lies.axes)))],
        "sync": [] if name in plan.frozen else list(partial_axes(plan, name)),
        "rest": {state: cut_words(getattr(rest, state)) for state in ("parameter", "gradient", "optimizer")},
    }


def _layers(job: Job, plan: Plan) -> list[dict[str, Any]]:
    """Every module that owns parameters or has a role, in the model's order; then what is done at the loss."""
    used: dict[str, list[str]] = {}
    for path, _, _, name in owners(job.model):
        used.setdefault(path, []).append(name)
    modules = dict(job.model.named_modules())
    kinds = {path: type(module).__name__ for path, module in modules.items()} | {INPUT: "input"}
    paths = [path for path in (INPUT, *modules) if path in used or path in plan.roles]
    plain = LayerRole("copied", "", "no strategy cuts it: every rank computes it whole")
    return [
        {
            "module": path,
            "kind": kinds.get(path, type(job.loss).__name__),
            "role": role.name,
            "strategy": role.strategy,
            "why": _of_its_stages(plan, path, role.why),
            "parameters": used.get(path, []),
        }
        for path in dict.fromkeys([*paths, *(path for path in plan.roles if path not in modules)])
        for role in [plan.roles.get(path, plain)]
    ]


def _of_its_stages(plan: Plan, path: str, why: str) -> str:
    """``why``, which was written before there were stages: only the ranks of those that call the module compute it."""
    if plan.schedule is None or plan.stages is None:
        return why
    chunked, schedule = plan.stages.chunked, plan.schedule
    stages = {
        schedule.stage_of[chunk]
        for chunk in range(schedule.num_chunks)
        for call in chunked.calls_of(chunk)
        if f"{path}.".startswith(f"{call}.") or f"{call}.".startswith(f"{path}.")
    }
    if not 0 < len(stages) < schedule.num_stages:
        return why
    named = f"stage{'s' * (len(stages) > 1)} {numbers(sorted(stages))}"
    return why.replace("every rank computes", f"the ranks of {named} compute")
