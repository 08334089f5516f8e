"""Finds every object that a value holds, through attributes, containers, closures, defaults, methods and partials.

``model.parameters()`` and ``model.modules()`` list only what is registered. A model's code may also reach modules and
tensors through a closure, a plain list or a hook; code that copies or checks a model must find those.
"""

from __future__ import annotations

import dis
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import BuiltinMethodType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

ATOMS = frozenset(
    (type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device, torch.Size)
)
"""Types whose values refer to no other object."""
DICTS = (dict, OrderedDict)
COLLECTIONS = (*DICTS, set)
"""The classes of the collections that every module has, such as dicts of hooks; most of these are empty."""
REGISTERED = ("_parameters", "_buffers", "_modules")


def is_leaf(value: Any) -> bool:
    """Returns whether a search for held objects stops at a value: a number, text, tensor, class or imported module."""
    return type(value) in ATOMS or isinstance(value, type | ModuleType | Tensor)


def held_by(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields each object that a value holds directly, as a pair of the path to it and the object.

    A path is text, such as ``.name`` for an attribute and ``[0]`` for an item.

    >>> layer = nn.Linear(2, 2)
    >>> def run(x, scale=2):
    ...     return layer(x) * scale
    >>> [(words, type(each).__name__) for words, each in held_by(partial(run, scale=3))]
    [('', 'function'), (", argument 'scale'", 'int')]
    >>> [(words, type(each).__name__) for words, each in held_by(run)]
    [("'s default", 'int')]
    """
    if isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # a cell may be empty
                yield f"'s closure '{name}'", cell.cell_contents
        for part in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            yield "'s default", part
    elif isinstance(value, MethodType):
        yield "", value.__func__
        yield "", value.__self__
    elif isinstance(value, BuiltinMethodType):
        yield "", value.__self__
    elif isinstance(value, partial):
        yield "", value.func
        for part in value.args:
            yield ", an argument", part
        for name, part in value.keywords.items():
            yield f", argument '{name}'", part
    elif isinstance(value, property):
        yield from (("", accessor) for accessor in (value.fget, value.fset, value.fdel))
    elif isinstance(value, staticmethod | classmethod):
        yield "", value.__func__
    elif isinstance(value, dict | MappingProxyType):
        # a copy, as for lists and sets below, because another rank that is a thread may add to it at this moment
        for key, part in (dict.copy(value) if isinstance(value, dict) else value).items():
            yield "'s keys", key
            yield f"[{key!r}]" if type(key) in (str, int) else "'s values", part
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{number}]", entry) for number, entry in enumerate(tuple(value)))
    elif isinstance(value, set | frozenset):
        yield from (("'s items", member) for member in tuple(value))
    elif isinstance(value, ref) and not isinstance(value(), Tensor):  # code does not compute with weakly held tensors
        yield "", value()
    yield from ((f".{name}", attribute) for name, attribute in attributes(value).items())


def attributes(value: Any) -> dict[str, Any]:
    """Returns the attributes that an object stores itself, in its ``__dict__`` and its slots.

    >>> attributes(nn.Identity())["training"], attributes(3)
    (True, {})
    """
    slot_values = {}
    for kind in type(value).__mro__ if type(value).__module__ != "builtins" else ():
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with suppress(AttributeError):
                slot_values[name] = object.__getattribute__(value, name)
    own = getattr(value, "__dict__", None)
    return {**slot_values, **own} if isinstance(own, dict) else slot_values


def reached(
    value: Any, seen: dict[int, Any], closed: Collection[int] = (), most: int | None = None,
    but: tuple[type, ...] = (),
) -> Iterator[tuple[str, Any]]:  # fmt: skip
    """Yields ``value`` and every object that it holds, directly or not, as pairs of a path and an object.

    A path is text that leads from ``value`` to the object. Numbers, text and other values that refer to nothing are
    left out. Objects whose ids are in ``seen``, and those of the classes ``but``, are skipped, and each yielded object
    is added to ``seen``. Objects whose ids are in ``closed``, and tensors, classes and imported modules, are yielded
    but not searched. Collections of more than ``most`` entries, which are tables or data, are not searched either.
    """
    waiting = [("", value)]
    while waiting:
        words, node = waiting.pop()
        if type(node) in ATOMS or id(node) in seen or (but and isinstance(node, but)):
            continue
        seen[id(node)] = node
        yield words, node
        is_table = most is not None and isinstance(node, dict | list | tuple | set | frozenset) and len(node) > most
        if id(node) not in closed and not is_table and not is_leaf(node):
            waiting += [(words + more, part) for more, part in held_by(node) if type(part) not in ATOMS]


def unregistered_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of one module, by name, other than its registered parameters, buffers and submodules.

    Attributes that can hold no object, such as numbers and empty dicts and sets, are left out.
    """
    for name, value in vars(module).items():
        kind = type(value)
        if kind not in ATOMS and (kind not in COLLECTIONS or value) and name not in REGISTERED:
            yield name, value


def outside_registration(
    model: nn.Module, *, left_out: str = "", but: tuple[type, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yields all objects that a model holds in plain attributes, containers, closures and hooks, each with its place.

    A place is text such as ``others['a']``. A registered module, parameter or buffer is yielded if it is also held in
    such a place. The attribute ``left_out`` of torch's recurrent layers is not looked at, and objects of the classes
    ``but`` are skipped.

    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer, self.others = nn.Linear(2, 2), {"a": nn.Linear(2, 2)}
    ...         self.run = lambda x: self.layer(x)
    >>> [(place, type(each).__name__) for place, each in outside_registration(Model()) if isinstance(each, nn.Module)]
    [("others['a']", 'Linear'), ("run's closure 'self'", 'Model')]
    """
    modules = dict(model.named_modules())
    registered = {id(module) for module in modules.values()}
    seen: dict[int, Any] = {}
    for path, module in modules.items():
        for name, value in unregistered_attributes(module):
            if name == left_out and isinstance(module, nn.RNNBase):
                continue
            place = f"{path}.{name}".lstrip(".")
            yield from ((place + words, part) for words, part in reached(value, seen, registered, but=but))


def unregistered(model: nn.Module) -> tuple[nn.Module, ...]:
    """Returns the modules that a model holds in plain lists, dicts, closures and the like without registering them."""
    registered = {id(module) for module in model.modules()}
    modules = (module for _, module in outside_registration(model) if isinstance(module, nn.Module))
    return tuple(module for module in modules if id(module) not in registered)


def tensors_outside(model: nn.Module) -> dict[int, str]:
    """Returns, by tensor id, the place of each tensor that a model holds in plain attributes, containers or closures.

    A registered parameter or buffer is included if it is also held in such a place. A tensor that is held in several
    places is listed with one of them. The list in which a recurrent layer of torch keeps its weights is left out: the
    layer itself keeps it up to date. So are the parameters of an optimizer, which no forward reads.

    >>> layer = nn.Linear(2, 2)
    >>> layer.again = [layer.weight]
    >>> list(tensors_outside(layer).values())
    ['again[0]']
    """
    pairs = outside_registration(model, left_out="_flat_weights", but=(Optimizer,))
    return {id(tensor): place for place, tensor in pairs if isinstance(tensor, Tensor)}


def code_objects(function: FunctionType) -> Iterator[CodeType]:
    """Yields the code object of a function, and those of functions, classes and comprehensions inside of it."""
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        yield code


def globals_read(function: FunctionType, wanted: Collection[int]) -> Iterator[str]:
    """Yields the names of the globals that a function reads and that refer to an object whose id is in ``wanted``.

    A global that is a list, tuple or dict with such an object counts too.

    >>> layer = nn.Linear(2, 2)
    >>> def run(x):
    ...     return layer(x).layer
    >>> list(globals_read(run, {id(layer)})), list(globals_read(run, {}))
    (['layer'], [])
    """
    for code in code_objects(function):
        names = [name for name in code.co_names if _holds(function.__globals__.get(name), wanted)]
        if names:  # the code's names include those of attributes
            loaded = {op.argval for op in dis.get_instructions(code) if op.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
            yield from (name for name in names if name in loaded)


def _holds(value: Any, wanted: Collection[int]) -> bool:
    if isinstance(value, Mapping):
        return any(id(entry) in wanted for entry in value.values())
    if isinstance(value, list | tuple):
        return any(id(entry) in wanted for entry in value)
    return id(value) in wanted
