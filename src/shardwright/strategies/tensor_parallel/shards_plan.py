"""Plans how a model whose layers are not known runs on shards: which parameters are cut, and which stored in shards.

``on_shards.py`` runs it, and ``shards_traffic.py`` states what it sends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby, pairwise
from math import prod
from typing import Any

from torch import nn

from shardwright.analysis.recorded.recording import Recording
from shardwright.analysis.traced.structure import has_hooks, owners
from shardwright.forward_stack import Rung
from shardwright.mesh import balanced
from shardwright.plan.operator_work import operator_work
from shardwright.plan.plan import ActivationCut, Job, Plan
from shardwright.plan.shares import CutShare, shares
from shardwright.plan.traffic import Sent
from shardwright.sharding.box import Ranges
from shardwright.sharding.tensor_shard import ALL, TensorShard, held
from shardwright.strategies.tensor_parallel.graph_cuts import GraphCuts, graph_cuts
from shardwright.strategies.tensor_parallel.mode import Mode
from shardwright.strategies.tensor_parallel.sequence import cut_rows, is_asked
from shardwright.strategy import check_samples_apart

LEAST_SHARE = 0.2
"""The least share of parameter bytes that must be cut for a model to run on tensor shards; else too much is copied.

Where the number comes from: of the first 103 models of docs/models.md under tp2, a record either cut nothing of a model
or a third and more of its parameter bytes.
"""

ENOUGH = 0.5
"""A plan for known layers that divides less than this share of a model's FLOPs gives way to a plan on shards, if any.

The plan on shards must divide at least this share, or ``GAIN`` more than the plan for known layers.

It is also the share of parameter bytes from which a model with hooks or ``nn.MultiheadAttention`` keeps the plan for
known layers, whatever a recorded forward would cut.
In the models of docs/models.md the known layers cut at most 0.43 or at least 0.57, so any share in between decides the
same for them.
"""

GAIN = 0.2
"""A record must cut this much more of the parameter bytes than the known layers, or twice as much, to be used.

If the plan for known layers divides less than half of the FLOPs (``ENOUGH``), a record that divides this much more of
the FLOPs is used too.

A record then cuts, for instance, all attentions of a model beside its known MLPs. In the models of docs/models.md a
record gains 0.21 or more (the heads of every attention), or 0.19 or less (the heads of some).
"""


def share_cut(plan: Plan) -> float:
    """Returns the share of a plan's parameter bytes that tensor parallelism shards, from 0 to 1; 0 on one rank."""
    return next((cut_share.share for cut_share in _shares(plan)), 0.0)


def work_cut(plan: Plan) -> float:
    """Returns the share of the FLOPs of a plan's operators that tensor parallelism divides, from 0 to 1."""
    return next((cut_share.flops or 0.0 for cut_share in _shares(plan)), 0.0)


def _shares(plan: Plan) -> list[CutShare]:
    factor = str(plan.layout.factor("tp"))
    return [cut_share for cut_share in shares(plan) if cut_share.factor == factor]


@dataclass(frozen=True)
class StoredShards:
    """How one weight is sharded between steps along ``dim``, over the axes that cut samples.

    It is all-gathered before use, as under FSDP. ``axes`` are slowest first. ``sizes[n][i][j]`` is the number of
    elements of ``dim`` at index j of ``axes[n]``, for index i on the axes before it (counted row-major).
    """

    dim: int
    axes: tuple[str, ...]
    sizes: tuple[tuple[tuple[int, ...], ...], ...]
    everywhere: bool
    """Whether modules other than its own read the weight: then it is all-gathered for the whole forward."""
    readers: tuple[str, ...]
    """The modules that read the weight, by name."""


@dataclass(frozen=True, eq=False)
class ShardsNote:
    """The shards of parameters and buffers on each rank, by name, of a model that runs on tensor shards.

    ``shards`` are cut over ``axis``; ``stored`` are weights that are sharded at rest over the axes ``rows``. ``model``
    is the plain model on the meta device and ``loss`` its loss, from which traffic is rehearsed. ``gathered`` are
    the modules whose outputs are all-gathered at once. ``rehearsed`` caches a microbatch's collectives, for all ranks
    with the same shards and inputs.
    """

    axis: str | None
    rows: tuple[str, ...]
    shards: Mapping[str, TensorShard]
    stored: Mapping[str, StoredShards]
    model: nn.Module
    loss: nn.Module
    gathered: frozenset[str] = frozenset()
    rehearsed: dict[Any, Sent] = field(default_factory=dict)


def place_on_shards(job: Job, plan: Plan, mode: Mode, least: float) -> Plan | None:
    """Returns the plan to run the model's own forward on tensor shards, cut as its recorded operators allow, or None.

    It is None on one rank, if less than the share ``least`` of the parameter bytes would be cut, the forward cannot be
    recorded, the layout cuts tokens or pins roles, the user gave roles to layers, or several axes cut features. If one
    axis cuts features, it is also None for a model that has backward hooks, or that calls autograd functions only for
    some batch sizes. If an axis cuts samples, it is also None for a model that chooses by tensor values which
    parameters it reads, as a mixture of experts does.

    Raises: LayoutError: the layout cuts samples, and a layer mixes them.
    """
    tokens = mode.dim == 1 or is_asked(plan)
    if not mode.axes or job.graph is None or job.roles or tokens or mode.pinned:
        return None
    columns = [axis for axis in mode.axes if axis.stream != "T"]
    if len(columns) > 1 or (any(axis.stream == "C" for axis in columns) and mode.row_axes):
        return None
    name = columns[0].name if columns else None
    if columns and columns[0].size >= ALL:  # cuts have one byte for the rank of an index
        return None
    try:
        run = job.graph.run
        functions = {name for recorded_run in job.graph.every_run for name in recorded_run.recording.functions}
        functions -= run.recording.functions.keys()  # called only in runs on other batch sizes
    except Exception:  # a forward of the user's model, without values: whatever it raises, the model is not recorded
        return None
    if columns and (functions or any(m._backward_hooks or m._backward_pre_hooks for m in job.model.modules())):
        return None
    if mode.row_axes and _may_read_by_values(job.model, run.recording):
        return None  # ranks would gather different weights, as of the experts of their samples
    cuts = graph_cuts(job.model, run.recording, run.axes, columns[0].size if columns else 1)
    if mode.row_axes:
        check_samples_apart(job.model, str(plan.layout.factor("tp")), job.graph)
        plan = cut_rows(plan, mode)
    plan, shards = (plan, {}) if name is None else _cut_shards(plan, cuts.shards, name)
    own = _owners_of(job.model)
    # Modules that are called once for each sample store no shards: ranks with other numbers of samples would gather
    # other numbers of times.
    plan, stored = _store_shards(plan, cuts, mode, shards, own, run.parameters_by_sample)
    if share_cut(plan) < least:
        return None
    for path, module, name_here, whole in owners(job.model):
        if whole in shards or whole in stored:
            local_shape = list(plan.compute[whole].local_shape(dict.fromkeys(plan.mesh.axes, 0)))
            why = f"{name_here} {list(plan.compute[whole].shape)}: {local_shape} on the first rank"
            why += ", of which the outputs are all-gathered" if path in cuts.gathered else ""
            plan = plan.role(path, mode.name, "parts", why)
        elif path not in plan.roles:
            plan = plan.role(path, mode.name, "copied", f"{type(module).__name__}: every rank computes it whole")
    rows = tuple(axis.name for axis in mode.row_axes)
    plan = replace(plan, work=operator_work(plan, run.recording, run.axes, cuts.gathered))
    note = ShardsNote(name, rows, shards, stored, job.model, job.loss, cuts.gathered)
    return plan.note("", note, by=mode.name, rung=Rung.ON_SHARDS)


def _may_read_by_values(model: nn.Module, recording: Recording) -> bool:
    """Returns whether tensor values may decide which weights a forward reads.

    They may if code selects by values, and the record then reads weights. They may also if the record does not read
    some weight at all, since code may have selected a path on which another run reads it.
    """
    if not recording.selecting:
        return False
    later = recording.calls[min(recording.selecting.values()) :]
    used = recording.parameters_used
    has_unread = any(name not in used and parameter.dim() > 1 for name, parameter in model.named_parameters())
    return has_unread or any(use.kind == "parameter" for call in later for use in call.operands)


def _cut_shards(plan: Plan, shards: Mapping[str, TensorShard], axis: str) -> tuple[Plan, dict[str, TensorShard]]:
    """Returns the plan with parameters and buffers cut over an axis, and the shards of those that were cut."""
    cut_shards = {}
    for name, shard in shards.items():
        (dim,) = (dim for dim, cut in enumerate(shard.cuts) if cut is not None)
        ranges = _ranges(shard.cuts[dim] or b"", plan.mesh[axis])
        if name in plan.compute:
            plan = plan.cut(name, axis, dim, ranges)
        elif len(shard.shape) == 1:
            plan = plan.cut_buffer(name, shard.shape[0], axis, ranges)
        else:
            continue  # the whole buffer is stored, and sliced where it is used
        cut_shards[name] = shard
        path = name.rpartition(".")[0]
        if path in plan.statistics and path not in plan.activations:  # the norm then has this rank's channels
            plan = plan.cut_activation(path, ActivationCut(axis, 1, shard.shape[0], ranges))
    return plan, cut_shards


def _ranges(cut: bytes, size: int) -> Ranges:
    """Returns the ranges of a dim that each of ``size`` ranks holds; ``cut`` has the rank of each element."""
    return tuple(runs_held(cut, rank) for rank in range(size))


@lru_cache(maxsize=1024)
def runs_held(cut: bytes, rank: int) -> tuple[tuple[int, int], ...]:
    """Returns the ranges (start, stop) of a dim's indices that a rank holds; ``cut`` has the rank of each index.

    >>> runs_held(bytes([0, 0, 1, 0]), 0)
    ((0, 2), (3, 4))
    """
    numbered = enumerate(held(cut, rank))
    return tuple(
        (run[0], run[-1] + 1)
        for _, pairs in groupby(numbered, key=lambda pair: pair[1] - pair[0])
        for run in [[index for _, index in pairs]]
    )


def _owners_of(model: nn.Module) -> Mapping[str, set[str]]:
    """Returns, for each parameter, the paths of the modules that hold it and read it in their own forward alone.

    Hooks run outside of the forward, so a module that has any is left out: ``nn.utils.spectral_norm`` is such a hook.
    """
    own: defaultdict[str, set[str]] = defaultdict(set)
    for path, module, _, name in owners(model):
        if not has_hooks(module):
            own[name].add(path)
    return own


def _store_shards(
    plan: Plan, cuts: GraphCuts, mode: Mode, shards: Mapping[str, TensorShard], own: Mapping[str, set[str]],
    apart: Collection[str],
) -> tuple[Plan, dict[str, StoredShards]]:  # fmt: skip
    """Returns the plan with weights, except ``apart``, sharded over the axes that cut samples in their longest dim."""
    names = tuple(axis.name for axis in mode.row_axes)
    count = prod(axis.size for axis in mode.row_axes)
    stored = {}
    for name, layout in plan.compute.items() if count > 1 else ():
        taken = [dim for dim, cut in enumerate(shards[name].cuts) if cut is not None] if name in shards else []
        free = [dim for dim, size in enumerate(layout.shape) if dim not in taken and size >= count]
        if len(layout.shape) < 2 or not free or name in cuts.held or name in apart:
            continue  # every rank holds a copy, and the gradient is summed
        dim = max(free, key=lambda number: layout.shape[number])
        pieces, sizes = [(0, layout.shape[dim])], []
        for axis in mode.row_axes:
            cuts_of = ((start, pairwise(balanced(stop - start, axis.size))) for start, stop in pieces)
            split = [[(start + a, start + b) for a, b in bounds] for start, bounds in cuts_of]
            ranges = tuple(tuple(parts[index] for parts in split) for index in range(axis.size))
            plan = plan.cut(name, axis.name, dim, ranges)
            sizes.append(tuple(tuple(b - a for a, b in parts) for parts in split))
            pieces = [piece for parts in split for piece in parts]
        readers = cuts.readers.get(name, set()) | own[name]
        stored[name] = StoredShards(dim, names, tuple(sizes), bool(readers - own[name]), tuple(sorted(readers)))
    return plan, stored
