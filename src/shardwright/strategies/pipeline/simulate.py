"""What a schedule would take: the same lists with times give makespan, bubble and memory over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from shardwright.errors import LayoutError
from shardwright.plan.schedule import Schedule
from shardwright.runtime.timeline import Span, Timeline
from shardwright.strategies.pipeline.schedule_checks import run_order


def _check_lengths(what: str, **of_chunks: tuple[float, ...]) -> None:
    """Raises LayoutError unless all have one number of zero or more for each chunk."""
    lengths = {name: len(values) for name, values in of_chunks.items()}
    wrong = [f"{name} {value}" for name, values in of_chunks.items() for value in values if not value >= 0]
    if wrong or len(set(lengths.values())) > 1 or 0 in lengths.values():
        raise LayoutError(
            f"{what} are given for each chunk",
            given=", ".join(wrong) if wrong else ", ".join(f"{n} {name}" for name, n in lengths.items()),
            allowed="as many numbers of each, one or more, none below zero",
            fix="give one number for each chunk of the model, in forward order",
        )


@dataclass(frozen=True)
class Times:
    """How long each chunk takes, in seconds; ``B`` takes ``input_s + weight_s``.

    ``transfer_s`` is from the end of an action to when another stage has its result: one number, or one for each
    pair (from stage, to stage); a pair that is left out is as fast as its way back.

    >>> Times.equal(2, transfer_s={(0, 1): 0.5}).over(1, 0)
    0.5
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
    ) -> Times:
        """The same for every chunk.

        >>> Times.equal(2, forward_s=3)
        Times(forward_s=(3, 3), input_s=(1, 1), weight_s=(1, 1), transfer_s=0)
        """
        return cls((forward_s,) * num_chunks, (input_s,) * num_chunks, (weight_s,) * num_chunks, transfer_s)

    @property
    def num_chunks(self) -> int:
        """How many chunks these are for."""
        return len(self.forward_s)

    def over(self, source: int, target: int) -> float:
        """The transfer from one stage to another; none within a stage.

        Raises: LayoutError: the pair is given neither this way nor the other.

        >>> Times.equal(1, transfer_s=2).over(0, 0)
        0
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
class Memory:
    """How much each chunk holds, in bytes.

    ``activation_bytes`` for each microbatch from its F to the end of its B or I, ``weight_bytes`` from its F to the
    end of its B or W (what W still needs), ``parameter_bytes`` all the time.

    >>> Memory.equal(2, activation_bytes=5)
    Memory(activation_bytes=(5, 5), weight_bytes=(0, 0), parameter_bytes=(0, 0))
    """

    activation_bytes: tuple[int, ...]
    weight_bytes: tuple[int, ...]
    parameter_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_lengths(
            "bytes",
            activation_bytes=self.activation_bytes,
            weight_bytes=self.weight_bytes,
            parameter_bytes=self.parameter_bytes,
        )

    @classmethod
    def equal(
        cls, num_chunks: int, activation_bytes: int = 1, weight_bytes: int = 0, parameter_bytes: int = 0
    ) -> Memory:
        """The same for every chunk; by default one byte of activations, so that a peak counts microbatches.

        >>> Memory.equal(1, 7, 2).weight_bytes
        (2,)
        """
        return cls((activation_bytes,) * num_chunks, (weight_bytes,) * num_chunks, (parameter_bytes,) * num_chunks)

    @property
    def num_chunks(self) -> int:
        """How many chunks these are for."""
        return len(self.activation_bytes)


def simulate(schedule: Schedule, times: Times, memory: Memory | None = None) -> Timeline:
    """When each action runs, and what each stage holds.

    A stage runs its actions in order, one at a time, each as soon as the stage is free and all it needs has arrived.
    A send takes time but keeps nobody. The schedule is complete, see
    :func:`~shardwright.strategies.pipeline.schedule_checks.check_schedule`; forwards alone will do.

    Raises: LayoutError: a deadlock, or times or bytes for another number of chunks.

    >>> from shardwright.strategies.pipeline.schedules import build
    >>> timeline = simulate(build("1f1b", 2, 4), Times.equal(2), Memory.equal(2))
    >>> timeline.makespan_s, timeline.busy_s(0), timeline.peak_bytes(0), timeline.peak_bytes(1)
    (15, 12, 2, 1)
    """
    _check_chunks(schedule, times, memory)
    num_microbatches, stage_of, last = schedule.num_microbatches, schedule.stage_of, schedule.num_chunks - 1
    forward_s, input_s, weight_s = times.forward_s, times.input_s, times.weight_s
    both_s = [i + w for i, w in zip(input_s, weight_s, strict=True)]
    onward_s = [times.over(a, b) for a, b in pairwise(stage_of)] + [0]
    back_s = [0] + [times.over(b, a) for a, b in pairwise(stage_of)]
    arrived: list[float] = [0] * (len(stage_of) * num_microbatches)  # at the stage of the chunk after
    returned = list(arrived)  # at the stage of the chunk before
    clocks: list[float] = [0] * schedule.num_stages
    spans: list[list[Span]] = [[] for _ in clocks]
    for stage, action in run_order(schedule):
        kind, microbatch, chunk = action
        own = chunk * num_microbatches + microbatch
        start = clocks[stage]
        if kind == "F":
            if chunk and (there := arrived[own - num_microbatches]) > start:
                start = there
            end = start + forward_s[chunk]
            arrived[own] = end + onward_s[chunk]
        elif kind == "W":
            end = start + weight_s[chunk]
        else:
            if chunk < last and (there := returned[own + num_microbatches]) > start:
                start = there
            end = start + (both_s if kind == "B" else input_s)[chunk]
            returned[own] = end + back_s[chunk]
        clocks[stage] = end
        spans[stage].append(Span(action, start, end))
    counted = [] if memory is None else [_held(schedule.chunks_of(s), of, memory) for s, of in enumerate(spans)]
    return Timeline(schedule.name, tuple(map(tuple, spans)), tuple(counted))


def _check_chunks(schedule: Schedule, times: Times, memory: Memory | None) -> None:
    """Times, bytes and schedule are of one number of chunks."""
    for what, count in (("times", times.num_chunks), ("bytes", memory and memory.num_chunks)):
        if count is not None and count != schedule.num_chunks:
            raise LayoutError(
                f"{what} of another number of chunks than schedule '{schedule.name}'",
                given=f"{what} for {count}, a schedule of {schedule.num_chunks}",
                allowed=f"{what} for {schedule.num_chunks} chunks on {schedule.num_stages} stages",
                fix="cut the model into as many chunks as the schedule has",
            )


def _held(chunks: tuple[int, ...], spans: list[Span], memory: Memory) -> tuple[tuple[float, int], ...]:
    """Where the bytes of one stage change; those that end at a time before those that begin at it."""
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
