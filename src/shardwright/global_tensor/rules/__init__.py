"""Runs operators on global tensors by their sharding rules, which decide how the inputs and outputs must be sharded.

:func:`dispatch` runs an operator in four steps: it asks the rule for a decision, redistributes the inputs, runs the
operator on the local tensors, and wraps the results. Random operators, operators on lists of tensors, and operators
that return values to Python have handlers instead of rules. An operator without a rule runs if all its inputs are
broadcast, and otherwise raises PlanError. Every rank checks the layouts before the first message, whether it is in the
placement or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shardwright.comm.current_world import current_world
from shardwright.errors import LayoutError
from shardwright.global_tensor.boxing import redistribute_local
from shardwright.global_tensor.geometry import GlobalLayout
from shardwright.global_tensor.placement import Placement, placement_of
from shardwright.global_tensor.rules import (
    attention,
    convolutions,
    dims,
    indexing,
    likes,
    lists,
    losses,
    norms,
    pointwise,
    products,
    randoms,
    views,
)
from shardwright.global_tensor.rules.call import OperatorCall, ShardingDecision, decide, empty_results, refusal, try_out
from shardwright.global_tensor.sbp import broadcast
from shardwright.global_tensor.tensor import GlobalTensor, redistributed_local, wrap
from shardwright.global_tensor.view_tracking import check_fresh, count_writes, is_gathered_view, is_shared, mark_view

ShardingRule = Callable[[OperatorCall], ShardingDecision]

RULES: dict[str, ShardingRule] = {}
for _family in (attention, convolutions, dims, indexing, likes, losses, norms, products, views):
    RULES.update(_family.RULES)

_VALUE_DEPENDENT = (
    "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount",
    "repeat_interleave",
)  # fmt: skip
"""Operators whose results' shapes depend on values of the inputs."""

_RESHAPE_IN_PLACE = ("set_", "resize_", "resize_as_")
_ADD = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
_FUSED_LAYERS = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs one operator on global tensors and returns its results, as global tensors where they are tensors.

    ``func`` is the aten operator, called with ``args`` and ``kwargs``. Plain tensors are taken as broadcast if they are
    0-d without a gradient, or look like those that torch's own functions create inside, such as a causal mask.

    Raises: PlanError: the operator has no rule for inputs that are sharded as these are, draws random numbers that
        would depend on the layout, changes a tensor's shape in place, writes to a gathered view, or reads one whose
        base was written to since. LayoutError: inputs are on several placements, or are DTensors or other plain
        tensors.
    """
    if (handler := lists.handler(func)) is not None:
        return handler(func, args, kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    placement = _placement(func, leaves)
    if any(isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) for leaf in leaves):
        _check_written(func, args, kwargs)
        leaves = [_as_global(func, leaf, placement) for leaf in leaves]
        args, kwargs = tree_unflatten(leaves, spec)
    call = OperatorCall(func, args, kwargs, [leaf for leaf in leaves if isinstance(leaf, DTensor)], placement)
    check_fresh(call.name, call.tensors)
    written = _written(func, args, kwargs)
    if any(is_gathered_view(x) for x in written):
        raise refusal(call, "it would write to a view of a cut tensor that was gathered to be looked at")
    rng = torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(call)
    if rng and call.name not in randoms.HANDLERS and not _is_composite(call):
        raise refusal(call, "its random numbers would depend on the layout", "randn, rand, dropout")
    if call.name == "squeeze_" and not is_shared(args[0]):
        return _squeeze_in_place(call)
    if torch.Tag.inplace_view in func.tags or call.name in _RESHAPE_IN_PLACE:
        raise refusal(call, "it changes the shape of a tensor in place", "the operator that returns a new one")
    result = _execute(call, leaves, spec)
    count_writes(written)
    return result


def _execute(call: OperatorCall, leaves: list[Any], spec: Any) -> Any:
    """Runs an operator by its handler, its decomposition or its rule; an in-place operator writes into its input."""
    func, args, kwargs = call.func, call.args, call.kwargs
    handler = randoms.HANDLERS.get(call.name) or _READERS.get(call.name)
    if handler is not None:
        return handler(call)
    if _is_composite(call):  # e.g. in inference mode, in which autograd decomposes nothing
        return func.decompose(*args, **kwargs)
    outs = [kwargs.get(argument.name) for argument in func._schema.arguments if argument.is_out]
    if any(out is not None for out in outs):
        if any(not args or out is not args[0] for out in outs):
            raise refusal(call, "the result would be written into a tensor of another layout: leave out 'out='")
        if not pointwise.is_pointwise(call):
            raise refusal(call, "only elementwise operators write into their first input: leave out 'out='")
    decision = _decision(call)
    # every rank, also outside of the placement, runs the redistributions, in the order of the inputs
    local_inputs = [
        redistributed_local(x, GlobalLayout(call.placement, sbp)) if x.sbp != sbp else x._local_tensor
        for x, sbp in zip(call.tensors, decision.ins, strict=True)
    ]
    result = empty_results(call, decision)
    if result is not None or current_world().rank not in call.placement:
        try_out(call)
        return _returned(call, decision, result)
    local = iter(local_inputs)
    args, kwargs = tree_unflatten([next(local) if isinstance(leaf, DTensor) else leaf for leaf in leaves], spec)
    result = func(*args, **kwargs) if decision.run is None else decision.run(call, decision, args, kwargs)
    return _returned(call, decision, result)


def _squeeze_in_place(call: OperatorCall) -> Any:
    """Removes dims of a tensor without views in place, as torch does to tensors that it has just created."""
    x = call.tensors[0]
    squeeze = getattr(torch.ops.aten.squeeze, call.func._overloadname)
    squeezed = dispatch(squeeze, (x.detach(), *call.args[1:]), call.kwargs)
    x._local_tensor, x._spec = squeezed._local_tensor, squeezed._spec
    return return_and_correct_aliasing(call.func, call.args, call.kwargs, x)


def _placement(func: Any, leaves: list[Any]) -> Placement:
    """Returns the placement of the global tensors among the arguments; raises LayoutError if there are several."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
    placements = dict.fromkeys(placement_of(x._spec.mesh) for x in tensors)
    first = next(iter(placements))
    if len(placements) > 1:
        fix = f"write x.to_global({first}, sbp) for the others"
        if all(x.ndim == 0 for x in tensors):  # probably clip_grad_norm_, which stacks the norms of all parameters
            fix += "; for clip_grad_norm_ over several placements, take get_total_norm of each, bring the norms to one "
            fix += "placement, and give their norm to clip_grads_with_norm_ for each"
        raise _placement_error(func, ", ".join(map(str, placements)), fix)
    if any(not isinstance(x, GlobalTensor) for x in tensors):
        raise _placement_error(func, "a DTensor beside a global tensor", "write to_global(x) for it")
    return first


def _placement_error(func: Any, what: str, fix: str) -> LayoutError:
    """Returns the error for tensors that one operator cannot take together."""
    return LayoutError(
        f"'{func._schema.name.removeprefix('aten::')}' is given tensors that are not on one placement",
        given=what,
        allowed="global tensors of one placement, and plain numbers",
        fix=fix,
    )


def _check_written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for number, argument in enumerate(func._schema.arguments):
        x = args[number] if number < len(args) else kwargs.get(argument.name)
        if _is_written(argument) and isinstance(x, Tensor) and not isinstance(x, DTensor):
            raise _placement_error(
                func,
                f"a plain tensor of shape {list(x.shape)} that a global one would be written to",
                "write to_global(x, placement, sbp) for the plain one, or y.to_local() for the global one",
            )


def _as_global(func: Any, leaf: Any, placement: Placement) -> Any:
    """Returns a plain tensor of one number as a broadcast global tensor; raises LayoutError for other plain tensors."""
    if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
        return leaf
    if (leaf.ndim and not _is_made_by_torch(func, leaf)) or (leaf.requires_grad and torch.is_grad_enabled()):
        kind = "a plain tensor" if leaf.ndim else "a plain tensor with a gradient, which would be global,"
        raise _placement_error(
            func,
            f"{kind} of shape {list(leaf.shape)} beside one on {placement}",
            "write to_global(x, placement, sbp) for the plain one",
        )
    local = leaf.detach() if current_world().rank in placement else leaf.new_empty((0,) * max(leaf.ndim, 1))
    made = wrap(local, tuple(leaf.shape), GlobalLayout(placement, (broadcast,) * placement.ndim))
    made._plain = leaf  # rules read it: partial sums pass a factor only if it is finite
    return made


def _is_made_by_torch(func: Any, x: Tensor) -> bool:
    """Whether ``x`` looks like a tensor that torch's own functions create inside, equal on every rank.

    ``one_hot`` compares with 0, 1, 2 and so on; causal attention adds a mask of minus infinity above the diagonal; some
    backwards start from zeros or ones.
    """
    if func in _ADD and x.ndim == 2 and x.dtype.is_floating_point and not x.requires_grad:
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


def _decision(call: OperatorCall) -> ShardingDecision:
    replicated = all(one.is_replicate() for x in call.tensors for one in x.sbp)
    if call.name in _VALUE_DEPENDENT or (call.name == "index" and indexing.is_by_mask(call)):
        if not replicated or call.placement.size < current_world().size:
            raise refusal(call, "the shape of its result depends on values that not every rank has")
        return ShardingDecision([x.sbp for x in call.tensors], [])
    key, call.outputs = _outputs(call)
    rule = RULES.get(call.name) or (pointwise.rule if pointwise.is_pointwise(call) else None)
    if rule is not None:
        call.key = key
        return rule(call)
    if not replicated and call.name in _FUSED_LAYERS:
        fix = "torch.backends.mha.set_fastpath_enabled(False) turns that off"
        raise refusal(call, f"it computes a whole layer at once; {fix}")
    if not replicated:
        raise refusal(call, "its behaviour on sharded tensors is not known")
    return decide(call, [])


_OUTPUTS: dict[Any, list[Tensor | None]] = {}


def _outputs(call: OperatorCall) -> tuple[Any, list[Tensor | None]]:
    """Returns the call's cache key and its outputs as meta tensors of global shapes, computed once for equal keys."""
    # the default dtype is part of the key, since it is the dtype of a quotient of integers
    key = (call.func, _hashable(call.args), _hashable(tuple(sorted(call.kwargs.items()))), torch.get_default_dtype())
    if key not in _OUTPUTS:
        if len(_OUTPUTS) > 10_000:
            _OUTPUTS.clear()
        try:
            result = _meta_outputs(call.func, call.args, call.kwargs)
        except NotImplementedError as failure:
            raise refusal(call, "torch cannot infer the shape of its result") from failure
        _OUTPUTS[key] = [x if isinstance(x, Tensor) else None for x in _as_list(result)]
    return key, _OUTPUTS[key]


def _meta_outputs(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the operator's results on meta tensors of the global shapes."""

    def to_meta(x: Any) -> Any:
        if isinstance(x, Tensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return torch.device("meta") if isinstance(x, torch.device) else x

    return func(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))


def _hashable(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return ("tensor", tuple(argument.shape), argument.stride(), argument.dtype)
    if isinstance(argument, (list, tuple)):
        return tuple(_hashable(entry) for entry in argument)
    return (type(argument).__name__, argument)


def _as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _returned(call: OperatorCall, decision: ShardingDecision, result: Any) -> Any:
    """Returns the local results as global tensors; for an in-place operator, the tensor that it wrote to."""
    schema = call.func._schema
    if len(schema.returns) == 1 and pointwise.is_in_place(call):
        x = call.args[0]
        if x.sbp != decision.outs[0]:  # computed in another layout: redistributed into the input's memory
            layout = GlobalLayout(call.placement, decision.outs[0])
            back = redistribute_local(result, tuple(x.shape), layout, GlobalLayout(call.placement, x.sbp))
            x._local_tensor.copy_(back)
        return x
    if not decision.outs:  # the shape depends on values; all inputs are broadcast, so it is the same on every rank
        shapes = [tuple(x.shape) for x in _as_list(result)]
        decision.outs = [call.tensors[0].sbp] * len(shapes)
        call.outputs = [torch.empty(shape, device="meta") for shape in shapes]
    # in inference mode a view of a normal tensor is a normal tensor, as in torch
    is_plain_view = schema._is_view_op() and not call.tensors[0].is_inference()
    many, member = isinstance(result, (tuple, list)), current_world().rank in call.placement
    wrapped = []
    for number, local in enumerate(_as_list(result)):
        meta = call.outputs[number] if number < len(call.outputs) else None
        if isinstance(local, Tensor) and meta is not None:
            layout = GlobalLayout(call.placement, decision.outs[number])
            if member and tuple(local.shape) != tuple(meta.shape) and all(one.is_replicate() for one in layout.sbp):
                meta = local  # an unused output, whose shape differs between the device and the meta device
            with torch.inference_mode(mode=not is_plain_view and torch.is_inference_mode_enabled()):
                local = wrap(local, tuple(meta.shape), layout, meta.stride())
        wrapped.append(local)
    returned = type(result)(wrapped) if many else wrapped[0]
    if any(output.alias_info is not None for output in schema.returns):
        for view in wrapped:
            mark_view(view, call.tensors[0], gathered=_is_copied(call, decision, view))
    if member and schema._is_view_op() and not many and not torch.is_inference_mode_enabled():
        return return_and_correct_aliasing(call.func, call.args, call.kwargs, returned)
    return returned


def _drops_nothing(call: OperatorCall) -> bool:
    """Whether an operator with a dropout argument draws no random numbers in this call."""
    return "dropout_p" in call.names and not call.arg("dropout_p")


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DTensor]:
    """Returns the global tensors among the arguments that the operator writes into, also by ``out=``."""
    arguments = [argument for argument in enumerate(func._schema.arguments) if _is_written(argument[1])]
    values = [args[number] if number < len(args) else kwargs.get(argument.name) for number, argument in arguments]
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, DTensor)]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_copied(call: OperatorCall, decision: ShardingDecision, view: GlobalTensor) -> bool:
    """Whether the input of a view was redistributed or copied, so that the view does not share its memory."""
    x = call.tensors[0]
    view_memory, memory = (tensor._local_tensor.untyped_storage().data_ptr() for tensor in (view, x))
    copied = bool(view._local_tensor.numel()) and view_memory != memory
    return copied or decision.ins[0] != x.sbp


def _read_all(call: OperatorCall) -> list[Any]:
    return [x._read(call.name) for x in call.tensors]


_READERS: dict[str, Callable[[OperatorCall], Any]] = {
    "_local_scalar_dense": lambda call: call.tensors[0].item(),
    "equal": lambda call: torch.equal(*_read_all(call)),
    "allclose": lambda call: torch.allclose(*_read_all(call), *call.args[2:], **call.kwargs),
}
"""Operators that return values of tensors to Python."""

__all__ = ["RULES", "dispatch"]
