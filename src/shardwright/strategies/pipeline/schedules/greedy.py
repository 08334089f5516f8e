"""A greedy pipeline scheduler (list scheduling): in a simulation, a stage that is free takes the best ready action.

The method is that of Graham 1966 (Bounds for certain multiprocessing anomalies). Which action is best is decided by
:class:`SchedulingRules`; :mod:`~shardwright.strategies.pipeline.schedules.auto` tries many of them.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from shardwright.plan.schedule import Action, Schedule
from shardwright.strategies.pipeline.simulate import ChunkMemory, ChunkTimes


@dataclass(frozen=True)
class SchedulingRules:
    """The rules by which the greedy scheduler chooses the action (F, I or W) that a free stage runs.

    ``most_held[s]`` is the most microbatches whose activations stage ``s`` keeps between F and I, counted over all of
    its chunks. ``forward_first``: F before I, if both are ready. ``deep_first``: F of a later chunk before F of an
    earlier one. W runs when neither F nor I is ready; with ``patient`` only if it ends before the next F or I is ready.
    """

    most_held: tuple[int, ...]
    forward_first: bool = False
    deep_first: bool = True
    patient: bool = False


class _ScheduleState:
    """The state of the simulated stages: actions run, microbatches and bytes in memory, arrival times of inputs."""

    def __init__(
        self,
        stage_of: tuple[int, ...],
        num_microbatches: int,
        times: ChunkTimes,
        preferences: SchedulingRules,
        memory: ChunkMemory,
        limit_bytes: float,
    ) -> None:
        self.stage_of, self.num_microbatches, self.last = stage_of, num_microbatches, len(stage_of) - 1
        self.times, self.preferences, self.memory, self.limit_bytes = times, preferences, memory, limit_bytes
        num_stages = max(stage_of) + 1
        self.chunks = [[c for c, at in enumerate(stage_of) if at == s] for s in range(num_stages)]
        self.bytes = [a + w for a, w in zip(memory.activation_bytes, memory.weight_bytes, strict=True)]
        self.num_forwards = [0] * len(stage_of)
        self.num_backwards = [0] * len(stage_of)
        self.arrived: list[list[float]] = [[] for _ in stage_of]  # times of outputs, at the next chunk's stage
        self.returned: list[list[float]] = [[] for _ in stage_of]  # of input gradients, at the previous chunk's stage
        self.late: list[deque[tuple[int, int]]] = [deque() for _ in range(num_stages)]  # (chunk, microbatch) without W
        self.held = [0] * num_stages
        self.held_bytes = [sum(memory.parameter_bytes[c] for c in chunks) for chunks in self.chunks]
        self.lists: list[list[Action]] = [[] for _ in range(num_stages)]

    def pick(self, stage: int, now: float) -> Action | None:
        """Returns the action that a free stage runs at the time ``now``; None if it waits."""
        soonest = float("inf")
        backward: Action | None = None
        for chunk in reversed(self.chunks[stage]):
            microbatch = self.num_backwards[chunk]
            if microbatch < self.num_forwards[chunk]:
                ready = now if chunk == self.last else self._time_of(self.returned[chunk + 1], microbatch)
                if ready <= now:
                    backward = Action("I", microbatch, chunk)
                    break
                soonest = min(soonest, ready)
        forward: Action | None = None
        for chunk in reversed(self.chunks[stage]) if self.preferences.deep_first else self.chunks[stage]:
            microbatch = self.num_forwards[chunk]
            if microbatch < self.num_microbatches:
                ready = self._time_of(self.arrived[chunk - 1], microbatch) if chunk else now
                if ready > now:
                    soonest = min(soonest, ready)
                elif self._has_room(stage, chunk):
                    forward = Action("F", microbatch, chunk)
                    break
        late = self.late[stage]
        first, second = (forward, backward) if self.preferences.forward_first else (backward, forward)
        if first or second or not late:
            return first or second
        chunk, microbatch = late[0]
        if self.preferences.patient and soonest < now + self.times.weight_s[chunk]:
            return None
        return Action("W", microbatch, chunk)

    def run(self, stage: int, action: Action, now: float) -> tuple[float, tuple[float, int] | None]:
        """Runs an action; returns the time at which its stage is free, and (time, stage) of its result's arrival."""
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
            end, to, arrivals = now + times.forward_s[chunk], chunk + 1, self.arrived[chunk]
        else:
            self.num_backwards[chunk] += 1
            self.held[stage] -= 1
            self.held_bytes[stage] -= memory.activation_bytes[chunk]
            self.late[stage].append((chunk, microbatch))
            end, to, arrivals = now + times.input_s[chunk], chunk - 1, self.returned[chunk]
        if not 0 <= to <= self.last:
            return end, None
        target = self.stage_of[to]
        arrivals.append(end + times.over(stage, target))
        return end, (arrivals[-1], target)

    def _has_room(self, stage: int, chunk: int) -> bool:
        """Returns whether memory is left for a microbatch in this chunk and in each later chunk of the stage.

        Without room in the later chunks, the microbatch could never run its backward: a deadlock.
        """
        later = [c for c in self.chunks[stage] if c >= chunk]
        return (
            self.held[stage] + len(later) <= self.preferences.most_held[stage]
            and self.held_bytes[stage] + sum(self.bytes[c] for c in later) <= self.limit_bytes
        )

    @staticmethod
    def _time_of(arrivals: list[float], microbatch: int) -> float:
        return arrivals[microbatch] if microbatch < len(arrivals) else float("inf")


def greedy(
    stage_of: tuple[int, ...],
    num_microbatches: int,
    times: ChunkTimes,
    preferences: SchedulingRules,
    memory: ChunkMemory,
    limit_bytes: float = float("inf"),
) -> Schedule | None:
    """Returns the schedule that the greedy scheduler finds for these times; None if the limits let it finish none.

    ``stage_of`` gives the stage of each chunk; ``times`` and ``memory`` are those of the chunks. A stage holds at most
    ``limit_bytes``, and as many microbatches as ``preferences`` allow. The backward is always split in I and W.

    >>> found = greedy((0, 1), 3, ChunkTimes.equal(2), SchedulingRules(most_held=(2, 1)), ChunkMemory.equal(2))
    >>> [" ".join(map(str, actions)) for actions in found.actions]
    ['0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2', '1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2']
    """
    state = _ScheduleState(stage_of, num_microbatches, times, preferences, memory, limit_bytes)
    num_stages = len(state.lists)
    free_at: list[float] = [0] * num_stages
    events: list[tuple[float, int]] = [(0, stage) for stage in range(num_stages)]
    while events:
        now, stage = heapq.heappop(events)
        if free_at[stage] > now:
            continue
        action = state.pick(stage, now)
        if action is not None:
            free_at[stage], arrival = state.run(stage, action, now)
            heapq.heappush(events, (free_at[stage], stage))
            if arrival is not None and arrival[1] != stage:
                heapq.heappush(events, arrival)
    if min(state.num_backwards) < num_microbatches:
        return None
    return Schedule("auto", tuple(map(tuple, state.lists)), stage_of, num_microbatches)
