"""Pickles the work of ranks, and its results, for the pipes between the launcher and the rank processes it started.

A rank imports the program's main script again, so functions of a script are pickled by name. It cannot import a
notebook, an interactive session or ``python -c``: what these define is pickled by value, by the package cloudpickle. So
are functions inside of functions of a script. Those of an imported module, such as the hooks that a package puts on a
model, are pickled here: their code by value, and their globals by the module's name. Nothing that is read here comes
from anywhere but the inherited pipes.
"""

from __future__ import annotations

import io
import marshal
import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from types import CellType, FunctionType
from typing import Any

from shardwright.errors import PlanError

Dumps = Callable[[Any], bytes]


class _NoModuleError(Exception):
    """Raised for an object that is defined in a main program which ranks cannot import."""


class _FunctionTransfer(pickle.Pickler):
    """A pickler that also takes functions defined inside an imported module's functions, by their code.

    Without ``main`` it raises for functions and classes of the main program, which it would pickle by name.
    """

    def __init__(self, file: io.BytesIO, *, main: bool) -> None:
        super().__init__(file)
        self._main = main

    def reducer_override(self, value: Any) -> Any:
        if not self._main and getattr(value, "__module__", "") == "__main__" and hasattr(value, "__qualname__"):
            raise _NoModuleError(value.__qualname__)
        if isinstance(value, CellType):
            try:
                return _cell, (), (value.cell_contents,), None, None, _fill_cell
            except ValueError:  # an empty cell
                return _cell, ()
        if isinstance(value, FunctionType) and _is_nested(value):
            made = (marshal.dumps(value.__code__), value.__globals__["__name__"], value.__name__, value.__closure__)
            names = ("__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__")
            state = {name: getattr(value, name) for name in names}, vars(value)
            return _function, made, state, None, None, _fill_function
        return NotImplemented


def _is_nested(function: FunctionType) -> bool:
    """Whether a function cannot be found by its name, but its globals are those of a module that ranks can import."""
    home = sys.modules.get(function.__globals__.get("__name__", ""))
    if home is None or home.__spec__ is None or home.__name__ == "__main__":
        return False
    target: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        target = getattr(target, name, None)
    return target is not function and vars(home) is function.__globals__


def _function(code: bytes, module: str, name: str, cells: tuple[CellType, ...] | None) -> FunctionType:
    return FunctionType(marshal.loads(code), vars(import_module(module)), name, None, cells)


def _fill_function(function: FunctionType, state: tuple[Mapping[str, Any], Mapping[str, Any]]) -> None:
    """Sets a function's defaults and attributes, after it was made, because these may hold the function itself."""
    named, attributes = state
    for name, value in named.items():
        setattr(function, name, value)
    vars(function).update(attributes)


def _cell() -> CellType:
    return CellType()  # the class itself cannot be pickled


def _fill_cell(cell: CellType, contents: tuple[Any]) -> None:
    cell.cell_contents = contents[0]


def is_importable(program: Mapping[str, Any]) -> bool:
    """Returns whether ranks can import the main program, from multiprocessing's description of it.

    >>> is_importable({"init_main_from_path": "train.py"}), is_importable({"sys_argv": [""]})
    (True, False)
    """
    return "init_main_from_path" in program or "init_main_from_name" in program


def dumps(value: Any, *, main: bool) -> bytes:
    """Returns ``value`` pickled for another process; ``main`` says whether that process can import the main program.

    Raises: PlanError: a function or class is defined where a rank cannot import it, and cloudpickle is not installed.
    """
    try:
        with suppress(pickle.PicklingError, AttributeError, TypeError):
            if main:  # faster by far where it can be done
                return pickle.dumps(value)
        data = io.BytesIO()
        _FunctionTransfer(data, main=main).dump(value)
        return data.getvalue()
    except (_NoModuleError, pickle.PicklingError, AttributeError, TypeError) as failure:
        if find_spec("cloudpickle") is not None:
            import cloudpickle

            payload: bytes = cloudpickle.dumps(value)
            return payload
        what = str(failure) if isinstance(failure, _NoModuleError) else f"{type(failure).__name__}: {failure}"
        raise PlanError(
            "ranks that are processes cannot import what they are to run",
            given=f"{what}, of {'a notebook, an interactive session or python -c' if not main else 'this program'}",
            allowed="functions of modules and scripts; with the package cloudpickle also those of notebooks",
            fix="pip install cloudpickle, or move the function into a module, or write launch(..., ranks='threads')",
        ) from failure
