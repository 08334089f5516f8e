"""Finds the pipeline chunk of each parameter, also of one that the recorded forward does not use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Protocol


class _Chunked(Protocol):
    """A model cut into pipeline chunks."""

    @property
    def num_chunks(self) -> int: ...

    def weights_of(self, chunk: int) -> tuple[str, ...]: ...


def chunks_by_parameter(chunked: _Chunked, names: Sequence[str]) -> dict[str, list[int]]:
    """Returns the chunks that use each parameter and buffer, by name; ``names`` are in the order of the model.

    One of ``names`` that no chunk uses gets one chunk, that of the used name before or behind it with which it shares
    more modules around it; of the name before it if these are as many. So the heads of a model lie on one stage, also
    if the example calls one of them and later batches another.

    >>> class Chunked:
    ...     num_chunks = 2
    ...     def weights_of(self, chunk): return (("body.weight",), ("heads.first.weight",))[chunk]
    >>> chunks_by_parameter(Chunked(), ["body.weight", "heads.first.weight", "heads.second.weight"])
    {'body.weight': [0], 'heads.first.weight': [1], 'heads.second.weight': [1]}
    """
    found: dict[str, list[int]] = {}
    for chunk in range(chunked.num_chunks):
        for name in chunked.weights_of(chunk):
            found.setdefault(name, []).append(chunk)
    before, behind = _last_used(names, found), _last_used(reversed(names), found)
    neighbours = {name: (before[name], behind[name]) for name in names if name not in found}
    for name, (first, second) in neighbours.items():
        if first is not None and (second is None or _num_common(name, first) >= _num_common(name, second)):
            found[name] = [found[first][-1]]
        else:
            found[name] = [found[second][0] if second is not None else 0]
    return found


def _last_used(names: Iterable[str], used: Iterable[str]) -> dict[str, str | None]:
    """Returns, for each name, the last one before it that is among ``used``."""
    found: dict[str, str | None] = {}
    last = None
    for name in names:
        found[name] = last
        last = name if name in used else last
    return found


def _num_common(name: str, other: str) -> int:
    """Returns how many modules around two parameters are the same, counted from the model inwards."""
    pairs = zip(name.split(".")[:-1], other.split(".")[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
