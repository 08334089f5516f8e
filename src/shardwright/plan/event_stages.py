"""``EventStages``: a model cut into pipeline chunks at module calls of a recorded forward."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright.analysis.chunks.costs import Cost
from shardwright.analysis.chunks.events_chunked import EventsChunked
from shardwright.analysis.chunks.forward_events import Draw, record_events
from shardwright.analysis.on_meta.meta_values import ValueReadError

UNEVEN = 1.25
"""The unevenness of a stage above which ``show`` and ``parallelize`` name its costliest call or largest module.

Unevenness is a stage's share of all work, or of all parameters, times the number of stages.
"""


@dataclass(frozen=True)
class EventStages:
    """A model whose recorded forward is cut into pipeline chunks, with the forward cost of each chunk.

    ``model`` is the plain model on the meta device. ``units`` are the modules that the record has as single calls, and
    ``opened`` the modules around them, of which it has the inner calls instead.
    """

    model: nn.Module
    chunked: EventsChunked
    costs: tuple[Cost, ...]
    units: frozenset[str]
    opened: tuple[str, ...] = ()

    def called(self) -> frozenset[str]:
        """Returns the names of the modules that stages call as a whole, one event of the recorded forward each."""
        return self.units

    @property
    def uncalled(self) -> frozenset[str]:
        """The names of the modules in :attr:`units` that the recorded forward did not call, though another may."""
        return self.units - self.chunked.record.calls.keys()

    @property
    def num_chunks(self) -> int:
        """The number of pipeline chunks that the model is cut into."""
        return self.chunked.num_chunks

    def costliest(self, chunks: Collection[int]) -> str:
        """Returns a phrase that names the most expensive call in the pipeline ``chunks``, and its share of all work."""
        record, total = self.chunked.record, sum(cost.work for cost in self.costs) or 1.0
        mine = [event for event, chunk in zip(record.events, self.chunked.chunk_of, strict=False) if chunk in chunks]
        most = max(mine, key=lambda event: event.cost.work)
        return f"{most} is {most.cost.work / total:.0%} of the work"

    def with_inputs(self, inputs: Any, draw: Draw | None = None) -> EventsChunked:
        """Records the forward again with other inputs, and returns it cut into chunks at the same module calls.

        If this forward skips the first call of a chunk, the chunk begins at the next call of its own or of a later
        chunk. ``draw`` gives the random numbers by which the code skips calls, as in :func:`record_events`. Code that
        reads values of inputs on the meta device, which have none, reads ones, as where the stages were cut.

        Raises: ValueReadError: the code reads a value that depends on a parameter.
        """
        try:
            record = record_events(self.model, inputs, self.units, draw)
        except ValueReadError:
            ones = tree_map_only(Tensor, lambda t: torch.ones(t.shape, dtype=t.dtype) if t.is_meta else t, inputs)
            record = record_events(self.model, ones, self.units, draw)
        return EventsChunked(record, self.chunked.starts, self.chunked.names, self.chunked)
