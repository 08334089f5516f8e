"""Which part of a global batch a rank has: which samples (dim 0) and, where sequences are cut, which tokens (dim 1).

A batch is cut over the axes that cut the model's inputs, then into microbatches. The *rows* of an activation are its
samples, or its tokens where the axes of a tensor-parallel mode cut sequences: then every rank of these axes has the
same samples and some tokens of each. A layer may gather rows over an axis, or cut them further. ``RowMoves`` lists what
was done since the model's input, oldest first::

    ()                                   this rank's own rows of the microbatch
    (("gather", "row"),)                 those of every member of its row axis, one after the other
    (("gather", "row"), ("cut", "col"))  its share of these, balanced over col

The rows of pictures (dim 2), which spatial parallelism cuts, are not settled here: they differ from layer to layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwright.comm.autograd import cut_to_whole, whole_to_cut
from shardwright.comm.axis import Axis
from shardwright.errors import LayoutError, PlanError
from shardwright.mesh import Coord, Mesh, balanced, balanced_part
from shardwright.rng import DimSlice

RowMoves = tuple[tuple[Literal["gather", "cut"], str], ...]
"""The gathers and cuts of an activation's rows since the model's input, each with its axis, oldest first."""


def rows_after(moves: RowMoves, what: Literal["gather", "cut"], axes: Sequence[str]) -> RowMoves:
    """Returns the moves once these axes have gathered or cut the rows too; a move that undoes the last removes it.

    >>> rows_after((("gather", "row"),), "cut", ["row", "col"])
    (('cut', 'col'),)
    """
    undone: Literal["gather", "cut"] = "cut" if what == "gather" else "gather"
    for axis in axes:
        moves = moves[:-1] if moves and moves[-1] == (undone, axis) else (*moves, (what, axis))
    return moves


def local_range(mesh: Mesh, axes: Collection[str], coord: Coord, size: int) -> range:
    """Returns the places of a dim of ``size`` that ``coord`` has: balanced cuts over ``axes``, one inside the other.

    >>> local_range(Mesh(dp=2, tp=3), {"dp"}, {"dp": 1}, 5)
    range(3, 5)
    """
    held = range(size)
    for axis in mesh.axes:
        if axis in axes:
            part = balanced_part(len(held), mesh[axis], coord[axis])
            held = held[part.start : part.stop]
    return held


def runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the places as ranges (start, stop), in their order.

    >>> list(runs([4, 5, 6, 0, 1]))
    [(4, 7), (0, 2)]
    """
    start = 0
    for number in range(1, len(places) + 1):
        if number == len(places) or places[number] != places[number - 1] + 1:
            yield places[start], places[number - 1] + 1
            start = number


def microbatch_samples(samples: range, num_microbatches: int) -> tuple[range, ...]:
    """Cuts a rank's samples into microbatches, as even as can be; some may be empty.

    >>> microbatch_samples(range(4, 7), 2)
    (range(4, 6), range(6, 7))
    """
    cuts = balanced(len(samples), num_microbatches)
    return tuple(samples[a:b] for a, b in pairwise(cuts))


def is_sequence(tensor: Tensor) -> bool:
    """Whether dim 1 of a model's input can be tokens: integers, one for each token, or numbers, several for each.

    >>> is_sequence(torch.zeros(2, 9, dtype=torch.int64)), is_sequence(torch.zeros(2, 9))
    (True, False)
    """
    return tensor.dim() > 1 + tensor.is_floating_point()


def num_tokens_of(inputs: Any, targets: Any = None) -> int:
    """Returns how many tokens each sample has: the size of dim 1, which must be the same in every tensor.

    Raises: LayoutError: inputs without tokens, or tensors that differ.

    >>> num_tokens_of(torch.zeros(2, 9, 4), torch.zeros(2, 9, dtype=torch.int64))
    9
    """
    tensors = [leaf for leaf in tree_flatten((inputs, targets))[0] if isinstance(leaf, Tensor)]
    taken = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]
    sizes = {tensor.shape[1] if tensor.dim() > 1 else 0 for tensor in tensors}
    if len(sizes) != 1 or not all(map(is_sequence, taken)):
        raise LayoutError(
            "the layout cuts sequences, and these are not",
            given=", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors),
            allowed="tensors (samples, tokens) of integers or (samples, tokens, features), of as many tokens",
            fix="leave out /seq, so that samples are cut",
        )
    return sizes.pop()


class BatchShard:
    """The part of a global batch that each rank has, for one microbatch at a time: the executor sets which.

    It answers for this rank (``coord``) and, since every cut is known everywhere, for every other.

    >>> shard = BatchShard(Mesh(row=2, col=2), ("row",), {"row": 0, "col": 1})
    >>> shard.set_microbatch(num_global=5)
    >>> shard.samples(()), shard.samples((("gather", "row"), ("cut", "col")))
    ((0, 1, 2), (3, 4))
    >>> shard.sizes((), "row")
    (3, 2)

    ``axes`` cut samples, ``token_axes`` sequences; ``dim`` is the dim of rows, 1 where sequences are cut, else 0.

    >>> shard = BatchShard(Mesh(row=2, col=2), (), {"row": 1, "col": 1}, token_axes=("row",))
    >>> shard.set_microbatch(num_global=1)
    >>> shard.set_num_tokens(7)
    >>> shard.samples(()), shard.tokens(()), shard.sizes((), "row")
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
        self.dim = 1 if self.token_axes else 0
        self._row_axes = [axis for axis in mesh.axes if axis in (self.token_axes or self.axes)]
        self.num_tokens = 0
        self._known_tokens: dict[tuple[RowMoves, tuple[int, ...]], tuple[int, ...]] = {}
        self._num_global: int | None = None  # none: every rank holds all samples
        self._number = self._count = 0
        self._known: dict[tuple[RowMoves, tuple[int, ...]], tuple[int, ...]] = {}

    # ---- the microbatch in hand

    def set_microbatch(self, num_global: int, number: int = 0, num_microbatches: int | None = None) -> None:
        """Answers from now on for microbatch ``number`` of a global batch of ``num_global`` samples."""
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        if (self._num_global, self._number, self._count) != (num_global, number, count):
            self._num_global, self._number, self._count, self._known = num_global, number, count, {}

    def set_uncut(self, num_samples: int) -> None:
        """Answers from now on for a batch of which every rank holds all samples, as in ``Run.predict``."""
        self._num_global, self._count, self._known = None, num_samples, {}

    def set_num_tokens(self, num_tokens: int) -> None:
        """Answers from now on for samples of so many tokens, on all ranks together."""
        if num_tokens != self.num_tokens:
            self.num_tokens, self._known_tokens = num_tokens, {}

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that restores the microbatch that is now in hand."""
        held = dict(vars(self))
        return lambda: vars(self).update(held)

    # ---- cutting an input, joining an output

    def local_samples(self, num_global: int) -> range:
        """Returns the samples that this rank computes, as their places in a global batch of ``num_global``."""
        return local_range(self.mesh, self.axes, self.coord, num_global)

    def check_num_tokens(self, num_tokens: int) -> None:
        """Raises PlanError unless every rank gets a token of a sequence of so many."""
        cuts = [axis for axis in self.mesh.axes if axis in self.token_axes]
        parts = prod(self.mesh[axis] for axis in cuts)
        if num_tokens < parts:
            raise PlanError(
                "a sequence is shorter than the axes that cut it",
                given=f"{num_tokens} tokens over " + " ".join(f"{axis}={self.mesh[axis]}" for axis in cuts),
                allowed=f"sequences of {parts} tokens or more",
                fix="use longer sequences, or leave out /seq, so that samples are cut",
            )

    def cut_tokens(self, tree: Any, num_tokens: int) -> Any:
        """Returns this rank's tokens of every tensor of a batch, as views; all tokens where no axis cuts sequences."""
        if not self.token_axes:
            return tree
        held = local_range(self.mesh, self.token_axes, self.coord, num_tokens)
        return tree_map_only(Tensor, lambda tensor: tensor[:, held.start : held.stop], tree)

    def cut(self, x: Tensor, axes: Mapping[str, Axis]) -> Tensor:
        """Returns this rank's rows of a batch that every rank holds, differentiably: the inverse of :meth:`join`.

        Traffic: backward, one all-gather over each axis that cuts rows.
        """
        for number, name in enumerate(self._row_axes):
            moves: RowMoves = tuple(("gather", axis) for axis in reversed(self._row_axes[number + 1 :]))
            x = whole_to_cut(x, axes[name], self.dim, self.sizes(moves, name))
        return x

    def join(self, x: Tensor, axes: Mapping[str, Axis], moves: RowMoves = ()) -> Tensor:
        """Returns the rows of all ranks, in the order of the batch, from each rank's after ``moves``; differentiable.

        Traffic: one all-gather over each axis that cuts rows, but for those that ``moves`` has gathered over.
        """
        for name in reversed(self._row_axes):
            if ("gather", name) not in moves:
                x = cut_to_whole(x, axes[name], self.dim, self.sizes(moves, name))
                moves = rows_after(moves, "gather", [name])
        places = self._held(moves, self.coord, tokens=self.dim == 1)
        if all(b == a + 1 for a, b in pairwise(places)):
            return x
        return x.index_select(self.dim, torch.tensor(places, device=x.device).argsort())

    # ---- which rows a rank has

    def samples(self, moves: RowMoves, at: Coord | None = None) -> tuple[int, ...]:
        """Returns the samples in dim 0 at ``at`` (here, when left out), as their places in the global batch."""
        return self._held(() if self.token_axes else moves, self.coord if at is None else at, tokens=False)

    def tokens(self, moves: RowMoves, at: Coord | None = None) -> tuple[int, ...]:
        """Returns the tokens in dim 1 at ``at``, as their places in the sequence, where axes cut sequences."""
        return self._held(moves, self.coord if at is None else at, tokens=True)

    def span(self, moves: RowMoves) -> range:
        """Returns :meth:`tokens` as a range: attention needs them to be consecutive."""
        places = self.tokens(moves)
        span = range(places[0], places[-1] + 1) if places else range(0)
        assert len(span) == len(places), "attention needs consecutive tokens, in their order"
        return span

    def sizes(self, moves: RowMoves, axis: str) -> tuple[int, ...]:
        """Returns how many rows each member of ``axis`` holds: samples, or tokens where axes cut sequences."""
        members = ({**self.coord, axis: i} for i in range(self.mesh[axis]))
        return tuple(len(self._held(moves, at, tokens=self.dim == 1)) for at in members)

    def counts(self, axes: Collection[str]) -> tuple[int, ...]:
        """Returns how many rows of the input each rank holds that differs from this one on ``axes`` alone.

        >>> shard = BatchShard(Mesh(dp=2, row=2), ("dp", "row"), {"dp": 0, "row": 1})
        >>> shard.set_microbatch(num_global=7)
        >>> shard.counts(["row"]), shard.counts(["dp", "row"])
        ((2, 2), (2, 2, 2, 1))
        """
        members = ({**self.coord, **at} for at in self.mesh.coords(axes))
        return tuple(len(self._held((), at, tokens=self.dim == 1)) for at in members)

    def slices(self, moves: RowMoves, dims: Sequence[int], shape: Sequence[int]) -> tuple[DimSlice, ...]:
        """Returns which part of a tensor with tokens in ``dims`` this rank holds, for dropout to draw the same numbers.

        In the first of ``dims`` lie this rank's tokens; in the others, as in attention weights, the first tokens.

        Raises: PlanError: another number of tokens.
        """
        places = self.tokens(moves)
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

    def _held(self, moves: RowMoves, at: Coord, *, tokens: bool) -> tuple[int, ...]:
        known = self._known_tokens if tokens else self._known
        key = (moves, tuple(at.get(axis, 0) for axis in self.mesh.axes))
        if key not in known:
            known[key] = self._find(moves, at, tokens=tokens)
        return known[key]

    def _find(self, moves: RowMoves, at: Coord, *, tokens: bool) -> tuple[int, ...]:
        if not moves:
            return self._own(at, tokens=tokens)
        (what, axis), before = moves[-1], moves[:-1]
        if what == "gather":
            members = [self._held(before, {**at, axis: i}, tokens=tokens) for i in range(self.mesh[axis])]
            return tuple(chain.from_iterable(members))
        held_before = self._held(before, at, tokens=tokens)
        cuts = balanced(len(held_before), self.mesh[axis])
        return held_before[cuts[at.get(axis, 0)] : cuts[at.get(axis, 0) + 1]]

    def _own(self, at: Coord, *, tokens: bool) -> tuple[int, ...]:
        if tokens:
            return tuple(local_range(self.mesh, self.token_axes, at, self.num_tokens))
        if self._num_global is None:
            return tuple(range(self._count))
        held = local_range(self.mesh, self.axes, at, self._num_global)
        return tuple(microbatch_samples(held, self._count)[self._number])
