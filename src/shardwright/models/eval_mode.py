"""A model that evaluates for a while, and is as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """While it lasts, all layers evaluate; then each is as it was: one that a person has put into eval() stays so.

    >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    >>> with eval_mode(model):
    ...     print([layer.training for layer in model])
    [False, False]
    >>> [layer.training for layer in model]
    [True, False]
    """
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(before[0][1])  # a model's own train() may do more than set this
        for module, was_training in before:
            module.training = was_training
