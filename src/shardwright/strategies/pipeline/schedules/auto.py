"""Searches named and greedy pipeline schedules for the shortest step, given each chunk's times and a memory limit.

The search is not complete: finding the best order is a job-shop problem. The result is never worse than the best named
schedule that fits the memory limit, and the same input gives the same result.

Source: Qi et al. 2023, arXiv:2401.10241, section 3, search with a heuristic of this kind for one chunk a stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from typing import NoReturn

from shardwright.errors import LayoutError, PlanError, check_at_least
from shardwright.plan.schedule import Schedule
from shardwright.runtime.timeline import Timeline
from shardwright.strategies.pipeline.schedules import SCHEDULES
from shardwright.strategies.pipeline.schedules.common import round_robin, v_shape
from shardwright.strategies.pipeline.schedules.greedy import SchedulingRules, greedy
from shardwright.strategies.pipeline.simulate import ChunkMemory, ChunkTimes, simulate

# How many actions the greedy scheduler's lists may have together, for each number of chunks; a few seconds of search.
_BUDGET_ACTIONS = 400_000


def search(
    num_stages: int,
    num_microbatches: int,
    times: ChunkTimes | Sequence[ChunkTimes],
    memory: ChunkMemory | Sequence[ChunkMemory] | None = None,
    limit_bytes: int | None = None,
    max_chunks_per_stage: int = 2,
) -> tuple[Schedule, Timeline]:
    """Returns the fastest schedule found that keeps each stage within ``limit_bytes``, and its simulated timeline.

    ``times`` are those of the chunks of one cut of the model, into the same number of chunks for each stage. With a
    sequence, of one entry for each cut, the search also chooses how many chunks a stage holds, up to
    ``max_chunks_per_stage``. ``memory`` gives the bytes of the same chunks, which a limit needs. Of two equally fast
    schedules, the one with the lower peak bytes is returned.

    Raises: LayoutError: there is no stage or no microbatch, a cut has a number of chunks that is not allowed or that
        another cut has too, or the bytes of a cut are missing. PlanError: no schedule fits the limit.

    >>> uneven = ChunkTimes(forward_s=(1, 3), input_s=(1, 3), weight_s=(1, 3))
    >>> schedule, timeline = search(2, 4, [uneven, ChunkTimes.equal(4, 1, 1, 1)])
    >>> schedule.num_chunks, timeline.makespan_s
    (4, 25.0)
    """
    check_at_least("num_stages", num_stages, 1, fix="a pipeline has one stage or more: set pp=1")
    check_at_least("num_microbatches", num_microbatches, 1, fix=f"start at {4 * num_stages}, four for each stage")
    cuts = _cuts(num_stages, times, max_chunks_per_stage)
    bytes_of = _bytes(cuts, memory, limit_bytes)
    limit = math.inf if limit_bytes is None else limit_bytes
    best: tuple[float, int] | None = None
    for num_chunks, of_cut in cuts.items():
        held = bytes_of[num_chunks]
        for candidate in _candidates(num_stages, num_microbatches, of_cut, held, limit):
            makespan_and_peak = _makespan_and_peak(candidate, of_cut, held)
            if makespan_and_peak[1] <= limit and (best is None or makespan_and_peak < best):
                best, schedule = makespan_and_peak, candidate
    if best is None:
        _raise_too_much(num_stages, bytes_of, limit)
    counted = None if memory is None else bytes_of[schedule.num_chunks]
    return schedule, simulate(schedule, cuts[schedule.num_chunks], counted)


def _cuts(
    num_stages: int, times: ChunkTimes | Sequence[ChunkTimes], max_chunks_per_stage: int
) -> dict[int, ChunkTimes]:
    """Returns the given chunk times by number of chunks, fewest first.

    Raises LayoutError for a number of chunks that does not fit the stages or comes twice.
    """
    all_times = [times] if isinstance(times, ChunkTimes) else list(times)
    cuts = {of_cut.num_chunks: of_cut for of_cut in all_times}
    allowed = [num_stages * per_stage for per_stage in range(1, max_chunks_per_stage + 1)]
    if not all_times or len(cuts) < len(all_times) or not set(cuts) <= set(allowed):
        raise LayoutError(
            f"these times are not for chunks on {num_stages} stages",
            given="times for " + (", ".join(str(t.num_chunks) for t in all_times) or "nothing") + " chunks",
            allowed="each at most once: " + (", ".join(map(str, allowed)) or "none"),
            fix="time the model cut into as many chunks, or raise max_chunks_per_stage",
        )
    return dict(sorted(cuts.items()))


def _bytes(
    cuts: Mapping[int, ChunkTimes], memory: ChunkMemory | Sequence[ChunkMemory] | None, limit_bytes: int | None
) -> dict[int, ChunkMemory]:
    """Returns the chunks' bytes by number of chunks.

    Without ``memory`` and a limit, chunks of one cut are equal, and a microbatch has the same total bytes in every cut.

    Raises LayoutError if the bytes of a cut are missing.
    """
    if memory is None and limit_bytes is None:
        microbatch_bytes = math.lcm(*cuts)
        return {num_chunks: ChunkMemory.equal(num_chunks, microbatch_bytes // num_chunks) for num_chunks in cuts}
    memories = [] if memory is None else [memory] if isinstance(memory, ChunkMemory) else list(memory)
    bytes_of = {of_cut.num_chunks: of_cut for of_cut in memories}
    if not set(cuts) <= set(bytes_of):
        raise LayoutError(
            "a memory limit needs the bytes of every chunk",
            given="bytes for " + (", ".join(map(str, bytes_of)) or "no") + " chunks",
            allowed="one ChunkMemory for each ChunkTimes: for " + ", ".join(map(str, cuts)) + " chunks",
            fix="give ChunkMemory(...) for the same chunks, or no limit",
        )
    return bytes_of


def _candidates(
    num_stages: int, num_microbatches: int, times: ChunkTimes, memory: ChunkMemory, limit: float
) -> Iterator[Schedule]:
    """Yields the named schedules with this number of chunks, then as many greedy ones as the budget allows."""
    per_stage = times.num_chunks // num_stages
    for family in SCHEDULES.values():
        if family.takes(per_stage):
            yield family.builder(num_stages, num_microbatches, per_stage)
    most = max(1, _BUDGET_ACTIONS // (3 * times.num_chunks * num_microbatches))
    for stage_of, preferences in islice(_preferences(num_stages, num_microbatches, per_stage), most):
        schedule = greedy(stage_of, num_microbatches, times, preferences, memory, limit)
        if schedule is not None:
            yield schedule


def _preferences(
    num_stages: int, num_microbatches: int, per_stage: int
) -> Iterator[tuple[tuple[int, ...], SchedulingRules]]:
    """Yields pairs (stage of each chunk, preferences of the greedy scheduler) to try, most promising first."""
    most = per_stage * num_microbatches
    after = range(num_stages, 0, -1)  # for each stage, how many stages follow, itself included
    full = per_stage * num_stages
    if per_stage == 1:  # the limits of ZB-H2 and 1F1B come first
        placements = [round_robin(num_stages, 1)]
        limits = [[2 * n - 1 for n in after], [*after], [n + 1 for n in after], [2 * n for n in after]]
        equal = [most, full, 2 * full - 1]
    else:
        placements = [v_shape(num_stages)] if per_stage == 2 else []
        placements.append(round_robin(num_stages, per_stage))
        limits = [[2 * (n - 1) + full - num_stages + 1 for n in after]]  # interleaved 1F1B
        equal = [full, full + 1, most, full + num_stages, full // 2 + 2, 2 * full - 1]
    limits += [[count] * num_stages for count in equal]
    seen = set()
    for forward_first, deep_first in product((False, True), (True, False)[:per_stage]):
        for patient, counts, stage_of in product((False, True), limits, placements):
            most_held = tuple(min(max(n, per_stage), most) for n in counts)
            candidate = stage_of, SchedulingRules(most_held, forward_first, deep_first, patient)
            if candidate not in seen:
                seen.add(candidate)
                yield candidate


def _makespan_and_peak(schedule: Schedule, times: ChunkTimes, memory: ChunkMemory) -> tuple[float, int]:
    """Returns the seconds of the simulated schedule, rounded so that equal ones tie, and the fullest stage's bytes."""
    timeline = simulate(schedule, times, memory)
    peak = max(timeline.peak_bytes(stage) for stage in range(schedule.num_stages))
    return float(f"{timeline.makespan_s:.9g}"), peak


def _raise_too_much(num_stages: int, bytes_of: Mapping[int, ChunkMemory], limit: float) -> NoReturn:
    """Raises PlanError with the bytes needed to run one microbatch at a time, which already exceed the limit."""
    least = {}
    for num_chunks, memory in bytes_of.items():
        per_stage = num_chunks // num_stages
        for stage_of in [round_robin(num_stages, per_stage)] + [v_shape(num_stages)] * (per_stage == 2):
            held = [0] * num_stages
            for of_chunk in (memory.activation_bytes, memory.weight_bytes, memory.parameter_bytes):
                for stage, count in zip(stage_of, of_chunk, strict=True):
                    held[stage] += count
            least[max(held)] = num_chunks
    fewest = min(least)
    raise PlanError(
        f"no schedule of {num_stages} stages fits the memory limit",
        given=f"{limit} bytes on each stage",
        allowed=f"{fewest} bytes or more: what {least[fewest]} chunks need for one microbatch at a time",
        fix="take more stages or smaller microbatches, cut the model more evenly, or recompute activations",
    )
