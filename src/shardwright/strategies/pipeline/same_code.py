"""Checks that all ranks have traced the same calls and run the same schedule, so that no p2p message is missing.

Each rank traces the model's code by itself. If the code depends on Python's random numbers, the rank or the time, two
ranks trace different calls, and each would wait for messages that the other never sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from shardwright.analysis.chunks.call_graph import ChunkedModel
from shardwright.analysis.chunks.events_chunked import EventsChunked
from shardwright.comm.agreement import check_agreement
from shardwright.comm.axis import Axis
from shardwright.errors import EXAMPLE, PlanError, UnknownCodeError
from shardwright.plan.schedule import Schedule

_SHOWN_TYPES = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
"""Types whose ``repr`` is the same in every process; an argument of another type is represented by its type's name."""


def lines_of(chunked: ChunkedModel | EventsChunked, schedule: Schedule | None = None) -> list[str]:
    """Returns lines of text for ranks to compare: every call of the model with its chunk.

    With ``schedule``, one more line for each stage has the stage's actions.

    >>> from torch import nn
    >>> from shardwright.analysis.chunks.call_graph import CallSite, read_graph
    >>> model = nn.Sequential(nn.ReLU(), nn.Flatten())
    >>> lines_of(ChunkedModel(read_graph(model), {CallSite("0"): 0, CallSite("1"): 1}, 2))[1:3]
    ['chunk 0: _0 = 0(input_1)', 'chunk 1: _1 = 1(_0)']
    """
    lines = chunked.lines() if isinstance(chunked, EventsChunked) else []
    for node, chunk in chunked.nodes.items() if isinstance(chunked, ChunkedModel) else ():
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "a function")
        arguments = [_text(argument) for argument in node.args]
        arguments += [f"{name}={_text(argument)}" for name, argument in node.kwargs.items()]
        where = "every chunk" if chunk is None else f"chunk {chunk}"
        lines.append(f"{where}: {node.name} = {target}({', '.join(arguments)})")
    for stage, actions in enumerate(schedule.actions if schedule is not None else ()):
        lines.append(f"stage {stage}: {' '.join(map(str, actions))}")
    return lines


def _text(argument: Any) -> str:
    """Returns a call's argument as text that is equal on all ranks which read the same code."""
    shown: list[str] = []

    def show(leaf: Any) -> Any:
        kept = isinstance(leaf, _SHOWN_TYPES)
        shown.append(leaf.name if isinstance(leaf, fx.Node) else repr(leaf) if kept else type(leaf).__name__)
        return leaf

    fx.node.map_aggregate(argument, show)
    return shown[0] if len(shown) == 1 else f"({', '.join(shown)})"


def check_same_code(axis: Axis, lines: Sequence[str]) -> None:
    """Raises PlanError on all ranks of the axis unless they have equal ``lines``, as :func:`lines_of` gives them.

    Every rank of the axis calls it.

    Traffic: one all-reduce of two numbers; where lines differ, also all-gathers of them for the error.
    """
    check_agreement(
        axis,
        lines,
        lambda difference: PlanError(
            "ranks have read different code, or run different schedules, and would wait for each other for ever",
            given=str(difference),
            allowed="calls, costs and schedules that are the same on every rank",
            fix="take random numbers of the host, the rank and the time out of the model's forward, and give every "
            "rank the same seconds and files",
        ),
    )


def not_followed(model: nn.Module, why: str, *, has_example: bool) -> UnknownCodeError:
    """Returns the error for code of which the traced calls do something else than it does itself, as ``why`` says."""
    record = "" if has_example else f"{EXAMPLE}; or "
    return UnknownCodeError(
        f"the code of {type(model).__name__} is not followed as it runs",
        given=why,
        allowed="code that torch can trace, or an example of the inputs, on which the forward is recorded",
        fix=f"{record}leave out pp",
    )
