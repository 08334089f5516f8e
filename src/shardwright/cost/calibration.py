"""``Calibration``: what ``shardwright calibrate`` measured in addition to constants: operators, blocks and messages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple, cast, get_args

from shardwright.comm.recorder import ring_factor
from shardwright.cost.constants import Source
from shardwright.errors import PlanError

TIERS = ("in_node", "between")
"""The tiers of links: those inside a node, and those between nodes."""

KEYS = ("operators", "blocks", "sources", "links", "spread", "ranks", "notes")
"""The keys of a cluster file that a calibration writes beside those of a device."""

MOST_SPREAD = 0.2
"""The spread of measured seconds, as a share of their median, up to which a calibration is saved without force."""

_NONE: Mapping[str, Any] = MappingProxyType({})


class LinkTimes(NamedTuple):
    """The measured seconds of one collective, or of a send, by the bytes of its payload.

    ``kind`` is the collective, and ``tier`` the links that its group uses: "in_node" or "between". The group had
    ``ranks`` members, whose numbers were ``stride`` apart; all groups along the axis sent at once.

    >>> LinkTimes("all_reduce", "in_node", 2, 1, (1000, 3000), (1.0, 2.0)).at([0, 2000, 5000])
    [1.0, 1.5, 3.0]
    """

    kind: str
    tier: str
    ranks: int
    stride: int
    num_bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, sizes: Sequence[float]) -> list[float]:
        """Returns the seconds of messages of these sizes in bytes, interpolated between those that were measured.

        A smaller message takes as long as the smallest that was measured. For a larger one, the line through the two
        largest goes on. If a single size was measured, all messages take its seconds.
        """
        return [self._at(size) for size in sizes]

    def _at(self, size: float) -> float:
        if size <= self.num_bytes[0]:
            return self.seconds[0]
        if len(self.num_bytes) == 1:
            return self.seconds[0] * size / self.num_bytes[0]
        place = min(max(1, bisect_left(self.num_bytes, size)), len(self.num_bytes) - 1)
        (a, b), (first, second) = self.num_bytes[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        return first + (second - first) * (size - a) / (b - a)

    @property
    def num_hops(self) -> int:
        """The number of messages of the ring that follow each other in a call."""
        return num_hops(self.kind, self.ranks)


@dataclass(frozen=True)
class Calibration:
    """What was measured on a cluster, in addition to constants; empty for a cluster known by its datasheet alone.

    ``operators`` maps torch's name of an operator to a factor: its measured time divided by the time that the formulas
    give. ``blocks`` maps the class of a model's repeated block, and "optimizer", to a factor: the measured time of a
    step's operators together, without that of starting them, divided by the sum of their single times. ``links`` are
    the measured messages. ``sources`` maps a figure of the device to its source, such as "peak_fp32" to "measured";
    figures without an entry are the datasheet's. ``ranks`` says whether ranks were "threads" or "processes".
    ``spread`` maps a kind of measurement, such as "messages", to the spread of its seconds as a share of the median.
    """

    operators: Mapping[str, float] = field(default_factory=lambda: _NONE)
    blocks: Mapping[str, float] = field(default_factory=lambda: _NONE)
    sources: Mapping[str, Source] = field(default_factory=lambda: _NONE)
    links: tuple[LinkTimes, ...] = ()
    spread: Mapping[str, float] = field(default_factory=lambda: _NONE)
    ranks: str = ""
    notes: tuple[str, ...] = ()

    def link(self, kind: str, tier: str, ranks: int, stride: int) -> LinkTimes | None:
        """Returns what was measured of a collective on a tier, for the most similar group; None if nothing was."""
        links = [link for link in self.links if link.kind == kind and link.tier == tier]
        return min(links, key=lambda link: (abs(link.ranks - ranks), abs(link.stride - stride)), default=None)

    def message_s(self, kind: str, num_bytes: float, tier: str, ranks: int, stride: int, hop_s: float) -> float | None:
        """Returns the seconds of a message from measured seconds; None if its kind was not measured on this tier.

        For a group of another size than the measured one, the bytes are scaled as in a ring, and each further hop takes
        ``hop_s``.
        """
        link = self.link(kind, tier, ranks, stride)
        if link is None:
            return None
        like = num_bytes * float(ring_factor(kind, ranks) / ring_factor(kind, link.ranks))
        return max(0.0, link.at([like])[0] + (num_hops(kind, ranks) - link.num_hops) * hop_s)


def num_hops(kind: str, size: int) -> int:
    """Returns how many messages of a ring of ``size`` ranks follow each other in a call.

    >>> num_hops("all_reduce", 4), num_hops("all_gather", 4), num_hops("send", 2)
    (6, 3, 1)
    """
    if kind in ("receive", "barrier"):
        return 0
    if kind in ("send", "broadcast"):
        return 1
    return (2 if kind == "all_reduce" else 1) * (size - 1)


def calibration_in(path: str, table: Mapping[str, Any]) -> Calibration:
    """Returns the calibration in a parsed cluster file; an empty one if the file has none.

    Raises: PlanError: a table, or a value in it, is not of the form that a calibration writes.
    """
    names = "operators", "blocks", "spread"
    operators, blocks, spread = (_numbers(path, name, table.get(name, {})) for name in names)
    links = table.get("links", [])
    if not isinstance(links, list):
        raise _wrong(path, "links", links, "tables [[links]], one for each measured collective")
    notes, ranks, sources = table.get("notes", []), table.get("ranks", ""), table.get("sources", {})
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise _wrong(path, "notes", notes, "a list of texts")
    if ranks not in ("", "threads", "processes"):
        raise _wrong(path, "ranks", ranks, "threads or processes")
    if not isinstance(sources, Mapping) or not set(sources.values()) <= set(get_args(Source)):
        raise _wrong(path, "sources", sources, f"a table of {', '.join(get_args(Source))} by figure")
    link_times = tuple(_link(path, link) for link in links)
    return Calibration(operators, blocks, dict(sources), link_times, spread, ranks, tuple(notes))


def _numbers(path: str, name: str, table: Any) -> dict[str, float]:
    if not isinstance(table, Mapping) or not all(_is_number(value) for value in table.values()):
        raise _wrong(path, name, table, f"a table [{name}] of numbers that are not below zero")
    return dict(table)


def _link(path: str, table: Any) -> LinkTimes:
    link = table if isinstance(table, Mapping) else {}
    sizes, seconds = link.get("bytes"), link.get("seconds")
    sound = (
        set(link) == {"kind", "tier", "ranks", "stride", "bytes", "seconds"}
        and link["kind"] in ("all_reduce", "all_gather", "reduce_scatter", "send", "broadcast", "all_to_all")
        and link["tier"] in TIERS
        and all(isinstance(link[name], int) and link[name] > low for name, low in (("ranks", 1), ("stride", 0)))
        and isinstance(sizes, list)
        and isinstance(seconds, list)
        and len(sizes) == len(seconds) > 0
        and all(_is_number(number) for number in (*sizes, *seconds))
        and sizes == sorted(set(sizes))
    )
    if not sound:
        allowed = "kind, tier, ranks from 2 on, stride from 1 on, rising bytes and as many seconds"
        raise _wrong(path, "links", table, allowed)
    times = accumulate(cast(list[float], seconds), max)  # more bytes never take less time
    return LinkTimes(link["kind"], link["tier"], link["ranks"], link["stride"], tuple(sizes or ()), tuple(times))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15


def _wrong(path: str, name: str, given: Any, allowed: str) -> PlanError:
    fix = "measure again with shardwright calibrate"
    return PlanError(f"'{name}' in '{path}' is not what calibrate writes", given=f"{given!s:.200}", allowed=allowed,
                     fix=fix)  # fmt: skip
