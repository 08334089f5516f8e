"""Keeps evenly spaced values of a series of any length in little memory, for the median of a whole run."""

from __future__ import annotations

import statistics
from array import array

MOST_VALUES = 4096
"""The most values that are kept of a series."""


class SpacedValues:
    """At most ``most`` values of a series, evenly spaced: when that many are kept, every second one is dropped.

    >>> series = SpacedValues(most=4)
    >>> for value in range(9):
    ...     series.append(value)
    >>> list(series.values), series.median()
    ([0.0, 4.0, 8.0], 4.0)
    """

    def __init__(self, most: int = MOST_VALUES) -> None:
        self.values = array("d")
        self._most, self._every, self._count = most, 1, 0

    def append(self, value: float) -> None:
        """Takes the next value of the series, and keeps it or leaves it out, so that kept values are evenly spaced."""
        if self._count % self._every == 0:
            if len(self.values) == self._most:
                del self.values[1::2]
                self._every *= 2
            if self._count % self._every == 0:
                self.values.append(value)
        self._count += 1

    def median(self, num_first: int = 0) -> float | None:
        """Returns the median of the kept values, without the first ``num_first`` if more than twice as many are kept.

        The result is None for an empty series.
        """
        late = self.values[num_first:] if len(self.values) > 2 * num_first else self.values
        return statistics.median(late) if late else None
