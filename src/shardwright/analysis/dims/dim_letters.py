"""Letters: the independent indices that make up the dims of an operator's tensors, as in ``torch.einsum``.

An operator's dims are written in *letters*. A letter is one independent index. A dim is a product of letters, or
several dims end to end::

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

from shardwright.analysis.recorded.recording import RecordedCall


class Role(Enum):
    """How an operator uses a letter (one independent index): whether tensors may be sharded along it."""

    SAME = auto()
    """Each index is computed by itself, so tensors may be sharded along the letter without communication."""
    SUM = auto()
    """The letter is summed over, so the results of shards along it are partial sums, which must be added."""
    WHOLE = auto()
    """The operator needs every index of the letter at once, so tensors cannot be sharded along it."""
    NORM = auto()
    """The letter is normalized over, so shards along it need the mean and the variance over all of it."""
    LOOKUP = auto()
    """The letter numbers the rows of a table from which an index tensor chooses, as in an embedding."""
    GATHER = auto()
    """Shards along the letter are all-gathered before the operator, which needs a whole recurrent state."""


@dataclass(frozen=True, slots=True)
class Concat:
    """Several dims concatenated end to end, as ``torch.cat`` makes them."""

    parts: tuple[Dim, ...]


Dim = tuple["int | Concat", ...]
"""One dim of a tensor as the product of its letters, slowest first. A dim of size 1 has no letters."""

Dims = tuple[Dim, ...]


class DimLetters:
    """The letters (independent indices) of one operator: the size of each, and its :class:`Role` in the operator.

    >>> letters = DimLetters()
    >>> dims = letters.of((2, 1, 3))
    >>> dims, letters.sizes, letters.size((*dims[0], *dims[2]))
    (((0,), (), (1,)), [2, 3], 6)
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.roles: list[Role] = []

    def new(self, size: int, role: Role = Role.SAME) -> Dim:
        """Adds a letter (independent index) of this size and role, and returns a dim made of it.

        For size 1 no letter is added, and the dim is empty.
        """
        return () if size == 1 else self.piece(size, role)

    def piece(self, size: int, role: Role = Role.SAME) -> Dim:
        """Adds a letter (independent index) of this size and role, even for size 1, and returns a dim made of it.

        Use it for dims that are concatenated, because one of them may have a single element; use :meth:`new` otherwise.
        """
        self.sizes.append(int(size))
        self.roles.append(role)
        return (len(self.sizes) - 1,)

    def of(self, shape: Sequence[int], role: Role = Role.SAME) -> Dims:
        """Adds a letter (independent index) for each dim of ``shape`` and returns the dims; a dim of size 1 gets none.

        The letters are new, so they tie the dims to no other tensor.
        """
        return tuple(self.new(size, role) for size in shape)

    def size(self, dim: Dim) -> int:
        """Returns the number of elements along a dim."""
        return prod(sum(map(self.size, p.parts)) if isinstance(p, Concat) else self.sizes[p] for p in dim)


DimRule = Callable[[RecordedCall, DimLetters], tuple[Sequence["Dims | None"], Sequence[Dims]]]
"""A function from an operator's call and :class:`DimLetters` to the dims of the operands and of the results.

The entry of an operand is None if its dims are related to no dims of other tensors, as for a scalar.
"""


def rule(table: dict[str, DimRule], *names: str) -> Callable[[DimRule], DimRule]:
    """Returns a decorator that stores a function in ``table``, under ``names``, as :data:`DimRule` of these operators.

    The function relates the dims of an operator's inputs to those of its results.
    """

    def add(function: DimRule) -> DimRule:
        table.update(dict.fromkeys(names, function))
        return function

    return add


def all_whole(call: RecordedCall, a: DimLetters) -> Any:
    """Returns the dims of a call's operands and results, for an operator whose tensors must not be sharded.

    Each dim is a letter (independent index) of role WHOLE, which is added to ``a``. This is the rule of operators that
    no table lists.
    """
    return [a.of(v.shape, Role.WHOLE) for v in call.operands], [a.of(v.shape, Role.WHOLE) for v in call.results]


def broadcast(shape: Sequence[int], dims: Dims) -> Dims:
    """Returns the letters (independent indices) of each dim of a tensor that is broadcast, as in torch, to ``dims``.

    A dim of size 1 gets no letters, because every index of the larger tensor reads its one element.

    >>> broadcast((3, 1), DimLetters().of((2, 3, 4)))
    ((1,), ())
    """
    own = dims[len(dims) - len(shape) :]
    return tuple(() if size == 1 else dim for size, dim in zip(shape, own, strict=True))
