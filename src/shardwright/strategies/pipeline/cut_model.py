"""Cuts a model into pipeline stages by its traced code, or, where that fails, by a record of its forward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwright.analysis.chunks.arguments import arguments_given
from shardwright.analysis.chunks.call_graph import sites
from shardwright.analysis.chunks.same_results import difference_from_forward
from shardwright.analysis.chunks.selected_values import crossing_selection
from shardwright.analysis.model_graph import ModelGraph
from shardwright.analysis.objects.reached import reached, unregistered_attributes
from shardwright.analysis.traced.structure import is_known, owners
from shardwright.analysis.traced.tracer import line_of
from shardwright.errors import LayoutError, PlanError, UnknownCodeError
from shardwright.formatting import first_line
from shardwright.forward_stack import Rung
from shardwright.plan.event_stages import EventStages
from shardwright.plan.plan import Job, Plan
from shardwright.plan.recompute import blocks_kept_whole
from shardwright.plan.stages import Stages
from shardwright.strategies.pipeline.cut import cut
from shardwright.strategies.pipeline.event_cut import cut_events
from shardwright.strategies.pipeline.same_code import not_followed

MOST_OF_ONE = 0.75
"""The share of all work above which one chunk with untraceable code is too large; a recorded forward is then cut."""


def cut_model(job: Job, plan: Plan, num_chunks: int, asked: Mapping[str, Any]) -> Stages | EventStages:
    """Returns the job's model cut into ``num_chunks`` chunks: by its traced code, or by a record of its forward.

    The record, made on the job's example, is cut if tensor parallelism runs the model on shards. It is also cut, if the
    job has an example and the layout no axis but ``pp`` and ``dp``, in three cases: the code cannot be traced; the
    output is a dict; or modules that cannot be traced leave over three quarters of the work in one chunk, and a cut of
    the record leaves less in its largest chunk. ``asked`` are keyword arguments for ``cut`` and ``cut_events``, such as
    the ``names`` of modules to begin chunks at.

    Raises: LayoutError, PlanError: the model cannot be cut. The error is an UnknownCodeError where planning
        again with ``job.recorded`` set may help.
    """
    values = None if job.graph is None else job.graph.values

    def by_record() -> EventStages:
        stages = cut_events(job.model, num_chunks, job.example, values=values, **asked)
        _check_writes(job, stages)
        return stages

    if runs_on_shards(plan):
        return by_record()
    traced: Stages | None = None
    failure: UnknownCodeError | PlanError | None = None
    try:
        whole = blocks_kept_whole(job.model, plan.layout)
        traced = cut(job.model, num_chunks, example=job.example, num_tokens=job.num_tokens, whole=whole, **asked)
        why = _held_elsewhere(job.model)
        if not why and job.example is not None:
            why = difference_from_forward(job.model, traced.chunked, job.example)
        if not why and job.graph is not None and (module := _keeps_between_stages(traced, job.graph)):
            why = f"'{module}' keeps what one of its calls computes in an attribute, for a call on another stage"
        if not why and (value := crossing_selection(traced.chunked)):
            why = f"values decide how many rows '{value}' has, which one stage would send to another"
        if why:
            traced = None
            raise not_followed(job.model, why, has_example=job.example is not None)
        if job.example is not None:
            modes = tuple(module.training for module in job.model.modules())
            traced = replace(traced, compared=(arguments_given(job.model, job.example), modes))
        if not traced.gives_dict and (not traced.unread or _most_work(traced) <= MOST_OF_ONE):
            return traced
    except (UnknownCodeError, PlanError) as error:  # unknown code, or inputs that it takes as *args or **kwargs
        failure = error
    except LayoutError:
        raise
    except Exception as error:  # the traced calls gave the user's code wrong values: the trace is wrong
        why = f"{type(error).__name__}: {first_line(error)}{line_of(error)}"
        failure = not_followed(job.model, why, has_example=job.example is not None)
        failure.__cause__ = error
    others = {factor.axis for factor in plan.layout.factors} - {"pp", "dp"}
    if job.example is not None and not others:
        try:
            recorded = by_record()
        except TypeError:  # the forward takes other arguments
            if not isinstance(failure, PlanError):
                raise
        else:
            if traced is None or traced.gives_dict or _most_work(recorded) < _most_work(traced):
                return recorded
    if failure is not None:
        if job.recorded and job.example is not None:  # recording may raise an error that says more
            with suppress(TypeError):
                by_record()
        raise failure
    assert traced is not None, "cut, or failed"
    if job.example is not None and others == {"tp"} and not job.recorded:
        raise UnknownCodeError(
            f"the stages of {type(job.model).__name__} would be cut from code that is not followed everywhere",
            given=f"an output that is a dict, or most of the work in one stage, under {plan.layout}",
            allowed="a record of the forward, with tensor parallelism that runs on shards",
            fix="leave out tp",
        )
    return traced


def _check_writes(job: Job, stages: EventStages) -> None:
    """Raises LayoutError if code between the modules that stages run writes to a parameter.

    Stages would not all make this write: a stage leaves the forward once its last module has run, and it has ghosts
    (meta tensors) in place of other stages' parameters.
    """
    written = {} if job.graph is None else job.graph.written_parameters()
    for name, path in written.items():
        if path in stages.opened:
            raise LayoutError(
                f"the forward writes to the parameter '{name}', and stages begin inside of the code that does",
                given=f"code of '{path or 'the model'}' that changes it in place, or replaces its tensor",
                allowed="such code in a module that one stage runs whole, as in a layer's own forward",
                fix="move the write into the forward of the module that has the parameter, or leave out pp",
            )


def _keeps_between_stages(stages: Stages, graph: ModelGraph) -> str:
    """Returns a module whose forward sets attributes and that several stages call, as RevIN's; "" if there is none."""
    chunks = defaultdict[str, set[int | None]](set)
    for _, site in sites(stages.chunked.graph):
        if site is not None:
            chunks[site.module].add(stages.chunked.chunk_of.get(site))
    several = {path for path, of in chunks.items() if len(of) > 1}
    if not several:  # so there is nothing to look up in a record
        return ""
    try:
        keeping = {path for path, _ in graph.run.recording.set_attributes}
    except Exception:  # the user's forward cannot be recorded
        return ""
    return min(several & keeping, default="")


def _held_elsewhere(model: nn.Module) -> str:
    """Returns which module holds a parameter of another one in a plain attribute, as text; "" if none does.

    The traced calls do not show that it reads the parameter, so its stage would have a copy that is never updated.
    """
    if all(map(is_known, model.modules())):
        return ""
    registered, homes = {id(module) for module in model.modules()}, defaultdict[str, set[str]](set)
    for path, _, _, name in owners(model, every_path=True):
        homes[name].add(path)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        seen: dict[int, Any] = {}
        for attribute, value in unregistered_attributes(module):
            parts = (part for _, part in reached(value, seen, registered, but=(Optimizer,)))
            held = (names[id(part)] for part in parts if id(part) in names)
            other = next((name for name in held if path not in homes[name]), "")
            if other:
                return f"'{attribute}' of {path or 'the model'} holds the parameter '{other}' of another module"
    return ""


def _most_work(stages: Stages | EventStages) -> float:
    """Returns the largest chunk's share of the model's work, from 0 to 1."""
    works = [cost.work for cost in stages.costs]
    return max(works) / (sum(works) or 1.0)


def runs_on_shards(plan: Plan) -> bool:
    """Returns whether tensor parallelism runs the model's own forward on tensor shards.

    Pipeline chunks are then cut from a record of the forward.
    """
    return Rung.ON_SHARDS in plan.wrapped.get("", {})
