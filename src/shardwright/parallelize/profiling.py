"""Profiles steps with ``torch.profiler`` on all ranks into one trace, with named ranges of layers, calls and actions.

Nothing is added to a run that is not profiled: hooks on modules, and the functions around a rank's channels, are there
for the time of a profile only. Ranks that are processes write a trace each, which the first rank merges; ranks that are
threads share one profiler, and their threads are told apart by a range that each rank opens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, record_function

from shardwright.comm.collective_call import CollectiveCall
from shardwright.comm.pending import Pending
from shardwright.comm.recorder import Recorder
from shardwright.errors import PlanError
from shardwright.forward_stack import Rung, stack_of
from shardwright.parallelize.rank_state import RankState
from shardwright.parallelize.step import TrainStep
from shardwright.runtime.executor import Events

CALLS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "receive", "send_and_receive")
"""The methods of a channel that get a named range."""

PER_RANK = 1000
"""The numbers of the merged trace's processes for one rank: the rank's own, then its devices."""


@contextmanager
def profiled(run: RankState, step: TrainStep, path: Path) -> Iterator[None]:
    """Returns a context in which the steps of ``run`` are profiled; at its end rank 0 writes the merged trace.

    All ranks enter it together. ``step`` is the run's training step, and ``path`` a file in a folder that all ranks
    reach, such as ``trace.json``.

    Traffic: two barriers before, and three after. Raises: PlanError: the folder of ``path`` does not exist.
    """
    if not path.parent.is_dir():
        raise PlanError(
            "a trace is written into a folder that exists",
            given=f"'{path}'",
            allowed="a file in a folder that all ranks reach",
            fix=f"make the folder '{path.parent}' first",
        )
    world, everyone = run.world, run.axes["world"].for_strategy("core")
    shares_process = world.local
    everyone.barrier()
    profiler = None
    if world.rank == 0 or not shares_process:
        config = _ExperimentalConfig(profile_all_threads=True)
        # without the argument activities, torch profiles all kinds of this machine, kernels of an accelerator included
        profiler = profile(experimental_config=config, acc_events=True)
        profiler.start()
    everyone.barrier()
    try:
        with ExitStack() as ranges:
            ranges.enter_context(record_function(_rank_range(world.rank)))
            ranges.enter_context(_layers_named(run.model))
            ranges.enter_context(_calls_named(world.recorder))
            ranges.enter_context(_steps_named(step))
            ranges.enter_context(run.observed(Events(during=lambda action: record_function(f"action {action}"))))
            yield
        everyone.barrier()  # ranks that are threads share the profiler
    finally:
        if profiler is not None:
            profiler.stop()
    if profiler is not None:
        profiler.export_chrome_trace(str(_part(path, world.rank)))
    everyone.barrier()
    if world.rank == 0:
        ranks = [0] if shares_process else range(world.size)
        parts = {rank: json.loads(_part(path, rank).read_text()) for rank in ranks}
        names = {rank: _name(rank, run.plan.mesh.coord(rank)) for rank in range(world.size)}
        path.write_text(json.dumps(merged(parts, names, shared=shares_process, nodes=world.nodes)))
        for rank in ranks:
            _part(path, rank).unlink()
    everyone.barrier()


def _part(path: Path, rank: int) -> Path:
    return path.with_name(f".{path.name}.{rank}.json")


def _rank_range(rank: int) -> str:
    return f"rank {rank}"


def _name(rank: int, coord: Mapping[str, int]) -> str:
    return _rank_range(rank) + "".join(f" {axis}{index}" for axis, index in coord.items())


@contextmanager
def _layers_named(model: nn.Module) -> Iterator[None]:
    """Returns a context with a range around each module's forward, named by its path and class.

    Modules inside of a compiled block have none: a hook there would have it run uncompiled.
    """
    handles: list[Any] = []
    compiled: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if path.startswith(compiled or "\0"):
            continue
        if any(wrapper.rung is Rung.COMPILE for wrapper in stack_of(module).wrappers):
            compiled = (*compiled, f"{path}.")
        handles += _named_forward(module, f"layer {path or '(model)'}: {type(module).__name__}")
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _named_forward(module: nn.Module, name: str) -> list[Any]:
    """Registers hooks that open a range before a module's forward and close it after; returns their handles."""
    opened: list[record_function] = []

    def begin(*_: Any) -> None:
        opened.append(record_function(name))
        opened[-1].__enter__()

    def end(*_: Any) -> None:
        if opened:  # a forward that began before the profile did has opened none
            opened.pop().__exit__(None, None, None)

    return [
        module.register_forward_pre_hook(begin, prepend=True),
        module.register_forward_hook(end, always_call=True),
    ]


@contextmanager
def _calls_named(recorder: Recorder) -> Iterator[None]:
    """Returns a context with a range around each collective and message of a rank, and one around waits for them."""
    changed = []
    for channel in tuple(recorder.channels):
        for kind in CALLS:
            vars(channel)[kind] = _named_call(getattr(channel, kind))
        changed.append(channel)
    try:
        yield
    finally:
        for channel in changed:
            for kind in CALLS:
                vars(channel).pop(kind, None)


def _named_call(start: Callable[..., Pending[Any]]) -> Callable[..., Pending[Any]]:
    def run(first: Any, *args: Any) -> Pending[Any]:
        calls = (
            [first]
            if isinstance(first, CollectiveCall)
            else [message.call for messages in (first, *args) for message in messages]
        )
        call = calls[0] if calls else None
        name = "messages" if call is None else f"{call.kind} over {call.axis} ({call.source})"
        with record_function(f"call {name}"):
            pending = start(first, *args)

        def finish() -> Any:
            with record_function(f"wait {name}"):
                return pending.wait()

        return Pending(finish)

    return run


@contextmanager
def _steps_named(step: TrainStep) -> Iterator[None]:
    """Returns a context with a range around each training step that ``step`` takes."""
    take = step.take

    def named(batch: Any, update: Any, number: int) -> Any:
        with record_function(f"step {number}"):
            return take(batch, update, number)

    vars(step)["take"] = named
    try:
        yield
    finally:
        del vars(step)["take"]


def merged(
    parts: Mapping[int, Mapping[str, Any]], names: Mapping[int, str], *, shared: bool, nodes: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Returns one Chrome trace from the traces of processes: each rank is a process of the trace, with its threads.

    ``parts`` are torch's traces by the rank of the process that wrote them, and ``names`` the names of all ranks. With
    ``shared``, all ranks are threads of one process, and the range "rank N" tells whose thread it is; threads without
    such a range are listed as "other threads". Times are those of the machine's clock; the times of other ``nodes``
    are shifted so that their ranks begin together with rank 0.

    >>> begin = {"ph": "X", "pid": 7, "tid": 7, "name": "rank 0", "ts": 5.0, "dur": 2.0, "cat": "user_annotation"}
    >>> found = merged({0: {"traceEvents": [begin], "baseTimeNanoseconds": 0}}, {0: "rank 0 dp0"}, shared=False)
    >>> [(each["name"], each["pid"]) for each in found["traceEvents"]]
    [('process_name', 0), ('process_sort_index', 0), ('rank 0', 0)]
    """
    base_ns = min(int(part.get("baseTimeNanoseconds", 0)) for part in parts.values())
    begins = {
        int(event["name"].split()[1]): (event, (int(part.get("baseTimeNanoseconds", 0)) - base_ns) / 1e3)
        for part in parts.values()
        for event in part["traceEvents"]
        if event.get("ph") == "X" and event["name"].startswith("rank ") and event["name"].split()[-1].isdigit()
    }
    started = {rank: event["ts"] + shift for rank, (event, shift) in begins.items()}
    events: list[dict[str, Any]] = []
    for rank, part in parts.items():
        shift = (int(part.get("baseTimeNanoseconds", 0)) - base_ns) / 1e3
        if nodes and rank in started and 0 in started and nodes[rank] != nodes[0]:
            shift += started[0] - started[nodes.index(nodes[rank])]
        own = {event["tid"]: other for other, (event, _) in begins.items()} if shared else {}
        events += _renumbered(part["traceEvents"], rank, shift, own, len(names) if shared else None)
    process = {number: names[number // PER_RANK] for number in sorted({event["pid"] for event in events})
               if number // PER_RANK in names}  # fmt: skip
    described = []
    for number in sorted({event["pid"] for event in events}):
        name = process.get(number, "other threads") + (f", device {number % PER_RANK - 1}" if number % PER_RANK else "")
        described += [
            {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}},
            {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}},
        ]
    return {"displayTimeUnit": "ms", "traceEvents": [*described, *events]}


def _renumbered(
    events: Iterable[Mapping[str, Any]], rank: int, shift_us: float, own: Mapping[Any, int], others: int | None
) -> Iterator[dict[str, Any]]:
    """Yields the events of one process with numbers of the merged trace: a rank's threads, and its devices.

    If ranks are threads, ``own`` is the rank of each thread, and other threads get the number ``others``; if ranks are
    processes, ``others`` is None.
    """
    for event in events:
        if not isinstance(event.get("pid"), int) or (event["ph"] == "M" and event["name"].startswith("process_")):
            continue  # rows of the profiler itself, and names of processes, which the merged trace writes anew
        is_device = event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
        owner = rank if others is None else own.get(event.get("tid"), others)
        number = owner * PER_RANK + (1 + event["pid"] if is_device else 0)
        changed = {**event, "pid": number}
        if "ts" in event:
            changed["ts"] = event["ts"] + shift_us
        if "id" in event:
            changed["id"] = f"{rank}.{event['id']}"  # flows of two processes must not be joined
        yield changed
