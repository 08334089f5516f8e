"""Operators on lists of tensors, as optimizers call them: each tensor is treated alone, in the order of the lists.

Every rank has the same lists, so all take the same steps; a list may hold tensors of different placements.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.comm.current_world import here
from shardwright.errors import PlanError
from shardwright.global_tensor import sbp as words
from shardwright.global_tensor.tensor import GlobalTensor
from shardwright.global_tensor.view_tracking import is_apart, is_shared, note_writes

_FOREACH = "_foreach_"
_FUSED = frozenset({"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"})
_OTHERWISE = {"maximum": "clamp_min", "minimum": "clamp_max"}
"""The single operators take tensors only, and are never in place; these are the same."""


@lru_cache(maxsize=1024)
def handler(func: Any) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None:
    """What carries an operator on lists out; None for all others."""
    name = func._schema.name.removeprefix("aten::")
    return _each if name.startswith(_FOREACH) else _fused if name in _FUSED else None


def _given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


# ---- _foreach_add_ and its like: the single operator, again and again


def _each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base = func._schema.name.removeprefix(f"aten::{_FOREACH}")
    plain, end = base.removesuffix("_"), "_" * base.endswith("_")
    if plain == "norm":
        plain = "linalg_vector_norm"
    if plain in _OTHERWISE and (end or func._overloadname.startswith("Scalar")):
        plain = _OTHERWISE[plain]
    single = getattr(torch.ops.aten, plain + end)
    given = _given(func, args, kwargs)
    if isinstance(scalars := given.get("scalars"), Tensor):
        given["scalars"] = scalars.tolist()
    num = max(len(each) for each in given.values() if isinstance(each, (list, tuple)))
    found = [single(*mine, **named) for mine, named in (_one(plain, given, func, i) for i in range(num))]
    return None if end else found


def _one(plain: str, given: dict[str, Any], func: Any, number: int) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of the single operator on the lists' tensors of this number."""
    mine: list[Any] = []
    named: dict[str, Any] = {}
    for argument in func._schema.arguments:
        if argument.name not in given:
            continue
        value = given[argument.name]
        value = value[number] if isinstance(value, (list, tuple)) else value
        if plain in ("addcmul", "addcdiv") and argument.name in ("value", "scalars"):
            named["value"] = value
        elif argument.kwarg_only or argument.name == "dtype":
            named[argument.name] = value
        else:
            mine.append(value)
    return mine, named


# ---- whole optimizer steps: of slices, since each element is treated alone


def _fused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """One call on the members' own slices; gradients are brought to where the parameters lie."""
    given = _given(func, args, kwargs)
    lists = {name: list(value) for name, value in given.items() if isinstance(value, (list, tuple))}
    rest = {name: value for name, value in given.items() if name not in lists}
    for parameter, *others in zip(lists["self"], *(_states(lists)), strict=True):
        for state in others:
            _lay_out(state, parameter)
        _check(func, parameter, others, rest)
    note_writes([*lists["self"], *(each for states in _states(lists) for each in states)])
    lists["grads"] = [
        grad.to_global(parameter.placement, parameter.sbp)
        for grad, parameter in zip(lists["grads"], lists["self"], strict=True)
    ]
    mine = [
        number
        for number, parameter in enumerate(lists["self"])
        if here().rank in parameter.placement and parameter._local_tensor.numel()
    ]
    if not mine:
        return
    local = {name: [_local(each[i]) for i in mine] if each else [] for name, each in lists.items()}
    func(**local, **rest)


def _lay_out(state: Any, parameter: Any) -> None:
    """State that the optimizer has just made like its gradient comes to lie as its parameter does."""
    ours = isinstance(state, GlobalTensor) and state.placement == parameter.placement
    if ours and state.sbp != parameter.sbp and not is_shared(state):
        there = state.detach().to_global(sbp=parameter.sbp)
        state._local_tensor, state._spec = there._local_tensor, there._spec


def _states(lists: dict[str, list[Any]]) -> list[list[Any]]:
    """The optimizer's tensors of the parameters' shapes: what is written beside the parameters."""
    return [each for name, each in lists.items() if each and name not in ("self", "grads", "state_steps")]


def _local(x: Any) -> Any:
    return x._local_tensor if isinstance(x, DTensor) else x


def _check(func: Any, parameter: Any, states: list[Any], rest: dict[str, Any]) -> None:
    if any(is_apart(each) for each in (parameter, *states)):
        _refuse(func, "a part of a cut tensor, gathered to be looked at", "parameters of their own: x[:2].clone()")
    scaled = [name for name in ("grad_scale", "found_inf") if rest.get(name) is not None]
    if any(one.is_partial() for one in parameter.sbp):
        _refuse(func, f"a parameter that is {words.text(parameter.sbp)}", "parameters that are cut or broadcast")
    if any(not isinstance(each, DTensor) or tuple(each._spec.placements) != parameter.sbp for each in states):
        _refuse(func, f"state that does not lie as its parameter, {words.text(parameter.sbp)}", "state that does")
    if scaled or any(isinstance(value, DTensor) for value in rest.values()):
        _refuse(func, ", ".join(scaled) or "a global tensor as an option", "plain numbers")


def _refuse(func: Any, given: str, allowed: str) -> None:
    raise PlanError(
        f"'{func._schema.name.removeprefix('aten::')}' cannot step these global tensors",
        given=given,
        allowed=allowed,
        fix="make the optimizer without fused=True",
    )
