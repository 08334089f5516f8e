"""Finds where a forward computes with its number of samples as a value, which is another one where a batch is cut."""

from __future__ import annotations

from collections.abc import Iterator
from math import isclose

from shardwright.analysis.operator_results import leaves_of
from shardwright.analysis.recording import RecordedCall, Recording

LARGEST = 2.0**53
"""A number that is larger, as a mask's least value, is no count."""

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
        and any(number in each.shape for each in call.operands)
        and any(_may_be_of(value, number) for value in _numbers(call))
    ]


def differ(call: RecordedCall, other: RecordedCall) -> bool:
    """Returns whether two records of a call, on other numbers of samples, compute with other numbers."""
    if call.function is not other.function or call.module != other.module:
        return False
    pairs = zip(_numbers(call), _numbers(other), strict=False)
    return any(not isclose(a, b, rel_tol=1e-9) for a, b in pairs)


def _numbers(call: RecordedCall) -> Iterator[float]:
    return (each for each in leaves_of((call.args, call.named), (int, float)) if each and abs(each) < LARGEST)


def _may_be_of(value: float, number: int) -> bool:
    """Returns whether a value is a multiple of ``number``, or so many parts of one.

    >>> _may_be_of(46, 23), _may_be_of(16 / 23, 23), _may_be_of(0.5, 23), _may_be_of(1, 23)
    (True, True, False, False)
    """
    whole, parts = value / number, value * number
    is_part = isclose(parts, round(parts), rel_tol=1e-9) and not isclose(value, round(value), rel_tol=1e-9)
    return (isclose(whole, round(whole), rel_tol=1e-9) and round(whole) != 0) or (is_part and round(parts) != 0)
