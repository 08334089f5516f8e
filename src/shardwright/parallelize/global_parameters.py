"""A run's parameters as global tensors, and back: each element is fetched from the nearest rank that holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwright.comm.agreement import gather_json
from shardwright.errors import PlanError, nearest
from shardwright.global_tensor import GlobalTensor, Placement
from shardwright.global_tensor import sbp as words
from shardwright.global_tensor.boxing import carry
from shardwright.global_tensor.geometry import GlobalLayout, boxes, local_shape, whole_piece
from shardwright.global_tensor.sbp import Sbp
from shardwright.global_tensor.tensor import everywhere, global_layout_of, moved, without_sums, wrap
from shardwright.global_tensor.view_tracking import check_fresh
from shardwright.mesh import Mesh
from shardwright.parallelize.run import Run
from shardwright.sharding.box import Piece
from shardwright.sharding.tensor_layout import TensorLayout
from shardwright.sharding.transfer import plan_transfer

Pieces = dict[int, tuple[Piece, ...]]


def to_global_parameters(
    run: Run, placement: Placement | None, sbp: Sbp | Sequence[Sbp] | None
) -> dict[str, GlobalTensor]:
    """Every parameter of the run: by default over all ranks, cut along dim 0; see :meth:`Run.global_parameters`."""
    _check_processes(run)
    found, kinds = {}, _kinds(run)
    for name, lies in _lies(run).items():
        where = _where(run, lies, placement, sbp)
        first = where._replace(sbp=without_sums(where.sbp))
        local, shape = _resting(run, name, lies, kinds[name]), _local_shape(run, lies, first)
        transfer = plan_transfer(_held(run, lies), _boxes(lies, first))
        part = wrap(carry(transfer, local, shape, zeros=False), lies.shape, first)
        found[name] = part.to_global(where.placement, where.sbp)
    return found


@torch.no_grad()
def from_global_parameters(run: Run, tensors: Mapping[str, GlobalTensor]) -> None:
    """Fills the run's parameters from global tensors that lie anywhere; see :meth:`Run.load_global_parameters`."""
    _check_processes(run)
    every = _lies(run)
    _check_given(every, tensors)
    kinds = _kinds(run)
    for name, tensor in tensors.items():
        lies, where = every[name], global_layout_of(tensor)
        plain = where._replace(sbp=without_sums(where.sbp))
        transfer = plan_transfer(_boxes(lies, plain), _held(run, lies))
        mine = _resting(run, name, lies, kinds[name])
        filled = carry(transfer, moved(tensor, plain).to(mine.dtype), tuple(mine.shape), zeros=False)
        if name in run.parameters:
            run.parameters[name].copy_(filled)
    run.changed()


def _check_given(every: Mapping[str, TensorLayout], tensors: Mapping[str, GlobalTensor]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, GlobalTensor):
            raise PlanError(
                f"'{name}' is given what is no global tensor",
                given=f"a {type(tensor).__name__}",
                allowed="global tensors, lying anywhere",
                fix="write to_global(x, placement, sbp) for it",
            )
        check_fresh("load_global_parameters", [tensor])
        if name not in every or tuple(tensor.shape) != every[name].shape:
            known = name if name in every else nearest(name, every)
            raise PlanError(
                f"'{name}' is no parameter of the run",
                given=f"'{name}' of shape {list(tensor.shape)}",
                allowed=f"'{known}' of shape {list(every[known].shape)}, and the other parameters",
                fix=f"give '{known}' a tensor of its shape",
            )


def _lies(run: Run) -> dict[str, TensorLayout]:
    return {name: run.plan.state[name].parameter for name in run.plan.state}


def _held(run: Run, lies: TensorLayout) -> Pieces:
    mesh: Mesh = run.plan.mesh
    return dict(lies.by_rank(mesh))


def _kinds(run: Run) -> dict[str, torch.dtype]:
    """Every parameter's dtype: a stage does not know those of the others."""
    mine = {name: str(p.dtype).removeprefix("torch.") for name, p in run.parameters.items()}
    every = gather_json(run.axes["world"].for_strategy("global tensors"), mine)
    return {name: getattr(torch, kind) for kinds in every for name, kind in kinds.items()}


def _resting(run: Run, name: str, lies: TensorLayout, kind: torch.dtype) -> Tensor:
    """This rank's part as it rests; an empty one where another stage has it."""
    if name in run.parameters:
        return run.parameters[name].detach()
    return torch.empty(lies.local_shape(run.coord), device=run.world.device, dtype=kind)


def _boxes(lies: TensorLayout, where: GlobalLayout) -> Pieces:
    return {rank: (whole_piece(box),) for rank, box in boxes(lies.shape, where).items()}


def _local_shape(run: Run, lies: TensorLayout, where: GlobalLayout) -> tuple[int, ...]:
    return local_shape(lies.shape, where, run.world.rank)


def _where(run: Run, lies: TensorLayout, placement: Placement | None, sbp: Sbp | Sequence[Sbp] | None) -> GlobalLayout:
    where = everywhere(run.world.device.type) if placement is None else placement
    plain: list[Sbp] = [words.split(0) if lies.shape and axis == 0 else words.broadcast for axis in range(where.ndim)]
    return GlobalLayout(where, words.checked(plain if sbp is None else sbp, where, len(lies.shape)))


def _check_processes(run: Run) -> None:
    if run.world.local and run.world.size > 1:
        raise PlanError(
            "global tensors need ranks that are processes",
            given=f"{run.world.size} ranks that are threads of one process",
            allowed="processes: torch's DTensor, which carries global tensors, knows one rank to a process",
            fix='launch(work, layout, ranks="processes"), or torchrun',
        )
