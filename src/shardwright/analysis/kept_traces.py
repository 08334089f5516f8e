"""Traces that are kept while one plan is made: the modules do not change meanwhile, and several parts look at them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local

from torch import fx, nn

Traces = dict[int, tuple[nn.Module, fx.Graph | None]]
_KEPT = local()


@contextmanager
def traces_kept() -> Iterator[None]:
    """A context in which :func:`kept` traces each module once; threads, each a rank in tests, do not share traces."""
    before: Traces | None = getattr(_KEPT, "traces", None)
    _KEPT.traces = {} if before is None else before
    try:
        yield
    finally:
        _KEPT.traces = before


def kept(module: nn.Module, trace: Callable[[nn.Module], fx.Graph | None]) -> fx.Graph | None:
    """Returns ``trace(module)``, of which the caller changes nothing.

    >>> layer = nn.Linear(2, 2)
    >>> with traces_kept():
    ...     kept(layer, lambda _: fx.Graph()) is kept(layer, lambda _: fx.Graph())
    True
    """
    traces: Traces | None = getattr(_KEPT, "traces", None)
    if traces is None:
        return trace(module)
    if id(module) not in traces:
        traces[id(module)] = module, trace(module)  # the module too, so that its id stays taken
    return traces[id(module)][1]
