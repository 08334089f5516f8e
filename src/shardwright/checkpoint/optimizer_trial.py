"""Checks, before a run takes an optimizer's saved options and state, that the optimizer can step with them."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.runtime.optimizer_step import step_without_hooks


def check_options(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raises ValueError if the optimizer's constructor would refuse the saved options of a param group.

    Only the constructor knows what an optimizer allows, such as an ``eps`` from 0 and ``betas`` below 1. ``group`` has
    the present options, ``options`` the saved ones. For a user's own class, the constructor of the torch class that it
    derives from is called, since the user's constructor may do anything.

    >>> adam = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    >>> check_options(adam, adam.param_groups[0], {"eps": -1e-8})
    Traceback (most recent call last):
    ValueError: AdamW refuses the options of a param group: Invalid epsilon value: -1e-08
    """
    kinds = (base for base in type(optimizer).__mro__ if base.__module__.startswith("torch.optim."))
    kind = next(kinds, torch.optim.Optimizer)
    if kind is torch.optim.Optimizer:
        return
    failure = _refusal(kind, {**group, **options})
    if failure is not None and _refusal(kind, group) is None:  # the constructor takes the user's present options
        raise ValueError(f"{kind.__name__} refuses the options of a param group: {failure}") from failure


def _refusal(kind: type[torch.optim.Optimizer], options: Mapping[str, Any]) -> Exception | None:
    """Returns the error by which a constructor refuses ``options``, or None; options that it lacks are left out."""
    taken = inspect.signature(kind).parameters.keys() - {"params"}
    try:
        kind([nn.Parameter(torch.zeros(1))], **{key: value for key, value in options.items() if key in taken})
    except Exception as failure:  # any error: betas that are a number cannot be indexed
        return failure
    return None


def check_steps(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], options: Mapping[str, Any],
    held: Mapping[str, tuple[nn.Parameter, dict[str, Any]]],
) -> None:  # fmt: skip
    """Raises ValueError if an optimizer could not step a param group with its saved options and state.

    Only an optimizer's own code knows which state it needs. So a new optimizer of the same class steps a parameter of
    one element with the saved state, once for each kind of state; ``optimizer`` itself is not changed. Three cases are
    not checked: an optimizer that cannot step such a parameter without state either, such as one that needs a closure;
    an optimizer whose step reads attributes of its own; and state of another shape than its parameter, such as
    Adafactor's sums of rows and columns.

    ``group`` has the present options, ``options`` the saved ones. ``held`` are the group's parameters by name, each
    with its saved state, of which only shapes, dtypes and scalars are used.

    >>> weight = nn.Parameter(torch.ones(3))
    >>> adam = torch.optim.AdamW([weight])
    >>> check_steps(adam, adam.param_groups[0], {}, {"weight": (weight, {"step": torch.ones(())})})
    Traceback (most recent call last):
    ValueError: AdamW cannot step with the state of 'weight': KeyError: 'exp_avg'
    """
    kinds: dict[str, tuple[str, nn.Parameter, dict[str, Any]]] = {}
    for name, (parameter, state) in held.items():
        if any(isinstance(v, Tensor) and v.numel() > 1 and not is_elementwise(v, parameter) for v in state.values()):
            continue  # such as Adafactor's sums of rows and columns, to which no state of one element compares
        small = {key: _small(value, parameter) for key, value in sorted(state.items())}
        kinds.setdefault(f"{parameter.dim()} {parameter.dtype} {small}", (name, parameter, small))
    for name, parameter, small in kinds.values():
        failure = _failure(optimizer, {**group, **options}, parameter, small)
        if isinstance(failure, AttributeError) and isinstance(failure.obj, type(optimizer)):
            continue  # the trial lacks attributes that the optimizer has set itself and its step reads: no proof
        if failure is not None and _failure(optimizer, group, parameter, {}) is None:
            why = f"the state of '{name}': {type(failure).__name__}: {failure}"
            raise ValueError(f"{type(optimizer).__name__} cannot step with {why}") from failure


def is_elementwise(value: Any, parameter: Tensor) -> bool:
    """Returns whether an entry of an optimizer's state has an element for each of its parameter's, as Adam's moments.

    That is so if both have the same shape, of one or more dims; a step count has no dims.
    """
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def keys_without_elements(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> frozenset[str]:
    """Returns the keys of tensors in an optimizer's state that are not elementwise, such as step counts.

    To find them, a new optimizer of the class steps a parameter of two elements with the options of ``group``. With one
    element, a count in ``torch.zeros(1)`` would have the parameter's shape. The result is empty if the step fails.

    >>> adam = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    >>> keys_without_elements(adam, adam.param_groups[0])
    frozenset({'step'})
    """
    two = nn.Parameter(group["params"][0].detach().new_zeros(2))
    trial, failure = _stepped(optimizer, group, two, {})
    if trial is None or failure is not None:
        return frozenset()
    state = trial.state[two].items()
    return frozenset(key for key, value in state if isinstance(value, Tensor) and not is_elementwise(value, two))


def lacks_entry(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], options: Mapping[str, Any],
    parameter: nn.Parameter, state: Mapping[str, Any],
) -> bool:  # fmt: skip
    """Returns whether an optimizer raises KeyError on a parameter's saved state, but can step without any state.

    The arguments are those of :func:`check_steps`, for one parameter. An optimizer that cannot be tried gives False.

    >>> weight = nn.Parameter(torch.ones(3))
    >>> adam, sgd = torch.optim.AdamW([weight]), torch.optim.SGD([weight])
    >>> [lacks_entry(each, each.param_groups[0], {}, weight, {"step": torch.ones(())}) for each in (adam, sgd)]
    [True, False]
    """
    small = {key: _small(value, parameter) for key, value in state.items()}
    failure = _failure(optimizer, {**group, **options}, parameter, small)
    return isinstance(failure, KeyError) and _failure(optimizer, group, parameter, {}) is None


def _small(value: Any, parameter: nn.Parameter) -> Any:
    """Returns a copy of ``value``, an entry of a parameter's state, as for a parameter of one element."""
    if is_elementwise(value, parameter):
        return torch.zeros((1,) * parameter.dim(), dtype=value.dtype, device=parameter.device)
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _failure(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], parameter: nn.Parameter, state: Mapping[str, Any]
) -> Exception | None:
    """Returns the error that a step of a parameter of one element raises, or None."""
    one = nn.Parameter(torch.zeros((1,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device))
    return _stepped(optimizer, options, one, state)[1]


def _stepped(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], own: nn.Parameter, state: Mapping[str, Any]
) -> tuple[torch.optim.Optimizer | None, Exception | None]:
    """Returns a new optimizer of the same class that has stepped the parameter ``own``, and the error, if any."""
    own.grad, trial = torch.zeros_like(own), None
    try:
        trial = type(optimizer).__new__(type(optimizer))  # as in unpickling: no hooks, no methods that were set later
        group = copy.deepcopy({key: value for key, value in options.items() if key != "params"})
        trial.__setstate__(
            {"defaults": optimizer.defaults, "state": defaultdict(dict), "param_groups": [{**group, "params": [own]}]}
        )
        if state:  # set after __setstate__, which would mend entries that a load leaves as they are
            trial.state[own] = dict(state)
        step_without_hooks(trial)  # hooks that are registered for all optimizers are the user's
    except Exception as failure:  # any optimizer's code runs here
        return trial, failure
    return trial, None
