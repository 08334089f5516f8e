"""Batches whose sequences are cut: what of each a rank has, and how an output becomes whole again."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwright.comm.axis import Axis
from shardwright.errors import LayoutError, PlanError
from shardwright.mesh import Coord
from shardwright.plan.batch_shard import Rows, Samples, local_samples
from shardwright.plan.plan import OUTPUT, Plan
from shardwright.strategies.tensor_parallel.roles import rows_after


def is_sequence(tensor: Tensor) -> bool:
    """Whether dim 1 can be tokens: of integers, one each; of numbers, each with features.

    >>> is_sequence(torch.zeros(2, 9, dtype=torch.int64)), is_sequence(torch.zeros(2, 9))
    (True, False)
    """
    return tensor.dim() > 1 + tensor.is_floating_point()


def num_tokens_of(inputs: Any, targets: Any = None) -> int:
    """How many tokens each sample has: dim 1 of every tensor.

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


def check_long_enough(plan: Plan, num_tokens: int) -> None:
    """Raises PlanError unless every rank has a token of each sequence."""
    axes = [axis for axis in plan.mesh.axes if axis in plan.token_axes]
    parts = prod(plan.mesh[axis] for axis in axes)
    if num_tokens < parts:
        raise PlanError(
            "a sequence is shorter than the axes that cut it",
            given=f"{num_tokens} tokens over " + " ".join(f"{axis}={plan.mesh[axis]}" for axis in axes),
            allowed=f"sequences of {parts} tokens or more",
            fix="use longer sequences, or leave out /seq, so that samples are cut",
        )


def cut_tokens(plan: Plan, coord: Coord, tree: Any, num_tokens: int) -> Any:
    """The tokens of every tensor of a batch that ``coord`` computes: views. All of them where no sequence is cut."""
    if not plan.token_axes:
        return tree
    held = local_samples(plan.mesh, plan.token_axes, coord, num_tokens)
    return tree_map_only(Tensor, lambda tensor: tensor[:, held.start : held.stop], tree)


def join_tokens(plan: Plan, samples: Samples, axes: Mapping[str, Axis], output: Tensor) -> Tensor:
    """The output of all tokens, in their order, from each rank's.

    Traffic: one all-gather over each axis that cuts it.
    """
    rows: Rows = plan.rows.get(OUTPUT, ())
    for name in reversed(plan.mesh.axes):
        if name in plan.token_axes and ("gather", name) not in rows:
            output = axes[name].all_gather(output, 1, samples.sizes(rows, name))
            rows = rows_after(rows, "gather", [name])
    places = torch.tensor(samples.tokens(rows), device=output.device)
    return output if bool((places.diff() == 1).all()) else output[:, places.argsort()]
