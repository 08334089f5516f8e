"""Checks a recorded forward for code that makes a step depend on which rank or microbatch has which samples."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from warnings import warn

from torch import nn

from shardwright.analysis.model_graph import ModelGraph
from shardwright.analysis.random_numbers.draws import Draws
from shardwright.analysis.samples.sample_mixing import means_within
from shardwright.analysis.traced.batch_norms import sees_batch
from shardwright.comm.world import World
from shardwright.models.model_loss import ModelLoss
from shardwright.parallelize.loss_watch import objects_of_loss, reads_of
from shardwright.plan.plan import Plan
from shardwright.strategies.pipeline.cut_model import runs_on_shards

LOG = logging.getLogger("shardwright")


def cuts_batch(plan: Plan) -> bool:
    """Returns whether the layout splits the samples of a batch, over ranks or into microbatches."""
    return bool(plan.inputs) or plan.layout.num_microbatches > 1


def check_draws(draws: Draws, plan: Plan, world: World) -> None:
    """Raises PlanError if a model draws random numbers that would differ between layouts (:meth:`Draws.check`).

    It warns of modules that compute one sample's values from others, where the layout cuts the batch. On one rank
    without microbatches nothing is checked.
    """
    several = plan.layout.num_microbatches > 1
    if world.size == 1 and not several:
        return
    cuts = cuts_batch(plan)
    draws.check(
        are_threads=world.local and world.size > 1,
        cuts=cuts or plan.stages is not None,
        cuts_samples=(several and not plan.layout.own_statistics) or bool(plan.row_axes),
        cuts_batch=cuts,
        cut_layers=_cut_layers(plan, plan.mesh.coord(world.rank)) if draws.alone else (),
    )


def warn_unseen(graph: ModelGraph, plan: Plan, world: World) -> None:
    """Logs a warning, on rank 0, if the layout cuts the batch of a model whose own code could not be recorded."""
    failure = graph.failure_of_own_code if cuts_batch(plan) and world.rank == 0 else ""
    if failure:
        LOG.warning(
            "the forward of %s cannot be recorded, so code that computes one sample's values from others of the batch, "
            "which %s cuts, is not found; verify shows a difference. It raised %s",
            type(graph.model).__name__,
            plan.layout,
            failure.splitlines()[0],
        )


def warn_of_means(graph: ModelGraph, loss: nn.Module, plan: Plan, world: World) -> None:
    """Warns, on rank 0, if a model that computes its own loss takes a mean over something else than its labels.

    The divisors of the means on ranks and microbatches are then not known outside of the model.
    """
    if world.rank or not isinstance(loss, ModelLoss) or not cuts_batch(plan) or graph.draws is None:
        return
    run, inputs = graph.run, graph.values
    labels = inputs.get(loss.labels) if isinstance(inputs, Mapping) else None
    ignored = None if loss.over == "samples" else loss.ignore_index
    for path, name in dict.fromkeys(means_within(run.recording, run.axes, ignored, labels)):
        counted = "samples" if loss.over == "samples" else f"labels other than {loss.ignore_index}"
        warn(
            f"'{path or 'the model'}' computes a loss that is no mean over the {counted}, which sw.ModelLoss counts "
            f"({name}): it is a sum, or a mean over another number. Under {plan.layout} it differs from one device "
            "unless that number is in proportion on each part of a batch. Compute the loss outside of the model, and "
            "return its sum and its count",
            stacklevel=3,
        )


def warn_of_loss_norms(loss: nn.Module, plan: Plan, world: World) -> None:
    """Warns, on rank 0, of BatchNorms in training mode in a network of the loss, where the layout cuts the batch."""
    if world.rank or not cuts_batch(plan) or plan.layout.own_statistics:
        return
    reads = reads_of(loss)
    of_model = {id(module) for module in (reads.held.values() if reads is not None else ())}
    parts = (part for _, part in objects_of_loss(loss) if isinstance(part, nn.Module) and id(part) not in of_model)
    norm = next((module for module in (*loss.modules(), *parts) if module.training and sees_batch(module)), None)
    if norm is not None:
        warn(
            f"the loss holds a {type(norm).__name__} in training mode, which under {plan.layout} takes its statistics "
            "over the samples of a rank or a microbatch, so that the loss differs from one device. Freeze it by "
            ".eval() if it is of a network that is not trained",
            stacklevel=3,
        )


def warn_of_added_terms(graph: ModelGraph, plan: Plan, world: World) -> None:
    """Warns, on rank 0, of users' backwards that add terms of their own to gradients, if the layout cuts the batch.

    Gradients of ranks and microbatches are shares that add up to those of one device. A term that is a sum over samples
    adds up too; a term that is a mean would be added whole by each rank and microbatch.
    """
    if world.rank or not cuts_batch(plan) or graph.failure:
        return
    for name in dict.fromkeys(graph.run.recording.adding_backwards):
        warn(
            f"the backward of '{name.removesuffix('Backward')}' adds a term to gradients that does not depend on those "
            f"that it is given. Under {plan.layout} that is right for a sum over samples, of which each rank or "
            "microbatch adds its own; a mean, as of a balance loss, each adds whole. Return such a term with the "
            "output, and add it to the loss",
            stacklevel=3,
        )


def warn_of_counts(graph: ModelGraph, loss: nn.Module, plan: Plan, world: World) -> None:
    """Warns, on rank 0, if a forward computes with the number of samples, or with a sample's place in the batch.

    Examples are ``x / len(x)`` and ``x + arange(len(x))``. A rank or microbatch has fewer samples than one device, and
    another first sample. The number of samples is allowed in a model that computes its own loss, for its mean.
    """
    if world.rank or not cuts_batch(plan):
        return
    counted = () if isinstance(loss, ModelLoss) else graph.calls_with_counts()
    drawn = [(draw.key[0], draw.function) for draw in graph.draws_with_counts()]
    for path, name in dict.fromkeys([*((call.module, call.name) for call in counted), *drawn]):
        warn(
            f"'{path or 'the model'}' computes with the number of samples ({name}), which under {plan.layout} is that "
            "of a rank or a microbatch, so that the result differs from one device. Give the model the number of the "
            "whole batch, or scale the loss by its count of targets",
            stacklevel=3,
        )
    for path, name in dict.fromkeys((call.module, call.name) for call in graph.calls_by_place()):
        warn(
            f"'{path or 'the model'}' computes with a sample's place in the batch ({name}), which under {plan.layout} "
            "is its place among the samples of a rank or a microbatch: where these values differ, so does the result "
            "from one device, and verify says by how much. Give the model the places as an input. If these are no "
            "places but tokens, as where the batch is in another dim, put the batch in dim 0",
            stacklevel=3,
        )


def _cut_layers(plan: Plan, coord: Mapping[str, int]) -> set[str]:
    """Returns the paths of modules ("" for the model) of whose activations this rank holds parts that carry no tag.

    On tensor-parallel shards, layers are left out, because their tensors tell which part they are.
    """
    if plan.token_axes:
        return {""}
    layers = () if runs_on_shards(plan) else (*plan.roles, *plan.notes)
    return {path for path in layers if path} | {*plan.slices(coord), *plan.row_moves}
