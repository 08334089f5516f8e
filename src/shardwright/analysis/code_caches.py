"""Undoes what code remembers of a forward on the meta device: tables in ``functools.lru_cache`` and in global dicts.

Code that computes a table of positions once, and keeps it by its length and device, would keep a meta tensor for all
later forwards of the process, which have no use for it.
"""

from __future__ import annotations

import gc
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

LRU_CACHE: type = type(lru_cache(lambda: None))
"""The class of functions that :func:`functools.lru_cache` and :func:`functools.cache` return."""
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


@contextmanager
def code_caches_put_back(model: nn.Module) -> Iterator[None]:
    """Returns a context after which the caches of a model's code hold no meta tensor that they did not hold before.

    Looked at are the caches that the modules of Python hold in which the model's classes are defined, and those that
    these import from the same package or from files beside it: functions with ``lru_cache`` or ``cache``, which are
    emptied, and dicts, from which new entries are removed.

    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.table = cache(lambda size: torch.arange(size, device="meta"))
    >>> model = Model()
    >>> with code_caches_put_back(model):
    ...     _ = model.table(3)
    >>> model.table.cache_info().currsize
    0
    """
    functions, dicts = _caches_of(frozenset(type(module) for module in model.modules()))
    own = [each for module in model.modules() for each in vars(module).values() if type(each) is LRU_CACHE]
    misses, sizes = [each.cache_info().misses for each in (*functions, *own)], list(map(len, dicts))
    try:
        yield
    finally:
        for function, number in zip((*functions, *own), misses, strict=True):
            if function.cache_info().misses != number and any(map(_has_meta, _results(function))):
                function.cache_clear()
        for found, size in zip(dicts, sizes, strict=True):
            for key in list(found)[size:] if len(found) > size else ():  # a dict has its new keys at its end
                if _has_meta(found[key]):
                    del found[key]


@cache
def _caches_of(classes: frozenset[type]) -> tuple[tuple[Any, ...], tuple[dict[Any, Any], ...]]:
    """Returns the cached functions, and the dicts, of the Python modules in which classes are defined."""
    kinds = {kind for each in classes for kind in each.__mro__ if kind.__module__ not in ("builtins", "typing")}
    names = {kind.__module__ for kind in kinds if kind.__module__.partition(".")[0] not in ("torch", "shardwright")}
    packages = {name.partition(".")[0] for name in names}
    modules = {name: sys.modules[name] for name in names if name in sys.modules}
    for module in [*modules.values()]:
        for value in list(vars(module).values()):
            named = isinstance(value, type | FunctionType | LRU_CACHE)
            home = (
                value if isinstance(value, ModuleType) else sys.modules.get(value.__module__ or "") if named else None
            )
            if home is not None and _is_own(home, packages):
                modules.setdefault(home.__name__, home)
    functions: dict[int, Any] = {}
    dicts: dict[int, dict[Any, Any]] = {}
    seen: set[int] = set()
    for module in modules.values():
        values = list(vars(module).values())
        held = [value for value in values if isinstance(value, type) and value.__module__ == module.__name__]
        for value in (*values, *(each for kind in (*held, *kinds) for each in vars(kind).values())):
            if type(value) is dict and value is not vars(module):
                dicts[id(value)] = value
            functions |= {id(each): each for each in _cached(value, seen)}
    return tuple(functions.values()), tuple(dicts.values())


def _is_own(module: ModuleType, packages: set[str]) -> bool:
    """Whether a Python module is of the model's packages, or was not installed: a file beside the user's program."""
    if module.__name__.partition(".")[0] in packages:
        return True
    file = getattr(module, "__file__", None) or ""
    return bool(file) and not file.startswith(_INSTALLED) and not module.__name__.startswith("shardwright")


def _cached(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yields the functions with a cache that a value is, or wraps."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if type(each) is LRU_CACHE:
            yield each
        elif isinstance(each, staticmethod | classmethod):
            waiting.append(each.__func__)
        elif isinstance(each, property):
            waiting.append(each.fget)
        elif isinstance(each, FunctionType) and each.__closure__ and id(each) not in seen:
            seen.add(id(each))
            for cell in each.__closure__:
                with suppress(ValueError):  # a cell may be empty
                    waiting.append(cell.cell_contents)


def _results(function: Any) -> Iterator[Any]:
    """Yields what a cached function has kept, and more. Python shows it to its garbage collector alone."""
    for held in gc.get_referents(function):
        yield from held.values() if type(held) is dict else (held,)


def _has_meta(value: Any) -> bool:
    leaves: Iterable[Any] = tree_leaves(value)
    return any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves)
