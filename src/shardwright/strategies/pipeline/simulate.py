"""Simulates a pipeline schedule from each chunk's seconds and bytes: step time, bubble, and memory over time.

The report and ``auto`` use it, with seconds and bytes from the counted costs of calls (:func:`times_of`,
:func:`memory_of`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import nn

from shardwright.analysis.chunks.costs import FLOPS_PER_S, Cost
from shardwright.errors import LayoutError
from shardwright.plan.event_stages import EventStages
from shardwright.plan.schedule import Schedule
from shardwright.plan.stages import Stages
from shardwright.runtime.timeline import Span, Timeline
from shardwright.strategies.pipeline.rounds import KINDS, Rounds, rounds_of


def _check_lengths(what: str, **of_chunks: tuple[float, ...]) -> None:
    """Raises LayoutError unless each tuple has one number for each chunk, none of them below zero."""
    lengths = {name: len(values) for name, values in of_chunks.items()}
    wrong = [f"{name} {value}" for name, values in of_chunks.items() for value in values if not value >= 0]
    if wrong or len(set(lengths.values())) > 1 or 0 in lengths.values():
        raise LayoutError(
            f"{what} are given for each chunk",
            given=", ".join(wrong or [f"{n} {name}" for name, n in lengths.items()]),
            allowed="as many numbers of each, one or more, none below zero",
            fix="give one number for each chunk of the model, in forward order",
        )


@dataclass(frozen=True)
class ChunkTimes:
    """The seconds of each chunk's F (forward), I (input gradient) and W (weight gradient); B takes as long as I and W.

    ``transfer_s`` is the time from the end of an action to its result's arrival on another stage: one number, or one
    for each pair (from stage, to stage); a missing pair has the time of the opposite direction.

    Raises: LayoutError: a tuple is empty or of another length than the others, or a time is negative.
    """

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    transfer_s: float | Mapping[tuple[int, int], float] = 0

    def __post_init__(self) -> None:
        _check_lengths("times", forward_s=self.forward_s, input_s=self.input_s, weight_s=self.weight_s)
        links = self.transfer_s.values() if isinstance(self.transfer_s, Mapping) else [self.transfer_s]
        _check_lengths("transfers", transfer_s=(0, *links))

    @classmethod
    def equal(
        cls,
        num_chunks: int,
        forward_s: float = 1,
        input_s: float = 1,
        weight_s: float = 1,
        transfer_s: float | Mapping[tuple[int, int], float] = 0,
    ) -> ChunkTimes:
        """Returns the times of ``num_chunks`` equal chunks."""
        return cls((forward_s,) * num_chunks, (input_s,) * num_chunks, (weight_s,) * num_chunks, transfer_s)

    @property
    def num_chunks(self) -> int:
        """The number of pipeline chunks."""
        return len(self.forward_s)

    def over(self, source: int, target: int) -> float:
        """Returns the seconds that a message takes from stage ``source`` to stage ``target``; 0 within a stage.

        Raises: LayoutError: there is no time for the pair in either direction.
        """
        if source == target:
            return 0
        if not isinstance(self.transfer_s, Mapping):
            return self.transfer_s
        for pair in ((source, target), (target, source)):
            if pair in self.transfer_s:
                return self.transfer_s[pair]
        raise LayoutError(
            f"no transfer time from stage {source} to stage {target}",
            given=", ".join(map(str, self.transfer_s)),
            allowed="one for every pair of stages that hold neighbouring chunks",
            fix=f"add ({source}, {target}), or give one number for all",
        )


@dataclass(frozen=True)
class ChunkMemory:
    """The bytes that each pipeline chunk holds: two kinds for each microbatch in flight, and those of its parameters.

    ``activation_bytes`` are held for each microbatch from its F to the end of its B or I, ``weight_bytes`` (what W
    needs) from its F to the end of its B or W, ``parameter_bytes`` all the time.

    Raises: LayoutError: a tuple is empty or of another length than the others, or a number is negative.
    """

    activation_bytes: tuple[int, ...]
    weight_bytes: tuple[int, ...]
    parameter_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_lengths("bytes", **vars(self))

    @classmethod
    def equal(
        cls, num_chunks: int, activation_bytes: int = 1, weight_bytes: int = 0, parameter_bytes: int = 0
    ) -> ChunkMemory:
        """Returns the memory of ``num_chunks`` equal chunks.

        With the defaults a stage's bytes count its microbatches in flight, once for each of its chunks.
        """
        return cls((activation_bytes,) * num_chunks, (weight_bytes,) * num_chunks, (parameter_bytes,) * num_chunks)

    @property
    def num_chunks(self) -> int:
        """The number of pipeline chunks."""
        return len(self.activation_bytes)


def simulate(schedule: Schedule, times: ChunkTimes, memory: ChunkMemory | None = None) -> Timeline:
    """Returns the timeline of one step: the start and end of every action, and each stage's bytes over time.

    A stage runs its actions in order, one at a time, each as soon as the stage is free and all inputs have arrived.
    A send takes time but does not block its stage. The schedule has passed
    :func:`~shardwright.strategies.pipeline.schedule_checks.check_schedule`, or consists of forwards alone. Without
    ``memory`` the timeline has no bytes.

    Raises: LayoutError: a deadlock, times or bytes for another number of chunks, or no transfer time for two stages.

    >>> from shardwright.strategies.pipeline.schedules import build
    >>> timeline = simulate(build("1f1b", 2, 4), ChunkTimes.equal(2), ChunkMemory.equal(2))
    >>> timeline.makespan_s, timeline.busy_s(0), timeline.peak_bytes(0), timeline.peak_bytes(1)
    (15.0, 12.0, 2, 1)
    """
    _check_number(schedule, times=times.num_chunks, bytes=None if memory is None else memory.num_chunks)
    rounds, starts, ends, _ = _run(schedule, [times])
    spans: list[list[Span]] = [[] for _ in schedule.actions]
    for stage, start, end in zip(rounds.stage.tolist(), starts[:, 0].tolist(), ends[:, 0].tolist(), strict=True):
        spans[stage].append(Span(schedule.actions[stage][len(spans[stage])], start, end))
    held = [] if memory is None else [_held(schedule.chunks_of(s), of, memory) for s, of in enumerate(spans)]
    return Timeline(schedule.name, tuple(map(tuple, spans)), tuple(held))


class StageTiming(NamedTuple):
    """When the last action of each stage ends in a simulated step, and the seconds of all of a stage's actions."""

    ends_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    bubble: float
    """The share of time, from 0 to 1, in which stages wait: from the first action's start to the last one's end."""


def ends_of(schedule: Schedule, *times: ChunkTimes) -> tuple[StageTiming, ...]:
    """Returns when stages end and how long they work, for each of ``times``, faster than :func:`simulate`.

    Raises: LayoutError: as :func:`simulate`.

    >>> from shardwright.strategies.pipeline.schedules import build
    >>> (found,) = ends_of(build("1f1b", 2, 4), ChunkTimes.equal(2))
    >>> found.ends_s, found.busy_s, round(found.bubble, 3)
    ((15.0, 13.0), (12.0, 12.0), 0.2)
    """
    rounds, _, ends, seconds = _run(schedule, times)
    last = np.zeros(schedule.num_stages, dtype=np.int32)
    last[rounds.stage] = np.arange(len(rounds.stage))  # a stage's later actions overwrite its earlier ones
    timings = []
    for number in range(len(times)):
        clocks = ends[last, number].tolist()
        busy = np.bincount(rounds.stage, seconds[:, number], schedule.num_stages).tolist()
        whole = max(clocks) * len(clocks)  # the first action starts at 0
        timings.append(StageTiming(tuple(clocks), tuple(busy), 1 - sum(busy) / whole if whole else 0.0))
    return tuple(timings)


def _check_number(schedule: Schedule, **counts: int | None) -> None:
    """Raises LayoutError for times or bytes of another number of chunks than the schedule has."""
    for what, count in counts.items():
        if count is not None and count != schedule.num_chunks:
            raise LayoutError(
                f"{what} are for another number of chunks than schedule '{schedule.name}'",
                given=f"{what} for {count}, a schedule of {schedule.num_chunks}",
                allowed=f"{what} for {schedule.num_chunks} chunks on {schedule.num_stages} stages",
                fix="cut the model into as many chunks as the schedule has",
            )


SecondsArray = npt.NDArray[np.float64]


def _seconds_of(schedule: Schedule, times: ChunkTimes) -> tuple[SecondsArray, ...]:
    """Returns how long an action takes, and how long its input is in transit, both indexed by :attr:`Rounds.what`."""
    _check_number(schedule, times=times.num_chunks)
    stage_of, inputs, weights = schedule.stage_of, times.input_s, times.weight_s
    lasts = {"F": times.forward_s, "I": inputs, "W": weights,
             "B": [i + w for i, w in zip(inputs, weights, strict=True)]}  # fmt: skip
    onward = [0.0, *(times.over(a, b) for a, b in pairwise(stage_of))]
    back = [*(times.over(b, a) for a, b in pairwise(stage_of)), 0.0]
    late = {"F": onward, "I": back, "B": back, "W": [0.0] * len(back)}
    return tuple(np.array([s for kind in KINDS for s in by_kind[kind]], dtype=np.float64) for by_kind in (lasts, late))


def _run(schedule: Schedule, times: Sequence[ChunkTimes]) -> tuple[Rounds, SecondsArray, SecondsArray, SecondsArray]:
    """Returns a schedule's rounds, and when each action starts, when it ends and how long it takes.

    The seconds have a row for each action and a column for each of ``times``.
    """
    rounds, tables = rounds_of(schedule), [_seconds_of(schedule, chunk_times) for chunk_times in times]
    seconds, late = (np.stack(columns, axis=1).take(rounds.what, axis=0) for columns in zip(*tables, strict=True))
    starts, ends = np.zeros_like(seconds), np.zeros((len(seconds) + 1, len(times)))  # last: no action
    for actions, waited in rounds.waits:
        need, before = ends.take(waited, axis=0)
        need += late[actions]
        start = np.maximum(need, before, out=starts[actions])
        np.add(start, seconds[actions], out=ends[actions])
    return rounds, starts, ends[:-1], seconds


def _held(chunks: tuple[int, ...], spans: list[Span], memory: ChunkMemory) -> tuple[tuple[float, int], ...]:
    """Returns pairs (second, bytes) at which the bytes of one stage change, with the bytes from then on."""
    activation, weight = memory.activation_bytes, memory.weight_bytes
    held = sum(memory.parameter_bytes[chunk] for chunk in chunks)
    changes: list[tuple[float, int]] = [(0, held)]
    for (kind, _, chunk), start, end in spans:
        if kind == "F":
            held += activation[chunk] + weight[chunk]
        elif kind == "I":
            held -= activation[chunk]
        elif kind == "W":
            held -= weight[chunk]
        else:
            held -= activation[chunk] + weight[chunk]
        changes.append((start if kind == "F" else end, held))
    return tuple(changes)


def times_of(
    costs: Sequence[Cost], flops_per_s: float = FLOPS_PER_S, recomputed: Sequence[float] | None = None
) -> ChunkTimes:
    """Returns each chunk's estimated seconds from its counted work: I and W each take as long as F.

    W takes no time in a chunk without parameters. ``recomputed`` is the share of each chunk's forward that activation
    checkpointing runs again, which is added to I; none by default.

    >>> times_of([Cost(work=50e9, parameter_bytes=4), Cost(work=25e9)])
    ChunkTimes(forward_s=(1.0, 0.5), input_s=(1.0, 0.5), weight_s=(1.0, 0.0), transfer_s=0)
    """
    forward = tuple(cost.work / flops_per_s for cost in costs)
    weights = tuple(cost.work / flops_per_s if cost.parameter_bytes else 0.0 for cost in costs)
    shares = recomputed or (0.0,) * len(costs)
    return ChunkTimes(forward, tuple(s * (1 + share) for s, share in zip(forward, shares, strict=True)), weights)


def recomputed_shares(stages: Stages | EventStages, recomputed: Collection[str]) -> tuple[float, ...]:
    """Returns, for each chunk, the share of its forward work that is in the ``recomputed`` modules, from 0 to 1.

    Work is estimated by the number of elements of weights with two dims or more, embedding tables left out.
    """
    shares = []
    for chunk in range(stages.num_chunks):
        sizes = {True: 0, False: 0}
        for path in stages.chunked.calls_of(chunk) if recomputed else ():
            for inner, layer in stages.model.get_submodule(path).named_modules(prefix=path):
                if not isinstance(layer, nn.Embedding | nn.EmbeddingBag):
                    again = any(f"{inner}.".startswith(f"{block_path}.") for block_path in recomputed)
                    sizes[again] += sum(p.numel() for p in layer.parameters(recurse=False) if p.dim() > 1)
        shares.append(sizes[True] / max(1, sum(sizes.values())))
    return tuple(shares)


def memory_of(costs: Sequence[Cost]) -> ChunkMemory:
    """Returns each chunk's activation bytes from its counted cost; I frees the first half of them, W the other.

    The bytes of parameters are left out, as 0.

    >>> memory_of([Cost(activation_bytes=8, parameter_bytes=4)])
    ChunkMemory(activation_bytes=(4,), weight_bytes=(4,), parameter_bytes=(0,))
    """
    half = tuple(cost.activation_bytes // 2 for cost in costs)
    rest = tuple(cost.activation_bytes - cost.activation_bytes // 2 for cost in costs)
    return ChunkMemory(half, rest, (0,) * len(costs))


def predict(schedule: Schedule, costs: Sequence[Cost], recomputed: Sequence[float] | None = None) -> Timeline:
    """Returns the simulated timeline of one step of ``schedule``, from each chunk's counted costs; nothing is run.

    It is :func:`simulate` on :func:`times_of` and :func:`memory_of`; ``recomputed`` is as in :func:`times_of`.

    >>> from shardwright.strategies.pipeline.schedules import build
    >>> round(predict(build("1f1b", 2, 4), [Cost(5e9, 1), Cost(5e9, 1)]).bubble, 3)
    0.2
    """
    return simulate(schedule, times_of(costs, recomputed=recomputed), memory_of(costs))
