"""Marks the inputs of a batch that cannot be split into samples along dim 0, as plain tensors can.

There are three kinds: a tensor that all samples share, a packed tensor in which each sample has some rows, and a list
with one entry per sample. A mark is a node of torch's trees, so that casts, copies and moves reach its tensors. Code
that takes some samples of a batch treats marks apart. The model is called with the tensor or the list itself.

A tensor with its samples in another dim is held with that dim in front, and is then cut as any other. Only code that
calls the model or the loss, joins outputs, or plans grids knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

from shardwright.errors import PlanError


@dataclass(frozen=True, eq=False)
class Whole:
    """A tensor of a batch that is the same for all samples; made by :func:`whole`."""

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class SampleRows:
    """A tensor of a batch in whose dim 0 sample i has the next ``counts[i]`` rows; made by :func:`packed`."""

    tensor: Tensor
    counts: tuple[int, ...]

    @property
    def num_samples(self) -> int:
        """The number of samples whose rows the tensor has."""
        return len(self.counts)

    @property
    def shapes(self) -> tuple[int, ...]:
        """What tells the shapes of the samples' parts apart: the number of rows of each sample."""
        return self.counts

    def of(self, places: Sequence[int]) -> SampleRows:
        """Returns the rows of the samples at these places, in their order."""
        bounds = (0, *accumulate(self.counts))
        start, stop = (places[0], places[-1] + 1) if places else (0, 0)
        if list(places) == list(range(start, stop)):  # a slice is a view, not a copy, as for plain tensors
            rows = self.tensor[bounds[start] : bounds[stop]]
        else:
            rows = torch.cat([self.tensor[bounds[place] : bounds[place + 1]] for place in places])
        return SampleRows(rows, tuple(self.counts[place] for place in places))


@dataclass(frozen=True, eq=False)
class SampleValues:
    """A list in a batch with one entry per sample: a number, text, or a dict of tensors such as a picture's boxes."""

    entries: list[Any]

    @property
    def num_samples(self) -> int:
        """The number of samples: one for each entry."""
        return len(self.entries)

    @property
    def shapes(self) -> tuple[tuple[torch.Size, ...], ...]:
        """The shapes of the tensors in each sample's entry."""
        return tuple(
            tuple(leaf.shape for leaf in tree_leaves(entry) if isinstance(leaf, Tensor)) for entry in self.entries
        )

    def of(self, places: Sequence[int]) -> SampleValues:
        """Returns the entries of the samples whose numbers are ``places``, in that order."""
        return SampleValues([self.entries[place] for place in places])


@dataclass(frozen=True, eq=False)
class SampleDimFirst:
    """A tensor of a batch, with its dim of samples moved to the front from dim ``dim``; made by :func:`samples_in`.

    It is no mark (:func:`is_mark`): code that takes some samples of a batch treats ``tensor`` as any other.
    """

    tensor: Tensor
    dim: int

    def moved_back(self) -> Tensor:
        """Returns the tensor as the model or the loss takes it, with the samples in dim ``dim``."""
        return self.tensor.movedim(0, self.dim).contiguous()


register_pytree_node(Whole, lambda mark: ([mark.tensor], None), lambda leaves, _: Whole(next(iter(leaves))))
register_pytree_node(
    SampleRows, lambda mark: ([mark.tensor], mark.counts), lambda leaves, counts: SampleRows(next(iter(leaves)), counts)
)
register_pytree_node(
    SampleDimFirst, lambda held: ([held.tensor], held.dim), lambda leaves, dim: SampleDimFirst(next(iter(leaves)), dim)
)
register_pytree_node(SampleValues, lambda mark: (mark.entries, None), lambda entries, _: SampleValues(list(entries)))


def whole(tensor: Tensor) -> Whole:
    """Marks a tensor among a batch's inputs that has no samples in dim 0, such as positions that all samples share.

    The model is called with the whole tensor on every rank and in every microbatch. Mark it in the example and in each
    batch. The tensor may have any shape, and its values may change from batch to batch. Your own code that reads a
    batch finds the tensor in the mark's attribute ``tensor``.

    Raises: PlanError: ``tensor`` is not a tensor.

    >>> import torch, shardwright as sw
    >>> class Shifted(torch.nn.Linear):
    ...     def forward(self, x, positions):
    ...         return super().forward(x + positions)
    >>> batch = ((torch.ones(4, 3), sw.whole(torch.arange(3.0))), torch.zeros(4, dtype=torch.int64))
    >>> print(sw.verify(Shifted(3, 2), "dp2 mb2", [batch]))
    equal to one device: loss, 2 gradients and 1 steps on 2 ranks, ...
    """
    if isinstance(tensor, Tensor):
        return Whole(tensor)
    raise PlanError(
        "sw.whole marks one tensor",
        given=type(tensor).__name__,
        allowed="a tensor that has no samples in dim 0; values that are no tensors go to every rank anyway, but for "
        "lists with an entry for each sample",
        fix="write sw.whole(torch.as_tensor(value)), or leave the mark out",
    )


def samples_in(tensor: Tensor, dim: int) -> SampleDimFirst:
    """Marks a tensor of a batch whose samples are in dim ``dim``: dim 1, for example, of a tensor of (time, samples).

    Recurrent layers and transformers of torch take such tensors unless they are made with ``batch_first=True``. Each
    rank and microbatch gets its own samples, and the model or the loss is called with them in dim ``dim``. Write it for
    inputs and targets, in the example and in each batch. Your own code that reads a batch finds the tensor, with the
    samples in dim 0, in the attribute ``tensor``. No data is copied here; where the model is called, it gets a copy.

    Raises: PlanError: ``tensor`` is not a tensor with such a dim.

    >>> import torch, shardwright as sw
    >>> class Tagger(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.rnn, self.head = torch.nn.LSTM(3, 8), torch.nn.Linear(8, 2)
    ...     def forward(self, x):
    ...         return self.head(self.rnn(x)[0])
    >>> x, y = torch.randn(5, 4, 3), torch.randint(2, (5, 4))  # 5 steps of 4 samples
    >>> print(sw.verify(Tagger(), "dp2 mb2", [(sw.samples_in(x, 1), sw.samples_in(y, 1))]))
    equal to one device: loss, 6 gradients and 1 steps on 2 ranks, ...
    """
    if isinstance(tensor, Tensor) and -tensor.dim() <= dim < tensor.dim():
        place = dim % tensor.dim()
        return SampleDimFirst(tensor.movedim(place, 0), place)
    raise PlanError(
        "sw.samples_in says which dim of a tensor has the samples",
        given=f"dim {dim} of {list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__}",
        allowed="a tensor that has such a dim",
        fix="write sw.samples_in(tensor, 1) for a tensor of (time, samples)",
    )


def packed(tensor: Tensor, counts: Iterable[int]) -> SampleRows:
    """Marks an input tensor as packed: dim 0 holds ``counts[i]`` rows for sample i, one sample after the other.

    Patches of pictures of several sizes and other ragged batches have this form. Each rank and microbatch gets the rows
    of its own samples, and the model is called with a plain tensor. Mark it in the example and in each batch. Code that
    mixes the rows of several samples, such as a batch norm over rows, is not detected. Dropout of rows is refused,
    unless it is applied to one sample at a time in a loop over the samples. The mark's attributes are ``tensor`` and
    ``counts``.

    Raises: PlanError: ``tensor`` is not a tensor, or the counts do not add up to its size in dim 0.

    >>> import torch, shardwright as sw
    >>> class Counts(torch.nn.Linear):
    ...     def forward(self, patches, lengths):
    ...         parts = super().forward(patches).split(lengths.tolist())
    ...         return torch.stack([each.sum(0) for each in parts])
    >>> inputs = sw.packed(torch.ones(6, 3), [1, 3, 0, 2]), torch.tensor([1, 3, 0, 2])
    >>> print(sw.verify(Counts(3, 2), "dp2", [(inputs, torch.zeros(4, dtype=torch.int64))]))
    equal to one device: loss, 2 gradients and 1 steps on 2 ranks, ...
    """
    numbers = tuple(map(int, counts))
    if isinstance(tensor, Tensor) and tensor.dim() and sum(numbers) == len(tensor) and min(numbers, default=0) >= 0:
        return SampleRows(tensor, numbers)
    shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
    raise PlanError(
        "sw.packed marks a tensor with the number of rows that each sample has",
        given=f"{shape}, and {len(numbers)} samples of {sum(numbers)} rows",
        allowed="a tensor whose dim 0 has all rows, those of the first sample first",
        fix="write sw.packed(tensor, counts), with one number for each sample",
    )


def per_sample(values: Iterable[Any]) -> SampleValues:
    """Marks a list in a batch as holding one entry per sample, so that it is split like the batch's tensors.

    Each rank and microbatch gets the entries of its own samples, and the model or the loss is called with a list of
    them. No mark is needed for a list of numbers, of text, or of dicts whose tensors differ in their numbers of rows,
    if the list has as many entries as the batch has samples. Mark other lists, in the example and in each batch: for
    example a list of pictures of several sizes, where no other tensor shows the number of samples.

    >>> import torch, shardwright as sw
    >>> class Sizes(torch.nn.Linear):
    ...     def forward(self, pictures):
    ...         return super().forward(torch.stack([picture.mean((1, 2)) for picture in pictures]))
    >>> pictures = [torch.ones(3, 4 + i, 5) for i in range(4)]
    >>> print(sw.verify(Sizes(3, 2), "dp2", [(sw.per_sample(pictures), torch.zeros(4, dtype=torch.int64))]))
    equal to one device: loss, 2 gradients and 1 steps on 2 ranks, ...
    """
    return SampleValues(list(values))


def is_mark(leaf: Any) -> bool:
    """Returns whether a value is a mark: of :func:`whole`, :func:`packed` or :func:`lists_marked`."""
    return isinstance(leaf, Whole | SampleRows | SampleValues)


def lists_marked(tree: Any) -> Any:
    """Returns nested values in which each list with one entry per sample has a mark, so that it is cut as tensors are.

    A list is taken to have one entry per sample if it has as many entries as the tensors outside of lists have samples,
    unless all tensors in its entries have that many rows themselves. If there are no tensors outside of lists, lists of
    numbers, text or dicts give the number of samples. A tuple of text counts as a list; other tuples never do.

    Raises: PlanError: a list has as many dicts as there are samples, and all tensors in them have as many rows.

    >>> lists_marked({"x": torch.ones(2, 3), "names": ["a", "b"], "sizes": (3, 4)})["names"]
    SampleValues(entries=['a', 'b'])
    """
    if isinstance(tree, Tensor):
        return tree
    outside = tree_leaves(tree, is_leaf=lambda value: is_mark(value) or _may_be_listed(value))
    if not any(map(_may_be_listed, outside)):
        return tree
    sizes = {len(leaf) for leaf in outside if isinstance(leaf, Tensor) and leaf.dim()}
    sizes |= {leaf.num_samples for leaf in outside if isinstance(leaf, SampleRows | SampleValues)}
    if not sizes:
        sizes = {len(leaf) for leaf in outside if _may_be_listed(leaf) and _is_of_samples(leaf)}
    if len(sizes) != 1:  # the code that counts samples raises the error for different sizes
        return tree
    (number,) = sizes

    def marked(leaf: Any) -> Any:
        if not _may_be_listed(leaf) or len(leaf) != number:
            return leaf
        tensors = [value for value in tree_leaves(leaf) if isinstance(value, Tensor)]
        if not tensors or any(not tensor.dim() or len(tensor) != number for tensor in tensors):
            return SampleValues(list(leaf))
        if not _is_of_samples(leaf):
            return leaf
        raise PlanError(
            "a list of a batch may have an entry for each sample, or values of all samples in each entry",
            given=f"a list of {number} entries, whose tensors have {number} rows, in a batch of {number} samples",
            allowed="a list of one entry for each sample; a tuple of dicts whose tensors have the samples in dim 0",
            fix="write tuple(values) where each entry has all samples, or sw.per_sample(values) where each has one",
        )

    return tree_map(marked, tree, is_leaf=lambda value: is_mark(value) or _may_be_listed(value))


def _may_be_listed(value: Any) -> bool:
    return type(value) is list or (type(value) is tuple and bool(value) and all(type(entry) is str for entry in value))


def _is_of_samples(values: Sequence[Any]) -> bool:
    """Returns whether a list is taken to have an entry for each sample: whether no entry is itself a tensor.

    A list of tensors may be several arguments, or feature maps, with the samples in dim 0 of each tensor.
    """
    return not any(isinstance(value, Tensor) for value in values)


def map_samples(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Returns a tree of inputs with some of its samples, which ``function`` selects along dim 0 of a tensor.

    ``function``, for example ``tensor[2:5]``, is applied to each tensor that has samples in dim 0. Packed tensors keep
    the rows of the same samples, lists keep their entries, and tensors that are marked as whole stay as they are.

    >>> map_samples({"x": torch.arange(4), "n": packed(torch.arange(5), [2, 0, 1, 2])}, lambda t: t[2:])
    {'x': tensor([2, 3]), 'n': SampleRows(tensor=tensor([2, 3, 4]), counts=(1, 2))}
    """

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, SampleRows | SampleValues):
            return leaf.of(function(torch.arange(leaf.num_samples)).tolist())
        return function(leaf) if isinstance(leaf, Tensor) else leaf

    if isinstance(tree, Tensor):  # ten times as fast as walking through a tree
        return function(tree)
    return tree_map(mapped, tree, is_leaf=is_mark)


def sample_tensors(tree: Any) -> list[Tensor]:
    """Returns the tensors in nested values that have samples in dim 0: all but those that a user has marked.

    The marks are :func:`whole`, :func:`packed` and :func:`per_sample`.
    """
    return [leaf for leaf in tree_leaves(tree, is_leaf=is_mark) if isinstance(leaf, Tensor)]


def first_repeated(batch: tuple[Any, Any], number: int) -> tuple[Any, Any]:
    """Returns a batch (inputs, targets) of ``number`` samples, each the first of ``batch``, without a copy of it.

    >>> first_repeated((torch.ones(2, 3), torch.ones(2)), 4)[0].shape
    torch.Size([4, 3])
    """
    inputs, targets = map_samples(batch, lambda tensor: tensor[:1].expand(number, *tensor.shape[1:]))
    return inputs, targets


def hint_of_samples(inputs: Any) -> str:
    """Returns advice for the error of a forward that fails on a part of the samples: an input may have none in dim 0.

    The advice is "" if at most one tensor has samples: then no other can have the batch's size in dim 0 by accident.

    >>> hint_of_samples((torch.ones(4, 3), torch.ones(4)))[:66]
    'samples were taken from dim 0 of inputs of shapes [4, 3], [4]; if '
    """
    shapes = [str(list(tensor.shape)) for tensor in sample_tensors(inputs)]
    if len(shapes) < 2:
        return ""
    return (
        f"samples were taken from dim 0 of inputs of shapes {', '.join(shapes)}; if one is the same for all samples "
        "and has the batch's size there by accident, write sw.whole(tensor), in each batch and in the example"
    )


def _marks(tree: Any) -> list[Whole | SampleRows | SampleValues]:
    if isinstance(tree, Tensor):  # a shortcut for most batches
        return []
    return [leaf for leaf in tree_leaves(tree, is_leaf=is_mark) if is_mark(leaf)]


def marks_in(tree: Any) -> list[Whole | SampleRows | SampleValues]:
    """Returns the marked parts of a batch that have tensors; lists with only numbers or text are left out."""
    return [mark for mark in _marks(tree) if any(isinstance(leaf, Tensor) for leaf in tree_leaves(mark))]


def packed_in(tree: Any) -> list[SampleRows | SampleValues]:
    """Returns the marked parts of a batch that have something for each sample: packed tensors, and lists of entries."""
    return [mark for mark in _marks(tree) if isinstance(mark, SampleRows | SampleValues)]


def unmarked(tree: Any) -> Any:
    """Returns a batch's inputs or targets as a model or a loss takes them.

    Marks are replaced by what they mark, and tensors get their samples where the user had them (:func:`samples_in`).
    """
    if isinstance(tree, Tensor) or not any(map(is_wrapped, tree_leaves(tree, is_leaf=is_wrapped))):
        return tree
    return tree_map(_without_mark, tree, is_leaf=is_wrapped)


def is_wrapped(leaf: Any) -> bool:
    """Returns whether a model takes another value in place of this: it is a mark, or :func:`samples_in` returned it."""
    return isinstance(leaf, Whole | SampleRows | SampleValues | SampleDimFirst)


def own_samples_dims(tree: Any) -> bool:
    """Returns whether a batch has a tensor whose samples may be in another dim than 0, made by :func:`samples_in`.

    >>> own_samples_dims([samples_in(torch.ones(2, 3), 1)]), own_samples_dims([torch.ones(2, 3)])
    (True, False)
    """
    return not isinstance(tree, Tensor) and bool(samples_dims(tree))


def samples_dims(tree: Any) -> set[int]:
    """Returns the dims in which the tensors of ``tree`` that :func:`samples_in` has marked have their samples."""
    return {leaf.dim for leaf in tree_leaves(tree, is_leaf=is_wrapped) if isinstance(leaf, SampleDimFirst)}


class _SampleDimLoss(nn.Module):
    """A loss that is given its tensors with the samples in front, and moves them back to where the code has them."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output: Any, targets: Any) -> Any:
        return self.loss(unmarked(output), unmarked(targets))


def in_front(loss: nn.Module, given: tuple[Any, Any], dims: set[int]) -> tuple[nn.Module, tuple[Any, Any]]:
    """Returns a loss, and its output and targets with the samples in dim 0, for code that takes samples from there.

    ``dims`` are the dims in which targets have their samples (:func:`samples_dims`). If there is one, and it is not 0,
    tensors with as many elements in it as the targets are taken to have their samples there. The loss that is returned
    moves them back before it calls ``loss``. Otherwise all are returned as they are.
    """
    tensors = [leaf for leaf in tree_leaves(given[1]) if isinstance(leaf, Tensor)]
    dim = next(iter(dims), 0)
    number = next((leaf.shape[dim] for leaf in tensors if leaf.dim() > dim), 0)
    if len(dims) != 1 or not dim or not number:
        return loss, given

    def moved(leaf: Any) -> Any:
        is_there = isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] == number
        return samples_in(leaf, dim) if is_there else leaf

    output, targets = tree_map(moved, given)
    return _SampleDimLoss(loss), (output, targets)


def _without_mark(leaf: Any) -> Any:
    if isinstance(leaf, SampleValues):
        return list(leaf.entries)
    if isinstance(leaf, SampleDimFirst):
        return leaf.moved_back()
    return leaf.tensor if is_mark(leaf) else leaf
