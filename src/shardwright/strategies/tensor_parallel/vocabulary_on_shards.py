"""Table lookups and cross entropies on shards: each rank holds some rows or classes, wherever code calls the function.

::

    tokens --> | some rows of the table, zeros for others | --sum--> x
    x --> | head: rows of its weight, some classes | --> sharded logits --> | three numbers a token, gathered | --> loss

The model's own code may call ``F.cross_entropy`` with labels, or a loss beside the model with its output
(``output_shards``). A table that is the head's weight too is cut once, for both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.comm.autograd import partial_to_whole
from shardwright.comm.axis import Axis
from shardwright.operators.vocabulary import cut_cross_entropy, cut_embedding
from shardwright.sharding.tensor_shard import held, is_in_blocks, tagged


def cross_entropy_on_shards(
    axis: Axis, input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor | None:  # fmt: skip
    """Returns ``F.cross_entropy`` of logits whose classes are cut, or None where they have to be gathered.

    They have to be gathered if classes have weights, if targets are probabilities, if tokens are cut, or if the ranks'
    classes are not consecutive blocks, at least one class on each rank. In bf16 and fp16 the sums are computed in fp32;
    under autocast the result stays in fp32, as torch's does.

    Shapes: as ``F.cross_entropy``: input (C), (N, C) or (N, C, d1, ...), target the same without the dim of classes.
    Traffic: three numbers for each token, four with label smoothing, in one all-gather; none in the backward.
    """
    shard, dim = tagged(input), 1 if input.dim() > 1 else 0
    cut = shard.cuts[dim] if shard is not None else None
    whole = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    if cut is None or not whole or tagged(target) is not None or target.is_floating_point():
        return None
    assert shard is not None
    if sum(dim_cut is not None for dim_cut in shard.cuts) > 1 or not is_in_blocks(cut, axis.size):
        return None
    narrow = input.dtype in (torch.float16, torch.bfloat16)
    logits_v = (input.float() if narrow else input).movedim(dim, -1)
    loss_N, count = cut_cross_entropy(
        logits_v, target, held(cut, axis.index)[0], len(cut), (axis,), ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )  # fmt: skip
    loss = loss_N.view(target.shape) if reduction == "none" else loss_N.sum()
    loss = loss / count if reduction == "mean" else loss
    under_autocast = not input.is_meta and torch.is_autocast_enabled(input.device.type)  # meta has no autocast
    return loss if under_autocast else loss.to(input.dtype)


def embedding_on_shards(
    axis: Axis, input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor | None:  # fmt: skip
    """Returns ``F.embedding`` from a table whose rows are cut, or None where the table has to be gathered.

    It has to be gathered if rows are renormalized, if their gradients are scaled or sparse, or if the table is not cut
    into consecutive blocks of rows.

    Shapes: as ``F.embedding``: input (...), weight (V / cut, H); returns (..., H), whole.
    Traffic: one all-reduce of the result; none in the backward.
    """
    shard = tagged(weight)
    cut = shard.cuts[0] if shard is not None else None
    if cut is None or max_norm is not None or scale_grad_by_freq or sparse or tagged(input) is not None:
        return None
    assert shard is not None
    if shard.cuts[1] is not None or not is_in_blocks(cut, axis.size):
        return None
    padding = padding_idx + len(cut) if padding_idx is not None and padding_idx < 0 else padding_idx
    rows = cut_embedding(input, weight, held(cut, axis.index)[0], len(cut), (), (), padding)
    return partial_to_whole(rows, axis)
