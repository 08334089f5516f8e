"""Balances pipeline stages: computes the share of work and of parameters that each stage gets, and evens a cut.

A stage's share is what it has of all work, or of all parameter bytes, times the number of stages: 1.0 is even. A
parameter that calls on several stages use, such as a tied table, counts on each of them, since each holds it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate, combinations, pairwise, product

from shardwright.plan.event_stages import UNEVEN

Bounds = tuple[int, ...]
"""The call at which each chunk begins, followed by the number of all calls."""

CutCost = tuple[float, float]
"""How bad a cut is: the smaller first number is better, and between equal ones the smaller second."""

FINER = 0.9
"""A cut of finer calls is preferred only if its largest share (1.0 is even) is below this part of the coarser cut's."""

POWER = 16
"""Where no cut is even, shares are raised to this power and added up: the largest counts most, others still count."""

MOST_EVENED = 16
"""The most chunks for which blocks are cut inside, and two boundaries are moved together.

More chunks, cut inside of blocks, would all be of different kinds, and the planner rehearses each kind (on the meta
device) to predict its cost: GPT-3 on 64 stages takes 171 CPU seconds to price then, where blocks that stay whole are of
few kinds and take 5.
"""

REACH = 4
"""Two boundaries are moved together by at most this number of calls each; one alone is moved as far as it can be."""

FOLDED = (1.05, 1.1, 1.15, 1.2, UNEVEN, 1.3, 1.35, 1.4, 1.5, 1.6, 1.8)
"""The largest shares (1.0 is even), tried in turn, for a V: each stage has one chunk from each end of the model.

Those above ``UNEVEN`` are for parameters alone; the share of work is then at most ``UNEVEN``.
"""


class StageShares:
    """Computes the share of compute and of parameters that each pipeline stage gets, for given chunk boundaries.

    A share of 1.0 is even. ``works`` has the work of each call, ``uses`` the names of the parameters that each call
    uses, ``sizes`` the bytes of each parameter, and ``stage_of`` the stage of each chunk. A parameter that no call uses
    is held by the first stage.

    >>> uses, sizes = [{"table"}, {"up"}, {"table"}], {"table": 30, "up": 10}
    >>> StageShares([1, 1, 2], uses, sizes, (0, 1)).of((0, 2, 3))
    [(1.0, 2.0), (1.0, 1.5)]
    >>> StageShares([1, 1, 2], uses, sizes, (0, 1, 0)).of((0, 1, 2, 3))
    [(1.5, 1.5), (0.5, 0.5)]
    """

    def __init__(
        self, works: Sequence[float], uses: Sequence[Collection[str]], sizes: Mapping[str, int], stage_of: Sequence[int]
    ) -> None:
        self.stage_of, self.num_stages, self.num_calls = tuple(stage_of), max(stage_of) + 1, len(works)
        where: dict[str, list[int]] = {name: [] for name in sizes}
        for place, names in enumerate(uses):
            for name in names:
                where[name].append(place)
        first_used = [0] * len(works)
        for name, calls in where.items():
            first_used[calls[0] if calls else 0] += sizes[name]
        self.work_before, self.held_before = self._shares(works), self._shares(first_used)
        unit = (sum(first_used) or 1) / self.num_stages
        self.several = [(sizes[name] / unit, calls) for name, calls in where.items() if len(calls) > 1]

    def _shares(self, values: Sequence[float]) -> list[float]:
        """Returns the running sums of ``values``, from 0, scaled to end at the number of stages."""
        unit = (sum(values) or 1.0) / self.num_stages
        return [running_sum / unit for running_sum in accumulate(values, initial=0.0)]

    def of(self, bounds: Bounds) -> list[tuple[float, float]]:
        """Returns the share of the work, and of the parameters, of each stage; 1.0 is even."""
        work, held = [0.0] * self.num_stages, [0.0] * self.num_stages
        stage_at: list[int] = []
        for stage, (first, stop) in zip(self.stage_of, pairwise(bounds), strict=True):
            work[stage] += self.work_before[stop] - self.work_before[first]
            held[stage] += self.held_before[stop] - self.held_before[first]
            stage_at += [stage] * (stop - first)
        for size, calls in self.several:
            for stage in {stage_at[call] for call in calls} - {stage_at[calls[0]]}:
                held[stage] += size
        return list(zip(work, held, strict=True))

    def unevenness(self, bounds: Bounds) -> float:
        """Returns the largest share, of work or of parameters, of any stage; 1.0 is even."""
        return max(map(max, self.of(bounds)))

    def of_run(self, first: int, stop: int) -> tuple[float, float]:
        """Returns the share of the work, and of the parameters, of a chunk of consecutive calls.

        If each stage has one chunk, it counts all parameters that its calls use; else only those that no earlier call
        uses, since chunks of one stage may share a parameter.
        """
        held = self.held_before[stop] - self.held_before[first]
        if len(self.stage_of) == self.num_stages:
            held += sum(size for size, calls in self.several if calls[0] < first and _has_between(calls, first, stop))
        return self.work_before[stop] - self.work_before[first], held

    def folded(self) -> Bounds | None:
        """Returns chunk bounds for a V (each stage has one chunk from each end of the model), as even as possible.

        The largest share is the first of ``FOLDED`` for which there are bounds. The result is None if there is none, or
        if the stages form no V.
        """
        num = self.num_stages
        if self.stage_of != (*range(num), *reversed(range(num))):
            return None
        return next(
            (bounds for most in FOLDED if (bounds := self.folded_within(min(most, UNEVEN), most)) is not None), None
        )

    def folded_within(self, most_work: float, most_held: float) -> Bounds | None:
        """Returns chunk bounds for a V with at most these shares on each stage, or None.

        A shared parameter counts only where it is first used, so a stage may hold more.
        """
        limits = ((self.work_before, most_work), (self.held_before, most_held))
        # Maps the call at which the front chunks end to the earliest call at which the back chunks can start, and to
        # the calls that bound the front chunks and the back chunks placed so far.
        choices: dict[int, tuple[int, Bounds, Bounds]] = {0: (self.num_calls, (0,), (self.num_calls,))}
        for num_left in range(2 * self.num_stages - 2, -1, -2):  # the chunks that later stages get
            next_choices: dict[int, tuple[int, Bounds, Bounds]] = {}
            for start, (stop, fronts, backs) in choices.items():
                for first in range(start + 1, stop - num_left):
                    room = [
                        bisect_left(sums, sums[first] - sums[start] + sums[stop] - most - 1e-9) for sums, most in limits
                    ]
                    last = max(first + num_left, *room)
                    if last >= stop:
                        break
                    if first not in next_choices or last < next_choices[first][0]:
                        next_choices[first] = last, (*fronts, first), (last, *backs)
            choices = next_choices
        return next(((*fronts, *backs[1:]) for first, (last, fronts, backs) in choices.items() if first == last), None)


def _has_between(calls: Sequence[int], first: int, stop: int) -> bool:
    """Returns whether one of the ``calls``, whose numbers rise, is ``first`` or later and before ``stop``."""
    place = bisect_left(calls, first)
    return place < len(calls) and calls[place] < stop


def evened(cuts: Sequence[Sequence[int]], shares: StageShares, sent: Sequence[int]) -> list[int]:
    """Returns the first of some cuts if its stages are even, or else the best that is found by moving boundaries.

    Each cut is given, and returned, as the starts of its chunks. Shares count as even up to ``UNEVEN`` (1.0 is exactly
    even). Of the cuts with even stages, the search prefers the one that sends the fewest bytes between chunks; ``sent``
    has the bytes that cross in front of each call and behind the last. If the search finds no even cut, it first makes
    the work even, or as even as possible, and then the parameters. It begins at each of the given cuts and moves one
    boundary or two at a time, so it may miss the best cut.

    >>> shares = StageShares([4, 1, 1, 1, 1, 4], [()] * 6, {}, (0, 1, 1, 0))
    >>> evened([[0, 1, 3, 4]], shares, [0, 1, 1, 1, 1, 1, 0])  # chunks of 4, 2, 1 and 5: stages of 9 and 3
    [0, 1, 3, 5]
    """
    bounds = [(*starts, shares.num_calls) for starts in cuts]
    if shares.unevenness(bounds[0]) <= UNEVEN:
        return list(cuts[0])

    def even(of: Bounds) -> CutCost:
        stage_shares = [max(pair) for pair in shares.of(of)]
        if round(max(stage_shares), 6) <= UNEVEN:
            return 0.0, sum(sent[bound] for bound in of)
        return 1.0, sum(share**POWER for share in stage_shares)

    def work_first(of: Bounds) -> CutCost:
        stage_shares = shares.of(of)
        return sum(max(work, UNEVEN) ** POWER for work, _ in stage_shares), sum(held**POWER for _, held in stage_shares)

    if (folded := shares.folded()) is not None:
        bounds.append(folded)
    best = min((_moved(origin, even) for origin in bounds), key=even)
    if even(best)[0]:
        best = min((bounds[0], best, *(_moved(origin, work_first) for origin in bounds)), key=work_first)
    return list(best[:-1])


def _moved(bounds: Bounds, price: Callable[[Bounds], CutCost]) -> Bounds:
    """Moves boundaries, one or two at a time, while that makes ``price`` smaller, and returns the last bounds."""
    least = price(bounds)
    while True:
        for moves in (_single_moves, _double_moves) if len(bounds) <= MOST_EVENED + 1 else (_single_moves,):
            best = min(moves(bounds), key=price, default=bounds)
            if price(best) < least:
                bounds, least = best, price(best)
                break
        else:
            return bounds


def _single_moves(bounds: Bounds) -> Iterator[Bounds]:
    for k in range(1, len(bounds) - 1):
        for at in range(bounds[k - 1] + 1, bounds[k + 1]):
            yield (*bounds[:k], at, *bounds[k + 1 :])


def _double_moves(bounds: Bounds) -> Iterator[Bounds]:
    steps = range(-REACH, REACH + 1)
    for (k, m), (by, other) in product(combinations(range(1, len(bounds) - 1), 2), product(steps, steps)):
        moved = [*bounds]
        moved[k], moved[m] = moved[k] + by, moved[m] + other
        if all(first < stop for first, stop in pairwise(moved)):
            yield tuple(moved)
