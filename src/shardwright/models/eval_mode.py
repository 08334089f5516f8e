"""``eval_mode``: a context in which a model is in eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Returns a context in which all modules are in eval mode; each module's own mode is restored after it.

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
