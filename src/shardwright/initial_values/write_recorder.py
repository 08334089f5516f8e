"""Records the operators with which a model's constructor writes to meta tensors, so that they can be run later."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from shardwright.dispatch_mode import DispatchMode
from shardwright.errors import NoValuesError
from shardwright.formatting import first_line
from shardwright.initial_values.recorded_writes import (
    RecordedValues,
    RecordedWrites,
    RngState,
    StorageView,
    WriteCall,
    view_of,
)
from shardwright.operator_schemas import makes_meta, undrawn, written_arguments
from shardwright.tensor_bytes import bytes_of

_EMPTY = frozenset(["empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"])
_FILLS = frozenset(["zero_", "fill_", "copy_"])
_ANSWERS = frozenset(["_local_scalar_dense", "allclose", "equal", "is_nonzero"])
"""Operators that return a number or a truth value, which the meta device cannot compute."""

_SILENT = frozenset(["detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias"])
_FROM_DATA: dict[Any, tuple[int, str]] = {
    torch.tensor: (0, "data"), torch.as_tensor: (0, "data"), torch.asarray: (0, "obj"), Tensor.new_tensor: (1, "data")
}  # fmt: skip
"""Functions that discard their data on the meta device before any operator runs, with the place and name of the data.

``Tensor.new`` is another such function, unless it is called with sizes.
"""

_INDEXED = (Tensor.__getitem__, Tensor.__setitem__)
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]  # what a function mode sees of ``tensor.data = other``

_TO_PYTHON = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
"""Functions that read values, which torch refuses on the meta device before any operator runs."""

RECORDED = "_recorded_values"
"""The attribute of a tensor or storage that holds the record of how it was filled."""

_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]  # what a function mode sees of ``tensor.is_meta``


class WriteRecorder(DispatchMode):
    """A dispatch mode that records each operator that writes to meta tensors, and draws no random numbers there.

    The first draw on the meta device would make torch import its compiler, which takes longer than importing torch.

    Raises: NoValuesError: the code reads values of meta tensors that are not known, such as random ones.

    >>> with torch.device("meta"), WriteRecorder() as recorder:
    ...     layer = nn.Linear(3, 3)
    ...     layer.weight.data.fill_(2.0).mul_(torch.arange(3))
    tensor(..., device='meta', size=(3, 3))
    >>> recorder.of(layer.weight).values(seed=0).tolist()[0]
    [0.0, 2.0, 4.0]
    """

    def __init__(self) -> None:
        super().__init__()
        self.written = RecordedWrites()
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no storage is freed and its address used again
        self._copied: list[tuple[Tensor, int]] = []  # (tensor on the host, index of the call that copied it)
        self._arrays: list[tuple[np.ndarray[Any, Any], bytes]] = []  # (array of read values, its bytes at that time)
        self._num_draws = 0
        self._inits = _FunctionRecorder(self)

    def __enter__(self) -> WriteRecorder:
        self._inits.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        self._inits.__exit__(*failure)

    def of(self, tensor: Tensor) -> RecordedValues:
        """Returns the record of how the meta tensor ``tensor`` is filled; later writes are added to the record."""
        return RecordedValues(self.written, self._view(tensor))

    def read(self, tensor: Tensor) -> Tensor:
        """Returns a meta tensor's values on the host, for a constructor that reads them back.

        Raises: NoValuesError: the values depend on random numbers, which are drawn only once the seed is known, or some
            of them were never written.
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
        tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        on_meta = makes_meta(named) or any(tensor.is_meta for tensor in tensors)
        draws = torch.Tag.nondeterministic_seeded in function.tags
        generator = named.get("generator")
        if on_meta and draws and generator is not None:
            named["generator"] = self._advanced(function, args, named) if _is_own(generator) else None
        results = undrawn(function, args, named, "meta") if on_meta and draws else function(*args, **named)
        if on_meta and name not in _EMPTY and name not in _SILENT and not function.is_view:
            self._note(function, args, named, results, draws=draws)
        return results

    def on_meta(self, tensor: Tensor) -> Tensor:
        """Returns a copy of the host tensor ``tensor`` on the meta device, and records its values.

        If ``tensor`` is written to afterwards, :meth:`check_kept` raises.
        """
        meta_copy = tensor.to("meta")
        self._copied.append((tensor, len(self.written.calls) - 1))
        return meta_copy

    def array(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns ``array``, which holds the values of a meta tensor, and notes its bytes.

        If the array is written to afterwards, :meth:`check_kept` raises.
        """
        self._arrays.append((array, array.tobytes()))
        return array

    def check_kept(self) -> None:
        """Raises NoValuesError if the constructor has changed values on the host after they were recorded.

        The constructor may have written to a tensor after it had become the data of a parameter (:meth:`on_meta`), or
        to an array that ``numpy()`` had returned (:meth:`array`). The meta tensor would not get such a write.
        """
        for array, before in self._arrays:
            if array.tobytes() != before:
                raise NoValuesError(
                    "a model's constructor writes to the array of a tensor",
                    given=f"an array of shape {list(array.shape)}, from tensor.numpy()",
                    allowed="under without_values(), reading such an array",
                    fix="write to a copy, tensor.numpy().copy(), and copy it into the tensor",
                )
        for tensor, place in self._copied:
            if not torch.equal(bytes_of(tensor), bytes_of(self.written.calls[place].args[0])):
                raise NoValuesError(
                    "a model's constructor writes to a tensor after it has become the data of a parameter",
                    given=f"a tensor of shape {list(tensor.shape)} on the host",
                    allowed="under without_values(), 'parameter.data = tensor' once the tensor has its values",
                    fix="fill the tensor before, or write to the parameter itself",
                )

    def note_init(self, name: str, tensor: Tensor, named: dict[str, Any]) -> None:
        """Records a call of the function ``name`` of ``nn.init``, which does nothing to a meta tensor.

        ``named`` are the call's arguments. The same function fills the tensor later, when its values are needed.

        Raises: NoValuesError: ``named`` has a generator of a device other than the CPU.
        """
        view = self._view(tensor)
        storage = frozenset([view.storage])
        named = {key: value for key, value in named.items() if key != "tensor"}
        generator = named.pop("generator", None)
        own = generator is not None and _is_own(generator)
        by_default = not own and name != "dirac_"  # dirac_ draws nothing
        self._num_draws += by_default
        if own:
            state = _state_of(generator)
            with torch.device("cpu"):
                getattr(nn.init, name)(view.of({}), **named, generator=generator)  # only to advance the generator
            named["generator"] = state
        whole = storage if view.is_whole() else frozenset[int]()
        call = WriteCall(f"nn.init.{name}", (view,), named, (None,), storage, whole, frozenset(),
                         self._num_draws if by_default else -1)  # fmt: skip
        self._add(call)

    def mark(self) -> None:
        """Attaches the record of its writes to each storage, for tensors that no module has registered."""
        for storage in self._kept:
            setattr(storage, RECORDED, (self.written, self._numbers[storage._cdata]))

    def _note(self, function: Any, args: Any, named: dict[str, Any], results: Any, *, draws: bool) -> None:
        name, written = function.overloadpacket.__name__, written_arguments(function, args, named, Tensor)
        outputs = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        if not any(tensor.is_meta for tensor in (*written, *outputs)):
            return
        storages = {tensor.untyped_storage()._cdata for tensor in written}
        new = [None if t.untyped_storage()._cdata in storages or not t.is_meta else self._view(t) for t in outputs]
        targets = [self._view(tensor) for tensor in written if tensor.is_meta]
        fills = draws or name in _FILLS
        overwrites = {view.storage for view in targets if fills and view.is_whole()} | {v.storage for v in new if v}
        writes = {view.storage for view in targets} | overwrites
        args, named = tree_map_only(Tensor, self._argument, (args, named))
        leaves = tree_leaves((args, named), is_leaf=lambda leaf: isinstance(leaf, StorageView))
        counts = Counter(leaf.storage for leaf in leaves if isinstance(leaf, StorageView))
        # a storage that is only written occurs once in the arguments, one that is also read twice
        reads = counts - Counter(view.storage for view in targets)
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

    def _advanced(self, function: Any, args: Any, named: dict[str, Any]) -> RngState:
        """Draws once from a generator, so that its next draw is another; returns its state before the draw."""
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

    def _view(self, tensor: Tensor) -> StorageView:
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


def _state_of(generator: torch.Generator) -> RngState:
    if generator.device.type != "cpu":
        raise NoValuesError(
            "a model's constructor draws from a generator of a device",
            given=f"a torch.Generator on {generator.device}",
            allowed="under without_values(), torch's default generator, or one on the host",
            fix="make it by torch.Generator(), or build the model without sw.without_values()",
        )
    return RngState(generator.get_state())


class _FunctionRecorder(TorchFunctionMode):
    """Tells a recorder of writes that run no operator: tensors made from lists, and ``nn.init`` on meta tensors.

    The functions of ``nn.init`` read ``tensor.is_meta`` and return at once for meta tensors.
    """

    def __init__(self, recorder: WriteRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from_meta = function in _TO_PYTHON and args[0].is_meta
        if from_meta:
            args = (self.recorder.read(args[0]), *args[1:])
        elif function in _INDEXED and args[0].is_meta:
            args = (args[0], _without_lists(args[1]), *args[2:])
        elif function == _SET_DATA and args[0].is_meta and not args[1].is_meta:
            args = (args[0], self.recorder.on_meta(args[1]))
        try:
            result = function(*args, **(kwargs or {}))
        except RuntimeError as failure:
            # torch raises NotImplementedError if the shape of a result depends on values
            if "meta tensor" not in str(failure) and not isinstance(failure, NotImplementedError):
                raise
            name = getattr(function, "__name__", str(function))
            raise _no_values(f"a call of {name}, which ends in: {first_line(failure)}") from failure
        if from_meta and isinstance(result, np.ndarray):
            return self.recorder.array(result)
        if result is True and function == _IS_META:
            frame = sys._getframe(1)  # the function of nn.init that reads is_meta; its locals are its arguments
            code = frame.f_code
            if frame.f_globals.get("__name__") == nn.init.__name__:
                names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                self.recorder.note_init(code.co_name, args[0], {name: frame.f_locals[name] for name in names})
        elif function in _FROM_DATA and result.is_meta:
            number, name = _FROM_DATA[function]
            data = args[number] if number < len(args) else (kwargs or {})[name]
            if not isinstance(data, Tensor):
                result.copy_(torch.asarray(data, dtype=result.dtype, device="cpu"))  # a write that the recorder sees
        elif function == Tensor.new and result.is_meta and len(args) > 1 and _is_data(args[1]):
            result.copy_(torch.tensor(args[1], dtype=result.dtype, device="cpu"))
        return result


def _without_lists(index: Any) -> Any:
    """Returns an index whose lists are replaced by host tensors, because torch discards lists on the meta device.

    Raises: NoValuesError: the index is a list with lists inside, which torch may read as a tuple or as a tensor.
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


def _is_data(value: Any) -> bool:
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes | torch.Size)


def _as_tensor(index: Any) -> Any:
    if not _is_data(index):
        return index
    tensor = torch.as_tensor(index, device="cpu")
    return tensor if tensor.numel() else tensor.long()  # torch makes an empty list a tensor of floats
