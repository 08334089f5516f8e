"""The backward in two: the gradient of the input now, those of the weights when there is time.

While an ``I`` action runs backward, layers that know how hand over what makes their weight's gradient instead of making
it; the ``W`` action does that work. Nothing is computed twice, and a layer that does not know how makes its gradients
in ``I``. Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

_OWN = __name__.partition(".")[0]


@dataclass
class DeferredGradients:
    """Work that one rank's backward has left for later, by chunk and microbatch.

    >>> deferred, done = DeferredGradients(), []
    >>> with deferred.collecting(chunk=0, microbatch=1):
    ...     deferred.leave(lambda: done.append("weights"))
    >>> done
    []
    >>> deferred.do(0, 1)
    >>> done
    ['weights']
    """

    _waiting: dict[tuple[int, int], list[Callable[[], None]]] = field(default_factory=dict)
    _open: tuple[int, int] | None = None

    @contextmanager
    def collecting(self, chunk: int, microbatch: int) -> Iterator[None]:
        """Until the end, layers leave their weights' gradients."""
        self._open = (chunk, microbatch)
        self._waiting[self._open] = []
        try:
            yield
        finally:
            self._open = None

    def takes(self, parameter: Tensor | None) -> bool:
        """Whether this parameter's gradient is wanted later: asked in backward. One with a person's hook is not."""
        if self._open is None or parameter is None:
            return False
        return parameter.is_leaf and not parameter._backward_hooks and not _is_watched(parameter)

    def leave(self, work: Callable[[], None]) -> None:
        """Keeps ``work`` for the ``W`` action of what is running backward."""
        assert self._open is not None, "only while an I action runs"
        self._waiting[self._open].append(work)

    def do(self, chunk: int, microbatch: int) -> None:
        """All that was left, in the order in which it was."""
        with torch.no_grad():
            for work in self._waiting.pop((chunk, microbatch), ()):
                work()


def _is_watched(parameter: Tensor) -> bool:
    """Whether somebody waits for autograd to fill the gradient, other than this library, which knows when it does."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(getattr(hook, "__module__", "").partition(".")[0] != _OWN for hook in hooks.values())
