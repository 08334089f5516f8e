"""Runs the Python code of functions of ``torch.jit.script`` where this library has to see their operators.

Torch runs such a function in C++, which no function mode sees: its operators are not recorded, a tensor shard may not
enter it, and what it draws has no key. Torch keeps the Python function that was scripted, for its compiler, which runs
it in the same case. A function of ``torch.jit.trace`` has no such code, and neither has a scripted module.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

_KIND: Any = torch.jit.ScriptFunction
_IN_CPP = _KIND.__call__


@wraps(_IN_CPP)
def _call(function: Any, *args: Any, **named: Any) -> Any:
    python = getattr(function, "_torchdynamo_inline", None)
    if python is None or not torch._C._len_torch_function_stack():
        return _IN_CPP(function, *args, **named)
    return python(*args, **named)


def see_scripted_functions() -> None:
    """From now on scripted functions run as Python while a torch function mode is active, and else as before.

    Torch has no hook for their calls, so the method of their class is replaced, once in a process.

    >>> import warnings
    >>> from shardwright.analysis.on_meta.device_moves import OnMeta
    >>> with warnings.catch_warnings(action="ignore"):  # torch advises against scripts
    ...     scripted = torch.jit.script(torch.nn.functional.silu)
    >>> see_scripted_functions()
    >>> with OnMeta():
    ...     scripted(torch.zeros(2))
    tensor([0., 0.])
    """
    if _KIND.__call__ is not _call:
        _KIND.__call__ = _call
