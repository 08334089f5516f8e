"""Has any rank's backward reached a parameter? Its summed gradient tells, by the sign of a zero.

::

    reached by     rank 0   rank 1      rank 0 gives   rank 1 gives   sum
                   no       no          -0.0           -0.0           -0.0    no gradient, as on one device
                   yes      no          +0.0           -0.0           +0.0    a gradient of zeros

The two differ: with a gradient of zeros an optimizer still applies weight decay and momentum. A sum of floating-point
numbers is a negative zero only if all its terms are. So a rank without a gradient gives negative zeros, a rank with one
makes sure that an element of each part is not, and nothing more is sent. Of a complex number the real part counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

UNREACHED = -0.0
"""Each element of what a rank gives for a parameter that its backward has not reached."""


@torch.no_grad()
def mark_reached(gradients: Iterable[tuple[Tensor, Sequence[int]]]) -> None:
    """Turns negative zeros positive, in place, at the given flat positions of contiguous gradients."""
    marks = [flat[place] for flat, places in ((g.view(-1), places) for g, places in gradients) for place in places]
    if marks:
        torch._foreach_add_(marks, 0.0)


def is_reached(summed: Tensor) -> bool:
    """Whether a summed gradient has a term from a rank whose backward has reached it; always on the meta device.

    >>> unreached, gradient = torch.full((3,), UNREACHED), torch.zeros(3)
    >>> mark_reached([(gradient, [0])])
    >>> is_reached(gradient + unreached), is_reached(unreached + unreached)
    (True, False)
    """
    signed = summed.real if summed.is_complex() else summed
    return summed.device.type == "meta" or bool((summed.any() | ~signed.signbit().all()).item())


__all__ = ["UNREACHED", "is_reached", "mark_reached"]
