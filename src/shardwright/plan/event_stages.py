"""``EventStages``: a model whose recorded forward is cut into pipeline chunks, as the pipeline's ``place`` plans it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwright.analysis.costs import Cost
from shardwright.analysis.event_chunks import EventChunks
from shardwright.analysis.forward_events import record_events


@dataclass(frozen=True)
class EventStages:
    """The plain model on the meta device, its events cut into pipeline chunks, and each chunk's forward cost.

    ``units`` are the modules whose calls are one event each, ``opened`` those that they are called by.
    """

    model: nn.Module
    chunked: EventChunks
    costs: tuple[Cost, ...]
    units: frozenset[str]
    opened: tuple[str, ...] = ()

    @property
    def num_chunks(self) -> int:
        """The number of pipeline chunks that the model is cut into."""
        return self.chunked.num_chunks

    def with_inputs(self, inputs: Any) -> EventChunks:
        """Returns the forward of other inputs, cut at the same calls. Raises: LayoutError: it does not make them."""
        record = record_events(self.model, inputs, self.units)
        return EventChunks(record, self.chunked.starts, self.chunked.names)
