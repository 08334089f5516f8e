"""Which rows of a picture an operator reads for which rows of its output; integers only.

::

    rank 0   | 0 1 2 3 4 |            kernel 3, padding 1: rank 1 computes rows 5 to 9,
    rank 1           4 | 5 6 7 8 9 | 10      and reads rows 4 and 10 of others, its *halo*
    rank 2                       9 | 10 11 12 |

A *resize* says how many rows come out, and which rows go into some of them: the *span*, first and stop, which may lie
outside the picture, where its border says what is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

from shardwright.errors import LayoutError
from shardwright.mesh import balanced
from shardwright.sharding.box import Range

Border = Literal["constant", "reflect", "replicate", "circular"]
"""What lies outside a picture: one number, or its own rows, as torch's ``padding_mode`` has it."""

Runs = tuple[Range, ...]
"""Rows in the order in which they are read; some may come again."""


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """What one output reads along one dim: a kernel's reach, the steps between outputs, padding outside.

    ``after`` is the padding after the last row, where it is not that before the first; ``ceil`` lets a last window hang
    over the end, as torch's ``ceil_mode`` does.
    """

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    after: int | None = None
    border: Border = "constant"
    ceil: bool = False

    @property
    def reach(self) -> int:
        """From the first row that an output reads to the row after the last."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def paddings(self) -> tuple[int, int]:
        """Before the first row and after the last."""
        return self.padding, self.padding if self.after is None else self.after

    def num_outputs(self, size: int) -> int:
        """How many outputs so many rows have.

        >>> SlidingWindow(3).num_outputs(5), SlidingWindow(3, stride=2, padding=1).num_outputs(5)
        (3, 3)
        """
        room = size + sum(self.paddings) - self.reach
        if not self.ceil:
            return room // self.stride + 1
        num = -(-room // self.stride) + 1
        return num - 1 if (num - 1) * self.stride >= size + self.padding else num  # it would see padding alone

    def span(self, outputs: Range, size: int = 0) -> Range:
        """The rows that these outputs read; below zero, and from ``size`` on, lies the border.

        >>> SlidingWindow(3, padding=1).span((0, 2)), SlidingWindow(3, padding=1).span((2, 2))
        ((-1, 3), (0, 0))
        """
        first, stop = outputs
        if first == stop:
            return 0, 0
        return first * self.stride - self.padding, (stop - 1) * self.stride - self.padding + self.reach

    def skip(self, outputs: Range, size: int) -> int:
        """How many rows too many are computed before the first of these: none."""
        return 0


@dataclass(frozen=True, slots=True)
class Enlarged:
    """Each row gives ``factor`` rows, made of itself and of ``margin`` rows on either side."""

    factor: int
    margin: int = 0
    border: Border = "replicate"
    reach: int = 1

    def num_outputs(self, size: int) -> int:
        """How many rows come out.

        >>> Enlarged(2).num_outputs(5)
        10
        """
        return size * self.factor

    def span(self, outputs: Range, size: int = 0) -> Range:
        """The rows that these outputs are made of.

        >>> Enlarged(2).span((3, 6)), Enlarged(2, margin=1).span((0, 3))
        ((1, 3), (-1, 3))
        """
        first, stop = outputs
        if first == stop:
            return 0, 0
        return first // self.factor - self.margin, (stop - 1) // self.factor + 1 + self.margin

    def skip(self, outputs: Range, size: int) -> int:
        """How many rows too many are computed before the first of these."""
        return outputs[0] - self.span(outputs)[0] * self.factor


@dataclass(frozen=True, slots=True)
class Spread:
    """A transposed convolution: row i adds to the ``kernel`` rows from i * stride on; ``more`` rows at the end."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    more: int = 0
    border: Border = "constant"
    reach: int = 1

    def num_outputs(self, size: int) -> int:
        """How many rows come out.

        >>> Spread(2, stride=2).num_outputs(5), Spread(3, stride=2, padding=1, more=1).num_outputs(5)
        (10, 10)
        """
        return (size - 1) * self.stride - 2 * self.padding + self.dilation * (self.kernel - 1) + self.more + 1

    def span(self, outputs: Range, size: int = 0) -> Range:
        """The rows that add to these outputs; one that does not, where none does.

        >>> Spread(2, stride=2).span((3, 6), 5), Spread(3, stride=2, padding=1).span((0, 2), 5)
        ((1, 3), (0, 2))
        """
        first, stop = outputs
        if first == stop:
            return 0, 0
        low = -(-(first + self.padding - self.dilation * (self.kernel - 1)) // self.stride)
        low = min(max(low, 0), size - 1)
        return low, max(low + 1, min((stop - 1 + self.padding) // self.stride + 1, size))

    def skip(self, outputs: Range, size: int) -> int:
        """How many rows too many are computed before the first of these; below zero, how many too few."""
        return outputs[0] + self.padding - self.span(outputs, size)[0] * self.stride


Resize = SlidingWindow | Enlarged | Spread


def row_ranges(sizes: Sequence[int]) -> tuple[Range, ...]:
    """Where each member's rows lie in the whole.

    >>> row_ranges((3, 0, 2))
    ((0, 3), (3, 3), (3, 5))
    """
    return tuple(pairwise(accumulate(sizes, initial=0)))


def balanced_rows(size: int, parts: int) -> tuple[int, ...]:
    """How many rows each member holds of so many.

    >>> balanced_rows(7, 3)
    (3, 2, 2)
    """
    return tuple(b - a for a, b in pairwise(balanced(size, parts)))


def output_sizes(sizes: Sequence[int], resize: Resize) -> tuple[int, ...]:
    """How many outputs each member computes: balanced, so some other number than its rows may call for.

    Raises: LayoutError: the window is larger than the picture.

    >>> output_sizes((4, 3, 3), SlidingWindow(3)), output_sizes((4, 3, 3), SlidingWindow(2, stride=2))
    ((3, 3, 2), (2, 2, 1))
    """
    num_outputs = resize.num_outputs(sum(sizes))
    if num_outputs < 1:
        raise LayoutError(
            "the window is larger than the picture",
            given=f"{sum(sizes)} rows and {resize}",
            allowed=f"{resize.reach - sum(resize.paddings)} rows or more"
            if isinstance(resize, SlidingWindow)
            else "one row or more",
            fix="use a smaller kernel or dilation, or more padding",
        )
    return balanced_rows(num_outputs, len(sizes))


def runs_of(span: Range, size: int, border: Border) -> Runs:
    """The picture's own rows that a span reads; what is a constant outside is left out.

    >>> runs_of((-1, 3), 5, "constant"), runs_of((-2, 3), 5, "reflect"), runs_of((-2, 3), 5, "circular")
    (((0, 3),), ((2, 3), (1, 2), (0, 3)), ((3, 5), (0, 3)))
    """
    first, stop = span
    low, high = min(max(first, 0), size), min(max(stop, 0), size)
    inside = ((low, high),) if low < high else ()
    if border == "constant":
        return inside
    above, below = range(first, min(stop, 0)), range(max(first, size), stop)
    found: list[Range] = []
    for run in (*(_behind(row, size, border) for row in above), *inside, *(_behind(r, size, border) for r in below)):
        if found and found[-1][1] == run[0]:
            found[-1] = found[-1][0], run[1]
        else:
            found.append(run)
    return tuple(found)


def _behind(row: int, size: int, border: Border) -> Range:
    """The picture's own row that is found outside of it."""
    if border == "reflect":
        row = -row if row < 0 else 2 * (size - 1) - row
    elif border == "replicate":
        row = min(max(row, 0), size - 1)
    else:
        row %= size
    return row, row + 1


@dataclass(frozen=True, slots=True)
class Reading:
    """What each member reads of rows that lie cut: ``held[i]`` lie at member i, which reads ``needed[i]``."""

    held: tuple[Range, ...]
    needed: tuple[Runs, ...]

    def pieces(self, member: int) -> tuple[tuple[int, Range], ...]:
        """What ``member`` reads, in order: whose rows, and which of the whole.

        >>> reading_of((2, 2), SlidingWindow(3, padding=1)).pieces(0)
        ((0, (0, 2)), (1, (2, 3)))
        """
        return tuple(
            (holder, (max(a, c), min(b, d)))
            for a, b in self.needed[member]
            for holder, (c, d) in enumerate(self.held)
            if max(a, c) < min(b, d)
        )

    def given(self, holder: int, member: int) -> Runs:
        """The rows of ``holder`` that ``member`` reads."""
        return tuple(rows for at, rows in self.pieces(member) if at == holder)

    def num_given(self, holder: int, member: int) -> int:
        """How many rows ``holder`` gives to ``member``.

        >>> reading_of((3, 3), SlidingWindow(5, padding=2)).num_given(0, 1)
        2
        """
        return sum(b - a for a, b in self.given(holder, member))


@lru_cache(maxsize=1024)
def reading_of(sizes: tuple[int, ...], resize: Resize) -> Reading:
    """What each member reads for its share of the outputs, of rows that lie in these sizes."""
    size = sum(sizes)
    spans = [resize.span(outputs, size) for outputs in row_ranges(output_sizes(sizes, resize))]
    return Reading(row_ranges(sizes), tuple(runs_of(span, size, resize.border) for span in spans))


__all__ = [
    "Border",
    "Enlarged",
    "Reading",
    "Resize",
    "Runs",
    "SlidingWindow",
    "Spread",
    "balanced_rows",
    "output_sizes",
    "reading_of",
    "row_ranges",
    "runs_of",
]
