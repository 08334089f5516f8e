"""Finds code that computes with the batch size, or with a sample's index in the batch.

Both change where a batch is cut: a rank or a microbatch has fewer samples, and its first one is not that of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose

from shardwright.analysis.operator_results import leaves_of
from shardwright.analysis.recording import RecordedCall, Recording, TensorUse

LARGEST = 2.0**53
"""A number that is larger, as a mask's least value, is no count."""

_MAKERS = frozenset(("arange", "linspace", "logspace"))
"""Functions that make a tensor of elements that differ."""

_PARTS = frozenset(("slice", "narrow", "split", "split_with_sizes"))
"""Functions that take successive elements of a tensor."""

_PRODUCTS = frozenset(("addmm", "baddbmm", "bmm", "linear", "mm"))
"""Matrix products. A factor made from places in the batch selects the rows to add up, such as the nodes of each graph
of a batch, and adds no value of its own."""

_PICKS = ("index", "gather", "scatter", "embedding", "take", "sort", "cross_entropy", "nll_loss")
"""Parts of the names of functions that only take elements, or put them, by numbers among their operands."""

_ARITHMETIC = frozenset(("add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "pow", "remainder"))


def calls_with_counts(recording: Recording) -> list[int]:
    """Returns the indices of calls that may compute with the number of samples: they have a multiple or a part of it.

    Some tensor of these calls has a value for each sample. That the number follows from the samples, and is not one by
    chance, a record with another number of samples shows (:func:`differ`).
    """
    number = recording.num_samples
    return [
        index
        for index, call in enumerate(recording.calls)
        if call.name.rstrip("_") in _ARITHMETIC
        and any(number in use.shape for use in call.operands)
        and any(_may_be_of(value, number) for value in _numbers(call))
    ]


def calls_by_place(recording: Recording) -> list[int]:
    """Returns the indices of calls that may compute values of samples with others that differ by place in the batch.

    These are numbers that the forward makes, one for each sample (``x + arange(len(x))``), or as many elements of a
    parameter, a buffer or a table (``x + positions[: len(x)]``). Numbers by which elements are taken are none, nor is a
    call whose results are whole numbers: such as ``i + n * arange(len(x))`` are numbers of rows. That the elements are
    as many as the samples, and not by chance, a record with another number of samples shows.
    """
    number, of_samples, by_place = recording.num_samples, {*recording.inputs}, set[TensorUse]()
    indices = []
    for index, call in enumerate(recording.calls):
        operands = call.operands
        if not of_samples.isdisjoint(operands):
            of_samples.update(call.results, call.written)
            by_place.difference_update(call.written if call.name == "copy_" else ())  # rows of a cache that are filled
            is_value = (
                not _picks(call) and call.name not in _PRODUCTS and any(use.has_fractions for use in call.results)
            )
            if is_value and not by_place.isdisjoint(operands):
                indices.append(index)
            continue
        from_table = all(number not in use.shape for use in operands[:1])
        # elements that are taken from one row for each sample are those of its row, whichever numbers take them
        causes = operands[:1] if _picks(call) and not from_table else operands
        makes = call.name in _MAKERS or (call.name in _PARTS and from_table)
        if makes or not by_place.isdisjoint(causes):
            by_place.update(use for use in call.results if number in use.shape)
    return indices


def _picks(call: RecordedCall) -> bool:
    return any(part in call.name for part in _PICKS)


def differ(call: RecordedCall, other: RecordedCall) -> bool:
    """Returns whether two records of a call, on other numbers of samples, compute with other numbers."""
    if call.function is not other.function or call.module != other.module:
        return False
    pairs = zip(_numbers(call), _numbers(other), strict=False)
    return any(not isclose(a, b, rel_tol=1e-9) for a, b in pairs)


def _numbers(call: RecordedCall) -> Iterator[float]:
    return (value for value in leaves_of((call.args, call.named), (int, float)) if value and abs(value) < LARGEST)


def _may_be_of(value: float, number: int) -> bool:
    """Returns whether a value is a multiple of ``number``, or so many parts of one.

    >>> _may_be_of(46, 23), _may_be_of(16 / 23, 23), _may_be_of(0.5, 23), _may_be_of(1, 23)
    (True, True, False, False)
    """
    whole, parts = value / number, value * number
    is_part = isclose(parts, round(parts), rel_tol=1e-9) and not isclose(value, round(value), rel_tol=1e-9)
    return (isclose(whole, round(whole), rel_tol=1e-9) and round(whole) != 0) or (is_part and round(parts) != 0)
