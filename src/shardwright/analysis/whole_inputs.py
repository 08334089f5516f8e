"""Marks tensors of a batch that have no samples in dim 0, so that every rank and microbatch is given the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map

from shardwright.errors import PlanError


@dataclass(frozen=True, eq=False)
class Whole:
    """A tensor of a batch that is the same for all samples; made by :func:`whole`. The model is given ``tensor``."""

    tensor: Tensor


# a node, so that casts, copies and moves reach the tensor
register_pytree_node(Whole, lambda each: ([each.tensor], None), lambda found, _: Whole(*found))


def whole(tensor: Tensor) -> Whole:
    """Marks a tensor among a batch's inputs that has no samples in dim 0, such as positions that all samples share.

    The model is called with the tensor itself, whole, on every rank and in every microbatch. Mark it in the example and
    in each batch; the tensor may have any shape, and other values from batch to batch.

    Raises: PlanError: it is not given a tensor.

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
        allowed="a tensor that has no samples in dim 0; values that are no tensors go to every rank anyway",
        fix="write sw.whole(torch.as_tensor(value)), or leave the mark out",
    )


def is_whole(leaf: Any) -> bool:
    """Returns whether a value is the mark that :func:`whole` makes."""
    return isinstance(leaf, Whole)


def map_samples(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Returns nested values with ``function`` applied to each tensor that has samples; marked ones stay as they are."""
    if isinstance(tree, Tensor):  # ten times as fast as walking through a tree
        return function(tree)
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree, is_leaf=is_whole)


def sample_tensors(tree: Any) -> list[Tensor]:
    """Returns the tensors in nested values that have samples in dim 0: all but those marked by :func:`whole`."""
    return [leaf for leaf in tree_leaves(tree, is_leaf=is_whole) if isinstance(leaf, Tensor)]


def has_whole(tree: Any) -> bool:
    """Returns whether nested values have a tensor that is marked by :func:`whole`."""
    return not isinstance(tree, Tensor) and any(map(is_whole, tree_leaves(tree, is_leaf=is_whole)))


def unmarked(tree: Any) -> Any:
    """Returns nested values as a model takes them: with the tensors that :func:`whole` marks, without the marks."""
    if not has_whole(tree):
        return tree
    return tree_map(lambda leaf: leaf.tensor if is_whole(leaf) else leaf, tree, is_leaf=is_whole)
