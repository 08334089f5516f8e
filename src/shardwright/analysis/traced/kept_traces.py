"""Keeps the traces of modules, so that the analyses of a plan, or the plans of a search, share one trace of each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from threading import local
from typing import NamedTuple

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from shardwright.analysis.objects.alike import likeness

_ByKey = dict[Hashable, tuple[nn.Module, fx.Graph | None]]
_KEPT = local()


class _TracedBlocks(NamedTuple):
    of_module: _ByKey
    of_kind: _ByKey
    """The traces by kind of module (:func:`likeness`). The modules are kept too, so that the ids in keys stay taken."""


@contextmanager
def traces_kept() -> Iterator[None]:
    """Returns a context in which :func:`kept` caches traces: modules of equal code, sizes and settings share one.

    A context inside another one, as for a plan within a search, shares the traces by kind with it. Threads do not share
    traces, because in tests each thread is a rank.
    """
    before: _TracedBlocks | None = getattr(_KEPT, "traces", None)
    _KEPT.traces = _TracedBlocks({}, {} if before is None else before.of_kind)
    try:
        yield
    finally:
        _KEPT.traces = before


def kept(
    module: nn.Module, trace: Callable[[nn.Module], fx.Graph | None], way: Hashable = ()
) -> fx.Graph | None:  # fmt: skip
    """Returns ``trace(module)``, or the stored result of an earlier call in the same :func:`traces_kept` context.

    Modules that are alike share a trace, unless the graph holds tensors. The caller must not change the graph. ``way``
    is a key that differs for functions ``trace`` that trace a module differently.

    >>> layer = nn.Linear(2, 2)
    >>> with traces_kept():
    ...     kept(layer, lambda _: fx.Graph()) is kept(layer, lambda _: fx.Graph())
    True
    """
    traces: _TracedBlocks | None = getattr(_KEPT, "traces", None)
    if traces is None:
        return trace(module)
    key = id(module), way
    if key not in traces.of_module:
        alike = *likeness(module), way
        graph = traces.of_kind[alike][1] if alike in traces.of_kind else trace(module)
        traces.of_module[key] = module, graph  # the module too, so that its id stays taken
        if graph is None or not _holds_tensors(graph):
            traces.of_kind[alike] = module, graph
    return traces.of_module[key][1]


def _holds_tensors(graph: fx.Graph) -> bool:
    return any(isinstance(leaf, Tensor) for node in graph.nodes for leaf in tree_leaves((node.args, node.kwargs)))
