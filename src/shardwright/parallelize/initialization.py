"""Draws a model's initial values one leaf module at a time, and keeps only this rank's shard of each.

No rank ever holds the whole model. The random numbers depend on the seed and the module's name only, so every layout
starts from the values of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from shardwright.analysis.objects.reached import tensors_outside
from shardwright.analysis.traced.structure import owners
from shardwright.errors import PlanError
from shardwright.initial_values import recorded_values
from shardwright.initial_values.recorded_writes import RecordedValues, numbers_from
from shardwright.initial_values.write_recorder import WriteRecorder
from shardwright.mesh import Coord
from shardwright.sharding.box import cut
from shardwright.sharding.tensor_layout import TensorLayout


def place_parameters(
    model: nn.Module, layouts: Mapping[str, TensorLayout], coord: Coord, seed: int, device: torch.device
) -> None:
    """Replaces every parameter and buffer of ``model``, in place, by the shard that the rank at ``coord`` holds.

    The shards are on ``device``. Tied parameters stay tied. If only other pipeline stages have a module, its parameters
    become None. A module on the meta device is drawn whole from ``seed``, by the model's ``_init_weights(module)`` if
    it has one (the convention of the transformers library) or else by the module's ``reset_parameters``, then sharded.
    A tensor that its constructor filled in another way, under ``without_values``, is filled in that way. A tensor with
    values is copied and sharded. Tensors without an entry in ``layouts`` stay whole. If ``device`` is the meta device,
    nothing is drawn.

    Raises: PlanError: a module on the meta device does not define the initial values of a parameter or buffer.
    """
    names = {(id(module), own): name for _, module, own, name in owners(model)}
    originals = dict(model.named_parameters())
    placed: dict[str, nn.Parameter] = {}
    records = {} if device.type == "meta" else _records(model, seed)
    # id of an old buffer -> (old buffer, new buffer); keeping the old one stops its id from being reused
    tied: dict[int, tuple[Tensor, Tensor]] = {}
    for path, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if parameters and all(_is_elsewhere(layouts.get(names[id(module), key]), coord) for key in parameters):
            for key in parameters:
                module._parameters[key] = None  # these belong to another pipeline stage: draw and allocate nothing
            continue
        requires_grad = {key: parameter.requires_grad for key, parameter in parameters.items()}
        _tie(module, tied)
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.layout != torch.strided and device.type != "meta":
                vars(module)[key] = value.to(device)
        buffers = dict(module.named_buffers(recurse=False))
        if device.type != "meta" and any(tensor.is_meta for tensor in (*parameters.values(), *buffers.values())):
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
    for path, module in model.named_modules():
        _tie(module, tied)  # modules of other stages too: a tied buffer is one tensor under one name
        for key, before in module.named_buffers(recurse=False):
            layout = layouts.get(f"{path}.{key}".lstrip("."))
            if id(before) not in tied and layout is not None and layout.pieces(coord):
                # the module is on another stage, but functions on this stage may read its buffer
                module._buffers[key] = now = _local_part(before, layout, coord)
                tied[id(before)], tied[id(now)] = (before, now), (now, now)
    ids_outside = tensors_outside(model)
    for old, new in (*((originals[name], now) for name, now in placed.items()), *tied.values()):
        if id(old) in ids_outside and old is not new:
            _put_into(model, old, new)


def _notes_assignments(module: nn.Module) -> bool:
    """Returns whether a module's class has its own ``__setattr__``, as ``nn.LSTM`` has, to note parameters."""
    return any("__setattr__" in vars(kind) for kind in type(module).__mro__ if kind not in (nn.Module, object))


def _put_into(model: nn.Module, old: Tensor, new: Tensor) -> None:
    """Makes ``old``, which code holds by a closure or a list, the model's own tensor, with the values of ``new``."""
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
    """Returns the function that draws a module's own parameters, such as ``reset_parameters``; None without one."""
    if isinstance(module, nn.MultiheadAttention):
        return module._reset_parameters
    reset: Callable[[], Any] | None = getattr(module, "reset_parameters", None)
    if not isinstance(module, NonDynamicallyQuantizableLinear) or module.bias is None:
        return reset if callable(reset) else None

    def reset_without_bias() -> None:
        module.reset_parameters()
        nn.init.zeros_(module.bias)  # the attention that owns this layer does the same

    return reset_without_bias


def _on_host(tensor: Tensor) -> Tensor:
    """Returns an uninitialized tensor on the host in place of one on the meta device; others are returned unchanged.

    ``torch.empty_like`` is not used: from the meta device to the host it would make torch import sympy.
    """
    if not tensor.is_meta:
        return tensor
    if any(step == 0 and size > 1 for size, step in zip(tensor.size(), tensor.stride(), strict=True)):
        # the elements of an expanded tensor share memory, so that they could not be written one by one
        return torch.empty(tensor.size(), dtype=tensor.dtype, device="cpu")
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")


def _draw(model: nn.Module, path: str, module: nn.Module, seed: int, records: Mapping[int, RecordedValues]) -> None:
    """Allocates and draws one leaf module on the host, so that every kind of device starts from the same numbers.

    A tensor that a constructor filled in another way than the module's own functions do is filled as the constructor
    did. A tensor that has values, as ``torch.Tensor(8, 8)`` and ``torch.from_numpy`` make them anywhere, keeps them.
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
    with numbers_from(f"{seed}/{path}"), torch.no_grad(), _values_kept(module):
        module._apply(_on_host, recurse=False)
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


@contextmanager
def _values_kept(module: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Returns a context in which a module and its children have copies in place of their tensors with values.

    A function that fills the module then does not change these tensors. The context yields pairs (tensor, copy).
    """
    copies: dict[int, tuple[Tensor, Tensor]] = {}
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for submodule in module.modules():
        tensors: dict[str, Any]
        for tensors in (submodule._parameters, submodule._buffers):
            for key, tensor in tensors.items():
                if tensor is None or tensor.is_meta or is_lazy(tensor):
                    continue
                if id(tensor) not in copies:
                    copy = tensor.detach().clone()
                    if isinstance(tensor, nn.Parameter):
                        copy = nn.Parameter(copy, requires_grad=tensor.requires_grad)
                    copies[id(tensor)] = tensor, copy
                places.append((tensors, key, tensor))
    for tensors, key, tensor in places:
        tensors[key] = copies[id(tensor)][1]
    try:
        yield list(copies.values())
    finally:
        for tensors, key, tensor in places:
            tensors[key] = tensor


def _draw_function(model: nn.Module, module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """Returns the function that draws a module: the model's ``_init_weights``, or the module's own; None without."""
    draw: Callable[[nn.Module], Any] | None = getattr(model, "_init_weights", None)
    if draw is not None or (reset := _reset_function(module)) is None:
        return draw
    return lambda _: reset()


def _filled_otherwise(
    model: nn.Module, module: nn.Module, records: Mapping[str, RecordedValues]
) -> dict[str, RecordedValues]:
    """Returns the records of the tensors of a module that constructors filled in another way than its own functions do.

    To find them, the functions draw on the meta device, and their writes are compared with those of the constructors.
    A tensor with equal writes is left out: it is drawn by the name of the module, so that its numbers do not depend on
    the rest of the model. In a model with ``_init_weights`` and without ``initialize_weights``, a tensor that is still
    as its module fills itself is left out too: its constructor has left it to ``_init_weights``, as the transformers
    library does on the meta device.
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
    """Returns, as text, the writes by which ``draw`` would fill each of a module's tensors."""
    before = dict(module._parameters), dict(module._buffers)
    with numbers_from(""), torch.no_grad(), _values_kept(module):
        with torch.device("meta"), WriteRecorder() as recorder:
            draw()
        now = module._parameters | module._buffers
        texts = {key: recorder.of(tensor).text() for key in keys if (tensor := now[key]) is not None}
    module._parameters.update(before[0])
    module._buffers.update(before[1])
    return texts


def _check_wrapped(
    model: nn.Module, records: Mapping[int, RecordedValues], again: Mapping[int, RecordedValues]
) -> None:
    """Raises PlanError if a wrapper of a transformers model, such as peft's, has added tensors and filled them itself.

    Such tensors are LoRA's, for example. The inner model's ``initialize_weights`` would fill them ``again``, though on
    a real device it ran before the wrapper added them.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        record = records.get(id(tensor))
        if id(tensor) in again and record is not None and record.text() not in (None, again[id(tensor)].text()):
            raise PlanError(
                f"the first values of '{name}' cannot be told without values",
                given=f"{type(model).__name__} around a model that fills its weights by initialize_weights()",
                allowed="wrappers, such as peft's, of a model that is built with values",
                fix="build the model outside of sw.without_values()",
            )


def _adapter_tensors(model: nn.Module) -> set[int]:
    """Returns the ids of the tensors that adapters, as those of peft, have added to a model's layers.

    A layer with adapters names the parts that they have added in ``adapter_layer_names``.
    """
    ids = set[int]()
    for module in model.modules():
        for part in (getattr(module, name, None) for name in getattr(module, "adapter_layer_names", ())):
            tensors = [*part.parameters(), *part.buffers()] if isinstance(part, nn.Module) else [part]
            ids |= {id(tensor) for tensor in tensors if isinstance(tensor, Tensor)}
    return ids


def _check_adapters(model: nn.Module, adapters: Collection[int], records: Mapping[int, RecordedValues]) -> None:
    """Raises PlanError for adapters whose first values are copied or computed from other tensors.

    These other tensors belong to the inner model, which is filled only after its constructor, by
    ``initialize_weights``.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if id(tensor) not in adapters or not tensor.is_meta:
            continue
        record = records.get(id(tensor))
        if record is None or record.text() is None or record.storages() != {record.view.storage}:
            raise PlanError(
                f"the first values of '{name}' cannot be told without values",
                given=f"an adapter of {type(model).__name__} that copies weights, or computes with them",
                allowed="adapters whose first values are drawn or constant, such as LoRA's",
                fix="build the model outside of sw.without_values()",
            )


def _records(model: nn.Module, seed: int) -> dict[int, RecordedValues]:
    """Returns records of how the constructors filled the model's tensors on the meta device, by the tensors' ids.

    If the model has ``initialize_weights()`` (again the transformers library), it is called, since on the meta device
    the constructor has not called it. Tensors with values that it fills are drawn from ``seed``.
    """
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_meta]
    records = {id(tensor): record for tensor in tensors if (record := recorded_values(tensor)) is not None}
    initialize = getattr(model, "initialize_weights", None)
    if tensors and callable(initialize):
        with numbers_from(f"{seed}/initialize_weights"), torch.no_grad(), _values_kept(model) as pairs:
            versions = [copy._version for _, copy in pairs]
            with torch.device("meta"), WriteRecorder() as recorder:
                initialize()
            for (tensor, copy), version in zip(pairs, versions, strict=True):
                if copy._version != version:
                    tensor.data = copy  # writing in place would change the user's own model, which shares the memory
        again = {id(tensor): recorder.of(tensor) for tensor in tensors}
        again = {key: record for key, record in again.items() if record.text() is not None}
        if adapters := _adapter_tensors(model):  # on a real device a wrapper adds them to a model that has its values
            _check_adapters(model, adapters, records)
            again = {key: record for key, record in again.items() if key not in adapters}
        elif not hasattr(type(model), "initialize_weights"):
            _check_wrapped(model, records, again)
        records |= again
    return records
