"""Raises errors for models, losses, optimizers and batches that a layout cannot train, and for ranks that disagree.

These checks hold for every strategy; what only one strategy forbids is checked by that strategy.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from shardwright.analysis.batch_norms import ONE_VALUE, is_frozen, iterates, sees_batch
from shardwright.analysis.known_modules import MetaForward
from shardwright.analysis.model_graph import ModelGraph
from shardwright.analysis.operator_results import tensors_of
from shardwright.analysis.reached import tensors_outside
from shardwright.analysis.structure import kind_of
from shardwright.analysis.tracer import line_of
from shardwright.axes import layout_axes, mesh_axes
from shardwright.comm.agreement import Difference, check_agreement, first_difference_async, tensor_digest, text_digest
from shardwright.comm.axis import Axis
from shardwright.comm.world import World
from shardwright.errors import LayoutError, PlanError
from shardwright.formatting import first_line
from shardwright.forward_stack import is_composed
from shardwright.initial_values import recorded_values
from shardwright.layout import Layout
from shardwright.operators.split_backward import has_hook_of_user
from shardwright.plan.plan import Plan
from shardwright.plan.stages import DROPOUTS
from shardwright.strategy import check_own_code, check_table


def check_given(model: Any, layout: Any, world: Any) -> None:
    """Raises PlanError for arguments of ``parallelize`` that are no model, layout or world, with the line to write."""
    wrong = [
        ("model", "a module, such as nn.Linear(4, 3)", isinstance(model, nn.Module), model),
        ("layout", "a line such as 'dp2 tp2', or Layout.from_dict(...)", isinstance(layout, str | Layout), layout),
        ("world", "the world that sw.launch passes to each rank's function", isinstance(world, World), world),
    ]
    for name, allowed, fits, value in wrong:
        if not fits:
            is_class = isinstance(value, type)
            raise PlanError(
                f"'{name}' of parallelize is none",
                given=f"the class {value.__name__}" if is_class else f"{type(value).__name__}: {value!r:.60}",
                allowed=allowed,
                fix="write sw.launch(lambda world: sw.parallelize(model, 'dp2', world), 2)"
                if not is_class
                else f"write {value.__name__}(...), which makes one",
            )


def check_names(model: nn.Module, layout: Layout) -> None:
    """Raises PlanError for a child that its name does not give, where a layout cuts modules or divides them in stages.

    That is one whose name its class has too, as a child named ``parameters``: ``module.parameters`` is the method.
    """
    if not any(f.size > 1 and layout_axes()[f.axis].kind in ("operators", "stages") for f in layout.factors):
        return
    for path, module in model.named_modules():
        for name, child in module._modules.items():
            if hasattr(type(module), name) and getattr(module, name, None) is not child:
                kind = type(module).__name__
                raise PlanError(
                    f"the module '{f'{path}.{name}'.lstrip('.')}' cannot be reached by its name",
                    given=f"a child of {kind} named '{name}', as an attribute of the class {kind} is, under {layout}",
                    allowed="names that the class does not have; such children under dp and ZeRO",
                    fix=f"rename it where it is made, such as self.{name}_ = ...",
                )


def check_model(model: nn.Module) -> None:
    """Raises PlanError for a model that cannot be copied or sharded, or whose gradients ranks cannot sum.

    These are models that another wrapper or compiler has changed, and those with lazy parameters, hooks on gradients,
    sparse tensors or gradients, or tensors computed from parameters.
    """
    _check_plain(model)
    for name, parameter in model.named_parameters():
        lazy: bool = is_lazy(parameter)
        if lazy:
            raise PlanError(
                f"the parameter '{name}' has no shape yet",
                given="a lazy module that has not been called",
                allowed="parameters of known shapes",
                fix="call the model once on a batch, or give the layer its sizes: nn.Linear(in, out)",
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise PlanError(
                f"the parameter '{name}' has a hook on its gradient",
                given="a hook by register_hook or register_post_accumulate_grad_hook",
                allowed="parameters without hooks: a rank's own gradient is a term, or a part, of what one would see",
                fix="change run.parameters[name].grad between step() and the optimizer's step",
            )
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise PlanError(
                f"the gradient of the table '{path}' is sparse",
                given=f"{type(module).__name__}(sparse=True)",
                allowed="tables whose gradients are dense: ranks sum them",
                fix="leave out sparse=True",
            )
        saved = ((n, b) for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set)
        for name, value in (*module._parameters.items(), *saved):
            if value is not None and value.layout != torch.strided:
                raise PlanError(
                    f"'{f'{path}.{name}'.lstrip('.')}' is a sparse tensor, of which ranks take no parts and copies",
                    given=f"{type(module).__name__} with a parameter or buffer of layout {value.layout}",
                    allowed="dense parameters and buffers, and sparse buffers with persistent=False",
                    fix=f"write module.{name} = module.{name}.to_dense(), or register it with persistent=False",
                )
        for name, value in vars(module).items():
            # a hook that runs before each forward computes it anew, as that of torch.nn.utils.weight_norm does
            if isinstance(value, Tensor) and value.grad_fn is not None and not module._forward_pre_hooks:
                raise PlanError(
                    f"'{f'{path}.{name}'.lstrip('.')}' was computed from parameters, and cannot be copied with them",
                    given=f"{type(module).__name__} with a tensor that has a history",
                    allowed="modules that compute such tensors in forward or in a forward pre-hook, and "
                    "parametrizations",
                    fix="compute it in forward, or keep the tensor out of the module",
                )


def _check_plain(model: nn.Module) -> None:
    """Raises PlanError for a model that is wrapped, compiled or sharded already, in whole or in part."""
    loaded = sys.modules
    compiled = getattr(loaded.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    sharded = (
        getattr(loaded.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ()),
        getattr(loaded.get("torch.distributed.fsdp"), "FSDPModule", ()),
    )
    for path, module in model.named_modules():
        what, kind = f"the module '{path}'" if path else "the model", kind_of(module).__name__
        if isinstance(module, compiled) or hasattr(module._compiled_call_impl, "_torchdynamo_orig_callable"):
            raise PlanError(
                f"{what} is compiled already, and its parts would not be those that a layout cuts",
                given=f"{kind}, the result of torch.compile" if isinstance(module, compiled) else f"{kind}.compile()",
                allowed="plain modules; with the word `compile` in the layout each block is compiled on its rank",
                fix="leave out torch.compile, and add the word compile to the layout, as in 'dp2 compile'",
            )
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise PlanError(
                f"{what} is wrapped for data parallelism already",
                given=kind,
                allowed="the plain model of one device: the layout does what the wrapper does",
                fix="give the model inside, which is its .module, under a layout such as dp2",
            )
        if isinstance(module, sharded):
            raise PlanError(
                f"{what} is sharded already",
                given=kind,
                allowed="the plain model of one device: the layout does what the wrapper does",
                fix="give the model as it was before, under a layout such as dp2/zero3",
            )
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise PlanError(
                f"{what} is TorchScript, which has no Python code to run on shards of its tensors",
                given=kind,
                allowed="the nn.Module from which it was made",
                fix="leave out torch.jit.script or torch.jit.trace",
            )


def check_loss(loss: nn.Module) -> None:
    """Raises PlanError for a loss with parameters that require gradients, because only the model's are trained."""
    names = [name for name, parameter in loss.named_parameters() if parameter.requires_grad]
    if names:
        several = f"{len(names)} parameters that require a gradient"
        raise PlanError(
            f"the loss has a parameter that would never be trained: '{names[0]}'",
            given=f"{type(loss).__name__} with {several if names[1:] else '1 parameter that requires a gradient'}",
            allowed="losses of the output and the targets; buffers and frozen parameters may be inside",
            fix="move the parameters into the model, and a penalty on them too, or freeze them",
        )


def check_microbatches(model: nn.Module, layout: Layout, graph: ModelGraph | None = None) -> None:
    """Raises LayoutError for layers, such as BatchNorm, whose result depends on how ``mb`` splits the batch.

    Allowed are BatchNorms in eval mode inside of a model in training, which normalize by their running statistics.
    With a recorded ``graph`` of the model, code outside of layers that mixes samples is an error too, and so is code
    that writes to frozen parameters, as a momentum encoder does. The layout option ``own-statistics`` allows all, but
    not embeddings with ``scale_grad_by_freq``. Without microbatches nothing is checked.
    """
    if layout.num_microbatches == 1:
        return
    number, own = f"mb{layout.num_microbatches}", replace(layout, own_statistics=True)
    for name, module in model.named_modules():
        check_table(name, module, number, ["scale_grad_by_freq"])
        if layout.own_statistics or not (sees_batch(module) or iterates(module)):
            continue
        if model.training and is_frozen(module):  # runtime/buffer_writes.py raises an error if it no longer is
            continue
        raise LayoutError(
            f"'{name}' changes its state with every call, and 'mb' makes several calls of one"
            if iterates(module)
            else f"'{name}' computes statistics over the batch, which 'mb' cuts",
            given=f"{type(module).__name__} under {layout}",
            allowed="layers that treat each sample alone; "
            f"under {number}/own-statistics each microbatch has its own statistics",
            fix=f"write {own}, leave out mb, freeze it by .eval() in a model that trains, or use GroupNorm or LayerNorm"
            if sees_batch(module)
            else f"write {own}, or leave out mb",
        )
    if graph is not None and not layout.own_statistics:
        check_own_code(graph, number)
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        for name in sorted(frozen & graph.written_parameters().keys()) if frozen else ():
            raise LayoutError(
                f"the forward writes to the frozen parameter '{name}', and 'mb' makes several calls a step",
                given=f"code that changes it in each of {number}'s calls, as that of a momentum encoder",
                allowed=f"such code without mb; under {number}/own-statistics each microbatch changes it once",
                fix=f"write {own}, leave out mb, or change it between steps by run.load_state_dict",
            )


def check_renormed(model: nn.Module, plan: Plan) -> None:
    """Raises PlanError for an embedding with ``max_norm`` if the optimizer updates a separate copy of its weight.

    That is so with master weights, ZeRO or offloaded state. The embedding rescales rows of the weight that it computes
    with, and the optimizer's copy would not change.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or module.max_norm is None:
            continue
        name = names[id(module.weight)]
        apart = (
            plan.stored_dtypes[name] != plan.compute_dtypes[name] or plan.state[name].parameter != plan.compute[name]
        )
        if apart or name in plan.offloaded:
            raise PlanError(
                f"the rows that the table '{path}' rescales would never reach what the optimizer steps",
                given=f"{type(module).__name__} with max_norm={module.max_norm} under {plan.layout}, which steps "
                "another copy of it",
                allowed="with max_norm layouts in fp32 without zero, such as single",
                fix="leave out max_norm, or bf16, fp16 and zero",
            )


def check_held(model: nn.Module, plan: Plan) -> None:
    """Raises LayoutError if code outside of a module holds a direct reference to a parameter that would be sharded.

    Such code would see a shard in place of the whole parameter. A reference held by the module itself, as in a list of
    ``nn.LSTM``, is allowed if the parameter is whole while the module's forward runs.
    """
    held = tensors_outside(model)
    for name, parameter in model.named_parameters() if held else ():
        in_compute = set(plan.compute[name].axes).difference(mesh_axes("stages"))
        cut = sorted(in_compute | set(plan.state[name].parameter.axes).difference(mesh_axes("stages")))
        owner = name.rpartition(".")[0]
        own = not in_compute and held.get(id(parameter), "").startswith(f"{owner}." if owner else "")
        if id(parameter) in held and cut and not own:
            raise LayoutError(
                f"the parameter '{name}' would be sharded where other code uses it whole",
                given=f"{held[id(parameter)]}, which holds it, under {plan.layout}: sharded over {', '.join(cut)}",
                allowed="parameters that code reads from the module that owns them",
                fix="read it as module.weight where it is used, or choose a layout that leaves it whole, such as dp2",
            )


def check_full(model: nn.Module, plan: Plan, num_global: int) -> None:
    """Raises PlanError if a batch is too small to give every microbatch the statistics that its layers need.

    Only the layout option ``own-statistics`` with layers such as BatchNorm needs a sample or more in every microbatch.
    ``num_global`` is the number of samples of the global batch.
    """
    # the first rank has the most samples of a balanced cut: all ranks decide by it, and so alike
    number, first = plan.layout.num_microbatches, dict.fromkeys(plan.mesh.axes, 0)
    if not plan.layout.own_statistics or len(plan.batch_shard(first).local_samples(num_global)) >= number:
        return
    if any(sees_batch(module) or iterates(module) for module in model.modules()):
        raise PlanError(
            "a microbatch without samples has no statistics of its own",
            given=f"{num_global} samples in {number} microbatches, under {plan.layout}",
            allowed=f"a sample or more in each: {number} or more on each of the ranks that cut the batch",
            fix="leave such a batch out, or use fewer microbatches",
        )


@contextmanager
def torch_errors_explained(plan: Plan) -> Iterator[None]:
    """Returns a context in which errors of torch that a layout has brought about are raised as PlanErrors.

    These are operators that do not run in bf16 or fp16, or not on tensors of two dtypes, and a BatchNorm on a
    microbatch of its own with one value for each channel. Other errors are raised as they are.
    """
    precision, layout = plan.layout.precision, plan.layout
    try:
        yield
    except (RuntimeError, ValueError) as failure:
        text = first_line(failure)
        given = f"{type(failure).__name__}: {text}{line_of(failure)}, under {layout}"
        if layout.own_statistics and ONE_VALUE in text:
            raise PlanError(
                "a BatchNorm has one value for each channel of a microbatch",
                given=given,
                allowed="microbatches of several samples, or channels of more than one pixel",
                fix="use fewer microbatches, larger batches, or GroupNorm",
            ) from failure
        is_torchs = not isinstance(failure, ValueError) or text.startswith("RNN input dtype")
        if precision != "fp32" and is_torchs and _DTYPES.search(text):
            raise PlanError(
                f"the model's code does not run in {precision}",
                given=given,
                allowed=f"operators that torch has for {precision}, on tensors of one dtype",
                fix=f"leave out {precision}, or convert in the model's code: x.float() before such an operator, and "
                ".to(weight.dtype) behind it",
            ) from failure
        raise


@contextmanager
def explained_on_shards(layout: Layout, targets: Any, *, meets: bool) -> Iterator[None]:
    """Returns a context in which errors of a loss that a part of a batch may have brought about are PlanErrors.

    These are indices out of bounds where ``targets`` are the places of samples in the whole batch, as those of a
    contrastive loss, and, if samples are known to meet in the loss (``meets``), all errors about sizes.
    """
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as failure:
        if meets:
            is_of_part = bool(_SIZES.search(first_line(failure)))
        else:
            is_of_part = isinstance(failure, IndexError) and any(map(_are_places, tree_leaves(targets)))
        if not is_of_part:
            raise
        raise PlanError(
            "the loss fails on a part of the batch",
            given=f"{type(failure).__name__}: {first_line(failure)}{line_of(failure)}, under {layout}",
            allowed="losses of one sample after another, whose targets are of the samples that they are given",
            fix="if targets are the places of samples in the whole batch, use a layout that keeps batches whole, as "
            "tp2 and pp2 without mb do, or compute them in the loss, as torch.arange(len(output)): each part of a "
            "batch is then compared in itself, which is another loss",
        ) from failure


_SIZES = re.compile(r"\bsizes?\b|batch_size|shape|dimension|out of (bounds|range)")
"""Words of torch's errors for tensors whose sizes do not match, and for indices out of bounds."""


def _are_places(leaf: Any) -> bool:
    """Returns whether a tensor holds the numbers of consecutive samples, which begin behind those of another part."""
    if not isinstance(leaf, Tensor) or leaf.dim() != 1 or leaf.is_floating_point() or not len(leaf):
        return False
    numbers = leaf.tolist()
    return numbers[0] > 0 and numbers == [*range(numbers[0], numbers[0] + len(numbers))]


_DTYPES = re.compile(r"BFloat16|bfloat16|\bHalf\b|float16|same dtype|mixed dtype")
"""What errors of torch say about an operator that does not run in bf16 or fp16, or not on tensors of two dtypes."""


def check_trains(plan: Plan) -> None:
    """Raises PlanError if no parameter of the model is trained."""
    if not set(plan.compute) - set(plan.frozen):
        raise PlanError(
            "no parameter of the model requires a gradient, so there is nothing to train",
            given=f"{len(plan.compute)} parameters, all with requires_grad=False",
            allowed="one or more parameters to train; evaluate() and predict() need none",
            fix="call requires_grad_() on the parameters to train",
        )


def check_frozen(parameters: Mapping[str, nn.Parameter], frozen: Collection[str]) -> None:
    """Raises PlanError if a parameter's ``requires_grad`` has changed since the model was laid out.

    ``frozen`` names the parameters that did not require a gradient then.
    """
    for name, parameter in parameters.items():
        if parameter.requires_grad == (name in frozen):
            how = "no longer is frozen since" if parameter.requires_grad else "was frozen since"
            now = "unfreeze" if parameter.requires_grad else "freeze"
            raise PlanError(
                f"the parameter '{name}' {how} the model was laid out",
                given=f"requires_grad={parameter.requires_grad}",
                allowed="parameters that are trained or frozen as they were then: the traffic was planned for that",
                fix=f"save a checkpoint, {now} the plain model's parameters, parallelize and make the optimizer again, "
                "and write sw.load(PATH, run, optimizer)",
            )


def check_dtypes(parameters: Mapping[str, nn.Parameter], dtypes: Mapping[str, torch.dtype]) -> None:
    """Raises PlanError if a parameter of the run's model has another dtype than the layout computes in (``dtypes``)."""
    with torch._C.DisableTorchFunctionSubclass():  # parameters that are marked between steps answer slowly
        found = {name: p.dtype for name, p in parameters.items() if p.dtype != dtypes.get(name, p.dtype)}
    if found:
        name, dtype = next(iter(found.items()))
        raise PlanError(
            f"the dtype of the parameter '{name}' of run.model was changed since the model was laid out",
            given=f"{dtype} in place of {dtypes[name]}, as by run.model.half()",
            allowed="the dtype that the layout says; master weights stay as they are",
            fix="write 'bf16' or 'fp16' in the layout, or change the plain model before sw.parallelize",
        )


HeldObject = tuple[Mapping[str, Any], str, Any]
"""A submodule or parameter that a module had when the model was laid out: the module's dict, its key, its value."""


def structure_of(model: nn.Module) -> tuple[HeldObject, ...]:
    """Returns what each module of a model has now, for :func:`check_structure`."""
    return tuple(
        (held, name, value)
        for module in model.modules()
        for held in _held_by(module)
        for name, value in dict[str, Any].items(held)  # without unsharding any
    )


def _held_by(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._modules, module._parameters


def check_structure(structure: Iterable[HeldObject]) -> None:
    """Raises PlanError if a submodule or parameter was replaced or removed since the model was laid out.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> before = structure_of(model)
    >>> model[0] = nn.Linear(2, 3)
    >>> check_structure(before)
    Traceback (most recent call last):
    shardwright.errors.PlanError: '0' of the run's model was replaced or removed since the model was laid out
      ...
    """
    for held, name, value in structure:
        if held.get(name) is not value:
            raise PlanError(
                f"'{name}' of the run's model was replaced or removed since the model was laid out",
                given=f"a {type(value).__name__}, in whose place is {type(held.get(name)).__name__}",
                allowed="changes of the plain model before sw.parallelize: pruning, weight_norm, adapters, new layers",
                fix="change the plain model, by one forward if that is what changes it, then call sw.parallelize, and "
                "sw.load for a checkpoint",
            )


Code = tuple[str, nn.Module, Any]
"""A module's path, the module, and the ``forward`` that was assigned to it, None for that of its class."""


def code_of(model: nn.Module) -> tuple[Code, ...]:
    """Returns each module of a model with the ``forward`` that it has now, for :func:`check_code` to compare with."""
    return tuple((path, module, vars(module).get("forward")) for path, module in model.named_modules())


def check_code(code: Iterable[Code]) -> None:
    """Raises PlanError if a module's ``forward`` was replaced since, by another than the library's."""
    for path, module, before in code:
        now = vars(module).get("forward")
        if now is not before and not isinstance(now, MetaForward) and not is_composed(module):
            name = ".".join(filter(None, (path, "forward")))
            raise PlanError(
                f"'{name}' of the run's model was replaced since the model was laid out",
                given="another forward, in a run whose stages have read the code",
                allowed="changes of the plain model before sw.parallelize",
                fix="change the plain model, then call sw.parallelize, and sw.load for a checkpoint",
            )


def check_world(plan: Plan, world: World) -> None:
    """Raises LayoutError unless the world has as many ranks as the layout asks for."""
    if plan.mesh.size != world.size:
        raise LayoutError(
            "the layout does not fit the ranks available",
            given=f"{plan.layout}: {plan.mesh.size} ranks, on {world.size}",
            allowed=f"layouts whose sizes multiply to {world.size}",
            fix=f"write dp{world.size}, or start {plan.mesh.size} ranks",
        )


def check_own(optimizer: torch.optim.Optimizer, own: Iterable[Tensor], plan: Plan) -> None:
    """Raises PlanError if an optimizer has a tensor that is not in ``own``, the run's parameters (``run.parameters``).

    Updates of such a tensor would not reach the model that the run trains.
    """
    own_ids = {id(parameter) for parameter in own}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own_ids]
    if foreign:
        raise PlanError(
            f"{type(optimizer).__name__} would step {len(foreign)} tensors that are not among run.parameters",
            given=f"one of shape {list(foreign[0].shape)}, under {plan.layout}; run.model's own are not stored",
            allowed="the tensors of run.parameters, each by its name in the plain model",
            fix="leave the tensors out, or pass run.parameters.values(), or groups of run.parameters[name]",
        )


def dropout_warning(model: nn.Module) -> str:
    """Returns a warning about the dropouts of a model that are in eval mode, so that training steps drop nothing.

    It is empty if there are none. ``from_pretrained`` of transformers returns models in eval mode.

    >>> dropout_warning(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)).eval())
    "the model trains without its dropout: '1' is in eval mode; write run.model.train() before the first step"
    >>> dropout_warning(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    ''
    """
    off = [path for path, each in model.named_modules() if not each.training and _share_dropped(each) > 0]
    if not off:
        return ""
    named = f"'{off[0]}'" + (f" and {len(off) - 1} more are" if len(off) > 1 else " is")
    return f"the model trains without its dropout: {named} in eval mode; write run.model.train() before the first step"


def hooks_warning(model: nn.Module, plan: Plan) -> str:
    """Returns a warning about a hook that sees only a rank's term or part of a gradient; "" without such a hook."""
    if plan.mesh.size * plan.layout.num_microbatches == 1:
        return ""
    name = next((name for name, parameter in model.named_parameters() if has_hook_of_user(parameter)), "")
    return name and (
        f"the hook on the gradient of '{name}' of run.model sees one term of it, or a part, as of this rank's samples: "
        "what is not linear, such as a clamp, gives another gradient than on one device; change "
        f"run.parameters['{name}'].grad between run.step and the optimizer's step"
    )


def idle_hooks_warning(model: nn.Module, stored: Mapping[str, Tensor], plan: Plan) -> str:
    """Returns a warning about a hook on the gradient of a tensor that no backward reaches; "" without such a hook.

    ``stored`` are the run's parameters. Those that are not ``model``'s own, such as shards and master weights, get
    their gradients after the backward.
    """
    computing = {id(parameter) for parameter in model.parameters()}
    idle = (name for name, each in stored.items() if id(each) not in computing and has_hook_of_user(each))
    name = next(idle, "")
    return name and (
        f"the hook on the gradient of run.parameters['{name}'] never runs: under {plan.layout} that tensor is a shard "
        "or a master weight, which gets its gradient after the backward; change its .grad between run.step and the "
        "optimizer's step"
    )


def _share_dropped(module: nn.Module) -> float:
    """Returns the probability with which a module drops elements: ``p`` of a dropout, else its ``dropout``, else 0."""
    share = module.p if isinstance(module, DROPOUTS) else getattr(module, "dropout", 0.0)
    return float(share) if isinstance(share, int | float) and not isinstance(share, bool) else 0.0


_EXAMPLE, _LAYOUT = "the example's tensor", "layout "


def check_same_start(
    everyone: Axis, world: World, model: nn.Module, layout: str, seed: int, example: Any = None
) -> None:  # fmt: skip
    """Raises PlanError, on every rank, unless all ranks have been given the same parameters, buffers, layout and seed.

    Copies that start different stay different, and sums of their gradients mean nothing. Strided tensors with values
    are compared by all their bits, tensors on the meta device by what a constructor recorded to fill them with, and
    sparse tensors by shape and dtype only. The tensors of ``example``, by whose values the layout was planned, are
    compared in the same way; it is None if no values were read. On a single rank, and if ranks are on the meta device,
    nothing is compared.

    All ranks call it.

    Traffic: one all-reduce of two numbers; two if ranks are threads and do not share the tensors. Where ranks differ, a
        description of each tensor is gathered as text too.
    """
    if everyone.size == 1 or everyone.device.type == "meta":  # no peers, or no values: spare the digests
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors |= {f"{_EXAMPLE} {number}": each for number, each in enumerate(tensors_of(example))}

    def address(tensor: Tensor) -> str:
        return f"{tensor.device} {tensor.data_ptr()} {tensor.stride()}"

    first = [f"{_LAYOUT}{layout}", f"seed {seed}"]
    if world.local and first_difference_async(everyone, [*first, *_lines(tensors, address)])() is None:
        return  # threads that were given one model: no need to read its values
    lines = _lines(tensors, lambda tensor: f"values {tensor_digest(tensor)}")
    check_agreement(everyone, [*first, *lines], _different_models)


def _lines(tensors: Mapping[str, Tensor], content: Callable[[Tensor], str]) -> list[str]:
    """Returns one line of text for each tensor, to compare between ranks."""
    lines = []
    for name, tensor in tensors.items():
        has_values = not tensor.is_meta and tensor.layout is torch.strided
        values = content(tensor) if has_values else "without values"
        lines.append(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, {values}")
    records = {name: recorded_values(tensor) for name, tensor in tensors.items() if tensor.is_meta}
    return lines + [f"{n}: filled by {text_digest(str(r.text())):x}" for n, r in records.items() if r is not None]


def _different_models(found: Difference) -> PlanError:
    if _EXAMPLE in str(found):
        return PlanError(
            "ranks were given different examples, and the model's code needs values of its inputs",
            given=str(found),
            allowed="the same example on every rank, by which all plan alike",
            fix="give every rank the inputs of the same global batch, as it is before run.shard cuts it",
        )
    if f"'{_LAYOUT}" in str(found):
        return PlanError(
            "ranks were given different layouts",
            given=str(found),
            allowed="the same line of layout on every rank",
            fix="give every rank the same line: it says how all of them share the work",
        )
    return PlanError(
        "ranks were given different models, and would train copies that are none, or mix parts of several",
        given=str(found),
        allowed="the same parameters, buffers and seed on every rank",
        fix="build the model under sw.without_values(), which starts alike anywhere, or once before launch(), or "
        "load one checkpoint on every rank; where ranks are processes, torch.manual_seed(0) before building does",
    )
