"""Finds the pipeline chunk of each parameter, also of one that the recorded forward does not use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import takewhile
from typing import Protocol


class _Chunked(Protocol):
    """A model cut into pipeline chunks; ``names`` gives the parameters and buffers inside each module."""

    @property
    def names(self) -> Mapping[str, tuple[str, ...]]: ...

    @property
    def num_chunks(self) -> int: ...

    def weights_of(self, chunk: int) -> tuple[str, ...]: ...


def chunks_by_parameter(chunked: _Chunked) -> dict[str, list[int]]:
    """Returns the chunks that use each parameter and buffer, by name, in the order of the model's modules.

    A name that no chunk uses gets the chunk of its nearest used neighbor in that order, before or after it: of the
    neighbor that shares more enclosing modules with it, or on a tie of the one before it. So all heads of a model and
    their buffers lie on one stage, also if the example calls one head and later batches call another.

    >>> class Chunked:
    ...     num_chunks = 2
    ...     names = {"body": ("body.weight",), "heads.first": ("heads.first.weight",), "heads.second":
    ...              ("heads.second.weight", "heads.second.mean")}
    ...     def weights_of(self, chunk): return (("body.weight",), ("heads.first.weight",))[chunk]
    >>> chunks_by_parameter(Chunked())
    {'body.weight': [0], 'heads.first.weight': [1], 'heads.second.weight': [1], 'heads.second.mean': [1]}
    """
    used: dict[str, list[int]] = {}
    for chunk in range(chunked.num_chunks):
        for name in chunked.weights_of(chunk):
            used.setdefault(name, []).append(chunk)
    # a tied parameter has the name of the first module that has it
    names = [name for path, weights in chunked.names.items() for name in weights if name.rpartition(".")[0] == path]
    names = list(dict.fromkeys([*names, *used]))
    before, behind = _last_used(names, used), _last_used(reversed(names), used)
    chunks: dict[str, list[int]] = {}
    for name in names:
        first, second = before[name], behind[name]
        if name in used:
            chunks[name] = used[name]
        elif first is not None and (second is None or _num_common(name, first) >= _num_common(name, second)):
            chunks[name] = [used[first][-1]]
        else:
            chunks[name] = [used[second][0] if second is not None else 0]
    return chunks


def _last_used(names: Iterable[str], used: Collection[str]) -> dict[str, str | None]:
    """Returns, for each name, the last one before it that is among ``used``."""
    predecessors: dict[str, str | None] = {}
    last = None
    for name in names:
        predecessors[name] = last
        last = name if name in used else last
    return predecessors


def _num_common(name: str, other: str) -> int:
    """Returns how many modules around two parameters are the same, counted from the model inwards."""
    pairs = zip(name.split(".")[:-1], other.split(".")[:-1], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
