"""Losses that return a sum and a count, which ranks and microbatches add up before one division gives the mean.

A mean of means would be wrong as soon as one part of the batch has more targets than another.

V vocabulary, or classes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.errors import PlanError
from shardwright.models.settings import check_fraction

OTHER_LOSS = "; or, if targets are no classes, give the loss: parallelize(..., loss=torch.nn.MSELoss())"
"""What to write where the loss is cross entropy because none was given."""

Count = TypeVar("Count", float, Tensor)
"""A number of targets, as a number or as a tensor that stays on its device."""


class CrossEntropy(nn.Module):
    """The cross entropy loss of class targets, as a sum and the number of targets that are not ignored.

    Shapes: logits (..., V) and int64 targets (...); returns a 0-d sum in the logits' dtype and a 0-d int64 count.
    Raises: PlanError: ``label_smoothing`` is not from 0 to below 1. In a call: output or targets are no tensors; the
        targets' shape is not the logits' without its last dim.

    >>> loss_sum, count = CrossEntropy()(torch.zeros(2, 3, 4), torch.tensor([[0, 1, -100], [2, 3, 0]]))
    >>> round(loss_sum.item(), 3), count.item()
    (6.931, 5)
    """

    def __init__(self, ignore_index: int = -100, label_smoothing: float = 0.0) -> None:
        super().__init__()
        check_fraction("label_smoothing", label_smoothing)
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing

    def forward(self, logits_V: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of cross entropies and the count, over every target that is not ignored."""
        check_tensors(logits_V, targets, cross_entropy_text(self.ignore_index, self.label_smoothing))
        check_same_shape("logits but for their last dim", logits_V.shape[:-1], "targets", targets.shape, OTHER_LOSS)
        flat_logits = logits_V.flatten(0, -2) if logits_V.dim() > 1 else logits_V
        flat_targets = targets.flatten() if targets.dim() else targets
        options: dict[str, Any] = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
        loss_sum = functional.cross_entropy(flat_logits, flat_targets, reduction="sum", **options)
        return loss_sum, (targets != self.ignore_index).sum()


class MeanSquaredError(nn.Module):
    """The squared error loss, as the sum of squared differences and the number of elements.

    Shapes: outputs and targets of one shape; returns a 0-d sum in the outputs' dtype and a 0-d int64 count.
    Raises: PlanError: output or targets are no tensors; their shapes differ.

    >>> MeanSquaredError()(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 0.0]))
    (tensor(13.), tensor(3))
    """

    def forward(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of squared differences and the count, over every element."""
        check_tensors(outputs, targets, "sw.MeanSquaredError()")
        check_same_shape("outputs", outputs.shape, "targets", targets.shape)
        loss_sum = (outputs - targets.to(outputs.dtype)).square().sum()
        return loss_sum, torch.full((), outputs.numel(), dtype=torch.int64, device=outputs.device)


def sum_and_count(result: Any) -> tuple[Tensor, Tensor]:
    """Returns the result of a loss as two tensors, (sum, count), on the device of the sum.

    The count may be a number or a tensor, and may be a sum of weights.

    Raises: PlanError: ``result`` is not a pair of a tensor without dims and a number.

    >>> sum_and_count((torch.tensor(3.0), 2))
    (tensor(3.), tensor(2))
    >>> sum_and_count(torch.tensor(1.5))
    Traceback (most recent call last):
    shardwright.errors.PlanError: a loss gives the sum over its targets and their count
      given:   Tensor
      allowed: a pair (sum, count), the sum a tensor of one number
      fix:     return loss.sum(), targets.numel(), or for a mean over the targets write loss=sw.MeanLoss(function)
    """
    pair = isinstance(result, tuple) and len(result) == 2
    if not pair or not isinstance(result[0], Tensor) or result[0].dim():
        parts = result if isinstance(result, tuple) else (result,)
        texts = (f"Tensor {tuple(p.shape)}" if isinstance(p, Tensor) and p.dim() else type(p).__name__ for p in parts)
        raise PlanError(
            "a loss gives the sum over its targets and their count",
            given=", ".join(texts),
            allowed="a pair (sum, count), the sum a tensor of one number",
            fix="return loss.sum(), targets.numel(), or for a mean over the targets write loss=sw.MeanLoss(function)",
        )
    try:
        count = torch.as_tensor(result[1], device=result[0].device)
        if count.numel() != 1:
            raise ValueError(count.shape)
    except (TypeError, ValueError, RuntimeError, OverflowError) as failure:
        raise PlanError(
            "the count of a loss is no number",
            given=f"{type(result[1]).__name__}: {result[1]!r:.80}",
            allowed="a number, or a tensor of one",
            fix="return loss.sum(), targets.numel()",
        ) from failure
    return result[0], count


def check_count(count: Tensor) -> None:
    """Raises PlanError if the count of a loss requires a gradient, which would be lost.

    Ranks and microbatches run their backwards on sums; the mean, by the count of all, is taken only afterwards.

    >>> check_count(torch.ones(1, requires_grad=True).sum())
    Traceback (most recent call last):
    shardwright.errors.PlanError: the count of a loss depends on parameters, and its gradient would be lost
      given:   (sum, count), of which the count requires a gradient, as a sum of weights that the model computes
      allowed: a count that is a constant of the batch; under one rank and one microbatch any
      fix:     divide by the weights within each sample, and count the samples; or return loss.sum(), count.detach()
    """
    if count.requires_grad:
        raise PlanError(
            "the count of a loss depends on parameters, and its gradient would be lost",
            given="(sum, count), of which the count requires a gradient, as a sum of weights that the model computes",
            allowed="a count that is a constant of the batch; under one rank and one microbatch any",
            fix="divide by the weights within each sample, and count the samples; or return loss.sum(), count.detach()",
        )


def mean_of(loss_sum: Tensor, count: Count) -> tuple[Tensor, Count]:
    """Returns the mean loss and its divisor, which is ``count``, or 1 for a count of 0, without waiting for the device.

    >>> mean_of(torch.tensor(0.25), 0.5), mean_of(torch.tensor(0.0), torch.tensor(0.0))
    ((tensor(0.5000), 0.5), (tensor(0.), tensor(1.)))
    """
    divisor = count + (count == 0)
    return loss_sum / divisor, divisor


def check_same_shape(name: str, shape: torch.Size, other_name: str, other_shape: torch.Size, or_else: str = "") -> None:
    """Raises PlanError unless both shapes are equal, since broadcasting in a loss is always a mistake.

    ``or_else`` is text on another way to mend it, which the error's fix ends with.

    >>> check_same_shape("outputs", torch.Size([2, 1]), "targets", torch.Size([2]))
    Traceback (most recent call last):
    shardwright.errors.PlanError: outputs and targets differ in shape
      given:   (2, 1) and (2,)
      allowed: equal shapes
      fix:     give targets the shape (2, 1)
    """
    if shape != other_shape:
        shapes, fix = f"{tuple(shape)} and {tuple(other_shape)}", f"give {other_name} the shape {tuple(shape)}{or_else}"
        raise PlanError(f"{name} and {other_name} differ in shape", given=shapes, allowed="equal shapes", fix=fix)


def cross_entropy_text(ignore_index: int, label_smoothing: float) -> str:
    """Returns the call that makes a :class:`CrossEntropy` with these options, for an error.

    >>> cross_entropy_text(-100, 0.1)
    'sw.CrossEntropy(label_smoothing=0.1)'
    """
    options = [f"ignore_index={ignore_index}"] if ignore_index != -100 else []
    options += [f"label_smoothing={label_smoothing}"] if label_smoothing else []
    return f"sw.CrossEntropy({', '.join(options)})"


def check_tensors(output: object, targets: object, loss: str) -> None:
    """Raises PlanError unless a model's output and the targets are one tensor each.

    ``loss`` is the code of the loss, which the error calls with a tensor of the output.

    >>> check_tensors({"logits": torch.zeros(2, 3)}, torch.zeros(2), "sw.CrossEntropy()")
    Traceback (most recent call last):
    shardwright.errors.PlanError: the loss takes one tensor as the model's output
      given:   dict with logits
      allowed: a tensor
      fix:     return it alone, or give a loss of your own: loss=lambda output, targets:
               sw.CrossEntropy()(output['logits'], targets)
    """
    for what, value in (("the model's output", output), ("the targets", targets)):
        if isinstance(value, Tensor):
            continue
        type_text, part = type(value).__name__, ""
        if isinstance(value, Mapping):
            type_text += f" with {', '.join(map(str, value))}"
            part = f"[{'logits' if 'logits' in value else next(iter(value), '')!r}]"
        elif isinstance(value, tuple | list):
            type_text += f" of {', '.join(type(entry).__name__ for entry in value)}"
            part = "[0]"
        elif is_dataclass(value):
            named = [field.name for field in fields(value) if isinstance(getattr(value, field.name), Tensor)]
            type_text += f" with {', '.join(named)}"
            part = f".{'logits' if 'logits' in named or not named else named[0]}"
        taken = [
            f"{name}{part if value is other else ''}" for name, other in (("output", output), ("targets", targets))
        ]
        fix = "return it alone, or give a loss of your own: loss=lambda output, targets:\n           "
        fix += f"{loss}({', '.join(taken)})"
        if value is output and part.strip("[].'") == "logits" and isinstance(targets, Tensor) and targets.dim() > 1:
            fix += ".\n           Labels of causal language models are the tokens themselves, which the model shifts:"
            fix += f"\n           loss=sw.ModelLoss(), or {loss}(output{part}[:, :-1], targets[:, 1:])"
        scalars = [n for n, entry in enumerate(value if value is output and isinstance(value, tuple | list) else ())
                   if isinstance(entry, Tensor) and not entry.dim()]  # fmt: skip
        if scalars:
            fix += ".\n           If the model takes the targets too, and gives the mean of its own loss over them:"
            fix += f"\n           loss=sw.MeanLoss(lambda output, targets: output[{scalars[0]}])"
        if what == "the targets" and value is None:
            fix = "give batches of pairs (inputs, targets)"
        raise PlanError(f"the loss takes one tensor as {what}", given=type_text, allowed="a tensor", fix=fix)
