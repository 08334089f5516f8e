"""Builds an optimizer's parameter groups from a function of a parameter's name and its shape in the plain model.

The shape is not that of a rank's own tensor, which may be a slice. Groups that a user chose by the dims of such slices
are found and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright.comm.agreement import gather_json
from shardwright.comm.axis import Axis
from shardwright.errors import PlanError
from shardwright.plan.plan import Plan

Grouping = Callable[[str, tuple[int, ...]], Mapping[str, Any] | None]
"""A function that returns a parameter's options from its name and its shape in the plain model; None leaves it out."""


def _key_of(options: Mapping[str, Any]) -> str:
    """Returns a text that is equal for equal options, with all digits of numbers in tensors, unlike their ``repr``."""
    plain = tree_map_only(Tensor, lambda tensor: (str(tensor.dtype), tensor.tolist()), dict(options))
    return repr(sorted(plain.items()))


def groups_of(group: Grouping, parameters: Mapping[str, nn.Parameter], plan: Plan) -> list[dict[str, Any]]:
    """Returns an optimizer's parameter groups, one for each set of options, the same number of groups on every rank.

    ``group(name, shape)`` returns the options of a parameter by its name and its shape in the plain model, or None to
    leave the parameter out. Parameters that were frozen when the model was laid out are left out too. A group may have
    no parameter on some ranks.

    Raises: PlanError: the function returns neither a mapping nor None, or every parameter is left out.

    >>> from shardwright.layout import Layout
    >>> from shardwright.plan.plan import Job
    >>> model = nn.Linear(2, 3)
    >>> plan = Plan.of(Job(model, nn.Identity()), Layout.parse("dp2"))
    >>> by_dims = groups_of(lambda name, shape: {"lr": 0.1 * len(shape)}, dict(model.named_parameters()), plan)
    >>> [(group["lr"], len(group["params"])) for group in by_dims]
    [(0.2, 1), (0.1, 1)]
    """
    by_options: dict[str, dict[str, Any]] = {}
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
        members = by_options.setdefault(_key_of(options), {**options, "params": []})["params"]
        members += [parameters[name]] if name in parameters else []  # else it belongs to another pipeline stage
    if not by_options:
        raise PlanError(
            "the function given as parameters leaves out every parameter",
            given=f"None for {len(plan.compute)} parameters",
            allowed="options for one parameter or more",
            fix="return {} for parameters with the options of all",
        )
    return list(by_options.values())


def check_groups(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    plan: Plan,
    everyone: Axis | None = None,
    *,
    states_decay: bool = False,
) -> None:
    """Raises PlanError if parameter groups were chosen by the dims of a rank's tensors where those are flat shards.

    A rule such as ``p.dim() > 1`` finds no matrix among shards of one dim, so a group is left without parameters, or
    all groups have a weight decay of 0. The second counts only with ``states_decay``, which says that every group that
    the user gave has a ``weight_decay`` of its own. If one group decays more than another and has a matrix, the groups
    were not chosen by dims, and there is no error.

    On a pipeline stage a group may be empty for another reason. With stages, the error is therefore raised only if
    ``everyone``, the axis of all ranks, is given, a rank finds such groups, and no rank has a matrix in the group with
    the largest weight decay. It is then raised on every rank.

    Traffic: with stages and ``everyone``, one gather of text, for which all ranks call it; else none.
    """
    groups = optimizer.param_groups
    decays = [float(group.get("weight_decay", 0.0)) for group in groups]
    place_of = {id(p): place for place, group in enumerate(groups) for p in group["params"]}
    matrices = [name for name in parameters if name in plan.state and len(plan.compute[name].shape) > 1]
    flat = [name for name in matrices if plan.state[name].parameter.is_flat and id(parameters[name]) in place_of]
    decayed = any(decays[place_of[id(parameters[name])]] == max(decays) for name in flat)
    empty = next((place for place, group in enumerate(groups) if not group["params"]), None)
    # each group sets weight_decay=0 itself, though one argument for all groups would do: they were meant to differ
    nothing = states_decay and max(decays) == 0.0
    by_name = decayed and max(decays) > min(decays)  # a rule by dims finds no matrix for the group that decays most
    verdict = [bool(flat) and (empty is not None or nothing) and not by_name, decayed and not nothing]
    if plan.stages is not None:
        verdicts = [] if everyone is None else gather_json(everyone, verdict)
        verdict[0] = any(wrong for wrong, _ in verdicts) and not any(right for _, right in verdicts)
    if verdict[0]:
        options = groups[empty] if empty is not None else {"params": [], "weight_decay": 0.1}
        raise PlanError(
            f"the optimizer's group {empty} has no parameter, and this rank stores slices of one dim"
            if empty is not None
            else "no group of the optimizer decays, and this rank stores slices of one dim",
            given=f"'{flat[0]}', of {list(plan.compute[flat[0]].shape)} in the plain model, is a slice of "
            f"{list(parameters[flat[0]].shape)} under {plan.layout}"
            if flat
            else f"slices on other stages under {plan.layout}",
            allowed="groups by name, or by the shape in the plain model",
            fix=f"write run.optimizer(kind, parameters=lambda name, shape: {_example(options, optimizer)})"
            + ("" if empty is not None else ", or weight_decay=0.0 beside groups that do not name it"),
        )


def _example(group: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> str:
    common = {"params": group["params"], **optimizer.defaults}
    options = {key: value for key, value in group.items() if value != common.get(key)}
    return f"{options} if len(shape) > 1 else {{}}"
