"""Makes a deep copy of a model, closures included, in half the time of ``copy.deepcopy``; planning makes many copies.

``deepcopy`` shares functions between the original and the copy, and with them the modules that their closures hold. A
copied model whose forward calls ``self.run = lambda x: layer(x)`` would train the original's layer. So functions that
hold an object of the original are rebuilt to hold its copy. :func:`check_apart` finds what cannot be rebuilt, such as a
function that reads a layer by a global name.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from shardwright.analysis.objects.own_attributes import MODULE_ATTRIBUTES
from shardwright.analysis.objects.reached import (
    ATOMS,
    COLLECTIONS,
    DICTS,
    REGISTERED,
    attributes,
    code_objects,
    globals_read,
    is_leaf,
    outside_registration,
    reached,
    unregistered_attributes,
)
from shardwright.errors import PlanError
from shardwright.formatting import first_line

M = TypeVar("M", bound=nn.Module)

_SHARED = (ModuleType, torch.jit.ScriptFunction)
"""Imported modules and scripted functions, which ``deepcopy`` refuses and which a copy shares with the original."""


def copied(model: M, memo: dict[int, Any]) -> M:
    """Returns a deep copy of a model, as ``copy.deepcopy`` does but in half the time, and with closures copied too.

    ``memo`` maps ids of objects to the copies to use for them, as for ``deepcopy``, and all other copies are added to
    it. Functions that hold an object of the model, for instance in a closure, are rebuilt to hold its copy. Most of a
    module's attributes are empty dicts for hooks, which are copied directly, to save time. ``deepcopy`` refuses some
    objects: a result of autograd that a forward has left in an attribute is copied without its history, and imported
    modules and scripted functions are shared.

    Raises: PlanError: a function that holds an object of the model cannot be rebuilt.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> model.first = lambda x, layer=model[0]: layer(x)
    >>> other = copied(model, {id(p): p for p in model.parameters()})
    >>> other[0] is model[0], other[0].weight is model[0].weight, other.first.__defaults__[0] is other[0]
    (False, True, True)
    """
    backup = dict(memo)
    try:
        return _copied(model, memo)
    # deepcopy raises a RuntimeError on tensors with a history, a TypeError on imported modules, and pickle's own error,
    # which is not imported here, on scripted functions. A search for such objects takes time, so it is made only now.
    except Exception:
        held = [value for _, value in outside_registration(model)]
        histories = [value for value in held if isinstance(value, Tensor) and not value.is_leaf]
        shared = [value for value in held if isinstance(value, _SHARED)]
        if not histories and not shared:
            raise
        memo.clear()
        memo.update(backup)
        memo.update((id(value), value) for value in shared)
        for tensor in histories:
            memo.setdefault(id(tensor), tensor.detach().clone())
        return _copied(model, memo)


def _copied(model: M, memo: dict[int, Any]) -> M:
    modules = [*model.modules()]
    is_plain = {kind: _is_plain(kind) for kind in set(map(type, modules))}
    plain = [module for module in modules if id(module) not in memo and is_plain[type(module)]]
    for module in plain:
        memo[id(module)] = object.__new__(type(module))
    known_ids = {*memo, id(None)}
    for module in plain:
        namespace = memo[id(module)].__dict__
        for name, value in vars(module).items():
            kind = type(value)
            # deepcopy fails on static methods too: they are taken as they are, and _CopiedFunctions makes their copies
            if kind in ATOMS or kind is staticmethod or isinstance(value, _SHARED):
                namespace[name] = value
            elif isinstance(value, Tensor) and value.layout != torch.strided:  # deepcopy refuses compressed tensors
                namespace[name] = memo.setdefault(id(value), value.detach().clone())
            elif kind in COLLECTIONS and not value and name in MODULE_ATTRIBUTES:
                namespace[name] = memo.setdefault(id(value), kind())  # in the memo, since hook handles refer to it
            elif name in REGISTERED and kind in DICTS and known_ids.issuperset(map(id, value.values())):
                items = ((key, None if entry is None else memo[id(entry)]) for key, entry in value.items())
                namespace[name] = memo.setdefault(id(value), kind(items))
            else:
                namespace[name] = _copied_attribute(module, name, value, memo)
    other = copy.deepcopy(model, memo)
    _CopiedFunctions(memo).rebind(other)
    return other


def _copied_attribute(module: nn.Module, name: str, value: Any, memo: dict[int, Any]) -> Any:
    """Returns a deep copy of an attribute. Raises PlanError: Python cannot copy what it holds."""
    try:
        return copy.deepcopy(value, memo)
    except TypeError as failure:
        raise PlanError(
            f"the attribute '{name}' of {type(module).__name__} cannot be copied, and each rank has a copy of it",
            given=f"{type(value).__name__}: {first_line(failure)}",
            allowed="attributes that copy.deepcopy copies, functions, and imported modules",
            fix="make the object in forward, or keep it outside of the model",
        ) from failure


def _is_plain(kind: type[nn.Module]) -> bool:
    """Returns whether a class has no copying methods of its own, so that deepcopy copies a module by its attributes."""
    protocol = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__getnewargs_ex__")
    customised = any(getattr(kind, name, None) is not getattr(nn.Module, name, None) for name in protocol)
    return not customised and not hasattr(kind, "__slots__")


class _CopiedFunctions:
    """Replaces, in a deep copy, the functions that hold objects of the original by functions that hold their copies."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self._done: dict[int, tuple[Any, Any]] = {}  # by id: a part of the copy, and what has replaced it
        self._apart: dict[int, Any] = {}  # by id: objects that hold no part of the original
        self._owned: set[int] = set()
        self._size = 0  # the size of the memo when _owned was made from it
        self._filled: set[int] = set()

    def rebind(self, model: nn.Module) -> None:
        """Replaces functions in the attributes of every module of the copied ``model``.

        Raises PlanError for a function that cannot be rebuilt.
        """
        modules: dict[str, nn.Module] = dict(model.named_modules())
        self._done.update((id(module), (module, module)) for module in modules.values())
        for path, module in modules.items():
            for name, value in list(unregistered_attributes(module)):
                try:
                    now = self._inside(value)
                except PlanError:
                    raise
                except Exception as failure:
                    place = f"{path}.{name}".lstrip(".")
                    raise PlanError(
                        f"{place} holds a part of the model in a way that cannot be copied",
                        given=f"{type(failure).__name__}: {failure}",
                        allowed="functions whose closures and defaults can be copied by copy.deepcopy",
                        fix="let the function hold the module alone, or make it a method of a module",
                    ) from failure
                if now is not value:
                    vars(module)[name] = now

    def _of(self, value: Any) -> Any:
        """Returns the counterpart of a value in the copy, or the value itself if it refers to no original object."""
        if id(value) in self.memo:
            return self.memo[id(value)]
        return self._inside(copy.deepcopy(value, self.memo)) if self._holds_original(value) else value

    def _holds_original(self, value: Any) -> bool:
        keys = []
        for _, part in reached(value, self._apart):
            keys.append(id(part))
            if id(part) in self.memo:
                for key in keys:
                    del self._apart[key]
                return True
        return False

    def _is_copy(self, value: Any) -> bool:
        """Whether ``deepcopy`` made an object; objects that the copy shares with the original must not be changed."""
        if len(self.memo) != self._size:
            self._owned, self._size = set(map(id, self.memo.values())), len(self.memo)
        return id(value) in self._owned

    def _inside(self, value: Any) -> Any:
        """Returns a part of the copy with its functions replaced, in place if that is possible."""
        if is_leaf(value):
            return value
        if id(value) not in self._done:
            self._done[id(value)] = value, value  # before entering: objects may hold themselves
            self._done[id(value)] = value, self._entered(value)
        return self._done[id(value)][1]

    def _entered(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            function, owner = self._inside(value.__func__), self._inside(value.__self__)
            return value if function is value.__func__ and owner is value.__self__ else MethodType(function, owner)
        if type(value) is staticmethod:
            inner = self._inside(value.__func__)
            return value if inner is value.__func__ else staticmethod(inner)
        if isinstance(value, BuiltinMethodType):  # deepcopy does not copy built-in methods
            owner = self._of(value.__self__)
            return value if owner is value.__self__ else getattr(owner, value.__name__)
        if type(value) is weakref.ref:
            target = self._of(value())
            return value if target is value() else weakref.ref(target)
        if isinstance(value, tuple):
            items = [self._inside(entry) for entry in value]
            if all(map(_same, items, value)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if self._is_copy(value):
            self._enter_copy(value)
        return value

    def _enter_copy(self, value: Any) -> None:
        if isinstance(value, dict):
            for key, entry in list(dict.items(value)):
                if (now := self._inside(entry)) is not entry:
                    dict.__setitem__(value, key, now)
        elif isinstance(value, list | deque):
            for number, entry in enumerate(list(value)):
                if (now := self._inside(entry)) is not entry:
                    value[number] = now
        elif isinstance(value, set):
            items = [self._inside(member) for member in value]
            if not all(map(_same, items, value)):
                value.clear()
                value.update(items)
        elif isinstance(value, partial):
            named = {name: self._inside(argument) for name, argument in value.keywords.items()}
            state: Any = value
            state.__setstate__((self._inside(value.func), tuple(map(self._inside, value.args)), named, vars(value)))
        if isinstance(value, nn.Module):
            self.rebind(value)
            return
        for name, entry in attributes(value).items():
            if (now := self._inside(entry)) is not entry:
                object.__setattr__(value, name, now)

    def _function(self, function: FunctionType) -> FunctionType:
        """Returns a function with the same code that refers to the copies, or itself if it refers to nothing copied."""
        if id(function) in self.memo:
            counterpart: FunctionType = self.memo[id(function)]
            return counterpart
        if not self._holds_original(function):
            return function
        before = function.__closure__ or ()
        cells = [self._cell(cell) for cell in before]
        now = FunctionType(function.__code__, function.__globals__, function.__name__, None, tuple(cells))
        self.memo[id(function)] = now
        for old, new in zip(before, cells, strict=True):
            if new is not old and id(new) not in self._filled:
                self._filled.add(id(new))
                new.cell_contents = self._of(old.cell_contents)
        now.__defaults__, now.__kwdefaults__ = self._of(function.__defaults__), self._of(function.__kwdefaults__)
        for name in ("__qualname__", "__doc__", "__module__", "__annotations__"):
            setattr(now, name, getattr(function, name))
        now.__dict__.update({name: self._of(value) for name, value in vars(function).items()})
        return now

    def _cell(self, cell: CellType) -> CellType:
        """Returns the closure cell for the copy: a new, empty one if the cell refers to an original object."""
        if id(cell) not in self.memo:
            try:
                holds_original = self._holds_original(cell.cell_contents)
            except ValueError:  # an empty cell
                holds_original = False
            self.memo[id(cell)] = CellType() if holds_original else cell
        counterpart: CellType = self.memo[id(cell)]
        return counterpart


def _same(one: Any, other: Any) -> bool:
    return one is other


def check_apart(model: nn.Module, other: nn.Module) -> None:
    """Raises PlanError if the copy ``other`` of a model still holds a module, parameter or buffer of ``model`` itself.

    Searched are plain attributes, containers, closures, hooks, classes, and globals that functions read, where a copy
    may have missed something. Registered parameters, buffers and submodules are not checked, because a copy may share
    them on purpose. A class may hold a torch module without parameters, buffers or hooks, such as ``nn.SiLU``. The
    error names the module, parameter or buffer.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> check_apart(model, copied(model, {}))
    """
    descriptions = {id(module): f"module '{name}'" if name else "the model" for name, module in model.named_modules()}
    descriptions |= {id(parameter): f"parameter '{name}'" for name, parameter in model.named_parameters()}
    descriptions |= {id(buffer): f"buffer '{name}'" for name, buffer in model.named_buffers()}
    for place, value in (*outside_registration(other), *_held_by_classes(other)):
        names = list(globals_read(value, descriptions)) if isinstance(value, FunctionType) else []
        if id(value) not in descriptions and not names:
            continue
        what, how = descriptions.get(id(value), "a part of the model"), ""
        if names:
            code = value.__code__
            how = f" by the global name '{names[0]}', in line {code.co_firstlineno} of {code.co_filename}"
            what = descriptions.get(id(value.__globals__[names[0]]), what)
        raise PlanError(
            f"{place} holds a part of the model in a way that cannot be copied",
            given=f"{what}{how}",
            allowed="modules and tensors in attributes, lists, dicts, closures, partials and bound methods",
            fix="give the module that uses it an attribute for it, and read that",
        )


def _may_be_shared(value: Any) -> bool:
    """Returns whether a value is a module of torch with no parameters, buffers or hooks, which draws no numbers."""
    if not isinstance(value, nn.Module) or [*value.parameters(), *value.buffers()]:
        return False
    return all(
        type(module).__module__.startswith("torch.nn.modules.")
        and not isinstance(module, _DropoutNd | nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d)
        and not any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks"))
        and "forward" not in vars(module)
        for module in value.modules()
    )


def _held_by_classes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the class attributes, and the functions with their closures, of the classes of a model's modules.

    Left out are tensors, and lists and dicts of modules and tensors, that no code of a forward names, such as a list of
    all instances of a class, or a parameter that the class keeps for the constructors of its instances.
    """
    seen: dict[int, Any] = {}
    every = {kind for module in model.modules() for kind in type(module).__mro__}
    others = (kind for kind in every if not _is_of_a_library(kind.__module__))
    kinds = sorted(others, key=lambda kind: kind.__qualname__)
    named: set[str] | None = None
    for kind in kinds:
        for name, value in vars(kind).items():
            if name == "__init__":
                continue  # a constructor does not run again
            if _may_be_shared(value):
                continue
            is_of_all = isinstance(value, list | dict | set | Tensor)
            if is_of_all and any(isinstance(x, nn.Module | Tensor) for _, x in reached(value, {})):
                named = _named_in_forwards(model, kinds) if named is None else named
                if name not in named:
                    continue
            yield from ((f"{kind.__qualname__}.{name}{words}", part) for words, part in reached(value, seen))


def _is_of_a_library(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "builtins", "typing", "abc", "collections")


def _is_followed(function: Any) -> bool:
    name = getattr(function, "__module__", None) or ""
    return isinstance(function, FunctionType | partial) and not _is_of_a_library(name) and name[:11] != "shardwright"


def _named_in_forwards(model: nn.Module, kinds: Iterable[type]) -> set[str]:
    """Returns all names in the code of the forwards of ``kinds``, and in the code of functions that these call by name.

    Such functions are attributes of ``kinds`` and global functions. Functions that the model holds in attributes and
    hooks count too.
    """
    waiting = [part for _, part in outside_registration(model) if isinstance(part, FunctionType)]
    functions = defaultdict[str, list[FunctionType]](list)
    for kind in kinds:
        for name, value in vars(kind).items():
            inside = reached(value, {}) if not isinstance(value, list | dict | set) else ()
            functions[name] += [part for _, part in inside if isinstance(part, FunctionType)]
    waiting += [method for name in ("forward", "__call__", "__getattr__") for method in functions[name]]
    all_names, met = set[str](), set[FunctionType]()
    while waiting:
        function = waiting.pop()
        if function in met:
            continue
        met.add(function)
        names = {name for code in code_objects(function) for name in code.co_names}
        all_names |= names
        waiting += [method for name in names for method in functions[name]]
        for value in (function.__globals__.get(name) for name in names):
            if _is_followed(value):
                waiting += [part for _, part in reached(value, {}) if isinstance(part, FunctionType)]
    return all_names
