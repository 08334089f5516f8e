"""What every operator does to global tensors: one rule for each family, and a refusal where there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from shardwright.comm.current_world import here
from shardwright.global_tensor.boxing import move
from shardwright.global_tensor.geometry import GlobalLayout
from shardwright.global_tensor.placement import Placement, placement_of
from shardwright.global_tensor.rules import (
    attention,
    convolutions,
    dims,
    indexing,
    joining,
    likes,
    lists,
    losses,
    norms,
    pointwise,
    products,
    randoms,
    sums,
    views,
)
from shardwright.global_tensor.rules.call import (
    Decision,
    OperatorCall,
    decide,
    flattened,
    meta_outputs,
    mixed,
    nothing,
    put_together,
    refusal,
    run_here,
)
from shardwright.global_tensor.rules.trial import try_out
from shardwright.global_tensor.sbp import broadcast
from shardwright.global_tensor.tensor import GlobalTensor, moved, wrap
from shardwright.global_tensor.view_tracking import bind, check_fresh, is_apart, is_shared, note_writes

Rule = Callable[[OperatorCall], Decision]

RULES: dict[str, Rule] = {}
for _family in (
    attention, convolutions, dims, indexing, joining, likes, losses, norms, pointwise, products, sums, views,
):  # fmt: skip
    RULES.update(_family.RULES)

_VALUE_DEPENDENT = (
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "unique_dim_consecutive",
    "bincount",
    "repeat_interleave",
)


_RESHAPE_THEMSELVES = ("set_", "resize_", "resize_as_")
_ADDED = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
_WHOLE_LAYERS = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs one operator: brings the inputs to where the rule wants them, computes here, says how the outputs lie."""
    if (of_lists := lists.handler(func)) is not None:
        return of_lists(func, args, kwargs)
    leaves, spec = flattened(args, kwargs)
    place = _placement(func, leaves)
    if any(isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) for leaf in leaves):
        _check_written(func, args, kwargs)
        leaves = [_as_global(func, leaf, place) for leaf in leaves]
        args, kwargs = put_together(leaves, spec)
    call = OperatorCall(func, args, kwargs, [leaf for leaf in leaves if isinstance(leaf, DTensor)], place)
    check_fresh(call.name, call.tensors)
    written = [x for x, argument in zip(args, func._schema.arguments, strict=False) if _is_written(argument)]
    if any(is_apart(x) for x in written):
        raise refusal(call, "what is written to is a part of a cut tensor, and was gathered to be looked at")
    rng = torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(call)
    if rng and call.name not in randoms.HANDLERS and not _is_composite(call):
        raise refusal(call, "its random numbers would depend on the layout", "randn, rand, dropout")
    if call.name == "squeeze_" and not is_shared(args[0]):
        return _squeezed(call)
    if torch.Tag.inplace_view in func.tags or call.name in _RESHAPE_THEMSELVES:
        raise refusal(call, "it gives a tensor another shape in place", "the operator that returns a new one")
    found = _carried_out(call, leaves, spec)
    note_writes(written)
    return found


def _carried_out(call: OperatorCall, leaves: list[Any], spec: Any) -> Any:
    """What the operator returns, and what it writes written."""
    func, args, kwargs = call.func, call.args, call.kwargs
    if call.name in randoms.HANDLERS:
        return randoms.HANDLERS[call.name](call)
    if call.name in _READERS:
        return _READERS[call.name](call)
    if _is_composite(call):  # it comes whole only where autograd has not taken it apart
        return func.decompose(*args, **kwargs)
    decision = _decision(call)
    outs = [kwargs.get(each.name) for each in func._schema.arguments if each.is_out]
    if any(out is not None for out in outs) and any(not args or out is not args[0] for out in outs):
        raise refusal(call, "the result would be written into a tensor that lies otherwise: leave out 'out='")
    lost = [
        moved(x, GlobalLayout(call.placement, sbp)) if x.sbp != sbp else x._local_tensor
        for x, sbp in zip(call.tensors, decision.ins, strict=True)
    ]
    found = nothing(call, decision)
    if found is not None or here().rank not in call.placement:
        try_out(call)
        return _returned(call, decision, found)
    local = iter(lost)
    here_args, here_kwargs = put_together([next(local) if isinstance(leaf, DTensor) else leaf for leaf in leaves], spec)
    return _returned(call, decision, run_here(call, decision, here_args, here_kwargs))


def _squeezed(call: OperatorCall) -> Any:
    """A tensor that nobody sees in another way loses dims in place: torch does so to what it has just made."""
    x = call.tensors[0]
    squeeze = getattr(torch.ops.aten.squeeze, call.func._overloadname)
    found = dispatch(squeeze, (x.detach(), *call.args[1:]), call.kwargs)
    x._local_tensor, x._spec = found._local_tensor, found._spec
    return return_and_correct_aliasing(call.func, call.args, call.kwargs, x)


def _placement(func: Any, leaves: list[Any]) -> Placement:
    """The one placement of all global tensors among the arguments."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
    places = dict.fromkeys(placement_of(x._spec.mesh) for x in tensors)
    first = next(iter(places))
    if len(places) > 1:
        fix = f"write x.to_global({first}, sbp) for the others"
        if all(x.ndim == 0 for x in tensors):  # norms or losses of several stages: clip_grad_norm_ stacks them
            fix += "; for clip_grad_norm_ over several placements, take get_total_norm of each, bring the norms to one "
            fix += "placement, and give their norm to clip_grads_with_norm_ for each"
        raise mixed(func, ", ".join(map(str, places)), fix)
    if any(not isinstance(x, GlobalTensor) for x in tensors):
        raise mixed(func, "a DTensor beside a global tensor", "write to_global(x) for it")
    return first


def _check_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for place, argument in enumerate(func._schema.arguments):
        x = args[place] if place < len(args) else kwargs.get(argument.name)
        if _is_written(argument) and isinstance(x, Tensor) and not isinstance(x, DTensor):
            raise mixed(
                func,
                f"a plain tensor of shape {list(x.shape)} that a global one would be written to",
                "write to_global(x, placement, sbp) for the plain one, or y.to_local() for the global one",
            )


def _as_global(func: Any, leaf: Any, place: Placement) -> Any:
    """A plain number in a tensor is a copy on every member; nothing else that is plain meets a global tensor."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
        return leaf
    if (leaf.ndim and not _is_made_by_torch(func, leaf)) or (leaf.requires_grad and torch.is_grad_enabled()):
        kind = "a plain tensor" if leaf.ndim else "a plain tensor with a gradient, which would be global,"
        raise mixed(
            func,
            f"{kind} of shape {list(leaf.shape)} beside one on {place}",
            "write to_global(x, placement, sbp) for the plain one",
        )
    local = leaf.detach() if here().rank in place else leaf.new_empty((0,) * max(leaf.ndim, 1))
    made = wrap(local, tuple(leaf.shape), GlobalLayout(place, (broadcast,) * place.ndim))
    made._plain = leaf  # a rule may ask whether it is zero or infinite
    return made


def _is_made_by_torch(func: Any, x: Tensor) -> bool:
    """Whether it is what torch itself makes within its functions, the same on every rank.

    ``one_hot`` compares with 0, 1, 2 and so on; causal attention adds minus infinity above a diagonal; some backwards
    begin with zeros or ones.
    """
    if func in _ADDED and x.ndim == 2 and x.dtype.is_floating_point and not x.requires_grad:
        return torch.equal(x, torch.full_like(x, float("-inf")).triu(1))
    if func is torch.ops.aten.eq.Tensor and x.ndim == 1 and x.dtype == torch.int64:
        return torch.equal(x, torch.arange(len(x), device=x.device))
    is_backward = torch._C._current_autograd_node() is not None
    return is_backward and not x.requires_grad and any(bool((x == value).all()) for value in (0, 1))


def _is_composite(call: OperatorCall) -> bool:
    if call.name in RULES or pointwise.is_pointwise(call):
        return False
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(call.func.name(), key))


def _decision(call: OperatorCall) -> Decision:
    whole = all(one.is_replicate() for x in call.tensors for one in x.sbp)
    if call.name in _VALUE_DEPENDENT or (call.name == "index" and indexing.by_mask(call)):
        if not whole or call.placement.size < here().size:
            raise refusal(call, "the shape of what it returns depends on values that not every rank has")
        return Decision([x.sbp for x in call.tensors], [])
    key, call.outputs = _outputs(call)
    rule = RULES.get(call.name) or (pointwise.rule if pointwise.is_pointwise(call) else None)
    if rule is not None:
        call.key = key
        return rule(call)
    if not whole and call.name in _WHOLE_LAYERS:
        why = "it computes a whole layer at once; torch.backends.mha.set_fastpath_enabled(False) turns that off"
        raise refusal(call, why)
    if not whole:
        raise refusal(call, "it is not in the list of operators whose rules are proven")
    return decide(call, [])


_META: dict[Any, list[Tensor | None]] = {}


def _outputs(call: OperatorCall) -> tuple[Any, list[Tensor | None]]:
    """What kind of call it is, and its outputs' whole shapes; the same call is asked once.

    Whole numbers divided are of torch's default dtype.
    """
    key = (call.func, _frozen(call.args), _frozen(tuple(sorted(call.kwargs.items()))), torch.get_default_dtype())
    if key not in _META:
        if len(_META) > 10_000:
            _META.clear()
        try:
            found = meta_outputs(call.func, call.args, call.kwargs)
        except NotImplementedError as failure:
            raise refusal(call, "torch cannot tell its result's shape beforehand") from failure
        many = list(found) if isinstance(found, (tuple, list)) else [found]
        _META[key] = [x if isinstance(x, Tensor) else None for x in many]
    return key, _META[key]


def _frozen(given: Any) -> Any:
    if isinstance(given, Tensor):
        return ("tensor", tuple(given.shape), given.stride(), given.dtype)
    if isinstance(given, (list, tuple)):
        return tuple(_frozen(each) for each in given)
    return (type(given).__name__, given)


def _returned(call: OperatorCall, decision: Decision, found: Any) -> Any:
    """The local results as global tensors; what was written to in place as itself."""
    schema = call.func._schema
    if len(schema.returns) == 1 and schema.returns[0].alias_info is not None and schema.returns[0].alias_info.is_write:
        x = call.args[0]
        if x.sbp != decision.outs[0]:  # it was computed lying otherwise, and goes back to where others see it
            there = GlobalLayout(call.placement, decision.outs[0])
            x._local_tensor.copy_(move(found, tuple(x.shape), there, GlobalLayout(call.placement, x.sbp)))
        return x
    if not decision.outs:  # the shape is known only now, and the same on every member
        shapes = _told_shapes(call, found)
        decision.outs = [call.tensors[0].sbp] * len(shapes)
        call.outputs = [torch.empty(shape, device="meta") for shape in shapes]
    # in inference mode the view of a tensor from outside of it is, as in torch, like that tensor
    is_plain_view = schema._is_view_op() and not call.tensors[0].is_inference()
    many, member = isinstance(found, (tuple, list)), here().rank in call.placement
    wrapped = []
    for number, local in enumerate(found if many else [found]):
        meta = call.outputs[number] if number < len(call.outputs) else None
        if isinstance(local, Tensor) and meta is not None:
            where = GlobalLayout(call.placement, decision.outs[number])
            if member and tuple(local.shape) != tuple(meta.shape) and all(one.is_replicate() for one in where.sbp):
                meta = local  # an unused output, of another shape than torch foretells
            with torch.inference_mode(mode=not is_plain_view and torch.is_inference_mode_enabled()):
                local = wrap(local, tuple(meta.shape), where, meta.stride())
        wrapped.append(local)
    result = type(found)(wrapped) if many else wrapped[0]
    if schema.returns and any(each.alias_info is not None for each in schema.returns):
        for each in wrapped:
            bind(each, call.tensors[0], apart=_is_copied(call, decision, each))
    if member and schema._is_view_op() and not many and not torch.is_inference_mode_enabled():
        return return_and_correct_aliasing(call.func, call.args, call.kwargs, result)
    return result


def _told_shapes(call: OperatorCall, found: Any) -> list[tuple[int, ...]]:
    return [tuple(x.shape) for x in (found if isinstance(found, (tuple, list)) else [found])]


def _drops_nothing(call: OperatorCall) -> bool:
    """Whether an operator that may draw random numbers draws none this time."""
    names = {argument.name for argument in call.func._schema.arguments}
    return "dropout_p" in names and not call.arg("dropout_p")


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_copied(call: OperatorCall, decision: Decision, view: GlobalTensor) -> bool:
    """Whether a view is none here, since its input had to be moved or copied: a write to it would not be seen."""
    x = call.tensors[0]
    mine, others = (each._local_tensor.untyped_storage().data_ptr() for each in (view, x))
    copied = bool(view._local_tensor.numel()) and mine != others
    return copied or decision.ins[0] != x.sbp


# ---- operators that read values into Python


def _number(call: OperatorCall) -> Any:
    return call.tensors[0].item()


def _equal(call: OperatorCall) -> bool:
    first, second = (x._read("equal") for x in call.tensors)
    return bool(torch.equal(first, second))


def _allclose(call: OperatorCall) -> bool:
    first, second = (x._read("allclose") for x in call.tensors)
    return torch.allclose(first, second, *call.args[2:], **call.kwargs)


_READERS: dict[str, Callable[[OperatorCall], Any]] = {
    "_local_scalar_dense": _number,
    "equal": _equal,
    "allclose": _allclose,
}

__all__ = ["RULES", "Placement", "dispatch"]
