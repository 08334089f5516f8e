"""Checks that all ranks have read the same calls and run the same schedule, before any waits for another's message.

Each rank reads the model's code by itself. Where that follows Python's random numbers, the rank or the time, two ranks
read different calls, and each would wait for messages that the other never sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardwright.analysis.call_graph import Chunked
from shardwright.comm.agreement import Difference, check_agreement
from shardwright.comm.axis import Axis
from shardwright.errors import PlanError
from shardwright.plan.schedule import Schedule

_SHOWN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
"""Types whose ``repr`` is the same in every process; an argument of any other type is shown by its type's name."""


def lines_of(chunked: Chunked, schedule: Schedule | None = None) -> list[str]:
    """Returns the model's calls, each with its chunk, and the list of actions of every stage, one line each.

    >>> from torch import nn
    >>> from shardwright.analysis.call_graph import CallSite, read_graph
    >>> model = nn.Sequential(nn.ReLU(), nn.Flatten())
    >>> lines_of(Chunked(read_graph(model), {CallSite("0"): 0, CallSite("1"): 1}, 2))[1:3]
    ['chunk 0: _0 = 0(input_1)', 'chunk 1: _1 = 1(_0)']
    """
    found = []
    for node, chunk in chunked.nodes.items():
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "a function")
        given = [_text(argument) for argument in node.args]
        given += [f"{name}={_text(argument)}" for name, argument in node.kwargs.items()]
        where = "every chunk" if chunk is None else f"chunk {chunk}"
        found.append(f"{where}: {node.name} = {target}({', '.join(given)})")
    for stage, actions in enumerate(schedule.actions if schedule is not None else ()):
        found.append(f"stage {stage}: {' '.join(map(str, actions))}")
    return found


def _text(argument: Any) -> str:
    shown: list[str] = []

    def show(leaf: Any) -> Any:
        kept = isinstance(leaf, _SHOWN)
        shown.append(leaf.name if isinstance(leaf, fx.Node) else repr(leaf) if kept else type(leaf).__name__)
        return leaf

    fx.node.map_aggregate(argument, show)
    return shown[0] if len(shown) == 1 else f"({', '.join(shown)})"


def check_same_code(axis: Axis, lines: Sequence[str]) -> None:
    """Raises PlanError, on every member, unless all have the same :func:`lines_of` their model and schedule.

    Traffic: one all-reduce of two numbers.

    >>> from shardwright import Mesh, run_on_threads
    >>> run_on_threads(Mesh(pp=2), lambda axes: check_same_code(axes["pp"], ["chunk 0: y = relu(x)"]))
    [None, None]
    """
    check_agreement(axis, lines, _read_different_code)


def _read_different_code(found: Difference) -> PlanError:
    return PlanError(
        "ranks have read different code, or run different lists, and would wait for each other for ever",
        given=str(found),
        allowed="calls, costs and schedules that are the same on every rank",
        fix="take random numbers of the host, the rank and the time out of the model's forward, and give every "
        "rank the same seconds and files",
    )
