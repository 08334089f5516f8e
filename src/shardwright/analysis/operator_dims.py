"""What each operator does with the dims of its tensors: one table, which planning and execution both read.

An operator's dims are written in *letters*, as in ``torch.einsum``. A letter is one independent index. A dim is
a product of letters, or several dims end to end::

    mm          x (t, k)   w (k, h)        ->  (t, h)              k is summed
    view        x (b, t, (h d))            ->  (b, t, h, d)
    cat         x (a, c)   y (b, c)        ->  ([a b], c)          end to end
    softmax     x (b, s)                   ->  (b, s)              s is needed whole

A letter that several tensors have is the same index in all: if one of them is cut along it, all must be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import prod
from typing import Any

import torch

from shardwright.analysis.recording import RecordedCall, TensorUse


class Role(Enum):
    """What an operator needs of a letter."""

    SAME = auto()
    """Nothing: each index is computed alone."""
    SUM = auto()
    """The results of the parts are added."""
    WHOLE = auto()
    """All of it: the operator cannot be cut along it."""
    LOOKUP = auto()
    """Rows that an index chooses."""


@dataclass(frozen=True, slots=True)
class Concat:
    """Dims end to end."""

    parts: tuple[Dim, ...]


Dim = tuple["int | Concat", ...]
"""A dim as a product of letters, the slowest first; no letters for a dim of one element."""

Dims = tuple[Dim, ...]


class Letters:
    """The letters of one operator: their sizes and roles.

    >>> letters = Letters()
    >>> dims = letters.of((2, 1, 3))
    >>> dims, letters.sizes, letters.size((*dims[0], *dims[2]))
    (((0,), (), (1,)), [2, 3], 6)
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.roles: list[Role] = []

    def new(self, size: int, role: Role = Role.SAME) -> Dim:
        """Returns a dim of one new letter; of none for one element."""
        if size == 1:
            return ()
        self.sizes.append(int(size))
        self.roles.append(role)
        return (len(self.sizes) - 1,)

    def piece(self, size: int) -> Dim:
        """Returns a dim of one new letter, which may be one of several dims end to end."""
        self.sizes.append(int(size))
        self.roles.append(Role.SAME)
        return (len(self.sizes) - 1,)

    def of(self, shape: Sequence[int], role: Role = Role.SAME) -> Dims:
        """Returns a new letter for each dim of a shape."""
        return tuple(self.new(size, role) for size in shape)

    def size(self, dim: Dim) -> int:
        """Returns the number of elements of a dim."""
        return prod(sum(map(self.size, p.parts)) if isinstance(p, Concat) else self.sizes[p] for p in dim)


@dataclass(slots=True)
class Relation:
    """The dims of an operator's operands and results, in letters; None for an operand whose dims take no part."""

    letters: Letters
    operands: list[Dims | None]
    results: list[Dims]
    addend: int | None = None
    """The operand that is added once, after the sum: the bias of a product."""


Rule = Callable[[RecordedCall, Letters], tuple[Sequence["Dims | None"], Sequence[Dims]]]
_RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return add


def relation_of(call: RecordedCall) -> Relation:
    """Returns how the dims of an operator's tensors go together; an operator without a rule needs every dim whole.

    An operator that writes in place (``add_``) has the rule of the one that does not.
    """
    letters, name = Letters(), call.name
    operands, results = (_RULES.get(name) or _RULES.get(name.rstrip("_")) or _whole)(call, letters)
    addend = 0 if name in ("addmm", "baddbmm") else 2 if name in ("linear", "convolution") else None
    return Relation(letters, list(operands), list(results), addend)


def _whole(call: RecordedCall, a: Letters) -> Any:
    return [a.of(v.shape, Role.WHOLE) for v in call.operands], [a.of(v.shape, Role.WHOLE) for v in call.results]


# ---- elementwise


def _broadcast(shape: Sequence[int], dims: Dims) -> Dims:
    own = dims[len(dims) - len(shape) :]
    return tuple(() if size == 1 else dim for size, dim in zip(shape, own, strict=True))


def _pointwise(call: RecordedCall, a: Letters) -> Any:
    shape = max((r.shape for r in call.results), key=len) if call.results else call.operands[0].shape
    dims = a.of(shape)
    return [_broadcast(v.shape, dims) for v in call.operands], [_broadcast(r.shape, dims) for r in call.results]


# fmt: off
_POINTWISE = (
    "_to_copy", "abs", "add", "addcdiv", "addcmul", "alias", "atan2", "bernoulli", "bitwise_and", "bitwise_not",
    "bitwise_or", "bitwise_xor", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clone", "contiguous", "copy",
    "cos", "cosh", "detach", "div", "elu", "empty_like", "eq", "erf", "exp", "expm1", "fill", "floor", "floor_divide",
    "fmod", "full_like", "ge", "gelu", "gt", "hardsigmoid", "hardswish", "hardtanh", "heaviside", "isfinite", "isinf",
    "isnan", "le", "leaky_relu", "lerp", "lift_fresh", "log", "log10", "log1p", "log2", "log_sigmoid",
    "log_sigmoid_forward", "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "maximum",
    "minimum", "mish", "mul", "nan_to_num", "native_dropout", "ne", "neg", "new_empty_strided", "ones_like", "pow",
    "prelu", "rand_like", "randn_like", "reciprocal", "relu", "relu6", "remainder", "round", "rsqrt", "rsub",
    "sigmoid", "sign", "silu", "sin", "sinh", "softplus", "sqrt", "square", "sub", "tan", "tanh", "threshold", "to",
    "true_divide", "trunc", "where", "xlogy", "zero", "zeros_like",
)
# fmt: on
_RULES.update(dict.fromkeys(_POINTWISE, _pointwise))


# ---- views


def _group(a: Letters, before: Sequence[int], after: Sequence[int]) -> tuple[Dims, Dims]:
    """The letters of a reshape: the finest common factors, from the fastest dim on."""
    left: list[list[int | Concat]] = [[] for _ in before]
    right: list[list[int | Concat]] = [[] for _ in after]
    rest = [(d, size) for d, size in enumerate(before) if size > 1]  # what is left of each dim, the fastest last
    other = [(d, size) for d, size in enumerate(after) if size > 1]
    while rest and other:
        (i, x), (j, y) = rest.pop(), other.pop()
        if x % y == 0 or y % x == 0:
            size = min(x, y)
            (letter,) = a.new(size)
            left[i].insert(0, letter)
            right[j].insert(0, letter)
            rest += [(i, x // size)] * (x > size)
            other += [(j, y // size)] * (y > size)
            continue
        # the factors overlap: both groups are needed whole, to where they end together
        ones, others = [(i, x)], [(j, y)]
        while (p := prod(size for _, size in ones)) != (q := prod(size for _, size in others)):
            (ones if p < q else others).append((rest if p < q else other).pop())
        for dims, group in ((left, ones), (right, others)):
            for d, size in group:
                dims[d][:0] = a.new(size, Role.WHOLE)
    return tuple(map(tuple, left)), tuple(map(tuple, right))


@_rule("view", "_unsafe_view", "reshape", "_reshape_alias")
def _view(call: RecordedCall, a: Letters) -> Any:
    x, y = call.operands[0], call.results[0]
    if 0 in x.shape:
        return _whole(call, a)
    before, after = _group(a, x.shape, y.shape)
    return [before], [after]


@_rule("t", "transpose", "permute", "numpy_T", "swapaxes")
def _permute(call: RecordedCall, a: Letters) -> Any:
    x = call.operands[0]
    n, dims = len(x.shape), a.of(x.shape)
    if call.name == "permute":
        order = [d % n for d in call.args[1]]
    else:
        order = list(range(n))
        if n > 1:
            one, other = (0, 1) if call.name == "t" else (call.args[1] % n, call.args[2] % n)
            order[one], order[other] = order[other], order[one]
    return [dims], [tuple(dims[d] for d in order)]


@_rule("unsqueeze", "squeeze", "squeeze_dims")
def _squeeze(call: RecordedCall, a: Letters) -> Any:
    before, after = _group(a, call.operands[0].shape, call.results[0].shape)
    return [before], [after]


@_rule("expand", "broadcast_to")
def _expand(call: RecordedCall, a: Letters) -> Any:
    dims = a.of(call.results[0].shape)
    return [_broadcast(call.operands[0].shape, dims)], [dims]


@_rule("repeat")
def _repeat(call: RecordedCall, a: Letters) -> Any:
    x, y = call.operands[0].shape, call.results[0].shape
    own = a.of(x)
    padded = (*(() for _ in range(len(y) - len(x))), *own)
    shape = (*(1 for _ in range(len(y) - len(x))), *x)
    return [own], [tuple((*a.new(n // m), *dim) for n, m, dim in zip(y, shape, padded, strict=True))]


@_rule("slice", "narrow")
def _slice(call: RecordedCall, a: Letters) -> Any:
    x, y = call.operands[0].shape, call.results[0].shape
    if call.name == "narrow":
        dim, start, step = call.args[1] % len(x), call.args[2], 1
    else:
        dim, start = call.argument(1, "dim", 0) % len(x), call.argument(2, "start") or 0
        step = call.argument(4, "step", 1)
    n, m = x[dim], y[dim]
    start = min(max(start + n if start < 0 else start, 0), n)
    own = list(a.of([1 if d == dim else size for d, size in enumerate(x)]))
    out = list(own)
    if step == 1:
        kept = a.piece(m)
        parts = tuple(p for p in ((a.piece(start), start), (kept, m), (a.piece(n - start - m), n - start - m)) if p[1])
        own[dim] = parts[0][0] if len(parts) == 1 else (Concat(tuple(p for p, _ in parts)),)
        out[dim] = kept
    elif n % step == 0 and m == n // step:
        kept = a.new(m)
        own[dim], out[dim] = (*kept, *a.new(step, Role.WHOLE)), kept
    else:
        own[dim], out[dim] = a.new(n, Role.WHOLE), a.new(m)
    return [tuple(own)], [tuple(out)]


@_rule("select")
def _select(call: RecordedCall, a: Letters) -> Any:
    x = call.operands[0].shape
    dim = call.args[1] % len(x)
    own = [a.new(n, Role.WHOLE if d == dim else Role.SAME) for d, n in enumerate(x)]
    return [tuple(own)], [tuple(own[:dim] + own[dim + 1 :])]


@_rule("unbind")
def _unbind(call: RecordedCall, a: Letters) -> Any:
    x = call.operands[0].shape
    dim = call.argument(1, "dim", 0) % len(x)
    own = [a.new(n, Role.WHOLE if d == dim else Role.SAME) for d, n in enumerate(x)]
    return [tuple(own)], [tuple(own[:dim] + own[dim + 1 :])] * len(call.results)


@_rule("split", "split_with_sizes", "chunk", "unsafe_split", "tensor_split")
def _split(call: RecordedCall, a: Letters) -> Any:
    x = call.operands[0].shape
    dim = call.argument(2, "dim", 0) % len(x)
    own = list(a.of([1 if d == dim else n for d, n in enumerate(x)]))
    pieces = [(a.piece(r.shape[dim]), r.shape[dim]) for r in call.results]
    outs = [(*own[:dim], piece, *own[dim + 1 :]) for piece, _ in pieces]
    kept = tuple(piece for piece, n in pieces if n)
    own[dim] = kept[0] if len(kept) == 1 else (Concat(kept),)
    return [tuple(own)], outs


@_rule("cat", "concat", "concatenate")
def _cat(call: RecordedCall, a: Letters) -> Any:
    y = call.results[0].shape
    dim = call.argument(1, "dim", 0) % len(y)
    rest = a.of([1 if d == dim else n for d, n in enumerate(y)])
    operands: list[Dims] = []
    for v in call.operands:
        if len(v.shape) != len(y):  # an old rule: an empty 1-D tensor joins anything
            operands.append(a.of(v.shape))
        else:
            operands.append((*rest[:dim], a.piece(v.shape[dim]), *rest[dim + 1 :]))
    joined = [o[dim] for o, v in zip(operands, call.operands, strict=True) if len(v.shape) == len(y) and v.shape[dim]]
    pieces = tuple(joined)
    return operands, [(*rest[:dim], pieces[0] if len(pieces) == 1 else (Concat(pieces),), *rest[dim + 1 :])]


@_rule("stack")
def _stack(call: RecordedCall, a: Letters) -> Any:
    y = call.results[0].shape
    dim = call.argument(1, "dim", 0) % len(y)
    own = a.of(call.operands[0].shape)
    return [own for _ in call.operands], [(*own[:dim], a.new(y[dim], Role.WHOLE), *own[dim:])]


@_rule("constant_pad_nd", "pad")
def _pad(call: RecordedCall, a: Letters) -> Any:
    x, y = call.operands[0].shape, call.results[0].shape
    pads = list(call.args[1])
    own, out = [], []
    for d, (n, m) in enumerate(zip(x, y, strict=True)):
        place = len(x) - 1 - d
        low, high = (pads[2 * place], pads[2 * place + 1]) if 2 * place < len(pads) else (0, 0)
        letter = a.new(n) if low >= 0 and high >= 0 else a.new(n, Role.WHOLE)
        own.append(letter)
        if n == m:
            out.append(letter)
        elif low >= 0 and high >= 0:
            out.append((Concat(tuple(p for p, s in ((a.new(low), low), (letter, n), (a.new(high), high)) if s)),))
        else:
            out.append(a.new(m))
    return [tuple(own)], [tuple(out)]


@_rule("flip", "roll")
def _flip(call: RecordedCall, a: Letters) -> Any:
    x = call.operands[0].shape
    dims = call.args[1] if call.name == "flip" else (call.argument(2, "dims") or range(len(x)))
    moved = {d % len(x) for d in dims}
    own = tuple(a.new(n, Role.WHOLE if d in moved else Role.SAME) for d, n in enumerate(x))
    return [own], [own]


# ---- products


@_rule("mm", "bmm")
def _product(call: RecordedCall, a: Letters) -> Any:
    x, w = call.operands
    batch = a.of(x.shape[:-2])
    rows, inner, columns = a.new(x.shape[-2]), a.new(x.shape[-1], Role.SUM), a.new(w.shape[-1])
    return [(*batch, rows, inner), (*batch, inner, columns)], [(*batch, rows, columns)]


@_rule("_grouped_mm")
def _grouped_product(call: RecordedCall, a: Letters) -> Any:
    """Rows of x, or columns of w, come in groups that the values of ``offs`` bound; with neither in 3 dims, the sum."""
    x, w, *others = call.operands
    matrices = len(x.shape) == len(w.shape) == 2
    of_groups = a.new(next((each.shape[0] for each in (x, w) if len(each.shape) == 3), 0), Role.WHOLE)
    rows = a.new(x.shape[-2], Role.SAME if len(x.shape) == 3 or matrices else Role.WHOLE)
    inner = a.new(x.shape[-1], Role.WHOLE if matrices else Role.SUM)
    columns = a.new(w.shape[-1], Role.SAME if len(w.shape) == 3 or matrices else Role.WHOLE)
    ins = [(*([of_groups] * (len(x.shape) - 2)), rows, inner), (*([of_groups] * (len(w.shape) - 2)), inner, columns)]
    out = (*a.of(call.results[0].shape[:-2], Role.WHOLE), rows, columns)
    return [*ins, *(a.of(each.shape, Role.WHOLE) for each in others)], [out]


@_rule("addmm", "baddbmm")
def _add_product(call: RecordedCall, a: Letters) -> Any:
    (x, w), (y,) = _product(RecordedCall(call.function, call.args[1:], {}, call.results), a)
    return [_broadcast(call.operands[0].shape, y), x, w], [y]


@_rule("linear")
def _linear(call: RecordedCall, a: Letters) -> Any:
    x, w, *bias = call.operands
    lead, inner, out = a.of(x.shape[:-1]), a.new(x.shape[-1], Role.SUM), a.new(w.shape[0])
    return [(*lead, inner), (out, inner), *((out,) for _ in bias)], [(*lead, out)]


@_rule("mv")
def _mv(call: RecordedCall, a: Letters) -> Any:
    rows, inner = a.new(call.operands[0].shape[0]), a.new(call.operands[0].shape[1], Role.SUM)
    return [(rows, inner), (inner,)], [(rows,)]


@_rule("dot")
def _dot(call: RecordedCall, a: Letters) -> Any:
    inner = a.new(call.operands[0].shape[0], Role.SUM)
    return [(inner,), (inner,)], [()]


@_rule("convolution")
def _convolution(call: RecordedCall, a: Letters) -> Any:
    x, w = call.operands[:2]
    transposed, groups = bool(call.args[6]), int(call.args[8])
    y = call.results[0]
    samples, group = a.new(x.shape[0]), a.new(groups)
    inner = a.new(x.shape[1] // groups, Role.SUM)
    outer = a.new(y.shape[1] // groups)
    pictures = a.of(x.shape[2:], Role.WHOLE)
    kernel = a.of(w.shape[2:], Role.WHOLE)
    own = ((*group, *inner), outer, *kernel) if transposed else ((*group, *outer), inner, *kernel)
    bias = [((*group, *outer),) for _ in call.operands[2:]]
    return [(samples, (*group, *inner), *pictures), own, *bias], [
        (samples, (*group, *outer), *a.of(y.shape[2:], Role.WHOLE))
    ]


# ---- reductions


@_rule("sum", "mean", "var", "std", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "logsumexp", "prod",
      "norm", "linalg_vector_norm", "median", "var_mean")  # fmt: skip
def _reduce(call: RecordedCall, a: Letters) -> Any:
    x = call.operands[0].shape
    given = call.argument(2 if call.name in ("norm", "linalg_vector_norm") else 1, "dim")
    if given is None or given == []:
        given = range(len(x))
    over = {d % len(x) for d in ([given] if isinstance(given, int) else given)} if x else set()
    role = Role.SUM if call.name in ("sum", "mean") else Role.WHOLE
    own = tuple(a.new(n, role if d in over else Role.SAME) for d, n in enumerate(x))
    outs: list[Dims] = []
    for r in call.results:
        if len(r.shape) == len(x):
            outs.append(tuple(() if d in over else dim for d, dim in enumerate(own)))
        else:
            outs.append(tuple(dim for d, dim in enumerate(own) if d not in over))
    return [own, *(a.of(v.shape, Role.WHOLE) for v in call.operands[1:])], outs


def _along(number: int) -> Rule:
    """A rule for operators that need one dim whole, which is argument ``number``."""

    def found(call: RecordedCall, a: Letters) -> Any:
        x = call.operands[0].shape
        dim = call.argument(number, "dim", -1)
        dim = -1 if dim is None or not isinstance(dim, int) else dim
        own = tuple(a.new(n, Role.WHOLE if d == dim % max(len(x), 1) else Role.SAME) for d, n in enumerate(x))
        outs = []
        for r in call.results:
            outs.append(tuple(o if n == m else a.new(m, Role.WHOLE) for o, n, m in zip(own, x, r.shape, strict=True)))
        return [own, *(a.of(v.shape, Role.WHOLE) for v in call.operands[1:])], outs

    return found


for _name in ("_softmax", "_log_softmax", "softmax", "log_softmax", "cumsum", "cumprod", "glu", "_safe_softmax",
              "logcumsumexp"):  # fmt: skip
    _RULES[_name] = _along(1)
_RULES["sort"] = _along(1)
_RULES["argsort"] = _along(1)
_RULES["topk"] = _along(2)
_RULES["cummax"] = _along(1)


# ---- norms


@_rule("native_layer_norm", "_fused_rms_norm")
def _layer_norm(call: RecordedCall, a: Letters) -> Any:
    x = call.operands[0].shape
    normed = len(call.args[1])
    lead, rest = a.of(x[: len(x) - normed]), a.of(x[len(x) - normed :], Role.WHOLE)
    statistics = (*lead, *(() for _ in rest))
    return [(*lead, *rest), *(rest for _ in call.operands[1:])], [(*lead, *rest)] + [statistics] * (
        len(call.results) - 1
    )


@_rule("native_group_norm")
def _group_norm(call: RecordedCall, a: Letters) -> Any:
    x = call.operands[0].shape
    groups = call.args[6]
    samples, group, inside = a.new(x[0]), a.new(groups), a.new(x[1] // groups, Role.WHOLE)
    own = (samples, (*group, *inside), *a.of(x[2:], Role.WHOLE))
    return [own, *(((*group, *inside),) for _ in call.operands[1:])], [own, (samples, group), (samples, group)]


@_rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "batch_norm")
def _batch_norm(call: RecordedCall, a: Letters) -> Any:
    x = call.operands[0].shape
    over_samples = Role.WHOLE if call.args[5] else Role.SAME  # training
    channels = a.new(x[1])
    own = (a.new(x[0], over_samples), channels, *a.of(x[2:], over_samples))
    results: list[Dims] = [own]
    results += [(channels,) if r.shape == (x[1],) else a.of(r.shape) for r in call.results[1:]]
    return [own, *((channels,) for _ in call.operands[1:])], results


@_rule("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_avg_pool2d", "upsample_nearest2d",
      "upsample_bilinear2d", "adaptive_max_pool2d", "max_pool3d_with_indices", "avg_pool3d", "_adaptive_avg_pool3d",
      "avg_pool1d", "upsample_bicubic2d", "reflection_pad2d", "replication_pad2d")  # fmt: skip
def _pool(call: RecordedCall, a: Letters) -> Any:
    x = call.operands[0].shape
    lead = a.of(x[:2])
    return [(*lead, *a.of(x[2:], Role.WHOLE))], [(*lead, *a.of(r.shape[2:], Role.WHOLE)) for r in call.results]


# ---- indices


@_rule("embedding")
def _embedding(call: RecordedCall, a: Letters) -> Any:
    table, index = call.operands
    rows, features, places = a.new(table.shape[0], Role.LOOKUP), a.new(table.shape[1]), a.of(index.shape)
    return [(rows, features), places], [(*places, features)]


@_rule("gather")
def _gather(call: RecordedCall, a: Letters) -> Any:
    x, index = call.operands
    dim = call.args[1] % len(x.shape)
    own, other = [], []
    for d, (n, m) in enumerate(zip(x.shape, index.shape, strict=True)):
        if d == dim or n != m:
            own.append(a.new(n, Role.WHOLE))
            other.append(a.new(m, Role.SAME if d == dim else Role.WHOLE))
        else:
            both = a.new(n)
            own.append(both)
            other.append(both)
    return [tuple(own), tuple(other)], [tuple(other)]


@_rule("index_select")
def _index_select(call: RecordedCall, a: Letters) -> Any:
    x, index = call.operands
    dim = call.args[1] % len(x.shape)
    chosen = a.new(index.shape[0] if index.shape else 1)
    own = tuple(a.new(n, Role.WHOLE if d == dim else Role.SAME) for d, n in enumerate(x.shape))
    return [own, (chosen,) if index.shape else ()], [tuple(chosen if d == dim else o for d, o in enumerate(own))]


@_rule("index")
def _index(call: RecordedCall, a: Letters) -> Any:
    x, indices = call.args[0], list(call.args[1])
    given = [v for v in indices if v is not None]
    if any(v.dtype is torch.bool for v in given):
        return _whole(call, a)
    places = [d for d, v in enumerate(indices) if v is not None]
    joint = a.of(torch.broadcast_shapes(*(v.shape for v in given)))
    own = tuple(a.new(n, Role.WHOLE if d in places else Role.SAME) for d, n in enumerate(x.shape))
    rest = [(d, own[d]) for d in range(len(x.shape)) if d not in places]
    together = places == list(range(places[0], places[0] + len(places)))
    first = [dim for d, dim in rest if together and d < places[0]]
    last = [dim for d, dim in rest if not (together and d < places[0])]
    return [own, *(_broadcast(v.shape, joint) for v in given)], [(*first, *joint, *last)]


@_rule("nll_loss_forward", "nll_loss")
def _nll(call: RecordedCall, a: Letters) -> Any:
    x = call.operands[0].shape
    rows, classes = a.new(x[0], Role.SUM) if len(x) > 1 else (), a.new(x[-1], Role.WHOLE)
    lead = (rows,) if len(x) > 1 else ()
    outs = [lead if len(r.shape) == 1 and len(x) > 1 else () for r in call.results]
    return [(*lead, classes), lead, *((classes,) for _ in call.operands[2:])], outs


@_rule("scaled_dot_product_attention")
def _sdpa(call: RecordedCall, a: Letters) -> Any:
    q, k, v = (call.args + tuple(call.named.get(n) for n in ("query", "key", "value")[len(call.args) :]))[:3]
    mask = call.argument(3, "attn_mask")
    causal = call.argument(5, "is_causal", False)
    batch = a.of(q.shape[:-2])
    kv = batch
    if q.shape[-3:-2] != k.shape[-3:-2] and len(q.shape) >= 3 and k.shape[-3] != 1:
        group = a.new(k.shape[-3])
        batch = (*batch[:-1], (*group, *a.new(q.shape[-3] // k.shape[-3])))
        kv = (*batch[:-1], group)
    kv = tuple(() if n == 1 else d for n, d in zip(k.shape[:-2], kv, strict=True))
    rows = a.new(q.shape[-2], Role.WHOLE if causal else Role.SAME)
    keys, inner, out = a.new(k.shape[-2], Role.WHOLE), a.new(q.shape[-1], Role.WHOLE), a.new(v.shape[-1])
    operands: list[Dims | None] = [(*batch, rows, inner), (*kv, keys, inner), (*kv, keys, out)]
    if isinstance(mask, TensorUse):
        operands.append(_broadcast(mask.shape, (*batch, rows, keys)))
    return operands, [(*batch, rows, out)]


# ---- no operands


@_rule("arange", "zeros", "ones", "full", "empty", "scalar_tensor", "rand", "randn", "randint", "eye", "linspace",
      "new_zeros", "new_ones", "new_full", "new_empty", "tril_indices", "triu_indices", "randperm", "empty_strided",
      "empty_permuted")  # fmt: skip
def _made(call: RecordedCall, a: Letters) -> Any:
    return [None for _ in call.operands], [a.of(r.shape) for r in call.results]


@_rule("triu", "tril")
def _triangle(call: RecordedCall, a: Letters) -> Any:
    x = call.operands[0].shape
    own = (*a.of(x[:-2]), *a.of(x[-2:], Role.WHOLE))
    return [own], [own]
