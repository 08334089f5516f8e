"""``parallelize``: turns a plain model and a layout into a ``Run``, which holds this rank's part of the model.

The order is fixed: check the model, plan the layout (pure, on the meta device), replace the parameters by this rank's
parts, check that all ranks were given the same model and seed, let each strategy change the modules, then add what
every run has: gradient sync, activation checkpointing, and the executor that runs the steps.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from shardwright.analysis.objects.copying import check_apart
from shardwright.analysis.objects.held_parameters import put_unread
from shardwright.analysis.objects.left_untouched import left_untouched
from shardwright.analysis.random_numbers.draws import Draws
from shardwright.analysis.traced.batch_norms import batch_norms, derived_batch_norms
from shardwright.axes import layout_axes, mesh_axes
from shardwright.comm.axis import Axis
from shardwright.comm.world import World
from shardwright.errors import EXAMPLE
from shardwright.layout import Layout
from shardwright.models.given_loss import Loss, as_loss, loss_for
from shardwright.operators.batch_norm import share_statistics
from shardwright.operators.split_backward import DeferredGradients
from shardwright.parallelize.auto import tokens_of
from shardwright.parallelize.batches import as_tensors
from shardwright.parallelize.between_nodes import bytes_between, crossing_pairs, node_warnings
from shardwright.parallelize.checks import check_given, check_loss, check_model, check_names, check_world
from shardwright.parallelize.first_batch import FirstBatchChecker
from shardwright.parallelize.initialization import place_parameters
from shardwright.parallelize.loss_settings import follow_settings
from shardwright.parallelize.loss_watch import note_attributes
from shardwright.parallelize.outputs import join_by_hand
from shardwright.parallelize.planning import (
    PLANNING,
    StepTraffic,
    copied_loss,
    job_for,
    lists_to_replace,
    make_plan,
    shares_of,
    structural_copy,
)
from shardwright.parallelize.rank_check import CHECK_EVERY
from shardwright.parallelize.run import Run
from shardwright.parallelize.same_start import check_same_start
from shardwright.parallelize.sample_checks import (
    check_draws,
    cuts_batch,
    warn_of_added_terms,
    warn_of_counts,
    warn_of_loss_norms,
    warn_of_means,
    warn_unseen,
)
from shardwright.plan.plan import NUM_TOKENS, Job, Plan
from shardwright.plan.traffic import sync_axes
from shardwright.rng import RngTracker
from shardwright.runtime.activation_checkpointing import checkpoint_activations
from shardwright.runtime.activation_offload import offload_activations
from shardwright.runtime.buffer_writes import BufferWrites
from shardwright.runtime.compiled_blocks import check_compiler, compile_blocks
from shardwright.runtime.empty_batches import support_empty_batches
from shardwright.runtime.executor import Executor
from shardwright.runtime.gradient_sync import GradientSync
from shardwright.runtime.keyed_draws import key_draws
from shardwright.runtime.mixed_precision import MasterWeights, cast_buffers
from shardwright.strategies.pipeline.same_code import check_same_code, lines_of
from shardwright.strategy import Strategy, apply_in_turn

__all__ = ["parallelize"]

LOG = logging.getLogger("shardwright")
"""The library's logger: rank 0 logs the share of the model that each axis shards, a low share as a warning."""


def parallelize(
    model: nn.Module,
    layout: Layout | str,
    world: World,
    *,
    loss: Loss | None = None,
    seed: int = 0,
    num_tokens: int | None = None,
    strategies: Sequence[Strategy] | None = None,
    roles: Mapping[str, str] = MappingProxyType({}),
    example: Any = None,
    seconds: Mapping[str, float] = MappingProxyType({}),
    stop_at_nan: bool = False,
    offload_folder: str | Path | None = None,
    check_every: int = CHECK_EVERY,
) -> Run:
    """Returns this rank's part of a plain one-device model under a layout, as a ``Run`` that makes training steps.

    All ranks call it. ``model`` itself is left alone; a copy of its structure is sharded. On the meta device
    (``torch.device("meta")``) its values are drawn shard by shard, so that no rank ever holds the whole model.

    Args:
        model: the plain model; one with values must have the same on every rank. If its parts are on several devices,
            pipeline stages begin where the device changes.
        layout: the layout line, such as ``"dp2/zero3 tp2 bf16"``.
        world: this rank's world, as :func:`launch` passes it.
        loss: called as ``loss(output, targets)``; returns (sum, count). A module or function, or a loss of torch that
            returns the mean, such as ``nn.CrossEntropyLoss()``. Cross entropy by default. It is copied; numbers and
            text among its attributes may be changed between steps. ``sw.MeanLoss(function)`` takes a function that
            returns a mean, and ``sw.ModelLoss()`` the loss that the model itself computes.
        seed: fixes initial values and dropout, equally under every layout.
        num_tokens: tokens of one microbatch of one model copy; some tensor-parallel modes use it to compare the cost of
            sending activations with that of sending weights. By default the tokens of ``example``, counted as ``plan``
            and ``verify`` count them, or 4096 without an example.
        strategies: the strategies to use instead of those that the layout selects.
        roles: "column", "row" or "copied" for single layers, by patterns of names; they override the roles that the
            analysis of the model chooses under ``tp``.
        example: the inputs of a global batch, the same on every rank. The model's own code is checked on them here.
            Without an example it is checked in the first step, which runs the forward, with the hooks on its modules,
            once more or several times on tensors without values. Of tensors only shapes and dtypes are read, so give
            ``torch.zeros(...)``: ``next(iter(loader))`` would draw from the loader's random generator. Give a real
            batch only for a model whose code needs values of inputs, such as a model of images and text that looks for
            the tokens of its images. With an example, stages are also balanced by the cost of layers on it, and modes
            that would leave ranks without a sample cut sequences instead, if the model allows it.
        seconds: forward times by module, from :func:`time_layers`, the same on every rank; they balance the stages.
        stop_at_nan: whether a step with gradients that are not finite raises a PlanError that names a parameter. By
            default the run goes on, as plain torch does, and warns once after an update from a loss that is not finite.
            In fp16 such a step is skipped and counted instead.
        offload_folder: folder for state that the layout offloads to disk, by default the system's temporary folder;
            where that is in memory (tmpfs), name one on a disk.
        check_every: the number of steps from one comparison of ranks to the next, 0 for none. In the first step, every
            ``check_every`` steps, and in steps 8, 16, 32 and so on, ranks compare their copies of parameters, batches,
            updates and rates, by 8 bytes from each rank. A difference is a PlanError that names the rank.

    Rank 0 logs which share of the parameters and FLOPs each factor of the layout cuts. A share under half is logged as
    a warning, with the largest layers that stay whole and the reasons. Other warnings name each axis, such as ``tp``,
    that sends between nodes in every layer, and tell if code cannot be recorded in which samples of a batch may meet.

    Traffic: small messages by which ranks check that they were given the same model and can run; no parameter is sent.
    Raises: LayoutError: the layout does not fit the model or the ranks; PlanError: the model or the loss is of a kind
        that ranks cannot train together, the model does not define its initial values, ranks were given different
        models, or state cannot be offloaded. All ranks raise, before the first step; what only an example shows is
        raised in the first step without one.

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
    check_given(model, layout, world)
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    check_model(model)
    check_names(model, layout)
    example = as_tensors(example)
    user_loss, loss = loss, copied_loss(loss_for(loss, model), model)
    check_loss(loss)
    follow_settings(user_loss, loss)
    with PLANNING, left_untouched(model, replaced_only=True):
        copy = structural_copy(model)
        check_apart(model, copy)
        if num_tokens is None:
            num_tokens = NUM_TOKENS if example is None else tokens_of(example, layout)
        job = job_for(copy, loss, layout, example, num_tokens, roles)._replace(
            seconds=seconds, offload_folder=None if offload_folder is None else Path(offload_folder)
        )
        plan, chosen = make_plan(job, layout, strategies)
    check_world(plan, world)
    for share in shares_of(job, plan) if world.rank == 0 else ():
        unknown = example is None and share.is_low and not share.large
        more = f"; {EXAMPLE}, by which its operators are known" if unknown else ""
        LOG.log(logging.WARNING if share.is_low else logging.INFO, "%s%s", share, more)
    for text in _crossing(job, plan, chosen, world, example) if world.rank == 0 else ():
        LOG.warning("%s", text)
    warn_of_loss_norms(loss, plan, world)
    if job.graph is not None:
        warn_unseen(job.graph, plan, world)
        with PLANNING:
            warn_of_means(job.graph, loss, plan, world)
            warn_of_counts(job.graph, loss, plan, world)
            warn_of_added_terms(job.graph, plan, world)
            note_attributes(loss, job.graph)
    is_alone = world.size * layout.num_microbatches == 1
    first_batch = FirstBatchChecker(job, plan, world, strategies) if example is None and not is_alone else None
    return _started(job, plan, chosen, world, model, seed, stop_at_nan, check_every, first_batch)


def under_plan(job: Job, plan: Plan, chosen: Sequence[Strategy], world: World) -> Run:
    """Returns one rank's :class:`Run` for a plan that was made before from ``job`` (the model, its loss, the sizes).

    It is used to simulate several ranks of one plan. ``chosen`` are the strategies that refined the plan. The seed is 0
    and the other options are the defaults of :func:`parallelize`. The job's model and loss are left alone.

    Raises: LayoutError: the world has another number of ranks than the plan; and as :func:`parallelize`.
    """
    own = job._replace(model=structural_copy(job.model), loss=copied_loss(as_loss(job.loss)))
    check_world(plan, world)
    return _started(own, plan, chosen, world, job.model, 0, stop_at_nan=False, check_every=CHECK_EVERY)


def _started(
    job: Job, plan: Plan, chosen: Sequence[Strategy], world: World, model: nn.Module, seed: int, stop_at_nan: bool,
    check_every: int, first_batch: FirstBatchChecker | None = None,
) -> Run:  # fmt: skip
    """Gives the job's model this rank's values, checks that all ranks begin alike, and builds the run."""
    layout = plan.layout
    with PLANNING:
        draws = job.graph.draws if job.graph is not None else None
    cuts_by_values = job.graph is not None and job.graph.reads_values and layout.factor("tp") is not None
    by_values = cuts_by_values or (plan.reads_values and plan.stages is not None)
    example = job.graph.values if job.graph is not None and by_values else None
    put_unread(job.model, lists_to_replace(job, layout))
    job = job._replace(graph=None)  # frees the record of all operators of the model, which only planning reads
    if draws is not None:
        check_draws(draws, plan, world)
    everyone = world.everyone()
    check_compiler(layout, everyone)
    if plan.stages is not None:  # stages that were cut from different code would wait for each other's messages
        check_same_code(everyone.for_strategy("core"), lines_of(plan.stages.chunked, plan.schedule))
    place_parameters(job.model, {**plan.compute, **plan.buffers}, plan.mesh.coord(world.rank), seed, world.device)
    check_same_start(everyone.for_strategy("core"), world, model, str(layout), seed, example)
    axes = {**_axes(plan, world), "world": everyone}
    return _run_of(job, plan, chosen, world, axes, draws, seed, stop_at_nan, model, check_every, first_batch)


def _crossing(job: Job, plan: Plan, chosen: Sequence[Strategy], world: World, inputs: Any) -> list[str]:
    """Returns a warning for each axis that cuts operators and crosses nodes, with the bytes that all ranks send.

    The bytes are an estimate: every rank is assumed to send as much as rank 0.
    """
    if not set(crossing_pairs(plan.mesh, world.nodes) if world.nodes else ()) & set(mesh_axes("operators")):
        return []
    num_bytes = None
    if inputs is not None:
        # rank 0 alone counts bytes, and runs the user's forward on the meta device for it; a warning must not end the
        # run, so errors are suppressed
        with contextlib.suppress(Exception):
            traffic = StepTraffic(job, plan, chosen, inputs).at(plan.mesh.coord(0))
            calls = [call for strategy_calls in traffic.values() for call in strategy_calls]
            num_bytes = bytes_between(plan.mesh, world.nodes, lambda _: calls, range(world.size))
    return node_warnings(plan.mesh, world.nodes, num_bytes)


def _run_of(
    job: Job,
    plan: Plan,
    chosen: Sequence[Strategy],
    world: World,
    axes: Mapping[str, Axis],
    draws: Draws | None,
    seed: int,
    stop_at_nan: bool,
    plain: nn.Module | None = None,
    check_every: int = 0,
    first_batch: FirstBatchChecker | None = None,
) -> Run:
    """Returns the run of a job whose model has this rank's values: applies each strategy, then the common parts.

    ``plain`` is the plain model, whose parameters no step reads. ``first_batch`` checks the first batch of a run that
    was given no example.
    """
    coord = plan.mesh.coord(world.rank)
    shard = plan.batch_shard(coord)
    rng = RngTracker(seed)
    rng.unrecorded = "" if job.graph is None else job.graph.failure_of_own_code
    job = job._replace(batch_shard=shard, rng=rng, deferred=DeferredGradients())
    job.loss.to(world.device)
    rows = {module: partial(shard.samples, moves) for module, moves in plan.row_moves.items()}
    paths = [path for path, _ in job.model.named_modules()] if plan.token_axes else []
    tokens = {
        path: partial(shard.slices, plan.row_moves.get(path, ()), plan.token_dims.get(path, (1,))) for path in paths
    }
    cuts = {"cuts_batch": cuts_batch(plan), "cuts_code": plan.stages is not None}
    key_draws(job.model, rng, draws, plan.slices(coord), rows, tokens, **cuts)
    mixed = plan.layout.precision != "fp32"
    if mixed:  # torch's own BatchNorm takes no weights that are narrower than its statistics
        norms = (*batch_norms(job.model), *derived_batch_norms(job.model))
        share_statistics((norm for _, norm in norms), (), always=True)
    support_empty_batches(job.model)
    job, added = apply_in_turn(chosen, job, axes, plan)
    applied = list(added)
    stored = {name: parameter for strategy in applied for name, parameter in strategy.parameters.items()}
    if mixed:
        # after the strategies: parameters whose state ZeRO shards have their master weights there already
        masters = MasterWeights(job.model, plan, stored)
        cast_buffers(job.model, plan)
        applied.append(masters.applied())
        stored |= {name: masters.masters[name] for name in masters.fp32_sums}

    def sync_axis(names: tuple[str, ...]) -> Axis:
        # recorded as the traffic of the strategy that cuts the slowest of these axes
        known = layout_axes()
        owner = next((s.name for s in chosen if names[0] in known[s.axis].all_mesh_axes), "core")
        return axes["+".join(names)].for_strategy(owner)

    ready = [strategy.summed for strategy in applied]
    sync = GradientSync(job.model, plan, coord, sync_axis, stored, lambda group: all(check(group) for check in ready))
    # after every strategy, so that the modules that run again in the backward are the sharded ones
    compile_blocks(job, plan, draws_are_known=draws is not None)
    checkpoint_activations(job, plan)
    offload_activations(job, plan, applied, axes["world"])
    events = [*(strategy.events for strategy in applied), sync.events()]
    late = frozenset[str]().union(*(strategy.late for strategy in applied))
    work = next((strategy.work for strategy in applied if strategy.work is not None), None)
    buffer_writes = None if plan.layout.own_statistics else BufferWrites(job.model)
    executor = Executor(job.model, plan.param_groups, events, rng, shard, late, work, job.deferred, buffer_writes)
    join_by_hand(executor, plan, axes, shard)
    return Run(job, plan, world, axes, executor, sync, applied, stop_at_nan, plain, check_every, first_batch)


def _axes(plan: Plan, world: World) -> dict[str, Axis]:
    """Returns the mesh's axes, and the joint axes that sum gradients or losses, created in one order on all ranks."""
    axes = world.axes(plan.mesh)
    joined = {sync_axes(plan, name) for name in plan.compute}
    joined.add(tuple(sorted(plan.loss_axes, key=plan.mesh.axes.index)))
    for names in sorted(joined):
        if len(names) > 1:
            axes["+".join(names)] = world.axis("+".join(names), plan.mesh.groups(names))
    return axes
