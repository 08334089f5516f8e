"""Reads torch operators' schemas: what a call writes to, what its results are views of, what random calls return."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def written_arguments(function: Any, args: Sequence[Any], named: Mapping[str, Any], kind: type) -> list[Any]:
    """Returns the arguments of type ``kind`` that a call of an operator writes to in place, also those inside lists.

    ``args`` and ``named`` are the call's positional and keyword arguments.

    >>> x = torch.zeros(2)
    >>> [each is x for each in written_arguments(torch.ops.aten.add_.Tensor, (x, torch.ones(2)), {}, Tensor)]
    [True]
    """
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    return _aliased(schema, args, named, kind, lambda alias: alias.is_write)


def viewed_arguments(function: Any, args: Sequence[Any], named: Mapping[str, Any], kind: type) -> list[Any]:
    """Returns the arguments of type ``kind`` of which an operator's results are views, or which it returns itself.

    ``args`` and ``named`` are the call's positional and keyword arguments.

    >>> x, y = torch.zeros(2), torch.ones(2)
    >>> [each is x for each in viewed_arguments(torch.ops.aten.add_.Tensor, (x, y), {}, Tensor)]
    [True]
    >>> viewed_arguments(torch.ops.aten.add.Tensor, (x, y), {}, Tensor)
    []
    """
    schema = getattr(function, "_schema", None)
    aliases = [output.alias_info for output in getattr(schema, "returns", ()) if output.alias_info is not None]
    if not aliases:
        return []
    returned = {name for alias in aliases for name in alias.before_set}
    # for a list of views the schema does not say which arguments they are views of
    of_list = any(not alias.before_set for alias in aliases)
    return _aliased(schema, args, named, kind, lambda alias: of_list or returned & alias.before_set)


def _aliased(
    schema: Any, args: Sequence[Any], named: Mapping[str, Any], kind: type, is_meant: Callable[[Any], Any]
) -> list[Any]:
    leaves: list[Any] = []
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and is_meant(argument.alias_info):
            value = args[number] if number < len(args) else named.get(argument.name)
            leaves += [leaf for leaf in tree_leaves(value) if isinstance(leaf, kind)]
    return leaves


@lru_cache(maxsize=1024)
def writes(func: Any) -> bool:
    """Returns whether a function writes to its first argument: ``x.add_(1)``, ``x += 1``, ``x[0] = 1``."""
    name = getattr(func, "__name__", "")
    inside = name.strip("_")
    return (
        name == "__setitem__"
        or (name.startswith("__i") and inside[1:] in _BINARY)
        or (name.endswith("_") and not name.startswith("__"))
    )


_BINARY = frozenset(
    ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul")
)


def makes_meta(named: Mapping[str, Any]) -> bool:
    """Returns whether ``device`` among an operator's keyword arguments ``named`` is the meta device."""
    device = named.get("device")
    return device is not None and torch.device(device).type == "meta"


def undrawn(function: Any, args: Sequence[Any], named: Mapping[str, Any], device: torch.device | str) -> Any:
    """Returns what a random operator would return, without drawing numbers: a new, uninitialized tensor on ``device``.

    For an operator with two results (``native_dropout``) it is a pair of such a tensor and a bool mask of its shape. If
    the operator writes its numbers in place, or into ``out``, the tensor to be written is returned unchanged. On the
    meta device the first draw would make torch import its compiler, which takes longer than importing torch.

    >>> undrawn(torch.ops.aten.multinomial.default, (torch.ones(3, 4), 2), {}, "meta")
    tensor(..., device='meta', size=(3, 2), dtype=torch.int64)
    """
    schema = function._schema
    if schema.returns[0].alias_info is not None:  # numbers written in place, or into ``out``
        return written_arguments(function, args, named, Tensor)[0]
    arguments = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | dict(named)
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    indices = torch.int64 if schema.name in ("aten::randint", "aten::randperm", "aten::multinomial") else None
    dtype = arguments.get("dtype") or indices
    if not tensors:
        return torch.empty(arguments["size"] if "size" in arguments else (arguments["n"],), dtype=dtype, device=device)
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    if "num_samples" in arguments:
        shape = torch.Size((*shape[:-1], arguments["num_samples"]))
    like = tensors[0]
    if like.shape == shape:
        output = torch.empty_like(like, dtype=dtype, device=device)
    else:
        output = torch.empty(shape, dtype=dtype or like.dtype, device=device)
    return output if len(schema.returns) == 1 else (output, torch.empty_like(output, dtype=torch.bool))  # and its mask
