"""Checks in the first step whether a user's loss of several samples is the sum of the losses of their two halves.

Ranks and microbatches add up the sums and counts of their own samples. That is the loss of one device only if the sum
and the count of all samples are the sums of those of the parts, which a record of the loss may not show: the mean may
be over targets that the code selects, or a function that returns a sum may have been given as one that returns a mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import isfinite
from typing import Any, NamedTuple
from warnings import warn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.analysis.objects.copying import copied
from shardwright.analysis.on_meta.hidden_outputs import hidden_tensors
from shardwright.analysis.on_meta.meta_values import RANDOM
from shardwright.analysis.samples.sample_mixing import has_list
from shardwright.dispatch_mode import DispatchMode, is_collective
from shardwright.models.losses import sum_and_count
from shardwright.parallelize.repeated_calls import may_be_repeated
from shardwright.sharding.tensor_shard import tagged

_MOST_ELEMENTS = 2**24
"""The most elements of outputs and targets that are compared: the first samples that fit, but at least two."""

_WIDE_DIFFERENCE, _DIFFERENCE = 1e-5, 1e-3
"""The relative difference of two means that rounding alone may cause. The first is for a loss that is given float64,
which its code may convert to float32; the second for one that is given another dtype, where matrix products may run in
TF32."""

_NARROW_ROUNDINGS = 16
"""The relative difference that rounding may cause if the loss computes in bf16 or fp16, as a multiple of bf16's eps."""

_LEAST_DIFFERENCE = 1e-6
"""The absolute difference that rounding may cause if terms cancel, as in the first step of a policy gradient."""


def difference_of_halves(loss: nn.Module, output: Any, targets: Any) -> tuple[float, float] | None:
    """Returns the mean loss of the first samples, and that of two halves by their sums and counts, if these two differ.

    The result is None if they are equal but for rounding, and if that cannot be told: for a single sample; if not all
    tensors have the samples in dim 0; for lists, shards of tensors, or tensors inside of objects; if a half has no
    targets; and for a loss that draws random numbers, does not take half of the samples, or may not be called once more
    (:func:`may_be_repeated`). Copies of the loss are called, so that its state does not change.

    The loss is computed in float64, if it takes that, because the losses of single samples differ little in a new
    model.

    >>> def ragged(output, targets):  # a mean over the targets that are there, where all are counted
    ...     there = targets > 0
    ...     return (output - targets)[there].square().mean() * targets.numel(), targets.numel()
    >>> from shardwright.models.given_loss import as_loss
    >>> output, targets = torch.zeros(4, 2), torch.tensor([[1.0, 0.0], [0.0, 0.0], [3.0, 3.0], [3.0, 3.0]])
    >>> whole, halves = difference_of_halves(as_loss(ragged), output, targets)
    >>> round(whole, 2), round(halves, 2)
    (7.4, 5.0)
    """
    tensors = [leaf for leaf in tree_leaves((output, targets)) if isinstance(leaf, Tensor)]
    count = next((len(leaf) for leaf in tensors if leaf.dim()), 0)
    if count < 2 or any(len(leaf) != count for leaf in tensors if leaf.dim()) or hidden_tensors((output, targets)):
        return None
    if any(leaf.is_meta or tagged(leaf) is not None for leaf in tensors):
        return None
    if has_list(targets) or not may_be_repeated(loss):
        return None
    num_elements = max(sum(leaf.numel() for leaf in tensors) // count, 1)
    half = max(min(count, _MOST_ELEMENTS // num_elements) // 2, 1)
    wide = _losses(loss, output, targets, half, torch.float64) if 2 * half * num_elements <= _MOST_ELEMENTS else None
    record = wide or _losses(loss, output, targets, half)
    if record is None:
        return None
    (total, number), *halves = record.values
    added, added_number = map(sum, zip(*halves, strict=True))
    if not number or not added_number or not all(loss_sum for loss_sum, _ in halves):
        return None
    means = total / number, added / added_number
    if isfinite(total) and any(terms and not isfinite(loss_sum) for loss_sum, terms in halves):
        return means  # such as a mean over selected targets, of which a half has none
    most = _DIFFERENCE if wide is None else _WIDE_DIFFERENCE
    if record.narrowest < torch.finfo(torch.float32).bits:
        most = max(most, _NARROW_ROUNDINGS * torch.finfo(torch.bfloat16).eps)
    scale = max(abs(means[0]), sum(abs(loss_sum) for loss_sum, _ in halves) / abs(added_number))
    return means if abs(means[0] - means[1]) > max(most * scale, _LEAST_DIFFERENCE) else None


class _SumRecord(NamedTuple):
    """The loss sums and counts of the first samples and of each half of them, and the bits of the narrowest floats."""

    values: list[list[float]]
    narrowest: int


def _losses(
    loss: nn.Module, output: Any, targets: Any, half: int, dtype: torch.dtype | None = None
) -> _SumRecord | None:
    """Returns the losses of the first two halves, of ``half`` samples each, or None if they cannot be computed.

    With ``dtype`` the loss is given tensors of it in place of floating-point ones.
    """

    def part(start: int, stop: int, x: Tensor) -> Tensor:
        copy = (x[start:stop] if x.dim() else x).clone()  # a loss may write to its arguments
        return copy.to(dtype) if x.is_floating_point() else copy

    pairs = list[tuple[Tensor, Tensor]]()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=()), _RefusesDraws() as calls:
            for start, stop in ((0, 2 * half), (0, half), (half, 2 * half)):
                arguments = tree_map_only(Tensor, partial(part, start, stop), (output, targets))
                pairs.append(sum_and_count(copied(loss, {})(*arguments)))
    except Exception:  # the user's code may raise anything on half of the samples; _RefusesDraws raises here, too
        return None
    values = torch.stack([torch.stack([value.double() for value in pair]) for pair in pairs]).tolist()
    return _SumRecord(values, calls.narrowest)


def warn_of_halves(loss: nn.Module, output: Any, targets: Any, stacklevel: int) -> None:
    """Warns if a loss of the first samples is not what the losses of their halves add up to."""
    means = difference_of_halves(loss, output, targets)
    if means is not None:
        whole, halves = means
        odd = "" if isfinite(halves) else ", one of which has no finite loss"
        warn(
            f"the loss of the first samples is {whole:.6g}, and {halves:.6g} by the sums and counts of their two "
            f"halves, as ranks and microbatches add them up{odd}: it is no mean over what it counts, and differs from "
            "one device. Return the sum and the count that the mean is of: "
            "loss=lambda output, targets: (loss_sum, count)",
            stacklevel=stacklevel + 1,
        )


class _RefusesDraws(DispatchMode):
    """A mode that raises an error where an operator draws random numbers, or waits for ranks that may not call it.

    ``narrowest`` has the bits of the narrowest floating-point numbers that operators have made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.narrowest = 64

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__ in RANDOM or is_collective(func):
            raise RuntimeError(f"{func} is not run on halves of a batch")
        result = func(*args, **(kwargs or {}))
        made = (x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point())
        self.narrowest = min((self.narrowest, *(torch.finfo(x.dtype).bits for x in made)))
        return result
