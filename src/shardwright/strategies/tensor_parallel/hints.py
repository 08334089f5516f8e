"""Compares a model's own ``tp_plan`` (Hugging Face Transformers) with the cuts that its operators allow.

Models of that library have a mapping ``tp_plan``, from names (with ``*`` for numbers) to styles such as ``colwise``.
Here the operators of a model decide how it is cut; where its ``tp_plan`` asks for another cut, ``show`` prints both.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import nn

from shardwright.plan.plan import Plan

STYLES = {
    "colwise": -2, "colwise_gather_output": -2, "colwise_rep": -2, "packed_colwise": -2, "embedding_rowwise": -2,
    "rowwise": -1, "rowwise_rep": -1, "rowwise_split_input": -1, "packed_rowwise": -1, "embedding_colwise": -1,
}  # fmt: skip
"""For each ``tp_plan`` style, the dim of a weight that it cuts, counted from the last (-1)."""


def hints_of(model: nn.Module) -> dict[str, str]:
    """Returns the ``tp_plan`` style of each parameter of two dims or more, by name; empty without a ``tp_plan``.

    >>> model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    >>> model.tp_plan = {"0": "colwise", "1.weight": "rowwise"}
    >>> hints_of(model)
    {'0.weight': 'colwise', '1.weight': 'rowwise'}
    """
    styles: list[tuple[re.Pattern[str], str]] = []
    for path, module in model.named_modules():
        plan = getattr(module, "tp_plan", None)
        for name, style in plan.items() if isinstance(plan, Mapping) else ():
            pattern = re.escape(f"{path}.{name}".lstrip(".")).replace(r"\*", r"\d+")
            styles.append((re.compile(rf"{pattern}(\.[^.]+)?"), style))
    names = [name for name, parameter in model.named_parameters() if parameter.dim() > 1] if styles else []
    hints = ((name, next((style for pattern, style in styles if pattern.fullmatch(name)), None)) for name in names)
    return {name: style for name, style in hints if style is not None}


def with_hints(model: nn.Module, plan: Plan, axes: Collection[str]) -> Plan:
    """Returns the plan with a remark for ``show`` on each layer that the model's ``tp_plan`` cuts in another dim.

    ``axes`` are the mesh axes that cut weights; without any the plan is unchanged.
    """
    roles = dict(plan.roles)
    for name, style in hints_of(model).items() if axes else ():
        layout, path, wanted = plan.compute[name], name.rpartition(".")[0], STYLES.get(style)
        cut = {dim for axis, dim in layout.cut_dims.items() if axis in axes}
        if wanted is not None and len(layout.shape) + wanted not in cut and path in roles:
            why = f"{roles[path].why}; its tp_plan says {style}, and its operators decide"
            roles[path] = roles[path]._replace(why=why)
    return replace(plan, roles=roles)
