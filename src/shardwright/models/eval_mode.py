"""A context manager that puts a model into eval mode, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts all modules into eval mode inside of the context, and restores each module's own mode after it.

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
