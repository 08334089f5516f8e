"""Records how a constructor fills a model's tensors on the meta device, so that each can be filled later on its own.

A constructor may write a parameter several times, and by rules that look at the whole model: ``normal_`` with a smaller
deviation for the last layer of each block, a copy of another layer, a table made with ``torch.arange``. On the meta
device all that computes nothing. :class:`WriteRecorder` notes every operator that writes, so that the values of one
tensor can be had without those of the others::

    constructor    a.normal_(0, 1)    b.normal_(0, 1)    a.mul_(0.5)    b.copy_(a)    b.zero_()
    values of a    a.normal_(0, 1)                       a.mul_(0.5)
    values of b                                                                       b.zero_()

Views need no record: a tensor is identified by its storage and by its offset, shape and strides there.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from shardwright.errors import NoValuesError
from shardwright.operator_schemas import makes_meta, undrawn, written_arguments

GENERATOR_LOCK = threading.Lock()
"""Held while random numbers are drawn, because ranks that are threads share torch's default generator."""

_EMPTY = frozenset(["empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"])
_FILLS = frozenset(["zero_", "fill_", "copy_"])
_ANSWERS = frozenset(["_local_scalar_dense", "allclose", "equal", "is_nonzero"])
"""Operators that return a number or a truth value, for which the meta device has none."""

_SILENT = frozenset(["detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias"])
_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
"""Functions that discard their data on the meta device before any operator runs."""

_NEW_FROM_DATA = (Tensor.new_tensor, Tensor.new)
"""Methods that discard their data on the meta device, too; ``new`` may have sizes in place of data."""

_INDEXED = (Tensor.__getitem__, Tensor.__setitem__)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]  # what a function mode sees of ``tensor.data = other``

_TO_PYTHON = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
"""Functions that read values, which torch refuses on the meta device before any operator runs."""

_RECORDED = "_recorded_values"
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]  # what a function mode sees of ``tensor.is_meta``
_OF_THREAD = threading.local()


class _StorageView(NamedTuple):
    """A meta tensor as a view of a numbered storage: its dtype, shape, strides and offset there."""

    storage: int
    num_bytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def is_whole(self) -> bool:
        """Whether the view covers all of its storage."""
        return prod(self.size) * self.dtype.itemsize == self.num_bytes

    def of(self, storages: dict[int, torch.UntypedStorage]) -> Tensor:
        """Returns the view as a tensor on the host, over its storage in ``storages``, which is allocated if missing."""
        if self.storage not in storages:
            storages[self.storage] = torch.UntypedStorage(self.num_bytes)
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(
            storages[self.storage], self.offset, self.size, self.stride
        )


@dataclass(frozen=True)
class _RngState:
    """The state of a generator that a constructor made itself, before a draw from it."""

    state: Tensor

    def generator(self) -> torch.Generator:
        """Returns a generator in this state."""
        generator = torch.Generator(device="cpu")
        generator.set_state(self.state)
        return generator


class WriteCall(NamedTuple):
    """A recorded call of an operator that wrote to the storages of tensors on the meta device.

    ``args`` and ``named`` have views of storages in place of meta tensors. ``writes``, ``overwrites`` (those written in
    full) and ``reads`` are storages by number. ``draw`` numbers the calls that draw from torch's default generator;
    others have -1.
    """

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
    """The write calls that a recorder has noted, and for each storage the indices of those that wrote to it."""

    calls: list[WriteCall] = field(default_factory=list)
    of_storage: dict[int, list[int]] = field(default_factory=dict)

    def needed(self, storage: int) -> list[int] | None:
        """Returns the indices of the calls that determine a storage's values, or None if some were never written."""
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
    """The record of how a constructor filled one tensor, from which :meth:`values` computes its initial values.

    ``written`` has the recorded calls, and ``view`` is the tensor's view of its storage.
    """

    written: RecordedWrites
    view: _StorageView

    def can_be_read(self) -> bool:
        """Returns whether all values were written, and none of them by numbers from torch's default generator."""
        places = self._places()
        return places is not None and all(self.written.calls[place].draw < 0 for place in places)

    def text(self) -> list[str] | None:
        """Returns the calls as text, equal for tensors that are filled alike, or None if values were never written."""
        places, numbers = self._places(), dict[int, int]()

        def described(leaf: Any) -> Any:
            leaf = leaf.state if isinstance(leaf, _RngState) else leaf
            if isinstance(leaf, _StorageView):
                return ("tensor", numbers.setdefault(leaf.storage, len(numbers)), *leaf[1:])
            if isinstance(leaf, Tensor):
                return hashlib.blake2b(_content(leaf), digest_size=8).hexdigest()
            return leaf

        if places is None:
            return None
        calls = [self.written.calls[place] for place in places]
        return [f"{call.function} {_mapped(described, (call.args, call.named, call.results))}" for call in calls]

    def values(self, seed: int) -> Tensor:
        """Returns the tensor's initial values, on the host; random ones depend on ``seed`` and on the draws' order."""
        storages: dict[int, torch.UntypedStorage] = {}
        places = self._places()
        assert places is not None, "there are values"
        with torch.no_grad():
            for place in places:
                _run_again(self.written.calls[place], storages, seed)
        return self.view.of(storages)

    def _places(self) -> list[int] | None:
        return self.written.needed(self.view.storage) if self.view.num_bytes else []


def _content(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _run_again(call: WriteCall, storages: dict[int, torch.UntypedStorage], seed: int) -> None:
    def on_host(leaf: Any) -> Any:
        if isinstance(leaf, _StorageView):
            return leaf.of(storages)
        if isinstance(leaf, _RngState):
            return leaf.generator()
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
    tensors = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]  # a list's fill may return None
    for view, result in zip(call.results, tensors, strict=True):
        if view is not None:
            view.of(storages).copy_(result)


def _mapped(function: Any, tree: Any) -> Any:
    return tree_map(function, tree, is_leaf=lambda leaf: isinstance(leaf, _StorageView))


class WriteRecorder(TorchDispatchMode):
    """A dispatch mode that records each operator that writes to meta tensors, and draws no random numbers there.

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
        self._copied: list[tuple[Tensor, int]] = []  # by the host's tensor: the place of the call that copied it
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
        """Tells torch not to import its compiler for this mode, which takes longer than importing torch."""
        return False

    def of(self, tensor: Tensor) -> RecordedValues:
        """Returns the record of how the meta tensor ``tensor`` was filled so far."""
        return RecordedValues(self.written, self._view(tensor))

    def read(self, tensor: Tensor) -> Tensor:
        """Returns a meta tensor's values on the host, for a constructor that reads them, such as rates in a table.

        Raises: NoValuesError: they depend on random numbers, which are drawn when the seed is known, or were never
            written as a whole.
        """
        recorded = self.of(tensor)
        if recorded.can_be_read():
            return recorded.values(seed=0)
        raise _no_values(f"a tensor of shape {list(tensor.shape)} that is filled at random, or nowhere as a whole")

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named, name = dict(kwargs or {}), function.overloadpacket.__name__
        if name in _ANSWERS:
            return function(*(self.read(a) if isinstance(a, Tensor) and a.is_meta else a for a in args), **named)
        given = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        on_meta = makes_meta(named) or any(tensor.is_meta for tensor in given)
        draws = torch.Tag.nondeterministic_seeded in function.tags
        generator = named.get("generator")
        if on_meta and draws and generator is not None:
            named["generator"] = self._advanced(function, args, named) if _is_own(generator) else None
        results = undrawn(function, args, named, "meta") if on_meta and draws else function(*args, **named)
        if on_meta and name not in _EMPTY and name not in _SILENT and not function.is_view:
            self._note(function, args, named, results, draws=draws)
        return results

    def on_meta(self, tensor: Tensor) -> Tensor:
        """Returns a tensor on the meta device with the values of ``tensor``, which :meth:`check_kept` then compares."""
        found = tensor.to("meta")
        self._copied.append((tensor, len(self.written.calls) - 1))
        return found

    def check_kept(self) -> None:
        """Raises NoValuesError if a tensor has other values than when it became the data of one on the meta device."""
        for tensor, place in self._copied:
            if _content(tensor) != _content(self.written.calls[place].args[0]):
                raise NoValuesError(
                    "a model's constructor writes to a tensor after it has become the data of a parameter",
                    given=f"a tensor of shape {list(tensor.shape)} on the host",
                    allowed="under without_values(), 'parameter.data = tensor' once the tensor has its values",
                    fix="fill the tensor before, or write to the parameter itself",
                )

    def note_init(self, name: str, tensor: Tensor, named: dict[str, Any]) -> None:
        """Records a call of the function ``name`` of ``nn.init``, which does nothing to a meta tensor.

        ``named`` are the call's arguments. The same function then fills the tensor when its values are needed.
        """
        view = self._view(tensor)
        storage = frozenset([view.storage])
        named = {key: value for key, value in named.items() if key != "tensor"}
        generator = named.pop("generator", None)
        self._num_draws += 1
        if generator is not None and _is_own(generator):
            state = _state_of(generator)
            with torch.device("cpu"):
                getattr(nn.init, name)(view.of({}), **named, generator=generator)  # the next draw is another
            named["generator"] = state
        whole = storage if view.is_whole() else frozenset[int]()
        call = WriteCall(f"nn.init.{name}", (view,), named, (None,), storage, whole, frozenset(), self._num_draws)
        self._add(call)

    def mark(self) -> None:
        """Attaches to each storage the record of its writes, for tensors that no module has registered."""
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
        args, named = tree_map_only(Tensor, self._argument, (args, named))
        leaves = tree_leaves((args, named), is_leaf=lambda leaf: isinstance(leaf, _StorageView))
        given = Counter(leaf.storage for leaf in leaves if isinstance(leaf, _StorageView))
        reads = given - Counter(view.storage for view in targets)  # one that is read and written is given twice
        by_default = draws and named.get("generator") is None
        self._num_draws += by_default
        call = WriteCall(
            f"ops.{function}", args, named, tuple(new), frozenset(writes), frozenset(overwrites), frozenset(reads),
            self._num_draws if by_default else -1,
        )  # fmt: skip
        self._add(call)

    def _add(self, call: WriteCall) -> None:
        for storage in call.writes:
            self.written.of_storage.setdefault(storage, []).append(len(self.written.calls))
        self.written.calls.append(call)

    def _advanced(self, function: Any, args: Any, named: dict[str, Any]) -> _RngState:
        """Draws once and discards, so that a generator's next draw is another; returns its state before that."""
        written = {id(tensor) for tensor in written_arguments(function, args, named, Tensor)}

        def on_host(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.is_meta:
                unread = id(leaf) in written and not self.of(leaf).can_be_read()
                return self._view(leaf).of({}) if unread else self.read(leaf)
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        state = _state_of(named["generator"])
        args, named = tree_map(on_host, (args, named))
        function(*args, **named)
        return state

    def _argument(self, tensor: Tensor) -> Any:
        return self._view(tensor) if tensor.is_meta else tensor.detach().clone()

    def _view(self, tensor: Tensor) -> _StorageView:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._numbers)
            self._kept.append(storage)
        return view_of(tensor, self._numbers[storage._cdata])


def _no_values(given: str) -> NoValuesError:
    return NoValuesError(
        "a model's constructor reads values that it has not got without values",
        given=given,
        allowed="under without_values(), reading tensors that are computed from numbers alone",
        fix="build the model without sw.without_values()",
    )


def _is_own(generator: torch.Generator) -> bool:
    return generator is not torch.default_generator


def _state_of(generator: torch.Generator) -> _RngState:
    if generator.device.type != "cpu":
        raise NoValuesError(
            "a model's constructor draws from a generator of a device",
            given=f"a torch.Generator on {generator.device}",
            allowed="under without_values(), torch's default generator, or one on the host",
            fix="make it by torch.Generator(), or build the model without sw.without_values()",
        )
    return _RngState(generator.get_state())


def view_of(tensor: Tensor, number: int) -> _StorageView:
    """Returns a meta tensor's shape, strides, dtype and offset in its storage, whose number is ``number``."""
    num_bytes, offset = tensor.untyped_storage().nbytes(), int(tensor.storage_offset())
    return _StorageView(number, num_bytes, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)


class _FunctionRecorder(TorchFunctionMode):
    """Tells a recorder of writes that run no operator: tensors made from lists, and ``nn.init`` on meta tensors.

    Some of those look at ``tensor.is_meta`` and return at once.
    """

    def __init__(self, recorder: WriteRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _TO_PYTHON and args[0].is_meta:
            args = (self.recorder.read(args[0]), *args[1:])
        elif function in _INDEXED and args[0].is_meta:
            args = (args[0], _without_lists(args[1]), *args[2:])
        elif function == _SET_DATA and args[0].is_meta and not args[1].is_meta:
            args = (args[0], self.recorder.on_meta(args[1]))
        try:
            result = function(*args, **(kwargs or {}))
        except (RuntimeError, NotImplementedError) as failure:
            if "meta tensor" not in str(failure) and not isinstance(failure, NotImplementedError):
                raise
            name = getattr(function, "__name__", str(function))
            raise _no_values(f"a call of {name}, which ends in: {str(failure).splitlines()[0]}") from failure
        if result is True and function == _IS_META:
            frame = sys._getframe(1)  # the function of nn.init that asks: its locals are its arguments
            code = frame.f_code
            if frame.f_globals.get("__name__") == nn.init.__name__:
                names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                self.recorder.note_init(code.co_name, args[0], {name: frame.f_locals[name] for name in names})
        elif function in _FROM_DATA and result.is_meta and not isinstance(args[0], Tensor):
            result.copy_(function(*args, **{**(kwargs or {}), "device": "cpu"}))  # seen by the recorder
        elif function in _NEW_FROM_DATA and result.is_meta and _is_data(data := args[1] if len(args) > 1 else None):
            result.copy_(torch.tensor(data, dtype=result.dtype, device="cpu"))
        return result


def _without_lists(index: Any) -> Any:
    """Returns an index with tensors on the host for its lists, which torch discards on the meta device.

    Raises: NoValuesError: lists inside a list, which torch reads as a tuple or as a tensor.
    """
    if isinstance(index, tuple):
        return tuple(_as_tensor(part) for part in index)
    if isinstance(index, list) and any(isinstance(part, Sequence | np.ndarray) for part in index):
        raise NoValuesError(
            "a model's constructor indexes a tensor by lists inside a list",
            given=str(index)[:80],
            allowed="under without_values(), an index of numbers, slices, tensors, and lists of numbers",
            fix="write the index as a tuple of lists, or as torch.tensor(...)",
        )
    if isinstance(index, list) and any(
        part is None or part is ... or isinstance(part, Tensor | slice) for part in index
    ):
        return index  # has no data to discard
    return _as_tensor(index)


def _is_data(given: Any) -> bool:
    return isinstance(given, Sequence | np.ndarray) and not isinstance(given, str | bytes | torch.Size)


def _as_tensor(index: Any) -> Any:
    if not _is_data(index):
        return index
    found = torch.as_tensor(index, device="cpu")
    return found if found.numel() else found.long()  # a list of nothing would be of floats


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
        if failure[0] is None:
            self.recorder.check_kept()
        self.recorder.mark()
        for weak in self.registered:
            tensor = weak()
            if tensor is not None and tensor.is_meta and not is_lazy(tensor):
                setattr(tensor, _RECORDED, self.recorder.of(tensor))


def recorded_values(tensor: Tensor) -> RecordedValues | None:
    """Returns the record of how a module's constructor filled a tensor, or None if it was not recorded."""
    found: RecordedValues | None = getattr(tensor, _RECORDED, None)
    if found is None and tensor.is_meta and tensor.layout is torch.strided:
        written, number = getattr(tensor.untyped_storage(), _RECORDED, (None, 0))
        found = None if written is None else RecordedValues(written, view_of(tensor, number))
    return found


def keep_record(tensor: Tensor, copy: Tensor) -> Tensor:
    """Attaches to ``copy``, a copy of a meta tensor, the record of how ``tensor`` was filled, and returns ``copy``."""
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
