"""Runs a user's own forward on tensor shards as if each were the whole tensor, much as on DTensors.

Parameters are tagged with the shard that a rank holds (``sharding/tensor_shard.py``). Under :class:`ShardsMode` every
function that gets a tagged tensor runs as ``call_plans.py`` plans it, and its results are tagged; control flow, routing
and modules that are called twice need no care. Sizes are those of the whole: ``x.shape``, ``x.size()`` and ``len(x)``
of a shard give the size of the whole tensor, so that all of the user's arithmetic with sizes is that of one device.

A call is planned once for each signature: the function, the shards and shapes of its tensors, its other arguments.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MethodWrapperType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from shardwright.analysis.calls.checkpoint_calls import prepare_checkpoint, saved_by
from shardwright.analysis.calls.recurrent_calls import RECURRENT
from shardwright.analysis.on_meta.meta_values import ValueReadError
from shardwright.comm.autograd import cut_to_whole, sum_gradient, whole_to_cut
from shardwright.comm.axis import Axis
from shardwright.dispatch_mode import without_dispatch_modes
from shardwright.errors import PlanError
from shardwright.operator_schemas import writes
from shardwright.sharding.tensor_shard import ALL, TensorShard, held, tag, tagged
from shardwright.strategies.tensor_parallel.call_plans import (
    CallPlan,
    NotOnShardsError,
    OperandChange,
    ShardUse,
    WriteToShardError,
    like,
    plan_call,
)
from shardwright.strategies.tensor_parallel.ready_calls import ReadyCall, has_shard, signature_of
from shardwright.strategies.tensor_parallel.recurrent import recurrent_on_shards
from shardwright.strategies.tensor_parallel.vocabulary_on_shards import cross_entropy_on_shards, embedding_on_shards

NUM_COPIES = 4
"""The number of most recently used tensors for which several layers share one all-reduce of the gradient.

So q, k and v layers need one all-reduce for their common input. The cross-attentions of all layers of a decoder need
one for the encoder's output: between two uses of it, a layer uses three other tensors.
"""

MOST_PLANS = 20_000
"""The number of planned calls that are cached; when it is reached the cache is emptied."""

# torch's stubs declare properties of C as plain attributes
_SIZES_OF_WHOLE: Mapping[Any, Callable[[TensorShard], Any]] = {
    Tensor.shape.__get__: lambda shard: shard.shape,  # type: ignore[attr-defined]
    Tensor.ndim.__get__: lambda shard: len(shard.shape),  # type: ignore[attr-defined]
    Tensor.dim: lambda shard: len(shard.shape),
    Tensor.ndimension: lambda shard: len(shard.shape),
    Tensor.numel: lambda shard: prod(shard.shape),
    Tensor.nelement: lambda shard: prod(shard.shape),
    torch.numel: lambda shard: prod(shard.shape),
    Tensor.__len__: lambda shard: shard.shape[0],
}
_OF_MEMORY: Mapping[Any, Callable[[Tensor, TensorShard], Any]] = {
    Tensor.stride: lambda x, shard: like(x, shard.shape).stride(),
    Tensor.nbytes.__get__: lambda x, shard: prod(shard.shape) * x.element_size(),  # type: ignore[attr-defined]
}
"""Functions that ask for facts of a tensor's memory, and how to compute the whole tensor's answer from a shard.

Strides are those of a whole tensor whose dims lie in the same order.
"""

_READS = frozenset(
    (Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__contains__,
     Tensor.__repr__, Tensor.__index__)
)  # fmt: skip
_OF_PARTS = frozenset(
    (Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.element_size,
     Tensor.get_device, Tensor.data_ptr, Tensor.storage_offset, Tensor.requires_grad_, Tensor.register_hook,
     Tensor.retain_grad, Tensor.untyped_storage, torch.is_floating_point, torch.is_complex)
)  # fmt: skip
"""The functions that give for a shard the same answer as for the whole, or concern the shard itself."""
_ANSWERED = frozenset((*_SIZES_OF_WHOLE, *_OF_MEMORY, Tensor.size, *_READS, *_OF_PARTS))


_OF_VOCABULARY: Mapping[Any, Callable[..., Tensor | None]] = {
    functional.cross_entropy: cross_entropy_on_shards,
    functional.embedding: embedding_on_shards,
}
"""Replacements that compute these functions on shards, with sums over the ranks that hold the other rows or classes."""

_RESHAPES_IN_PLACE = frozenset(
    (Tensor.unsqueeze_, Tensor.squeeze_, Tensor.transpose_, Tensor.t_, Tensor.swapaxes_, Tensor.swapdims_)
)


_BY_MEMORY = frozenset((Tensor.as_strided, torch.as_strided))
"""Functions whose results depend on how a tensor lies in memory."""


def _is_dense(x: Tensor) -> bool:
    """Returns whether a tensor is all of its memory, in order: then the whole, which is gathered, is so too."""
    with torch._C.DisableTorchFunction():
        return x.is_contiguous() and x.storage_offset() == 0 and x.untyped_storage().nbytes() == x.nbytes


class ShardsMode(TorchFunctionMode):
    """A torch function mode under which functions run on this rank's tensor shards and give shards as results.

    Where a function cannot run on shards, its tensors are all-gathered; ``gathered`` counts these calls by the
    function's name. All ranks of ``axis`` must run the same functions. A function raises PlanError if it writes in
    place to a shard and needs the whole, if it writes to a copy that was all-gathered, or if it registers a user's hook
    on the gradient of a shard.

    >>> import torch
    >>> from shardwright.comm.launch import run_on_threads
    >>> from shardwright.mesh import Mesh
    >>> from shardwright.sharding.tensor_shard import shard_of, tag
    >>> def work(axes):
    ...     rank, x = axes["tp"].index, torch.ones(1, 2)
    ...     up, down = torch.ones(2, 2), torch.ones(2, 2)  # of layers 2 -> 4 -> 2
    ...     tag(up, shard_of((4, 2), (bytes([0, 0, 1, 1]), None)))
    ...     tag(down, shard_of((2, 4), (None, bytes([0, 0, 1, 1]))))
    ...     with ShardsMode(axes["tp"]):
    ...         middle = torch.nn.functional.linear(x, up)
    ...         return list(middle.shape), torch.nn.functional.linear(middle, down).tolist()
    >>> run_on_threads(Mesh(tp=2), work)[1]
    ([1, 4], [[8.0, 8.0]])
    """

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.gathered: Counter[str] = Counter()
        self.num_planned = 0
        self.depth = 0
        self.prepared: Callable[..., Any] | None = None
        """Passed to :func:`prepare_checkpoint` when a function runs inside of a checkpoint."""
        self._saved_by: Any = None
        self._plans: dict[Any, ReadyCall] = {}
        self._gathered: list[torch.UntypedStorage] = []  # copies in this forward: what is written there is lost
        self._copies: deque[tuple[Tensor, int, Tensor]] = deque(maxlen=NUM_COPIES)

    def __enter__(self) -> ShardsMode:
        self.depth += 1
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.depth -= 1
        super().__exit__(*error)
        self._saved_by = None
        self._copies.clear()
        self._gathered.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._gathered and args and writes(func):
            self._check_write(func, args[0])
        if not has_shard(args) and not (kwargs and has_shard(kwargs.values())):
            return func(*args, **kwargs) if kwargs else func(*args)
        named: dict[str, Any] = dict(kwargs) if kwargs else {}
        if func in _ANSWERED:
            return self._answer(func, args, named)
        if func is torch._cudnn_rnn_flatten_weight:  # for cuDNN alone: it would copy whole weights
            return None
        if type(func) is MethodWrapperType:  # .dtype, .device, .requires_grad; views such as .T are planned
            result = func(*args, **named)
            if not isinstance(result, Tensor) or result is args[0]:
                return result
        return self._call(func, args, named)

    def _answer(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Answers a question about a tensor: its whole size, a fact that holds for a shard too, or its gathered values.

        If none of these can answer ``func``, it runs as a call on shards.
        """
        shard = tagged(args[0]) if args and isinstance(args[0], Tensor) else None
        if shard is not None:
            size = _SIZES_OF_WHOLE.get(func)
            if size is not None and sys._getframe(2).f_globals.get("__name__") == "torch.utils.checkpoint":
                return func(*args, **named)  # it compares shapes with those of a run without this mode
            if size is not None:
                return size(shard)
            if func is Tensor.size:
                dim = args[1] if len(args) > 1 else named.get("dim")
                return shard.shape if dim is None else shard.shape[dim]
            memory = _OF_MEMORY.get(func)
            if memory is not None:
                answer = memory(args[0], shard)
                dim = args[1] if len(args) > 1 else named.get("dim")
                return answer if dim is None else answer[dim]
        if func in _OF_PARTS:
            if func is Tensor.register_hook:
                _check_hook(args[1] if len(args) > 1 else named["hook"])
            return func(*args, **named)
        if func in _READS:
            args, named = tree_map_only(Tensor, self.whole, (args, named))
            return func(*args, **named)
        return self._call(func, args, named)

    def _call(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if (saving := saved_by()) is not self._saved_by:  # code runs inside of a checkpoint, or outside of one again
            self._saved_by = saving
            if self.prepared is not None:
                prepare_checkpoint(self.prepared)
        if func in RECURRENT:
            return recurrent_on_shards(self, func, args, named)
        if func in _OF_VOCABULARY:
            output = _OF_VOCABULARY[func](self.axis, *args, **named)
            if output is not None:
                return output
        key, tensors = signature_of(func, args, named)
        try:
            planned = self._plans.get(key)
        except TypeError:  # an argument that cannot be compared
            key, planned = (), None
        if planned is None:
            planned = ReadyCall(self._planned(func, args, named))
            if len(self._plans) >= MOST_PLANS:  # arguments that change with every step
                self._plans.clear()
            if key:
                self._plans[key] = planned
        return planned.run(self, func, args, named, tensors)

    def on_whole(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Runs a call that cannot run on shards on tensors that are all-gathered first, and counts it in ``gathered``.

        Raises PlanError for a call that writes to its first argument.
        """
        name = getattr(func, "__name__", str(func))
        if writes(func):
            raise _no_write(name)
        self.gathered[name] += 1
        flat, spec = tree_flatten((args, named))
        whole = [self.whole(x) if isinstance(x, Tensor) else x for x in flat]
        self._gathered += [a.untyped_storage() for a, b in zip(whole, flat, strict=True) if a is not b]
        args, named = tree_unflatten(whole, spec)
        return func(*args, **named)

    def _check_write(self, func: Any, tensor: Any) -> None:
        """Raises PlanError if code writes in place to an all-gathered copy, or to a view of one."""
        if isinstance(tensor, Tensor):
            place = tensor.untyped_storage()._cdata
            if any(storage._cdata == place for storage in self._gathered):
                raise _no_write(getattr(func, "__name__", str(func)))

    def _planned(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> CallPlan | None:
        """Returns the plan of a call; None if it cannot run on shards and so runs on whole tensors.

        Raises PlanError for a call that writes to a shard and needs the whole.
        """
        if func in _BY_MEMORY and not all(_is_dense(x) for x in (args[:1] or named.values()) if isinstance(x, Tensor)):
            raise PlanError(
                "'as_strided' reads the memory of a tensor of which each rank holds a shard",
                given="a tensor that tp cuts, transposed or a part of another one",
                allowed="contiguous tensors",
                fix="write x = x.contiguous() before, use x.unfold in place of as_strided, or leave out tp",
            )
        if func in _RESHAPES_IN_PLACE:  # the tag would keep the old shape
            raise _no_write(func.__name__)
        self.num_planned += 1
        flat, spec = tree_flatten((args, named))
        on_meta: dict[int, Tensor] = {}
        tensors = []
        for x in flat:
            if isinstance(x, Tensor):
                shard = tagged(x)
                with without_dispatch_modes():  # a rehearsal would count it as an activation
                    made = on_meta.setdefault(id(x), like(x, x.shape if shard is None else shard.shape))
                tensors.append(ShardUse(made, shard, x.requires_grad))
        device = next(x.device for x in flat if isinstance(x, Tensor))
        args, named = tree_unflatten([on_meta[id(x)] if isinstance(x, Tensor) else x for x in flat], spec)
        try:
            return plan_call(func, args, named, tensors, self.axis.index, device)
        except (NotOnShardsError, ValueReadError):
            return None
        except WriteToShardError as name:
            raise _no_write(str(name)) from None

    def refuse_write(self, function: Any) -> PlanError:
        """Returns the error for an operator that writes to a tensor that needs to be whole."""
        return _no_write(getattr(function, "__name__", str(function)))

    def changed(self, x: Tensor, change: OperandChange, gradient_is_new: bool) -> Tensor:
        """Returns an operand as a planned operator needs it: gathered, sliced, or with its gradients summed.

        ``gradient_is_new`` tells that the operator's backward makes a new tensor for the gradient of this operand.
        """
        if change.kind == "gather":
            whole = self._gather(x, change.dim, change.cut)
            self._gathered.append(whole.untyped_storage())  # the result may be a view of it
            return whole
        if change.kind == "slice":
            return self._slice(x, change.dim, change.cut)
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        for place, known in enumerate(self._copies):
            before, version, made = known
            if before is x and x._version == version:
                if not gradient_is_new and made.grad_fn is not None:
                    made.grad_fn.overwrite = False  # type: ignore[attr-defined]  # an attribute of our function
                del self._copies[place]
                self._copies.append(known)  # now the last to be dropped
                return made
        made = sum_gradient(x, self.axis, overwrite=gradient_is_new)
        self._copies.append((x, x._version, made))
        return made

    def _gather(self, x: Tensor, dim: int, cut: bytes) -> Tensor:
        if ALL in cut:
            return self._gather_partly(x, dim, cut)
        whole = cut_to_whole(x, self.axis, dim, [cut.count(rank) for rank in range(self.axis.size)])
        order = [index for rank in range(self.axis.size) for index in held(cut, rank)]
        return whole if order == sorted(order) else whole.index_select(dim, _inverse(order, x.device))

    def _gather_partly(self, x: Tensor, dim: int, cut: bytes) -> Tensor:
        """Returns a tensor with a dim all-gathered of which some elements are on every rank already."""
        mine = held(cut, self.axis.index)
        own = [at for at, index in enumerate(mine) if cut[index] != ALL]
        common = [at for at, index in enumerate(mine) if cut[index] == ALL]
        sizes = [cut.count(rank) for rank in range(self.axis.size)]
        gathered = cut_to_whole(_chosen(x, dim, own), self.axis, dim, sizes)
        order = [index for rank in range(self.axis.size) for index, label in enumerate(cut) if label == rank]
        order += [index for index, label in enumerate(cut) if label == ALL]
        return torch.cat([gathered, _chosen(x, dim, common)], dim).index_select(dim, _inverse(order, x.device))

    def _slice(self, x: Tensor, dim: int, cut: bytes) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled():
            order = [index for rank in range(self.axis.size) for index in held(cut, rank)]
            if order != sorted(order):
                x = x.index_select(dim, torch.tensor(order, device=x.device))
            return whole_to_cut(x, self.axis, dim, [cut.count(rank) for rank in range(self.axis.size)])
        return _chosen(x, dim, held(cut, self.axis.index))

    def as_shard(self, x: Tensor, shard: TensorShard | None) -> Tensor:
        """Returns ``x``, or the whole tensor that ``x`` is a shard of, cut as ``shard`` says.

        The result is whole if ``shard`` is None or has another shape.

        Traffic: one all-gather for each dim that is cut, unless ``x`` is cut as ``shard`` is.
        """
        if tagged(x) == shard:
            return x
        with torch._C.DisableTorchFunction():
            x = self.whole(x)
            if shard is None or x.shape != shard.shape:
                return x
            for dim, cut in enumerate(shard.cuts):
                if cut is not None:
                    x = self._slice(x, dim, cut)
        tag(x, shard)
        return x

    def whole(self, x: Tensor) -> Tensor:
        """Returns the whole of a tensor that is a shard, all-gathered; any other tensor unchanged.

        Traffic: one all-gather for each dim that is cut.
        """
        shard = tagged(x)
        for dim, cut in enumerate(shard.cuts if shard is not None else ()):
            if cut is not None:
                x = self._gather(x, dim, cut)
        return x


def _no_write(name: str) -> PlanError:
    return PlanError(
        f"'{name}' writes to a tensor of which each rank holds a shard, and needs the whole",
        given="a tensor that tp cuts, changed in place",
        allowed="operators that compute each element alone, in place",
        fix="write x = f(x) in place of x.f_(), or leave out tp",
    )


def _check_hook(hook: Any) -> None:
    """Raises PlanError for a user's hook on the gradient of a shard, which would get only a shard of the gradient."""
    function = getattr(hook, "func", hook)
    if not str(getattr(function, "__module__", "")).startswith("shardwright."):
        raise PlanError(
            "a hook is registered on the gradient of a tensor of which each rank holds a shard",
            given=getattr(function, "__qualname__", repr(function)),
            allowed="hooks on the gradients of whole tensors, and hooks on parameters",
            fix="leave out the hook, or tp",
        )


def _chosen(x: Tensor, dim: int, indices: Sequence[int]) -> Tensor:
    if not indices or tuple(indices) == tuple(range(indices[0], indices[0] + len(indices))):
        return x.narrow(dim, indices[0] if indices else 0, len(indices))
    return x.index_select(dim, torch.tensor(indices, device=x.device))


def _inverse(order: Sequence[int], device: torch.device) -> Tensor:
    inverse = [0] * len(order)
    for at, index in enumerate(order):
        inverse[index] = at
    return torch.tensor(inverse, device=device)
