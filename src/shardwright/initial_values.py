"""Records how a constructor fills a model's tensors on the meta device, and fills them the same way later, one by one.

A constructor may write a parameter several times, and by rules that look at the whole model: ``normal_`` with a smaller
deviation for the last layer of each block, a copy of another layer, a table made with ``torch.arange``. On the meta
device all that computes nothing. :class:`WriteRecorder` notes every operator that writes, so that the values of one
tensor can be had without those of the others::

    constructor    a.normal_(0, 1)    b.normal_(0, 1)    a.mul_(0.5)    b.copy_(a)    b.zero_()
    values of a    a.normal_(0, 1)                       a.mul_(0.5)
    values of b                                                                       b.zero_()

Views need no notes: a tensor is known by its storage, and where in it its elements lie.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from shardwright.operator_schemas import makes_meta, undrawn, written_arguments

GENERATOR_LOCK = threading.Lock()
"""Held while drawing: ranks may be threads of one process, which share torch's default generator."""

_EMPTY = frozenset(["empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"])
_FILLS = frozenset(["zero_", "fill_", "copy_"])
_SILENT = frozenset(["detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias"])
_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
"""Functions that drop the data on the meta device before any operator runs."""

_RECORDED = "_recorded_values"
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]  # what a function mode sees of ``tensor.is_meta``
_OF_THREAD = threading.local()


class _StorageView(NamedTuple):
    """Where a meta tensor's elements lie: the number of its storage, and its geometry there."""

    storage: int
    num_bytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def is_whole(self) -> bool:
        """Whether the view covers its storage."""
        return prod(self.size) * self.dtype.itemsize == self.num_bytes

    def of(self, storages: dict[int, torch.UntypedStorage]) -> Tensor:
        """Returns the tensor on the host, of storages by number; one that is not there is allocated."""
        if self.storage not in storages:
            storages[self.storage] = torch.UntypedStorage(self.num_bytes)
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(
            storages[self.storage], self.offset, self.size, self.stride
        )


class WriteCall(NamedTuple):
    """One operator that wrote to storages, with views in place of meta tensors; ``draw`` counts those with numbers."""

    function: str
    args: Any
    named: Any
    results: tuple[_StorageView | None, ...]
    writes: frozenset[int]
    overwrites: frozenset[int]
    reads: frozenset[int]
    draw: int


@dataclass
class RecordedWrites:
    """The calls that a recorder has noted, and which of them wrote to each storage."""

    calls: list[WriteCall] = field(default_factory=list)
    of_storage: dict[int, list[int]] = field(default_factory=dict)

    def needed(self, storage: int) -> list[int] | None:
        """Returns the places of the calls that make a storage's values; None if some of these were never written."""
        found: set[int] = set()
        to_visit = [(storage, len(self.calls))]
        while to_visit:
            number, before = to_visit.pop()
            for place in reversed(self.of_storage.get(number, [])):
                if place >= before:
                    continue
                call = self.calls[place]
                if place not in found:
                    found.add(place)
                    to_visit += [(other, place) for other in call.reads]
                if number in call.overwrites:
                    break
            else:
                return None
        return sorted(found)


@dataclass
class RecordedValues:
    """How the values of one tensor come about: the calls of its constructor, and its view."""

    written: RecordedWrites
    view: _StorageView

    def text(self) -> list[str] | None:
        """Returns the calls as text, alike for tensors that are filled alike; None if there are no values."""
        places, numbers = self._places(), dict[int, int]()

        def described(leaf: Any) -> Any:
            if isinstance(leaf, _StorageView):
                return ("tensor", numbers.setdefault(leaf.storage, len(numbers)), *leaf[1:])
            if isinstance(leaf, Tensor):
                content = leaf.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                return hashlib.blake2b(content, digest_size=8).hexdigest()
            return leaf

        if places is None:
            return None
        calls = [self.written.calls[place] for place in places]
        return [f"{call.function} {_mapped(described, (call.args, call.named, call.results))}" for call in calls]

    def values(self, seed: int) -> Tensor:
        """Returns the tensor on the host; random numbers depend on the seed and their place in the constructor."""
        storages: dict[int, torch.UntypedStorage] = {}
        places = self._places()
        assert places is not None, "there are values"
        with torch.no_grad():
            for place in places:
                _run_again(self.written.calls[place], storages, seed)
        return self.view.of(storages)

    def _places(self) -> list[int] | None:
        return self.written.needed(self.view.storage) if self.view.num_bytes else []


def _run_again(call: WriteCall, storages: dict[int, torch.UntypedStorage], seed: int) -> None:
    def on_host(leaf: Any) -> Any:
        if isinstance(leaf, _StorageView):
            return leaf.of(storages)
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    function: Any = torch
    for name in call.function.split("."):
        function = getattr(function, name)
    args, named = _mapped(on_host, (call.args, call.named))
    if call.draw < 0:
        results = function(*args, **named)
    else:
        key = hashlib.blake2b(f"{seed}/{call.draw}".encode(), digest_size=8).digest()
        with GENERATOR_LOCK, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int.from_bytes(key, "little") >> 1)
            results = function(*args, **named)
    for view, result in zip(call.results, tree_leaves(results), strict=True):
        if view is not None:
            view.of(storages).copy_(result)


def _mapped(function: Any, tree: Any) -> Any:
    return tree_map(function, tree, is_leaf=lambda leaf: isinstance(leaf, _StorageView))


class WriteRecorder(TorchDispatchMode):
    """A context that notes each operator that writes to meta tensors, and draws no random numbers there.

    The first draw on the meta device would make torch import its compiler, which takes longer than importing torch.

    >>> with torch.device("meta"), WriteRecorder() as recorder:
    ...     layer = nn.Linear(3, 3)
    ...     layer.weight.data.fill_(2.0).mul_(torch.arange(3))
    tensor(..., device='meta', size=(3, 3))
    >>> recorder.of(layer.weight).values(seed=0).tolist()[0]
    [0.0, 2.0, 4.0]
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written = RecordedWrites()
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no storage is freed and its address used again
        self._num_draws = 0
        self._inits = _FunctionRecorder(self)

    def __enter__(self) -> WriteRecorder:
        self._inits.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        self._inits.__exit__(*failure)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Says that torch need not import its compiler for this mode, which takes longer than importing torch."""
        return False

    def of(self, tensor: Tensor) -> RecordedValues:
        """Returns how a meta tensor's values come about."""
        return RecordedValues(self.written, self._view(tensor))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named, name = dict(kwargs or {}), function.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        on_meta = makes_meta(named) or any(tensor.is_meta for tensor in given)
        draws = torch.Tag.nondeterministic_seeded in function.tags
        results = undrawn(function, args, named, "meta") if on_meta and draws else function(*args, **named)
        if on_meta and name not in _EMPTY and name not in _SILENT and not function.is_view:
            self._note(function, args, named, results, draws=draws)
        return results

    def note_init(self, name: str, tensor: Tensor, named: dict[str, Any]) -> None:
        """Notes that ``nn.init`` was asked to fill a meta tensor, which it left as it was; ``named`` are the arguments.

        So the tensor is filled by the same function where its values are needed.
        """
        view = self._view(tensor)
        self._num_draws += 1
        storage = frozenset([view.storage])
        named = {key: value for key, value in named.items() if key not in ("tensor", "generator")}
        whole = storage if view.is_whole() else frozenset[int]()
        call = WriteCall(f"nn.init.{name}", (view,), named, (None,), storage, whole, frozenset(), self._num_draws)
        self._add(call)

    def mark(self) -> None:
        """Attaches to each storage the record of how it was filled, for tensors of it that no module has registered."""
        for storage in self._kept:
            setattr(storage, _RECORDED, (self.written, self._numbers[storage._cdata]))

    def _note(self, function: Any, args: Any, named: dict[str, Any], results: Any, *, draws: bool) -> None:
        name, written = function.overloadpacket.__name__, written_arguments(function, args, named, Tensor)
        made = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        if not any(tensor.is_meta for tensor in (*written, *made)):
            return
        known = {tensor.untyped_storage()._cdata for tensor in written}
        new = [None if t.untyped_storage()._cdata in known or not t.is_meta else self._view(t) for t in made]
        targets = [self._view(tensor) for tensor in written if tensor.is_meta]
        fills = draws or name in _FILLS
        overwrites = {view.storage for view in targets if fills and view.is_whole()} | {v.storage for v in new if v}
        writes = {view.storage for view in targets} | overwrites
        args, named = tree_map_only(
            Tensor, self._argument, (args, {k: v for k, v in named.items() if k != "generator"})
        )
        leaves = tree_leaves((args, named), is_leaf=lambda leaf: isinstance(leaf, _StorageView))
        reads = {leaf.storage for leaf in leaves if isinstance(leaf, _StorageView)} - writes
        self._num_draws += draws
        call = WriteCall(
            f"ops.{function}", args, named, tuple(new), frozenset(writes), frozenset(overwrites), frozenset(reads),
            self._num_draws if draws else -1,
        )  # fmt: skip
        self._add(call)

    def _add(self, call: WriteCall) -> None:
        for storage in call.writes:
            self.written.of_storage.setdefault(storage, []).append(len(self.written.calls))
        self.written.calls.append(call)

    def _argument(self, tensor: Tensor) -> Any:
        return self._view(tensor) if tensor.is_meta else tensor.detach().clone()

    def _view(self, tensor: Tensor) -> _StorageView:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._numbers)
            self._kept.append(storage)
        return view_of(tensor, self._numbers[storage._cdata])


def view_of(tensor: Tensor, number: int) -> _StorageView:
    """Returns a meta tensor's offset, shape, strides and dtype in its storage, which is known by ``number``."""
    num_bytes, offset = tensor.untyped_storage().nbytes(), int(tensor.storage_offset())
    return _StorageView(number, num_bytes, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)


class _FunctionRecorder(TorchFunctionMode):
    """Tells a recorder of what no operator shows: tensors made of lists, and functions of ``nn.init`` on meta tensors.

    Some of those look at ``tensor.is_meta`` and return at once.
    """

    def __init__(self, recorder: WriteRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if result is True and function == _IS_META:
            frame = sys._getframe(1)  # the function of nn.init that asks: its locals are its arguments
            code = frame.f_code
            if frame.f_globals.get("__name__") == nn.init.__name__:
                names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                self.recorder.note_init(code.co_name, args[0], {name: frame.f_locals[name] for name in names})
        elif function in _FROM_DATA and result.is_meta and not isinstance(args[0], Tensor):
            result.copy_(function(*args, **{**(kwargs or {}), "device": "cpu"}))  # seen by the recorder
        return result


# ---- the tensors of modules


class ModuleRecorder:
    """A context that records how new modules initialize their parameters and buffers, for :func:`recorded_values`."""

    def __init__(self) -> None:
        self.recorder = WriteRecorder()
        self.registered: list[ReferenceType[Tensor]] = []

    def __enter__(self) -> None:
        self._outer = getattr(_OF_THREAD, "recorder", None)
        _OF_THREAD.recorder = self
        self.recorder.__enter__()

    def __exit__(self, *failure: Any) -> None:
        self.recorder.__exit__(*failure)
        _OF_THREAD.recorder = self._outer
        self.recorder.mark()
        for weak in self.registered:
            tensor = weak()
            if tensor is not None and tensor.is_meta:
                setattr(tensor, _RECORDED, self.recorder.of(tensor))


def recorded_values(tensor: Tensor) -> RecordedValues | None:
    """Returns how the constructor of the tensor's module filled it; None if that was not recorded."""
    found: RecordedValues | None = getattr(tensor, _RECORDED, None)
    if found is None and tensor.is_meta and tensor.layout is torch.strided:
        written, number = getattr(tensor.untyped_storage(), _RECORDED, (None, 0))
        found = None if written is None else RecordedValues(written, view_of(tensor, number))
    return found


def keep_record(tensor: Tensor, copy: Tensor) -> Tensor:
    """Returns ``copy``, a copy of a meta tensor, which is filled as the tensor itself is."""
    record = recorded_values(tensor)
    if record is not None and copy.is_meta:
        setattr(copy, _RECORDED, record)
    return copy


def _register(module: nn.Module, name: str, tensor: Tensor | None) -> None:
    recorder = getattr(_OF_THREAD, "recorder", None)
    if recorder is not None and tensor is not None:
        recorder.registered.append(ref(tensor))


register_module_parameter_registration_hook(_register)
register_module_buffer_registration_hook(_register)
