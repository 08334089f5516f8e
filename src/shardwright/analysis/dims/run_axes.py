"""Finds which dims of all tensors in a recorded run must be cut together, by propagation through the operators.

Every operator says how the dims of its operands and results relate (``operator_dims.py``). Dims that relate become one
:class:`DimAxis`; where one of them is a product or a concatenation of smaller axes, the other is split to match. So the
heads of an attention, whether its projections are one layer or three, come out as an axis of their own::

    gpt2   c_attn.weight  [768, [(heads 64) (heads 64) (heads 64)]]
    llama  q_proj.weight  [((groups 4) 128), 4096]    k_proj.weight  [(groups 128), 4096]

The order of the operators does not matter, so operators that write in place need no care.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import gcd, prod

from shardwright.analysis.dims.dim_letters import Concat, Dim, Role
from shardwright.analysis.dims.operator_dims import relation_of
from shardwright.analysis.recorded.recording import RecordedCall, Recording, TensorUse
from shardwright.sharding.tensor_shard import ALL

MISMATCH = "two views of it do not match"
CLASSES = "cross_entropy"
"""The value of ``DimAxis.whole`` for an axis of classes that only a cross entropy needs whole.

Ranks can still cut such an axis, because a cross entropy's sums over classes can be added up over ranks.
"""


class DimAxis:
    """An index that dims of several tensors in a recorded forward share, so that these dims must be sharded alike.

    An axis may be a product of other axes (``factors``) or a concatenation of them (``parts``). ``whole`` names the
    operator that needs the axis uncut, or is empty; it is :data:`CLASSES` if only a cross entropy needs it uncut. Axes
    that were found to be equal are linked; :func:`root` returns the one that represents them.
    """

    __slots__ = ("factors", "link", "parts", "size", "whole")

    def __init__(self, size: int, whole: str = "") -> None:
        self.size, self.whole = size, whole
        self.link: DimAxis | None = None
        self.factors: list[DimAxis] | None = None
        self.parts: list[DimAxis] | None = None

    @property
    def is_leaf(self) -> bool:
        """Whether this index is neither a product (of heads and features, say) nor a concatenation of others."""
        return self.factors is None and self.parts is None

    @property
    def inner(self) -> list[DimAxis]:
        """The indices, such as heads and features, whose product or concatenation this one is; empty if none."""
        return [*(self.factors or ()), *(self.parts or ())]

    def __repr__(self) -> str:
        axis = root(self)
        if axis.factors is not None:
            return "(" + " ".join(map(repr, axis.factors)) + ")"
        if axis.parts is not None:
            return "[" + " ".join(map(repr, axis.parts)) + "]"
        return f"{axis.size}" + ("!" if axis.whole else "")


def root(axis: DimAxis) -> DimAxis:
    """Returns the one :class:`DimAxis` that represents all those found equal to ``axis`` (the root in a union-find)."""
    while axis.link is not None:
        if axis.link.link is not None:
            axis.link = axis.link.link
        axis = axis.link
    return axis


def leaves(axis: DimAxis) -> Iterator[DimAxis]:
    """Yields the smallest axes whose products and concatenations make up ``axis``, such as its heads and features.

    An axis that occurs twice is yielded twice. If ``axis`` is made up of no others, it is yielded itself.
    """
    axis = root(axis)
    if axis.is_leaf:
        yield axis
    for inner in axis.inner:
        yield from leaves(inner)


def _factors(axis: DimAxis) -> list[DimAxis]:
    """Returns the factors of an axis, slowest first and without nested products. An axis of one element has none."""
    axis = root(axis)
    if axis.factors is None:
        return [axis] if axis.size > 1 else []
    return [factor for inner in axis.factors for factor in _factors(inner)]


def _parts(axis: DimAxis) -> list[DimAxis]:
    axis = root(axis)
    return [axis] if axis.parts is None else [part for inner in axis.parts for part in _parts(inner)]


def _product(axes: Sequence[DimAxis]) -> DimAxis:
    factors = [factor for axis in axes for factor in _factors(axis)]
    if len(factors) == 1:
        return factors[0]
    product = DimAxis(prod(factor.size for factor in factors))
    product.factors = factors or None
    return product


def product_of(slow: DimAxis, inside: int) -> DimAxis:
    """Returns the axis of a dim in which each index of ``slow`` stands for ``inside`` elements next to each other."""
    return slow if inside == 1 else _product([slow, DimAxis(inside)])


def _concatenation(axes: Sequence[DimAxis]) -> DimAxis:
    parts = [part for axis in axes for part in _parts(axis) if part.size]
    if len(parts) == 1:
        return parts[0]
    concatenation = DimAxis(sum(part.size for part in parts))
    concatenation.parts = parts
    return concatenation


def _need_whole(axis: DimAxis, why: str) -> None:
    axis = root(axis)
    if axis.whole in ("", CLASSES):
        axis.whole = why
    for inner in axis.inner:
        if root(inner).whole in ("", CLASSES) and root(inner).whole != why:
            _need_whole(inner, why)


def _split_off(axis: DimAxis, fast: int) -> bool:
    """Splits an axis in place into two factors, the faster with ``fast`` elements; returns False if it cannot."""
    axis = root(axis)
    if axis.parts is None:
        axis.factors = [DimAxis(axis.size // fast, axis.whole), DimAxis(fast, axis.whole)]
        return True
    if any(part.size % fast for part in _parts(axis)):
        return False
    halves = [_halves(part, fast) for part in _parts(axis)]
    pairs = [half for half in halves if half is not None]
    if len(pairs) < len(halves):
        return False
    for _, low in pairs[1:]:
        unify(pairs[0][1], low)
    axis.parts, axis.factors = None, [_concatenation([high for high, _ in pairs]), root(pairs[0][1])]
    return True


def _halves(axis: DimAxis, fast: int) -> tuple[DimAxis, DimAxis] | None:
    """Returns an axis as two factors (slow, fast), the second with ``fast`` elements, or None if that is impossible."""
    high, low, left = _factors(axis), list[DimAxis](), fast
    while left > 1:
        last = high[-1]
        if left % last.size == 0:
            left //= last.size
            low.insert(0, high.pop())
        elif last.size % left == 0 and _split_off(last, left):
            high[-1:] = _factors(last)
        else:
            return None
    return _product(high), _product(low)


def _cut_at(axis: DimAxis, start: int) -> tuple[DimAxis, DimAxis] | None:
    """Returns an axis as a concatenation of two, the first with ``start`` elements, or None if that is impossible."""
    axis = root(axis)
    if axis.is_leaf:
        first, second = axis.parts = [DimAxis(start, axis.whole), DimAxis(axis.size - start, axis.whole)]
        return first, second
    if axis.factors is not None:
        slow, *rest = _factors(axis)
        inside = prod(factor.size for factor in rest)
        pieces = None if start % inside else _cut_at(slow, start // inside)
        return None if pieces is None else (_product([pieces[0], *rest]), _product([pieces[1], *rest]))
    at, parts = 0, _parts(axis)
    for number, part in enumerate(parts):
        if at == start:
            return _concatenation(parts[:number]), _concatenation(parts[number:])
        if at + part.size > start:
            pieces = _cut_at(part, start - at)
            if pieces is None:
                return None
            before, after = [*parts[:number], pieces[0]], [pieces[1], *parts[number + 1 :]]
            return _concatenation(before), _concatenation(after)
        at += part.size
    return None


TwoOrders = tuple[list[DimAxis], list[DimAxis]]
"""The factors of two dims, slowest first, which have the same sizes but in different orders."""


def unify(one: DimAxis, other: DimAxis) -> list[TwoOrders]:
    """Notes that the dims of ``one`` and ``other``, of equal size, must be sharded alike, by merging the two in place.

    Both are split into the same factors and concatenated parts. Axes that cannot be matched are marked as needed whole,
    so that they are not sharded. Returns the factors that do not match because two dims have them in different orders.

    >>> columns, heads, width = DimAxis(12), DimAxis(3), DimAxis(4)
    >>> unify(columns, _product([heads, width]))
    []
    >>> columns
    (3 4)
    >>> fused = _concatenation([DimAxis(12), DimAxis(12)])
    >>> unify(fused, _concatenation([columns, columns]))
    []
    >>> fused
    [(3 4) (3 4)]
    """
    one, other = root(one), root(other)
    if one is other or one.size <= 1:
        return []
    assert one.size == other.size, f"{one} and {other} have other sizes"
    if other.is_leaf and not one.is_leaf:
        one, other = other, one
    if one.is_leaf:
        if one not in set(leaves(other)) or one is other:
            if one.whole:
                _need_whole(other, one.whole)
            one.link = other
        return []
    if one.parts is not None and other.parts is not None:
        return _unify_parts(one, other)
    return _unify_factors(one, other)


def _opened(axes: list[DimAxis], end: int) -> DimAxis:
    """Pops an axis from a list, and returns the one that it was merged into, or itself."""
    return root(axes.pop(end))


def _unify_factors(one: DimAxis, other: DimAxis) -> list[TwoOrders]:
    left, right, in_two_orders = _factors(one), _factors(other), list[TwoOrders]()
    while left and right:
        a, b = _opened(left, -1), _opened(right, -1)
        if a.factors is not None or b.factors is not None:  # the axis was split since the list was made
            left += _factors(a)
            right += _factors(b)
        elif a.size == b.size:
            in_two_orders += unify(a, b)
        else:
            fast = gcd(a.size, b.size)
            if fast == 1 or not all(factor.size == fast or _split_off(factor, fast) for factor in (a, b)):
                for axis in (*left, *right, a, b):
                    _need_whole(axis, MISMATCH)
                one_way, another = [*left, a], [*right, b]
                if Counter(factor.size for factor in one_way) == Counter(factor.size for factor in another):
                    in_two_orders.append((one_way, another))
                return in_two_orders
            left += _factors(a)
            right += _factors(b)
    return in_two_orders


def _unify_parts(one: DimAxis, other: DimAxis) -> list[TwoOrders]:
    left, right, in_two_orders = _parts(one), _parts(other), list[TwoOrders]()
    while left and right:
        a, b = _opened(left, 0), _opened(right, 0)
        if a.parts is not None or b.parts is not None:
            left[:0], right[:0] = _parts(a), _parts(b)
        elif a.size == b.size:
            in_two_orders += unify(a, b)
        else:
            big, small, rest = (a, b, left) if a.size > b.size else (b, a, right)
            pieces = _cut_at(big, small.size)
            if pieces is None:
                for axis in (*left, *right, a, b):
                    _need_whole(axis, MISMATCH)
                return in_two_orders
            in_two_orders += unify(pieces[0], small)
            rest.insert(0, pieces[1])
    return in_two_orders


# ---- a run


@dataclass(eq=False, slots=True)
class AxisUse:
    """An operator (``call``) that sums over a dim, or looks up rows of a table along it, as ``role`` says."""

    call: RecordedCall
    axis: DimAxis
    role: Role


@dataclass(eq=False)
class RunAxes:
    """Which dims of the tensors of a recorded forward must be sharded alike, and which operators sum over such dims.

    Dims that must be sharded alike share a :class:`DimAxis`. ``uses`` has the operators that sum over an axis, or look
    up rows of a table by it. ``in_two_orders`` has the operators that relate two dims with the same factors in
    different orders, each with both orders.
    """

    dims: dict[TensorUse, list[DimAxis]] = field(default_factory=dict)
    uses: list[AxisUse] = field(default_factory=list)
    in_two_orders: list[tuple[RecordedCall, TwoOrders]] = field(default_factory=list)

    def of(self, tensor: TensorUse) -> list[DimAxis]:
        """Returns, for each dim of a tensor, its :class:`DimAxis`; dims with the same one must be sharded alike.

        Equal axes are one object only after :func:`root`. A tensor that no operator related gets axes of its own.
        """
        if tensor not in self.dims:
            self.dims[tensor] = [DimAxis(size) for size in tensor.shape]
        return self.dims[tensor]

    def of_samples(self, inputs: Iterable[TensorUse]) -> set[DimAxis]:
        """Returns a :class:`DimAxis` for dim 0 of each of ``inputs``, the dim that holds the samples of a batch.

        If dim 0 was found to be a product or a concatenation, the axes that make it up are returned (:func:`leaves`).
        """
        return {leaf for tensor in inputs if tensor.shape for leaf in leaves(self.of(tensor)[0])}


_VIEWS = frozenset(("select", "slice"))
"""Operators that return a part of a tensor. A part relates no dims if code reads only its size (``w[0].numel()``)."""


def axes_of(recording: Recording) -> RunAxes:
    """Returns which dims of the tensors in a recorded run must be sharded alike, according to its operators.

    The operators in the backwards of the user's own autograd functions count too. Dims that these operators sum over or
    need whole stay uncut, because nothing sums over ranks there. A tensor that code puts in the place of a parameter
    shares the parameter's dims. Constants are left out: one table of positions that two layers share would tie the dims
    of both layers together.

    >>> import torch
    >>> from torch import nn
    >>> from shardwright.analysis.recorded.record_forward import record_forward
    >>> model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)).to("meta")
    >>> recording = record_forward(model, torch.empty(2, 6, device="meta"))
    >>> axes = axes_of(recording)
    >>> first, second = (axes.of(recording.parameters[name]) for name in ("0.weight", "2.weight"))
    >>> root(first[0]) is root(second[1]), root(first[1]) is root(second[0])
    (True, False)
    """
    run_axes = RunAxes()
    backward = {id(call) for calls in recording.functions.values() for call in calls}
    classes = {id(call): dim for pair, dim in _cross_entropies(recording) for call in pair}
    calls = [*recording.calls, *chain.from_iterable(recording.functions.values())]
    unread = _unread_parts(calls, {*recording.outputs, *recording.measured_in_backward})
    for call in calls:
        tensors = (*call.operands, *call.results)
        if all(tensor.kind == "constant" for tensor in tensors):
            continue
        if id(call) in unread:
            continue
        relation = relation_of(call)
        axes = [DimAxis(size) for size in relation.letters.sizes]
        for tensor, dims in zip(tensors, (*relation.operands, *relation.results), strict=True):
            if dims is not None and tensor.kind != "constant":
                for axis, dim in zip(run_axes.of(tensor), dims, strict=True):
                    if axis.size > 1:
                        run_axes.in_two_orders += [(call, orders) for orders in unify(axis, _axis(dim, axes))]
        scores = relation.operands[0] if id(call) in classes else None
        of_classes = scores[classes[id(call)]] if scores is not None else ()
        for letter, (axis, role) in enumerate(zip(axes, relation.letters.roles, strict=True)):
            if letter in of_classes:
                _need_whole(axis, CLASSES)
            elif (
                role is Role.WHOLE
                or (call.is_hidden and id(call) not in backward)
                or (role is not Role.SAME and id(call) in backward)
            ):
                _need_whole(axis, call.name)  # in the backward of a user's function nothing sums over ranks
            elif role is not Role.SAME:
                run_axes.uses.append(AxisUse(call, axis, role))
    for parameter, value in recording.assigned:
        if parameter.shape == value.shape and not value.kind:
            for axis, other in zip(run_axes.of(parameter), run_axes.of(value), strict=True):
                unify(axis, other)
    return run_axes


def _unread_parts(calls: Sequence[RecordedCall], read: set[TensorUse]) -> set[int]:
    """Returns the ids of slices and the like whose results no operator reads, as those of ``w[0][0].numel()``.

    A slice of such a slice is no reader. ``read`` are the tensors that are read after all calls; those that calls read
    are added to it.
    """
    unread = set[int]()
    for call in reversed(calls):
        if call.name in _VIEWS and read.isdisjoint(call.results):
            unread.add(id(call))
        else:
            read.update(call.operands)
    return unread


def _cross_entropies(recording: Recording) -> Iterator[tuple[tuple[RecordedCall, RecordedCall], int]]:
    """Yields the two operators of each unweighted cross entropy (log-softmax, loss), and the dim of the classes.

    The loss must be the only reader of the log-softmax.
    """
    made = {call.results[0]: call for call in recording.calls if call.name == "_log_softmax"}
    num_reads = Counter(chain(recording.outputs, *(call.operands for call in recording.calls)))
    for call in recording.calls:
        scores = call.operands[0] if call.name == "nll_loss_forward" and len(call.operands) == 2 else None
        if scores in made and num_reads[scores] == 1:
            yield (made[scores], call), len(scores.shape) - 1


def _axis(dim: Dim, axes: Sequence[DimAxis]) -> DimAxis:
    made = [
        _concatenation([_axis(p, axes) for p in part.parts]) if isinstance(part, Concat) else axes[part] for part in dim
    ]
    return _product(made)


# ---- cuts


def spread(labels: bytes, inside: int, outside: int) -> bytes:
    """Returns the rank that holds each element of a dim, as one byte each, if one factor of the dim is cut.

    ``labels`` are the ranks that hold the indices of that factor; ``inside`` and ``outside`` are the numbers of
    elements of the dim's faster and slower factors.

    >>> list(spread(bytes([0, 1]), inside=2, outside=2))
    [0, 0, 1, 1, 0, 0, 1, 1]
    """
    if inside > 1:
        labels = b"".join(bytes((label,)) * inside for label in labels)
    return labels * outside


def labels_of(axis: DimAxis, cut: Mapping[DimAxis, bytes]) -> bytes | None:
    """Returns the rank that holds each element of a dim, as one byte each, or None if no axis of the dim is cut.

    ``axis`` is the dim's :class:`DimAxis`. ``cut`` maps each axis that is cut to the ranks that hold its elements. In a
    concatenation, the elements of a part that is not cut have the label :data:`ALL`, since every rank holds them.

    Raises: ValueError: two factors of a product are cut.

    >>> heads = DimAxis(2)
    >>> list(labels_of(_product([heads, DimAxis(3)]), {heads: bytes([0, 1])}))
    [0, 0, 0, 1, 1, 1]
    """
    axis = root(axis)
    if axis in cut:
        return cut[axis]
    inner_labels = [(labels_of(inner, cut), root(inner).size) for inner in axis.inner]
    numbers = [number for number, (labels, _) in enumerate(inner_labels) if labels is not None]
    if not numbers:
        return None
    if axis.parts is not None:
        return b"".join(bytes((ALL,)) * size if labels is None else labels for labels, size in inner_labels)
    (number,) = numbers
    labels = inner_labels[number][0]
    assert labels is not None, "it is held"
    inside = prod(size for _, size in inner_labels[number + 1 :])
    return spread(labels, inside, prod(size for _, size in inner_labels[:number]))
