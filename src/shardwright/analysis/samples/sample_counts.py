"""Finds code that computes with the batch size, or with a sample's index in the batch.

Both numbers change when a batch is cut: a rank or a microbatch has fewer samples than the batch, and its first sample
is not the first sample of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose

from shardwright.analysis.on_meta.operator_results import leaves_of
from shardwright.analysis.recorded.recording import RecordedCall, Recording, TensorUse

LARGEST = 2.0**53
"""A number above this is no count of samples; it may be the fill value of a mask, for example."""

_MAKERS = frozenset(("arange", "linspace", "logspace"))
"""Functions that make a tensor whose elements differ from each other."""

_PARTS = frozenset(("slice", "narrow", "split", "split_with_sizes"))
"""Functions that take successive elements of a tensor."""

_PRODUCTS = frozenset(("addmm", "baddbmm", "bmm", "linear", "mm"))
"""Matrix products. A factor made from places in the batch selects the rows to add up, such as the nodes of each graph
of a batch, and adds no value of its own."""

_PICKS = ("index", "gather", "scatter", "embedding", "take", "sort", "cross_entropy", "nll_loss")
"""Parts of the names of functions that only read or write elements at indices, which are one of their operands."""

_ARITHMETIC = frozenset(("add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "pow", "remainder"))


def calls_with_counts(recording: Recording) -> list[int]:
    """Returns the indices of calls that may compute with the number of samples.

    Some operand of these calls has a dim as large as the number of samples, and some plain number among their arguments
    is a multiple or a fraction of it. That may be chance: a record with another number of samples shows whether the
    number changes with the samples (:func:`differ`).
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
    """Returns the indices of calls that may combine samples' values with values that depend on the place in the batch.

    Such values are numbers that the forward makes, one for each sample (``x + arange(len(x))``), or as many elements of
    a parameter, a buffer or a table as there are samples (``x + positions[: len(x)]``). Numbers that are only used as
    indices do not count. Nor does a call whose results are integers: ``i + n * arange(len(x))`` gives row numbers. The
    sizes may be equal by chance; a record with another number of samples shows whether they are.
    """
    number, of_samples, by_place = recording.num_samples, {*recording.inputs}, set[TensorUse]()
    indices = []
    for index, call in enumerate(recording.calls):
        operands = call.operands
        if not of_samples.isdisjoint(operands):
            of_samples.update(call.results, call.written)
            by_place.difference_update(call.written if call.name == "copy_" else ())  # such as filled rows of a cache
            is_value = (
                not _picks(call) and call.name not in _PRODUCTS and any(use.has_fractions for use in call.results)
            )
            if is_value and not by_place.isdisjoint(operands):
                indices.append(index)
            continue
        from_table = all(number not in use.shape for use in operands[:1])
        # what is picked from a tensor with one row per sample belongs to that sample, whatever the indices are
        causes = operands[:1] if _picks(call) and not from_table else operands
        makes = call.name in _MAKERS or (call.name in _PARTS and from_table)
        if makes or not by_place.isdisjoint(causes):
            by_place.update(use for use in call.results if number in use.shape)
    return indices


def _picks(call: RecordedCall) -> bool:
    return any(part in call.name for part in _PICKS)


def differ(call: RecordedCall, other: RecordedCall) -> bool:
    """Returns whether a call, recorded on two different numbers of samples, computes with different plain numbers."""
    if call.function is not other.function or call.module != other.module:
        return False
    pairs = zip(_numbers(call), _numbers(other), strict=False)
    return any(not isclose(a, b, rel_tol=1e-9) for a, b in pairs)


def _numbers(call: RecordedCall) -> Iterator[float]:
    return (value for value in leaves_of((call.args, call.named), (int, float)) if value and abs(value) < LARGEST)


def _may_be_of(value: float, number: int) -> bool:
    """Returns whether a value is a multiple of ``number``, or a fraction with ``number`` as the denominator.

    >>> _may_be_of(46, 23), _may_be_of(16 / 23, 23), _may_be_of(0.5, 23), _may_be_of(1, 23)
    (True, True, False, False)
    """
    whole, parts = value / number, value * number
    is_part = isclose(parts, round(parts), rel_tol=1e-9) and not isclose(value, round(value), rel_tol=1e-9)
    return (isclose(whole, round(whole), rel_tol=1e-9) and round(whole) != 0) or (is_part and round(parts) != 0)
