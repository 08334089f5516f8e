"""The base class of the torch dispatch modes that analyze a model by its operators, and a context without any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode


class DispatchMode(TorchDispatchMode):
    """A ``TorchDispatchMode`` that does not make torch import its compiler, which takes about a second.

    torch disables its compiler inside the code of a mode, and for that imports the compiler at the mode's first
    operator. This class turns that off, so it is for analysis alone: a mode of real training steps, in which compiled
    code may run, must subclass ``TorchDispatchMode`` itself.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def is_collective(function: Any) -> bool:
    """Returns whether an operator sends messages of ``torch.distributed``, functional collectives included.

    >>> import torch
    >>> is_collective(torch.ops.aten.add.Tensor)
    False
    """
    return "c10d" in function.namespace


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Returns a context in which no torch dispatch mode that is active around it sees an operator.

    What is computed on the meta device to plan a call is no operator of the model's: a mode that counts FLOPs, or that
    keeps results for a recomputation, must not see it.

    >>> import torch
    >>> from torch.utils.flop_counter import FlopCounterMode
    >>> x = torch.ones(2, 2)
    >>> with FlopCounterMode(display=False) as counter:
    ...     with without_dispatch_modes():
    ...         _ = x @ x
    ...     counter.get_total_flops(), (x @ x).shape, counter.get_total_flops()
    (0, torch.Size([2, 2]), 16)
    """
    modes = [_pop_mode() for _ in range(_len_torch_dispatch_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)
