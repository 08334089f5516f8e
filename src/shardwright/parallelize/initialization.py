"""Initial values, drawn one leaf module at a time and sharded at once, so that no rank ever holds the whole model.

The numbers depend on the seed and the module's name only: every layout, and one device, start from the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from shardwright.analysis.reached import tensors_outside
from shardwright.analysis.structure import owners
from shardwright.errors import PlanError
from shardwright.initial_values import GENERATOR_LOCK, RecordedValues, WriteRecorder, recorded_values
from shardwright.mesh import Coord
from shardwright.sharding.box import cut
from shardwright.sharding.tensor_layout import TensorLayout


def place_parameters(
    model: nn.Module, layouts: Mapping[str, TensorLayout], coord: Coord, seed: int, device: torch.device
) -> None:
    """Replaces every parameter and buffer of ``model`` by this rank's part, in place; tied ones stay tied.

    A module on the meta device is drawn whole, by the model's ``_init_weights(module)`` if it has one (the convention
    of the transformers library) or else by the module's ``reset_parameters``, then sharded. Tensors that a constructor
    under ``without_values`` filled otherwise are filled as it did. A module with values is
    sharded as it is. Names without an entry in ``layouts`` keep their whole tensors.

    Raises: PlanError: a module on the meta device does not define its initial values.
    """
    names = {(id(module), own): name for _, module, own, name in owners(model)}
    given = dict(model.named_parameters())
    placed: dict[str, nn.Parameter] = {}
    records = {} if device.type == "meta" else _records(model)
    tied: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the old buffer: it, so that the id stays taken, and the new
    for path, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if own and all(_is_elsewhere(layouts.get(names[id(module), key]), coord) for key in own):
            for key in own:
                module._parameters[key] = None  # these belong to another pipeline stage: draw and allocate nothing
            continue
        requires_grad = {key: parameter.requires_grad for key, parameter in own.items()}
        _tie(module, tied)
        buffers = dict(module.named_buffers(recurse=False))
        if device.type != "meta" and any(tensor.is_meta for tensor in (*own.values(), *buffers.values())):
            _draw(model, path, module, seed, records)
        for key, before in buffers.items():
            if id(before) not in tied:
                value = module._buffers[key].to(device, copy=True)
                now = _local_part(value, layouts.get(f"{path}.{key}".lstrip(".")), coord)
                tied[id(before)], tied[id(now)] = (before, now), (now, now)
            module._buffers[key] = tied[id(before)][1]
        for key, value in list(module._parameters.items()):
            if value is None:
                continue
            name = names[id(module), key]
            if name not in placed:
                part = _local_part(value.detach(), layouts.get(name), coord)
                placed[name] = nn.Parameter(part.to(device), requires_grad=requires_grad[key])
            module._parameters[key] = placed[name]
            if _notes_assignments(module):
                setattr(module, key, placed[name])  # nn.LSTM keeps its weights in a list as well
    for module in model.modules():
        _tie(module, tied)  # modules of other stages too: a tied buffer is one tensor under one name
    held = tensors_outside(model)
    for old, new in (*((given[name], now) for name, now in placed.items()), *tied.values()):
        if id(old) in held and old is not new:
            _put_into(model, old, new)


def _notes_assignments(module: nn.Module) -> bool:
    """Whether a module's class does more than torch's when a parameter is assigned."""
    return any("__setattr__" in vars(kind) for kind in type(module).__mro__ if kind not in (nn.Module, object))


def _put_into(model: nn.Module, old: Tensor, new: Tensor) -> None:
    """Makes ``old``, which code holds by a closure or a list, the model's own tensor, with the contents of ``new``."""
    torch.utils.swap_tensors(old, new)
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            own = [key for key, tensor in tensors.items() if tensor is new]
            tensors.update(dict.fromkeys(own, old))  # type: ignore[arg-type]


def _tie(module: nn.Module, tied: Mapping[int, tuple[Tensor, Tensor]]) -> None:
    """Replaces the buffers that the module shares with earlier modules by their new tensors."""
    for key, buffer in module._buffers.items():
        if buffer is not None and id(buffer) in tied:
            module._buffers[key] = tied[id(buffer)][1]


def _is_elsewhere(layout: TensorLayout | None, coord: Coord) -> bool:
    return layout is not None and not layout.pieces(coord) and bool(layout.table)


def _local_part(tensor: Tensor, layout: TensorLayout | None, coord: Coord) -> Tensor:
    return tensor if layout is None else cut(tensor, layout.pieces(coord), layout.local_shape(coord))


def _reset_function(module: nn.Module) -> Callable[[], Any] | None:
    """Returns what draws a module's own parameters; torch's attention has other functions for it than other layers."""
    if isinstance(module, nn.MultiheadAttention):
        return module._reset_parameters
    reset: Callable[[], Any] | None = getattr(module, "reset_parameters", None)
    if not isinstance(module, NonDynamicallyQuantizableLinear) or module.bias is None:
        return reset if callable(reset) else None

    def reset_without_bias() -> None:
        module.reset_parameters()
        nn.init.zeros_(module.bias)  # as the attention to which this layer belongs does

    return reset_without_bias


def _draw(model: nn.Module, path: str, module: nn.Module, seed: int, records: Mapping[int, RecordedValues]) -> None:
    """Allocates and draws one leaf module on the host, so that every kind of device starts from the same numbers.

    What its constructor, or that of the whole model, filled otherwise than the module's own functions do, is filled so.
    """
    on_meta = {key: buffer for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
    tensors = on_meta | {key: p for key, p in module._parameters.items() if p is not None and p.is_meta}
    draw = _draw_function(model, module)
    known = {key: records[id(tensor)] for key, tensor in tensors.items() if id(tensor) in records}
    others = _filled_otherwise(model, module, known)
    if draw is None and (missing := [key for key in tensors if key in module._parameters and key not in others]):
        raise PlanError(
            f"'{path or 'the model'}' does not define its initial parameters",
            given=f"{type(module).__name__} on the meta device, with '{missing[0]}'",
            allowed="modules with reset_parameters(), a model with _init_weights(module), or one built under "
            "sw.without_values(), whose constructor fills them",
            fix=f"give {type(module).__name__} a reset_parameters(), or build the model on a real device",
        )
    module.to_empty(device="cpu", recurse=False)
    key = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=8).digest()
    with GENERATOR_LOCK, torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(int.from_bytes(key, "little") >> 1)
        before = {key: buffer._version for key, buffer in module._buffers.items() if buffer is not None}
        if draw is not None:
            draw(module)
    with torch.no_grad():
        for own, record in others.items():
            getattr(module, own).copy_(record.values(seed))
    # a write raises the version: a buffer with the old one still has the random bytes of its allocation
    unwritten = [k for k, b in module.named_buffers(recurse=False) if k in on_meta and b._version == before[k]]
    if unwritten:
        raise PlanError(
            f"the buffer '{f'{path}.{unwritten[0]}'.lstrip('.')}' has no values",
            given=f"{type(module).__name__} on the meta device, where its values were not kept",
            allowed="buffers that reset_parameters() writes, or that forward computes",
            fix="compute it in forward, write it in reset_parameters(), or build the model on a real device",
        )


def _draw_function(model: nn.Module, module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """Returns what draws a module: the model's ``_init_weights``, or the module's own; None if there is neither."""
    draw: Callable[[nn.Module], Any] | None = getattr(model, "_init_weights", None)
    if draw is not None or (reset := _reset_function(module)) is None:
        return draw
    return lambda _: reset()


def _filled_otherwise(
    model: nn.Module, module: nn.Module, records: Mapping[str, RecordedValues]
) -> dict[str, RecordedValues]:
    """Returns the records of those of a module's tensors whose constructors filled them otherwise than it is drawn.

    Found out by drawing on the meta device. What is drawn alike is drawn by the name of the module, so that its numbers
    do not depend on the rest of the model. A constructor that has left a module as it fills itself has left it to
    ``_init_weights``, as the transformers library does on the meta device.
    """
    texts = {key: text for key, record in records.items() if (text := record.text()) is not None}
    if not texts:
        return {}
    draw, reset = _draw_function(model, module), _reset_function(module)
    by_draw = {} if draw is None else _texts_of(module, texts, lambda: draw(module))
    left_alone = hasattr(model, "_init_weights") and not hasattr(model, "initialize_weights")
    by_itself = _texts_of(module, texts, reset) if left_alone and reset is not None else by_draw
    alike = {key for key, text in texts.items() if text == by_draw.get(key)}
    alike |= {key for key, text in texts.items() if text == by_itself.get(key) and by_draw.get(key) is not None}
    return {key: record for key, record in records.items() if key in texts and key not in alike}


def _texts_of(module: nn.Module, keys: Iterable[str], draw: Callable[[], Any]) -> dict[str, list[str] | None]:
    """Returns, as text, what ``draw`` would fill the module's tensors with."""
    before = dict(module._parameters), dict(module._buffers)
    with torch.device("meta"), torch.no_grad(), WriteRecorder() as recorder:
        draw()
    now = module._parameters | module._buffers
    texts = {key: recorder.of(tensor).text() for key in keys if (tensor := now[key]) is not None}
    module._parameters.update(before[0])
    module._buffers.update(before[1])
    return texts


def _records(model: nn.Module) -> dict[int, RecordedValues]:
    """Returns how the constructors filled the model's tensors on the meta device, by their ids.

    A model that does so by ``initialize_weights()`` (again the transformers library) is asked to, since there its
    constructor does not.
    """
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_meta]
    found = {id(tensor): record for tensor in tensors if (record := recorded_values(tensor)) is not None}
    initialize = getattr(model, "initialize_weights", None)
    if tensors and callable(initialize):
        with torch.device("meta"), torch.no_grad(), WriteRecorder() as recorder:
            initialize()
        again = {id(tensor): recorder.of(tensor) for tensor in tensors}
        found |= {key: record for key, record in again.items() if record.text() is not None}
    return found
