"""Whose samples a rank has in hand, and which of their tokens: dims 0 and 1 of every activation, cut and gathered.

A batch is cut over the axes that cut the model's inputs, then in microbatches. A layer may gather these *rows* over an
axis, or cut them further; ``Rows`` is the list of what was done, oldest first::

    ()                                   this rank's own samples of the microbatch
    (("gather", "row"),)                 those of every member of its row axis, one after the other
    (("gather", "row"), ("cut", "col"))  its share of these, balanced over col

Where the axes of a mode cut sequences, rows are tokens: every rank has the same samples and some tokens of each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, pairwise
from typing import Literal

from shardwright.errors import PlanError
from shardwright.mesh import Coord, Mesh, balanced, balanced_part
from shardwright.rng import DimSlice

Rows = tuple[tuple[Literal["gather", "cut"], str], ...]
"""What was done to the samples, or to the tokens, since the model's input, oldest first."""


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


def runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The places as ranges, in their order.

    >>> list(runs([4, 5, 6, 0, 1]))
    [(4, 7), (0, 2)]
    """
    start = 0
    for number in range(1, len(places) + 1):
        if number == len(places) or places[number] != places[number - 1] + 1:
            yield places[start], places[number - 1] + 1
            start = number


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

    ``token_axes`` are those that cut sequences instead:

    >>> samples = Samples(Mesh(row=2, col=2), (), {"row": 1, "col": 1}, token_axes=("row",))
    >>> samples.begin(num_global=1)
    >>> samples.cut_tokens(7)
    >>> samples.ids(()), samples.tokens(()), samples.sizes((), "row")
    ((0,), (4, 5, 6), (4, 3))
    """

    def __init__(
        self,
        mesh: Mesh,
        axes: Collection[str],
        coord: Coord,
        num_microbatches: int = 1,
        token_axes: Collection[str] = (),
    ) -> None:
        self.mesh, self.axes, self.coord = mesh, frozenset(axes), dict(coord)
        self.num_microbatches = num_microbatches
        self.token_axes = frozenset(token_axes)
        self.num_tokens = 0
        self._known_tokens: dict[tuple[Rows, tuple[int, ...]], tuple[int, ...]] = {}
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

    def cut_tokens(self, num_tokens: int) -> None:
        """From now on each sample in hand has so many tokens, on all ranks together."""
        if num_tokens != self.num_tokens:
            self.num_tokens, self._known_tokens = num_tokens, {}

    def moment(self) -> Callable[[], None]:
        """A function that goes back to the samples that are now in hand."""
        held = dict(vars(self))
        return lambda: vars(self).update(held)

    def ids(self, rows: Rows, at: Coord | None = None) -> tuple[int, ...]:
        """The places in the global batch of the samples in dim 0 at ``at`` (here, when left out)."""
        return self._held(() if self.token_axes else rows, self.coord if at is None else at, tokens=False)

    def tokens(self, rows: Rows, at: Coord | None = None) -> tuple[int, ...]:
        """The places in their sequence of the tokens in dim 1, where axes cut sequences."""
        return self._held(rows, self.coord if at is None else at, tokens=True)

    def span(self, rows: Rows) -> range:
        """The same tokens, which are known to be a run."""
        places = self.tokens(rows)
        span = range(places[0], places[-1] + 1) if places else range(0)
        assert len(span) == len(places), "attention sees tokens in their order"
        return span

    def sizes(self, rows: Rows, axis: str) -> tuple[int, ...]:
        """How many rows each member of ``axis`` holds: samples, or tokens where axes cut sequences."""
        tokens = bool(self.token_axes)
        members = ({**self.coord, axis: i} for i in range(self.mesh[axis]))
        return tuple(len(self._held(rows, at, tokens=tokens)) for at in members)

    def counts(self, axes: Collection[str]) -> tuple[int, ...]:
        """How many rows of the input each rank holds that differs from this one on ``axes`` alone.

        >>> samples = Samples(Mesh(dp=2, row=2), ("dp", "row"), {"dp": 0, "row": 1})
        >>> samples.begin(num_global=7)
        >>> samples.counts(["row"]), samples.counts(["dp", "row"])
        ((2, 2), (2, 2, 2, 1))
        """
        members = ({**self.coord, **at} for at in self.mesh.coords(axes))
        return tuple(len(self._held((), at, tokens=bool(self.token_axes))) for at in members)

    def slices(self, rows: Rows, dims: Sequence[int], shape: Sequence[int]) -> tuple[DimSlice, ...]:
        """What of a tensor with tokens in ``dims`` a rank holds: these rows, and of further dims the first tokens.

        Raises: PlanError: another number of tokens.
        """
        places = self.tokens(rows)
        first, *others = dims
        if len(shape) <= max(dims) or shape[first] != len(places):
            raise PlanError(
                "a layer whose tokens are cut does not see them where they are looked for",
                given=f"a tensor of shape {list(shape)}, where this rank has {len(places)} tokens",
                allowed=f"activations whose dim {first} is the tokens",
                fix="leave out /seq, or put the tokens there",
            )
        held = [DimSlice(first, self.num_tokens, tuple(runs(places)))]
        return (*held, *(DimSlice(dim, self.num_tokens, ((0, shape[dim]),)) for dim in others))

    def _held(self, rows: Rows, at: Coord, *, tokens: bool) -> tuple[int, ...]:
        known = self._known_tokens if tokens else self._known
        key = (rows, tuple(at.get(axis, 0) for axis in self.mesh.axes))
        if key not in known:
            known[key] = self._find(rows, at, tokens=tokens)
        return known[key]

    def _find(self, rows: Rows, at: Coord, *, tokens: bool) -> tuple[int, ...]:
        if not rows:
            return self._own(at, tokens=tokens)
        (what, axis), before = rows[-1], rows[:-1]
        if what == "gather":
            members = [self._held(before, {**at, axis: i}, tokens=tokens) for i in range(self.mesh[axis])]
            return tuple(chain.from_iterable(members))
        held_before = self._held(before, at, tokens=tokens)
        cuts = balanced(len(held_before), self.mesh[axis])
        return held_before[cuts[at.get(axis, 0)] : cuts[at.get(axis, 0) + 1]]

    def _own(self, at: Coord, *, tokens: bool) -> tuple[int, ...]:
        if tokens:
            return tuple(local_samples(self.mesh, self.token_axes, at, self.num_tokens))
        if self._num_global is None:
            return tuple(range(self._count))
        held = local_samples(self.mesh, self.axes, at, self._num_global)
        return tuple(microbatch_samples(held, self._count)[self._number])
