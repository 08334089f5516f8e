"""Whose samples a rank has in hand: dim 0 of every activation, as axes cut and gather it.

A batch is cut over the axes that cut the model's inputs, then in microbatches. A layer may gather these *rows* over an
axis, or cut them further; ``Rows`` is the list of what was done, oldest first::

    ()                                   this rank's own samples of the microbatch
    (("gather", "row"),)                 those of every member of its row axis, one after the other
    (("gather", "row"), ("cut", "col"))  its share of these, balanced over col
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain, pairwise
from typing import Literal

from shardwright.mesh import Coord, Mesh, balanced, balanced_part

Rows = tuple[tuple[Literal["gather", "cut"], str], ...]
"""What was done to dim 0 since the model's input, oldest first."""


def local_samples(mesh: Mesh, axes: Collection[str], coord: Coord, num_samples: int) -> range:
    """The places in the global batch of the samples that ``coord`` computes: nested balanced cuts over ``axes``.

    >>> local_samples(Mesh(dp=2, tp=3), {"dp"}, {"dp": 1}, 5)
    range(3, 5)
    """
    held = range(num_samples)
    for axis in mesh.axes:
        if axis in axes:
            part = balanced_part(len(held), mesh[axis], coord[axis])
            held = held[part.start : part.stop]
    return held


def microbatch_samples(samples: range, num_microbatches: int) -> tuple[range, ...]:
    """The samples of each microbatch, some of which may be empty.

    >>> microbatch_samples(range(4, 7), 2)
    (range(4, 6), range(6, 7))
    """
    cuts = balanced(len(samples), num_microbatches)
    return tuple(samples[a:b] for a, b in pairwise(cuts))


class Samples:
    """The samples of the microbatch in hand, of this rank and of every other: the executor moves it on.

    >>> samples = Samples(Mesh(row=2, col=2), ("row",), {"row": 0, "col": 1})
    >>> samples.begin(num_global=5)
    >>> samples.ids(()), samples.ids((("gather", "row"), ("cut", "col")))
    ((0, 1, 2), (3, 4))
    >>> samples.sizes((), "row")
    (3, 2)
    """

    def __init__(self, mesh: Mesh, axes: Collection[str], coord: Coord, num_microbatches: int = 1) -> None:
        self.mesh, self.axes, self.coord = mesh, frozenset(axes), dict(coord)
        self.num_microbatches = num_microbatches
        self._num_global: int | None = None  # none: every rank holds all samples
        self._number = self._count = 0
        self._known: dict[tuple[Rows, tuple[int, ...]], tuple[int, ...]] = {}

    def begin(self, num_global: int, number: int = 0, num_microbatches: int | None = None) -> None:
        """From now on microbatch ``number`` of a global batch is in hand."""
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        if (self._num_global, self._number, self._count) != (num_global, number, count):
            self._num_global, self._number, self._count, self._known = num_global, number, count, {}

    def alone(self, num_samples: int) -> None:
        """From now on every rank holds the same samples: the whole of a batch that was not cut."""
        self._num_global, self._count, self._known = None, num_samples, {}

    def ids(self, rows: Rows, at: Coord | None = None) -> tuple[int, ...]:
        """The places in the global batch of the samples in dim 0 at ``at`` (here, when left out)."""
        at = self.coord if at is None else at
        key = (rows, tuple(at.get(axis, 0) for axis in self.mesh.axes))
        if key not in self._known:
            self._known[key] = self._find(rows, at)
        return self._known[key]

    def sizes(self, rows: Rows, axis: str) -> tuple[int, ...]:
        """How many samples each member of ``axis`` holds."""
        return tuple(len(self.ids(rows, {**self.coord, axis: i})) for i in range(self.mesh[axis]))

    def _find(self, rows: Rows, at: Coord) -> tuple[int, ...]:
        if not rows:
            if self._num_global is None:
                return tuple(range(self._count))
            held = local_samples(self.mesh, self.axes, at, self._num_global)
            return tuple(microbatch_samples(held, self._count)[self._number])
        (what, axis), before = rows[-1], rows[:-1]
        if what == "gather":
            members: Sequence[tuple[int, ...]] = [self.ids(before, {**at, axis: i}) for i in range(self.mesh[axis])]
            return tuple(chain.from_iterable(members))
        held_before = self.ids(before, at)
        cuts = balanced(len(held_before), self.mesh[axis])
        return held_before[cuts[at.get(axis, 0)] : cuts[at.get(axis, 0) + 1]]
