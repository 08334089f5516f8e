"""Buffers that several stages read: what one of them writes into its own reaches no other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from shardwright.analysis.call_graph import Chunked
from shardwright.errors import PlanError

CODE = ""
"""Stands, among the modules through which a stage uses a buffer, for the model's code between them."""


class _Seen:
    """A buffer as it was: which tensor, how often written into and, if asked for, its values."""

    def __init__(self, buffer: Tensor, with_values: bool) -> None:
        self._buffer, self._version = buffer, buffer._version
        self._values = buffer.clone() if with_values and not buffer.is_meta else None

    def is_still(self, buffer: Tensor) -> bool:
        same = buffer is self._buffer and buffer._version == self._version
        return same and (self._values is None or torch.equal(self._values, buffer))


class SharedBuffers:
    """Looks whether one stage changes a buffer that another uses as well.

    Where all use it by calling one module, each may fill it once, like a table that is made when it is first needed.

    >>> from shardwright.analysis.call_graph import CallSite, read_graph, weights_by_module
    >>> model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    >>> model[1].running_mean = model[0].running_mean
    >>> chunk_of = {CallSite("0"): 0, CallSite("1"): 1}
    >>> chunked = Chunked(read_graph(model), chunk_of, 2, weights_by_module(model))
    >>> with SharedBuffers(chunked, stage_of=(0, 1), stage=0).watching(model):
    ...     y = model[0](torch.ones(3, 2))
    Traceback (most recent call last):
    shardwright.errors.PlanError: stage 0 writes into '0.running_mean', and other stages go on with what it was before
      given:   a buffer of BatchNorm1d that stages 0, 1 use
      allowed: buffers that several stages read and none writes into, or one stage alone
      fix:     return the value from the module's forward in place of reading it from outside, or cut elsewhere
    """

    def __init__(self, chunked: Chunked, stage_of: Sequence[int], stage: int) -> None:
        self.stage = stage
        users: dict[str, dict[int, set[str]]] = {}
        for chunk, at in enumerate(stage_of):
            for name, through in _uses(chunked, chunk):
                users.setdefault(name, {}).setdefault(at, set()).add(through)
        self.users: Mapping[str, Mapping[int, set[str]]] = {
            name: by_stage for name, by_stage in users.items() if len(by_stage) > 1 and stage in by_stage
        }
        self._filled: set[str] = set()
        self._means: dict[str, bool] = {}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """A forward of one chunk. Raises: PlanError: it changed a buffer that others use."""
        before = {name: _Seen(buffer, self._is_mean(model, name)) for name, buffer in self._held(model)}
        yield
        for name, buffer in self._held(model):
            if before[name].is_still(buffer):
                continue
            others = set().union(*(through for at, through in self.users[name].items() if at != self.stage))
            if name in self._filled or CODE in others or not others <= self.users[name][self.stage]:
                raise self._refused(model, name)
            self._filled.add(name)

    def _held(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name in self.users:
            path, _, own = name.rpartition(".")
            buffer = model.get_submodule(path)._buffers.get(own)  # a parameter is not written into
            if buffer is not None:
                yield name, buffer

    def _is_mean(self, model: nn.Module, name: str) -> bool:
        """Whether a normalisation keeps its statistics there: what torch writes so, it does not count as a write."""
        if name not in self._means:
            buffer, norms = model.get_buffer(name), (m for m in model.modules() if isinstance(m, _NormBase))
            self._means[name] = any(each is buffer for norm in norms for each in norm._buffers.values())
        return self._means[name]

    def _refused(self, model: nn.Module, name: str) -> PlanError:
        kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
        return PlanError(
            f"stage {self.stage} writes into '{name}', and other stages go on with what it was before",
            given=f"a buffer of {kind} that stages {', '.join(map(str, sorted(self.users[name])))} use",
            allowed="buffers that several stages read and none writes into, or one stage alone",
            fix="return the value from the module's forward in place of reading it from outside, or cut elsewhere",
        )


def _uses(chunked: Chunked, chunk: int) -> Iterator[tuple[str, str]]:
    """The parameters and buffers that a chunk uses, each with the module through which it does."""
    for node in chunked.nodes_of(chunk):
        if node.op == "get_attr":
            yield str(node.target), CODE
        elif node.op == "call_module":
            for name in chunked.names.get(str(node.target), ()):
                yield name, str(node.target)
