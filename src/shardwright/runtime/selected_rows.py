"""Follows the rows that a module's code selects by values, so that their random numbers do not depend on the layout.

A mixture of experts gives each expert the rows of the tokens that are routed to it::

    x        [samples * tokens, features]     row 3 is token 1 of sample 1, of two tokens each
    x[mask]  [chosen, features]               which rows these are, only a run knows

Dropout in an expert then has to draw the same numbers for token 1 of sample 1, wherever that lies on a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwright.forward_stack import Forward
from shardwright.rng import sample_indices
from shardwright.row_numbers import give_rows, is_of_rows, rows_of

_SELECT = frozenset(("getitem", "index_select"))
"""Functions that take rows of a tensor by a mask or by indices."""

_RESHAPE = frozenset((
    "reshape", "view", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze",
))  # fmt: skip
"""Functions whose result is their first argument with other dims."""

_MOVE = _RESHAPE | {"transpose", "permute", "movedim", "swapaxes", "narrow", "select", "chunk", "split", "unbind"}
"""Functions whose results hold elements of their first argument, in places that do not depend on the elements."""

_PER_ROW = frozenset((
    "linear", "matmul", "mm", "addmm", "layer_norm", "rms_norm", "dropout", "alpha_dropout", "add", "radd", "iadd",
    "sub", "rsub", "isub", "mul", "rmul", "imul", "div", "truediv", "rtruediv", "itruediv", "pow", "neg", "abs",
    "exp", "log", "sqrt", "rsqrt", "square", "reciprocal", "sigmoid", "tanh", "sin", "cos", "erf", "clamp", "clip",
    "where", "masked_fill", "relu", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "softplus",
    "softsign", "logsigmoid", "hardtanh", "hardswish", "hardsigmoid", "threshold", "to", "type", "float", "double",
    "half", "bfloat16", "clone", "contiguous", "detach", "requires_grad",
))  # fmt: skip
"""Functions that compute a row of the result from the same row of their arguments with row numbers."""

_ALONG = {"glu": 1, "softmax": 1, "log_softmax": 1, "normalize": 2}
"""Functions that compute a row from the same row if they work along the last dim; with the place of ``dim``."""

_PRODUCTS = {"linear": 0, "matmul": 0, "mm": 0, "addmm": 1}
"""Matrix products, with the place of the argument of which they keep the rows."""


APART = 2**32
"""The difference between the numbers of row 0 of two successive samples: more than a sample has rows."""


class SelectedRows(TorchFunctionMode):
    """A torch function mode that notes, for each row of ``x[mask]`` or ``x[indices]``, which token it was in ``x``.

    The note is an integer (``row_numbers.py``), which results that are computed from the rows keep.

    Tensors that code selects from are assumed to have the samples in dim 0, as its slowest factor; ``samples`` are the
    samples' indices in the global batch. Row r of sample s gets the number s * 2**32 + r. Results that are computed row
    by row have the numbers of their rows. Other results, and all that is computed from them, have no numbers, because
    they may depend on which rows were selected together.

    >>> x, mask = torch.ones(6, 4), torch.tensor([False, True, True, False, False, True])
    >>> with SelectedRows(range(4, 6)):  # two samples with three rows each
    ...     chosen = x[mask].relu() @ torch.ones(4, 2)
    >>> [divmod(number, APART) for number in rows_of(chosen).flatten().tolist()]
    [(4, 1), (4, 2), (5, 2)]
    """

    def __init__(self, samples: Sequence[int]) -> None:
        super().__init__()
        self._samples = samples

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        result = func(*args, **named)
        outputs = [
            value for value in (result if isinstance(result, tuple | list) else (result,)) if isinstance(value, Tensor)
        ]
        name, arguments = getattr(func, "__name__", "").strip("_"), [*args, *named.values()]
        if outputs and args and name in _SELECT and not is_of_rows(args[0]) and _selects(name, args):
            rows = self._numbered(args[0])
            if rows is not None:
                _move(func, name, rows, args, named, outputs)
        elif outputs and any(is_of_rows(leaf) for leaf in _flat(arguments)):
            x = _source(name, arguments)
            rows = rows_of(x)
            for output in outputs:
                give_rows(output, None)
            if rows is not None and (name in _SELECT or name in _MOVE):
                _move(func, name, rows, args, named, outputs)
            elif rows is not None and _is_along_last(name, args, named, x.dim()):
                give_rows(outputs[0], rows)
        return result

    def _numbered(self, x: Tensor) -> Tensor | None:
        """Returns the numbers of the rows of a tensor that holds whole samples; None if it cannot be one."""
        is_weight = isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)
        count, leading = len(self._samples), x.shape[:-1]
        if is_weight or x.dim() < 2 or (x.shape[0] % count if count else x.shape[0]):
            return None
        rows_per_sample = prod(leading) // max(1, count)
        with torch._C.DisableTorchFunction():
            first = sample_indices(self._samples, x.device) * APART
            return (first.view(-1, 1) + torch.arange(rows_per_sample, device=x.device)).view(*leading, 1)


def _flat(arguments: Sequence[Any]) -> Iterator[Any]:
    for argument in arguments:
        yield from argument if isinstance(argument, tuple | list) else (argument,)


def _source(name: str, arguments: Sequence[Any]) -> Any:
    """Returns the argument whose rows the result of a function has; None if there is none."""
    if name in _SELECT or name in _MOVE:
        return arguments[0]
    if name not in _PER_ROW and name not in _ALONG:
        return None
    tensors = [argument for argument in arguments if is_of_rows(argument)]
    rows = [numbers for numbers in map(rows_of, tensors) if numbers is not None]
    if len(rows) < len(tensors) or not all(_are_alike(rows[0], numbers) for numbers in rows[1:]):
        return None  # the arguments have unknown or different rows
    if name in _PRODUCTS and len(tensors) > 1:
        return None
    if name in _PRODUCTS:
        return tensors[0] if tensors[0] is arguments[_PRODUCTS[name]] else None
    return tensors[0]


def _are_alike(rows: Tensor, others: Tensor) -> bool:
    if rows.shape != others.shape or rows.is_meta:
        return rows.shape == others.shape
    with torch._C.DisableTorchFunction():  # usually the same memory, so values are rarely compared
        return rows.data_ptr() == others.data_ptr() or torch.equal(rows, others)


def _move(
    func: Any, name: str, rows: Tensor, args: tuple[Any, ...], named: Mapping[str, Any], made: Sequence[Tensor]
) -> None:
    """Gives row numbers to the results of a function that only moves the elements of its first argument."""
    if not args:
        return
    x, moved = args[0], list[Tensor]()
    with torch._C.DisableTorchFunction():
        if x.is_meta:  # on meta the selected rows are not known
            moved = [output.new_empty((*output.shape[:-1], 1), dtype=torch.int64) for output in made]
        elif name == "getitem":
            index, is_few = _of_rows(args[1], x.dim())
            moved = [(rows if is_few else rows.expand(x.shape))[index]]
        elif name == "index_select":
            moved = [rows.index_select(0, args[2])] if len(args) > 2 and args[1] == 0 and x.dim() > 1 else []
        elif name in _RESHAPE:
            moved = [rows.expand(x.shape).reshape(made[0].shape)]
        else:
            result = func(rows.expand(x.shape), *args[1:], **named)
            moved = [*result] if isinstance(result, tuple | list) else [result]
    for tensor, numbers in zip(made, moved, strict=bool(moved)):
        if name in _SELECT or prod(tensor.shape[:-1]) <= rows.numel():  # more rows than numbers: none
            give_rows(tensor, numbers)


def _is_along_last(name: str, args: tuple[Any, ...], named: Mapping[str, Any], num_dims: int) -> bool:
    """Returns False for a function that works along another dim than the last, and True for any other function."""
    if name not in _ALONG:
        return True
    place = _ALONG[name]
    dim = args[place] if len(args) > place else named.get("dim", 1 if name == "normalize" else -1)
    return dim in (-1, num_dims - 1)


def _selects(name: str, args: tuple[Any, ...]) -> bool:
    """Returns whether a function selects rows by a tensor."""
    if name == "index_select":
        return len(args) > 2 and args[1] == 0
    index = args[1]
    return isinstance(index, Tensor) or (isinstance(index, tuple) and any(isinstance(entry, Tensor) for entry in index))


def _of_rows(index: Any, num_dims: int) -> tuple[Any, bool]:
    """Returns the index to apply to row numbers, whose last dim is 1, and whether it leaves that dim as it is.

    ``index`` is that of a tensor of ``num_dims`` dims. A slice of the last dim is left out.
    """
    places = index if isinstance(index, tuple) else (index,)
    if any(entry is Ellipsis or isinstance(entry, list | bool) for entry in places):
        return index, False
    bools = (entry.dim() if entry.dtype is torch.bool else 1 for entry in places if isinstance(entry, Tensor))
    count = sum(bools) + sum(entry is not None and not isinstance(entry, Tensor) for entry in places)
    if count == num_dims and isinstance(places[-1], slice):
        return places[:-1], True
    return index, count < num_dims


class RowsForward:
    """A module's forward that follows the rows which its code selects; a copy of the module has a copy of it."""

    def __init__(self, samples: Callable[[], Sequence[int]], inner: Forward) -> None:
        self.samples, self.inner = samples, inner
        self.__wrapped__ = inner  # for inspect.signature

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Runs the forward, and returns its result."""
        with SelectedRows(self.samples()):
            return self.inner(*args, **named)
