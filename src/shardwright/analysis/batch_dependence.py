"""Layers that look at a batch as a whole, or keep something of each that they see: where a batch is cut, it shows."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm


def iterates(module: nn.Module) -> bool:
    """Whether every call in training moves the module nearer to its spectral norm.

    >>> layer = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
    >>> [path for path, module in layer.named_modules() if iterates(module)]
    ['parametrizations.weight.0']
    """
    return isinstance(module, _SpectralNorm) or any(
        isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()
    )


def sees_batch(module: nn.Module) -> bool:
    """Whether a module normalises by the samples of a batch together, or keeps a mean over them.

    >>> sees_batch(nn.BatchNorm1d(2)), sees_batch(nn.InstanceNorm1d(2))
    (True, False)
    """
    return isinstance(module, _BatchNorm) or (isinstance(module, _InstanceNorm) and module.track_running_stats)


def keeps_state_between_calls(module: nn.Module) -> bool:
    """Whether a call in training changes what the module keeps: how often it is called, and in which order, shows.

    >>> keeping, forgetting = nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False)
    >>> keeps_state_between_calls(keeping), keeps_state_between_calls(forgetting)
    (True, False)
    """
    return iterates(module) or (sees_batch(module) and bool(module.track_running_stats))
