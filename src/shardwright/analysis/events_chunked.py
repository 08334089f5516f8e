"""The events of a forward assigned to pipeline chunks: which values cross, which weights and modules a chunk uses.

A chunk is a contiguous range of events; it begins at a call of a module. Code between events runs on every stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardwright.analysis.call_graph import CallSite, Edge
from shardwright.analysis.forward_record import ForwardRecord, GhostSpec, ValueName
from shardwright.errors import LayoutError


def crossing_name(value: ValueName) -> str:
    """Returns the name under which a value crosses between chunks."""
    return f"{value[0]}.{value[1]}"


@dataclass(frozen=True, eq=False)
class EventsChunked:
    """A recorded forward whose chunks begin at the calls ``starts``, the first at the model's beginning.

    ``names`` are the parameters and buffers in each module. ``planned`` is the forward whose chunks these follow: where
    this one skips a call at which a chunk begins, the chunk begins at the next call of it or of a later chunk.
    """

    record: ForwardRecord
    starts: tuple[CallSite, ...]
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    planned: EventsChunked | None = None

    @property
    def num_chunks(self) -> int:
        """The number of chunks."""
        return len(self.starts)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """The number of the event at which each chunk begins, and the number of all events.

        Raises: LayoutError: this forward does not make the calls at which chunks begin, in their order.
        """
        found = [0]
        for site in self.starts[1:]:
            calls = self.record.calls.get(site.module, [])
            event = calls[site.number] if site.number < len(calls) else None
            if self.planned is not None and len(calls) <= site.number:
                found.append(self._next(self.planned, len(found), found[-1]))
                continue
            # in the planned forward every chunk makes a call; in another, a chunk may be skipped
            first = found[-1] + 1 if self.planned is None else found[-1]
            if event is None or event < first:
                raise LayoutError(
                    f"this forward does not call '{site.module}', where a stage begins, in the order of the cut",
                    given=f"{len(calls)} calls of it, of modules {', '.join(list(self.record.calls)[:6])}, ...",
                    allowed="forwards that make the calls of the example in its order, in training and in evaluation",
                    fix="give parallelize an example with these arguments, or name other modules: cut:first,second",
                )
            found.append(event)
        return (*found, len(self.record.events))

    def _next(self, planned: EventsChunked, chunk: int, first: int) -> int:
        """Returns where a chunk begins whose first call is skipped: at the first call of it or of a later chunk.

        ``first`` is the event from which on it may begin; the calls of chunks are those of the planned forward.
        """
        later = {
            CallSite(event.name, event.number)
            for event in planned.record.events[planned.bounds[chunk] :]
            if event.number is not None
        }
        events = enumerate(self.record.events[first:], first)
        return next((n for n, e in events if CallSite(e.name, e.number or 0) in later), len(self.record.events))

    @cached_property
    def chunk_of(self) -> tuple[int, ...]:
        """The chunk of each event, and at the end that of the model's output."""
        sizes = [stop - first for first, stop in zip(self.bounds, self.bounds[1:], strict=False)]
        return (*(chunk for chunk, size in enumerate(sizes) for _ in range(size)), self.num_chunks - 1)

    def _uses(self) -> Iterator[tuple[int, ValueName]]:
        for number, event in enumerate(self.record.events):
            for value in event.takes:
                if isinstance(value, tuple):
                    yield self.chunk_of[number], value
        for value in self.record.outputs:
            yield self.num_chunks - 1, value

    @cached_property
    def values(self) -> Mapping[tuple[int, int], tuple[ValueName, ...]]:
        """The values that each chunk sends each later one, by source and target."""
        crossing: dict[tuple[int, int], dict[ValueName, None]] = {}
        for chunk, value in self._uses():
            source = self.chunk_of[value[0]]
            if source != chunk:
                crossing.setdefault((source, chunk), {})[value] = None
        return {edge: tuple(sorted(values)) for edge, values in sorted(crossing.items())}

    @cached_property
    def crossing(self) -> tuple[tuple[tuple[int, int], tuple[tuple[GhostSpec, bool], ...]], ...]:
        """The values that chunks send to later chunks, with their shapes, and whether each has a gradient."""
        specs, learning = self.record.specs, self.record.learning
        return tuple((e, tuple((specs[value], value in learning) for value in v)) for e, v in self.values.items())

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """The values that chunks send to later chunks, by name, ordered by source and target."""
        return tuple(Edge(*edge, tuple(map(crossing_name, values))) for edge, values in self.values.items())

    def calls_of(self, chunk: int) -> tuple[str, ...]:
        """The names of the modules that one chunk calls, each once."""
        events = self.record.events[self.bounds[chunk] : self.bounds[chunk + 1]]
        return tuple(dict.fromkeys(event.name for event in events if event.number is not None))

    def weights_by_event(self, chunk: int) -> Iterator[str]:
        """Yields the parameters and buffers that a chunk's events use, event after event, those of one in any order."""
        for event in self.record.events[self.bounds[chunk] : self.bounds[chunk + 1]]:
            own = self.names.get(event.name, ()) if event.number is not None else ()
            yield from (*own, *sorted(event.reads.difference(own)))

    def weights_of(self, chunk: int) -> tuple[str, ...]:
        """The names of the parameters and buffers that one chunk uses; buffers that code between calls reads, none."""
        return tuple(sorted({*self.weights_by_event(chunk)} - self.record.shared_buffers))

    def read_between(self, chunk: int) -> frozenset[str]:
        """Returns the parameters that one chunk's functions between modules take."""
        events = self.record.events[self.bounds[chunk] : self.bounds[chunk + 1]]
        return frozenset().union(*(event.reads for event in events if event.number is None))

    def times(self, module: str, num_calls: int, chunks: Collection[int]) -> tuple[int, ...]:
        """Returns, for each of ``num_calls`` calls of ``module``, how many of ``chunks`` make that call."""
        calls = self.record.calls.get(module, [])
        made = [calls[number] if number < len(calls) else -1 for number in range(num_calls)]
        return tuple(
            len(chunks) if event is None else int(event >= 0 and self.chunk_of[event] in chunks) for event in made
        )

    @cached_property
    def repeats(self) -> Mapping[int, Sequence[tuple[str, int]]]:
        """By event, the modules in it that earlier chunks call too, and how many calls come before the event."""
        found = {}
        for number, event in enumerate(self.record.events):
            first, repeated = self.bounds[self.chunk_of[number]], []
            for path in self.record.inside.get(event.name, ()) if event.number is not None else ():
                calls = [made for made in self.record.calls.get(path, ()) if made is not None]
                if calls and calls[0] < first:
                    repeated.append((path, sum(made < number for made in calls)))
            if repeated:
                found[number] = repeated
        return found

    def lines(self) -> list[str]:
        """Returns lines of text for ranks to compare: every event with its chunk."""
        return [
            f"chunk {chunk}: {event.name} {event.number} ({', '.join(map(str, event.takes))})"
            for chunk, event in zip(self.chunk_of, self.record.events, strict=False)
        ]
