"""Records traffic: one entry for each collective or p2p message, written by the backend that moves the bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import NamedTuple, Protocol
from weakref import WeakSet

from shardwright.comm.channel import Channel
from shardwright.comm.collective_call import CollectiveCall


class Record(NamedTuple):
    """A collective or p2p message of a rank: its kind, mesh axis, payload in bytes, and the strategy that called it.

    ``layer`` is the path of the module for which it was called, in rehearsals that follow modules, and else "".
    """

    kind: str
    axis: str
    num_bytes: int
    source: str
    layer: str = ""


def ring_factor(kind: str, num_ranks: int) -> Fraction:
    """Returns how many bytes one rank sends in a ring algorithm, as an exact multiple of the collective's payload.

    The payload is the size of the whole tensor. A receive or barrier gives 0, and a send or broadcast 1.

    >>> ring_factor("all_reduce", 4), ring_factor("all_gather", 4), ring_factor("send", 2)
    (Fraction(3, 2), Fraction(3, 4), Fraction(1, 1))
    """
    if kind in ("send", "broadcast"):
        return Fraction(1)
    if kind in ("receive", "barrier"):
        return Fraction(0)
    return Fraction(num_ranks - 1, num_ranks) * (2 if kind == "all_reduce" else 1)


class CallFollower(Protocol):
    """A listener to a rank's collectives and messages, to predict how communication overlaps with computation.

    Only the fake backend calls it.
    """

    def began(self, call: CollectiveCall, num_bytes: int, ranks: tuple[int, ...]) -> None:
        """Called when the rank begins a collective or message of payload ``num_bytes`` in the group of ``ranks``."""
        ...

    def awaited(self, call: CollectiveCall) -> None:
        """Called when the rank waits for a collective that it began; it is not called for sends and receives."""
        ...


class Recorder:
    """Records one rank's collectives and p2p messages, in order, into the lists that :meth:`recording` opens.

    ``follower`` may be set to a :class:`CallFollower`, which the fake backend calls. ``channels`` are the rank's
    channels that are in use, for a profile that names their calls. Records have ``layer`` as their layer.
    """

    def __init__(self) -> None:
        self.channels: WeakSet[Channel] = WeakSet()
        self.layer = ""
        self._listeners: list[list[Record]] = []
        self.follower: CallFollower | None = None

    def enter_layer(self, path: str) -> None:
        """Sets the layer of the records that follow."""
        self.layer = path

    def note(self, call: CollectiveCall, num_bytes: int) -> None:
        """Appends a call with its payload in bytes to every list that :meth:`recording` has open."""
        for records in self._listeners:
            records.append(Record(call.kind, call.axis, num_bytes, call.source, self.layer))

    @contextmanager
    def recording(self) -> Iterator[list[Record]]:
        """Returns a context that yields a list, to which a :class:`Record` of every call inside it is appended."""
        records: list[Record] = []
        self._listeners.append(records)
        try:
            yield records
        finally:
            self._listeners = [other for other in self._listeners if other is not records]


def total_bytes(records: list[Record]) -> Counter[tuple[str, str, str]]:
    """Returns the payload bytes of all records, summed by (strategy, axis, kind of collective).

    >>> dict(total_bytes([Record("send", "pp", 8, "pipeline"), Record("send", "pp", 4, "pipeline")]))
    {('pipeline', 'pp', 'send'): 12}
    """
    totals: Counter[tuple[str, str, str]] = Counter()
    for record in records:
        totals[record.source, record.axis, record.kind] += record.num_bytes
    return totals
