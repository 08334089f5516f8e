"""Copies of functions that see other values for some global names; the functions themselves are left alone."""

from __future__ import annotations

from types import FunctionType
from typing import Any


def with_names(function: Any, **names: Any) -> FunctionType:
    """Returns a copy of a function whose code sees other values for some global names: those in ``names``.

    The function itself is left alone. An assertion fails if its code does not use all of these names.

    >>> def count(things):
    ...     return len(things)
    >>> with_names(count, len=sum)([1, 2]), count([1, 2])
    (3, 2)
    """
    code = function.__code__
    assert names.keys() <= {*code.co_names}, f"this torch's {function.__name__} uses other names"
    copied = FunctionType(code, {**function.__globals__, **names}, None, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
