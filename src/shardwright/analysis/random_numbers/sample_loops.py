"""Finds modules that draw random numbers for one sample of a batch after another, in a loop over the samples.

A rank or a microbatch has fewer samples, so it makes fewer of these draws. The number of a draw, or of a call of the
module, is therefore translated to the number that the same draw has in the recorded forward::

    recorded, 5 samples      draw 0    1 2   3 4   5 6   7 8   9 10   11    two for each sample, one before and after
    a rank with 2 samples    draw 0    1 2   3 4   5                        its draw 5 is the recorded draw 11
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple


class SampleLoop(NamedTuple):
    """Which draws of a module are made in a loop over the samples.

    A turn is one draw within a call of the module if ``in_call``, else one call of the module. ``first`` turns come
    before the loop, ``every`` turns belong to each sample, and ``last`` turns come after the loop. The recorded batch
    has ``num_samples`` samples.
    """

    first: int
    every: int
    last: int
    num_samples: int
    in_call: bool

    def total(self, count: int) -> int:
        """Returns the number of turns in a forward with ``count`` samples."""
        return self.first + self.every * count + self.last

    def recorded(self, turn: int, count: int) -> tuple[int, int | None]:
        """Returns the recorded turn that does the same as a ``turn`` among ``count`` samples, and the sample's index.

        The recorded turn is that of the first sample; the index is None for a turn outside of the loop.

        >>> loop = SampleLoop(first=1, every=2, last=1, num_samples=5, in_call=True)
        >>> [loop.recorded(turn, count=2) for turn in range(6)]
        [(0, None), (1, 0), (2, 0), (1, 1), (2, 1), (11, None)]
        """
        inside = turn - self.first
        if inside < 0:
            return turn, None
        if inside >= self.every * count:
            return turn + self.every * (self.num_samples - count), None
        return self.first + inside % self.every, inside // self.every


def sample_loops(samples: Mapping[str, Mapping[int, Sequence[int | None]]], count: int) -> dict[str, SampleLoop | None]:
    """Returns the loops over the ``count`` samples of a recorded batch, by the module that draws in them.

    ``samples`` lists, by the module's name and the number of its call, the sample for which each draw of the call is
    made; None stands for a draw that is not for one sample alone. The result has None for a module that draws for each
    sample alone in another way, such as by two loops. It has no entry for a module that does not draw for each sample.

    >>> sample_loops({"drop": {call: [call] for call in range(3)}}, 3)
    {'drop': SampleLoop(first=0, every=1, last=0, num_samples=3, in_call=False)}
    >>> sample_loops({"gru": {0: [None, 0, 0, 1, 1, 2, 2]}}, 3)
    {'gru': SampleLoop(first=1, every=2, last=0, num_samples=3, in_call=True)}
    >>> sample_loops({"drop": {0: [None]}, "both": {0: [0, 1, 2, 2, 1, 0]}, "first": {0: [0]}}, 3)
    {'both': None}
    """
    loops: dict[str, SampleLoop | None] = {}
    for path, calls in samples.items():
        if count > 1 and {*chain.from_iterable(calls.values())} >= {*range(count)}:
            loops[path] = _over_draws(calls, count) or _over_calls(calls, count)
    return loops


def _over_draws(calls: Mapping[int, Sequence[int | None]], count: int) -> SampleLoop | None:
    """Returns the loop that every call makes over all samples in turn; None if there is none."""
    every = list(calls.values())
    return _loop(every[0], count, in_call=True) if all(draws == every[0] for draws in every) else None


def _over_calls(calls: Mapping[int, Sequence[int | None]], count: int) -> SampleLoop | None:
    """Returns the loop in which code calls the module for one sample after another; None if there is none."""
    if [*calls] != [*range(len(calls))] or any(len(set(draws)) > 1 for draws in calls.values()):
        return None
    loop = _loop([draws[0] for draws in calls.values()], count, in_call=False)
    if loop is None:
        return None
    like = [len(calls[loop.recorded(call, count)[0]]) for call in calls]  # draws in the first sample's matching call
    return loop if like == [len(draws) for draws in calls.values()] else None


def _loop(turns: Sequence[int | None], count: int, *, in_call: bool) -> SampleLoop | None:
    """Returns the loop if it takes the samples in order, with as many turns for each; else None.

    ``turns`` has the sample of each turn, or None.
    """
    inside = [sample for sample in turns if sample is not None]
    every = len(inside) // count
    first = turns.index(0)
    in_order = [number for number in range(count) for _ in range(every)]
    if [*turns[first : first + len(inside)]] != in_order:
        return None
    return SampleLoop(first, every, len(turns) - first - len(inside), count, in_call)
