"""Letters: the independent indices from which the dims of an operator's tensors are built, and what it needs of each.

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

from shardwright.analysis.recording import RecordedCall


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
    """The independent indices of one operator's dims: the size of each, and what the operator needs of it.

    >>> letters = Letters()
    >>> dims = letters.of((2, 1, 3))
    >>> dims, letters.sizes, letters.size((*dims[0], *dims[2]))
    (((0,), (), (1,)), [2, 3], 6)
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.roles: list[Role] = []

    def new(self, size: int, role: Role = Role.SAME) -> Dim:
        """Returns a dim that is one new letter, or that has no letter if its size is 1."""
        return () if size == 1 else self.piece(size, role)

    def piece(self, size: int, role: Role = Role.SAME) -> Dim:
        """Returns a dim of one new letter of any size, since one element may be a piece of several end to end."""
        self.sizes.append(int(size))
        self.roles.append(role)
        return (len(self.sizes) - 1,)

    def of(self, shape: Sequence[int], role: Role = Role.SAME) -> Dims:
        """Returns the dims of a tensor of this shape, each a new letter; none is shared with another tensor."""
        return tuple(self.new(size, role) for size in shape)

    def size(self, dim: Dim) -> int:
        """Returns the number of elements of a dim."""
        return prod(sum(map(self.size, p.parts)) if isinstance(p, Concat) else self.sizes[p] for p in dim)


Rule = Callable[[RecordedCall, Letters], tuple[Sequence["Dims | None"], Sequence[Dims]]]
"""Returns the dims of a call's operands and of its results; None for an operand whose dims take no part."""


def rule(table: dict[str, Rule], *names: str) -> Callable[[Rule], Rule]:
    """Returns a decorator that enters a rule into a table, for the operators of these names."""

    def add(function: Rule) -> Rule:
        table.update(dict.fromkeys(names, function))
        return function

    return add


def all_whole(call: RecordedCall, a: Letters) -> Any:
    """The rule of operators that need every dim whole."""
    return [a.of(v.shape, Role.WHOLE) for v in call.operands], [a.of(v.shape, Role.WHOLE) for v in call.results]


def broadcast(shape: Sequence[int], dims: Dims) -> Dims:
    """Returns the dims of a tensor of this shape that is broadcast to ``dims``."""
    own = dims[len(dims) - len(shape) :]
    return tuple(() if size == 1 else dim for size, dim in zip(shape, own, strict=True))
