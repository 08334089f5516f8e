"""Which optimizers update each element alone, so that a slice of a tensor can be stepped by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import PlanError, explain
from shardwright.strategy import Plan


def check_elementwise(kind: type[torch.optim.Optimizer], options: Mapping[str, Any], plan: Plan) -> None:
    """Raises PlanError for an optimizer that looks at more than a rank has in hand under this plan."""
    cut = [name for name, rest in plan.rest.items() if rest.optimizer.axes or name in plan.offloaded]
    flat = any(name in plan.offloaded or plan.rest[name].optimizer != plan.compute[name] for name in cut)
    if cut and not is_elementwise(kind, options, flat=flat):
        raise PlanError(
            explain(
                f"{kind.__name__} looks at whole tensors, and '{cut[0]}' is not whole on every rank",
                given=f"{kind.__name__} under {plan.layout}",
                allowed="optimizers that update each element alone: SGD, Adam, AdamW, RMSprop, Adagrad, ...",
                fix="use AdamW, or a layout that cuts no parameter",
            )
        )
    if plan.offloaded and not is_elementwise(kind, options, flat=True, in_turn=True):
        raise PlanError(
            explain(
                f"{kind.__name__} counts its steps for all parameters together, and state on '{plan.layout}' is "
                "updated in parts",
                given=f"{kind.__name__} under {plan.layout}",
                allowed="optimizers that keep nothing but for each parameter: SGD, Adam, AdamW, RMSprop, Adagrad, ...",
                fix="use AdamW, or leave out offload",
            )
        )


def is_elementwise(
    kind: type[torch.optim.Optimizer], options: Mapping[str, Any], *, flat: bool = True, in_turn: bool = False
) -> bool:
    """Whether stepping a tensor whole and in parts gives the same: found out by doing it.

    Parts are some of its rows, or of its columns; with ``flat`` also ranges of its elements, in one dim, that end
    inside a row. With ``in_turn`` each part has a step of its own.

    >>> is_elementwise(torch.optim.AdamW, {"lr": 0.1}), is_elementwise(torch.optim.Adafactor, {"lr": 0.1})
    (True, False)
    """
    start = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)
    gradients = [torch.linspace(1, 3, 24, dtype=torch.float64).view(6, 4).sin() * k for k in (1.0, -2.0, 0.5)]

    def stepped(parts: Callable[[Tensor], Sequence[Tensor]]) -> Sequence[Tensor]:
        parameters = [nn.Parameter(part.clone()) for part in parts(start)]
        optimizer = kind(parameters, **options)
        for gradient in gradients:
            for parameter, part in zip(parameters, parts(gradient), strict=True):
                parameter.grad = part.clone()
                if in_turn:
                    optimizer.step()
                    parameter.grad = None
            if not in_turn:
                optimizer.step()
        return [parameter.detach() for parameter in parameters]

    ways: list[Callable[[Tensor], Sequence[Tensor]]] = [lambda t: t.split([2, 4]), lambda t: t.split([1, 3], dim=1)]
    ways += [lambda t: t.reshape(-1).split([5, 1, 11, 7])] if flat else []
    try:
        (whole,) = stepped(lambda tensor: (tensor,))
        return all(
            torch.allclose(found, part, rtol=1e-12, atol=1e-12)
            for parts in ways
            for found, part in zip(stepped(parts), parts(whole), strict=True)
        )
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False  # it needs a closure, or another shape: not an update of single elements
