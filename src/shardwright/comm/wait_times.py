"""Times how long a rank waits for collectives and messages, by axis, in the step for which it is asked."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

Result = TypeVar("Result")


class WaitTimes(threading.local):
    """The seconds that this thread has waited for messages, by axis; ``seconds`` is None while nothing is timed.

    ``axis`` is the axis of the thread's latest call. Each rank has one thread, so ranks that are threads are apart.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] | None = None
        self.axis = ""
        self._inside = False

    def timed(self, axis: str, finish: Callable[[], Result]) -> Result:
        """Returns ``finish()``, and counts its seconds as a wait on ``axis``, unless another wait is under way."""
        if self._inside or self.seconds is None:
            return finish()
        self._inside, start_s = True, perf_counter()
        try:
            return finish()
        finally:
            self._inside = False
            self.seconds[axis] += perf_counter() - start_s

    @contextmanager
    def timing(self) -> Iterator[dict[str, float]]:
        """Returns a context that yields the seconds of this thread's waits inside it, by axis.

        On an accelerator they are those of the host, which does not wait for messages of the device.
        """
        before, self.seconds = self.seconds, defaultdict(float)
        try:
            yield self.seconds
        finally:
            self.seconds = before


waits = WaitTimes()
"""The waits of the calling thread."""
