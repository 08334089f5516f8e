"""``module_to_global``: turns the parameters and buffers of a plain module into global tensors."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shardwright.comm.current_world import current_world
from shardwright.errors import LayoutError, PlanError, fix_for
from shardwright.global_tensor.creation import device_of
from shardwright.global_tensor.geometry import GlobalLayout, local_shape
from shardwright.global_tensor.placement import Placement, check_placement
from shardwright.global_tensor.same_arguments import check_everywhere
from shardwright.global_tensor.sbp import Sbps, broadcast, checked_sbp
from shardwright.global_tensor.tensor import GlobalTensor, to_global, wrap

Module = TypeVar("Module", bound=nn.Module)


def module_to_global(module: Module, placement: Placement, sbp: Mapping[str, Sbps] | None = None) -> Module:
    """Makes a module's parameters and buffers global tensors on ``placement``, in place, and returns the module.

    The values are those of the placement's first rank; tensors that are global already are redistributed.
    ``sbp`` maps name patterns (``"*.weight"``) to an sbp; the first match counts, and names without a match are
    broadcast. Tied parameters stay tied. Every rank of the world calls it, with the same module.

    Traffic: one all-reduce of two numbers, and the elements that ranks other than the placement's first one need.
    Raises: LayoutError: a pattern that matches nothing, a placement or sbp that does not fit, an argument of another
        type, or arguments that differ between ranks. PlanError: parameters or buffers without values, or a layer that
        is an ``nn.RNNBase``.

    >>> from shardwright.global_tensor import placement, sbp
    >>> layer = module_to_global(nn.Linear(4, 2), placement("cpu", ranks=[0]), {"weight": sbp.split(0)})
    >>> layer.weight.sbp, layer.bias.sbp
    ((Shard(dim=0),), (Replicate(),))
    """
    _check_kinds(module, sbp)
    check_placement(placement)
    _check_layers(module)
    named_tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    kinds = ((name, *_kind(x)) for name, x in named_tensors)
    check_everywhere("the module, the placement or the sbp", [placement, sbp, *kinds])
    layouts = {name: _layout(name, tensor, placement, sbp or {}) for name, tensor in named_tensors}
    _check_patterns(list(sbp or {}), list(layouts))
    converted: dict[int, Tensor] = {}  # by the plain tensor's id: a tied parameter is converted once
    for name, tensor in named_tensors:
        if id(tensor) not in converted:
            x = _from_first_rank(tensor.detach(), layouts[name])
            is_parameter = isinstance(tensor, nn.Parameter)
            converted[id(tensor)] = nn.Parameter(x, tensor.requires_grad) if is_parameter else x
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        table: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
        table[leaf] = converted[id(tensor)]
    return module


def _layout(name: str, tensor: Tensor, placement: Placement, sbp: Mapping[str, Sbps]) -> GlobalLayout:
    if is_lazy(tensor) or tensor.is_meta:
        raise PlanError(
            f"'{name}' has no values",
            given="a module on the meta device, or one that has not run yet",
            allowed="a module with values, on the first rank at least",
            fix="call module.to_empty(device='cpu') and initialise it, or run it once, first",
        )
    name_sbp = next((one for pattern, one in sbp.items() if fnmatchcase(name, pattern)), (broadcast,) * placement.ndim)
    return GlobalLayout(placement, checked_sbp(name_sbp, placement, tensor.ndim))


def _check_kinds(module: object, sbp: object) -> None:
    if not isinstance(module, nn.Module) or not (sbp is None or isinstance(sbp, Mapping)):
        raise LayoutError(
            "a module and a mapping of patterns are needed",
            given=f"{type(module).__name__}, {type(sbp).__name__}",
            allowed="an nn.Module and a dict, or None",
            fix="write module_to_global(module, placement, {'*.weight': sbp.split(0)})",
        )


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return ("lazy",) if is_lazy(tensor) else (tuple(tensor.shape), tensor.dtype, tensor.is_meta)


def _check_layers(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        if isinstance(layer, nn.RNNBase):
            raise PlanError(
                f"'{name}' keeps its weights in a list of its own and creates a plain initial state",
                given=f"nn.{type(layer).__name__}",
                allowed="modules that compute with their parameters as they are",
                fix=f"write it with nn.{layer.mode.split('_')[0]}Cell and a global initial state",
            )


def _check_patterns(patterns: list[str], names: list[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise LayoutError(
                f"the pattern '{pattern}' matches no parameter or buffer",
                given=pattern,
                allowed=", ".join(names),
                fix=fix_for(pattern, names) if names else "leave it out",
            )


def _from_first_rank(tensor: Tensor, layout: GlobalLayout) -> GlobalTensor:
    """Returns the tensor of the placement's first rank in ``layout``; a global tensor is only redistributed."""
    if isinstance(tensor, DTensor):
        return to_global(tensor, layout.placement, layout.sbp)
    first = layout.placement.ranks[0]
    source = GlobalLayout(Placement(layout.placement.type, (first,), (1,)), (broadcast,))
    device = device_of(layout.placement)
    local = tensor.to(device, copy=True)
    if current_world().rank != first:
        local = torch.empty(
            local_shape(tuple(tensor.shape), source, current_world().rank), dtype=tensor.dtype, device=device
        )
    return wrap(local, tuple(tensor.shape), source).to_global(layout.placement, layout.sbp)
