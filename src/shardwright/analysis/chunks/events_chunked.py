"""A recorded forward cut into pipeline chunks: which values are sent between chunks, and which weights each chunk uses.

A chunk is a contiguous range of events (recorded calls) and begins at a call of a module. Code between modules that
depends on the inputs alone runs on every stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardwright.analysis.chunks.call_graph import CallSite, Edge
from shardwright.analysis.chunks.chunks_by_parameter import chunks_by_parameter
from shardwright.analysis.chunks.forward_record import ForwardEvent, ForwardRecord, GhostSpec, ValueName
from shardwright.errors import EXAMPLE, LayoutError


def crossing_name(value: ValueName) -> str:
    """Returns the name under which pipeline chunks send a value: ``3.0`` for the first result of recorded call 3."""
    return f"{value[0]}.{value[1]}"


@dataclass(frozen=True, eq=False)
class EventsChunked:
    """A recorded forward cut into pipeline chunks, each of which begins at one of the module calls ``starts``.

    The first chunk begins with the forward. ``names`` gives the parameters and buffers inside each module. ``planned``
    is None for the forward by which the cut was chosen. For another forward of the model, such as one that skips
    layers, ``planned`` is the cut of the first forward. A chunk whose first call is skipped then begins at the next
    call that belongs to this chunk or to a later one.
    """

    record: ForwardRecord
    starts: tuple[CallSite, ...]
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    planned: EventsChunked | None = None

    @property
    def num_chunks(self) -> int:
        """The number of pipeline chunks."""
        return len(self.starts)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """The index of the event (recorded call) at which each chunk begins, followed by the number of all events.

        Raises: LayoutError: this forward does not make the calls at which chunks begin, or makes them in another order.
        """
        bounds = [0]
        for site in self.starts[1:]:
            calls = self.record.calls.get(site.module, [])
            event = calls[site.number] if site.number < len(calls) else None
            if self.planned is not None and len(calls) <= site.number:
                bounds.append(self._next(self.planned, len(bounds), bounds[-1]))
                continue
            # in the planned forward every chunk makes a call; in another, a chunk may be skipped
            first = bounds[-1] + 1 if self.planned is None else bounds[-1]
            if event is None or event < first:
                raise LayoutError(
                    f"this forward does not call '{site.module}', where a stage begins, in the order of the cut",
                    given=f"{len(calls)} calls of it, of modules {', '.join(list(self.record.calls)[:6])}, ...",
                    allowed="forwards that make the calls of the example in its order, in training and in evaluation",
                    fix=f"{EXAMPLE}, with these arguments; or name other modules: cut:first,second",
                )
            bounds.append(event)
        return (*bounds, len(self.record.events))

    def _next(self, planned: EventsChunked, chunk: int, first: int) -> int:
        """Returns the event at which a chunk begins if its first call is skipped: its next call, or a later chunk's.

        No event before ``first`` is considered. The chunk of a call is its chunk in the forward ``planned``. If that
        forward does not call the module, it is the chunk of the module's parameters.
        """
        later = {
            CallSite(event.name, event.number)
            for event in planned.record.events[planned.bounds[chunk] :]
            if event.number is not None
        }

        def belongs(event: ForwardEvent) -> bool:
            if event.number is not None and event.name not in planned.record.calls:
                return any(planned.homes[name][0] >= chunk for name in planned.names.get(event.name, ()))
            return CallSite(event.name, event.number or 0) in later

        events = enumerate(self.record.events[first:], first)
        return next((number for number, event in events if belongs(event)), len(self.record.events))

    @cached_property
    def homes(self) -> Mapping[str, Sequence[int]]:
        """The chunks that use each parameter and buffer, by name; a name that no chunk uses gets one chunk."""
        return chunks_by_parameter(self)

    @cached_property
    def chunk_of(self) -> tuple[int, ...]:
        """The pipeline chunk of each event (recorded call), followed by the chunk of the model's output."""
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
        """The names of the values that chunks send to later chunks, by (source chunk, target chunk), sorted."""
        crossing: dict[tuple[int, int], dict[ValueName, None]] = {}
        for chunk, value in self._uses():
            source = self.chunk_of[value[0]]
            if source != chunk:
                crossing.setdefault((source, chunk), {})[value] = None
        return {edge: tuple(sorted(values)) for edge, values in sorted(crossing.items())}

    @cached_property
    def crossing(self) -> tuple[tuple[tuple[int, int], tuple[tuple[GhostSpec, bool], ...]], ...]:
        """The shapes of the values sent on each edge (source chunk, target chunk), and whether each gets a gradient."""
        specs, learning = self.record.specs, self.record.learning
        return tuple((e, tuple((specs[value], value in learning) for value in v)) for e, v in self.values.items())

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """The names of the values that chunks send to later chunks, as one :class:`Edge` for each pair of chunks."""
        return tuple(Edge(*edge, tuple(map(crossing_name, values))) for edge, values in self.values.items())

    def calls_of(self, chunk: int) -> tuple[str, ...]:
        """Returns the names of the modules that one chunk calls, each once."""
        events = self.record.events[self.bounds[chunk] : self.bounds[chunk + 1]]
        return tuple(dict.fromkeys(event.name for event in events if event.number is not None))

    def weights_by_event(self, chunk: int) -> Iterator[str]:
        """Yields the names of the parameters and buffers that a chunk uses, in the order of its recorded calls.

        A name is yielded again for each further call that uses it.
        """
        for event in self.record.events[self.bounds[chunk] : self.bounds[chunk + 1]]:
            own = self.names.get(event.name, ()) if event.number is not None else ()
            yield from (*own, *sorted(event.reads.difference(own)))
        if chunk == self.num_chunks - 1:
            yield from self.record.returned

    def weights_of(self, chunk: int) -> tuple[str, ...]:
        """Returns the names of the parameters and buffers that one chunk uses.

        Buffers that code between module calls reads are left out, because that code runs on every stage.
        """
        return tuple(sorted({*self.weights_by_event(chunk)} - self.record.shared_buffers))

    def read_between(self, chunk: int) -> frozenset[str]:
        """Returns the names of the parameters that a chunk passes to functions or modules as arguments, or returns."""
        events = self.record.events[self.bounds[chunk] : self.bounds[chunk + 1]]
        returned = self.record.returned if chunk == self.num_chunks - 1 else ()
        return frozenset(returned).union(*map(self.given_to, events))

    def given_to(self, event: ForwardEvent) -> frozenset[str]:
        """Returns the names of the parameters that a call reads and that do not belong to the called module."""
        return event.reads if event.number is None else event.reads.difference(self.names.get(event.name, ()))

    def times(self, module: str, num_calls: int, chunks: Collection[int]) -> tuple[int, ...]:
        """Returns, for each of ``num_calls`` calls of ``module``, how many of ``chunks`` make that call.

        A module call outside of all recorded calls runs in every chunk, and one that the forward did not make in none.
        """
        calls = self.record.calls.get(module, [])
        made = [calls[number] if number < len(calls) else -1 for number in range(num_calls)]
        return tuple(
            len(chunks) if event is None else int(event >= 0 and self.chunk_of[event] in chunks) for event in made
        )

    @cached_property
    def repeats(self) -> Mapping[int, Sequence[tuple[str, int]]]:
        """The modules that an event (recorded call) runs and an earlier chunk has run too, by the index of the event.

        Each module is a pair of its path and the number of its calls before the event, from which a rank continues to
        count. Events without such modules have no entry.
        """
        repeats = {}
        for number, event in enumerate(self.record.events):
            first, repeated = self.bounds[self.chunk_of[number]], []
            for path in self.record.inside.get(event.name, ()) if event.number is not None else ():
                calls = [index for index in self.record.calls.get(path, ()) if index is not None]
                if calls and calls[0] < first:
                    repeated.append((path, sum(index < number for index in calls)))
            if repeated:
                repeats[number] = repeated
        return repeats

    def lines(self) -> list[str]:
        """Returns a line of text for each event (recorded call) with its chunk, by which ranks compare their cuts."""
        return [
            f"chunk {chunk}: {event.name} {event.number} ({', '.join(map(str, event.takes))})"
            for chunk, event in zip(self.chunk_of, self.record.events, strict=False)
        ]
