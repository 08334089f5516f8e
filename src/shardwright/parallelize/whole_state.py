"""Collects a run's ``state_dict`` under the plain model's names: every tensor whole, or this rank's shards."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn

from shardwright.analysis.traced.structure import owners
from shardwright.comm.agreement import gather_json, text_digest
from shardwright.comm.axis import Axis
from shardwright.errors import PlanError, ShardError, explain
from shardwright.layout import Layout
from shardwright.mesh import Coord, Mesh
from shardwright.parallelize.rank_state import RankState
from shardwright.plan.plan import Plan
from shardwright.sharding.box import read
from shardwright.sharding.tensor_layout import TensorLayout


def warn_of_extra_state(model: nn.Module) -> None:
    """Warns of each module whose class has a ``get_extra_state`` or ``set_extra_state``.

    Such extra state is in no state dict, checkpoint or weights file of a run.
    """
    kinds = (nn.Module.get_extra_state, nn.Module.set_extra_state)
    for path, module in model.named_modules():
        if (type(module).get_extra_state, type(module).set_extra_state) != kinds:
            warnings.warn(
                explain(
                    "the extra state of a module is left out",
                    given=f"{type(module).__name__} at '{path}', whose class has a get_extra_state",
                    allowed="parameters and persistent buffers, which are whole under any layout",
                    fix="keep it in a buffer, or in the 'extra' of sw.save(folder, run, optimizer, extra={...})",
                ),
                stacklevel=3,
            )


def clear_both(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Makes ``zero_grad`` of a run's model, and of its modules, clear the gradients that the optimizer uses as well.

    That matters for parameters of which the optimizer updates another copy (in ``parameters``): a master weight or a
    ZeRO shard.
    """
    own = dict(model.named_parameters())
    for module, names in _holders(model, {n for n, p in parameters.items() if n in own and p is not own[n]}).items():
        module.zero_grad = _ZeroGradients(module, [parameters[name] for name in names])  # type: ignore[method-assign]


def _holders(model: nn.Module, names: Collection[str]) -> dict[nn.Module, list[str]]:
    """Returns the modules that have parameters of these names, themselves or in a submodule, with those names."""
    modules = dict(model.named_modules())
    holders: dict[nn.Module, list[str]] = {}
    for path, _, _, name in owners(model):
        if name in names:
            parts = path.split(".") if path else []
            for number in range(len(parts) + 1):
                holders.setdefault(modules[".".join(parts[:number])], []).append(name)
    return holders


class _ZeroGradients:
    """A ``zero_grad`` that also clears the gradients of further tensors; a copy of the module clears its own alone."""

    def __init__(self, module: nn.Module, others: Sequence[nn.Parameter]) -> None:
        self._module, self._others = ref(module), others

    def __call__(self, set_to_none: bool = True) -> None:
        module = self._module()
        assert module is not None, "it is called by the module"
        with torch._C.DisableTorchFunctionSubclass():  # it reads gradients that parameters may refuse to show
            type(module).zero_grad(module, set_to_none)
        for parameter in self._others:
            parameter.grad = None if set_to_none or parameter.grad is None else torch.zeros_like(parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = self._module()
        assert module is not None, "the module is copied with it"
        return _ZeroGradients(copy.deepcopy(module, memo), ())

    def __reduce__(self) -> Any:
        """Returns how a pickle of the module holds this object: as the ``zero_grad`` of any module."""
        return partial, (nn.Module.zero_grad, self._module())


_COPIES = (
    "load_state_dict() of the run's model would be undone by the next update",
    "whose parameters are copies of master weights, or gathered from shards",
)
_PARTS = (
    "load_state_dict() of the run's model would need the shapes of a rank's parts",
    "of whose parameters this rank holds parts, or nothing",
)
"""Pairs of texts for an error: why a state dict is refused, and what is wrong with the module."""


def refuse_loads(model: nn.Module, plan: Plan, parameters: Mapping[str, nn.Parameter], coord: Coord) -> None:
    """Makes ``load_state_dict`` of a run's model raise PlanError where it would be undone, or fail in torch.

    The next update undoes it for a parameter of which the optimizer updates another copy (in ``parameters``): a master
    weight or a ZeRO shard. A whole tensor does not fit a rank's part, and a rank lacks the modules of other stages.
    State dicts without such parameters, and with tensors of the shapes that the rank holds, can still be loaded.
    """
    copies = {
        name
        for name, p in parameters.items()
        if name in plan.state
        and (p.dtype != plan.compute_dtypes[name] or plan.state[name].parameter != plan.compute[name])
    }
    parts = {name for name, layout in plan.compute.items() if layout.local_shape(coord) != layout.shape} - copies
    for names, why in ((copies, _COPIES), (parts, _PARTS)):
        held: dict[nn.Module, list[str]] = {}
        for _, module, own, name in owners(model):
            if name in names:
                held.setdefault(module, []).append(own)
        for module, owned in held.items():
            module.register_load_state_dict_pre_hook(partial(_refuse_load, id(module), owned, why))
    elsewhere = [name for name, layout in plan.compute.items() if not layout.pieces(coord) and 0 not in layout.shape]
    if elsewhere:
        why = _COPIES if copies else _PARTS
        model.register_load_state_dict_pre_hook(partial(_refuse_load, id(model), elsewhere, why))


def _refuse_load(
    own: int, names: Sequence[str], why: tuple[str, str], module: nn.Module, state: Mapping[str, Any], prefix: str,
    *_: Any
) -> None:  # fmt: skip
    if id(module) != own:
        return  # the hook of a copy of the module, such as one of averaged parameters: copies keep hooks
    values = {name: state[f"{prefix}{name}"] for name in names if f"{prefix}{name}" in state}
    if why is _PARTS:
        own_shapes = {name: None if p is None else p.shape for name, p in module._parameters.items()}
        values = {
            name: value for name, value in values.items() if getattr(value, "shape", None) != own_shapes.get(name)
        }
    if not values:
        return  # for example, a dict of buffers alone can be loaded
    what, described = why
    raise PlanError(
        what,
        given=f"'{prefix}{next(iter(values))}' of {type(module).__name__}, {described}",
        allowed="values for run.parameters, which the optimizer updates; checkpoints under any layout",
        fix="run.load_state_dict(state) or sw.load_weights(run, file), or write to run.parameters[name] and call "
        "run.changed()",
    )


def refuse_parts(model: nn.Module, plan: Plan, coord: Coord) -> None:
    """Makes ``state_dict`` and copies of a run's model raise PlanError where they would hold parts of it.

    So ``save_pretrained`` of transformers, ``torch.save(run.model, file)`` and ``AveragedModel`` of torch, which use
    these, raise it too.
    """
    parts = {name for name, layout in plan.compute.items() if layout.local_shape(coord) != layout.shape}
    held = {module: names[0] for module, names in _holders(model, parts).items()}
    # a rank has no modules with parameters of other stages, so the whole model refuses for them
    for name, layout in plan.compute.items():
        if not layout.pieces(coord) and 0 not in layout.shape:
            held.setdefault(model, name)
    for module, name in held.items():
        module.register_state_dict_pre_hook(partial(_refuse_part, "state_dict() of the run's model", name, plan.layout))
        # copy and pickle look this method up on the object, not on its class
        vars(module)["__reduce_ex__"] = partial(_refuse_part, "a copy of the run's model", name, plan.layout)


def _refuse_part(what: str, name: str, layout: Layout, *_: Any) -> NoReturn:
    raise ShardError(
        f"{what} would hold parts, as would what reads it, such as save_pretrained() or AveragedModel",
        given=f"'{name}', of which this rank holds a part or nothing under {layout}",
        allowed="run.state_dict() for the whole state, run.parameters for this rank's parts",
        fix="write run.state_dict(full=True), or full=False for this rank's part, or sw.save_weights(run, path), with "
        "format='transformers' in place of save_pretrained, on every rank; to average parameters, averages = "
        "run.average(optimizer, decay=0.999)",
    )


_PART = "part"
"""The key in an optimizer's ``state_dict`` under which it says which rank's part of the state it holds."""


def keep_parts_apart(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], plan: Plan, coord: Coord
) -> None:
    """Makes ``load_state_dict`` of an optimizer raise PlanError for other ranks' state, or for state of whole tensors.

    Parts of other ranks have the same shapes wherever sizes divide, and would be taken silently. So ``state_dict`` says
    in one more entry whose part it is: the rank and the layout, for people, and a hash of the pieces of each tensor.
    State is accepted from every layout under which this rank holds the same pieces. Where every rank holds all state,
    nothing changes.
    """
    axes = {axis for state in plan.state.values() for axis in state.optimizer.axes}
    if not axes:
        return
    states = {name: state.optimizer for name, state in sorted(plan.state.items()) if name in parameters}
    pieces = [f"{name}: {state.shape} {state.pieces(coord)}" for name, state in states.items()]
    where = ", ".join(f"{axis} {coord[axis]}" for axis in sorted(axes))
    mine = f"{where} of {plan.layout}, pieces {text_digest(str(pieces)):x}"
    shapes = {id(p): plan.compute[name].shape for name, p in parameters.items()}

    def mark(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, _PART: mine}

    def check(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        whole = any(
            isinstance(value, Tensor) and value.shape == shapes.get(id(p), p.shape) != p.shape
            for number, p in enumerate(held)
            for value in state["state"].get(number, {}).values()
        )
        if whole or str(state.get(_PART, mine)).split()[-1:] != mine.split()[-1:]:
            raise PlanError(
                "load_state_dict() of the optimizer would take state that is not of this rank's part",
                given="state of whole tensors, as of the plain model's optimizer"
                if whole
                else f"state of {state[_PART]}",
                allowed=f"what state_dict() of the optimizer returned on this rank: {mine}",
                fix="write sw.save(folder, run, optimizer) and sw.load(folder, run, optimizer), on every rank, under "
                "any layout",
            )

    optimizer.register_state_dict_post_hook(mark)
    optimizer.register_load_state_dict_pre_hook(check)


def part_of_state(run: RankState) -> dict[str, Tensor]:
    """Returns a ``state_dict`` of the parameter shards that this rank stores, and its persistent buffers.

    The tensors share memory with the run's. A tied parameter is under each of its names.
    """
    state: dict[str, Tensor] = {}
    for path, _, own, name in owners(run.model, every_path=True):
        if name in run.parameters:
            state[f"{path}.{own}".lstrip(".")] = run.parameters[name].detach()
    for path, module in run.model.named_modules(remove_duplicate=False):
        for own, buffer in module._buffers.items():
            name = f"{path}.{own}".lstrip(".")
            layout = run.plan.buffers.get(name)
            elsewhere = buffer is None or (buffer.is_meta and run.world.device.type != "meta")  # on another stage
            elsewhere = elsewhere or (layout is not None and not layout.is_held_at(run.coord))
            if not elsewhere and own not in module._non_persistent_buffers_set:
                state[name] = buffer.detach()
    return state


@torch.no_grad()
def whole_state(run: RankState) -> dict[str, Tensor]:
    """Returns a ``state_dict`` of whole parameters and persistent buffers, on every rank, in host memory.

    All ranks call it. A tied parameter is one tensor under each of its names.

    Traffic: a gather of names and shapes as text, and one all-gather of each tensor, with each element sent once.
    """
    everyone = run.axes["world"].for_strategy("state")
    parts = part_of_state(run)
    parameters = {f"{path}.{own}".lstrip("."): name for path, _, own, name in owners(run.model, every_path=True)}
    table = {
        key: [parameters.get(key, ""), str(value.dtype).removeprefix("torch."), list(value.shape)]
        for key, value in parts.items()
    }
    holders: dict[str, list[int]] = {}
    merged_table: dict[str, tuple[str, str, list[int]]] = {}
    for index, names in enumerate(gather_json(everyone, table)):
        for key, described in names.items():
            holders.setdefault(key, []).append(index)
            merged_table.setdefault(key, described)
    gathered: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    for key, (name, dtype, shape) in merged_table.items():
        if name:
            layout = run.plan.state[name].parameter
        else:
            layout = run.plan.buffers.get(key, TensorLayout.whole(shape)).of_shape(shape)
        if (name or key) not in gathered:
            like = parts.get(key, torch.empty(0, dtype=getattr(torch, dtype)))
            gathered[name or key] = gather_whole(everyone, run.plan.mesh, layout, like, holders[key][0])
        state[key] = gathered[name or key]
    return state


def gather_whole(everyone: Axis, mesh: Mesh, layout: TensorLayout, local: Tensor, first: int) -> Tensor:
    """Returns the whole tensor in host memory, from the pieces that each rank owns; all ranks call it.

    ``local`` is this rank's part or, on a rank that has none, any tensor of that dtype. If no axis cuts the tensor, the
    rank with index ``first``, one of those that store it, sends it.

    Traffic: one all-gather, in which each element is sent once.
    """
    coords = [mesh.coord(rank) for rank in everyone.ranks]
    if layout.axes:
        owned = [layout.owned(coord, mesh) for coord in coords]
    else:
        owned = [layout.pieces(coord) if index == first else () for index, coord in enumerate(coords)]
    sizes = [sum(piece.whole.size for piece in pieces) for pieces in owned]
    parts = [read(local, piece, piece.whole).reshape(-1) for piece in owned[everyone.index]]
    flat = torch.cat(parts) if parts else local.new_empty(0)
    everything = everyone.all_gather(flat.to(everyone.device), sizes=sizes).cpu()
    whole = torch.empty(layout.shape, dtype=everything.dtype)
    pieces = [piece for rank_pieces in owned for piece in rank_pieces]
    for piece, values in zip(pieces, everything.split([piece.whole.size for piece in pieces]), strict=True):
        whole[piece.whole.slices] = values.view(piece.whole.shape)
    return whole
