"""What was sent: one record for each collective call, written by the backend that moves the bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import NamedTuple


class Record(NamedTuple):
    """One call: its kind, the axis it ran over, its payload, and who asked for it."""

    kind: str
    axis: str
    num_bytes: int
    source: str


def ring_factor(kind: str, num_ranks: int) -> Fraction:
    """The share of a call's payload that one rank sends when the ranks form a ring, exactly.

    >>> ring_factor("all_reduce", 4), ring_factor("all_gather", 4), ring_factor("send", 2)
    (Fraction(3, 2), Fraction(3, 4), Fraction(1, 1))
    """
    if kind in ("send", "broadcast"):
        return Fraction(1)
    if kind in ("receive", "barrier"):
        return Fraction(0)
    return Fraction(num_ranks - 1, num_ranks) * (2 if kind == "all_reduce" else 1)


class Recorder:
    """One rank's records, in the order of the calls.

    >>> recorder = Recorder()
    >>> with recorder.recording() as records:
    ...     recorder.add(Record("all_reduce", "dp", 4096, "data_parallel"))
    >>> records
    [Record(kind='all_reduce', axis='dp', num_bytes=4096, source='data_parallel')]
    """

    def __init__(self) -> None:
        self._listeners: list[list[Record]] = []

    def add(self, record: Record) -> None:
        """Notes one call, for everyone who is recording now."""
        for records in self._listeners:
            records.append(record)

    @contextmanager
    def recording(self) -> Iterator[list[Record]]:
        """Gives a list that fills with every call made inside the block."""
        records: list[Record] = []
        self._listeners.append(records)
        try:
            yield records
        finally:
            self._listeners = [other for other in self._listeners if other is not records]


def total_bytes(records: list[Record]) -> Counter[tuple[str, str, str]]:
    """Payload bytes by (source, axis, kind).

    >>> dict(total_bytes([Record("send", "pp", 8, "pipeline"), Record("send", "pp", 4, "pipeline")]))
    {('pipeline', 'pp', 'send'): 12}
    """
    totals: Counter[tuple[str, str, str]] = Counter()
    for record in records:
        totals[record.source, record.axis, record.kind] += record.num_bytes
    return totals
