"""What share of a model's parameter bytes each axis of a layout cuts, and why the largest other layers are left whole.

A layout may be equal to one device because it cut nothing: ``show`` and ``verify`` state the shares beside the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from shardwright.axes import layout_axes
from shardwright.plan.plan import Plan

LEAST = 0.5
"""Below this share of an axis that is there to cut parameters, what was left whole is named."""

_NAMED = 3
_PICTURE_ROWS = 2


@dataclass(frozen=True)
class Share:
    """The share of parameter bytes that one factor of a layout cuts, in compute or between steps.

    ``is_low``: the factor is there to cut parameters, and cuts less than :data:`LEAST`. ``whole`` are the largest
    modules with parameters that it leaves whole: name, share of all bytes, and why.
    """

    factor: str
    share: float
    is_low: bool
    whole: tuple[tuple[str, float, str], ...]

    def __str__(self) -> str:
        text = f"{self.factor} cuts {_percent(self.share)} of the parameters"
        if not self.is_low or not self.whole:
            return text
        return f"{text}; whole are {'; '.join(f'{path} ({_percent(size)}: {why})' for path, size, why in self.whole)}"


def shares(plan: Plan) -> tuple[Share, ...]:
    """Returns the share of each factor of a layout that cuts parameters, or is there to cut them.

    >>> from torch import nn
    >>> from shardwright.layout import Layout
    >>> from shardwright.parallelize.planning import job_for, make_plan
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Softmax(-1), nn.Linear(4, 96))
    >>> for share in shares(make_plan(job_for(model, nn.Identity(), (line := Layout.parse("dp2 tp2"))), line)[0]):
    ...     print(share)
    tp2 cuts 12.9 % of the parameters; whole are 4 (86.3 %: Linear: every rank computes it whole)
    """
    return tuple(_shares(plan))


def _shares(plan: Plan) -> Iterator[Share]:
    sizes = {name: prod(layout.shape) * plan.stored_dtypes[name].itemsize for name, layout in plan.compute.items()}
    total = sum(sizes.values()) or 1
    for factor in plan.layout.factors:
        axes = {axis for axis in factor.mesh_axes if plan.mesh[axis] > 1}
        whole = [name for name in plan.compute if not axes.intersection(_axes_of(plan, name))]
        share = 1 - sum(sizes[name] for name in whole) / total
        spatial = any(plan.inputs.get(axis) == _PICTURE_ROWS for axis in axes)
        cuts = layout_axes()[factor.axis].kind != "copies" and not spatial and bool(axes)
        if share or cuts:
            left = tuple((path, size / total, why) for path, size, why in _largest(plan, set(whole), sizes))
            yield Share(str(factor), share, cuts and share < LEAST, left)


def _axes_of(plan: Plan, name: str) -> set[str]:
    """The axes that cut a parameter in compute, or it, its gradient or its optimizer state between steps."""
    state = plan.state[name]
    layouts = (plan.compute[name], state.parameter, state.gradient, state.optimizer)
    return {axis for layout in layouts for axis in layout.axes}


def _largest(plan: Plan, whole: set[str], sizes: dict[str, int]) -> list[tuple[str, int, str]]:
    """Returns the largest modules with all their parameters in ``whole``, their bytes, and why they are whole."""
    users: dict[str, str] = {}
    for use in plan.uses:
        users.setdefault(use.parameter, use.module)
    partly = {users.get(name, name) for name in plan.compute if name not in whole}
    found: dict[str, int] = {}
    for path, size in ((users.get(name, name), sizes[name]) for name in plan.compute if name in whole):
        if path not in partly:  # the bias of a row-parallel layer is whole, the layer is not
            found[path] = found.get(path, 0) + size
    ordered = sorted(found.items(), key=lambda each: -each[1])[:_NAMED]
    return [(path or "the model", size, _why(plan, path)) for path, size in ordered]


def _why(plan: Plan, path: str) -> str:
    role = plan.roles.get(path)
    return role.why if role is not None else "no strategy cuts it"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
