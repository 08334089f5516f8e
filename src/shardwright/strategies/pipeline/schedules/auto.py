"""The best schedule for given times: every named one, and lists written by the greedy scheduler under many tastes.

No search is complete: finding the best order is a job-shop problem. What is found is never worse than the best named
schedule that fits, and respects the limit of memory. The same input gives the same list.

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
from shardwright.strategies.pipeline.schedules.greedy import Preferences, greedy
from shardwright.strategies.pipeline.simulate import Memory, Times, simulate

# How many actions are written and simulated in search of better lists, for each number of chunks; a few seconds.
_BUDGET_ACTIONS = 400_000

_Found = tuple[tuple[float, int], Schedule]


def search(
    num_stages: int,
    num_microbatches: int,
    times: Times | Sequence[Times],
    memory: Memory | Sequence[Memory] | None = None,
    limit_bytes: int | None = None,
    max_chunks_per_stage: int = 2,
) -> tuple[Schedule, Timeline]:
    """The schedule of least makespan among those that hold at most ``limit_bytes`` on every stage, and its timeline.

    ``times``, and ``memory`` where there is a limit, are those of the model cut into as many chunks as stages; give
    several to let the search choose how many chunks a stage holds: each says by its length what it is for. Of two that
    take equally long, the one that holds less on its fullest stage.

    Raises: LayoutError: times for a number of chunks that the stages cannot share, or without their bytes.
        PlanError: nothing fits the limit.

    >>> uneven = Times(forward_s=(1, 3), input_s=(1, 3), weight_s=(1, 3))
    >>> schedule, timeline = search(2, 4, [uneven, Times.equal(4, 1, 1, 1)])
    >>> schedule.num_chunks, timeline.makespan_s
    (4, 25)
    """
    check_at_least("num_stages", num_stages, 1, fix="a pipeline has one stage or more: set pp=1")
    check_at_least("num_microbatches", num_microbatches, 1, fix=f"start at {4 * num_stages}, four for each stage")
    cuts = _cuts(num_stages, times, max_chunks_per_stage)
    bytes_of = _bytes(cuts, memory, limit_bytes)
    limit = math.inf if limit_bytes is None else limit_bytes
    best: _Found | None = None
    for num_chunks, of_cut in cuts.items():
        held = bytes_of[num_chunks]
        for schedule in _candidates(num_stages, num_microbatches, of_cut, held, limit):
            found = _judge(schedule, of_cut, held)
            if found[0][1] <= limit and (best is None or found[0] < best[0]):
                best = found
    if best is None:
        _raise_too_much(num_stages, bytes_of, limit)
    schedule = best[1]
    counted = None if memory is None else bytes_of[schedule.num_chunks]
    return schedule, simulate(schedule, cuts[schedule.num_chunks], counted)


def _cuts(num_stages: int, times: Times | Sequence[Times], max_chunks_per_stage: int) -> dict[int, Times]:
    """The times by their number of chunks, fewest first."""
    given = [times] if isinstance(times, Times) else list(times)
    cuts = {of_cut.num_chunks: of_cut for of_cut in given}
    allowed = [num_stages * per_stage for per_stage in range(1, max_chunks_per_stage + 1)]
    if not given or len(cuts) < len(given) or not set(cuts) <= set(allowed):
        raise LayoutError(
            f"these times are not for chunks on {num_stages} stages",
            given="times for " + (", ".join(str(t.num_chunks) for t in given) or "nothing") + " chunks",
            allowed="each at most once: " + (", ".join(map(str, allowed)) or "none"),
            fix="time the model cut into as many chunks, or raise max_chunks_per_stage",
        )
    return dict(sorted(cuts.items()))


def _bytes(
    cuts: Mapping[int, Times], memory: Memory | Sequence[Memory] | None, limit_bytes: int | None
) -> dict[int, Memory]:
    """The bytes for each number of chunks; where none are given, a microbatch counts the same however it is cut."""
    if memory is None and limit_bytes is None:
        whole = math.lcm(*cuts)
        return {num_chunks: Memory.equal(num_chunks, whole // num_chunks) for num_chunks in cuts}
    given = [] if memory is None else [memory] if isinstance(memory, Memory) else list(memory)
    bytes_of = {of_cut.num_chunks: of_cut for of_cut in given}
    if not set(cuts) <= set(bytes_of):
        raise LayoutError(
            "a limit of memory needs the bytes of every chunk",
            given="bytes for " + (", ".join(map(str, bytes_of)) or "no") + " chunks",
            allowed="one Memory for each Times: for " + ", ".join(map(str, cuts)) + " chunks",
            fix="give Memory(...) for the same chunks, or no limit",
        )
    return bytes_of


def _candidates(
    num_stages: int, num_microbatches: int, times: Times, memory: Memory, limit: float
) -> Iterator[Schedule]:
    """The named schedules with this number of chunks, then as many greedy ones as the budget has room for."""
    per_stage = times.num_chunks // num_stages
    for family in SCHEDULES.values():
        if family.takes(per_stage):
            yield family.builder(num_stages, num_microbatches, per_stage)
    most = max(1, _BUDGET_ACTIONS // (3 * times.num_chunks * num_microbatches))
    for stage_of, taste in islice(_tastes(num_stages, num_microbatches, per_stage), most):
        schedule = greedy(stage_of, num_microbatches, times, taste, memory, limit)
        if schedule is not None:
            yield schedule


def _tastes(num_stages: int, num_microbatches: int, per_stage: int) -> Iterator[tuple[tuple[int, ...], Preferences]]:
    """Where chunks live and what stages prefer, the likely best first."""
    most = per_stage * num_microbatches
    after = range(num_stages, 0, -1)  # for each stage, how many there are from it on
    full = per_stage * num_stages
    if per_stage == 1:  # those of ZB-H2 and 1F1B first
        placements = [round_robin(num_stages, 1)]
        held = [[2 * n - 1 for n in after], [*after], [n + 1 for n in after], [2 * n for n in after]]
        equal = [most, full, 2 * full - 1]
    else:
        placements = [v_shape(num_stages)] if per_stage == 2 else []
        placements.append(round_robin(num_stages, per_stage))
        held = [[2 * (n - 1) + full - num_stages + 1 for n in after]]  # interleaved 1F1B
        equal = [full, full + 1, most, full + num_stages, full // 2 + 2, 2 * full - 1]
    held += [[count] * num_stages for count in equal]
    seen = set()
    for forward_first, deep_first in product((False, True), (True, False)[:per_stage]):
        for patient, counts, stage_of in product((False, True), held, placements):
            taste = Preferences(tuple(min(max(n, per_stage), most) for n in counts), forward_first, deep_first, patient)
            if (stage_of, taste) not in seen:
                seen.add((stage_of, taste))
                yield stage_of, taste


def _judge(schedule: Schedule, times: Times, memory: Memory) -> _Found:
    """A schedule after its makespan, rounded so that equals tie, and the bytes of its fullest stage."""
    timeline = simulate(schedule, times, memory)
    peak = max(timeline.peak_bytes(stage) for stage in range(schedule.num_stages))
    return (float(f"{timeline.makespan_s:.9g}"), peak), schedule


def _raise_too_much(num_stages: int, bytes_of: Mapping[int, Memory], limit: float) -> NoReturn:
    """Not even one microbatch at a time fits."""
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
        f"no schedule of {num_stages} stages fits the limit of memory",
        given=f"{limit} bytes on each stage",
        allowed=f"{fewest} bytes or more: what {least[fewest]} chunks need for one microbatch at a time",
        fix="take more stages or smaller microbatches, cut the model more evenly, or recompute activations",
    )
