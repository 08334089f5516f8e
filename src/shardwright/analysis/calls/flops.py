"""Counts the floating-point operations of torch's operators: by torch's table, and by formulas for what it lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry


def flop_formula(packet: Any) -> Callable[..., int] | None:
    """Returns the function that counts the FLOPs of an operator, such as ``torch.ops.aten.mm``; None if it has none.

    The function takes the operator's arguments, and its result as ``out_val``, as tensors or as ``torch.Size``.

    >>> x, w = torch.empty(6, 4), torch.empty(2, 4, 8)  # rows of two groups, and the weights of each
    >>> flop_formula(torch.ops.aten._grouped_mm)(x, w, torch.tensor([2, 6]), out_val=torch.empty(6, 8)) == 2 * 6 * 4 * 8
    True
    >>> flop_formula(torch.ops.aten.relu) is None
    True
    """
    return _OWN.get(packet) or flop_registry.get(packet)


def flops_of_groups(first: Any, second: Any, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of ``_grouped_mm``; they do not depend on the sizes of the groups."""
    a, b = (operand.shape if isinstance(operand, Tensor) else operand for operand in (first, second))
    groups = a[0] if len(a) == len(b) == 3 else 1
    return 2 * groups * prod(a[-2:]) * b[-1]


_OWN: Mapping[Any, Callable[..., int]] = {torch.ops.aten._grouped_mm: flops_of_groups}
