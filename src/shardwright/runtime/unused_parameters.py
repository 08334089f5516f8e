"""Whether any rank's backward has reached a parameter: its summed gradient says it, by the sign of a zero.

::

    reached by     rank 0   rank 1      rank 0 gives   rank 1 gives   sum
                   no       no          -0.0           -0.0           -0.0    no gradient, as on one device
                   yes      no          +0.0           -0.0           +0.0    a gradient of zeros

A sum of floating-point numbers is a negative zero only where all its terms are. So who has no gradient gives negative
zeros, who has one sees to it that an element of each part is none, and nothing more is sent. Of a complex number it
is the real part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

NOTHING = -0.0
"""What a rank gives, for each element, whose backward has not reached a parameter."""


@torch.no_grad()
def mark_reached(gradients: Iterable[tuple[Tensor, Sequence[int]]]) -> None:
    """Makes elements at these places of contiguous gradients, counted flat, positive where they are negative zeros."""
    marks = [flat[place] for flat, places in ((g.view(-1), places) for g, places in gradients) for place in places]
    if marks:
        torch._foreach_add_(marks, 0.0)


def is_reached(summed: Tensor) -> bool:
    """Whether some rank's backward has reached what this is the summed gradient of; on the meta device, yes.

    >>> nothing, gradient = torch.full((3,), NOTHING), torch.zeros(3)
    >>> mark_reached([(gradient, [0])])
    >>> is_reached(gradient + nothing), is_reached(nothing + nothing)
    (True, False)
    """
    signed = summed.real if summed.is_complex() else summed
    return summed.device.type == "meta" or bool((summed.any() | ~signed.signbit().all()).item())


__all__ = ["NOTHING", "is_reached", "mark_reached"]
