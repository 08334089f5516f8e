"""Encodes the structure of values that stages send each other as JSON, so that decoding runs no code of the sender.

Containers are encoded by name: those of torch's pytree registry and named tuples. They are looked up among the modules
that this rank has imported already, as every stage has built the same model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardwright.errors import PlanError


def pack(tree: Any, leaves: Sequence[Any]) -> bytes:
    """Returns a structure as JSON: ``tree``, nested containers of indices, and ``leaves``, the values that they index.

    Raises: PlanError: a leaf, or the context of a container such as the keys of a dict, is no plain value.

    >>> pack({"x": 0}, [(2, 3)])
    b'[["builtins:dict", ["x"], [0]], [{"tuple": [2, 3]}]]'
    """
    return json.dumps([_packed_node(tree), [_packed(leaf) for leaf in leaves]]).encode()


def unpack(packed: bytes) -> tuple[Any, list[Any]]:
    """Returns (tree, leaves) from the JSON of :func:`pack`. Raises PlanError if it names a class that is no container.

    >>> unpack(pack({"x": (0, [1])}, [torch.float32, slice(2, None)]))
    ({'x': (0, [1])}, [torch.float32, slice(2, None, None)])
    """
    tree, leaves = json.loads(packed)
    return _unpacked_node(tree), [_unpacked(leaf) for leaf in leaves]


def _packed_node(node: Any) -> Any:
    if type(node) is int:
        return node
    kind = pytree._get_node_type(node)
    children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(node)
    return [_name(kind), _packed(context), [_packed_node(child) for child in children]]


def _unpacked_node(node: Any) -> Any:
    if isinstance(node, int):
        return node
    name, context, children = node
    kinds = {_name(kind): kind for kind in pytree.SUPPORTED_NODES}
    if name not in kinds:
        raise _no_container(name)
    unflatten = pytree.SUPPORTED_NODES[kinds[name]].unflatten_fn
    return unflatten([_unpacked_node(child) for child in children], _unpacked(context))


def _packed(value: Any) -> Any:
    """Returns the JSON form of a leaf, or of a container's context (the keys of a dict, the class of a named tuple).

    Raises PlanError for a value of any other type.
    """
    if isinstance(value, list):
        return [_packed(entry) for entry in value]
    if isinstance(value, tuple):
        return {"tuple": [_packed(entry) for entry in value]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, slice):
        return {"slice": [_packed(bound) for bound in (value.start, value.stop, value.step)]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, type):
        return {"class": _name(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    name = type(value).__name__
    raise _no_container(
        "a size of a nested tensor, whose rows differ in it" if isinstance(value, torch.SymInt) else name
    )


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    ((kind, packed),) = value.items()
    make = {
        "tuple": lambda parts: tuple(_unpacked(parts)),
        "complex": lambda parts: complex(*parts),
        "slice": lambda parts: slice(*_unpacked(parts)),
        "bytes": bytes.fromhex,
        "dtype": lambda name: {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}[f"torch.{name}"],
        "device": torch.device,
        "class": _class,
    }
    return make[kind](packed)


def _name(kind: Any) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(name: str) -> type:
    """Returns the container class of this name. Raises PlanError: no imported module has such a class."""
    module, _, path = name.partition(":")
    container: Any = sys.modules.get(module)
    for part in path.split("."):
        container = getattr(container, part, None)
    named_tuple = isinstance(container, type) and issubclass(container, tuple) and hasattr(container, "_fields")
    if not isinstance(container, type) or not (named_tuple or container in pytree.SUPPORTED_NODES):
        raise _no_container(name)
    return container


def _no_container(name: str) -> PlanError:
    return PlanError(
        "the values between two stages hold what cannot cross",
        given=name,
        allowed="tensors and plain values in tuples, lists, dicts, named tuples, and classes registered as pytrees",
        fix="return tensors in a tuple or dict, or cut the model elsewhere",
    )
