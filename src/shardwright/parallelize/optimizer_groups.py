"""An optimizer's groups of parameters under a layout: by name and plain shape, since a rank's tensors may be slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardwright.errors import PlanError
from shardwright.plan.plan import Plan

Grouping = Callable[[str, tuple[int, ...]], Mapping[str, Any] | None]
"""Returns a parameter's options from its name and its shape in the plain model; None leaves it out."""


def groups_of(group: Grouping, parameters: Mapping[str, nn.Parameter], plan: Plan) -> list[dict[str, Any]]:
    """Returns the groups, one for each set of options: as many on every rank, of which a rank may have no parameter.

    Raises: PlanError: the function returns something else, or leaves out every parameter.

    >>> from shardwright.layout import Layout
    >>> from shardwright.plan.plan import Job
    >>> model = nn.Linear(2, 3)
    >>> plan = Plan.of(Job(model, nn.Identity()), Layout.parse("dp2"))
    >>> by_dims = groups_of(lambda name, shape: {"lr": 0.1 * len(shape)}, dict(model.named_parameters()), plan)
    >>> [(group["lr"], len(group["params"])) for group in by_dims]
    [(0.2, 1), (0.1, 1)]
    """
    found: dict[str, dict[str, Any]] = {}
    for name, layout in plan.compute.items():
        options = None if name in plan.frozen else group(name, layout.shape)
        if options is None:
            continue
        if not isinstance(options, Mapping):
            raise PlanError(
                f"the options of '{name}' are no mapping",
                given=f"{options!r}, of the function given as parameters",
                allowed="options of the optimizer by name, {} for those of all, or None to leave a parameter out",
                fix='write parameters=lambda name, shape: {"weight_decay": 0.1 if len(shape) > 1 else 0.0}',
            )
        members = found.setdefault(repr(sorted(options.items())), {**options, "params": []})["params"]
        members += [parameters[name]] if name in parameters else []  # else it belongs to another pipeline stage
    if not found:
        raise PlanError(
            "the function given as parameters leaves out every parameter",
            given=f"None for {len(plan.compute)} parameters",
            allowed="options for one parameter or more",
            fix="return {} for parameters with the options of all",
        )
    return list(found.values())


def check_groups(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], plan: Plan) -> None:
    """Raises PlanError for a group without parameters if this rank's tensors are slices, whose dims are not the plain.

    Stages may have no parameter of a group, so there such a group says nothing.
    """
    matrices = (name for name in parameters if name in plan.state and len(plan.compute[name].shape) > 1)
    flat = next((name for name in matrices if plan.state[name].parameter.is_flat), None)
    empty = [number for number, group in enumerate(optimizer.param_groups) if not group["params"]]
    if empty and flat is not None and plan.stages is None:
        raise PlanError(
            f"the optimizer's group {empty[0]} has no parameter, and this rank stores slices of one dim",
            given=f"'{flat}', of {list(plan.compute[flat].shape)} in the plain model, is a slice of "
            f"{list(parameters[flat].shape)} under {plan.layout}",
            allowed="groups by name, or by the shape in the plain model",
            fix="write run.optimizer(kind, parameters=lambda name, shape: "
            f"{_example(optimizer.param_groups[empty[0]], optimizer)})",
        )


def _example(group: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> str:
    common = {"params": group["params"], **optimizer.defaults}
    options = {key: value for key, value in group.items() if value != common.get(key)}
    return f"{options} if len(shape) > 1 else {{}}"
