"""A plain module whose parameters and buffers become global tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shardwright.comm.current_world import here
from shardwright.errors import LayoutError, PlanError, nearest
from shardwright.global_tensor import sbp as words
from shardwright.global_tensor.agreement import check_everywhere
from shardwright.global_tensor.geometry import GlobalLayout, local_shape
from shardwright.global_tensor.placement import Placement, check_placement
from shardwright.global_tensor.sbp import Sbp, broadcast
from shardwright.global_tensor.tensor import GlobalTensor, to_global, wrap

Module = TypeVar("Module", bound=nn.Module)


def module_to_global(
    module: Module, placement: Placement, sbp: Mapping[str, Sbp | Sequence[Sbp]] | None = None
) -> Module:
    """The module itself, its parameters and buffers global on ``placement``; the first rank's values count.

    ``sbp`` maps patterns of names (``"*.weight"``) to how they lie; the first that matches counts, and what none
    matches is broadcast. Tied parameters stay tied. Every rank of the world calls it, with the same module.

    Traffic: what lies elsewhere than on the placement's first rank.
    Raises: LayoutError: a pattern that matches nothing; an sbp that does not fit. PlanError: no values yet.

    >>> from shardwright.global_tensor import sbp
    >>> from shardwright.global_tensor.placement import placement
    >>> layer = module_to_global(nn.Linear(4, 2), placement("cpu", ranks=[0]), {"weight": sbp.split(0)})
    >>> layer.weight.sbp, layer.bias.sbp
    ((Shard(dim=0),), (Replicate(),))
    """
    _check_kinds(module, sbp)
    check_placement(placement)
    _check_layers(module)
    found = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    kinds = ((name, *_kind(x)) for name, x in found)
    check_everywhere("the module, the placement or the sbp", [placement, sbp, *kinds])
    places = {name: _where(name, tensor, placement, sbp or {}) for name, tensor in found}
    _check_patterns(list(sbp or {}), list(places))
    known: dict[int, Tensor] = {}
    for name, tensor in found:
        if id(tensor) not in known:
            moved = _from_first(tensor.detach(), places[name])
            is_parameter = isinstance(tensor, nn.Parameter)
            known[id(tensor)] = nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        table: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
        table[leaf] = known[id(tensor)]
    return module


def _where(name: str, tensor: Tensor, placement: Placement, sbp: Mapping[str, Sbp | Sequence[Sbp]]) -> GlobalLayout:
    if is_lazy(tensor) or tensor.is_meta:
        raise PlanError(
            f"'{name}' has no values",
            given="a module on the meta device, or one that has not run yet",
            allowed="a module with values, on the first rank at least",
            fix="call module.to_empty(device='cpu') and initialise it, or run it once, first",
        )
    given = next((lies for pattern, lies in sbp.items() if fnmatchcase(name, pattern)), (broadcast,) * placement.ndim)
    return GlobalLayout(placement, words.checked(given, placement, tensor.ndim))


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
                f"'{name}' keeps its weights in a list of its own and starts from plain zeros",
                given=f"nn.{type(layer).__name__}",
                allowed="modules that compute with their parameters as they are",
                fix=f"write it with nn.{layer.mode.split('_')[0]}Cell and a first state that is global",
            )


def _check_patterns(patterns: list[str], names: list[str]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise LayoutError(
                f"the pattern '{pattern}' matches no parameter or buffer",
                given=pattern,
                allowed=", ".join(names),
                fix=f"write '{nearest(pattern, names)}'" if names else "leave it out",
            )


def _from_first(tensor: Tensor, where: GlobalLayout) -> GlobalTensor:
    """The first rank's tensor, lying so; one that is global already is moved."""
    if isinstance(tensor, DTensor):
        return to_global(tensor, where.placement, where.sbp)
    first = where.placement.ranks[0]
    alone = GlobalLayout(Placement(where.placement.type, (first,), (1,)), (broadcast,))
    local = tensor.clone()
    if here().rank != first:
        local = torch.empty(local_shape(tuple(tensor.shape), alone, here().rank), dtype=tensor.dtype)
    return wrap(local, tuple(tensor.shape), alone).to_global(where.placement, where.sbp)
