"""A batch's inputs as the arguments of a model's forward, which the code that is cut into stages is read for."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from shardwright.analysis.call_graph import Chunked
from shardwright.analysis.structure import IS_NO_TENSOR, IS_NONE, OPEN_ENDED
from shardwright.errors import PlanError


def arguments_given(model: nn.Module, inputs: Any) -> tuple[str, ...]:
    """The names of the model's arguments that a batch's inputs fill, in the order of its forward.

    Of a None, that it is one, or nothing where it is what the argument is by itself: the code is read with it. Of
    what is no tensor either, that it is none.

    Raises: PlanError: inputs that the forward does not name, or too few.

    >>> import torch
    >>> arguments_given(nn.Linear(1, 1), torch.ones(1))
    ('input',)
    >>> arguments_given(nn.Bilinear(1, 1, 1), {"input1": torch.ones(1), "input2": None})
    ('input1', 'input2 is None')
    """
    parameters = inspect.signature(model.forward).parameters.values()
    named = {each.name: each.default for each in parameters if each.kind not in OPEN_ENDED}
    in_order = [each.name for each in parameters if each.name in named and each.kind is not each.KEYWORD_ONLY]
    if isinstance(inputs, Mapping):
        found = dict(inputs)
    else:
        values = inputs if isinstance(inputs, tuple | list) else (inputs,)
        found = dict(zip(in_order, values, strict=False))
        if len(values) > len(in_order):
            raise _other_inputs(model, named, f"{len(values)} values in order, for {len(in_order)} arguments")
    unknown = [str(name) for name in found if name not in named]
    if unknown:
        raise _other_inputs(model, named, "also " + ", ".join(unknown))
    missing = [name for name, default in named.items() if default is inspect.Parameter.empty and name not in found]
    if missing:
        raise _other_inputs(model, named, "nothing for " + ", ".join(missing))
    given = (name for name in named if name in found and not (found[name] is None and named[name] is None))
    return tuple(name + _said_of(found[name]) for name in given)


def _said_of(value: Any) -> str:
    return IS_NONE if value is None else "" if isinstance(value, Tensor) else IS_NO_TENSOR


def bind(chunked: Chunked, inputs: Any) -> dict[str, Any]:
    """A batch's inputs by the names that the code has for them; one that is None has none.

    >>> import torch
    >>> from shardwright.analysis.call_graph import CallSite, read_graph
    >>> bind(Chunked(read_graph(nn.Sequential(nn.ReLU())), {CallSite("0"): 0}, 1), torch.ones(1))
    {'input_1': tensor([1.])}
    """
    if isinstance(inputs, Mapping):
        return {name: inputs[argument] for name, argument in chunked.arguments}
    values = inputs if isinstance(inputs, tuple | list) else (inputs,)
    present = [value for value in values if value is not None]
    return {name: value for (name, _), value in zip(chunked.arguments, present, strict=True)}


def _other_inputs(model: nn.Module, named: Collection[str], given: str) -> PlanError:
    return PlanError(
        f"the inputs are not those that {type(model).__name__} names",
        given=given,
        allowed=", ".join(named) or "arguments with names, of which its forward has none",
        fix="give these; what the forward takes as *args or **kwargs needs a name of its own there: a model in "
        "stages is read for the arguments that it is given",
    )
