"""``StepRecording``: measures one step of a training run, to lay it beside its prediction.

The waits for messages and the bytes sent are measured in one ordinary step. The seconds of operators and the memory by
kind are measured in the step after it, which takes longer, since every operator is looked at. Other steps are left
alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from time import perf_counter
from typing import Any

import torch

from shardwright import devices
from shardwright.axes import layout_axes, mesh_axes
from shardwright.comm.agreement import gather_json
from shardwright.comm.axis import Axis
from shardwright.comm.recorder import Record
from shardwright.comm.wait_times import waits
from shardwright.cost.operators import PARTS
from shardwright.dispatch_mode import DispatchMode
from shardwright.ledger.account import MemoryRecording, memory_tracked
from shardwright.parallelize.run import Run
from shardwright.planner.rehearse import operator_record
from shardwright.runtime.executor import Microbatch
from shardwright.strategies import choose

WARM_UP = 2
"""The number of steps that are taken after each start of a run before any is measured."""

LEAST_STEPS = WARM_UP + 3
"""The least number of steps after a start of a run with which any is measured: the median is then of usual steps."""


class StepRecording:
    """Measures two steps after a start of a run, on one rank: messages in one, operators and memory in the next.

    ``num_steps`` is the number of steps that follow the start if nothing stops the run; with fewer than
    ``LEAST_STEPS``, none is measured. Operators are timed on a CPU alone, where they run when they are called. In a
    step with compiled blocks, or one that updates parameters while gradients are computed, neither operators nor memory
    are looked at. ``num_first`` is the number of first steps that differ from later ones, because they warm up or are
    measured.
    """

    def __init__(self, run: Run, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
        self._run, self._optimizer = run, optimizer
        is_measured = num_steps >= LEAST_STEPS
        self._number = 0 if is_measured else LEAST_STEPS  # the number of the next step
        self.num_first = WARM_UP + 2 if is_measured else WARM_UP
        self._names = {strategy.name for strategy in choose(run.plan.layout)}
        self._tracked: MemoryRecording | None = None
        self._times: OperatorTimes | None = None
        self._wait_s: Mapping[str, float] = {}
        self._sent: Counter[str] = Counter()
        self._held: dict[str, int] = {}
        self._update_s: float | None = None

    @contextmanager
    def step(self, batch: Microbatch, *, updates_within: bool = False) -> Iterator[None]:
        """Returns a context for a whole step, the optimizer's included; all ranks enter it for every step.

        ``updates_within`` says that the optimizer updates parameters while gradients are computed.

        Traffic: in one step, a barrier of all ranks.
        """
        number, self._number = self._number, self._number + 1
        if number == WARM_UP:
            with self._run.world.recorder.recording() as records, waits.timing() as wait_s:
                yield
            self._wait_s = wait_s
            self._sent.update(self._bytes(records))
        elif number == WARM_UP + 1 and not updates_within and not self._run.plan.compiled:
            on_host = self._run.world.device.type in devices.HOST
            times = OperatorTimes() if on_host else None
            # in this order, the ledger's own work at each operator is not timed as part of the operator
            with times or nullcontext(), memory_tracked(self._run, batch, self._optimizer) as tracked:
                self._tracked = tracked
                yield
            with suppress(Exception):  # any error, such as an assertion of the ledger, must not end the run
                self._held = {kind: size for kind, size in tracked.account().at_peak().items() if size}
            self._times, self._tracked = times, None
        else:
            yield

    @contextmanager
    def update(self) -> Iterator[None]:
        """Returns a context for the optimizer's step, entered inside of the context of the whole step."""
        start_s = perf_counter()
        with self._tracked.updating() if self._tracked is not None else nullcontext(), not_timed():
            yield
        if self._number == WARM_UP + 1:
            self._update_s = perf_counter() - start_s

    def figures(self, everyone: Axis, step_s: float | None) -> dict[str, Any]:
        """Returns what was measured as plain data for ``run.json``; ``step_s`` are the median seconds of a step.

        All ranks call it. ``waterfall`` has the seconds of the rank that computes longest, by part, and adds up to
        ``step_s``: "bubble" has the waits for other stages, the other layout axes have the waits for their messages,
        and "other" has the remainder. It is {} if operators were not timed. ``memory_by_kind`` is that of the rank that
        holds most, and ``traffic_by_axis`` that of the rank that sends most.

        Traffic: one gather of texts.
        """
        seconds = self._times.seconds if self._times is not None else {}
        rank_figures = {"operators": seconds, "waits": self._wait_s, "update_s": self._update_s, "held": self._held,
                        "sent": self._sent}  # fmt: skip
        all_figures = gather_json(everyone, rank_figures)
        return {
            "step_s": step_s,
            "waterfall": _waterfall(max(all_figures, key=lambda figures: sum(figures["operators"].values())), step_s),
            "memory_by_kind": max((figures["held"] for figures in all_figures), key=lambda held: sum(held.values())),
            "traffic_by_axis": max((figures["sent"] for figures in all_figures), key=lambda sent: sum(sent.values())),
        }

    def _bytes(self, records: Sequence[Record]) -> Counter[str]:
        sent: Counter[str] = Counter()
        for record in records:
            if record.source in self._names:  # left out: the sum of the loss, and messages about the run itself
                sent[record.axis] += record.num_bytes
        return sent


def _waterfall(rank: Mapping[str, Any], step_s: float | None) -> dict[str, float]:
    """Returns the seconds of a step by part on one rank, from its measured operators, waits and update."""
    if step_s is None or not rank["operators"]:
        return {}
    axis_of = {mesh: name for name, axis in layout_axes().items() for mesh in axis.all_mesh_axes}
    by_part: defaultdict[str, float] = defaultdict(float, rank["operators"])
    for axis, seconds in rank["waits"].items():
        first = axis.partition("+")[0]
        if first in axis_of:
            by_part["bubble" if first in mesh_axes("stages") else axis_of[first]] += seconds
    by_part["optimizer"] = rank["update_s"] or 0.0
    remainder = step_s - sum(by_part.values())
    if remainder < 0:  # the measured step took longer than the median step: scale its parts to that
        return {name: seconds * step_s / (step_s - remainder) for name, seconds in by_part.items()}
    return {**by_part, "other": remainder}


class OperatorTimes(DispatchMode):
    """A dispatch mode that sums up the seconds of operators by their part in a waterfall: matmul, attention, memory.

    >>> with OperatorTimes() as times:
    ...     product = torch.ones(4, 4) @ torch.ones(4, 4)
    >>> times.seconds["matmul"] > 0, times.seconds["attention"]
    (True, 0.0)
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start_s = perf_counter()
        out = function(*args, **(kwargs or {}))
        took_s = perf_counter() - start_s
        record = operator_record(function, args, kwargs or {}, out) if not _NOT_TIMED.get() else None
        if record is not None:
            self.seconds[record.part] += took_s
        return out


_NOT_TIMED = ContextVar("not timed", default=False)


@contextmanager
def not_timed() -> Iterator[None]:
    """Returns a context in which :class:`OperatorTimes` leaves operators out, such as those of the optimizer."""
    token = _NOT_TIMED.set(True)
    try:
        yield
    finally:
        _NOT_TIMED.reset(token)
