"""Runs operators on the meta device quickly: a repeated call with the same shapes reuses the shapes of its results.

Many meta kernels are written in Python and take longer than the rest of a recorded forward, and the layers of a model
repeat each other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.dispatch_mode import DispatchMode, without_dispatch_modes

MOST_SIGNATURES = 8192
"""The number of different calls (operator with shapes and arguments) whose results' shapes are kept."""

_VIEWS = frozenset(("_unsafe_view", "_reshape_alias"))
"""Operators whose results are views, though their schemas do not say so."""

_RESIZE = frozenset(("aten::_resize_output_",))
"""Operators that change the size of their first argument, though torch has no tag on them."""


class MetaSpec(NamedTuple):
    """The shape, strides and dtype of a meta tensor, which can be a key of a dict."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """Returns a new tensor of this shape, strides and dtype on the meta device; no mode of torch sees it made."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


class _TypedValue(NamedTuple):
    """A call's argument that is not a tensor, with its type, because 1, 1.0 and True are equal as keys."""

    kind: type
    value: Any


class _NoKeyError(Exception):
    """Raised for arguments from which no key can be made."""


_ATOMS = frozenset(
    (type(None), bool, int, float, str, slice, torch.dtype, torch.device, torch.Size, torch.memory_format)
)


_TENSORS = (Tensor, nn.Parameter)


def check_not_nested(tensor: Tensor) -> None:
    """Raises ValueError for a nested tensor: its rows differ in size, but in a record each dim has one size."""
    if tensor.is_nested:
        raise ValueError("a nested tensor has rows that differ in size, which a record has no dims for")


def tensors_of(tree: Any) -> list[Tensor]:
    """Returns the tensors in nested lists, tuples and dicts, in order, several times as fast as torch's tree functions.

    >>> len(tensors_of((torch.ones(1), [torch.ones(1), None], {"x": torch.ones(1)}, 3)))
    3
    """
    return leaves_of(tree, _TENSORS)


def leaves_of(tree: Any, kinds: tuple[type, ...]) -> list[Any]:
    """Returns the values of the classes ``kinds`` in nested lists, tuples and dicts, in order; like :func:`tensors_of`.

    >>> leaves_of((range(3), [range(4), None], {"x": range(5)}), (range,))
    [range(0, 3), range(0, 4), range(0, 5)]
    """
    leaves: list[Any] = []
    _add_leaves(tree, kinds, leaves)
    return leaves


def _add_leaves(tree: Any, kinds: tuple[type, ...], leaves: list[Any]) -> None:
    kind = type(tree)
    if kind in kinds:
        leaves.append(tree)
    elif kind is tuple or kind is list:
        for value in tree:
            _add_leaves(value, kinds, leaves)
    elif kind is dict:
        for value in tree.values():
            _add_leaves(value, kinds, leaves)
    elif kind not in _ATOMS:
        leaves += [leaf for leaf in tree_leaves(tree) if isinstance(leaf, kinds)]


def cloned(tree: Any) -> Any:
    """Returns a batch with copies of its tensors, since code of a model may write to its inputs."""
    return map_tensors(tree, torch.clone)


def map_tensors(tree: Any, function: Callable[[Tensor], Any]) -> Any:
    """Returns nested values with ``function`` applied to each tensor, like torch's ``tree_map``, but faster.

    >>> map_tensors((torch.ones(1), {"x": [torch.ones(2)]}, 3), len)
    (1, {'x': [2]}, 3)
    """
    kind = type(tree)
    if kind is Tensor or kind is nn.Parameter:
        return function(tree)
    if kind is tuple or kind is list:
        return kind([map_tensors(value, function) for value in tree])
    if kind is dict:
        return {key: map_tensors(value, function) for key, value in tree.items()}
    return tree if kind in _ATOMS else tree_map_only(Tensor, function, tree)


MOST_CONDITIONS = 10_000
"""The most conditions on values that a forward may read where there are no values; then it is stopped."""


def run_on_meta(
    function: Any, args: Sequence[Any], named: Mapping[str, Any], seen: list[Hashable] | None = None
) -> Any:
    """Runs an operator on meta tensors and returns its results.

    A repeated call with equal shapes, strides, dtypes and other arguments skips the meta kernel. The operator must be
    one of torch's own, and must return new tensors, not views, or only write to its first argument, as ``add_`` does. A
    condition on values, which meta tensors lack, is true: code that asks whether a mask is all ones goes on as without
    padding. If the call can be kept, its key is appended to ``seen``: the operator, and its arguments' shapes, strides,
    dtypes and plain values.

    >>> x = torch.empty(2, 3, device="meta")
    >>> run_on_meta(torch.ops.aten.add.Tensor, (x, 1.5), {}).shape
    torch.Size([2, 3])
    >>> run_on_meta(torch.ops.aten.equal.default, (x, x), {})
    True
    """
    name = function.overloadpacket.__name__
    if name in _OWN_KERNELS and any(tensor.is_meta for tensor in tensors_of(args)):
        return _OWN_KERNELS[name](*args, **named)
    if name == "equal" and args[0].is_meta:
        return args[0].shape == args[1].shape
    if name == "_local_scalar_dense" and args[0].is_meta and args[0].dtype is torch.bool:
        return True
    is_new = _makes_new(function)
    if is_new or _writes_in_place(function):
        try:
            key = function, _specs(args), tuple([(k, _specs(v)) for k, v in named.items()])
            specs = _results(*key, torch.get_default_dtype())
            if seen is not None:
                seen.append(key)
        except _NoKeyError:
            return function(*args, **named)
        if is_new:
            return _made(specs)
        return args[0] if function._schema.returns else None  # an equal call has passed the meta kernel's checks
    return function(*args, **named)


def result_of(value: Any) -> MetaSpec | None:
    """Returns the :class:`MetaSpec` of a plain tensor on the meta device, or None for any other value.

    Complex, sparse and subclassed tensors are not plain.
    """
    try:
        spec = _specs(value)
    except _NoKeyError:
        return None
    return spec if isinstance(spec, MetaSpec) else None


class MetaOperators(DispatchMode):
    """A context in which operators on meta tensors run by :func:`run_on_meta`: equal calls run a meta kernel once.

    >>> with MetaOperators():
    ...     torch.nn.functional.gelu(torch.empty(2, 3, device="meta")).shape
    torch.Size([2, 3])
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_conditions = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ == "_local_scalar_dense":
            self._num_conditions += 1
            check_ends(self._num_conditions)
        return run_on_meta(function, args, kwargs or {})


def check_ends(num_conditions: int) -> None:
    """Raises RuntimeError if code has read so many conditions on values that a loop probably waits for a change."""
    if num_conditions > MOST_CONDITIONS:
        raise RuntimeError(
            f"the forward has asked {num_conditions:,} times for a condition on values, which count as true without "
            "values: a loop that ends when values say so cannot be planned"
        )


def _product_of_groups(x: Tensor, w: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """Returns the result of ``_grouped_mm`` for any dtype; torch's meta kernel accepts bf16 alone."""
    groups = x.shape[:-2] if x.dim() == w.dim() == 3 else offs.shape if x.dim() == w.dim() else ()
    return x.new_empty(*groups, x.shape[-2], w.shape[-1], dtype=out_dtype)


def _ctc_loss(log_probs: Tensor, targets: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Returns meta results of ``_ctc_loss``: a loss for each sample, and the most that its backward may need."""
    num_steps, num_samples = log_probs.shape[:2] if log_probs.dim() == 3 else (len(log_probs), 1)
    longest = targets.shape[1] if targets.dim() > 1 else targets.numel()
    return log_probs.new_empty(num_samples), log_probs.new_empty(num_samples, num_steps, 2 * longest + 1)


def _bincount(indices: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Returns a meta result of ``bincount`` with ``minlength`` counts, as if no index were larger.

    Raises: NotImplementedError: ``minlength`` is 0, so that values decide how many counts there are.
    """
    if not minlength:
        raise NotImplementedError("without minlength, the number of counts of 'bincount' is that of a real run only")
    dtype = torch.int64 if weights is None else weights.dtype if weights.dtype is torch.float32 else torch.float64
    return indices.new_empty(minlength, dtype=dtype)


def _like_scores(grad: Tensor, scores: Tensor, *_: Any, **__: Any) -> Tensor:
    """Returns a meta result of a loss's backward: torch's kernels divide by the number of elements, which may be 0."""
    return torch.empty_like(scores)


_OWN_KERNELS: Mapping[str, Callable[..., Any]] = {
    "bincount": _bincount,
    "_grouped_mm": _product_of_groups,
    "_ctc_loss": _ctc_loss,
    "_ctc_loss_backward": _like_scores,
    **dict.fromkeys(("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward"), _like_scores),
    "binary_cross_entropy_backward": _like_scores,
}
"""Operators whose meta kernel in torch is missing, takes few dtypes only, or fails on tensors without elements.

Each is mapped to the function that runs in its place.
"""


@cache
def _makes_new(function: Any) -> bool:
    """Whether an operator writes to no argument and returns new tensors, not views."""
    schema = function._schema
    every = [*schema.arguments, *schema.returns]
    known = function.namespace == "aten" and function.overloadpacket.__name__ not in _VIEWS
    return known and all(argument.alias_info is None for argument in every)


@cache
def _writes_in_place(function: Any) -> bool:
    """Whether an operator only changes the values of its first argument, as ``add_`` does, and returns it or nothing.

    The argument may be a list, as in ``_foreach_add_``.
    """
    schema, tags = function._schema, function.tags
    if function.namespace != "aten" or torch.Tag.inplace_view in tags or schema.name in _RESIZE:
        return False
    # a returned argument counts as an alias too: there is one alias and no return, or two aliases and one return
    aliases = [argument.alias_info for argument in (*schema.arguments, *schema.returns)]
    is_first = bool(aliases) and aliases[0] is not None and aliases[0].is_write and schema.name.endswith("_")
    return is_first and len(aliases) - aliases.count(None) == 1 + len(schema.returns) <= 2


def _specs(value: Any) -> Any:
    if isinstance(value, Tensor):
        plain = type(value) in (Tensor, nn.Parameter) and value.is_meta and value.layout is torch.strided
        if not plain or value.dtype.is_complex:
            raise _NoKeyError
        return MetaSpec(tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(map(_specs, value))
    return _TypedValue(type(value), value)


def _made(spec: Any) -> Any:
    """Returns the nested results that a key describes: new tensors for each :class:`MetaSpec`, and the constants."""
    if isinstance(spec, MetaSpec):
        return spec.tensor()
    return spec.value if isinstance(spec, _TypedValue) else tuple(map(_made, spec))


@lru_cache(maxsize=MOST_SIGNATURES)
def _results(function: Any, args: Any, named: Any, _: torch.dtype) -> Any:
    with without_dispatch_modes():  # modes do not see this call, as they will not see calls that use the cache
        return _specs(function(*_made(args), **{key: _made(value) for key, value in named}))
