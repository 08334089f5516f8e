"""What ranks that are threads share under ``verify`` in tests: what is equal on all of them is computed once.

The trial of an optimizer, which knows nothing of the model, is made once in a process for each class and its options.
Planning takes longer than the steps of a small model, and each rank would do it again. That ranks which plan for
themselves agree is held by ``tests/parallelize/test_own_plans.py``, by every test that calls ``parallelize`` itself,
and by those of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from importlib import import_module
from threading import Lock, local
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from shardwright.errors import LayoutError
from shardwright.parallelize.planning import without_storage
from shardwright.plan.plan import Plan


def for_one_rank(plan: Plan) -> Plan:
    """The plan with stages of its own: a stage sets values in the model that it reads its code from."""
    if plan.stages is None:
        return plan
    return replace(plan, stages=replace(plan.stages, model=without_storage(plan.stages.model)))


@contextmanager
def one_plan_in_verify() -> Iterator[None]:
    """Within it, ranks that ``verify`` starts as threads share its plan, shares and draws.

    All ranks that are threads share the grids that an error suggests.
    """
    verify, parallelize, planning = (
        import_module(f"shardwright.{name}") for name in ("verify", "parallelize", "parallelize.planning")
    )
    by_model: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
    lock, here = Lock(), local()
    suggestions: dict[Any, str] = {}
    suggesting = Lock()

    def once(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def found(*args: Any, **named: Any) -> Any:
            shared = getattr(here, "shared", None)
            if shared is None:
                return function(*args, **named)
            with shared["lock"]:
                if function.__name__ not in shared:
                    shared[function.__name__] = function(*args, **named)
                return shared[function.__name__]

        return found

    def shared_by(model: Any) -> dict[str, Any]:
        with lock:
            return by_model.setdefault(model, {"lock": Lock()})

    def plan_of_verify(job: Any, layout: Any, strategies: Any = None) -> Any:
        shared_by(job.model)["plan"] = make_plan(job, layout, strategies), strategies
        if job.graph is not None:
            _ = job.graph.draws  # recorded here once, and not by all ranks at the same time
            shared_by(job.model)["graph"] = job.graph
        return shared_by(job.model)["plan"][0]

    def job_of_rank(*args: Any, **named: Any) -> Any:
        job = job_for(*args, **named)
        return job._replace(graph=getattr(here, "shared", {}).get("graph", job.graph))

    def plan_of_rank(job: Any, layout: Any, strategies: Any = None) -> Any:
        (plan, chosen), given = getattr(here, "shared", {}).get("plan", ((None, ()), strategies))
        if plan is None or given is not None:  # strategies of a test may be other ones on each rank
            return make_plan(job, layout, strategies)
        with here.shared["lock"]:
            return for_one_rank(plan), chosen

    def shares_of_verify(job: Any, plan: Any) -> Any:
        shared = shared_by(job.model)
        return shared["shares_of"] if "shares_of" in shared else shares_of(job, plan)

    def suggested(error: Any, job: Any, layout: Any) -> Any:
        shapes = tuple((name, each.shape) for name, each in job.model.named_parameters())
        kinds = tuple(type(module) for module in job.model.modules())
        key = error.what, error.given, error.allowed, layout, shapes, kinds
        with suggesting:  # each rank is refused, and would try the same grids
            if key not in suggestions:
                suggestions[key] = str(with_suggestions(error, job, layout))
            return LayoutError(suggestions[key])

    def of_verify(model: Any, *args: Any, **named: Any) -> Any:
        here.shared = shared_by(model)  # as long as the rank's thread
        return plain(model, *args, **named)

    make_plan, job_for, plain = parallelize.make_plan, parallelize.job_for, parallelize.parallelize
    shares_of, with_suggestions = parallelize.shares_of, planning.with_suggestions
    with ExitStack() as stack:
        for module, name, now in (
            (verify, "make_plan", plan_of_verify),
            (verify, "parallelize", of_verify),
            (verify, "shares_of", shares_of_verify),
            (parallelize, "shares_of", once(shares_of)),
            (parallelize, "make_plan", plan_of_rank),
            (parallelize, "job_for", job_of_rank),
            (planning, "with_suggestions", suggested),
        ):
            stack.enter_context(mock.patch.object(module, name, now))
        yield
