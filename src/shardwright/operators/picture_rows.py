"""Computes which input rows of a picture an operator reads for some rows of its output, without touching tensors.

::

    rank 0   | 0 1 2 3 4 |            kernel 3, padding 1: rank 1 computes rows 5 to 9,
    rank 1           4 | 5 6 7 8 9 | 10      and reads rows 4 and 10 of others, its *halo*
    rank 2                       9 | 10 11 12 |

A *resize* (window, enlargement or transposed convolution) computes how many rows come out, and the *span* of rows that
some of them read, first and stop. A span may reach outside the picture, where the ``border`` gives the rows. The
spatial strategy plans and prices halos with these functions, and :mod:`~shardwright.operators.halo` sends them.
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
"""The rows beyond a picture's edge: a constant, or repeated rows of the picture, as torch's ``padding_mode``."""

Runs = tuple[Range, ...]
"""Ranges of rows in the order in which they are read; a row may be read more than once."""


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """A convolution or pooling along one dim: one output reads a window of rows.

    ``padding`` is before the first row and, unless ``after`` is given, after the last. ``ceil`` lets the last window
    reach beyond the end, as torch's ``ceil_mode``.
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
        """The number of rows from the first to the last that one output row reads."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def paddings(self) -> tuple[int, int]:
        """The padding before the first row and after the last, in rows."""
        return self.padding, self.padding if self.after is None else self.after

    def num_outputs(self, size: int) -> int:
        """Returns the number of output rows for ``size`` input rows."""
        room = size + sum(self.paddings) - self.reach
        if not self.ceil:
            return room // self.stride + 1
        num = -(-room // self.stride) + 1
        return num - 1 if (num - 1) * self.stride >= size + self.padding else num  # its last window is all padding

    def span(self, outputs: Range, size: int = 0) -> Range:
        """Returns the input rows (first, stop) that the rows ``outputs`` read.

        Rows outside 0 to ``size`` are border. For an empty range of outputs it is (0, 0).
        """
        first, stop = outputs
        if first == stop:
            return 0, 0
        return first * self.stride - self.padding, (stop - 1) * self.stride - self.padding + self.reach

    def skip(self, outputs: Range, size: int) -> int:
        """Returns 0: run on the input rows that ``outputs`` read, the operator computes no rows before ``outputs``."""
        return 0


@dataclass(frozen=True, slots=True)
class Upsampling:
    """An upsampling along one dim: each input row gives ``factor`` rows, from it and ``margin`` rows on either side.

    ``border`` says which rows are read beyond the picture's edge. ``reach`` is the least number of input rows on which
    the operator can run.
    """

    factor: int
    margin: int = 0
    border: Border = "replicate"
    reach: int = 1

    def num_outputs(self, size: int) -> int:
        """Returns the number of output rows for ``size`` input rows."""
        return size * self.factor

    def span(self, outputs: Range, size: int = 0) -> Range:
        """Returns the input rows (first, stop) that the output rows ``outputs`` read.

        Rows outside 0 to ``size`` are border. For an empty range of outputs it is (0, 0).
        """
        first, stop = outputs
        if first == stop:
            return 0, 0
        return first // self.factor - self.margin, (stop - 1) // self.factor + 1 + self.margin

    def skip(self, outputs: Range, size: int) -> int:
        """Returns how many rows to drop before ``outputs`` if the operator runs on the input rows that they read."""
        return outputs[0] - self.span(outputs)[0] * self.factor


@dataclass(frozen=True, slots=True)
class TransposedWindow:
    """A transposed convolution along one dim: each input row adds to ``kernel`` output rows, ``dilation`` apart.

    Input row i adds to rows from i * stride - padding on. ``more`` is torch's ``output_padding``. ``reach`` is the
    least number of input rows on which the operator can run. No row beyond the picture's edge is read, whatever
    ``border`` is.
    """

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    more: int = 0
    border: Border = "constant"
    reach: int = 1

    def num_outputs(self, size: int) -> int:
        """Returns the number of output rows for ``size`` input rows."""
        return (size - 1) * self.stride - 2 * self.padding + self.dilation * (self.kernel - 1) + self.more + 1

    def span(self, outputs: Range, size: int = 0) -> Range:
        """Returns the input rows (first, stop) that add to the output rows ``outputs``.

        If no input row does, one row is returned, because an operator needs an input. For no outputs it is (0, 0).
        """
        first, stop = outputs
        if first == stop:
            return 0, 0
        low = -(-(first + self.padding - self.dilation * (self.kernel - 1)) // self.stride)
        low = min(max(low, 0), size - 1)
        return low, max(low + 1, min((stop - 1 + self.padding) // self.stride + 1, size))

    def skip(self, outputs: Range, size: int) -> int:
        """Returns how many rows to drop before ``outputs`` if the operator runs on the input rows that add to them.

        A negative number says how many rows of zeros to add there instead.
        """
        return outputs[0] + self.padding - self.span(outputs, size)[0] * self.stride


Resize = SlidingWindow | Upsampling | TransposedWindow


def row_ranges(sizes: Sequence[int]) -> tuple[Range, ...]:
    """Returns each rank's range of rows (start, stop) in the whole picture, from how many rows each rank holds.

    >>> row_ranges((3, 0, 2))
    ((0, 3), (3, 3), (3, 5))
    """
    return tuple(pairwise(accumulate(sizes, initial=0)))


def balanced_rows(size: int, parts: int) -> tuple[int, ...]:
    """Returns how many of ``size`` rows each of ``parts`` ranks holds in a balanced cut.

    >>> balanced_rows(7, 3)
    (3, 2, 2)
    """
    return tuple(b - a for a, b in pairwise(balanced(size, parts)))


def output_sizes(sizes: Sequence[int], resize: Resize) -> tuple[int, ...]:
    """Returns how many output rows each rank computes: a balanced cut, however many input rows each holds.

    Raises: LayoutError: the window is larger than the picture.

    >>> output_sizes((4, 3, 3), SlidingWindow(3)), output_sizes((4, 3, 3), SlidingWindow(2, stride=2))
    ((3, 3, 2), (2, 2, 1))
    """
    num_outputs = resize.num_outputs(sum(sizes))
    if num_outputs < 1:
        raise LayoutError(
            "the window is larger than the picture",
            given=f"{sum(sizes)} rows and {resize}",
            allowed=f"{resize.reach - sum(resize.paddings) if isinstance(resize, SlidingWindow) else 1} rows or more",
            fix="use a smaller kernel or dilation, or more padding",
        )
    return balanced_rows(num_outputs, len(sizes))


def runs_of(span: Range, size: int, border: Border) -> Runs:
    """Returns the ranges of picture rows that are read for the rows ``span``, which may reach outside the picture.

    A row outside counts as the row that the border repeats there; rows of a constant border are left out.

    >>> runs_of((-1, 3), 5, "constant"), runs_of((-2, 3), 5, "reflect"), runs_of((-2, 3), 5, "circular")
    (((0, 3),), ((2, 3), (1, 2), (0, 3)), ((3, 5), (0, 3)))
    """
    first, stop = span
    low, high = min(max(first, 0), size), min(max(stop, 0), size)
    inside = ((low, high),) if low < high else ()
    if border == "constant":
        return inside
    above, below = range(first, min(stop, 0)), range(max(first, size), stop)
    runs: list[Range] = []
    for run in (*(_mirrored(r, size, border) for r in above), *inside, *(_mirrored(r, size, border) for r in below)):
        if runs and runs[-1][1] == run[0]:  # consecutive rows are joined to one range
            runs[-1] = runs[-1][0], run[1]
        else:
            runs.append(run)
    return tuple(runs)


def _mirrored(row: int, size: int, border: Border) -> Range:
    """Returns the row of the picture that the border repeats at ``row``, which lies outside."""
    if border == "reflect":
        row = -row if row < 0 else 2 * (size - 1) - row
    elif border == "replicate":
        row = min(max(row, 0), size - 1)
    else:
        row %= size
    return row, row + 1


@dataclass(frozen=True, slots=True)
class HaloRows:
    """The halo of sharded rows on each rank of an axis: rank i holds the rows ``held[i]`` and reads ``needed[i]``."""

    held: tuple[Range, ...]
    needed: tuple[Runs, ...]

    def pieces(self, member: int) -> tuple[tuple[int, Range], ...]:
        """Returns the rows that rank ``member`` reads, in order: pairs (rank that holds them, range of rows)."""
        return tuple(
            (holder, (max(a, c), min(b, d)))
            for a, b in self.needed[member]
            for holder, (c, d) in enumerate(self.held)
            if max(a, c) < min(b, d)
        )

    def given(self, holder: int, member: int) -> Runs:
        """Returns the ranges of rows held by rank ``holder`` that rank ``member`` reads."""
        return tuple(rows for at, rows in self.pieces(member) if at == holder)

    def num_given(self, holder: int, member: int) -> int:
        """Returns the number of rows held by rank ``holder`` that rank ``member`` reads."""
        return sum(b - a for a, b in self.given(holder, member))


@lru_cache(maxsize=1024)
def reading_of(sizes: tuple[int, ...], resize: Resize) -> HaloRows:
    """Returns an operator's :class:`HaloRows`: the rows that each rank holds, and those that its output rows read.

    ``sizes`` are the numbers of rows held. Output rows are cut in balanced shares.

    Raises: LayoutError: the window is larger than the picture.

    >>> reading_of((2, 2), SlidingWindow(3, padding=1)).pieces(0)
    ((0, (0, 2)), (1, (2, 3)))
    """
    size = sum(sizes)
    spans = [resize.span(outputs, size) for outputs in row_ranges(output_sizes(sizes, resize))]
    return HaloRows(row_ranges(sizes), tuple(runs_of(span, size, resize.border) for span in spans))
