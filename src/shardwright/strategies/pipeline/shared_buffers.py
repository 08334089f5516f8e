"""Checks that no pipeline stage writes into a buffer that other stages use too: their copies would keep old values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from shardwright.analysis.chunks.call_graph import ChunkedModel
from shardwright.errors import PlanError

CODE = ""
"""The path that stands for the model's own code, outside of any module, among the modules that read a buffer."""


class _BufferSnapshot:
    """A record of a buffer, to detect a write: its tensor, torch's version counter and, ``with_values``, its values."""

    def __init__(self, buffer: Tensor, with_values: bool) -> None:
        self._buffer, self._version = buffer, buffer._version
        self._values = buffer.clone() if with_values and not buffer.is_meta else None

    def is_unchanged(self, buffer: Tensor) -> bool:
        same = buffer is self._buffer and buffer._version == self._version
        return same and (self._values is None or torch.equal(self._values, buffer))


class SharedBuffers:
    """Detects that this stage writes into a buffer which other pipeline stages use too.

    One write to each buffer is allowed if the other stages read it only in calls of modules that this stage calls too:
    their calls then make the same write, such as a table that is computed on first use.
    """

    def __init__(self, chunked: ChunkedModel, stage_of: Sequence[int], stage: int) -> None:
        self.stage = stage
        users: dict[str, dict[int, set[str]]] = {}
        for chunk, at in enumerate(stage_of):
            for name, through in _uses(chunked, chunk):
                users.setdefault(name, {}).setdefault(at, set()).add(through)
        self.users: Mapping[str, Mapping[int, set[str]]] = {
            name: by_stage for name, by_stage in users.items() if len(by_stage) > 1 and stage in by_stage
        }
        self._filled: set[str] = set()
        self._statistics: dict[str, bool] = {}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Returns a context around one chunk's forward that detects writes into buffers which other stages use too.

        Raises: PlanError, on exit: the forward wrote into such a buffer. A buffer's first write is allowed if the other
            stages read the buffer only in calls of modules that this stage calls too.
        """
        before = {
            name: _BufferSnapshot(buffer, self._is_statistic(model, name)) for name, buffer in self._shared(model)
        }
        yield
        for name, buffer in self._shared(model):
            if before[name].is_unchanged(buffer):
                continue
            others = set().union(*(through for at, through in self.users[name].items() if at != self.stage))
            if name in self._filled or CODE in others or not others <= self.users[name][self.stage]:
                kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
                raise PlanError(
                    f"stage {self.stage} writes into '{name}', and other stages keep the old values",
                    given=f"a buffer of {kind} that stages {', '.join(map(str, sorted(self.users[name])))} use",
                    allowed="buffers that several stages read and none writes into, or that one stage alone uses",
                    fix="return the value from the module's forward instead of reading the buffer, or cut elsewhere",
                )
            self._filled.add(name)

    def _shared(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name in self.users:
            path, _, own = name.rpartition(".")
            buffer = model.get_submodule(path)._buffers.get(own)  # parameters are changed by the optimizer alone
            if buffer is not None:
                yield name, buffer

    def _is_statistic(self, model: nn.Module, name: str) -> bool:
        """Returns whether the buffer holds running statistics of a norm; torch does not count their updates."""
        if name not in self._statistics:
            buffer, norms = model.get_buffer(name), (m for m in model.modules() if isinstance(m, _NormBase))
            self._statistics[name] = any(statistic is buffer for norm in norms for statistic in norm._buffers.values())
        return self._statistics[name]


def _uses(chunked: ChunkedModel, chunk: int) -> Iterator[tuple[str, str]]:
    """Yields the parameters and buffers that a chunk uses, each with the path of the module that reads it."""
    for node in chunked.nodes_of(chunk):
        if node.op == "get_attr":
            yield str(node.target), CODE
        elif node.op == "call_module":
            for name in chunked.names.get(str(node.target), ()):
                yield name, str(node.target)
