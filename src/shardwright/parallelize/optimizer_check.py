"""Tests whether an optimizer updates each element independently of the others, so that a shard can be updated alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from inspect import signature
from itertools import chain
from math import isclose
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim

from shardwright.axes import mesh_axes
from shardwright.errors import PlanError
from shardwright.plan.plan import Plan

SplitTensor = Callable[[Tensor], Sequence[Tensor]]

ELEMENTWISE = (
    optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam,
    optim.RMSprop, optim.Rprop, optim.SGD,
)  # fmt: skip
"""The optimizers of torch that update each element alone, whatever their options: these need not be tried."""

_EXECUTION = ("capturable", "foreach", "fused")
"""The options that say how torch runs a step, and not what it computes; some need a GPU."""


def check_elementwise(kind: Any, options: Mapping[str, Any], plan: Plan, given: Sequence[Any] = ()) -> None:
    """Raises PlanError if ``kind`` cannot be called, or its optimizer cannot update a rank's shards alone.

    Such an optimizer needs whole tensors, or keeps state for all parameters together. ``kind`` is its class and
    ``options`` are its options. ``given`` are its parameters as torch takes them: dicts among these are parameter
    groups, whose options are tried too.

    Raises also what the constructor of ``kind`` raises for these options, if the layout shards or offloads state.
    """
    if not callable(kind):
        shown = f"{kind!r:.60}" if isinstance(kind, str) else f"an instance: {type(kind).__name__}"
        raise PlanError(
            "run.optimizer takes the class of an optimizer, and makes it over this rank's parameters",
            given=shown,
            allowed="a class of torch.optim, or a function that is called as one",
            fix="write run.optimizer(torch.optim.AdamW, lr=1e-3)",
        )
    stages = {*mesh_axes("stages")}
    sharded = [name for name, state in plan.state.items() if state.optimizer.axes or name in plan.offloaded]
    cut = [name for name in sharded if name in plan.offloaded or not stages.issuperset(plan.state[name].optimizer.axes)]
    flat = any(name in plan.offloaded or plan.state[name].optimizer != plan.compute[name] for name in sharded)
    of_groups = [{key: group[key] for key in group if key != "params"} for group in given if isinstance(group, Mapping)]
    groups = [{}, *filter(None, of_groups)]
    if of_groups and all(of_groups) and not _can_be_made(kind, options):
        del groups[0]  # an option that the optimizer needs is in its groups only
    if cut and not is_elementwise(kind, options, groups, flat=flat):
        raise PlanError(
            f"{kind.__name__} needs whole tensors or all of them, and '{cut[0]}' is not whole on every rank",
            given=f"{kind.__name__} under {plan.layout}",
            allowed="optimizers that update each element alone: SGD, Adam, AdamW, RMSprop, Adagrad, ...",
            fix="use AdamW, or a layout that shards no parameter",
        )
    if sharded and not cut and not is_elementwise(kind, options, groups, whole=True):
        raise PlanError(
            f"{kind.__name__} needs all tensors, and '{sharded[0]}' is on one stage of {plan.layout}",
            given=f"{kind.__name__} under {plan.layout}",
            allowed="optimizers that update each tensor alone",
            fix="use AdamW, or leave out pp",
        )
    if plan.offloaded and not is_elementwise(kind, options, groups, flat=True, in_turn=True):
        raise PlanError(
            f"{kind.__name__} counts its steps for all parameters together, and state on '{plan.layout}' is "
            "updated in parts",
            given=f"{kind.__name__} under {plan.layout}",
            allowed="optimizers whose state belongs to single parameters: SGD, Adam, AdamW, RMSprop, Adagrad, ...",
            fix="use AdamW, or leave out offload",
        )


def check_made_by_hand(optimizer: torch.optim.Optimizer, plan: Plan) -> None:
    """Raises PlanError as :func:`check_elementwise` does, for an optimizer that was not made by ``run.optimizer``.

    An optimizer whose class cannot be called again with the optimizer's options is not tried.
    """
    kind = type(optimizer)
    options = {name: value for name, value in optimizer.defaults.items() if name in signature(kind).parameters}
    if _can_be_made(kind, options):
        groups = [{name: group[name] for name in options if name in group} for group in optimizer.param_groups]
        check_elementwise(kind, options, plan, groups)


def _can_be_made(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> bool:
    try:
        kind([{"params": [nn.Parameter(torch.zeros(1, 1))]}], **options)
    except Exception:  # any optimizer's code runs here, and may raise any error for missing options
        return False
    return True


def is_elementwise(
    kind: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]] = ({},),
    *,
    flat: bool = True,
    in_turn: bool = False,
    whole: bool = False,
) -> bool:
    """Returns whether an optimizer updates a whole tensor and its parts to the same values, by trying both once.

    ``kind`` is its class and ``options`` are its options. The parts are ranges of rows, ranges of columns and, with
    ``flat``, ranges of elements that end inside a row. Each split is tried twice: with one optimizer over all parts,
    and with an optimizer for each part. With ``in_turn`` the optimizer over all parts makes a step for each of them,
    while the others have no gradient. ``groups`` are the options of parameter groups; each group is tried on a copy of
    the tensor. With ``whole`` there is one split, into two tensors that no rank cuts. The result is False for an
    optimizer whose step raises, such as one that needs a closure, and for one whose groups end with other options for
    other splits: it counts or estimates something over all its tensors. A class in :data:`ELEMENTWISE` is only made.

    Raises: what the constructor raises for these options, such as a ValueError for a negative learning rate.

    >>> is_elementwise(torch.optim.AdamW, {"lr": 0.1}), is_elementwise(torch.optim.Adafactor, {"lr": 0.1})
    (True, False)
    >>> is_elementwise(torch.optim.Adafactor, {"lr": 0.1}, whole=True)  # each tensor alone, but whole
    True
    """
    options, *groups = ({name: group[name] for name in group if name not in _EXECUTION} for group in (options, *groups))
    if any(kind is known for known in ELEMENTWISE):
        _OptimizerTrial(kind, options, groups, in_turn).made(lambda tensor: (tensor,))
        return True
    values = [value for group in (options, *groups) for value in group.values()]
    if isinstance(kind, type) and all(map(_is_plain, values)):  # cached, since a rehearsal asks for each of its ranks
        of_groups = tuple(tuple(group.items()) for group in groups)
        hashable: Any = kind  # every class is; mypy denies it for a class that defines __hash__ for its instances
        return _tried_once(hashable, tuple(options.items()), of_groups, flat=flat, in_turn=in_turn, whole=whole)
    return _tried(kind, options, groups, flat=flat, in_turn=in_turn, whole=whole)


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, int | float | str | None)


@lru_cache(maxsize=64)
def _tried_once(
    kind: Any, options: tuple[tuple[str, Any], ...],
    groups: tuple[tuple[tuple[str, Any], ...], ...], *, flat: bool, in_turn: bool, whole: bool,
) -> bool:  # fmt: skip
    return _tried(kind, dict(options), [dict(group) for group in groups], flat=flat, in_turn=in_turn, whole=whole)


def _tried(
    kind: type[torch.optim.Optimizer], options: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], *, flat: bool,
    in_turn: bool, whole: bool,
) -> bool:  # fmt: skip
    """Returns :func:`is_elementwise`, by trying the optimizer."""
    trial = _OptimizerTrial(kind, options, groups, in_turn)
    start, _ = _trial()
    rows, columns = start.shape
    ranges = [rows * columns // 3, 1, rows * columns // 2]  # numbers of elements; these ranges end inside of rows
    ranges.append(rows * columns - sum(ranges))
    splits: list[SplitTensor] = [
        lambda t: t.split([2, rows - 2]),
        lambda t: t.split([columns // 2, columns // 2], dim=1),
    ]
    splits += [lambda t: t.reshape(-1).split(ranges)] if flat else []
    trial.made(lambda tensor: (tensor,))  # outside of the try: options that the class refuses are the caller's error
    try:
        (result,), numbers = trial.stepped(lambda tensor: (tensor,))
        if whole:
            return trial.same(lambda t: (t, 2 * t[: rows // 2, :3]), None, numbers)
        return all(trial.same(parts, result, numbers) for parts in splits)
    except Exception:  # any optimizer's code runs here: it may need a closure, or tensors of another shape
        return False


class _OptimizerTrial(NamedTuple):
    """An optimizer to be tried: its class and options, the options of its groups, and whether parts step in turn."""

    kind: type[torch.optim.Optimizer]
    options: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    in_turn: bool

    def made(self, parts: SplitTensor) -> tuple[list[list[nn.Parameter]], torch.optim.Optimizer]:
        """Returns each part as parameters, one for each of the groups, and an optimizer over all of them."""
        start, _ = _trial()
        parameters = [[nn.Parameter(part.clone()) for _ in self.groups] for part in parts(start)]
        by_group = zip(self.groups, zip(*parameters, strict=True), strict=True)
        in_groups = [{**group, "params": list(members)} for group, members in by_group]
        optimizer = self.kind(in_groups if any(self.groups) else in_groups[0]["params"], **self.options)
        getattr(optimizer, "train", lambda: None)()  # schedule-free optimizers must be in train mode in a step
        return parameters, optimizer

    def stepped(self, parts: SplitTensor) -> tuple[Sequence[Sequence[Tensor]], list[float]]:
        """Returns each part after some steps, once for each of the groups, and the numbers in the groups' options."""
        _, gradients = _trial()
        parameters, optimizer = self.made(parts)
        for gradient in gradients:
            for copies, part in zip(parameters, parts(gradient), strict=True):
                for parameter in copies:
                    parameter.grad = part.clone()
                if self.in_turn:
                    optimizer.step()
                    optimizer.zero_grad()
            if not self.in_turn:
                optimizer.step()
        numbers = [
            float(value) for group in optimizer.param_groups for _, value in sorted(group.items()) if _is_number(value)
        ]
        return [[parameter.detach() for parameter in copies] for copies in parameters], [] if self.in_turn else numbers

    def same(self, parts: SplitTensor, result: Sequence[Tensor] | None, numbers: Sequence[float]) -> bool:
        """Returns whether an optimizer over all parts, and one over each, step the parts to the same values.

        If ``result`` is given, the values must also be those of its parts. ``numbers`` must be the numbers in the
        options of each of the optimizers.
        """

        def stepped_alone(number: int) -> tuple[Sequence[Sequence[Tensor]], list[float]]:
            return self.stepped(lambda tensor: parts(tensor)[number : number + 1])

        together, numbers_together = self.stepped(parts)
        each_alone = [stepped_alone(number) for number in range(len(together))]
        alone = [part for (part,), _ in each_alone]
        expected = [*chain(*together)] if result is None else [*chain(*zip(*map(parts, result), strict=True))]
        return all(
            torch.allclose(part, other, rtol=1e-12, atol=1e-12, equal_nan=True)
            for tried in (together, alone)
            for part, other in zip(chain(*tried), expected, strict=True)
        ) and all(_close(numbers, others) for others in (numbers_together, *(own for _, own in each_alone)))


@cache
def _trial() -> tuple[Tensor, tuple[Tensor, ...]]:
    """Returns the tensor that optimizers are tried on, and its gradients of some steps.

    An optimizer that needs whole tensors may show it under certain conditions only, which the tensors here meet:
    Adafactor for dims of 128 or more, cautious optimizers if signs of gradients and updates differ, AdamP if a gradient
    is orthogonal to the tensor, and some if a gradient, or a part of it, is much larger or smaller than earlier ones.
    """
    numbers = torch.Generator("cpu").manual_seed(0)
    start, *others = (torch.randn(136, 132, generator=numbers, dtype=torch.float64, device="cpu") for _ in range(7))
    along = start / start.norm()
    orthogonal = others[0] - (others[0] * along).sum() * along
    peak = torch.ones(136, 1, dtype=torch.float64, device="cpu")
    peak[:40] = 30
    return start, (orthogonal, -2 * others[1], 0.5 * others[2], peak * others[3], 1e-3 * others[4], others[5])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _close(numbers: Sequence[float], others: Sequence[float]) -> bool:
    return len(numbers) == len(others) and all(map(partial(isclose, rel_tol=1e-9, abs_tol=1e-12), numbers, others))
