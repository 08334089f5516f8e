"""Runs code on the meta device and keeps the values of small constants, so that code which reads these values works.

A meta tensor has a shape and no values. Masks, positions and rotary tables depend on no parameter and on no input, and
the code of many models reads them (``if mask.all()``, ``positions.max().item()``, ``x[mask]``). :class:`MetaValues`
computes such small tensors on the CPU as well, alongside their meta tensors.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from shardwright.analysis.on_meta.guards import answer_of_guard
from shardwright.analysis.on_meta.operator_results import check_ends, map_tensors, run_on_meta, tensors_of
from shardwright.dispatch_mode import DispatchMode, is_collective
from shardwright.mesh import balanced
from shardwright.operator_schemas import makes_meta, undrawn, written_arguments

MOST_ELEMENTS = 2**22
"""The largest tensor, in elements, whose values are computed and kept."""

# fmt: off
RANDOM = frozenset((
    "_sample_dirichlet", "_standard_gamma", "bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_",
    "geometric_", "log_normal_", "multinomial",
    "native_dropout", "normal", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "randperm", "random_", "rrelu_with_noise", "rrelu_with_noise_", "uniform_",
))
# fmt: on
"""The operators that draw random numbers."""

_READS = frozenset(["_local_scalar_dense", "equal", "is_nonzero", "item"])
_SELECTING = frozenset(["nonzero", "masked_select", "index"])
_UNKNOWN_SIZE = frozenset(["nonzero", "masked_select", "unique_consecutive", "_unique2", "unique_dim"])
_CHOOSING = {"topk": -1, "sort": -1, "multinomial": -1, "argmax": None, "argmin": None, "max": None, "min": None}
"""The operators that choose elements along a dim and return their indices, each with its default dim."""

TO_NUMBERS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
"""The functions that give the values of a tensor to Python or NumPy."""

PACK = "_pack_padded_sequence"
"""The operator that leaves out the padding of sequences, whose lengths must be on the CPU."""

_SILENT = frozenset(["detach", "alias", "lift_fresh", "lift", "sym_size", "sym_stride"])

ValueKey = tuple[Any, ...]


_KEPT = "_values_kept"

MOST_KEPT = 64
"""The largest buffer, in elements, whose values a copy of the model on the meta device keeps for code to read."""

MOST_NUMBERS = 2**16
"""The most elements of a tensor without known values for which ``tolist`` returns a list of ones."""


class ValueReadError(RuntimeError):
    """Raised when code on the meta device reads a value that is known only in a real run."""


def view_key(tensor: Tensor) -> ValueKey:
    """Returns a key of a tensor's view: storage, offset, shape, strides and dtype; for a sparse tensor, its id."""
    try:
        storage = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors have none
        return (id(tensor),)
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def keep_values(buffer: Tensor, copy: Tensor) -> Tensor:
    """Attaches to ``copy``, a copy of a small buffer on the meta device, the buffer's values, and returns ``copy``.

    Nothing is attached if the buffer has more than :data:`MOST_KEPT` elements, or no values. Code may read a buffer,
    such as one with a layer's padding; :meth:`MetaValues.give_kept` makes the attached values known to the mode.
    """
    values = buffer.__dict__.get(_KEPT) if buffer.is_meta else buffer.detach()
    if values is not None and copy.is_meta and values.numel() <= MOST_KEPT:
        copy.__dict__[_KEPT] = values if buffer.is_meta else values.clone()
    return copy


def _leaves_elements(tensor: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int | None = None) -> bool:
    """Returns whether ``tensor.as_strided_(shape, strides, offset)`` leaves every element at its index.

    That is so if only the strides of dims of size 1 change. Torch makes such a call on the result of pooling
    channels-last pictures to one pixel.
    """
    places = zip(tensor.shape, tensor.stride(), strides, strict=False)
    same = all(size == 1 or stride == new_stride for size, stride, new_stride in places)
    return same and tuple(shape) == tuple(tensor.shape) and offset in (None, tensor.storage_offset())


class MetaValues(DispatchMode):
    """A dispatch mode in which small meta tensors that depend on no parameter and no input have values.

    An operator on tensors of both the CPU and the meta device runs on meta. A random operator draws nothing: on the CPU
    its numbers are 0.5 (integers 0), on meta they have no values. A subclass can override :meth:`ran` to see the
    operators.

    Some values are known only in a real run. If ``guess`` is given, it is the answer to every yes-or-no condition on
    such values; but if one of the two answers leads to a ``raise`` at once, the other one is given. While
    ``selects_all`` is set, masks with such values count as true everywhere, and so do conditions without a ``guess``:
    code that selects by them, as the loop over the experts of a mixture does, selects everything. A single number that
    only a real run has is then 1. With ``spread``, ``topk``, ``argmax`` and the like choose each index equally often
    where the real choice is not known. The router of a mixture then sends each expert the same number of tokens, for
    which the cost of a step is stated.

    Raises: ValueReadError: the code reads any other value that is known only in a real run, or makes a tensor whose
        shape depends on one.

    >>> with MetaValues():
    ...     torch.arange(3, device="meta").sum().item(), torch.ones(2, device="meta").bool().all().item()
    (3, True)
    >>> weight = torch.empty(3, device="meta")
    >>> with MetaValues():
    ...     weight.add(1).sum().item()
    Traceback (most recent call last):
    shardwright.analysis.on_meta.meta_values.ValueReadError: the code reads a value that only a real run has
    >>> scores = torch.empty(3, 4, device="meta")
    >>> with MetaValues(spread=True) as values:
    ...     values.values(scores.topk(2).indices)
    tensor([[0, 1],
            [2, 3],
            [0, 1]])
    """

    def __init__(self, *, guess: bool | None = None, selects_all: bool = False, spread: bool = False) -> None:
        super().__init__()
        self.num_selected = 0
        """How many conditions were taken as true, and numbers as 1, as only a real run has them (``selects_all``)."""
        self.num_numbers = 0
        """How many numbers the code has read that only a real run has; each was taken as 1 (``selects_all``)."""
        self.num_masks = 0
        """How many selections took every element, because only a real run has the mask's values (``selects_all``)."""
        self.selects_all = selects_all
        self.num_guessed = 0
        """How many conditions on values that only a real run has were answered by ``guess``."""
        self.num_reads = 0
        """How many calls so far have read values, or made a tensor whose shape depends on values."""
        self.keeps_values = True
        """Whether results get values; False inside a torch function if its arguments are not all known."""
        self._guess, self._spread = guess, spread
        self._values: dict[ValueKey, Tensor] = {}
        # by the id of a storage: a reference to it, and the keys in ``_values`` of its tensors, until it is freed
        self._held: dict[int, tuple[weakref.ref[Any], list[ValueKey]]] = {}
        self._freed: deque[int] = deque()  # any thread may drop the last reference

    def ran(self, function: Any, args: Any, named: dict[str, Any], results: Any, *, random: bool) -> None:
        """A hook for subclasses, called after each operator with its arguments and results; here it does nothing.

        It is not called for reads of values such as ``item``, nor for ``detach``, ``alias`` and ``lift_fresh``.
        ``random`` says whether the operator draws random numbers.
        """

    def moved(self, tensor: Tensor, on_meta: Tensor) -> None:
        """A hook for subclasses, called when ``on_meta`` replaces a tensor of another device; here it does nothing."""

    def selected(self) -> None:
        """A hook for subclasses, called when a mask, condition or number of a real run is taken as true or as 1.

        Here it does nothing.
        """

    def read(self, tensor: Tensor) -> None:
        """A hook for subclasses, called when code reads a value of ``tensor`` that only a real run has.

        Here it does nothing.
        """

    def values(self, tensor: Tensor) -> Tensor | None:
        """Returns a tensor's values, or None if they are known only in a real run or were too many to compute or keep.

        A tensor that is not on the meta device is returned itself. The result of an operator has no values if it has
        more than :data:`MOST_ELEMENTS` elements, or if the operands together have more.
        """
        self._forget_freed()
        return self._values.get(view_key(tensor)) if tensor.is_meta else tensor

    def give(self, tensor: Tensor, values: Tensor) -> None:
        """Stores the CPU tensor ``values`` as the values of a meta tensor; later operators compute with them."""
        self._forget_freed()
        key, storage = view_key(tensor), tensor.untyped_storage()
        address, freed = storage._cdata, self._freed
        if address not in self._held:
            self._held[address] = weakref.ref(storage, lambda _: freed.append(address)), []
        self._held[address][1].append(key)
        self._values[key] = values

    def give_kept(self, buffers: Iterable[Tensor]) -> None:
        """Gives buffers on the meta device the values that :func:`keep_values` has attached to them."""
        for buffer in buffers:
            if buffer.is_meta and _KEPT in buffer.__dict__:
                self.give(buffer, buffer.__dict__[_KEPT].to(buffer.dtype, copy=True))  # code may write to it

    def _forget_freed(self) -> None:
        """Removes the values of tensors that are gone: the address of their storage may be used again."""
        while self._freed:
            for key in self._held.pop(self._freed.popleft())[1]:
                self._values.pop(key, None)

    def indexing(self, function: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Returns the function and arguments to run on the meta device: unchanged, but for functions that read values.

        - A number in an f-string, as in ``experts[f"expert_{number}"]``, is formatted by its value.
        - ``tolist`` and ``numpy`` read known values. While ``selects_all`` is set, numbers that only a real run has are
          ones for ``tolist``, and also for NumPy if they are a few integers, as choices and counts are.
        - In ``x[...]``, an old mask of bytes becomes a mask of booleans, which the meta device needs. A list of numbers
          that is a range becomes the copy of a slice, whose dims are better known.
        - In ``x[number]``, a number that is too large becomes the last index once everything was selected. A loop over
          the experts of a mixture may then ask for one expert more than there are, since a mask may have a row that no
          sample chooses (as in DBRX).
        """
        if function is Tensor.__format__ and args[0].is_meta and not args[0].dim():
            return _formatted, args
        if function in TO_NUMBERS and args[0].is_meta:  # torch would read the memory without a call to dispatch modes
            self.num_reads += 1
            values = self.values(args[0])
            is_few = args[0].numel() <= MOST_KEPT and not (args[0].is_floating_point() or args[0].is_complex())
            if values is None and function is not Tensor.tolist and not is_few:
                return function, args  # NumPy may compute anything from them, so ones would be wrong
            return function, (self._unknown_numbers(args[0]) if values is None else values, *args[1:])
        if function is not Tensor.__getitem__ or not args[0].is_meta:
            return function, args
        x, index = args
        places = index if isinstance(index, tuple) else (index,)
        masks = [isinstance(place, Tensor) and place.dtype is torch.uint8 and place.dim() > 0 for place in places]
        if any(masks):  # torch accepts bytes as a mask, but not on the meta device
            indices = tuple(place.bool() if mask else place for place, mask in zip(places, masks, strict=True))
            return function, (x, indices)
        ranges = [_slice_of(place) for place in places]
        if sum(isinstance(place, list | Tensor) for place in places) == 1 and any(ranges):
            return _copied_slice, (x, tuple(new or old for new, old in zip(ranges, places, strict=True)))
        value = self.values(index) if isinstance(index, Tensor) and index.dim() == 0 and self.num_selected else None
        if value is None or value.dtype is torch.bool or not x.dim() or int(value) < x.shape[0]:
            return function, args
        return function, (x, x.shape[0] - 1)

    def numbers_in(self, function: Any, tensor: Tensor, *args: Any, **named: Any) -> Any:
        """Returns what a function of ``TO_NUMBERS`` gives for a tensor, as :meth:`indexing` says."""
        function, args = self.indexing(function, (tensor, *args))
        return function(*args, **named)

    def text_of(self, tensor: Tensor, spec: str) -> str:
        """Returns what an f-string writes for a tensor.

        A known number is written as its value, since code may use it in a module's name. Any other tensor is described
        as torch describes it, which reads no value.
        """
        known = not tensor.dim() and (self.selects_all or self.values(tensor) is not None)
        return _formatted(tensor, spec) if known else Tensor.__format__(tensor, spec)

    def _unknown_numbers(self, tensor: Tensor) -> Tensor:
        """Returns ones, or true, in place of a tensor's values that only a real run has, and counts the read.

        Raises ValueReadError if ``selects_all`` is not set, or if there are too many.
        """
        self.read(tensor)
        if not self.selects_all or tensor.numel() > MOST_NUMBERS:
            raise ValueReadError("the code reads a value that only a real run has")
        self.num_selected += 1
        check_ends(self.num_selected)
        self.selected()
        self.num_numbers += tensor.numel() * (tensor.dtype is not torch.bool)
        return torch.ones(tensor.shape, dtype=tensor.dtype)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named, name = dict(kwargs or {}), func.overloadpacket.__name__
        if is_collective(func):  # the message would reach ranks that do not expect it
            raise NotImplementedError(f"the code calls '{name}' of torch.distributed, which runs in steps alone")
        tensors = tensors_of((args, named))
        if func is torch.ops.aten.as_strided_.default and _leaves_elements(*args):
            return args[0]
        if func.namespace == "prim" or name in _SILENT:
            return self._silently(func, args, named, tensors)
        values = [self.values(tensor) for tensor in tensors]
        known = self.keeps_values and name not in RANDOM and all(value is not None for value in values)
        self.num_reads += name in _READS or name == PACK or _has_size_of_values(name, args, named)
        small = known and sum(value.numel() for value in values if value is not None) <= MOST_ELEMENTS
        if name in _READS:
            if not known:
                self.read(tensors[0])
            is_condition = not known and (name == "equal" or tensors[0].dtype is torch.bool)
            goes_on = answer_of_guard() if is_condition else None
            if goes_on is not None:
                return goes_on
            if is_condition and self._guess is not None:
                self.num_guessed += 1
                check_ends(self.num_guessed)
                return self._guess
            if not known and self.selects_all:
                self.num_selected += 1
                check_ends(self.num_selected)
                self.selected()
                if is_condition:
                    return True
                self.num_numbers += 1
                return torch.ones((), dtype=tensors[0].dtype).item()
            if not known:
                raise ValueReadError("the code reads a value that only a real run has")
            return func(*self._on_cpu(args), **self._on_cpu(named))
        if not any(tensor.is_meta for tensor in tensors) and not makes_meta(named):
            results = _drawn(func, args, named, tensors) if name in RANDOM else func(*args, **named)
        else:
            results = self._on_meta(func, name, args, named, known and small)
        self.ran(func, args, named, results, random=name in RANDOM)
        return results

    def _silently(self, func: Any, args: Any, named: Any, tensors: Sequence[Tensor]) -> Any:
        result = func(*args, **named)
        if isinstance(result, Tensor) and result.is_meta and tensors:
            values = self.values(tensors[0])
            if values is not None:
                self.give(result, values)
        return result

    def _on_meta(self, func: Any, name: str, args: Any, named: dict[str, Any], known: bool) -> Any:
        written = written_arguments(func, args, named, Tensor)
        if name == PACK:
            return func(args[0], self._lengths_of(args[0], args[1], *args[2:]), *args[2:])
        if _has_size_of_values(name, args, named) or (known and name == "bincount"):
            if known:
                return tree_map_only(Tensor, self._meta_of, func(*self._on_cpu(args), **self._on_cpu(named)))
            chosen = self._chosen(name, args)
            if chosen is not None:
                return run_on_meta(torch.ops.aten.index.Tensor, (self._as_meta(args[0]), chosen), {})
            mask = self.values(args[1]) if name == "masked_select" else None
            if mask is not None:
                count = int(mask.expand(torch.broadcast_shapes(args[0].shape, mask.shape)).sum())
                return self._as_meta(args[0]).new_empty(count)
            if name in _SELECTING and self.selects_all:
                return self._all_selected(name, args)
            raise ValueReadError(f"the shape of the result of '{name}' is that of a real run only")
        if named.get("device") is not None:
            named = {**named, "device": torch.device("meta")}
        if name == "split_with_sizes" and self.num_numbers:
            args = _fitting(*args)
        # looked up before the call, since values are found by shapes, which ``func`` may change
        on_cpu = (self._on_cpu(args), self._on_cpu(named)) if known else None
        results = self._run(func, name, args, named)
        if written and not known:
            storages = {tensor.untyped_storage()._cdata for tensor in written}
            for key in [key for key in self._values if key[0] in storages]:
                del self._values[key]
        elif on_cpu is not None:
            try:
                values = func(*on_cpu[0], **on_cpu[1])
            except RuntimeError:  # the code does not expect the CPU and may use a dtype that its kernels lack
                return results
            for result, value in zip(tree_leaves(results), tree_leaves(values), strict=True):
                if isinstance(result, Tensor) and result.is_meta and value.numel() <= MOST_ELEMENTS:
                    self.give(result, value)
        elif self._spread and name in _CHOOSING:
            self._spread_indices(func, args, named, results)
        return results

    def _lengths_of(self, padded: Tensor, lengths: Tensor, batch_first: bool = False) -> Tensor:
        """Returns the lengths of padded sequences as a CPU tensor, the longest first.

        If their values are not known, each sequence counts as long as the padded tensor.
        """
        known = self.values(lengths)
        if known is None:
            self.read(lengths)
            return torch.full(lengths.shape, padded.shape[int(batch_first)])
        return known.sort(descending=True).values

    def _spread_indices(self, func: Any, args: Any, named: Any, results: Any) -> None:
        """Gives values to the indices that ``topk``, ``argmax`` and the like return, so that all occur equally often.

        The values count up from row to row, modulo the size of the dim.
        """
        by_name = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | named
        x, dim = args[0], by_name.get("dim", _CHOOSING[func.overloadpacket.__name__])
        indices = results if isinstance(results, Tensor) else results[-1]
        if dim is None or not x.dim() or not 0 < indices.numel() <= MOST_ELEMENTS:
            return
        in_rows = indices.unsqueeze(dim) if indices.dim() < x.dim() else indices
        in_rows = in_rows.movedim(dim, -1)
        numbers = torch.arange(in_rows.numel()).remainder_(x.shape[dim]).view(in_rows.shape).movedim(-1, dim)
        self.give(indices, numbers.reshape(indices.shape))

    def _chosen(self, name: str, args: Any) -> list[Tensor | None] | None:
        """Returns the indices of an ``index`` call, masks as element numbers; None for unknown masks or other calls."""
        if name != "index" or any(self.values(mask) is None for mask in tensors_of(args[1])):
            return None
        indices: list[Tensor | None] = []
        for index in args[1]:
            values = None if index is None else self.values(index)
            indices += values.nonzero().unbind(1) if values is not None and values.dtype is torch.bool else [index]
        return [index if index is None else self._as_meta(index) for index in indices]

    def _all_selected(self, name: str, args: Any) -> Any:
        """Returns the result of ``nonzero``, ``masked_select`` or ``x[mask]`` for a mask that is true everywhere."""
        self.num_selected += 1
        self.num_masks += 1
        self.selected()
        x = args[0]
        if name == "nonzero":
            return self._meta_of(torch.ones(x.shape).nonzero())
        if name == "masked_select":
            return x.new_empty(torch.broadcast_shapes(x.shape, args[1].shape).numel())
        indices = [
            torch.ones(index.shape).nonzero().unbind(1) if index is not None and index.dtype is torch.bool else (index,)
            for index in args[1]
        ]
        return torch.ops.aten.index.Tensor(x, [self._as_meta(i) if i is not None else i for i in chain(*indices)])

    def _run(self, func: Any, name: str, args: Any, named: dict[str, Any]) -> Any:
        args, named = map_tensors((args, named), self._as_meta)
        if name in RANDOM:
            return undrawn(func, args, named, "meta")
        return run_on_meta(func, args, named)

    def _as_meta(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        on_meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if tensor.numel() <= MOST_ELEMENTS:
            self.give(on_meta, tensor)
        self.moved(tensor, on_meta)
        return on_meta

    def _meta_of(self, values: Tensor) -> Tensor:
        on_meta = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device="meta")
        self.give(on_meta, values)
        return on_meta

    def _on_cpu(self, tree: Any) -> Any:
        def found(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self.values(leaf)
            return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

        return tree_map(found, tree)


def _fitting(x: Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, Sequence[int], int]:
    """Returns the arguments of ``split_with_sizes``, with even sizes if all sizes are 1 and do not add up to the dim.

    Sizes of 1 then stand for numbers that only a real run has, such as each expert's number of rows.
    """
    if sum(sizes) != x.shape[dim] and set(sizes) == {1}:
        sizes = [stop - start for start, stop in pairwise(balanced(x.shape[dim], len(sizes)))]
    return x, sizes, dim


def _drawn(func: Any, args: Any, named: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
    """Runs a random operator with every drawn number replaced by 0.5, so that all ranks take the same branches."""
    device = named.get("device") or (tensors[0].device if tensors else "cpu")
    results = undrawn(func, args, named, device)
    for result in tensors_of(results):
        result.fill_(0.5)
    return results


def _slice_of(index: Any) -> slice | None:
    """Returns the slice that takes the same elements as a list of numbers, or None if there is none."""
    if not isinstance(index, list) or not index or not all(type(number) is int for number in index):
        return None
    first, last = index[0], index[-1]
    if index != list(range(first, first + len(index))) or first < 0 <= last:
        return None
    return slice(first, None if last == -1 else last + 1)


def _formatted(x: Tensor, spec: str) -> str:
    return format(x.item(), spec)


def _copied_slice(x: Tensor, index: tuple[Any, ...]) -> Tensor:
    return x[index].clone()


def _has_size_of_values(name: str, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    if name == "repeat_interleave":
        return named.get("output_size") is None
    masked = name == "index" and any(index.dtype is torch.bool for index in tensors_of(args[1]))
    return name in _UNKNOWN_SIZE or masked
