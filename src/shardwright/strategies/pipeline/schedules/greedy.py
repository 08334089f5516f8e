"""A schedule for given times, written as it would run: a stage that is free takes the best action that is ready.

List scheduling after Graham 1966 (Bounds for certain multiprocessing anomalies). What is best is a matter of taste
(:class:`Preferences`); :mod:`~shardwright.strategies.pipeline.pipeline.schedules.auto` tries many.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from shardwright.plan.schedule import Action, Schedule
from shardwright.strategies.pipeline.simulate import Memory, Times


@dataclass(frozen=True)
class Preferences:
    """What a free stage prefers.

    ``most_held[s]``: how many microbatches of all its chunks together stage ``s`` holds from F to I at most.
    ``forward_first``: F before I, where both are ready. ``deep_first``: F of a later chunk before that of an earlier.
    W is for when neither is ready, and, for the ``patient``, when nothing on its way would have to wait for it.
    """

    most_held: tuple[int, ...]
    forward_first: bool = False
    deep_first: bool = True
    patient: bool = False


class _Pipeline:
    """Where a run stands: what each stage has done, holds, and waits for."""

    def __init__(
        self,
        stage_of: tuple[int, ...],
        num_microbatches: int,
        times: Times,
        taste: Preferences,
        memory: Memory,
        limit: float,
    ) -> None:
        self.stage_of, self.num_microbatches, self.times, self.taste = stage_of, num_microbatches, times, taste
        self.memory, self.limit, self.last = memory, limit, len(stage_of) - 1
        num_stages = max(stage_of) + 1
        self.chunks = [[c for c, at in enumerate(stage_of) if at == s] for s in range(num_stages)]
        self.bytes = [a + w for a, w in zip(memory.activation_bytes, memory.weight_bytes, strict=True)]
        self.num_forwards = [0] * len(stage_of)
        self.num_backwards = [0] * len(stage_of)
        self.arrived: list[list[float]] = [[] for _ in stage_of]  # of each chunk, at the stage of the chunk after
        self.returned: list[list[float]] = [[] for _ in stage_of]  # at the stage of the chunk before
        self.late: list[deque[tuple[int, int]]] = [deque() for _ in range(num_stages)]  # (chunk, microbatch) without W
        self.held = [0] * num_stages
        self.held_bytes = [sum(memory.parameter_bytes[c] for c in chunks) for chunks in self.chunks]
        self.lists: list[list[Action]] = [[] for _ in range(num_stages)]

    def pick(self, stage: int, now: float) -> Action | None:
        """What a free stage runs now; None to wait."""
        soonest = float("inf")
        backward: Action | None = None
        for chunk in reversed(self.chunks[stage]):
            microbatch = self.num_backwards[chunk]
            if microbatch < self.num_forwards[chunk]:
                there = now if chunk == self.last else self._at(self.returned[chunk + 1], microbatch)
                if there <= now:
                    backward = Action("I", microbatch, chunk)
                    break
                soonest = min(soonest, there)
        forward: Action | None = None
        for chunk in reversed(self.chunks[stage]) if self.taste.deep_first else self.chunks[stage]:
            microbatch = self.num_forwards[chunk]
            if microbatch < self.num_microbatches:
                there = self._at(self.arrived[chunk - 1], microbatch) if chunk else now
                if there > now:
                    soonest = min(soonest, there)
                elif self._has_room(stage, chunk):
                    forward = Action("F", microbatch, chunk)
                    break
        late = self.late[stage]
        first, second = (forward, backward) if self.taste.forward_first else (backward, forward)
        if first or second or not late:
            return first or second
        chunk, microbatch = late[0]
        if self.taste.patient and soonest < now + self.times.weight_s[chunk]:
            return None
        return Action("W", microbatch, chunk)

    def run(self, stage: int, action: Action, now: float) -> tuple[float, tuple[float, int] | None]:
        """Does it: when the stage is free again, and when which stage hears of it."""
        kind, microbatch, chunk = action
        times, memory = self.times, self.memory
        self.lists[stage].append(action)
        if kind == "W":
            self.late[stage].popleft()
            self.held_bytes[stage] -= memory.weight_bytes[chunk]
            return now + times.weight_s[chunk], None
        if kind == "F":
            self.num_forwards[chunk] += 1
            self.held[stage] += 1
            self.held_bytes[stage] += self.bytes[chunk]
            end, to, log = now + times.forward_s[chunk], chunk + 1, self.arrived[chunk]
        else:
            self.num_backwards[chunk] += 1
            self.held[stage] -= 1
            self.held_bytes[stage] -= memory.activation_bytes[chunk]
            self.late[stage].append((chunk, microbatch))
            end, to, log = now + times.input_s[chunk], chunk - 1, self.returned[chunk]
        if not 0 <= to <= self.last:
            return end, None
        target = self.stage_of[to]
        log.append(end + times.over(stage, target))
        return end, (log[-1], target)

    def _has_room(self, stage: int, chunk: int) -> bool:
        """For one more microbatch of a chunk, and one for each later chunk of the stage, so that it can always end."""
        later = [c for c in self.chunks[stage] if c >= chunk]
        return (
            self.held[stage] + len(later) <= self.taste.most_held[stage]
            and self.held_bytes[stage] + sum(self.bytes[c] for c in later) <= self.limit
        )

    @staticmethod
    def _at(log: list[float], microbatch: int) -> float:
        """When something arrives, as far as that is known."""
        return log[microbatch] if microbatch < len(log) else float("inf")


def greedy(
    stage_of: tuple[int, ...],
    num_microbatches: int,
    times: Times,
    taste: Preferences,
    memory: Memory,
    limit_bytes: float = float("inf"),
) -> Schedule | None:
    """The list of every stage after one taste; None where a stage finds no room for a single microbatch.

    >>> found = greedy((0, 1), 3, Times.equal(2), Preferences(most_held=(2, 1)), Memory.equal(2))
    >>> [" ".join(map(str, actions)) for actions in found.actions]
    ['0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2', '1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2']
    """
    pipeline = _Pipeline(stage_of, num_microbatches, times, taste, memory, limit_bytes)
    num_stages = len(pipeline.lists)
    free_at: list[float] = [0] * num_stages
    events: list[tuple[float, int]] = [(0, stage) for stage in range(num_stages)]
    while events:
        now, stage = heapq.heappop(events)
        if free_at[stage] > now:
            continue
        action = pipeline.pick(stage, now)
        if action is not None:
            free_at[stage], heard = pipeline.run(stage, action, now)
            heapq.heappush(events, (free_at[stage], stage))
            if heard is not None and heard[1] != stage:
                heapq.heappush(events, heard)
    if min(pipeline.num_backwards) < num_microbatches:
        return None
    return Schedule("auto", tuple(map(tuple, pipeline.lists)), stage_of, num_microbatches)
