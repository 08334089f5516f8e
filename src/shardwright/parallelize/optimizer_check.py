"""Which optimizers update each element alone, so that a slice of a tensor can be stepped by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import PlanError
from shardwright.plan.plan import Plan


def check_elementwise(
    kind: type[torch.optim.Optimizer], options: Mapping[str, Any], plan: Plan, given: Sequence[Any] = ()
) -> None:
    """Raises PlanError for an optimizer that looks at more than a rank has in hand under this plan.

    ``given`` are the parameters as torch takes them: groups among them may have options of their own.
    """
    cut = [name for name, rest in plan.state.items() if rest.optimizer.axes or name in plan.offloaded]
    flat = any(name in plan.offloaded or plan.state[name].optimizer != plan.compute[name] for name in cut)
    own = [{key: each[key] for key in each if key != "params"} for each in given if isinstance(each, Mapping)]
    groups = [{}, *(group for group in own if group)]
    if cut and not is_elementwise(kind, options, groups, flat=flat):
        raise PlanError(
            f"{kind.__name__} looks at whole tensors or at all together, and '{cut[0]}' is not whole on every rank",
            given=f"{kind.__name__} under {plan.layout}",
            allowed="optimizers that update each element alone: SGD, Adam, AdamW, RMSprop, Adagrad, ...",
            fix="use AdamW, or a layout that cuts no parameter",
        )
    if plan.offloaded and not is_elementwise(kind, options, groups, flat=True, in_turn=True):
        raise PlanError(
            f"{kind.__name__} counts its steps for all parameters together, and state on '{plan.layout}' is "
            "updated in parts",
            given=f"{kind.__name__} under {plan.layout}",
            allowed="optimizers that keep nothing but for each parameter: SGD, Adam, AdamW, RMSprop, Adagrad, ...",
            fix="use AdamW, or leave out offload",
        )


def is_elementwise(
    kind: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]] = ({},),
    *,
    flat: bool = True,
    in_turn: bool = False,
) -> bool:
    """Whether stepping a tensor whole and in parts gives the same: found out by doing it.

    Parts are some of its rows, or of its columns; with ``flat`` also ranges of its elements, in one dim, that end
    inside a row. They are stepped together, and by an optimizer for each. With ``in_turn`` each part has a step of its
    own. There is such a tensor in each of ``groups``, which may have options of its own.

    >>> is_elementwise(torch.optim.AdamW, {"lr": 0.1}), is_elementwise(torch.optim.Adafactor, {"lr": 0.1})
    (True, False)
    """
    start = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)
    gradients = [torch.linspace(1, 3, 24, dtype=torch.float64).view(6, 4).sin() * k for k in (1.0, -2.0, 0.5)]

    def stepped(parts: Callable[[Tensor], Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
        """By part, what it is in each group."""
        parameters = [[nn.Parameter(part.clone()) for _ in groups] for part in parts(start)]
        by_group = zip(groups, zip(*parameters, strict=True), strict=True)
        in_groups = [{**group, "params": list(mine)} for group, mine in by_group]
        optimizer = kind(in_groups if any(groups) else in_groups[0]["params"], **options)
        for gradient in gradients:
            for together, part in zip(parameters, parts(gradient), strict=True):
                for parameter in together:
                    parameter.grad = part.clone()
                if in_turn:
                    optimizer.step()
                    optimizer.zero_grad()
            if not in_turn:
                optimizer.step()
        return [[parameter.detach() for parameter in together] for together in parameters]

    ways: list[Callable[[Tensor], Sequence[Tensor]]] = [lambda t: t.split([2, 4]), lambda t: t.split([1, 3], dim=1)]
    ways += [lambda t: t.reshape(-1).split([5, 1, 11, 7])] if flat else []

    def alone(parts: Callable[[Tensor], Sequence[Tensor]], number: int) -> Sequence[Tensor]:
        (found,) = stepped(lambda tensor: parts(tensor)[number : number + 1])
        return found

    def same(parts: Callable[[Tensor], Sequence[Tensor]], whole: Sequence[Tensor]) -> bool:
        together = stepped(parts)
        expected = [*zip(*map(parts, whole), strict=True)]
        apart = [alone(parts, number) for number in range(len(together))]
        return all(
            torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)
            for found in (together, apart)
            for mine, theirs in zip(chain(*found), chain(*expected), strict=True)
        )

    try:
        (whole,) = stepped(lambda tensor: (tensor,))
        return all(same(parts, whole) for parts in ways)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False  # it needs a closure, or another shape: not an update of single elements
