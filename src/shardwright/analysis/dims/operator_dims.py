"""A table of rules, one for each operator, that relate the dims of its inputs to those of its results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from shardwright.analysis.dims.dim_letters import Concat, DimLetters, DimRule, Dims, Role, all_whole, broadcast, rule
from shardwright.analysis.dims.view_dims import VIEW_RULES
from shardwright.analysis.recorded.recording import PRODUCTS, RecordedCall, TensorUse

_RULES = dict(VIEW_RULES)
_rule = partial(rule, _RULES)


@dataclass(slots=True)
class DimRelation:
    """The dims of an operator's operands and results, written in letters (independent indices, as in einsum).

    An operand is None if its dims are related to no dims of other tensors.
    """

    letters: DimLetters
    operands: list[Dims | None]
    results: list[Dims]
    addend: int | None = None
    """The index, among the operands, of a bias that is added once to the finished sum; None for other operators.

    A call without its optional bias has no operand at that index."""


def relation_of(call: RecordedCall) -> DimRelation:
    """Returns how the dims of an operator's operands and results relate, from the table of operators.

    An operator that the table does not list is elementwise if torch says so, and else needs every dim whole. An
    operator that writes in place, such as ``add_``, relates dims as its counterpart without the underscore does.
    """
    letters, name = DimLetters(), call.name
    dim_rule = _RULES.get(name) or _RULES.get(name.rstrip("_")) or (_pointwise if _is_pointwise(call) else all_whole)
    operands, results = dim_rule(call, letters)
    product = name.rstrip("_")
    addend = 0 if product in ("addmm", "baddbmm") else 2 if product in ("linear", "convolution") else None
    relation = DimRelation(letters, list(operands), list(results), addend)
    return _gathered(call, relation) if call.is_gathered else relation


def _gathered(call: RecordedCall, relation: DimRelation) -> DimRelation:
    """Returns the relation of a call that takes or gives all-gathered features, which are an index of their own.

    A product sums over these features and needs its weight whole along them. A copy has them in its result's last dim.
    """
    letters, operands = relation.letters, relation.operands
    if call.name not in PRODUCTS:
        (use,), (dims,) = call.results, relation.results
        return replace(relation, results=[(*dims[:-1], letters.new(use.shape[-1]))])
    number = PRODUCTS[call.name]
    x, weight = operands[number], operands[number + 1]
    assert x is not None, "the dims of a product relate"
    assert weight is not None, "the dims of a product relate"
    for letter in (piece for piece in x[-1] if isinstance(piece, int)):
        letters.roles[letter] = Role.GATHER
        own = letters.new(letters.sizes[letter], Role.WHOLE)
        operands[number + 1] = tuple(own if dim == x[-1] else dim for dim in weight)
    return relation


# ---- elementwise


def _is_pointwise(call: RecordedCall) -> bool:
    return torch.Tag.pointwise in getattr(call.function, "tags", ()) and bool(call.results) and bool(call.operands)


def _pointwise(call: RecordedCall, a: DimLetters) -> Any:
    shape = max((r.shape for r in call.results), key=len) if call.results else call.operands[0].shape
    dims = a.of(shape)
    return [broadcast(v.shape, dims) for v in call.operands], [broadcast(r.shape, dims) for r in call.results]


# fmt: off
_POINTWISE = (
    "_prelu_kernel", "_to_copy", "abs", "add", "addcdiv", "addcmul", "alias", "atan2", "bernoulli", "bitwise_and",
    "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clone", "complex",
    "contiguous", "copy", "cos", "cosh", "detach", "div", "elu", "empty_like", "eq", "erf", "exp", "expm1", "fill",
    "floor", "floor_divide", "fmod", "full_like", "ge", "gelu", "gt", "hardsigmoid", "hardswish", "hardtanh",
    "heaviside", "isfinite", "isinf", "isnan", "le", "leaky_relu", "lerp", "lgamma", "lift_fresh", "log", "log10",
    "log1p", "log2", "log_sigmoid", "log_sigmoid_forward", "logical_and", "logical_not", "logical_or", "logical_xor",
    "lt", "masked_fill", "maximum", "minimum", "mish", "mul", "nan_to_num", "native_dropout", "ne", "neg",
    "new_empty_strided", "ones_like", "polar", "pow", "prelu", "rand_like", "randn_like", "reciprocal", "relu", "relu6",
    "remainder", "round", "rsqrt", "rsub", "sigmoid", "sign", "silu", "sin", "sinh", "softplus", "sqrt", "square",
    "sub", "tan", "tanh", "threshold", "to", "true_divide", "trunc", "where", "xlogy", "zero", "zeros_like",
)
# fmt: on
_RULES.update(dict.fromkeys(_POINTWISE, _pointwise))


# ---- products


@_rule("mm", "bmm")
def _product(call: RecordedCall, a: DimLetters) -> Any:
    x, w = call.operands
    batch = a.of(x.shape[:-2])
    rows, inner, columns = a.new(x.shape[-2]), a.new(x.shape[-1], Role.SUM), a.new(w.shape[-1])
    return [(*batch, rows, inner), (*batch, inner, columns)], [(*batch, rows, columns)]


@_rule("_cdist_forward", "_euclidean_dist")
def _distances(call: RecordedCall, a: DimLetters) -> Any:
    x, y = call.operands
    batch, inner = a.of(call.results[0].shape[:-2]), a.new(x.shape[-1], Role.WHOLE)
    rows, columns = a.new(x.shape[-2]), a.new(y.shape[-2])
    first, second = (*broadcast(x.shape[:-2], batch), rows, inner), (*broadcast(y.shape[:-2], batch), columns, inner)
    return [first, second], [(*batch, rows, columns)]


@_rule("_grouped_mm")
def _grouped_product(call: RecordedCall, a: DimLetters) -> Any:
    """Relates the dims of ``_grouped_mm``; ``offs`` may group rows, columns or inner elements."""
    x, w, *others = call.operands
    matrices = len(x.shape) == len(w.shape) == 2
    groups = a.of(x.shape[:-2] or w.shape[:-2], Role.WHOLE)
    rows = a.new(x.shape[-2], Role.SAME if len(x.shape) == 3 or matrices else Role.WHOLE)
    inner = a.new(x.shape[-1], Role.WHOLE if matrices else Role.SUM)
    columns = a.new(w.shape[-1], Role.SAME if len(w.shape) == 3 or matrices else Role.WHOLE)
    ins = [(*groups[: len(x.shape) - 2], rows, inner), (*groups[: len(w.shape) - 2], inner, columns)]
    out = (*a.of(call.results[0].shape[:-2], Role.WHOLE), rows, columns)
    return [*ins, *(a.of(use.shape, Role.WHOLE) for use in others)], [out]


@_rule("addmm", "baddbmm")
def _add_product(call: RecordedCall, a: DimLetters) -> Any:
    (x, w), (y,) = _product(RecordedCall(call.function, call.args[1:], {}, call.results), a)
    return [broadcast(call.operands[0].shape, y), x, w], [y]


@_rule("linear")
def _linear(call: RecordedCall, a: DimLetters) -> Any:
    x, w, *bias = call.operands
    lead, inner = a.of(x.shape[:-1]), a.new(x.shape[-1], Role.SUM)
    out = (a.new(w.shape[0]),) if len(w.shape) == 2 else ()
    return [(*lead, inner), (*out, inner), *(out for _ in bias)], [(*lead, *out)]


@_rule("_trilinear")
def _triple_product(call: RecordedCall, a: DimLetters) -> Any:
    """Relates the dims of ``functional.bilinear``, a product of rows of two tensors, which needs their features whole.

    The call's arguments name the dims to insert into each of the three tensors, and the dims to sum over.
    """
    inserted, over = call.args[3:6], call.args[6]
    rank = len(call.operands[0].shape) + len(inserted[0])
    places = [[d for d in range(rank) if d not in dims] for dims in inserted]
    sizes = {d: n for use, own in zip(call.operands, places, strict=True) for d, n in zip(own, use.shape, strict=True)}
    letters = [a.new(sizes[d], Role.SAME if d in inserted[1] else Role.WHOLE) for d in range(rank)]
    out = tuple(letters[d] for d in range(rank) if d not in over)
    return [tuple(letters[d] for d in own) for own in places], [out]


@_rule("mv")
def _mv(call: RecordedCall, a: DimLetters) -> Any:
    rows, inner = a.new(call.operands[0].shape[0]), a.new(call.operands[0].shape[1], Role.SUM)
    return [(rows, inner), (inner,)], [(rows,)]


@_rule("dot", "vdot")
def _dot(call: RecordedCall, a: DimLetters) -> Any:
    inner = a.new(call.operands[0].shape[0], Role.SUM)
    return [(inner,), (inner,)], [()]


@_rule("convolution")
def _convolution(call: RecordedCall, a: DimLetters) -> Any:
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


@_rule("sum", "mean", "var", "std", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "_is_all_true",
      "logsumexp", "prod", "norm", "linalg_vector_norm", "median", "var_mean", "std_mean")  # fmt: skip
def _reduce(call: RecordedCall, a: DimLetters) -> Any:
    x = call.operands[0].shape
    dims = call.argument(2 if call.name in ("norm", "linalg_vector_norm") else 1, "dim")
    if dims is None or dims == []:
        dims = range(len(x))
    over = {d % len(x) for d in ([dims] if isinstance(dims, int) else dims)} if x else set()
    is_norm = call.name in _VARIANCES or (call.name == "linalg_vector_norm" and call.argument(1, "ord", 2) == 2)
    role = Role.SUM if call.name in ("sum", "mean") else Role.NORM if is_norm else Role.WHOLE
    if is_norm and 0 in over and len(x) > 1:  # dim 0 has samples, or is of a whole weight; a vector may be in parts
        role = Role.WHOLE
    own = tuple(a.new(n, role if d in over else Role.SAME) for d, n in enumerate(x))
    outs: list[Dims] = []
    for r in call.results:
        if len(r.shape) == len(x):
            outs.append(tuple(() if d in over else dim for d, dim in enumerate(own)))
        else:
            outs.append(tuple(dim for d, dim in enumerate(own) if d not in over))
    return [own, *(a.of(v.shape, Role.WHOLE) for v in call.operands[1:])], outs


_VARIANCES = frozenset(("var", "var_mean", "std", "std_mean"))


def _along(number: int) -> DimRule:
    """Returns the rule of operators that need one dim whole, which argument ``number`` names."""

    def found(call: RecordedCall, a: DimLetters) -> Any:
        x = call.operands[0].shape
        dim = call.argument(number, "dim", -1)
        dim = -1 if dim is None or not isinstance(dim, int) else dim
        own = tuple(a.new(n, Role.WHOLE if d == dim % max(len(x), 1) else Role.SAME) for d, n in enumerate(x))
        outs = []
        for r in call.results:
            outs.append(tuple(o if n == m else a.new(m, Role.WHOLE) for o, n, m in zip(own, x, r.shape, strict=True)))
        return [own, *(a.of(v.shape, Role.WHOLE) for v in call.operands[1:])], outs

    return found


_rule("_softmax", "_log_softmax", "softmax", "log_softmax", "cumsum", "cumprod", "_safe_softmax", "logcumsumexp",
      "sort", "argsort", "cummax")(_along(1))  # fmt: skip
_rule("topk")(_along(2))


@_rule("glu")
def _gated(call: RecordedCall, a: DimLetters) -> Any:
    """Relates the dims of a gated linear unit: one dim of the input has the result's features twice, end to end."""
    x = call.operands[0].shape
    dim = call.argument(1, "dim", -1) % len(x)
    out = tuple(a.piece(n // 2) if d == dim else a.new(n) for d, n in enumerate(x))
    return [tuple((Concat((letter, letter)),) if d == dim else letter for d, letter in enumerate(out))], [out]


# ---- norms


@_rule("_weight_norm_interface")
def _weight_norm(call: RecordedCall, a: DimLetters) -> Any:
    own = call.argument(2, "dim", 0)
    v = tuple(a.new(n, Role.SAME if d == own else Role.NORM) for d, n in enumerate(call.operands[0].shape))
    g = tuple(dim if d == own else () for d, dim in enumerate(v))
    return [v, g], [v, g]


@_rule("native_layer_norm", "_fused_rms_norm")
def _layer_norm(call: RecordedCall, a: DimLetters) -> Any:
    x = call.operands[0].shape
    normed = len(call.args[1])
    role = Role.NORM if call.name == "native_layer_norm" else Role.WHOLE
    lead, rest = a.of(x[: len(x) - normed]), a.of(x[len(x) - normed :], role)
    statistics = (*lead, *(() for _ in rest))
    return [(*lead, *rest), *(rest for _ in call.operands[1:])], [(*lead, *rest)] + [statistics] * (
        len(call.results) - 1
    )


@_rule("native_group_norm")
def _group_norm(call: RecordedCall, a: DimLetters) -> Any:
    x = call.operands[0].shape
    groups = call.args[6]
    samples, group, inside = a.new(x[0]), a.new(groups), a.new(x[1] // groups, Role.WHOLE)
    own = (samples, (*group, *inside), *a.of(x[2:], Role.WHOLE))
    return [own, *(((*group, *inside),) for _ in call.operands[1:])], [own, (samples, group), (samples, group)]


@_rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional", "batch_norm")
def _batch_norm(call: RecordedCall, a: DimLetters) -> Any:
    x = call.operands[0].shape
    over_samples = Role.WHOLE if call.args[5] else Role.SAME  # training
    channels = a.new(x[1])
    own = (a.new(x[0], over_samples), channels, *a.of(x[2:], over_samples))
    results: list[Dims] = [own]
    results += [(channels,) if r.shape == (x[1],) else a.of(r.shape) for r in call.results[1:]]
    return [own, *((channels,) for _ in call.operands[1:])], results


@_rule("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_avg_pool2d", "upsample_nearest2d",
      "upsample_bilinear2d", "adaptive_max_pool2d", "max_pool3d_with_indices", "avg_pool3d", "_adaptive_avg_pool3d",
      "avg_pool1d", "upsample_bicubic2d", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
      "replication_pad1d", "replication_pad2d", "replication_pad3d", "upsample_nearest1d", "upsample_linear1d",
      "upsample_nearest3d", "upsample_trilinear3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
      "_upsample_nearest_exact3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")  # fmt: skip
def _pool(call: RecordedCall, a: DimLetters) -> Any:
    x = call.operands[0].shape
    before = len(x) - next(int(char) for char in call.name if char.isdigit())  # the last dims are spatial
    lead = a.of(x[:before])
    return [(*lead, *a.of(x[before:], Role.WHOLE))], [
        (*lead, *a.of(r.shape[before:], Role.WHOLE)) for r in call.results
    ]


@_rule("grid_sampler_2d", "grid_sampler_3d")
def _grid_sample(call: RecordedCall, a: DimLetters) -> Any:
    x, grid = (operand.shape for operand in call.operands)
    samples, channels, places = a.new(x[0]), a.new(x[1]), a.of(grid[1:-1])
    return [(samples, channels, *a.of(x[2:], Role.WHOLE)), (samples, *places, a.new(grid[-1], Role.WHOLE))], [
        (samples, channels, *places)
    ]


@_rule("im2col", "col2im")
def _columns(call: RecordedCall, a: DimLetters) -> Any:
    """Relates the dims of ``functional.unfold`` and ``fold``; windows have shape (..., channels * kernel, places)."""
    picture = call.operands[0] if call.name == "im2col" else call.results[0]
    columns = call.results[0] if call.name == "im2col" else call.operands[0]
    lead, channels = a.of(picture.shape[:-3]), a.new(picture.shape[-3])
    kernel = a.new(columns.shape[-2] // picture.shape[-3], Role.WHOLE)
    space = (*lead, channels, *a.of(picture.shape[-2:], Role.WHOLE))
    windows = (*lead, (*channels, *kernel), a.new(columns.shape[-1], Role.WHOLE))
    return ([space], [windows]) if call.name == "im2col" else ([windows], [space])


@_rule("pixel_shuffle", "pixel_unshuffle")
def _shuffle(call: RecordedCall, a: DimLetters) -> Any:
    up = call.name == "pixel_shuffle"
    few, many = (call.operands[0], call.results[0]) if up else (call.results[0], call.operands[0])
    lead, (channels, height, width) = a.of(many.shape[:-3]), (a.new(many.shape[-3]), *a.of(few.shape[-2:]))
    below, beside = a.of((call.args[1],) * 2, Role.WHOLE)
    packed = (*lead, (*channels, *below, *beside), height, width)
    spread = (*lead, channels, (*height, *below), (*width, *beside))
    return ([packed], [spread]) if up else ([spread], [packed])


@_rule("unfold")
def _windows(call: RecordedCall, a: DimLetters) -> Any:
    """Relates the dims of ``Tensor.unfold``, which needs one dim whole and adds a last dim for a window's elements."""
    x, y = call.operands[0].shape, call.results[0].shape
    dim = call.args[1] % max(len(x), 1)
    own = tuple(a.new(n, Role.WHOLE if d == dim else Role.SAME) for d, n in enumerate(x))
    windows = (a.new(y[d], Role.WHOLE) if d == dim else letter for d, letter in enumerate(own))
    return [own], [(*windows, a.new(y[-1], Role.WHOLE))]


# ---- indices


def _takes_all(index: TensorUse, size: int) -> bool:
    """Returns whether an index takes all elements of a dim of ``size``, in order."""
    return index.counts and index.shape == (size,)


@_rule("embedding")
def _embedding(call: RecordedCall, a: DimLetters) -> Any:
    table, index = call.operands
    rows, features, places = a.new(table.shape[0], Role.LOOKUP), a.new(table.shape[1]), a.of(index.shape)
    return [(rows, features), places], [(*places, features)]


@_rule("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(call: RecordedCall, a: DimLetters) -> Any:
    """Relates the dims of sums, means or maxima of a table's rows, of which only the features are cut.

    The other results, such as the bag of each row, are for the backward; those of a maximum have features too.
    """
    table, places, offsets, *weights = call.operands
    bags, features = a.new(call.results[0].shape[0]), a.new(table.shape[1])
    starts = (bags,) if offsets.shape == call.results[0].shape[:1] else a.of(offsets.shape, Role.WHOLE)
    own = [(a.new(table.shape[0], Role.WHOLE), features), a.of(places.shape, Role.WHOLE), starts]
    kept = [a.of(use.shape, Role.WHOLE) for use in call.results[1:]]
    kept = [(*dims[:-1], features) if len(dims) == 2 else dims for dims in kept]
    return [*own, *(a.of(use.shape, Role.WHOLE) for use in weights)], [(bags, features), *kept]


@_rule("gather")
def _gather(call: RecordedCall, a: DimLetters) -> Any:
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
def _index_select(call: RecordedCall, a: DimLetters) -> Any:
    x, index = call.operands
    dim = call.args[1] % len(x.shape)
    takes_all = _takes_all(index, x.shape[dim] if x.shape else 1)
    chosen = a.new(index.shape[0] if index.shape else 1, Role.WHOLE if takes_all else Role.SAME)
    own = tuple(a.new(n, Role.WHOLE if d == dim else Role.SAME) for d, n in enumerate(x.shape))
    own = tuple(chosen if takes_all and d == dim else letter for d, letter in enumerate(own))
    return [own, (chosen,) if index.shape else ()], [tuple(chosen if d == dim else o for d, o in enumerate(own))]


@_rule("index_add", "index_copy")
def _index_add(call: RecordedCall, a: DimLetters) -> Any:
    """Relates the dims of operators that add or copy slices of one tensor to the slices of another at an index."""
    x, index, source = call.operands
    dim = call.args[1] % max(len(x.shape), 1)
    own = tuple(a.new(n, Role.WHOLE if d == dim else Role.SAME) for d, n in enumerate(x.shape))
    chosen = a.new(index.shape[0] if index.shape else 1, Role.WHOLE)
    if x.shape and _takes_all(index, x.shape[dim]):
        chosen = own[dim]
    source_dims = tuple(chosen if d == dim else dim_ for d, dim_ in enumerate(own))[: len(source.shape)]
    return [own, (chosen,) if index.shape else (), source_dims], [own]


@_rule("scatter", "scatter_add", "scatter_reduce")
def _scatter(call: RecordedCall, a: DimLetters) -> Any:
    """Relates the dims of operators such as ``scatter``, which write or add elements at indices along one dim.

    That dim is needed whole, and so are other dims in which the tensors differ in size. Along the remaining dims,
    elements keep their places.
    """
    x, *others = call.operands
    dim = call.args[1] % max(len(x.shape), 1)
    alike = [all(len(use.shape) == len(x.shape) and use.shape[d] == n for use in others) for d, n in enumerate(x.shape)]
    own = tuple(a.new(n, Role.SAME if d != dim and alike[d] else Role.WHOLE) for d, n in enumerate(x.shape))

    def other(use: TensorUse) -> Dims:
        sizes = zip(use.shape, x.shape, own, strict=True)
        return tuple(letter if d != dim and n == m else a.new(n, Role.WHOLE) for d, (n, m, letter) in enumerate(sizes))

    return [own, *(other(use) if len(use.shape) == len(x.shape) else a.of(use.shape) for use in others)], [own]


@_rule("masked_scatter")
def _masked_scatter(call: RecordedCall, a: DimLetters) -> Any:
    """Relates the dims of ``masked_scatter``, which writes elements in order where a mask is true; all are whole."""
    x, mask, source = call.operands
    own = a.of(call.results[0].shape, Role.WHOLE)
    return [broadcast(x.shape, own), broadcast(mask.shape, own), a.of(source.shape, Role.WHOLE)], [own]


@_rule("index_put")
def _index_put(call: RecordedCall, a: DimLetters) -> Any:
    """Relates the dims of ``x[index] = values``: x and values have the same dims if the index takes dim 0 in order.

    All dims are needed whole.
    """
    x, indices, values = call.args[:3]
    if len(indices) != 1 or indices[0] is None or not x.shape or not _takes_all(indices[0], x.shape[0]):
        return all_whole(call, a)
    own = a.of(x.shape, Role.WHOLE)
    return [own, own[:1], broadcast(values.shape, own)], [own]


@_rule("index")
def _index(call: RecordedCall, a: DimLetters) -> Any:
    x, indices = call.args[0], list(call.args[1])
    index_uses = [v for v in indices if v is not None]
    if any(v.dtype is torch.bool for v in index_uses):
        return all_whole(call, a)
    places = [d for d, v in enumerate(indices) if v is not None]
    shape = torch.broadcast_shapes(*(v.shape for v in index_uses))
    all_of = [d for d in places if len(shape) == 1 and _takes_all(indices[d], x.shape[d])]
    joint = a.of(shape, Role.WHOLE if all_of else Role.SAME)
    own = tuple(a.new(n, Role.WHOLE if d in places else Role.SAME) for d, n in enumerate(x.shape))
    own = tuple(joint[0] if d in all_of else letter for d, letter in enumerate(own))
    rest = [(d, own[d]) for d in range(len(x.shape)) if d not in places]
    together = places == list(range(places[0], places[0] + len(places)))
    first = [dim for d, dim in rest if together and d < places[0]]
    last = [dim for d, dim in rest if not (together and d < places[0])]
    return [own, *(broadcast(v.shape, joint) for v in index_uses)], [(*first, *joint, *last)]


@_rule("nll_loss_forward", "nll_loss")
def _nll(call: RecordedCall, a: DimLetters) -> Any:
    x = call.operands[0].shape
    rows, classes = a.new(x[0], Role.SUM) if len(x) > 1 else (), a.new(x[-1], Role.WHOLE)
    lead = (rows,) if len(x) > 1 else ()
    outs = [lead if len(r.shape) == 1 and len(x) > 1 else () for r in call.results]
    return [(*lead, classes), lead, *((classes,) for _ in call.operands[2:])], outs


@_rule("scaled_dot_product_attention")
def _sdpa(call: RecordedCall, a: DimLetters) -> Any:
    q, k, v = (call.args + tuple(call.named.get(n) for n in ("query", "key", "value")[len(call.args) :]))[:3]
    mask = call.argument(3, "attn_mask")
    causal = call.argument(5, "is_causal", False)
    batch = a.of(call.results[0].shape[:-2])
    kv = batch
    if q.shape[-3:-2] != k.shape[-3:-2] and len(q.shape) >= 3 and 1 not in (q.shape[-3], k.shape[-3]):
        group = a.new(k.shape[-3])
        batch = (*batch[:-1], (*group, *a.new(q.shape[-3] // k.shape[-3])))
        kv = (*batch[:-1], group)
    first = broadcast(q.shape[:-2], batch)
    rows = a.new(q.shape[-2], Role.WHOLE if causal else Role.SAME)
    keys, inner, out = a.new(k.shape[-2], Role.WHOLE), a.new(q.shape[-1], Role.WHOLE), a.new(v.shape[-1])
    operands: list[Dims | None] = [
        (*first, rows, inner),
        (*broadcast(k.shape[:-2], kv), keys, inner),
        (*broadcast(v.shape[:-2], kv), keys, out),
    ]
    if isinstance(mask, TensorUse):
        operands.append(broadcast(mask.shape, (*batch, rows, keys)))
    return operands, [(*batch, rows, out)]


# ---- complex numbers and their transforms


@_rule("view_as_complex", "view_as_real")
def _as_pairs(call: RecordedCall, a: DimLetters) -> Any:
    """Relates the dims of ``view_as_real`` and ``view_as_complex``; the extra last dim has real and imaginary parts."""
    dims = a.of(min(call.operands[0].shape, call.results[0].shape, key=len))
    pair = (*dims, a.new(2, Role.WHOLE))
    return ([pair], [dims]) if call.name == "view_as_complex" else ([dims], [pair])


@_rule("_fft_r2c", "_fft_c2c", "_fft_c2r")
def _transform(call: RecordedCall, a: DimLetters) -> Any:
    x, y = call.operands[0].shape, call.results[0].shape
    over = {d % len(x) for d in call.args[1]}
    own = tuple(a.new(n, Role.WHOLE if d in over else Role.SAME) for d, n in enumerate(x))
    return [own], [tuple(a.new(m, Role.WHOLE) if d in over else own[d] for d, m in enumerate(y))]


# ---- no operands


@_rule("arange", "zeros", "ones", "full", "empty", "scalar_tensor", "rand", "randn", "randint", "eye", "linspace",
      "new_zeros", "new_ones", "new_full", "new_empty", "tril_indices", "triu_indices", "randperm", "empty_strided",
      "empty_permuted")  # fmt: skip
def _made(call: RecordedCall, a: DimLetters) -> Any:
    return [None for _ in call.operands], [a.of(r.shape) for r in call.results]


@_rule("diag_embed")
def _diagonal(call: RecordedCall, a: DimLetters) -> Any:
    """Relates the dims of ``diag_embed``: the operand's last dim, and the two dims made from it, are needed whole."""
    x, y = call.operands[0].shape, call.results[0].shape
    between = {call.argument(place, name, at) % len(y) for place, name, at in ((2, "dim1", -2), (3, "dim2", -1))}
    lead = iter(own := a.of(x[:-1]))
    out = tuple(a.new(n, Role.WHOLE) if d in between else next(lead) for d, n in enumerate(y))
    return [(*own, a.new(x[-1], Role.WHOLE))], [out]


@_rule("triu", "tril")
def _triangle(call: RecordedCall, a: DimLetters) -> Any:
    x = call.operands[0].shape
    own = (*a.of(x[:-2]), *a.of(x[-2:], Role.WHOLE))
    return [own], [own]
