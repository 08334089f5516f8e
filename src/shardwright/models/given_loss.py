"""Turns a user's loss, a function or one of torch's modules, into a module that returns a sum and a count."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.errors import PlanError
from shardwright.models.losses import CrossEntropy, check_same_shape, check_tensors, cross_entropy_text
from shardwright.models.model_loss import ModelLoss

Loss = nn.Module | Callable[[Any, Any], Any]
"""A loss as a user may give it: a module, or a function of the model's output and the targets."""


class FunctionLoss(nn.Module):
    """A module that calls a user's loss function, ``function(output, targets)``, which returns (sum, count)."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, output: Any, targets: Any) -> Any:
        """Returns what the user's function returns, unchecked: the sum of the loss and the count of targets."""
        return self.function(output, targets)


class SumLoss(nn.Module):
    """A module around one of torch's mean losses that returns the sum and the count from which that mean is taken.

    The count is what torch divides by: the number of elements or, for class targets, the number of targets that are not
    ignored, or the sum of their classes' weights. The scores of the classes may be in dim 1 of the output, as in torch,
    or in the last dim, as in language models.

    Raises: PlanError: the loss has another ``reduction`` than "mean". In a call: output or targets are no tensors;
        torch would broadcast them to a larger shape; both dims could be that of the classes.

    >>> logits, targets = torch.zeros(2, 5, 4), torch.tensor([[0, 1, -100, 3, 0], [2, 3, 0, 1, 1]])
    >>> loss_sum, count = SumLoss(nn.CrossEntropyLoss())(logits, targets)
    >>> round((loss_sum / count).item(), 3), count.item()
    (1.386, 9)
    """

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        if loss.reduction != "mean":
            name = type(loss).__name__
            count = "len(targets)" if loss.reduction == "batchmean" else "targets.numel()"
            raise PlanError(
                "ranks add up a loss's sum and its count, and take the mean once",
                given=f"{name}(reduction={loss.reduction!r})",
                allowed='losses of torch with reduction="mean", and functions that return (sum, count)',
                fix="leave out reduction, or write loss=lambda output, targets: "
                f"(torch.nn.{name}(reduction='sum')(output, targets), {count})",
            )
        self.loss = copy(loss)  # the caller's loss is not changed
        self.loss.reduction = "none"  # type: ignore[assignment]

    def _text(self) -> str:
        """Returns the code of a loss that returns the sum and the count, for an error."""
        if isinstance(self.loss, nn.CrossEntropyLoss) and self.loss.weight is None:
            return cross_entropy_text(self.loss.ignore_index, self.loss.label_smoothing)
        return f"sw.MeanLoss(torch.nn.{type(self.loss).__name__}(...))"

    def forward(self, output: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """Returns the sum of the loss over the targets, and the count by which torch's mean would divide that sum."""
        check_tensors(output, targets, self._text())
        weight = getattr(self.loss, "weight", None)
        if weight is not None and weight.dtype != output.dtype:
            self.loss.weight = weight = weight.to(output.dtype)
        if not hasattr(self.loss, "ignore_index") or targets.is_floating_point():
            losses = self.loss(output, targets)
            if losses.numel() > max(output.numel(), targets.numel()):
                check_same_shape("outputs", output.shape, "targets", targets.shape)
            return losses.sum(), torch.full((), losses.numel(), dtype=torch.int64, device=losses.device)
        losses, mask = self.loss(_classes_second(output, targets), targets), targets != self.loss.ignore_index
        count = mask.sum() if weight is None else (weight[targets.where(mask, 0)] * mask).sum()
        return losses.sum(), count


def _classes_second(output: Tensor, targets: Tensor) -> Tensor:
    """Returns the output with its dim of classes moved to dim 1, as torch's losses take it."""
    last = output.dim() > 2 and output.shape[:-1] == targets.shape
    if not last:
        return output
    if (output.shape[0], *output.shape[2:]) == targets.shape:
        raise PlanError(
            "the classes may be in the last dim of the output or in dim 1",
            given=f"an output of {list(output.shape)} and targets of {list(targets.shape)}",
            allowed="sizes of which one fits, or a loss that says which",
            fix="write loss=sw.CrossEntropy() for classes in the last dim, or for dim 1 loss=lambda output, targets: "
            "sw.CrossEntropy()(output.movedim(1, -1), targets)",
        )
    return output.movedim(-1, 1)


_MODULES: Mapping[Any, type[nn.Module]] = {
    functional.binary_cross_entropy: nn.BCELoss,
    functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.huber_loss: nn.HuberLoss,
    functional.l1_loss: nn.L1Loss,
    functional.mse_loss: nn.MSELoss,
    functional.nll_loss: nn.NLLLoss,
    functional.smooth_l1_loss: nn.SmoothL1Loss,
}
"""Loss functions of torch, with the modules that are the same losses."""


def loss_modules() -> Mapping[Any, type[nn.Module]]:
    """Returns the loss functions of torch that are taken as losses, each with the module that is the same loss."""
    return _MODULES


def as_loss(loss: Any) -> nn.Module:
    """Returns ``loss`` as a module that returns (sum, count).

    None means cross entropy. Functions, and torch's losses that return the mean, are wrapped; other modules are
    returned as they are.

    Raises: PlanError: ``loss`` is a class instead of an instance, cannot be called with an output and targets, or is
        one of torch's losses with another ``reduction`` than "mean".

    >>> loss_sum, count = as_loss(lambda output, targets: ((output - targets).abs().sum(), 3))(torch.ones(3), 0)
    >>> loss_sum.item(), count
    (3.0, 3)
    >>> as_loss(nn.CrossEntropyLoss)
    Traceback (most recent call last):
    shardwright.errors.PlanError: a loss is a module or a function of the output and the targets
      given:   the class CrossEntropyLoss
      allowed: a module or function that returns (sum, count), or a loss of torch that returns the mean
      fix:     write loss=CrossEntropyLoss()
    """
    if loss is None:
        return CrossEntropy()
    if isinstance(loss, type) or not callable(loss):
        name = loss.__name__ if isinstance(loss, type) else type(loss).__name__
        raise PlanError(
            "a loss is a module or a function of the output and the targets",
            given=f"the class {name}" if isinstance(loss, type) else f"{name}: {loss!r}",
            allowed="a module or function that returns (sum, count), or a loss of torch that returns the mean",
            fix=f"write loss={name}()" if isinstance(loss, type) else "write loss=torch.nn.CrossEntropyLoss()",
        )
    _check_arguments(loss)
    if not isinstance(loss, nn.Module):
        module = _MODULES.get(loss) if isinstance(loss, Hashable) else None
        return SumLoss(module()) if module is not None else FunctionLoss(loss)
    of_torch = type(loss).forward.__module__ == nn.modules.loss.__name__
    return SumLoss(loss) if of_torch and isinstance(getattr(loss, "reduction", None), str) else loss


def _check_arguments(loss: Callable[..., Any]) -> None:
    """Raises PlanError if a loss does not take two arguments, as torch's triplet, CTC and Gaussian losses do not."""
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss, follow_wrapped=False)
    except (TypeError, ValueError):  # native code may have no signature
        return
    try:
        signature.bind(None, None)
    except TypeError as failure:
        name = type(loss).__name__ if isinstance(loss, nn.Module) else getattr(loss, "__name__", type(loss).__name__)
        names = ", ".join(signature.parameters)
        raise PlanError(
            "a loss is called with the model's output and the targets",
            given=f"{name}, which takes ({names})",
            allowed="a module or function of (output, targets)",
            fix="write loss=lambda output, targets: (loss_sum, count), and take apart there what the model or the "
            "batch gives as a tuple",
        ) from failure


def loss_for(loss: Any, model: nn.Module) -> nn.Module:
    """Returns :func:`as_loss` of a loss; a :class:`ModelLoss` also knows whether ``model`` predicts next tokens."""
    loss_module = as_loss(loss)
    return loss_module.for_model(model) if isinstance(loss_module, ModelLoss) else loss_module
