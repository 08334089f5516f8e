"""``EventStages``: a model whose recorded forward is cut into pipeline chunks, as the pipeline's ``place`` plans it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwright.analysis.costs import Cost
from shardwright.analysis.events_chunked import EventsChunked
from shardwright.analysis.forward_events import Draw, record_events

UNEVEN = 1.25
"""A stage with more than this times its share of the work or of the parameters is named in ``show``."""


@dataclass(frozen=True)
class EventStages:
    """The plain model on the meta device, its events cut into pipeline chunks, and each chunk's forward cost.

    ``units`` are the modules whose calls are one event each, ``opened`` those that they are called by.
    """

    model: nn.Module
    chunked: EventsChunked
    costs: tuple[Cost, ...]
    units: frozenset[str]
    opened: tuple[str, ...] = ()

    @property
    def num_chunks(self) -> int:
        """The number of pipeline chunks that the model is cut into."""
        return self.chunked.num_chunks

    def costliest(self, chunks: Collection[int]) -> str:
        """Returns the call in these chunks that costs most, with its share of all work."""
        record, total = self.chunked.record, sum(cost.work for cost in self.costs) or 1.0
        mine = [event for event, chunk in zip(record.events, self.chunked.chunk_of, strict=False) if chunk in chunks]
        most = max(mine, key=lambda event: event.cost.work)
        return f"{most} is {most.cost.work / total:.0%} of the work"

    def heaviest(self, chunks: Collection[int]) -> str:
        """Returns the call in these chunks whose module holds most parameters, with its share of all of them."""
        sizes = {name: p.numel() for name, p in self.model.named_parameters()}
        called = {module for chunk in chunks for module in self.chunked.calls_of(chunk)}
        held = {module: sum(sizes.get(name, 0) for name in self.chunked.names.get(module, ())) for module in called}
        most = max(sorted(held), key=lambda module: held[module])
        return f"'{most}' holds {held[most] / (sum(sizes.values()) or 1):.0%} of the parameters"

    def with_inputs(self, inputs: Any, draw: Draw | None = None) -> EventsChunked:
        """Returns the forward of other inputs, cut at the same calls, or at the next ones where it does not make them.

        ``draw`` gives the random numbers by which code skips calls, as in :func:`record_events`.
        """
        record = record_events(self.model, inputs, self.units, draw)
        return EventsChunked(record, self.chunked.starts, self.chunked.names, self.chunked)
