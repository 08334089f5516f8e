"""Losses that are means: one that the model itself computes from its labels, and a function that returns a mean.

Ranks and microbatches add up sums and counts, so each mean is multiplied by the number of targets that it divides by.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shardwright.errors import PlanError

IGNORED = -100
"""The target that torch's and transformers' losses ignore by default."""

_SHIFTED = {
    "ForCausalLM": True,
    **dict.fromkeys(("ForMaskedLM", "ForQuestionAnswering", "ForTokenClassification"), False),
    **dict.fromkeys(("ForSequenceClassification", "ForImageClassification"), False),
    **dict.fromkeys(("ForVideoClassification", "ForAudioClassification"), False),
}
"""Whether models shift their labels, by the ``loss_type`` of transformers, where all models of a type do the same."""


class ModelLoss(nn.Module):
    """The loss that a model itself computes from labels among its inputs, as models of transformers do.

    A batch is a mapping, such as a ``BatchEncoding``: the model is called as ``model(**batch)`` and returns its mean
    loss alone, as ``output.loss``, as ``output["loss"]``, first in a tuple, or as the one number in a tuple, as in
    ``logits, loss``. ``labels`` is the key of the labels, of which those equal to ``ignore_index`` are not counted.

    ``shifted`` says that the model predicts the next token, and so leaves out the first label of each sequence. By
    default the ``loss_type`` of a model of transformers, or the loss that its forward calls, says so where one class of
    losses stands behind it: causal language models shift, and masked ones and classifiers do not. Models for
    conditional generation are of both kinds: Llava shifts, and T5 does not. If targets were counted wrongly, ranks with
    fewer targets would get a wrong weight in the mean. So if a model does not say whether it shifts, labels of
    sequences are an error.

    ``over="samples"`` says that the loss is a mean over samples, however many labels each has, as the CTC loss of
    speech models with ``ctc_loss_reduction="mean"`` is. ``labels`` may then be any input with a row for each sample,
    as where a model learns without labels: ``ModelLoss("images", over="samples")`` for batches ``{"images": images}``.

    Layouts that cut the tokens of a sequence (``/seq``) need a loss on the logits instead: a shift would cross ranks.

    Raises: PlanError: ``shifted`` is given beside ``over="samples"``. In a step: a batch is no mapping with these
        labels, the model returns no loss, or whether it shifts the labels is not known.

    >>> import shardwright as sw
    >>> class Regression(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = nn.Linear(4, 1)
    ...     def forward(self, x, labels):
    ...         return {"loss": nn.functional.mse_loss(self.layer(x)[:, 0], labels)}
    >>> model, batch = Regression(), {"x": torch.ones(5, 4), "labels": torch.zeros(5)}
    >>> def work(world):
    ...     run = sw.parallelize(model, "dp2", world, loss=sw.ModelLoss())
    ...     return [run.step(part).item() for part in run.shard([batch])]
    >>> found = sw.launch(work, 2, ranks="threads")
    >>> bool(abs(found[0][0] - model(**batch)["loss"].item()) < 1e-6), found[0] == found[1]
    (True, True)
    """

    def __init__(
        self, labels: str = "labels", *, shifted: bool | None = None, ignore_index: int = IGNORED,
        over: Literal["labels", "samples"] = "labels",
    ) -> None:  # fmt: skip
        super().__init__()
        if over not in ("labels", "samples") or (over == "samples" and shifted is not None):
            raise PlanError(
                "a mean is over labels, which a model may shift, or over samples",
                given=f"over={over!r}" + f", shifted={shifted}" * (shifted is not None),
                allowed='over="labels" (the default), with shifted=True or False, or over="samples" alone',
                fix='write loss=sw.ModelLoss(over="samples")',
            )
        self.labels, self.shifted, self.ignore_index, self.over = labels, shifted, ignore_index, over

    def for_model(self, model: nn.Module) -> ModelLoss:
        """Returns this loss for ``model``; if ``shifted`` is None, the model's ``loss_type`` decides it where it can.

        If a model of transformers has no ``loss_type``, as GPT-2, and its forward calls ``loss_function``, that is the
        default of transformers, the loss of causal language models.
        """
        kind = getattr(model, "loss_type", None)
        if self.shifted is not None or self.over == "samples":
            return self
        shifted = _SHIFTED.get(kind) if isinstance(kind, str) else True if _takes_default(model) else None
        return ModelLoss(self.labels, shifted=shifted, ignore_index=self.ignore_index)

    def pair(self, batch: Any) -> tuple[Any, Any]:
        """Returns (inputs, targets) of a batch: all of it, and its labels. A pair is returned as it is."""
        if isinstance(batch, Mapping) and self.labels in batch:
            return dict(batch), batch[self.labels]
        if isinstance(batch, tuple | list) and len(batch) == 2:
            return batch[0], batch[1]
        batch_text = f"{type(batch).__name__}" + (
            f" with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
        )
        first = next(iter(batch), "images") if isinstance(batch, Mapping) else "images"
        raise PlanError(
            f"a batch has no '{self.labels}', from which the model computes its loss",
            given=batch_text,
            allowed=f"a mapping of the model's named inputs, '{self.labels}' among them",
            fix="write loss=sw.ModelLoss(labels=...), or a loss on the model's output: loss=sw.CrossEntropy(); if the "
            f"model takes no labels, and its loss is a mean over samples: loss=sw.ModelLoss({first!r}, over='samples')",
        )

    def forward(self, output: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """Returns the sum of the loss that the model computed, and the number of labels that it did not ignore.

        With ``over="samples"`` the number is that of samples.
        """
        if self.over == "samples":
            return sum_of_mean(_loss_of(output), torch.empty(len(targets), device="meta"))
        return sum_of_mean(_loss_of(output), self._counted(targets), self.ignore_index)

    def _counted(self, targets: Any) -> Any:
        if not isinstance(targets, Tensor) or targets.dim() < 2 or targets.is_floating_point():
            return targets
        if self.shifted is None:
            raise PlanError(
                "whether the model predicts the next token is not known, and so not how many labels its loss counts",
                given=f"labels of {list(targets.shape)}, and a model whose loss_type does not say it",
                allowed="shifted=True if the first label of each sequence is left out, else shifted=False; "
                'over="samples" if the loss is a mean over samples, as that of CTC may be',
                fix="write loss=sw.ModelLoss(shifted=True) for a decoder alone, shifted=False for an encoder with a "
                "decoder, such as T5 or BART",
            )
        return targets[:, 1:] if self.shifted else targets


def _takes_default(model: nn.Module) -> bool:
    """Returns whether a model's code calls ``loss_function`` and this function is that of causal language models."""
    for module in model.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and "loss_function" in code.co_names:
            return getattr(getattr(module, "loss_function", None), "__name__", "") == "ForCausalLMLoss"
    return False


class MeanLoss(nn.Module):
    """A loss function that returns a mean over its targets, such as ``F.cross_entropy``, as a sum and a count.

    ``function(output, targets)`` returns the mean; the count is that of all elements of the targets, or of those that
    differ from ``ignore_index``. A function whose mean is over something else, such as samples whose targets differ in
    number, or is weighted, must return its sum and count itself.

    Raises: PlanError, in a step: the function returns no tensor of one number, or the targets are no tensor.

    >>> loss = MeanLoss(lambda output, targets: nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten()))
    >>> loss_sum, count = loss(torch.zeros(2, 3, 4), torch.tensor([[0, 1, -100], [2, 3, 0]]))
    >>> round(loss_sum.item(), 3), count.item()
    (6.931, 5)
    """

    def __init__(self, function: Callable[[Any, Any], Tensor], ignore_index: int | None = IGNORED) -> None:
        super().__init__()
        self.function, self.ignore_index = function, ignore_index

    def forward(self, output: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """Returns the function's mean times the number of targets, and that number."""
        return sum_of_mean(self.function(output, targets), targets, self.ignore_index)


_DTYPE = "_dtype_of_mean"
"""The attribute of a loss sum that holds the dtype of the mean loss from which the float64 sum was made."""


def sum_of_mean(mean: Any, targets: Any, ignore_index: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns a mean loss as a sum and a count of targets; a mean over no targets, which is NaN, as a sum of 0.

    The sum is in float64, so that dividing it by the count gives ``mean``, and its gradient, to the last bit.

    Raises: PlanError: ``mean`` is no tensor of one number, or ``targets`` is no tensor.
    """
    if not isinstance(mean, Tensor) or mean.dim():
        raise PlanError(
            "a loss that is a mean is one number",
            given=f"Tensor {list(mean.shape)}" if isinstance(mean, Tensor) else type(mean).__name__,
            allowed="a tensor without dims",
            fix='leave out reduction="none", or return the pair (sum, count) and leave out MeanLoss',
        )
    if not isinstance(targets, Tensor):
        raise PlanError(
            "the targets of a mean are counted, so they are one tensor",
            given=type(targets).__name__,
            allowed="a tensor",
            fix="in place of MeanLoss or ModelLoss give a function that returns the pair (sum, count), with the number "
            "n by which the model divides: lambda output, labels: (output.loss * n(labels), n(labels))",
        )
    if targets.is_floating_point() or ignore_index is None:
        count = torch.full((), targets.numel(), device=mean.device)
    else:
        count = torch.ne(targets, ignore_index).sum()
    wide = mean.double()
    total = torch.where(count > 0, wide * count, torch.zeros_like(wide))
    setattr(total, _DTYPE, mean.dtype)
    return total, count


def loss_dtype(total: Tensor) -> torch.dtype:
    """Returns the dtype in which a loss was computed, whose sum is ``total``: the mean's, if the loss was a mean.

    >>> loss_dtype(sum_of_mean(torch.tensor(1.0), torch.zeros(2))[0]), loss_dtype(torch.tensor(1.0).double())
    (torch.float32, torch.float64)
    """
    dtype: torch.dtype = getattr(total, _DTYPE, total.dtype)
    return dtype


def loss_in(output: Any) -> Tensor | None:
    """Returns the loss that a model's output contains, or None if it contains none.

    It is the output's attribute or entry "loss", the first number of a tuple, or the output itself if that is a number.

    >>> loss_in({"loss": torch.tensor(2.0), "logits": torch.ones(3)}), loss_in(torch.ones(3))
    (tensor(2.), None)
    """
    if isinstance(output, Tensor) and not output.dim():
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple) and output and isinstance(output[0], Tensor) and not output[0].dim():
        loss = output[0]
    return loss if isinstance(loss, Tensor) else None


def _loss_of(output: Any) -> Tensor:
    loss = loss_in(output)
    # only for ModelLoss, by which the user says that the model returns its loss: elsewhere a number may be a mere term
    if loss is None and isinstance(output, tuple):
        numbers = [entry for entry in output if isinstance(entry, Tensor) and not entry.dim()]
        loss = numbers[0] if len(numbers) == 1 else None
    if loss is None:
        named = f" with {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
        raise PlanError(
            "the model's output has no loss",
            given=f"{type(output).__name__}{named}",
            allowed="an attribute or entry 'loss', a number alone, or a tuple in which it is first or the one number",
            fix="pass the labels among the inputs, or give a loss on the output: loss=sw.CrossEntropy()",
        )
    return loss
