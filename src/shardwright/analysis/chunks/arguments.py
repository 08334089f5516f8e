"""Matches a batch's inputs to the arguments of a model's forward, so that the forward can be traced with them."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from shardwright.analysis.chunks.call_graph import ChunkedModel
from shardwright.analysis.on_meta.module_calls import given_to
from shardwright.analysis.traced.structure import IS_NO_TENSOR, IS_NONE, IS_VALUE, OPEN_ENDED
from shardwright.errors import PlanError


def arguments_given(model: nn.Module, inputs: Any, *, by_value: bool = False) -> tuple[str, ...]:
    """Returns the names of the arguments of a model's forward that a batch's inputs fill, in the signature's order.

    The result can be passed to :func:`trace` as ``given``. The suffix :data:`IS_NONE` or :data:`IS_NO_TENSOR` is
    appended to a name if its value is None or is not a tensor. A None that equals the argument's default is left out.
    With ``by_value``, :data:`IS_VALUE` and the value is appended to a flag, which is a bool or a text.

    Raises: PlanError: the inputs have more values in order than the forward has positional arguments (``*args`` not
        counted), have an argument that it does not name, or lack a required one.

    >>> import torch
    >>> arguments_given(nn.Linear(1, 1), torch.ones(1))
    ('input',)
    >>> arguments_given(nn.Bilinear(1, 1, 1), {"input1": torch.ones(1), "input2": None})
    ('input1', 'input2 is None')
    """
    parameters = inspect.signature(model.forward).parameters.values()
    defaults = {parameter.name: parameter.default for parameter in parameters if parameter.kind not in OPEN_ENDED}
    in_order = [
        parameter.name
        for parameter in parameters
        if parameter.name in defaults and parameter.kind is not parameter.KEYWORD_ONLY
    ]
    values, by_name = given_to(inputs)
    arguments = dict(zip(in_order, values, strict=False)) | by_name
    unknown = [str(name) for name in arguments if name not in defaults]
    missing = [
        name for name, default in defaults.items() if default is inspect.Parameter.empty and name not in arguments
    ]
    wrong = f"{len(values)} values in order, for {len(in_order)} arguments" if len(values) > len(in_order) else ""
    wrong = wrong or ("also " + ", ".join(unknown) if unknown else "")
    wrong = wrong or ("nothing for " + ", ".join(missing) if missing else "")
    if wrong:
        raise PlanError(
            f"the inputs are not those that {type(model).__name__} names",
            given=wrong,
            allowed=", ".join(defaults) or "arguments with names, of which its forward has none",
            fix="give these; what the forward takes as *args or **kwargs needs a name of its own there: a model in "
            "stages is read for the arguments that it is given",
        )
    names = (
        name for name in defaults if name in arguments and not (arguments[name] is None and defaults[name] is None)
    )
    return tuple(name + _suffix(arguments[name], by_value) for name in names)


def _is_flag(value: Any) -> bool:
    return type(value) in (bool, str)  # the repr of an Enum that is a text, such as Mode.A, is no literal


def _suffix(value: Any, by_value: bool) -> str:
    if by_value and _is_flag(value):
        return f"{IS_VALUE}{value!r}"
    return IS_NONE if value is None else "" if isinstance(value, Tensor) else IS_NO_TENSOR


def bind(chunked: ChunkedModel, inputs: Any) -> dict[str, Any]:
    """Returns a batch's inputs as a dict; its keys are the names of the placeholder nodes of the graph of ``chunked``.

    ``call_graph.run`` takes them in this form. An input that is None is left out, because the graph has no node for it,
    and so is a flag (a bool or text) if the graph was traced for its value.

    Raises: KeyError: a dict of inputs lacks an argument of the graph. ValueError: the number of positional inputs that
        are not None differs from the number of placeholders.

    >>> import torch
    >>> from shardwright.analysis.chunks.call_graph import CallSite, read_graph
    >>> bind(ChunkedModel(read_graph(nn.Sequential(nn.ReLU())), {CallSite("0"): 0}, 1), torch.ones(1))
    {'input_1': tensor([1.])}
    """
    in_order, by_name = given_to(inputs)
    if by_name:
        return {name: by_name[argument] for name, argument in chunked.arguments}
    present = [value for value in in_order if value is not None]
    if len(present) > len(chunked.arguments):
        present = [value for value in present if not _is_flag(value)]
    return {name: value for (name, _), value in zip(chunked.arguments, present, strict=True)}
