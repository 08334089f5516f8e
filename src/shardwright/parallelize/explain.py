"""Describes one module of a run, for ``Run.explain`` and ``show --explain``: how it is parallelized, what it sends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shardwright.analysis.traced.structure import is_inside, kind_of
from shardwright.axes import mesh_axes
from shardwright.errors import PlanError, fix_for
from shardwright.formatting import format_bytes
from shardwright.forward_stack import stack_of
from shardwright.mesh import Coord
from shardwright.parallelize.rank_state import RankState
from shardwright.plan.plan import LOSS, LayerRole, Plan
from shardwright.plan.traffic import gradient_shares, sum_dtype
from shardwright.sharding.words import cut_words, numbers

DEFAULT_ROLE = LayerRole("copied", "", "no strategy cuts it: every rank computes it whole")
"""The role of a module that no strategy has planned: it is copied to every rank."""


def explained(run: RankState, path: str) -> dict[str, Any]:
    """Returns how one module is parallelized on this rank, as plain data for JSON.

    The data has the module's role (such as column-parallel) and the reason for it, its parameters, the wrappers of its
    forward, and the collectives of a step for its parameters. ``path`` is the module's name, "" for the model or
    "(loss)" for the loss. :func:`explain_text` makes text of the data.

    Raises: PlanError: the model has no such module.
    """
    modules = {**dict(run.model.named_modules()), LOSS: run.loss}
    if path not in modules:
        raise PlanError(
            f"the model has no module '{path}'",
            given=path,
            allowed="the names of model.named_modules(), '' for the model, '(loss)' for the loss",
            fix=fix_for(path, modules),
        )
    plan, coord, module = run.plan, run.coord, modules[path]
    role = plan.roles.get(path, DEFAULT_ROLE)
    names = list(dict.fromkeys(use.parameter for use in plan.uses if use.module == path))
    return {
        "module": path,
        "class": kind_of(module).__name__,
        "layout": str(plan.layout),
        "rank": run.world.rank,
        "role": {"name": role.name, "strategy": role.strategy, "why": why_with_stages(plan, path, role.why)},
        "parameters": [_parameter(plan, coord, name) for name in names],
        "forward": list(_forward(modules, path)),
        "sends": [line for name in names for line in _sends(plan, coord, name)],
    }


def why_with_stages(plan: Plan, path: str, why: str) -> str:
    """Returns ``why``, text on why a module is parallelized as it is, with the pipeline stages that call the module.

    In the text "every rank computes" becomes, for instance, "the ranks of stage 1 compute". The text is unchanged
    without a pipeline, or if all stages call the module or none does.
    """
    if plan.schedule is None or plan.stages is None:
        return why
    schedule = plan.schedule
    stages = {
        schedule.stage_of[chunk]
        for chunk in range(schedule.num_chunks)
        for call in plan.stages.chunked.calls_of(chunk)
        if call.startswith(path) or path.startswith(call)  # a cheap test first, which excludes most calls
        if f"{path}.".startswith(f"{call}.") or f"{call}.".startswith(f"{path}.")
    }
    if not 0 < len(stages) < schedule.num_stages:
        return why
    named = f"stage{'s' * (len(stages) > 1)} {numbers(sorted(stages))}"
    return why.replace("every rank computes", f"the ranks of {named} compute")


def explain_text(explanation: Mapping[str, Any]) -> str:
    """Returns the result of :func:`explained`, how one module is parallelized, as text of several lines."""
    role, rank = explanation["role"], explanation["rank"]
    by = f" by {role['strategy']}" if role["strategy"] else ""
    lines = [
        f"'{explanation['module'] or 'the model'}', {explanation['class']}, on rank {rank} of {explanation['layout']}",
        f"role        {role['name'] or 'copied'}{by}: {role['why']}",
        "",
        "parameters" if explanation["parameters"] else "parameters  none of its own",
    ]
    for data in explanation["parameters"]:
        local_part = "nothing" if data["held"] is None else f"{data['held']} {data['computes_in']}"
        lines += [
            f"  {data['name']}  whole {data['shape']}",
            f"    to compute  {local_part} on this rank: {data['cut']}",
            f"    to store    {data['elements_stored']:,} elements {data['stored_in']} on this rank: {data['stored']}",
        ]
    lines += ["", "forward, outermost first"]
    rows = [(wrapper["rung"], wrapper["module"], wrapper["name"], wrapper["by"]) for wrapper in explanation["forward"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for rung, where, name, by in rows:
        lines.append(f"  {rung:{widths[0]}}  {where:{widths[1]}}  {name}" + (f" (by {by})" if by else ""))
    lines += ["", "sent in a step for its parameters", *(f"  {line}" for line in explanation["sends"] or ["nothing"])]
    return "\n".join(lines)


def first_rank_with(plan: Plan, path: str) -> int:
    """Returns the number of the first rank that holds elements of the parameters of a module or its children.

    For a module without parameters it is the first rank that calls the module. If no rank is found it is 0, for example
    for a module without parameters in a layout without pipeline stages. ``path`` is the module's name.
    """
    inside = [use.parameter for use in plan.uses if is_inside(use.module, path)]
    for coord in plan.mesh.coords([axis for axis in plan.mesh.axes if axis in mesh_axes("stages")]):
        at = {**dict.fromkeys(plan.mesh.axes, 0), **coord}
        if any(plan.compute[name].num_elements(at) for name in inside) or (not inside and _calls(plan, at, path)):
            return plan.mesh.rank(at)
    return 0


def _calls(plan: Plan, coord: Coord, path: str) -> bool:
    if plan.stages is None or plan.schedule is None:
        return False
    chunks = plan.schedule.chunks_of(coord["pp"])
    if path == LOSS:
        return plan.schedule.num_chunks - 1 in chunks
    return any(f"{path}.".startswith(f"{call}.") for n in chunks for call in plan.stages.chunked.calls_of(n))


def _parameter(plan: Plan, coord: Coord, name: str) -> dict[str, Any]:
    compute, stored = plan.compute[name], plan.state[name].parameter
    return {
        "name": name,
        "shape": list(compute.shape),
        "held": list(compute.local_shape(coord)) if compute.num_elements(coord) else None,
        "computes_in": str(plan.compute_dtypes[name]).removeprefix("torch."),
        "cut": cut_words(compute),
        "elements_stored": stored.num_elements(coord),
        "stored_in": str(plan.stored_dtypes[name]).removeprefix("torch."),
        "stored": cut_words(stored) + (f", in {plan.offloaded[name]} memory" if name in plan.offloaded else ""),
    }


def _forward(modules: Mapping[str, nn.Module], path: str) -> Iterator[dict[str, str]]:
    """Yields the wrappers around a module's forward, from the model's outermost one to the module's own code."""
    parts = path.split(".") if path else []
    outer = ["", *(".".join(parts[: number + 1]) for number in range(len(parts)))] if path != LOSS else [LOSS]
    for where in dict.fromkeys(outer):
        for wrapper in stack_of(modules[where]).wrappers:
            yield {"rung": wrapper.rung.name, "module": where or "the model", "name": wrapper.name, "by": wrapper.by}
    instead = next((wrapper for wrapper in stack_of(modules[path]).wrappers if wrapper.replaces), None)
    own = f"{kind_of(modules[path]).__name__}.forward"
    own += "" if instead is None else f": {instead.rung.name} runs in its place"
    yield {"rung": "(own code)", "module": path or "the model", "name": own, "by": ""}


def _sends(plan: Plan, coord: Coord, name: str) -> Iterator[str]:
    """Yields a text line for each collective of a step for one parameter: its unshards, the sums of its gradient."""
    num_bytes = plan.compute[name].num_elements(coord) * plan.compute_dtypes[name].itemsize
    cut = [axis for axis in plan.state[name].optimizer.axes if axis not in plan.compute[name].axes]
    over = " ".join(axis for axis in cut if plan.mesh[axis] > 1)
    if over and num_bytes:
        when = "before each forward and each backward" if name in plan.unsharded_on_use else "once"
        yield f"{name}: {format_bytes(num_bytes)} gathered over {over} {when}, with its param group"
        if name not in plan.frozen:
            yield f"{name}: its gradient summed into slices over {over}, with its param group"
    for share in gradient_shares(plan, name, coord) if name not in plan.frozen else ():
        size = format_bytes(share.box.size * sum_dtype(plan, name).itemsize)
        yield f"{name}: {size} of gradient summed over {' '.join(share.axes)} once, with its param group"
