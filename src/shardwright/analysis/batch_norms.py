"""BatchNorm layers in a model: which there are, and how to run a model without their statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from shardwright.analysis.structure import BATCH_NORMS, kind_of


def batch_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every BatchNorm that can be synchronised, by name.

    >>> [path for path, _ in batch_norms(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))]
    ['1']
    """
    for path, module in model.named_modules():
        if kind_of(module) in BATCH_NORMS:
            yield path, module


def uses_batch(module: nn.Module) -> bool:
    """Whether a BatchNorm computes statistics of the batch, and not with those that it has kept.

    >>> uses_batch(nn.BatchNorm1d(2)), uses_batch(nn.BatchNorm1d(2).eval())
    (True, False)
    """
    return module.training or module._buffers.get("running_mean") is None


def ignore_batch_statistics(model: nn.Module) -> None:
    """Lets a model that is only looked at, on the meta device, take shares of a batch that are too small for BatchNorm.

    >>> model = nn.BatchNorm1d(2, device="meta")
    >>> ignore_batch_statistics(model)
    >>> model(torch.ones(1, 2, device="meta")).shape
    torch.Size([1, 2])
    """
    for _, module in batch_norms(model):
        module.forward = partial(_normalized_by_zeros, module)


@contextmanager
def ignoring_batch_statistics(model: nn.Module) -> Iterator[None]:
    """While it lasts, the model is as :func:`ignore_batch_statistics` leaves it.

    >>> model = nn.BatchNorm1d(2, device="meta")
    >>> with ignoring_batch_statistics(model):
    ...     model(torch.ones(1, 2, device="meta")).shape
    torch.Size([1, 2])
    >>> "forward" in vars(model)
    False
    """
    before = [(vars(norm), vars(norm).get("forward")) for _, norm in batch_norms(model)]
    ignore_batch_statistics(model)
    try:
        yield
    finally:
        for own, forward in before:
            del own["forward"]
            own.update({} if forward is None else {"forward": forward})


def _normalized_by_zeros(module: Any, input: Tensor) -> Tensor:
    zeros_C = input.new_zeros(input.shape[1])
    return functional.batch_norm(input, zeros_C, zeros_C, module.weight, module.bias)
