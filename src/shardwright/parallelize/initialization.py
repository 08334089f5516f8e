"""Parameters, drawn one leaf module at a time and cut at once, so that no rank ever holds the whole model.

The numbers depend on the seed and on the module's name alone: every layout, and one device, start from the same.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from shardwright.analysis.structure import owners
from shardwright.errors import PlanError
from shardwright.mesh import Coord
from shardwright.sharding.box import cut
from shardwright.sharding.tensor_layout import TensorLayout

_DRAWING = threading.Lock()
"""torch's default generator belongs to the process, and ranks may be threads of one: they draw in turn."""


def place_parameters(
    model: nn.Module, lies: Mapping[str, TensorLayout], coord: Coord, seed: int, device: torch.device
) -> None:
    """Gives ``model`` this rank's part of every parameter and buffer, in place; ties stay tied.

    A module on the meta device is drawn whole, by the model's own ``_init_weights(module)`` where it has one (the
    convention of the transformers library) and otherwise by the module's ``reset_parameters``, then cut. A module
    with values is cut as it is.

    Raises: PlanError: a module on the meta device that says nowhere how it starts.

    >>> with torch.device("meta"):
    ...     model = nn.Linear(2, 3)
    >>> place_parameters(model, {}, {}, seed=0, device=torch.device("cpu"))
    >>> model.weight.device.type, model.weight.shape
    ('cpu', torch.Size([3, 2]))
    """
    names = {(id(module), own): name for _, module, own, name in owners(model)}
    placed: dict[str, nn.Parameter] = {}
    tied: dict[int, tuple[Tensor, Tensor]] = {}  # by its id, a buffer as it was, which keeps the id, and as it is now
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if own and all(_is_elsewhere(lies.get(names[id(module), key]), coord) for key in own):
            for key in own:
                module._parameters[key] = None  # another stage has it
            continue
        requires_grad = {key: parameter.requires_grad for key, parameter in own.items()}
        _tie(module, tied)
        buffers = dict(module.named_buffers(recurse=False))
        if device.type != "meta" and any(tensor.is_meta for tensor in (*own.values(), *buffers.values())):
            _draw(model, path, module, seed)
        for key, value in _values(module, device).items():
            if key in buffers:
                before = buffers[key]
                if id(before) not in tied:
                    at = lies.get(f"{path}.{key}".lstrip("."))
                    now = value if at is None else cut(value, at.pieces(coord), at.local_shape(coord))
                    tied[id(before)], tied[id(now)] = (before, now), (now, now)
                module._buffers[key] = tied[id(before)][1]
                continue
            name = names[id(module), key]
            if name not in placed:
                part = value.detach()
                if name in lies:
                    at = lies[name]
                    part = cut(part, at.pieces(coord), at.local_shape(coord))
                placed[name] = nn.Parameter(part.to(device), requires_grad=requires_grad[key])
            module._parameters[key] = placed[name]
    for module in model.modules():
        _tie(module, tied)  # those of other stages too: one buffer has one name


def _tie(module: nn.Module, tied: Mapping[int, tuple[Tensor, Tensor]]) -> None:
    """Gives a module the buffers that modules before it share with it, as they are now."""
    for key, buffer in module._buffers.items():
        if buffer is not None and id(buffer) in tied:
            module._buffers[key] = tied[id(buffer)][1]


def _is_elsewhere(lies: TensorLayout | None, coord: Coord) -> bool:
    return lies is not None and not lies.pieces(coord) and bool(lies.table)


def _values(module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    tensors: dict[str, Any] = {**module._parameters, **module._buffers}
    return {
        key: tensor if key in module._parameters else tensor.to(device, copy=True)
        for key, tensor in tensors.items()
        if tensor is not None
    }


def _first_values(module: nn.Module) -> Callable[[], Any] | None:
    """What gives a module's own parameters their first values; torch hides that of its attention."""
    if isinstance(module, nn.MultiheadAttention):
        return module._reset_parameters
    if isinstance(module, NonDynamicallyQuantizableLinear) and module.bias is not None:
        return partial(_start_without_bias, module)
    reset = getattr(module, "reset_parameters", None)
    return reset if callable(reset) else None


def _start_without_bias(layer: nn.Linear) -> None:
    layer.reset_parameters()
    nn.init.zeros_(layer.bias)  # as the attention that it belongs to does


def _draw(model: nn.Module, path: str, module: nn.Module, seed: int) -> None:
    """Makes one leaf module real, on the host, so that every device starts from the same numbers."""
    hollow = {key for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
    module.to_empty(device="cpu", recurse=False)
    draw = getattr(model, "_init_weights", None)
    if draw is None:
        if (reset := _first_values(module)) is None:
            raise PlanError(
                f"'{path or 'the model'}' does not say how its parameters start",
                given=f"{type(module).__name__} on the meta device",
                allowed="modules with reset_parameters(), or a model with _init_weights(module)",
                fix=f"give {type(module).__name__} a reset_parameters(), or build the model on a real device",
            )
        draw = lambda _: reset()  # noqa: E731
    key = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=8).digest()
    with _DRAWING, torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(key, "little") >> 1)
        before = {key: buffer._version for key, buffer in module._buffers.items() if buffer is not None}
        draw(module)
    unwritten = [k for k, b in module._buffers.items() if b is not None and k in hollow and b._version == before[k]]
    if unwritten:
        raise PlanError(
            f"the buffer '{f'{path}.{unwritten[0]}'.lstrip('.')}' has no values",
            given=f"{type(module).__name__} on the meta device, where its values were not kept",
            allowed="buffers that reset_parameters() writes, or that forward computes",
            fix="compute it in forward, write it in reset_parameters(), or build the model on a real device",
        )
