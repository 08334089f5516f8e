"""Converts a run's parameters to global tensors and back (:meth:`Run.global_parameters`, ``load_global_parameters``).

Each element that a rank needs is sent by the nearest rank that holds it. DTensor, on which global tensors are built,
allows one rank in a process, so ranks must be processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwright.comm.agreement import gather_json
from shardwright.errors import PlanError, nearest
from shardwright.global_tensor import sbp as words
from shardwright.global_tensor.boxing import run_transfer
from shardwright.global_tensor.geometry import GlobalLayout, boxes, local_shape, whole_piece
from shardwright.global_tensor.placement import Placement
from shardwright.global_tensor.sbp import Sbp
from shardwright.global_tensor.tensor import (
    GlobalTensor,
    everywhere,
    global_layout_of,
    redistributed_local,
    without_sums,
    wrap,
)
from shardwright.global_tensor.view_tracking import check_fresh
from shardwright.parallelize.rank_state import RankState
from shardwright.sharding.tensor_layout import TensorLayout
from shardwright.sharding.transfer import plan_transfer


def to_global_parameters(
    run: RankState, placement: Placement | None, sbp: Sbp | Sequence[Sbp] | None
) -> dict[str, GlobalTensor]:
    """Returns copies of all parameters of the run as global tensors, by name, with the placement and sbp given.

    The placement is all ranks by default. The default sbp cuts dim 0 over the first axis of the placement and copies
    over the others. All ranks call it.

    Traffic: as :meth:`Run.global_parameters`.
    Raises: PlanError: ranks are threads; LayoutError: the sbp does not fit the placement or a parameter.
    """
    _check_processes(run)
    tensors, dtypes = {}, _dtypes(run)
    for name, state in run.plan.state.items():
        layout = state.parameter
        target = _target(run, layout, placement, sbp)
        # partial sums have no elements to fetch: fetch without them, then convert
        fetched = target._replace(sbp=without_sums(target.sbp))
        pieces = {rank: (whole_piece(box),) for rank, box in boxes(layout.shape, fetched).items()}
        transfer = plan_transfer(dict(layout.by_rank(run.plan.mesh)), pieces)
        shape = local_shape(layout.shape, fetched, run.world.rank)
        local = run_transfer(transfer, _stored(run, name, layout, dtypes[name]), shape, zeros=False)
        tensors[name] = wrap(local, layout.shape, fetched).to_global(target.placement, target.sbp)
    return tensors


@torch.no_grad()
def from_global_parameters(run: RankState, tensors: Mapping[str, GlobalTensor]) -> None:
    """Writes the values of global tensors, of any placement and sbp, into the run's parameters of the same names.

    Parameters that ``tensors`` does not name keep their values. Values are cast to the dtype in which the run stores
    the parameter. All ranks call it.

    Traffic: as :meth:`Run.load_global_parameters`.
    Raises: PlanError: ranks are threads, a value is not a global tensor or is the gathered copy of a view whose base
        was written to since, or the run has no parameter of that name and shape.
    """
    _check_processes(run)
    layouts = {name: state.parameter for name, state in run.plan.state.items()}
    _check_given(layouts, tensors)
    dtypes = _dtypes(run)
    for name, tensor in tensors.items():
        layout, source = layouts[name], global_layout_of(tensor)
        summed = source._replace(sbp=without_sums(source.sbp))
        held = {rank: (whole_piece(box),) for rank, box in boxes(layout.shape, summed).items()}
        transfer = plan_transfer(held, dict(layout.by_rank(run.plan.mesh)))
        stored = _stored(run, name, layout, dtypes[name])
        filled = run_transfer(
            transfer, redistributed_local(tensor, summed).to(stored.dtype), tuple(stored.shape), zeros=False
        )
        if name in run.parameters:
            run.parameters[name].copy_(filled)
    run.changed()


def _check_given(layouts: Mapping[str, TensorLayout], tensors: Mapping[str, GlobalTensor]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, GlobalTensor):
            raise PlanError(
                f"'{name}' is not given a global tensor",
                given=f"a {type(tensor).__name__}",
                allowed="global tensors of any placement and sbp",
                fix="write to_global(x, placement, sbp) for it",
            )
        check_fresh("load_global_parameters", [tensor])
        if name not in layouts or tuple(tensor.shape) != layouts[name].shape:
            known = name if name in layouts else nearest(name, layouts)
            raise PlanError(
                f"'{name}' is no parameter of the run",
                given=f"'{name}' of shape {list(tensor.shape)}",
                allowed=f"'{known}' of shape {list(layouts[known].shape)}, and the other parameters"
                if known
                else "the names of run.parameters",
                fix=f"give '{known}' a tensor of its shape" if known else "write a name of the plain model",
            )


def _dtypes(run: RankState) -> dict[str, torch.dtype]:
    """Returns the stored dtype of every parameter, gathered from all ranks, since a stage has only its own."""
    own = {name: str(p.dtype).removeprefix("torch.") for name, p in run.parameters.items()}
    gathered = gather_json(run.axes["world"].for_strategy("global tensors"), own)
    return {name: getattr(torch, dtype) for dtypes in gathered for name, dtype in dtypes.items()}


def _stored(run: RankState, name: str, layout: TensorLayout, dtype: torch.dtype) -> Tensor:
    """Returns this rank's stored shard of a parameter; empty if the parameter is on another pipeline stage."""
    if name in run.parameters:
        return run.parameters[name].detach()
    return torch.empty(layout.local_shape(run.coord), device=run.world.device, dtype=dtype)


def _target(
    run: RankState, layout: TensorLayout, placement: Placement | None, sbp: Sbp | Sequence[Sbp] | None
) -> GlobalLayout:
    """Returns the layout of a global parameter; by default on all ranks, split along dim 0 over the first axis."""
    where = everywhere(run.world.device.type) if placement is None else placement
    plain: list[Sbp] = [words.split(0) if layout.shape and axis == 0 else words.broadcast for axis in range(where.ndim)]
    return GlobalLayout(where, words.checked_sbp(plain if sbp is None else sbp, where, len(layout.shape)))


def _check_processes(run: RankState) -> None:
    if run.world.local and run.world.size > 1:
        raise PlanError(
            "global tensors need ranks that are processes",
            given=f"{run.world.size} ranks that are threads of one process",
            allowed="processes: torch's DTensor, on which global tensors are built, takes one rank to a process",
            fix='launch(work, layout, ranks="processes"), or torchrun',
        )
