"""Keeps meta tensors out of the caches that a model's code fills: ``lru_cache``, global variables, class attributes.

A model is run on the meta device to record it. Some code computes a table of positions once, and caches it by length
and device. After a record, that cache would give a tensor without values to every later forward of the process.
"""

from __future__ import annotations

import gc
import site
import sys
import sysconfig
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

LRU_CACHE: type = type(lru_cache(lambda: None))
"""The class of functions that :func:`functools.lru_cache` and :func:`functools.cache` return."""
_DICTS = (dict, OrderedDict, defaultdict)
"""The classes of global dicts whose contents are restored; other subclasses may import modules when read."""
_INSTALLED = (
    *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    site.getusersitepackages(), *site.getsitepackages(),
)  # fmt: skip


@contextmanager
def code_caches_put_back(model: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """Returns a context after which the caches of a model's code hold no meta tensor that they did not hold before.

    The context yields a list. Once the context has ended, the list has the tensors that were taken out of variables,
    dicts, lists and attributes, each with the name of the variable or attribute.

    The context covers the Python modules that define the model's classes, and the user's own modules that these import
    from. Caches of functions with ``lru_cache`` or ``cache`` are emptied. Global variables, dicts and lists, and the
    classes' own attributes, get back what they held before. Ranks that are threads may use the context at once.

    >>> import torch
    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.table = lru_cache(lambda size: torch.arange(size, device="meta"))
    >>> model = Model()
    >>> with code_caches_put_back(model):
    ...     _ = model.table(3)
    >>> model.table.cache_info().currsize
    0
    """
    functions, modules, classes = _caches_of(frozenset(type(module) for module in model.modules()))
    own_functions = [
        attribute for module in model.modules() for attribute in vars(module).values() if type(attribute) is LRU_CACHE
    ]
    names = [vars(module) for module in modules]
    values = [variable for namespace in (*names, *map(vars, classes)) for variable in list(namespace.values())]
    dicts = [*names, *(variable for variable in values if type(variable) in _DICTS)]
    # a user's module may have a global variable for ``sys.modules``, which must not be restored
    before = [(table, dict(table)) for table in dicts if table is not sys.modules]
    lists = [(variable, list(variable)) for variable in values if type(variable) is list]
    attributes = [(kind, dict(vars(kind))) for kind in classes]
    cache_infos = [(cache, cache.cache_info()) for cache in (*functions, *own_functions)]
    taken = list[tuple[str, Tensor]]()

    def note(value: Any, name: str, holder: Any = None) -> None:
        """Appends each meta tensor in ``value`` to ``taken``, with a name for errors.

        That is the name of the global variable or class attribute whose value is ``holder``, or else ``name``.
        """
        variables = (item for namespace in (*names, *map(vars, classes)) for item in list(namespace.items()))
        name = next((label for label, other in variables if other is holder), name) if holder is not None else name
        taken.extend((name, leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_meta)

    try:
        yield taken
    finally:
        for function, info in cache_infos:
            # compared without the number of hits, which stores nothing
            if function.cache_info()[1:] != info[1:] and any(map(_has_meta, _results(function))):
                function.cache_clear()
        for entries, were in lists:
            if len(entries) != len(were) and any(map(_has_meta, entries)):
                note(entries[len(were) :], "a list", entries)
                entries[:] = were
        for kind, contents in attributes:
            for key, value in list(vars(kind).items()):
                if contents.get(key) is not value and _has_meta(value):
                    note(value, key)
                    setattr(kind, key, contents[key]) if key in contents else delattr(kind, key)
        for now, contents in before:
            changed = {
                key: value for key, value in list(now.items()) if key not in contents or contents[key] is not value
            }
            if any(map(_has_meta, changed.values())):
                for key, value in changed.items():
                    note(value, str(key), now)
                    if key in contents:
                        now[key] = contents[key]
                    else:
                        now.pop(key, None)


@lru_cache(maxsize=64)
def _caches_of(classes: frozenset[type]) -> tuple[tuple[Any, ...], tuple[ModuleType, ...], tuple[type, ...]]:
    """Returns where the code of some classes may keep tensors: cached functions, Python modules, and classes.

    The cached functions have an ``lru_cache``. The classes are ``classes`` and their bases, without those of torch and
    of this library. The Python modules are the ones that define these classes, and the user's own modules that they
    import from. The result is cached.
    """
    kinds = {kind for cls in classes for kind in cls.__mro__ if isinstance(kind.__module__, str)}
    user_kinds = tuple(
        kind for kind in kinds if kind.__module__.partition(".")[0] not in ("torch", "shardwright", "builtins")
    )
    names = {kind.__module__ for kind in user_kinds}
    packages = {name.partition(".")[0] for name in names - {"typing"}}
    modules = {name: sys.modules[name] for name in names if name.partition(".")[0] in packages and name in sys.modules}
    for module in [*modules.values()]:
        for value in list(vars(module).values()):
            home = _home_of(value)
            if home is not None and _is_own(home, packages):
                modules.setdefault(vars(home)["__name__"], home)
    values = [value for kind in kinds for value in vars(kind).values()]
    for name, module in modules.items():
        for value in list(vars(module).values()):
            values.append(value)
            values += vars(value).values() if issubclass(type(value), type) and value.__module__ == name else ()
    seen: set[int] = set()
    functions = {id(function): function for value in values for function in _cached(value, seen)}
    return tuple(functions.values()), tuple(modules.values()), user_kinds


def _home_of(value: Any) -> ModuleType | None:
    """Returns a value that is a Python module, or the module that defines a function or class; None for other values.

    No attribute of other values is read, since that may import something, or fail.
    """
    kind = type(value)
    if issubclass(kind, ModuleType):
        module: ModuleType = value
        return module
    if kind is not LRU_CACHE and not issubclass(kind, type | FunctionType):
        return None
    name = value.__module__
    return sys.modules.get(name) if isinstance(name, str) else None


def _is_own(module: ModuleType, packages: set[str]) -> bool:
    """Whether a Python module belongs to one of the model's packages, or is a file that was not installed."""
    name, file = vars(module).get("__name__"), vars(module).get("__file__")
    if not isinstance(name, str) or name.partition(".")[0] == "shardwright":
        return False
    return name.partition(".")[0] in packages or (isinstance(file, str) and not file.startswith(_INSTALLED))


def _cached(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yields the functions with an ``lru_cache`` among a value and the functions that it wraps.

    A value may wrap a function as a static method, a class method, a property or a closure. Ids of the closures that
    have been searched are added to ``seen``, and closures in it are skipped.
    """
    waiting = [value]
    while waiting:
        candidate = waiting.pop()
        kind = type(candidate)
        if kind is LRU_CACHE:
            yield candidate
        elif kind in (staticmethod, classmethod):
            waiting.append(candidate.__func__)
        elif kind is property:
            waiting.append(candidate.fget)
        elif kind is FunctionType and candidate.__closure__ and id(candidate) not in seen:
            seen.add(id(candidate))
            for cell in candidate.__closure__:
                with suppress(ValueError):  # a cell may be empty
                    waiting.append(cell.cell_contents)


def _results(function: Any) -> Iterator[Any]:
    """Yields the arguments and results in a function's ``lru_cache``, and other objects that the function refers to.

    Python can read such a cache only by asking its garbage collector for the objects that the function refers to.
    """
    for held in gc.get_referents(function):
        yield from list(held.values()) if type(held) is dict else (held,)


_HOLDS = (Tensor, dict, list, tuple, set)


def _has_meta(value: Any) -> bool:
    if not issubclass(type(value), _HOLDS):  # a shortcut for most values
        return False
    return any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves(value))
