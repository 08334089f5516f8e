"""Pickles the work of ranks, and its results, for the pipes between the launcher and the rank processes it started.

A rank imports the program's main script again, so functions of a script are pickled by name. It cannot import a
notebook, an interactive session or ``python -c``: what these define is pickled by value, by the package cloudpickle. So
are functions inside of functions. Nothing that is read here comes from anywhere but the inherited pipes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from shardwright.errors import PlanError

Dumps = Callable[[Any], bytes]


class _NoModuleError(Exception):
    """Raised for an object that is defined in a main program which ranks cannot import."""


class _ModuleChecker(pickle.Pickler):
    """A pickler that raises for functions and classes of the main program, which it would pickle by name."""

    def reducer_override(self, value: Any) -> Any:
        if getattr(value, "__module__", "") == "__main__" and hasattr(value, "__qualname__"):
            raise _NoModuleError(value.__qualname__)
        return NotImplemented


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
        if main:
            return pickle.dumps(value)
        data = io.BytesIO()
        _ModuleChecker(data).dump(value)
        return data.getvalue()
    except (_NoModuleError, pickle.PicklingError, AttributeError, TypeError) as failure:
        if find_spec("cloudpickle") is not None:
            import cloudpickle

            found: bytes = cloudpickle.dumps(value)
            return found
        what = str(failure) if isinstance(failure, _NoModuleError) else f"{type(failure).__name__}: {failure}"
        raise PlanError(
            "ranks that are processes cannot import what they are to run",
            given=f"{what}, of {'a notebook, an interactive session or python -c' if not main else 'this program'}",
            allowed="functions of modules and scripts; with the package cloudpickle also those of notebooks",
            fix="pip install cloudpickle, or move the function into a module, or write launch(..., ranks='threads')",
        ) from failure
