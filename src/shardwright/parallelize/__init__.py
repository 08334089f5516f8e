"""``parallelize``: a plain model and a layout in, this rank's part and its step out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from shardwright.analysis.batch_norms import batch_norms
from shardwright.axes import layout_axes
from shardwright.comm.axis import Axis
from shardwright.comm.world import World
from shardwright.layout import Layout
from shardwright.models.losses import CrossEntropy
from shardwright.operators.batch_norm import share_statistics
from shardwright.operators.deferred_gradients import DeferredGradients
from shardwright.parallelize.auto import samples_of, tokens_of
from shardwright.parallelize.checks import check_loss, check_model, check_trains, check_world
from shardwright.parallelize.initialization import place_parameters
from shardwright.parallelize.layer_alone import LayerAlone, layer_alone
from shardwright.parallelize.planning import StepTraffic, job_for, make_plan, structural_copy, without_storage
from shardwright.parallelize.run import Run
from shardwright.parallelize.same_start import check_same_start
from shardwright.plan.batch_shard import BatchShard
from shardwright.plan.plan import NUM_TOKENS, Job, Plan
from shardwright.plan.traffic import sync_axes
from shardwright.rng import RngTracker, key_dropout
from shardwright.runtime.activation_checkpointing import checkpoint_activations, offload_activations
from shardwright.runtime.buffer_writes import BufferWrites
from shardwright.runtime.empty_batches import support_empty_batches
from shardwright.runtime.executor import Executor
from shardwright.runtime.gradient_sync import GradientSync
from shardwright.runtime.mixed_precision import MasterWeights, cast_buffers
from shardwright.strategies.pipeline.agreement import check_same_code, lines_of
from shardwright.strategy import Strategy, apply_in_turn

__all__ = [
    "LayerAlone",
    "Run",
    "StepTraffic",
    "check_loss",
    "check_model",
    "check_trains",
    "job_for",
    "layer_alone",
    "make_plan",
    "parallelize",
    "place_parameters",
    "samples_of",
    "structural_copy",
    "tokens_of",
    "without_storage",
]


def parallelize(
    model: nn.Module,
    layout: Layout | str,
    world: World,
    *,
    loss: nn.Module | None = None,
    seed: int = 0,
    num_tokens: int = NUM_TOKENS,
    strategies: Sequence[Strategy] | None = None,
    roles: Mapping[str, str] = MappingProxyType({}),
    example: Any = None,
    seconds: Mapping[str, float] = MappingProxyType({}),
    stop_at_nan: bool = False,
    offload_folder: str | Path | None = None,
) -> Run:
    """This rank's part of a plain one-device model under a layout.

    Build ``model`` under ``torch.device("meta")`` and no rank ever holds the whole; a model that has values, the same
    on every rank, is cut as it is. ``model`` itself is left alone. ``loss(output, targets)`` gives (sum, count), cross
    entropy when left out. ``seed`` fixes initial values and dropout, whatever the layout. ``num_tokens`` is how many
    one microbatch of one model copy will have: modes that weigh activations against weights choose by it. ``roles``
    go before what is found out of single layers: patterns of names, and "column", "row" or "copied". ``example`` are
    the inputs of a global batch, of which shapes alone count: stages are balanced by what layers cost on them, and
    modes that would leave ranks without a sample cut the sequences instead, if the model allows it. A model whose
    parts a person has put on several devices is cut into stages there. ``seconds``, by module and the same on every
    rank, are what :func:`time_layers` measured: stages are balanced by them. With ``stop_at_nan`` a step whose
    gradients are not finite raises a PlanError that names a parameter; in fp16 such a step is left out, and counted.
    State that the layout offloads to disk goes to files in ``offload_folder``, the system's temporary one by default;
    where that is memory (tmpfs), name one on a disk.

    Raises: LayoutError: the layout does not fit the model or the ranks; PlanError: the model cannot say how it
        starts, ranks were given different ones, or state cannot be offloaded. All are raised on every rank, before the
        first step.

    >>> import torch, shardwright as sw
    >>> def work(world):
    ...     with torch.device("meta"):
    ...         plain = nn.Linear(4, 3)
    ...     run = parallelize(plain, "dp2", world)
    ...     batch = next(run.shard([(torch.ones(5, 4), torch.zeros(5, dtype=torch.int64))]))
    ...     return len(batch.samples), round(run.step(batch).item(), 3)
    >>> sw.launch(work, 2, ranks="threads")
    [(3, 1.163), (2, 1.163)]
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    check_model(model)
    loss = structural_copy(loss if loss is not None else CrossEntropy())
    check_loss(loss)
    job = job_for(structural_copy(model), loss, layout, example, num_tokens, roles)._replace(
        seconds=seconds, offload_folder=None if offload_folder is None else Path(offload_folder)
    )
    plan, chosen = make_plan(job, layout, strategies)
    check_world(plan, world)
    everyone = world.everyone()
    if plan.stages is not None:
        check_same_code(everyone.for_strategy("core"), lines_of(plan.stages.chunked, plan.schedule))
    place_parameters(job.model, {**plan.compute, **plan.buffers}, plan.mesh.coord(world.rank), seed, world.device)
    check_same_start(everyone.for_strategy("core"), world, model, seed)
    return _run_of(job, plan, chosen, world, everyone, seed, stop_at_nan)


def _run_of(
    job: Job, plan: Plan, chosen: Sequence[Strategy], world: World, everyone: Axis, seed: int, stop_at_nan: bool
) -> Run:
    """This rank's run: its part of every tensor, what each strategy adds, and the executor that fires their events."""
    coord = plan.mesh.coord(world.rank)
    shard = plan.batch_shard(coord)
    rng = RngTracker(seed)
    job = job._replace(batch_shard=shard, rng=rng, deferred=DeferredGradients())
    job.loss.to(world.device)
    axes = {**_axes(plan, world), "world": everyone}
    rows = {m: partial(shard.samples, r) for m, r in plan.row_moves.items()}
    key_dropout(job.model, rng, plan.slices(coord), rows, _tokens(job.model, plan, shard))
    if plan.layout.precision != "fp32":  # torch's own takes no weights that are narrower than the statistics
        share_statistics((norm for _, norm in batch_norms(job.model)), (), always=True)
    support_empty_batches(job.model)
    job, added = apply_in_turn(chosen, job, axes, plan)
    applied = list(added)
    resting = {name: parameter for one in applied for name, parameter in one.parameters.items()}
    if plan.layout.precision != "fp32":
        masters = MasterWeights(job.model, plan, resting)
        cast_buffers(job.model, plan)
        applied.append(masters.applied())
        resting |= {name: masters.masters[name] for name in masters.fp32_sums}
    late = frozenset[str]().union(*(one.late for one in applied))

    def joined(names: tuple[str, ...]) -> Axis:
        return axes["+".join(names)].for_strategy(_strategy_on(names[0], chosen))

    summed = [one.summed for one in applied]
    sync = GradientSync(job.model, plan, coord, joined, resting, lambda unit: all(each(unit) for each in summed))
    checkpoint_activations(job, plan)
    offload_activations(job, plan, applied, axes["world"])
    events = [*(one.events for one in applied), sync.events()]
    work = next((one.work for one in applied if one.work is not None), None)
    written = None if plan.layout.own_statistics else BufferWrites(job.model)
    executor = Executor(job.model, plan.param_groups, events, rng, shard, late, work, job.deferred, written)
    return Run(job, plan, world, axes, executor, sync, applied, stop_at_nan)


def _tokens(model: nn.Module, plan: Plan, shard: BatchShard) -> Mapping[str, Callable[[Sequence[int]], Any]]:
    """Which tokens each layer sees, where sequences are cut."""
    paths = [path for path, _ in model.named_modules()] if plan.token_axes else []
    return {p: partial(shard.slices, plan.row_moves.get(p, ()), plan.token_dims.get(p, (1,))) for p in paths}


def _axes(plan: Plan, world: World) -> dict[str, Axis]:
    """The mesh's axes, and the joined ones over which gradients or losses are summed; in one order everywhere."""
    axes = world.axes(plan.mesh)
    joined = {sync_axes(plan, name) for name in plan.compute}
    joined.add(tuple(sorted(plan.loss_axes, key=plan.mesh.axes.index)))
    for names in sorted(joined):
        if len(names) > 1:
            axes["+".join(names)] = world.axis("+".join(names), plan.mesh.groups(names))
    return axes


def _strategy_on(mesh_axis: str, chosen: Sequence[Strategy]) -> str:
    """Who cut the axis that makes a gradient partial: its sync is recorded as that strategy's."""
    known = layout_axes()
    return next((s.name for s in chosen if mesh_axis in known[s.axis].all_mesh_axes), "core")
