"""Times calls on all ranks at once: the median of ten runs after three warm-ups, and how far the runs spread."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from time import perf_counter
from typing import Any, NamedTuple

import torch

from shardwright import devices
from shardwright.comm.axis import Axis

WARM_UPS, RUNS = 3, 10
"""The runs of a call that are not counted, and those that are."""

LEAST_S, MOST_CALLS = 2e-4, 50
"""A run lasts at least so many seconds: a shorter call is made several times in it, at most ``MOST_CALLS``."""


class Timing(NamedTuple):
    """The seconds of one call: the median of several runs, the spread of the runs, and their number.

    The spread is the distance from the first to the third quartile, as a share of the median.

    >>> Timing.of([1.0, 1.0, 2.0, 3.0, 3.0])
    Timing(seconds=2.0, spread=1.0, runs=5)
    """

    seconds: float
    spread: float
    runs: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Returns the timing of runs that took these seconds."""
        if len(seconds) < 2:
            return cls(seconds[0], 0.0, 1)
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(middle, (high - low) / middle if middle else 0.0, len(seconds))


@dataclass
class Stopwatch:
    """Times calls that all ranks make at the same moment, as in a training step, and keeps within a time limit.

    ``everyone`` has all ranks, and ``limit_s`` is the time in seconds after which calls are no longer timed: then
    :meth:`timed` returns None on every rank. What takes longer than ``most_s`` in all is run fewer times.

    >>> from shardwright.comm.launch import launch
    >>> timings = launch(lambda world: Stopwatch(world.everyone()).timed(lambda: sum(range(100))), 2, ranks="threads")
    >>> timings[0] == timings[1], timings[0].seconds > 0, timings[0].runs
    (True, True, 10)
    """

    everyone: Axis
    limit_s: float = 80.0
    most_s: float = 4.0

    def __post_init__(self) -> None:
        self._began = perf_counter()

    def timed(self, call: Callable[[], Any], *, parts: int = 1, takes_part: bool = True) -> Timing | None:
        """Returns the seconds that ``call`` takes, the mean over ranks; all ranks must make the same calls.

        The seconds are divided by ``parts``, the number of like parts of the call. A rank on which the call does
        nothing passes ``takes_part=False`` and is not in the mean. The result is None if the time limit has passed, or
        if a single call takes too long.
        """
        timings = self.timed_in_turn([call], takes_part=takes_part)
        return timings[0]._replace(seconds=timings[0].seconds / parts) if timings else None

    def timed_in_turn(self, calls: Sequence[Callable[[], Any]], *, takes_part: bool = True) -> tuple[Timing, ...]:
        """Returns the seconds of each of several calls, which are made one after the other in each run.

        It returns () where :meth:`timed` returns None.
        """
        if self._agreed(perf_counter() - self._began) > self.limit_s:
            return ()
        for call in calls:
            self._run(call, 1)
        longest = self._agreed(sum(self._run(call, 1) for call in calls))
        if 3 * longest > self.most_s:
            return ()
        # several calls in turn depend on each other, so that each is made once
        times = min(MOST_CALLS, ceil(LEAST_S / max(longest, 1e-7))) if len(calls) == 1 else 1
        runs = max(3, min(RUNS, int(self.most_s / max(longest * times, 1e-7)) - WARM_UPS))
        for _ in range(WARM_UPS - 2):
            for call in calls:
                self._run(call, times)
        mine = torch.tensor(
            [[self._run(call, times) / times for call in calls] for _ in range(runs)], dtype=torch.float64
        )
        mine = mine if takes_part else torch.full_like(mine, torch.nan)
        every = self.everyone.all_gather(mine[None].to(self.everyone.device)).nanmean(0)
        return tuple(Timing.of(column.tolist()) for column in every.T)

    def _run(self, call: Callable[[], Any], calls: int) -> float:
        self.everyone.barrier()
        device = self.everyone.device
        start = devices.moment(device)
        for _ in range(calls):
            call()
        return devices.seconds_between(start, devices.moment(device))

    def _agreed(self, seconds: float) -> float:
        """Returns the largest ``seconds`` of all ranks, so that all ranks decide alike."""
        mine = torch.tensor([seconds], dtype=torch.float64, device=self.everyone.device)
        return float(self.everyone.all_reduce(mine, "max").item())
