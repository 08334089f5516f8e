"""Counts a forward's floating-point operations, and finds the mesh axes that divide each operator's work.

The product of an activation and a weight is divided over the axes that cut the weight. An operator without a weight
among its operands, such as attention scores, is divided over the axes that cut one of its dims: a dim that must be cut
together with a cut dim of some weight (``analysis/dims/run_axes.py``), such as the heads of queries and keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from shardwright.analysis.chunks.costs import flops_of
from shardwright.analysis.dims.run_axes import DimAxis, RunAxes, axes_of, leaves
from shardwright.analysis.recorded.recording import Recording, TensorUse
from shardwright.plan.plan import OperatorWork, Plan

_WEIGHT = {"linear": 1, "convolution": 1}
"""The operators that take a bias beside a weight, and the number of the operand that is the weight."""


def operator_work(
    plan: Plan, recording: Recording, axes: RunAxes, gathered: Collection[str] = ()
) -> tuple[OperatorWork, ...]:
    """Returns the FLOPs of each matrix product, convolution and attention of a forward, with the axes that divide them.

    ``recording`` is a recorded forward of the model, and ``axes`` says which dims of its tensors must be sharded alike.
    Outputs of the modules ``gathered`` are gathered at once, so their weights divide no work of others.

    >>> import torch
    >>> from torch import nn
    >>> from shardwright.analysis.recorded.record_forward import record_forward
    >>> from shardwright.analysis.dims.run_axes import axes_of
    >>> from shardwright.layout import Layout
    >>> from shardwright.plan.plan import Job
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).to("meta")
    >>> recording = record_forward(model, torch.empty(2, 4, device="meta"))
    >>> plan = Plan.of(Job(model, nn.Identity()), Layout.parse("tp2")).cut("1.weight", "tp", 1, (((0, 4),), ((4, 8),)))
    >>> [(each.module, each.flops, sorted(each.axes)) for each in operator_work(plan, recording, axes_of(recording))]
    [('0', 128, []), ('1', 128, ['tp'])]
    """
    within = {}
    for path, inside in recording.of_modules().items() if gathered else ():
        if path in gathered:
            axes_inside = axes_of(inside)
            within[path] = axes_inside, _cut_axes(plan, inside.parameters, axes_inside)
    others = {name: use for name, use in recording.parameters.items() if name.rpartition(".")[0] not in gathered}
    outside = axes, _cut_axes(plan, others, axes)
    work = []
    for call in recording.calls:
        of_call, cut = within.get(call.module, outside)
        flops = flops_of(call)
        if not flops:
            continue
        weights = [use.name for use in call.operands if use.kind == "parameter"]
        at = _WEIGHT.get(call.name)
        if at is not None and call.operands[at].kind != "parameter":
            weights = []  # the weight is computed (weight norm), and the bias does not count
        if weights:
            dividing = {axis for name in weights for axis in plan.compute[name].cut_dims}
        else:
            dims = (axis for use in (*call.operands, *call.results) for axis in of_call.of(use))
            dividing = {axis for dim in dims for leaf in leaves(dim) for axis in cut.get(leaf, ())}
        work.append(OperatorWork(call.module, flops, frozenset(dividing)))
    return tuple(work)


def _cut_axes(plan: Plan, parameters: Mapping[str, TensorUse], axes: RunAxes) -> dict[DimAxis, set[str]]:
    """Returns the mesh axes that cut each dim of the parameters, by name, that the plan cuts."""
    mesh_axes: defaultdict[DimAxis, set[str]] = defaultdict(set)
    for name, use in parameters.items():
        for axis, dim in plan.compute[name].cut_dims.items():
            for leaf in leaves(axes.of(use)[dim]):
                mesh_axes[leaf].add(axis)
    return mesh_axes
