"""Keeps the traces of modules while one plan is made, so that several analyses share one trace of each module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import local

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from shardwright.analysis.alike import likeness

Traces = dict[object, tuple[nn.Module, fx.Graph | None]]
_KEPT = local()


@contextmanager
def traces_kept() -> Iterator[None]:
    """Returns a context in which :func:`kept` traces each module only once.

    Threads do not share traces, because in tests each thread is a rank.
    """
    before: Traces | None = getattr(_KEPT, "traces", None)
    _KEPT.traces = {} if before is None else before
    try:
        yield
    finally:
        _KEPT.traces = before


def kept(module: nn.Module, trace: Callable[[nn.Module], fx.Graph | None]) -> fx.Graph | None:
    """Returns ``trace(module)``, or the stored result of an earlier call in the same :func:`traces_kept` context.

    Modules that are alike share a trace, unless the graph holds tensors. The caller must not change the graph.

    >>> layer = nn.Linear(2, 2)
    >>> with traces_kept():
    ...     kept(layer, lambda _: fx.Graph()) is kept(layer, lambda _: fx.Graph())
    True
    """
    traces: Traces | None = getattr(_KEPT, "traces", None)
    if traces is None:
        return trace(module)
    if id(module) not in traces:
        alike = likeness(module)
        found = traces[alike][1] if alike in traces else trace(module)
        traces[id(module)] = module, found  # the module too, so that its id stays taken
        if found is not None and not _holds_tensors(found):
            traces[alike] = module, found
    return traces[id(module)][1]


def _holds_tensors(graph: fx.Graph) -> bool:
    return any(isinstance(leaf, Tensor) for node in graph.nodes for leaf in tree_leaves((node.args, node.kwargs)))
