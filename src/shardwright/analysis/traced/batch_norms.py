"""Finds layers that depend on the whole batch, such as BatchNorm, and runs models without batch statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.overrides import TorchFunctionMode

from shardwright.analysis.traced.structure import BATCH_NORMS, kind_of

ONE_VALUE = "more than 1 value per channel"
"""A part of the text of torch's error for a BatchNorm in training whose input has one value per channel."""


def iterates(module: nn.Module) -> bool:
    """Returns whether a module applies spectral norm, which takes a power-iteration step in each training forward.

    >>> layer = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
    >>> [path for path, module in layer.named_modules() if iterates(module)]
    ['parametrizations.weight.0']
    """
    return isinstance(module, _SpectralNorm) or any(
        isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()
    )


def sees_batch(module: nn.Module) -> bool:
    """Returns whether a module is of a kind that, in training, computes statistics over the samples of a batch.

    Every BatchNorm does, and InstanceNorm with ``track_running_stats``. The module's current mode does not matter.

    >>> sees_batch(nn.BatchNorm1d(2)), sees_batch(nn.InstanceNorm1d(2))
    (True, False)
    """
    return isinstance(module, _BatchNorm) or (isinstance(module, _InstanceNorm) and module.track_running_stats)


def keeps_state_between_calls(module: nn.Module) -> bool:
    """Returns whether a training forward updates a module's buffers, so that the number and order of its calls matter.

    Known are spectral norm, and BatchNorm and InstanceNorm with running statistics; any other module gives False.

    >>> [keeps_state_between_calls(nn.BatchNorm1d(2, track_running_stats=tracks)) for tracks in (True, False)]
    [True, False]
    """
    return iterates(module) or (sees_batch(module) and bool(module.track_running_stats))


def batch_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the name and the module of every BatchNorm whose statistics can be synchronized over ranks.

    These are torch's own BatchNorm classes; a subclass is left out, because its forward may compute anything.

    >>> [path for path, _ in batch_norms(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))]
    ['1']
    """
    for path, module in model.named_modules():
        if kind_of(module) in BATCH_NORMS:
            yield path, module


def derived_batch_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the name and the module of every subclass of torch's BatchNorms, which may have a forward of its own.

    >>> class NormAndRelu(nn.BatchNorm1d):
    ...     def forward(self, input): return super().forward(input).relu()
    >>> [path for path, _ in derived_batch_norms(nn.Sequential(nn.BatchNorm1d(2), NormAndRelu(2)))]
    ['1']
    """
    for path, module in model.named_modules():
        if isinstance(module, _BatchNorm) and kind_of(module) not in BATCH_NORMS:
            yield path, module


def uses_batch(module: nn.Module) -> bool:
    """Returns whether a BatchNorm normalizes by the statistics of the current batch, not by its running statistics.

    >>> uses_batch(nn.BatchNorm1d(2)), uses_batch(nn.BatchNorm1d(2).eval())
    (True, False)
    """
    return module.training or module._buffers.get("running_mean") is None


def is_frozen(module: nn.Module) -> bool:
    """Returns whether a BatchNorm or InstanceNorm is in eval mode, where it normalizes by its running statistics.

    >>> is_frozen(nn.BatchNorm1d(2).eval()), is_frozen(nn.BatchNorm1d(2)), is_frozen(nn.Linear(2, 2).eval())
    (True, False, False)
    """
    return sees_batch(module) and not uses_batch(module)


def ignore_batch_statistics(model: nn.Module) -> None:
    """Replaces the forwards of a model's BatchNorms, so that a batch of one sample, or of none, raises no error.

    Use it for models on the meta device: the new forwards return results of the right shape, and neither compute nor
    update statistics. The model is changed in place. The BatchNorms are those that :func:`batch_norms` yields. The code
    of subclasses runs as it is, except for its calls of ``functional.batch_norm``.

    >>> import torch
    >>> model = nn.BatchNorm1d(2, device="meta")
    >>> ignore_batch_statistics(model)
    >>> model(torch.ones(1, 2, device="meta")).shape
    torch.Size([1, 2])
    """
    for _, module in batch_norms(model):
        module.forward = partial(_normalized_by_zeros, module)
    for _, module in derived_batch_norms(model):
        module.forward = partial(_without_statistics, module.forward)


@contextmanager
def ignoring_batch_statistics(model: nn.Module) -> Iterator[None]:
    """Returns a context in which a model's BatchNorms accept a batch of one sample, or of none, on the meta device.

    As with :func:`ignore_batch_statistics`, they neither compute nor update statistics. At its end their earlier
    forwards are restored.

    >>> import torch
    >>> model = nn.BatchNorm1d(2, device="meta")
    >>> with ignoring_batch_statistics(model):
    ...     model(torch.ones(1, 2, device="meta")).shape
    torch.Size([1, 2])
    >>> "forward" in vars(model)
    False
    """
    norms = (*batch_norms(model), *derived_batch_norms(model))
    before = [(vars(norm), vars(norm).get("forward")) for _, norm in norms]
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


def _without_statistics(forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    with _IgnoresBatch():
        return forward(*args, **named)


class _IgnoresBatch(TorchFunctionMode):
    """A torch function mode in which ``batch_norm`` accepts any batch, and returns a result of the right shape.

    ``batch_norm`` then normalizes as in evaluation, with zeros in place of running statistics, and updates none.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is functional.batch_norm:
            bound = signature(functional.batch_norm).bind(*args, **(kwargs or {})).arguments
            zeros_C = bound["input"].new_zeros(bound["input"].shape[1])
            return func(bound["input"], zeros_C, zeros_C, bound.get("weight"), bound.get("bias"))
        return func(*args, **(kwargs or {}))
