"""Ignores moves between devices in a model's own code, because each rank has one device and keeps its tensors there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from shardwright.analysis.on_meta.operator_results import tensors_of
from shardwright.function_copies import with_names

MOVES: Mapping[str, Callable[..., Any]] = {"cpu": Tensor.cpu, "cuda": Tensor.cuda, "to": Tensor.to}
"""The tensor methods that move a tensor to a device, by name. A ``to`` that also changes the dtype keeps that part."""

_MOVES = frozenset(MOVES.values())

_PLAIN = frozenset((Tensor, nn.Parameter))

TAKES_GRADIENT = frozenset((torch.autograd.grad, torch.autograd.backward, Tensor.backward))
"""The functions by which a forward takes a gradient itself. They need the tensors that the forward used, not copies."""


def without_device(args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Returns the arguments of a ``Tensor.to`` call besides the device, as (positional, named), or None if none remain.

    Kept are a dtype, a memory format, a tensor that gives the dtype, and ``copy=True``, since code may write into the
    copy. ``non_blocking`` is dropped with the device.

    >>> without_device(("cuda:1",), {}), without_device((torch.float16,), {})
    (None, ((torch.float16,), {}))
    >>> without_device(("cuda:1", torch.float16), {"non_blocking": True})
    ((torch.float16,), {})
    >>> without_device(("cpu",), {"copy": True}), without_device(("cpu", torch.float16, False, True), {})
    (((), {'copy': True}), ((torch.float16,), {'copy': True}))
    """
    rest = tuple(arg for arg in args if isinstance(arg, Tensor | fx.Node | torch.dtype))
    kept = {name: value for name, value in named.items() if name in ("dtype", "other", "memory_format")}
    flags = [arg for arg in args if isinstance(arg, bool)]  # positional flags are (non_blocking, copy)
    if named.get("copy") or flags[1:] == [True]:
        kept["copy"] = True
    return (rest, kept) if rest or kept else None


def _names_device(args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Returns whether the arguments of a ``Tensor.to`` call name a device, or a tensor that gives the device."""
    return any(isinstance(arg, str | int | torch.device | Tensor) for arg in args[:1]) or bool(
        {"device", "other"} & named.keys()
    )


_OF_NUMBERS = frozenset((torch.tensor, torch.as_tensor, torch.asarray))

DEVICE = Tensor.device.__get__  # the function that a function mode sees when code reads ``tensor.device``


_WRITES = frozenset(
    ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__", "__ior__")
)
"""The names of operators that write into their first argument; so do functions whose name ends in one ``_``."""

_BEFORE = "_shardwright_before"
"""The name of the attribute that keeps, on a tensor that became a meta tensor, the storage that it had before."""

_MADE = "_shardwright_made"
"""The name of the attribute that marks a tensor as made by code in a forward that runs on the meta device."""


def mark_made(result: Any, args: tuple[Any, ...]) -> Any:
    """Marks a function's ``result`` as made in this forward, if it is a CPU tensor and none of ``args``; returns it."""
    if type(result) is Tensor and not result.is_meta and all(result is not arg for arg in args):
        setattr(result, _MADE, True)
    return result


def _writes(function: Callable[..., Any]) -> bool:
    """Returns whether a torch function writes into its first argument, by its name."""
    name = getattr(function, "__name__", "")
    return name in _WRITES or (name.endswith("_") and not name.startswith("__"))


def to_meta_if_written(function: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Turns a CPU tensor into a meta tensor, in place, if a torch function is about to write meta tensors into it.

    Code often makes ``torch.zeros(...)`` without a device and fills it with what layers compute. Without this function
    the values would be written into a copy of the tensor on the meta device, and a record would lack the write. A view
    is turned into a meta tensor together with its base. A tensor that :func:`mark_made` has not marked, such as a
    global tensor of the user's, stays as it is, and so does a tensor that has other views.

    >>> made, computed = mark_made(torch.zeros(2, 3), ()), torch.empty(3, device="meta")
    >>> to_meta_if_written(Tensor.__setitem__, (made, 0, computed), {})
    >>> made.is_meta
    True
    """
    target = args[0] if args and _writes(function) else None
    if type(target) is not Tensor or target.is_meta or target.requires_grad:
        return
    if not hasattr(target if target._base is None else target._base, _MADE):
        return
    if not any(tensor.is_meta for tensor in tensors_of((args[1:], named))):
        return
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        base = target if target._base is None else target._base
        meta_base = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
        if base is target:
            _swap(base, meta_base)
            return
        place = target.shape, target.stride(), target.storage_offset()
        view = torch.empty(0, dtype=base.dtype, device="meta")  # will share the storage without a reference to the base
        view.set_(meta_base.untyped_storage(), place[2] - base.storage_offset(), *place[:2])
        if _swap(target, view):
            del view  # after the swap it is the old view, which holds the base
            if not _swap(base, meta_base):
                torch.utils.swap_tensors(target, base.as_strided(*place))


def _swap(tensor: Tensor, made: Tensor) -> bool:
    """Turns ``tensor`` into ``made`` in place and returns True; returns False if views of ``tensor`` prevent that.

    The earlier storage is kept alive, since a record knows tensors by the addresses of their storages.
    """
    storage = tensor.untyped_storage()
    torch._C._autograd._unsafe_set_version_counter((made,), (tensor._version,))
    try:
        torch.utils.swap_tensors(tensor, made)
    except RuntimeError:
        return False
    tensor.__dict__[_BEFORE] = storage
    return True


def call_on_meta(function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], device: str) -> Any:
    """Calls a torch function and returns its result; a read of a meta tensor's ``device`` returns ``device`` instead.

    Torch function modes use it, so that code that branches on the kind of device takes the same branch as in a real
    run. A ``device`` among the arguments in ``named`` is replaced by the meta device. If code makes a tensor from plain
    numbers, the ``device`` is dropped instead, because the numbers would be lost on the meta device.
    """
    if function == DEVICE and args[0].is_meta:
        return torch.device(device)
    if function is Tensor.type and args[0].is_meta:
        # torch calls the type of a meta tensor "torch.meta.FloatTensor", but does not accept that name as an argument
        kind = args[1] if len(args) > 1 else named.get("dtype")
        if kind is None:
            return torch.empty(0, dtype=args[0].dtype, device="cpu").type()
        return args[0].to(kind if isinstance(kind, torch.dtype) else torch.empty(0, device="cpu").type(kind).dtype)
    if function in _OF_NUMBERS and not tensors_of((args, named)):
        named = {name: value for name, value in named.items() if name != "device"}
    if named.get("device") is not None:
        named = {**named, "device": torch.device("meta")}
    to_meta_if_written(function, args, named)
    return mark_made(function(*args, **named), args)


def _under_modes(function: Callable[..., Any], check: str) -> Callable[..., Any]:
    """Returns a copy of a torch function that does not hand its own call to function modes.

    Active function modes therefore stay active while the function runs, and see the calls that it makes. ``check`` is
    the global name by which the function's code asks whether a mode is active; without it the function is returned.
    """
    asks = check in function.__code__.co_names
    return with_names(function, **{check: lambda _: False}) if asks else function


_BACKWARDS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.autograd.backward: _under_modes(torch.autograd.backward, "has_torch_function"),
    Tensor.backward: _under_modes(Tensor.backward, "has_torch_function_unary"),
}
"""The functions that run a backward, each with a copy during which function modes stay active."""

_OF_PACKED = frozenset((
    torch._C._VariableFunctions._pack_padded_sequence, torch._C._VariableFunctions._pad_packed_sequence,
    torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu,
))  # fmt: skip
"""The functions of packed sequences. Their second argument has lengths, which are always on the CPU."""


def _is_count(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.int64


class OnMeta(TorchFunctionMode):
    """A context in which meta tensors report the CPU as their device, as if the code ran there.

    A tensor that is made with an explicit ``device`` argument is a meta tensor.

    >>> with OnMeta():
    ...     torch.empty(2, device="meta").device, torch.zeros(2, device="cpu").is_meta
    (device(type='cpu'), True)
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return call_on_meta(func, args, dict(kwargs or {}), "cpu")


def ignore_device_moves(graph: fx.Graph) -> None:
    """Removes from an fx graph all calls of ``cpu``, ``cuda`` and ``to`` that only move a tensor to another device.

    A call that also changes the dtype or memory format keeps that part; ``x.to(other)`` stays if ``other`` is
    a node, such as a tensor that may have another dtype. The graph is changed in place.
    """
    for node in list(graph.nodes):
        moved = node.args[0] if node.op == "call_method" and node.target in MOVES else None
        if not isinstance(moved, fx.Node):
            continue
        rest = without_device(tuple(node.args[1:]), node.kwargs) if node.target == "to" else None
        if rest is None:
            node.replace_all_uses_with(moved)
            graph.erase_node(node)
        else:
            node.args, node.kwargs = (moved, *rest[0]), rest[1]


class IgnoresDeviceMoves(TorchFunctionMode):
    """A torch mode in which every move to a device goes to ``device``, and operators on mixed devices run there.

    Every call of ``cpu``, ``cuda`` and ``to`` counts as a move, even a ``to`` that names a dtype alone. A tensor that
    code makes without naming a device stays on the CPU, with its values, until such a call, or until an operator
    combines it with a tensor on ``device``. ``instead`` maps torch functions to the functions that run in their place.

    >>> with IgnoresDeviceMoves(torch.device("cpu")):
    ...     torch.ones(1).to("meta").cuda().device
    device(type='cpu')
    >>> with IgnoresDeviceMoves(torch.device("meta")):
    ...     torch.arange(3).to(torch.int32).tolist(), (torch.empty(3, device="meta") + torch.zeros(3)).device
    ([0, 1, 2], device(type='meta'))
    """

    def __init__(
        self, device: torch.device, instead: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType({})
    ) -> None:
        super().__init__()
        self._device, self._instead = device, instead
        self._others = frozenset((*_BACKWARDS, *_MOVES, *instead))
        self._on_meta: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # the shortcut for most calls, reads of x.shape and the like included
        if not kwargs and len(args) == 1 and type(args[0]) in _PLAIN and func not in self._others:
            return func(*args)
        if func in _BACKWARDS:
            with self:  # a checkpoint may run code of the forward again in the backward
                return _BACKWARDS[func](*args, **(kwargs or {}))
        named = dict(kwargs or {})
        if func not in _MOVES:
            func = self._instead.get(func, func)
            tensors = tensors_of((args, named) if named else args)
            if self._are_mixed(tensors) and func not in TAKES_GRADIENT:
                if self._device.type == "meta" and _writes(func):
                    self._on_meta.pop(tensors[0], None)  # swap_tensors refuses tensors with weak references, as its key
                    to_meta_if_written(func, args, named)
                counts = args[1] if func in _OF_PACKED and len(args) > 1 and _is_count(args[1]) else None
                args, named = tree_map_only(Tensor, lambda x: x if x is counts else self._on_device(x), (args, named))
            return mark_made(func(*args, **named), args) if self._device.type == "meta" else func(*args, **named)
        if func is Tensor.to and not _names_device(args[1:], named):
            return func(*args, **named)
        rest = without_device(tuple(args[1:]), named) if func is Tensor.to else None
        moved = args[0].to(self._device)
        return moved if rest is None else moved.to(*rest[0], **rest[1])

    def _are_mixed(self, tensors: list[Tensor]) -> bool:
        """Returns whether the tensors are on several devices, and one of these is the device of this context."""
        if len(tensors) < 2:
            return False
        if self._device.type == "meta":  # in a rehearsal most calls come here, and is_meta is faster than .device
            on_meta = [tensor.is_meta for tensor in tensors]
            return not all(on_meta) and any(on_meta)
        devices = {tensor.device.type for tensor in tensors}
        return len(devices) > 1 and self._device.type in devices

    def _on_device(self, tensor: Tensor) -> Tensor:
        # one meta tensor per tensor, or the ledger would count a copy at each use
        if self._device.type != "meta" or tensor.is_meta or tensor.requires_grad:
            return tensor.to(self._device)
        if tensor not in self._on_meta:
            self._on_meta[tensor] = tensor.to(self._device)
        return self._on_meta[tensor]
