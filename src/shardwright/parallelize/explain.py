"""``run.explain(path)``: one module of a run: its role, its parameters, its forward stack, and what it sends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwright.analysis.structure import kind_of
from shardwright.errors import PlanError, nearest
from shardwright.formatting import format_bytes
from shardwright.forward_stack import stack_of
from shardwright.mesh import Coord
from shardwright.plan.plan import LOSS, LayerRole, Plan
from shardwright.plan.traffic import gradient_shares, sum_dtype
from shardwright.sharding.words import cut_words

if TYPE_CHECKING:
    from shardwright.parallelize.run import Run

PLAIN = LayerRole("copied", "", "no strategy cuts it: every rank computes it whole")
"""What is done at a module of which no strategy says anything."""


def explained(run: Run, path: str) -> dict[str, Any]:
    """What :func:`explain_text` prints, as plain data for JSON. Raises PlanError: the run has no such module."""
    modules = {**dict(run.model.named_modules()), LOSS: run.loss}
    if path not in modules:
        raise _unknown(path, modules)
    plan, coord, module = run.plan, run.coord, modules[path]
    role = plan.roles.get(path, PLAIN)
    names = [name for name in _own_names(plan, path) if name in plan.compute]
    return {
        "module": path,
        "class": kind_of(module).__name__,
        "layout": str(plan.layout),
        "rank": run.world.rank,
        "role": {"name": role.name, "strategy": role.strategy, "why": role.why},
        "parameters": [_parameter(plan, coord, name) for name in names],
        "forward": list(_forward(modules, path)),
        "sends": [each for name in names for each in _sends(plan, coord, name)],
    }


def explain_text(found: Mapping[str, Any]) -> str:
    """One module in words: its class and role, its parameters, its forward outermost first, what it sends."""
    role, rank = found["role"], found["rank"]
    by = f" by {role['strategy']}" if role["strategy"] else ""
    lines = [
        f"'{found['module'] or 'the model'}', {found['class']}, on rank {rank} of {found['layout']}",
        f"role        {role['name'] or 'copied'}{by}: {role['why']}",
        "",
        "parameters" if found["parameters"] else "parameters  none of its own",
    ]
    for each in found["parameters"]:
        held = "nothing" if each["held"] is None else f"{each['held']} {each['computes_in']}"
        lines += [
            f"  {each['name']}  whole {each['shape']}",
            f"    to compute  {held} on this rank: {each['cut']}",
            f"    at rest     {each['elements_at_rest']:,} elements {each['rests_in']} on this rank: {each['rests']}",
        ]
    lines += ["", "forward, outermost first"]
    rows = [(each["rung"], each["module"], each["name"], each["by"]) for each in found["forward"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for rung, where, name, by in rows:
        lines.append(f"  {rung:{widths[0]}}  {where:{widths[1]}}  {name}" + (f" (by {by})" if by else ""))
    lines += ["", "sent in a step", *(f"  {each}" for each in found["sends"] or ["nothing for its parameters"])]
    return "\n".join(lines)


def first_rank_with(plan: Plan, path: str) -> int:
    """The first rank that holds parameters of a module or of those inside it; of one without any, that calls it."""
    inside = [use.parameter for use in plan.uses if path == "" or f"{use.module}.".startswith(f"{path}.")]
    for coord in plan.mesh.coords([axis for axis in plan.mesh.axes if axis == "pp"]):
        at = {**dict.fromkeys(plan.mesh.axes, 0), **coord}
        if any(plan.compute[name].num_elements(at) for name in inside) or _calls(plan, at, path, bool(inside)):
            return plan.mesh.rank(at)
    return 0


def _calls(plan: Plan, coord: Coord, path: str, has_parameters: bool) -> bool:
    if plan.stages is None or plan.schedule is None or has_parameters:
        return False
    chunks = plan.schedule.chunks_of(coord["pp"])
    if path == LOSS:
        return plan.schedule.num_chunks - 1 in chunks
    return any(f"{path}.".startswith(f"{call}.") for n in chunks for call in plan.stages.chunked.calls_of(n))


def _own_names(plan: Plan, path: str) -> Sequence[str]:
    """The parameters that a module uses, by their global names."""
    return list(dict.fromkeys(use.parameter for use in plan.uses if use.module == path))


def _parameter(plan: Plan, coord: Coord, name: str) -> dict[str, Any]:
    compute, rest = plan.compute[name], plan.state[name].parameter
    return {
        "name": name,
        "shape": list(compute.shape),
        "held": list(compute.local_shape(coord)) if compute.num_elements(coord) else None,
        "computes_in": _word(plan.compute_dtypes[name]),
        "cut": cut_words(compute),
        "elements_at_rest": rest.num_elements(coord),
        "rests_in": _word(plan.stored_dtypes[name]),
        "rests": cut_words(rest) + (f", in {plan.offloaded[name]} memory" if name in plan.offloaded else ""),
    }


def _word(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _forward(modules: Mapping[str, nn.Module], path: str) -> Iterator[dict[str, str]]:
    """What runs when the module is called, from the model's hooks down to the module's own code."""
    parts = path.split(".") if path else []
    outer = ["", *(".".join(parts[: number + 1]) for number in range(len(parts)))] if path != LOSS else [LOSS]
    for where in dict.fromkeys(outer):
        for each in stack_of(modules[where]).wrappers:
            yield {"rung": each.rung.name, "module": where or "the model", "name": each.name, "by": each.by}
    instead = next((each for each in stack_of(modules[path]).wrappers if each.replaces), None)
    own = f"{kind_of(modules[path]).__name__}.forward"
    own += "" if instead is None else f": {instead.rung.name} runs in its place"
    yield {"rung": "(own code)", "module": path or "the model", "name": own, "by": ""}


def _sends(plan: Plan, coord: Coord, name: str) -> Iterator[str]:
    """What is sent for a parameter in a step: gathered from slices, its gradient summed."""
    num_bytes = plan.compute[name].num_elements(coord) * plan.compute_dtypes[name].itemsize
    cut = [axis for axis in plan.state[name].optimizer.axes if axis not in plan.compute[name].axes]
    over = " ".join(axis for axis in cut if plan.mesh[axis] > 1)
    if over and num_bytes:
        when = "before each forward and each backward" if name in plan.unsharded_on_use else "once"
        yield f"{name}: {format_bytes(num_bytes)} gathered over {over} {when}, with its unit"
        if name not in plan.frozen:
            yield f"{name}: its gradient summed into slices over {over}, with its unit"
    for share in gradient_shares(plan, name, coord) if name not in plan.frozen else ():
        size = format_bytes(share.box.size * sum_dtype(plan, name).itemsize)
        yield f"{name}: {size} of gradient summed over {' '.join(share.axes)} once, with its unit"


def _unknown(path: str, modules: Mapping[str, object]) -> PlanError:
    near = nearest(path, modules)
    return PlanError(
        f"the model has no module '{path}'",
        given=path,
        allowed="the names of model.named_modules(), '' for the model, '(loss)' for the loss",
        fix=f"write {near or repr('')}",
    )
