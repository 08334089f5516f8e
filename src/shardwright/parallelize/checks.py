"""What no layout can do anything about: models that are refused as they come, before anything is planned."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardwright.analysis.batch_dependence import iterates, sees_batch
from shardwright.comm.world import World
from shardwright.errors import LayoutError, PlanError
from shardwright.layout import Layout
from shardwright.plan.plan import Plan
from shardwright.strategy import check_table


class _Refusal(NamedTuple):
    what: str
    given: str
    allowed: str
    fix: str


def check_model(model: nn.Module) -> None:
    """Raises PlanError for a model that cannot be copied, cut or summed, with what to write instead.

    >>> check_model(nn.Sequential(nn.LazyLinear(4)))
    Traceback (most recent call last):
    shardwright.errors.PlanError: the parameter '0.weight' has no shape yet
      given:   a lazy module that has not been called
      allowed: parameters of known shapes
      fix:     call the model once on a batch, or give the layer its sizes: nn.Linear(in, out)
    """
    for refusal in (*_of_parameters(model), *_of_modules(model)):
        raise PlanError(refusal.what, given=refusal.given, allowed=refusal.allowed, fix=refusal.fix)


def check_loss(loss: nn.Module) -> None:
    """Raises PlanError for a loss with parameters that want gradients: a run trains its model's, and no others.

    >>> check_loss(nn.Linear(1, 1).requires_grad_(False))
    >>> check_loss(nn.PReLU())
    Traceback (most recent call last):
    shardwright.errors.PlanError: the loss has a parameter that would never be trained: 'weight'
      given:   PReLU with 1 parameter that wants a gradient
      allowed: losses of the output and the targets; buffers and frozen parameters may be inside
      fix:     put into the model what learns, and a penalty on its parameters too; freeze what does not
    """
    names = [name for name, parameter in loss.named_parameters() if parameter.requires_grad]
    if names:
        several = f"{len(names)} parameters that want a gradient"
        raise PlanError(
            f"the loss has a parameter that would never be trained: '{names[0]}'",
            given=f"{type(loss).__name__} with {several if names[1:] else '1 parameter that wants a gradient'}",
            allowed="losses of the output and the targets; buffers and frozen parameters may be inside",
            fix="put into the model what learns, and a penalty on its parameters too; freeze what does not",
        )


def check_microbatches(model: nn.Module, layout: Layout) -> None:
    """Raises LayoutError for layers that count batches, or look at one as a whole, where ``mb`` cuts it.

    >>> check_microbatches(nn.BatchNorm1d(2), Layout.parse("mb4/own-statistics"))
    >>> check_microbatches(nn.Sequential(nn.BatchNorm1d(2)), Layout.parse("mb4"))
    Traceback (most recent call last):
    shardwright.errors.LayoutError: '0' computes statistics over the batch, which 'mb' cuts
      given:   BatchNorm1d under mb4
      allowed: layers that treat each sample alone; under mb4/own-statistics each microbatch has its own statistics
      fix:     write mb4/own-statistics, leave out mb, or use GroupNorm or LayerNorm
    """
    if layout.num_microbatches == 1:
        return
    number, own = f"mb{layout.num_microbatches}", replace(layout, own_statistics=True)
    for name, module in model.named_modules():
        check_table(name, module, number, ["scale_grad_by_freq"])
        if layout.own_statistics or not (sees_batch(module) or iterates(module)):
            continue
        raise LayoutError(
            f"'{name}' changes what it keeps with every call, and 'mb' makes several of one"
            if iterates(module)
            else f"'{name}' computes statistics over the batch, which 'mb' cuts",
            given=f"{type(module).__name__} under {layout}",
            allowed="layers that treat each sample alone; "
            f"under {number}/own-statistics each microbatch has its own statistics",
            fix=f"write {own}, leave out mb, or use GroupNorm or LayerNorm",
        )


def check_renormed(model: nn.Module, plan: Plan) -> None:
    """Raises PlanError for tables that change their own rows, where what rests is not what they change.

    >>> from shardwright.plan.plan import Job
    >>> table = nn.Embedding(9, 3, max_norm=1.0)
    >>> check_renormed(table, Plan.of(Job(table, nn.Identity()), Layout.parse("bf16")))
    Traceback (most recent call last):
    shardwright.errors.PlanError: the rows that the table '' rescales would never reach what the optimizer steps
      given:   Embedding with max_norm=1.0 under bf16, which steps another copy of it
      allowed: with max_norm layouts in fp32 without zero, such as single
      fix:     leave out max_norm, or bf16, fp16 and zero
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


def check_full(model: nn.Module, plan: Plan, num_global: int) -> None:
    """Raises PlanError for a batch so small that a microbatch would have nothing to take statistics of its own from."""
    number, first = plan.layout.num_microbatches, dict.fromkeys(plan.mesh.axes, 0)  # of a balanced cut, the largest
    here = len(plan.batch_shard(first).local_samples(num_global))
    if not plan.layout.own_statistics or here >= number:
        return
    if any(sees_batch(module) or iterates(module) for module in model.modules()):
        raise PlanError(
            "a microbatch without samples has no statistics of its own",
            given=f"{num_global} samples in {number} microbatches, under {plan.layout}",
            allowed=f"a sample or more in each: {number} or more on each of the ranks that cut the batch",
            fix="leave such a batch out, or use fewer microbatches",
        )


def check_trains(plan: Plan) -> None:
    """Raises PlanError where a step has nothing to compute a gradient of."""
    if not set(plan.compute) - set(plan.frozen):
        raise PlanError(
            "no parameter of the model wants a gradient, so there is nothing to train",
            given=f"{len(plan.compute)} parameters, all with requires_grad=False",
            allowed="one or more parameters to train; evaluate() and predict() need none",
            fix="call requires_grad_() on what is to be trained",
        )


def _of_parameters(model: nn.Module) -> Iterator[_Refusal]:
    for name, parameter in model.named_parameters():
        lazy: bool = is_lazy(parameter)
        if lazy:
            yield _Refusal(
                f"the parameter '{name}' has no shape yet",
                "a lazy module that has not been called",
                "parameters of known shapes",
                "call the model once on a batch, or give the layer its sizes: nn.Linear(in, out)",
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield _Refusal(
                f"the parameter '{name}' has a hook on its gradient",
                "a hook by register_hook or register_post_accumulate_grad_hook",
                "parameters without hooks: a rank's own gradient is a term, or a part, of what one would see",
                "change run.parameters[name].grad between step() and the optimizer's step",
            )


def _of_modules(model: nn.Module) -> Iterator[_Refusal]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            yield _Refusal(
                f"the gradient of the table '{path}' is sparse",
                f"{type(module).__name__}(sparse=True)",
                "tables whose gradients are dense: ranks sum them",
                "leave out sparse=True",
            )
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                yield _Refusal(
                    f"'{f'{path}.{name}'.lstrip('.')}' was computed from parameters, and cannot be copied with them",
                    f"{type(module).__name__} with a tensor that has a history, as torch.nn.utils.weight_norm leaves",
                    "modules that compute such tensors in forward, and torch's parametrizations",
                    "use torch.nn.utils.parametrizations.weight_norm, or keep the tensor out of the module",
                )


def check_frozen(parameters: Mapping[str, nn.Parameter], frozen: Collection[str]) -> None:
    """Raises PlanError where a parameter was frozen, or no longer is, since the model was laid out.

    >>> check_frozen(dict(nn.Linear(1, 1).requires_grad_(False).named_parameters()), ())
    Traceback (most recent call last):
    shardwright.errors.PlanError: the parameter 'weight' was frozen since the model was laid out
      given:   requires_grad=False
      allowed: parameters that learn, or do not, as they did then: what is sent was planned for that
      fix:     save a checkpoint, freeze the plain model's, parallelize again, and load
    """
    for name, parameter in parameters.items():
        if parameter.requires_grad == (name in frozen):
            how = "no longer is frozen since" if parameter.requires_grad else "was frozen since"
            raise PlanError(
                f"the parameter '{name}' {how} the model was laid out",
                given=f"requires_grad={parameter.requires_grad}",
                allowed="parameters that learn, or do not, as they did then: what is sent was planned for that",
                fix="save a checkpoint, freeze the plain model's, parallelize again, and load",
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
    """Raises PlanError where an optimizer steps what is not among a run's parameters, and so learns nothing."""
    known = {id(parameter) for parameter in own}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if foreign:
        raise PlanError(
            f"{type(optimizer).__name__} would step {len(foreign)} tensors that are not among run.parameters",
            given=f"one of shape {list(foreign[0].shape)}, under {plan.layout}; run.model's own are not what rests",
            allowed="the tensors of run.parameters, each by its name in the plain model",
            fix="leave the tensors out, or pass run.parameters.values(), or groups of run.parameters[name]",
        )
