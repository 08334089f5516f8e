"""Describes a layout as plain data: what each rank stores and sends, and how each layer is parallelized.

``show``, the report page and the pictures are all drawn from this description. Thousands of ranks are cheap because
ranks whose shards have the same sizes are computed once (``_state_at``, ``StepTraffic.like``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, product
from math import prod
from typing import Any

from shardwright.analysis.chunks.costs import FLOPS_PER_S
from shardwright.analysis.traced.structure import owners
from shardwright.axes import mesh_axes
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.mesh import Coord
from shardwright.nodes import Nodes, crosses
from shardwright.parallelize.between_nodes import bytes_between, node_warnings
from shardwright.parallelize.explain import DEFAULT_ROLE, why_with_stages
from shardwright.parallelize.planning import StepTraffic, make_plan, num_rows, shares_of
from shardwright.plan.batch_shard import num_tokens_of
from shardwright.plan.plan import INPUT, Job, Plan
from shardwright.plan.schedule import Action
from shardwright.plan.shares import CutShare, stage_loads
from shardwright.plan.traffic import Traffic, partial_axes
from shardwright.runtime.timeline import Span, Timeline
from shardwright.sharding.tensor_layout import TensorLayout
from shardwright.sharding.words import cut_words
from shardwright.strategies.pipeline.simulate import predict, recomputed_shares
from shardwright.strategy import Strategy

Description = Mapping[str, Any]
"""The result of :func:`describe`: plain dicts, lists, numbers and text."""

DRAWN = 8
"""The number of first indices of an axis that pictures may draw, besides the last one."""

MOST_RANKS = 4096
"""The number of ranks above which one entry of a description stands for a whole set of equal ranks."""

MOST_IN_ALL = 2**20
"""The most ranks of a layout that is described; a larger layout is an error."""

STATES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
"""The keys of a rank that add up to its state on the device; offloaded state is counted in ``offloaded_bytes``."""

STATE_NAMES = dict(zip(STATES, ("parameters", "gradients", "optimizer (AdamW)"), strict=True))
"""How reports name the bytes of a rank's state, by their key in a description."""

_ADAMW_MOMENTS = 2


def describe(
    job: Job, layout: Layout, *, inputs: Any = None, nodes: Nodes | None = None, seconds_from: str = ""
) -> dict[str, Any]:  # fmt: skip
    """Returns the description of a layout: what each rank stores, how each layer is parallelized and why.

    With ``inputs``, a global batch without targets, the description also says what each rank sends, and what is sent
    for each layer; with ``nodes``, which axes cross between nodes and, given ``inputs`` and at most 4,096 ranks, how
    many bytes they send there. With more ranks, an entry of ``ranks`` stands for as many equal ranks as its ``alike``
    says. The plan is made on the meta device, so that neither values nor other ranks are needed. The optimizer is taken
    to be AdamW. ``seconds_from`` is text on the source of the job's seconds of layers, if they were neither timed nor
    predicted for the job's cluster.

    Returns: plain dicts, lists, numbers and text, ready for JSON.
    Raises: LayoutError, PlanError: the layout does not fit the model. LayoutError: it has more than 2**20 ranks, or
        more than 4,096 that differ, or not as many as ``nodes``.

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
    if nodes is not None:
        nodes.check(layout.num_ranks)
    plan, strategies = make_plan(job, layout)
    sends = None if inputs is None else _StepSends(job, plan, strategies, inputs)
    return {
        "layout": str(plan.layout),
        "world_size": plan.mesh.size,
        "mesh": dict(plan.mesh.sizes),
        "num_parameters": sum(parameter.numel() for parameter in job.model.parameters()),
        "strategies": [{"name": s.name, "axis": s.axis, "source": s.source} for s in strategies],
        "ranks": _ranks(job, plan, inputs, sends),
        **({} if nodes is None else {"nodes": _nodes(plan, nodes, sends)}),
        "parameters": [_parameter(plan, name) for name in plan.compute],
        "layers": _layers(job, plan),
        "shares": [_share(share) for share in shares_of(job, plan)],
        **({} if sends is None else {"layer_traffic": sends.of_layers()}),
        **_pipeline(plan, seconds_from=seconds_from or _seconds_from(job)),
    }


def _nodes(plan: Plan, nodes: Nodes, sends: _StepSends | None) -> dict[str, Any]:
    """Returns which axes cross between nodes, the bytes that they send there in a step, and warnings."""
    axes: dict[str, dict[str, Any]] = {axis: {"crosses": crosses(plan.mesh, axis, nodes)} for axis in plan.mesh.axes}
    entry = {"num_nodes": nodes.num_nodes, "ranks_per_node": nodes.ranks_per_node, "axes": axes, "warnings": []}
    if _is_large(plan):
        return entry
    places, sent_bytes = nodes.places(plan.mesh.size), None
    if sends is not None:
        sent_bytes = bytes_between(plan.mesh, places, sends.calls.__getitem__, sends.calls)
        for axis, axis_entry in axes.items():
            axis_entry["between_bytes"] = sent_bytes[axis]
    return entry | {"warnings": node_warnings(plan.mesh, places, sent_bytes)}


def _share(share: CutShare) -> dict[str, Any]:
    """Returns the entry of a factor of the layout: its share of parameters and FLOPs, and modules left whole."""
    whole = [{"module": path, "share": size, "why": why} for path, size, why in share.whole]
    entry = {"factor": share.factor, "share": share.share, "flops": share.flops, "is_low": share.is_low}
    return {**entry, "whole": whole, "text": str(share)}


def _seconds_from(job: Job) -> str:
    """Returns text on where the seconds of a predicted timeline come from."""
    if not job.seconds:
        return f"{FLOPS_PER_S / 1e9:.0f} GFLOP/s, a guess"
    return "timed layers" if job.cluster is None else f"layers predicted for {job.cluster.device.name}"


def _pipeline(plan: Plan, *, seconds_from: str) -> dict[str, Any]:
    """Returns the entries of a pipeline: its stages, schedule and predicted timeline; none without a pipeline."""
    schedule, stages = plan.schedule, plan.stages
    if schedule is None or stages is None:
        return {}
    entries = []
    for stage, share in enumerate(stage_loads(plan)):
        chunks = schedule.chunks_of(stage)
        entries.append(
            {
                "stage": stage,
                "chunks": [{"chunk": chunk, "calls": list(stages.chunked.calls_of(chunk))} for chunk in chunks],
                "share_of_time": share.work,
                **({"why_large": share.why} if share.why else {}),
                "parameter_bytes": sum(stages.costs[chunk].parameter_bytes for chunk in chunks),
                "activation_bytes": sum(stages.costs[chunk].activation_bytes for chunk in chunks),
            }
        )
    timeline = predict(schedule, stages.costs, recomputed_shares(stages, plan.recomputed))
    return {
        "schedule": schedule.name,
        "bubble": timeline.bubble,
        "seconds_from": seconds_from,
        "stages": entries,
        **({} if plan.scatter_axis is None else {"scattered_over": plan.scatter_axis}),
        "timeline": timeline_data(timeline),
    }


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """Returns a timeline (the start and end of each stage's actions) as plain data for JSON."""
    return {
        "bubble": timeline.bubble,
        "makespan_s": timeline.makespan_s,
        "spans": [[[str(s.action), s.start_s, s.end_s] for s in stage] for stage in timeline.spans],
        "memory": [[list(point) for point in stage] for stage in timeline.memory],
    }


def timeline_of(description: Description) -> Timeline | None:
    """Returns the predicted timeline in a layout's description; None for a layout without a pipeline."""
    if "timeline" not in description:
        return None
    drawn = description["timeline"]
    spans = tuple(tuple(Span(_action(a), start, end) for a, start, end in stage) for stage in drawn["spans"])
    memory = tuple(tuple((at, num_bytes) for at, num_bytes in stage) for stage in drawn["memory"])
    return Timeline(f"{description['layout']}, predicted", spans, memory)


def _action(text: str) -> Action:
    """Returns the action that ``str(action)`` spells, such as 0F3: chunk, kind, microbatch."""
    chunk, kind, microbatch = re.split("([FBIW])", text)
    return Action(kind, int(microbatch), int(chunk))  # type: ignore[arg-type]


def _state_at(plan: Plan, coord: Coord, names: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the state that the rank at ``coord`` stores of the parameters ``names``, by the key of its entry.

    ``sizes`` are the bytes of an element of each parameter.
    """

    def bytes_of(names: Iterable[str], counts: Iterable[int]) -> int:
        return sum(sizes[name] * count for name, count in zip(names, counts, strict=True))

    trained = [name for name in names if name not in plan.frozen]
    parameter = [plan.state[name].parameter.num_elements(coord) for name in names]
    gradient = [plan.state[name].gradient.num_elements(coord) for name in trained]
    optimizer = [plan.state[name].optimizer.num_elements(coord) for name in trained]
    offloaded = [name for name in names if name in plan.offloaded]
    on_device = [0 if name in plan.offloaded else count for name, count in zip(trained, optimizer, strict=True)]
    owned = (piece for name in names for piece in plan.state[name].parameter.owned(coord, plan.mesh))
    entry = {
        "num_parameters": sum(parameter),
        "num_owned": sum(piece.whole.size for piece in owned),
        "parameter_bytes": sum(plan.parameter_bytes(name, coord) for name in names),
        "gradient_bytes": bytes_of(trained, gradient),
        "optimizer_bytes": bytes_of(trained, on_device) * _ADAMW_MOMENTS,
    }
    if plan.offloaded:
        shards = bytes_of(offloaded, (plan.state[name].parameter.num_elements(coord) for name in offloaded))
        moments = bytes_of(trained, optimizer) * _ADAMW_MOMENTS - entry["optimizer_bytes"]
        entry["offloaded_bytes"] = shards + moments
    return entry


def _ranks(job: Job, plan: Plan, inputs: Any, sends: _StepSends | None) -> list[dict[str, Any]]:
    """Returns the entries of the ranks, in rank order."""
    sizes = {name: parameter.element_size() for name, parameter in job.model.named_parameters()}
    stored = [layout for state in plan.state.values() for layout in (state.parameter, state.gradient, state.optimizer)]
    cut_axes = _axes(plan, layouts := dict.fromkeys([*plan.compute.values(), *stored]))
    uneven = [axis for axis in cut_axes if not all(layout.is_cut_evenly(axis) for layout in layouts)]
    slice_axes = _axes(plan, [state.parameter for state in plan.state.values()])
    states: dict[tuple[int, ...], dict[str, int]] = {}
    on_stage = _names_by_stage(plan)
    slices: dict[tuple[int, ...], int] = {}
    ranks = []
    for coord, alike in _coords(plan, cut_axes, 0 if inputs is None else num_rows(inputs)):
        # along an axis that cuts state evenly or not at all, all ranks store equally much; but the one with index 0 may
        # own what the others have copies of
        key = tuple(coord[a] if a in uneven else min(coord[a], 1) for a in plan.mesh.axes)
        if key not in states:
            states[key] = _state_at(plan, coord, on_stage[_stage_index(coord)], sizes)
        number = slices.setdefault(tuple(coord[a] for a in slice_axes), len(slices))
        entry: dict[str, Any] = {"rank": plan.mesh.rank(coord), "coord": coord, "slice": number, **states[key]}
        entry |= {"alike": alike} if _is_large(plan) else {}
        ranks.append(entry if sends is None else entry | sends.of(coord))
    return ranks


def _stage_index(coord: Coord) -> tuple[int, ...]:
    return tuple(coord[axis] for axis in mesh_axes("stages") if axis in coord)


def _names_by_stage(plan: Plan) -> Mapping[tuple[int, ...], Sequence[str]]:
    """Returns, for each pipeline stage, the names of the parameters of which its ranks store, or compute with, a part.

    A stage is given by its index on each stage axis. A part may be the whole parameter.
    """
    axes = [axis for axis in plan.mesh.axes if axis in mesh_axes("stages")]
    names: dict[tuple[int, ...], list[str]] = {tuple(at.values()): [] for at in plan.mesh.coords(axes)}
    for name, layout in plan.compute.items():
        state = plan.state[name]
        layouts = (layout, state.parameter, state.gradient, state.optimizer)
        places = (product(*(one.held_along(axis) or range(plan.mesh[axis]) for axis in axes)) for one in layouts)
        for at in set(chain.from_iterable(places)):
            names[at].append(name)
    return names


def _is_large(plan: Plan) -> bool:
    return plan.mesh.size > MOST_RANKS


def _coords(plan: Plan, cut_axes: Collection[str], num_samples: int) -> Iterator[tuple[Coord, int]]:
    """Yields the coordinates to describe, in rank order, each with the number of ranks that it stands for.

    Replicas differ only in how many samples they have. So on a large data-parallel axis only the first indices, the
    last, and one for each number of samples that a rank can have are described.
    """
    sizes, row_axes = dict(plan.mesh.sizes), plan.row_axes
    starts: dict[str, list[int]] = {}
    counts = {num_samples}
    for axis, size in sizes.items():
        firsts = set(range(size))
        if _is_large(plan) and axis in mesh_axes("copies") and axis in row_axes and axis not in cut_axes:
            # the first indices and the last are drawn; at ``count % size`` the smaller shares begin
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


def _axes(plan: Plan, layouts: Iterable[TensorLayout]) -> tuple[str, ...]:
    """Returns the axes that cut any of the layouts, in the order of the mesh."""
    named = {axis for layout in layouts for axis in layout.axes}
    return tuple(axis for axis in plan.mesh.axes if axis in named)


class _StepSends:
    """The samples and sent bytes of each rank in one step on a global batch, made by ``_ranks``."""

    def __init__(self, job: Job, plan: Plan, strategies: Sequence[Strategy], inputs: Any) -> None:
        self.plan, self.traffic = plan, StepTraffic(job, plan, strategies, inputs)
        self.num_samples = num_rows(inputs)
        self.num_tokens = num_tokens_of(inputs) if plan.token_axes else 0
        self.sent_bytes: dict[object, dict[str, float]] = {}
        self.calls_by_key: dict[object, list[Traffic]] = {}
        self.calls: dict[int, list[Traffic]] = {}
        """The collective calls of a step, by rank, of the ranks that were described."""
        self._by_layer: dict[tuple[str, str], float] = {}

    def of(self, coord: Coord) -> dict[str, Any]:
        """Returns a rank's number of samples, its sent bytes by strategy and, if sequences are cut, its tokens.

        Traffic is computed once for all ranks that send alike.
        """
        shard = self.plan.batch_shard(coord)
        like = self.traffic.like(coord)
        key = tuple(like.values())
        if key not in self.sent_bytes:
            traffic = self.traffic.at(like)
            self.sent_bytes[key] = {name: sum(t.sent_bytes for t in calls) for name, calls in traffic.items()}
            self.calls_by_key[key] = [call for calls in traffic.values() for call in calls]
            here: dict[tuple[str, str], float] = {}
            for name, calls in traffic.items():
                for call in calls:
                    here[call.layer, name] = here.get((call.layer, name), 0.0) + call.sent_bytes
            for layer, sent in here.items():
                self._by_layer[layer] = max(sent, self._by_layer.get(layer, 0.0))
        self.calls[self.plan.mesh.rank(coord)] = self.calls_by_key[key]
        entry = {"samples": len(shard.local_samples(self.num_samples)), "sent_bytes": self.sent_bytes[key]}
        if not self.plan.token_axes:
            return entry
        shard.set_num_tokens(self.num_tokens)
        return {**entry, "tokens_of_each": len(shard.tokens(()))}

    def of_layers(self) -> list[dict[str, Any]]:
        """Returns the bytes sent for each layer by each strategy, on the rank that sends most for it; most first.

        A layer is a module, a param group, or a boundary of pipeline chunks; "" if a strategy does not say which.
        """
        entries = sorted(self._by_layer.items(), key=lambda entry: -entry[1])
        return [{"layer": layer, "strategy": name, "sent_bytes": most} for (layer, name), most in entries if most]


def _parameter(plan: Plan, name: str) -> dict[str, Any]:
    """Returns the entry of a parameter: its layout in compute and at rest, and the axes of its gradient sync."""
    layout, state = plan.compute[name], plan.state[name]
    # all stages that hold a parameter hold equal parts: look at the first that holds it, and at the first without it
    stages = [axis for axis in layout.axes if axis in mesh_axes("stages")]
    first = {layout.is_held_at(at): at for at in reversed(plan.mesh.coords(stages))}
    inner = plan.mesh.coords([axis for axis in layout.axes if axis not in stages])
    ordered = sorted(first.values(), key=lambda at: tuple(at.values()))
    shapes = dict.fromkeys(layout.local_shape({**at, **there}) for at in ordered for there in inner)
    return {
        "name": name,
        "shape": list(layout.shape),
        "cut": cut_words(layout),
        "local_shapes": [list(shape) for shape in shapes],
        "sync": [] if name in plan.frozen else list(partial_axes(plan, name)),
        "rest": {kind: cut_words(getattr(state, kind)) for kind in ("parameter", "gradient", "optimizer")},
    }


def _layers(job: Job, plan: Plan) -> list[dict[str, Any]]:
    """Returns the modules that own parameters or have a role, in the model's order, then the loss."""
    used: dict[str, list[str]] = {}
    for path, _, _, name in owners(job.model):
        used.setdefault(path, []).append(name)
    modules = dict(job.model.named_modules())
    kinds = {path: type(module).__name__ for path, module in modules.items()} | {INPUT: "input"}
    paths = [path for path in (INPUT, *modules) if path in used or path in plan.roles]
    return [
        {
            "module": path,
            "kind": kinds.get(path, type(job.loss).__name__),
            "role": role.name,
            "strategy": role.strategy,
            "why": why_with_stages(plan, path, role.why),
            "parameters": used.get(path, []),
        }
        for path in dict.fromkeys([*paths, *(path for path in plan.roles if path not in modules)])
        for role in [plan.roles.get(path, DEFAULT_ROLE)]
    ]
