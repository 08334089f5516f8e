"""Finds the modules that a layout's ``compile`` option compiles, and refuses layouts that cannot be compiled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from shardwright.axes import layout_axes
from shardwright.errors import LayoutError
from shardwright.forward_stack import Rung
from shardwright.plan.event_stages import EventStages
from shardwright.plan.plan import Plan
from shardwright.plan.recompute import blocks_of, called_modules

PLAIN_OPTIONS = frozenset(("sp", "seq", "regather", "no-overlap"))
"""The options of tensor-parallel axes whose collectives ``torch.compile`` can include in compiled code."""


def compiled_blocks(model: nn.Module, plan: Plan) -> tuple[str, ...]:
    """Returns the names of the modules that are compiled: the model's blocks, or "", the whole model, if it has none.

    There are none if the layout does not ask for ``compile``. Under pipeline stages, a block whose inner modules the
    stages call is replaced by these.

    Raises: LayoutError: something else in the layout cannot be compiled.

    >>> from shardwright.layout import Layout
    >>> from shardwright.plan.plan import Job
    >>> model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
    >>> compiled_blocks(model, Plan.of(Job(model, nn.Identity()), Layout.parse("dp2 compile")))
    ('0', '1')
    >>> compiled_blocks(model, Plan.of(Job(model, nn.Identity()), Layout.parse("compile recompute:selective")))
    Traceback (most recent call last):
    shardwright.errors.LayoutError: 'compile' does not go with 'recompute:selective'
      given:   recompute:selective compile
      allowed: recompute:full or recompute:PATTERN; a compiled block shows no single operators whose results are kept
      fix:     recompute:full compile, or leave out compile: recompute:selective
    """
    layout = plan.layout
    if layout.compile is None:
        return ()
    for other, allowed, fix in _conflicts(plan):
        other_way = f"{fix}, or " if fix else ""
        raise LayoutError(
            f"'compile' does not go with {other}",
            given=str(layout),
            allowed=allowed,
            fix=f"{other_way}leave out compile: {replace(layout, compile=None)}",
        )
    blocks = blocks_of(model) or [""]
    if plan.stages is None:
        return tuple(blocks)
    inside = blocks if blocks != [""] else list(dict(model.named_children()))
    return called_modules(model, inside, plan.stages.called())


def _conflicts(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yields each part of the layout that cannot be compiled: its name, what is allowed, a layout with that or ""."""
    layout = plan.layout
    if layout.recompute == "selective":
        allowed = (
            "recompute:full or recompute:PATTERN; a compiled block shows no single operators whose results are kept"
        )
        yield "'recompute:selective'", allowed, str(replace(layout, recompute="full"))
    for factor in layout.factors:
        axis, options = layout_axes()[factor.axis], {option.name for option in factor.options}
        if axis.kind == "operators" and (len(factor.sizes) > 1 or not options <= PLAIN_OPTIONS):
            plain = replace(factor, sizes=(factor.size,), options=())
            allowed = f"{axis.name}N, {axis.name}N/sp, {axis.name}N/seq; grids and pictures compute between messages"
            others = tuple(plain if other is factor else other for other in layout.factors)
            yield f"'{factor}'", allowed, str(replace(layout, factors=others))
    if any(Rung.SPLIT_BACKWARD in rungs for rungs in plan.wrapped.values()):
        name = plan.schedule.name if plan.schedule is not None else "the schedule"
        yield f"the split backward of '{name}'", "1f1b, gpipe, interleaved: a compiled backward is one piece", ""
    if isinstance(plan.stages, EventStages):
        allowed = (
            "stages cut from traced code; here each stage runs the whole code on stand-ins for other stages' values"
        )
        yield "stages of a model whose code cannot be traced", allowed, ""
    if any(Rung.ON_SHARDS in rungs for rungs in plan.wrapped.values()):
        allowed = "tensor parallelism of layers that it knows; here code runs operator by operator on shards of tensors"
        yield "a model that is cut by its operators", allowed, ""
