"""Looks at a plain model's forward on the first batch, where ``parallelize`` was given no example to look at."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright.analysis.model_graph import ModelGraph
from shardwright.analysis.random_numbers.draws import FIRST, Draws, draws_as_known
from shardwright.analysis.recorded.weight_readers import read_by_others
from shardwright.axes import layout_axes, mesh_axes
from shardwright.comm.world import World
from shardwright.errors import EXAMPLE, PlanError
from shardwright.keyed_dropout import with_samples_in_dim_1
from shardwright.parallelize.planning import PLANNING, make_plan, num_rows, on_device, without_storage
from shardwright.parallelize.sample_checks import (
    check_draws,
    cuts_batch,
    warn_of_added_terms,
    warn_of_counts,
    warn_of_means,
    warn_unseen,
)
from shardwright.plan.plan import Job, Plan
from shardwright.strategy import Strategy, check_samples_apart


class FirstBatchChecker:
    """Checks the code of a plain model once a batch is there, as ``parallelize`` does with an example.

    The forward is recorded on the meta device, on inputs like those of the first batch that this rank has samples of.
    A model that consists of layers of torch and of this library alone has no code of its own, and is not recorded.
    """

    def __init__(self, job: Job, plan: Plan, world: World, strategies: Sequence[Strategy] | None) -> None:
        """Keeps a copy of the job's model without values until the first batch; ``job.example`` is None.

        ``strategies`` are those that the caller has chosen in place of the layout's, or None.
        """
        has_own_code = not all(map(draws_as_known, job.model.modules()))
        self._job = job._replace(model=without_storage(job.model)) if has_own_code else None
        self._plan, self._world, self._strategies = plan, world, strategies

    def check(self, inputs: Any, model: nn.Module) -> None:
        """Checks the model's forward on this rank's ``inputs`` of the first batch; later calls return at once.

        The forward is recorded in the modes, training or evaluation, that the modules of the run's ``model`` are in.

        Raises: LayoutError, PlanError: as ``parallelize`` does with an example; or the model draws random numbers of
            which only an example would have shown which of them belong to which sample.
        """
        job = self._job
        if job is None or not num_rows(inputs):
            return
        self._job = None
        for path, module in model.named_modules():
            with suppress(AttributeError):  # a module that a strategy has added is missing in the plain model
                job.model.get_submodule(path).training = module.training
        with PLANNING:
            self._look_at(job, _graph(job.model, inputs))

    def _look_at(self, job: Job, graph: ModelGraph) -> None:
        plan = self._plan
        # stages and tensor parallelism keep the plan that they have: only what depends on copies is checked again
        factors = tuple(factor for factor in plan.layout.factors if layout_axes()[factor.axis].kind == "copies")
        axes = {factor.axis for factor in factors}
        strategies = self._strategies and [strategy for strategy in self._strategies if strategy.axis in axes]
        make_plan(job._replace(example=graph.example, graph=graph), replace(plan.layout, factors=factors), strategies)
        for factor in plan.layout.factors:
            if factor not in factors and plan.row_axes & {*factor.mesh_axes}:
                check_samples_apart(job.model, str(factor), graph)
        _check_readers(job.model, graph, plan)
        warn_unseen(graph, plan, self._world)
        warn_of_means(graph, job.loss, plan, self._world)
        warn_of_counts(graph, job.loss, plan, self._world)
        warn_of_added_terms(graph, plan, self._world)
        if graph.draws is not None:
            check_draws(graph.draws, plan, self._world)
            if cuts_batch(plan):
                _check_places(graph.draws, {*with_samples_in_dim_1(job.model)})


def _check_readers(model: nn.Module, graph: ModelGraph, plan: Plan) -> None:
    """Raises PlanError if code outside of a layer reads the layer's weight, of which a rank has only a part."""
    if not any(role.name not in ("copied", "parts") for role in plan.roles.values()):
        return
    if graph.failure:  # warn_unseen logs a warning of it
        return
    stages = {*mesh_axes("stages")}
    for name in sorted(read_by_others(model, graph.run.recording) & plan.compute.keys()):
        if not stages.issuperset(plan.compute[name].axes):
            raise PlanError(
                f"other code than the layer reads '{name}', of which each rank has a part",
                given=f"a forward that computes something else with it, under {plan.layout}",
                allowed="layers whose weights they alone read; with an example, others stay whole on every rank",
                fix=EXAMPLE,
            )


def _graph(model: nn.Module, inputs: Any) -> ModelGraph:
    """Returns the graph of a model on inputs of a batch, which may have been cast to the layout's precision."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    own = tree_map_only(Tensor, lambda x: x.to(dtype) if x.dtype in (torch.bfloat16, torch.float16) else x, inputs)
    example, values = (on_device(own, torch.device(device)) for device in ("meta", "cpu"))
    return ModelGraph(model, example, values, is_as_trained=True)


def _check_places(draws: Draws, known: Collection[str]) -> None:
    """Raises PlanError if a module that is not in ``known`` draws random numbers for a tensor without samples in dim 0.

    ``known`` are the layers whose samples are in dim 1; without an example, all others are assumed to have them in
    dim 0.
    """
    for (path, _, _), place in draws.places.items():
        if path in known:
            continue
        if place != FIRST or path in draws.selecting or path in draws.loops:
            raise PlanError(
                f"'{path or 'the model'}' draws random numbers otherwise than for each sample in dim 0",
                given="no example of the inputs, by which ranks would have known for which samples the numbers are",
                allowed="without an example, dropout of tensors with the samples in dim 0, and draws such as "
                "torch.rand_like(x) for them",
                fix=EXAMPLE,
            )
