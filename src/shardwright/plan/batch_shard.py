"""Finds which part of a global batch a rank has: its samples (dim 0) and, if sequences are cut, its tokens (dim 1).

A batch is cut over the axes that cut the model's inputs, then into microbatches. The *rows* of an activation are its
samples, or its tokens if the axes of a tensor-parallel mode cut sequences; in that case all ranks of these axes have
the same samples, and each has some of the tokens. A layer may gather rows over an axis, or cut them further.
``RowMoves`` lists these gathers and cuts since the model's input, oldest first::

    ()                                   this rank's own rows of the microbatch
    (("gather", "row"),)                 those of every member of its row axis, one after the other
    (("gather", "row"), ("cut", "col"))  its share of these, balanced over col

The rows of pictures (dim 2), which spatial parallelism cuts, are not kept here: they differ from layer to layer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardwright.analysis.objects.marked_inputs import marks_in
from shardwright.analysis.on_meta.operator_results import tensors_of
from shardwright.comm.autograd import cut_to_whole, whole_to_cut
from shardwright.comm.axis import Axis
from shardwright.errors import LayoutError, PlanError
from shardwright.mesh import Coord, Mesh, balanced, balanced_part
from shardwright.rng import DimSlice

RowMoves = tuple[tuple[Literal["gather", "cut"], str], ...]
"""The gathers and cuts of an activation's rows since the model's input, each with its axis, oldest first."""


def rows_after(moves: RowMoves, what: Literal["gather", "cut"], axes: Sequence[str]) -> RowMoves:
    """Returns ``moves``, the gathers and cuts of an activation's rows so far, with one over each of ``axes`` appended.

    Rows are samples, or tokens if sequences are cut; ``what`` is "gather" or "cut". A move that undoes the last one
    removes it instead.
    """
    undone: Literal["gather", "cut"] = "cut" if what == "gather" else "gather"
    for axis in axes:
        moves = moves[:-1] if moves and moves[-1] == (undone, axis) else (*moves, (what, axis))
    return moves


def local_range(mesh: Mesh, axes: Collection[str], coord: Coord, size: int) -> range:
    """Returns the range of a dim of ``size`` elements that the rank at ``coord`` holds if ``axes`` cut the dim.

    The axes cut one after the other, slowest first, each as evenly as possible.

    >>> local_range(Mesh(dp=2, tp=3), {"dp"}, {"dp": 1}, 5)
    range(3, 5)
    """
    held = range(size)
    for axis in mesh.axes:
        if axis in axes:
            part = balanced_part(len(held), mesh[axis], coord[axis])
            held = held[part.start : part.stop]
    return held


def held_sizes(mesh: Mesh, axes: Collection[str], size: int) -> set[int]:
    """Returns all lengths that :func:`local_range` gives on some rank, computed without a loop over ranks.

    >>> sorted(held_sizes(Mesh(dp=2, tp=3), {"dp", "tp"}, 10)), sorted(held_sizes(Mesh(dp=1000), {"dp"}, 9999))
    ([1, 2], [9, 10])
    """
    lengths = {size}
    for axis in mesh.axes:
        if axis in axes:  # the first part is longest, the last has at most one less
            lengths = {len(balanced_part(length, mesh[axis], at)) for length in lengths for at in (0, mesh[axis] - 1)}
    return lengths


def runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields each run of consecutive integers in ``places`` as a pair (start, stop), in order.

    >>> list(runs([4, 5, 6, 0, 1]))
    [(4, 7), (0, 2)]
    """
    start = 0
    for number in range(1, len(places) + 1):
        if number == len(places) or places[number] != places[number - 1] + 1:
            yield places[start], places[number - 1] + 1
            start = number


def microbatch_samples(samples: range, num_microbatches: int) -> tuple[range, ...]:
    """Returns the indices of a rank's samples in each microbatch: as even as possible, and some may be empty."""
    cuts = balanced(len(samples), num_microbatches)
    return tuple(samples[a:b] for a, b in pairwise(cuts))


def is_sequence(tensor: Tensor) -> bool:
    """Returns whether dim 1 of a model's input can be tokens.

    It can in a tensor of integers (samples, tokens, ...) and in a floating-point tensor (samples, tokens, features,
    ...).

    >>> is_sequence(torch.zeros(2, 9, dtype=torch.int64)), is_sequence(torch.zeros(2, 9))
    (True, False)
    """
    return tensor.dim() > 1 + tensor.is_floating_point()


def num_tokens_of(inputs: Any, targets: Any = None) -> int:
    """Returns the number of tokens in each sample: the size of dim 1, which must be the same in inputs and targets.

    Raises: LayoutError: an input has no dim of tokens, or tensors differ in its size.

    >>> num_tokens_of(torch.zeros(2, 9, 4), torch.zeros(2, 9, dtype=torch.int64))
    9
    """
    tensors, taken = tensors_of((inputs, targets)), tensors_of(inputs)
    sizes = {tensor.shape[1] if tensor.dim() > 1 else 0 for tensor in tensors}
    if len(sizes) != 1 or not all(map(is_sequence, taken)) or marks_in(inputs):
        raise LayoutError(
            "the layout cuts sequences, and these tensors are none",
            given=", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors),
            allowed="tensors (samples, tokens) of integers or (samples, tokens, features), of as many tokens, none of "
            "them marked by sw.whole or sw.packed",
            fix="leave out /seq or cp, so that samples are cut",
        )
    return sizes.pop()


class BatchShard:
    """The samples and tokens of the current microbatch on each rank: the counterpart of a DistributedSampler's indices.

    Cuts are balanced and the same on every rank, so the part of any rank can be computed, by default that of this
    rank's own ``coord``. The arguments called ``moves`` are the gathers and cuts of rows since the model's input
    (``RowMoves``).

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

    def __init__(self, mesh: Mesh, axes: Collection[str], coord: Coord, token_axes: Collection[str] = ()) -> None:
        self.mesh, self.axes, self.coord = mesh, frozenset(axes), dict(coord)
        self.token_axes = frozenset(token_axes)
        self.dim = 1 if self.token_axes else 0
        self._row_axes = self._in_order(self.token_axes or self.axes)
        self.num_tokens = 0
        self._num_global: int | None = None  # None: every rank holds all samples
        self._number = self._count = 0
        # caches by (moves, coord); a new microbatch gets new dicts, since snapshots keep the old ones
        self._found_samples: dict[tuple[RowMoves, tuple[int, ...]], tuple[int, ...]] = {}
        self._found_tokens: dict[tuple[RowMoves, tuple[int, ...]], tuple[int, ...]] = {}

    # ---- the current microbatch

    def set_microbatch(self, num_global: int, number: int = 0, num_microbatches: int = 1) -> None:
        """Makes microbatch ``number`` of a global batch of ``num_global`` samples the current one.

        All other methods then return the samples and tokens of this microbatch.
        """
        current = (num_global, number, num_microbatches)
        if (self._num_global, self._number, self._count) != current:
            (self._num_global, self._number, self._count), self._found_samples = current, {}

    def set_uncut(self, num_samples: int) -> None:
        """Makes a batch current of which every rank holds all ``num_samples`` samples, as in some predictions."""
        self._num_global, self._count, self._found_samples = None, num_samples, {}

    def set_num_tokens(self, num_tokens: int) -> None:
        """Sets the number of tokens in each whole sample of the current batch, of which a rank may hold only a part."""
        if num_tokens != self.num_tokens:
            self.num_tokens, self._found_tokens = num_tokens, {}

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that makes the present microbatch and number of tokens the current ones again.

        A recomputation calls it before it runs a block's forward again.
        """
        state = dict(vars(self))
        return lambda: vars(self).update(state)

    # ---- cutting an input, joining an output

    def local_samples(self, num_global: int) -> range:
        """Returns the indices of this rank's samples in a global batch of ``num_global``, over all microbatches."""
        return local_range(self.mesh, self.axes, self.coord, num_global)

    def check_num_tokens(self, num_tokens: int) -> None:
        """Raises PlanError if a sequence of ``num_tokens`` is too short to give every rank at least one token."""
        cuts = [axis for axis in self.mesh.axes if axis in self.token_axes]
        parts = prod(self.mesh[axis] for axis in cuts)
        if num_tokens < parts:
            raise PlanError(
                "a sequence is shorter than the axes that cut it",
                given=f"{num_tokens} tokens over " + " ".join(f"{axis}={self.mesh[axis]}" for axis in cuts),
                allowed=f"sequences of {parts} tokens or more",
                fix="use longer sequences, or leave out /seq or cp, so that samples are cut",
            )

    def cut_tokens(self, tree: Any, num_tokens: int) -> Any:
        """Returns a batch's tensors with this rank's tokens only, as views; unchanged if no axis cuts sequences.

        ``num_tokens`` is the number of tokens in a whole sample.
        """
        if not self.token_axes:
            return tree
        held = local_range(self.mesh, self.token_axes, self.coord, num_tokens)
        return tree_map_only(Tensor, lambda tensor: tensor[:, held.start : held.stop], tree)

    def cut(self, x: Tensor, axes: Mapping[str, Axis]) -> Tensor:
        """Returns this rank's rows (samples or tokens) of a tensor that every rank holds whole. It is differentiable.

        ``axes`` gives each mesh axis by name. :meth:`join` is the inverse.

        Traffic: forward, none; backward, one all-gather over each axis that cuts rows.
        """
        for number, name in enumerate(self._row_axes):
            moves: RowMoves = tuple(("gather", axis) for axis in reversed(self._row_axes[number + 1 :]))
            x = whole_to_cut(x, axes[name], self.dim, self.sizes(moves, name))
        return x

    def join(self, x: Tensor, axes: Mapping[str, Axis], moves: RowMoves = ()) -> Tensor:
        """Returns a tensor with the rows (samples or tokens) of all ranks, in the batch's order. It is differentiable.

        ``axes`` gives each mesh axis by name. ``moves`` are the gathers and cuts of rows that led to ``x``.

        Traffic: forward, one all-gather over each axis that cuts rows and over which ``moves`` has not gathered yet;
            backward, none.
        """
        return self._join(x, axes, moves, self._row_axes, self.dim)

    def join_samples(self, x: Tensor, axes: Mapping[str, Axis], moves: RowMoves = ()) -> Tensor:
        """Returns a tensor with the samples of all ranks, in the batch's order, also where sequences are cut.

        ``axes`` and ``moves`` are those of :meth:`join`. Where sequences are cut, ``moves`` are of tokens and do not
        count here.

        Traffic: forward, one all-gather over each axis that cuts samples and over which ``moves`` has not gathered yet;
            backward, none.
        """
        return self._join(x, axes, () if self.token_axes else moves, self._in_order(self.axes), 0)

    def _join(self, x: Tensor, axes: Mapping[str, Axis], moves: RowMoves, names: Sequence[str], dim: int) -> Tensor:
        for name in reversed(names):
            if ("gather", name) not in moves:
                x = cut_to_whole(x, axes[name], dim, self._sizes(moves, name, tokens=dim == 1))
                moves = rows_after(moves, "gather", [name])
        places = self._held(moves, self.coord, tokens=dim == 1)
        if all(b == a + 1 for a, b in pairwise(places)):
            return x
        return x.index_select(dim, torch.tensor(places, device=x.device).argsort())

    def _in_order(self, axes: Collection[str]) -> list[str]:
        return [axis for axis in self.mesh.axes if axis in axes]

    # ---- which rows a rank has

    def samples(self, moves: RowMoves, at: Coord | None = None) -> tuple[int, ...]:
        """Returns the indices in the global batch of the samples that a rank holds of the current microbatch.

        ``moves`` are the gathers and cuts of rows since the model's input. The rank is the one at coord ``at``, by
        default this one.
        """
        return self._held(() if self.token_axes else moves, self.coord if at is None else at, tokens=False)

    def tokens(self, moves: RowMoves, at: Coord | None = None) -> tuple[int, ...]:
        """Returns the positions in the sequence of the tokens that a rank holds of each sample.

        ``moves`` are the gathers and cuts of rows since the model's input. The rank is the one at coord ``at``, by
        default this one.
        """
        return self._held(moves, self.coord if at is None else at, tokens=True)

    def span(self, moves: RowMoves) -> range:
        """Returns the positions of this rank's tokens in the sequence as a range, for attention.

        ``moves`` are the gathers and cuts of rows since the model's input. Attention needs consecutive tokens in their
        order, and an assertion fails for others.
        """
        places = self.tokens(moves)
        span = range(places[0], places[-1] + 1) if places else range(0)
        assert len(span) == len(places), "attention needs consecutive tokens, in their order"
        return span

    def sizes(self, moves: RowMoves, axis: str) -> tuple[int, ...]:
        """Returns how many rows (samples, or tokens if sequences are cut) each rank along ``axis`` holds.

        ``moves`` are the gathers and cuts of rows since the model's input. The ranks differ from this one only along
        ``axis``.
        """
        return self._sizes(moves, axis, tokens=self.dim == 1)

    def _sizes(self, moves: RowMoves, axis: str, *, tokens: bool) -> tuple[int, ...]:
        members = ({**self.coord, axis: i} for i in range(self.mesh[axis]))
        return tuple(len(self._held(moves, at, tokens=tokens)) for at in members)

    def counts(self, axes: Collection[str]) -> tuple[int, ...]:
        """Returns the number of rows of the model's input on each rank along ``axes``, in order of their indices.

        Rows are samples, or tokens if sequences are cut. The ranks differ from this one only along ``axes``.
        """
        members = ({**self.coord, **at} for at in self.mesh.coords(axes))
        return tuple(len(self._held((), at, tokens=self.dim == 1)) for at in members)

    def slices(self, moves: RowMoves, dims: Sequence[int], shape: Sequence[int]) -> tuple[DimSlice, ...]:
        """Returns which tokens this rank holds in a tensor of ``shape``; dropout keys its random numbers by them.

        ``dims`` are the dims of tokens. The first has this rank's tokens, after the gathers and cuts of rows in
        ``moves``; the others, as in attention weights, start at the sequence's first token.

        Raises: PlanError: the tensor has another number of tokens in the first of ``dims``.
        """
        places = self.tokens(moves)
        first, *others = dims
        if len(shape) <= max(dims) or shape[first] != len(places):
            raise PlanError(
                "a layer has its tokens in another dim than expected, and the layout cuts them",
                given=f"a tensor of shape {list(shape)}, where this rank has {len(places)} tokens",
                allowed=f"activations whose dim {first} is the tokens",
                fix="leave out /seq or cp, or put the tokens into that dim",
            )
        held = [DimSlice(first, self.num_tokens, tuple(runs(places)))]
        return (*held, *(DimSlice(dim, self.num_tokens, ((0, shape[dim]),)) for dim in others))

    def _held(self, moves: RowMoves, at: Coord, *, tokens: bool) -> tuple[int, ...]:
        """Returns the indices of the samples or tokens of the rank at a coord after ``moves``, from a cache."""
        cache = self._found_tokens if tokens else self._found_samples
        key = (moves, tuple(at.get(axis, 0) for axis in self.mesh.axes))
        if key not in cache:
            cache[key] = self._after(moves, at, tokens=tokens) if moves else self._own(at, tokens=tokens)
        return cache[key]

    def _after(self, moves: RowMoves, at: Coord, *, tokens: bool) -> tuple[int, ...]:
        (what, axis), before = moves[-1], moves[:-1]
        if what == "gather":
            members = [self._held(before, {**at, axis: i}, tokens=tokens) for i in range(self.mesh[axis])]
            return tuple(chain.from_iterable(members))
        places = self._held(before, at, tokens=tokens)
        part = balanced_part(len(places), self.mesh[axis], at.get(axis, 0))
        return places[part.start : part.stop]

    def _own(self, at: Coord, *, tokens: bool) -> tuple[int, ...]:
        if tokens:
            return tuple(local_range(self.mesh, self.token_axes, at, self.num_tokens))
        if self._num_global is None:
            return tuple(range(self._count))
        held = local_range(self.mesh, self.axes, at, self._num_global)
        part = balanced_part(len(held), self._count, self._number)
        return tuple(held[part.start : part.stop])
