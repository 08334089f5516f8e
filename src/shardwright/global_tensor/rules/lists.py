"""Runs operators on lists of global tensors: the ``_foreach_*`` operators and fused optimizer steps.

Tensors are redistributed one by one in the order of the lists, which is the same on every rank, so every rank sends and
receives in the same order. A list may hold tensors of several placements.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.comm.current_world import current_world
from shardwright.errors import PlanError
from shardwright.global_tensor.sbp import sbp_text
from shardwright.global_tensor.tensor import GlobalTensor
from shardwright.global_tensor.view_tracking import count_writes, is_gathered_view, is_shared

_FOREACH = "_foreach_"
_FUSED = frozenset({"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"})
_EQUIVALENT = {"maximum": "clamp_min", "minimum": "clamp_max"}
"""Operators on single tensors that replace those which take no numbers and have no in-place form."""


@lru_cache(maxsize=1024)
def handler(func: Any) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None:
    """Returns the function (func, args, kwargs) that runs a ``_foreach_*`` operator or a fused optimizer step.

    The result is None for any other operator.
    """
    name = func._schema.name.removeprefix("aten::")
    return _foreach if name.startswith(_FOREACH) else _fused if name in _FUSED else None


def _given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


# ---- _foreach_add_ and the others: the operator on single tensors, once for each


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base = func._schema.name.removeprefix(f"aten::{_FOREACH}")
    plain, end = base.removesuffix("_"), "_" * base.endswith("_")
    if plain == "norm":
        plain = "linalg_vector_norm"
    if plain in _EQUIVALENT and (end or func._overloadname.startswith("Scalar")):
        plain = _EQUIVALENT[plain]
    single = getattr(torch.ops.aten, plain + end)
    arguments = _given(func, args, kwargs)
    if isinstance(scalars := arguments.get("scalars"), Tensor):
        arguments["scalars"] = scalars.tolist()
    num = max(len(values) for values in arguments.values() if isinstance(values, (list, tuple)))
    calls = (_single_arguments(plain, arguments, func, number) for number in range(num))
    results = [single(*positional, **named) for positional, named in calls]
    return None if end else results


def _single_arguments(
    plain: str, arguments: dict[str, Any], func: Any, number: int
) -> tuple[list[Any], dict[str, Any]]:  # fmt: skip
    """Returns the arguments of the operator on single tensors, from the entries ``number`` of the lists."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for argument in func._schema.arguments:
        if argument.name not in arguments:
            continue
        value = arguments[argument.name]
        value = value[number] if isinstance(value, (list, tuple)) else value
        if plain in ("addcmul", "addcdiv") and argument.name in ("value", "scalars"):
            named["value"] = value
        elif argument.kwarg_only or argument.name == "dtype":
            named[argument.name] = value
        else:
            positional.append(value)
    return positional, named


# ---- fused optimizer steps: they are elementwise, so every member steps its own slices


def _fused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs a fused optimizer step on this rank's slices, on gradients redistributed to the parameters' layouts."""
    arguments = _given(func, args, kwargs)
    lists = {name: list(value) for name, value in arguments.items() if isinstance(value, (list, tuple))}
    options = {name: value for name, value in arguments.items() if name not in lists}
    for parameter, *others in zip(lists["self"], *(_states(lists)), strict=True):
        for state in others:
            _redistribute_new_state(state, parameter)
        _check(func, parameter, others, options)
    count_writes([*lists["self"], *(tensor for states in _states(lists) for tensor in states)])
    pairs = list(zip(lists["grads"], lists["self"], strict=True))
    lists["grads"] = [grad.to_global(parameter.placement, parameter.sbp) for grad, parameter in pairs]
    numbers = [
        number
        for number, parameter in enumerate(lists["self"])
        if current_world().rank in parameter.placement and parameter._local_tensor.numel()
    ]
    if numbers:  # lists of state that the optimizer does not use are empty
        local = {
            name: [getattr(tensors[i], "_local_tensor", tensors[i]) for i in numbers if tensors]
            for name, tensors in lists.items()
        }
        func(**local, **options)


def _redistribute_new_state(state: Any, parameter: Any) -> None:
    """Redistributes new optimizer state from its gradient's layout to its parameter's layout, in place."""
    is_global = isinstance(state, GlobalTensor) and state.placement == parameter.placement
    if is_global and state.sbp != parameter.sbp and not is_shared(state):
        new = state.detach().to_global(sbp=parameter.sbp)
        state._local_tensor, state._spec = new._local_tensor, new._spec


def _states(lists: dict[str, list[Any]]) -> list[list[Any]]:
    """Returns the lists of optimizer state with the parameters' shapes, which the step writes to."""
    return [tensors for name, tensors in lists.items() if tensors and name not in ("self", "grads", "state_steps")]


def _check(func: Any, parameter: Any, states: list[Any], rest: dict[str, Any]) -> None:
    if any(is_gathered_view(tensor) for tensor in (parameter, *states)):
        _refuse(func, "a view of a cut tensor that was gathered to be looked at", "parameters that are no views")
    scaled = [name for name in ("grad_scale", "found_inf") if rest.get(name) is not None]
    if any(one.is_partial() for one in parameter.sbp):
        _refuse(func, f"a parameter that is {sbp_text(parameter.sbp)}", "parameters that are split or broadcast")
    if any(not isinstance(state, DTensor) or tuple(state._spec.placements) != parameter.sbp for state in states):
        _refuse(func, f"state of another layout than its parameter, {sbp_text(parameter.sbp)}", "state of its layout")
    if scaled or any(isinstance(value, DTensor) for value in rest.values()):
        _refuse(func, ", ".join(scaled) or "a global tensor as an option", "plain numbers")


def _refuse(func: Any, given: str, allowed: str) -> None:
    raise PlanError(
        f"'{func._schema.name.removeprefix('aten::')}' cannot step these global tensors",
        given=given,
        allowed=allowed,
        fix="make the optimizer without fused=True",
    )
