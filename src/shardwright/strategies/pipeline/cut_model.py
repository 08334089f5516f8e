"""Cuts a model into stages: by its code where that can be followed, else by a record of its forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.analysis.tracer import line_of
from shardwright.errors import LayoutError, PlanError, UnknownCodeError
from shardwright.forward_stack import Rung
from shardwright.plan.event_stages import EventStages
from shardwright.plan.plan import Job, Plan
from shardwright.plan.stages import Stages
from shardwright.strategies.pipeline.cut import cut
from shardwright.strategies.pipeline.event_cut import cut_events

MOST_OF_ONE = 0.75
"""The share of the work from which on one chunk holds so much of traced code that a record is tried in its place."""


def cut_model(job: Job, plan: Plan, num_chunks: int, asked: Mapping[str, Any]) -> Stages | EventStages:
    """Cuts a model by its code where that can be followed, else by a record of its forward on the example."""
    if runs_on_parts(plan):
        return cut_events(job.model, num_chunks, job.example, **asked)
    found: Stages | None = None
    failure: UnknownCodeError | PlanError | None = None
    try:
        found = cut(job.model, num_chunks, example=job.example, num_tokens=job.num_tokens, **asked)
        if not found.gives_dict and (not found.unread or _most_work(found) <= MOST_OF_ONE):
            return found
    except (UnknownCodeError, PlanError) as error:  # unknown code, or inputs that it takes as *args or **kwargs
        failure = error
    except LayoutError:
        raise
    except Exception as error:  # of the user's own code, on other values than it makes itself: it was followed wrongly
        failure = UnknownCodeError(
            f"the code of {type(job.model).__name__} is not followed as it runs",
            given=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}{line_of(error)}",
            allowed="code that torch can trace, or an example of the inputs, on which the forward is recorded",
            fix="give parallelize an example, or leave out pp",
        )
        failure.__cause__ = error
    others = {factor.axis for factor in plan.layout.factors} - {"pp", "dp"}
    if job.example is not None and not others:
        try:
            recorded = cut_events(job.model, num_chunks, job.example, **asked)
        except TypeError:  # the forward takes other arguments
            if not isinstance(failure, PlanError):
                raise
        else:
            if found is None or found.gives_dict or _most_work(recorded) < _most_work(found):
                return recorded
    if failure is not None:
        raise failure
    assert found is not None, "cut, or failed"
    if job.example is not None and others == {"tp"} and not job.recorded:
        raise UnknownCodeError(
            f"the stages of {type(job.model).__name__} would be cut from code that is not followed everywhere",
            given=f"an output that is a dict, or most of the work in one stage, under {plan.layout}",
            allowed="a record of the forward, with tensor parallelism that runs on parts",
            fix="leave out tp",
        )
    return found


def _most_work(stages: Stages | EventStages) -> float:
    """Returns the share of all work that the chunk with the most work has."""
    works = [cost.work for cost in stages.costs]
    return max(works) / (sum(works) or 1.0)


def runs_on_parts(plan: Plan) -> bool:
    """Whether the modules run on parts of tensors, cut by a record of the forward: then stages are cut by it too."""
    return Rung.ON_PARTS in plan.wrapped.get("", {})
