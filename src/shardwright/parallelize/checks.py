"""Raises errors for models, losses and worlds that a layout cannot train, before any rank has computed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardwright.analysis.model_graph import ModelGraph
from shardwright.analysis.objects.reached import tensors_outside
from shardwright.analysis.traced.batch_norms import is_frozen, iterates, sees_batch
from shardwright.analysis.traced.structure import kind_of
from shardwright.axes import layout_axes, mesh_axes
from shardwright.comm.world import World
from shardwright.errors import EXAMPLE, LayoutError, PlanError
from shardwright.layout import Layout, has_stages
from shardwright.plan.plan import Plan
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
    """Raises PlanError for a child module that ``module.<name>`` does not return, as the class has such an attribute.

    For a child named ``parameters``, for example, ``module.parameters`` is the method. Only layouts that cut modules,
    or divide them into stages, look children up by name; under others nothing is checked.
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
    _check_listing(model)
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


def _check_listing(model: nn.Module) -> None:
    """Raises PlanError for modules whose own ``parameters`` or ``named_parameters`` lists others than torch's.

    An optimizer over such a list would train these alone, and a run trains all that require gradients.
    """
    for path, module in nn.Module.named_modules(model):
        for name in ("parameters", "named_parameters"):
            listed, own = getattr(nn.Module, name), getattr(type(module), name)
            if own is listed or name in module._modules:
                continue
            try:
                is_alike = {*map(id, _values(own(module, recurse=True)))} == {*map(id, _values(listed(module)))}
            except Exception:  # whatever the user's code raises, it does not list them as torch does
                is_alike = False
            if not is_alike:
                what = f"the module '{path}'" if path else "the model"
                raise PlanError(
                    f"{what} has a method {name}() of its own, which lists other parameters than its modules have",
                    given=f"{type(module).__name__}.{name}",
                    allowed="the method of nn.Module, or one that takes recurse= and lists the same parameters",
                    fix="leave out the method, and freeze what is not to be trained: parameter.requires_grad_(False)",
                )


def _values(listed: Iterable[Any]) -> Iterator[Any]:
    """Yields the parameters of a list of them, or of pairs of a name and a parameter."""
    return (entry[1] if isinstance(entry, tuple) else entry for entry in listed)


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


def check_held(model: nn.Module, plan: Plan, *, is_recorded: bool) -> None:
    """Raises LayoutError if code outside of a module holds a direct reference to a parameter that would be sharded.

    Such code would see a shard in place of the whole parameter. A reference held by the module itself, as in a list of
    ``nn.LSTM``, is allowed if the parameter is whole while the module's forward runs. ``is_recorded`` says whether
    there was an example to record a forward, which tells lists that no forward reads; these hold no parameter here.
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
                fix="read it as module.weight where it is used, or choose a layout that leaves the parameter whole, "
                "such as dp2" + ("" if is_recorded else f"; if no forward reads it there, {EXAMPLE}"),
            )


def check_settings_of_calls(graph: ModelGraph | None, layout: Layout) -> None:
    """Raises PlanError if the recorded forward freezes parameters, or, under stages, changes settings around calls.

    Gradients and their traffic are planned for the parameters that require gradients when the model is laid out. Stages
    run the calls of their modules alone, so what the code around sets for one call may not hold there.
    """
    if graph is None or layout.num_ranks * layout.num_microbatches == 1:
        return
    for name, is_as_before in graph.refrozen.items():
        if not is_as_before:
            raise PlanError(
                f"the model's own forward changes requires_grad of the parameter '{name}'",
                given="another value after a forward than before it",
                allowed="parameters that are frozen, or trained, before the model is laid out",
                fix="call the model once on such a batch before that, or set requires_grad as its forward does",
            )
        if has_stages(layout):
            raise PlanError(
                f"the model's own forward changes requires_grad of the parameter '{name}' for some of its calls",
                given=f"{layout}, where a stage runs the calls of its modules alone",
                allowed="parameters that stay as they are",
                fix="leave out pp, or detach what the calls take or return in place of freezing their parameters",
            )
    if has_stages(layout) and graph.in_other_modes:
        raise PlanError(
            f"the model's own forward calls '{graph.in_other_modes[0]}' in another mode than it leaves it in",
            given=f"train() or eval() around some of its calls, under {layout}, where a stage runs them alone",
            allowed="modules that stay in one mode",
            fix="leave out pp, or set the mode in the forward of a module that makes these calls",
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
