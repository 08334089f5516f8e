"""Checks in and around steps: what has changed in the model since it was laid out, and errors of a part of a batch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.analysis.traced.batch_norms import ONE_VALUE, iterates, sees_batch
from shardwright.analysis.traced.known_modules import MetaForward
from shardwright.analysis.traced.tracer import line_of
from shardwright.errors import PlanError
from shardwright.formatting import first_line
from shardwright.forward_stack import is_composed
from shardwright.layout import Layout
from shardwright.operators.split_backward import has_hook_of_user
from shardwright.plan.plan import Plan
from shardwright.plan.stages import DROPOUTS


def check_full(model: nn.Module, plan: Plan, num_global: int) -> None:
    """Raises PlanError if a batch is too small to give every microbatch the statistics that its layers need.

    Only the layout option ``own-statistics`` with layers such as BatchNorm needs a sample or more in every microbatch.
    ``num_global`` is the number of samples of the global batch.
    """
    # the first rank has the most samples of a balanced cut; all ranks decide by its number, and so decide alike
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

    These are operators that do not run in bf16 or fp16, or not on tensors of two dtypes, assertions of a dtype there, a
    BatchNorm on a microbatch of its own with one value for each channel, and forwards that write to weights which the
    backward of an earlier microbatch still needs. Other errors are raised as they are.
    """
    precision, layout = plan.layout.precision, plan.layout
    try:
        yield
    except (RuntimeError, ValueError, AssertionError) as failure:
        text = first_line(failure)
        description = f"{type(failure).__name__}: {text}{line_of(failure)}, under {layout}"
        is_asserted = isinstance(failure, AssertionError) and "dtype" in description
        if layout.own_statistics and ONE_VALUE in text:
            raise PlanError(
                "a BatchNorm has one value for each channel of a microbatch",
                given=description,
                allowed="microbatches of several samples, or channels of more than one pixel",
                fix="use fewer microbatches, larger batches, or GroupNorm",
            ) from failure
        if plan.stages is not None and layout.num_microbatches > 1 and "modified by an inplace operation" in text:
            raise PlanError(
                "a forward writes to a tensor that the backward of an earlier microbatch needs as it was",
                given=description,
                allowed="writes to a weight in the forward, as of layers that normalize theirs, where each microbatch "
                "runs its backward before the next one's forward: under dp, tp, mb and pp with one microbatch",
                fix="compute the changed weight anew, as weight = F.normalize(self.weight); or leave out pp, or mb",
            ) from failure
        is_torchs = not isinstance(failure, ValueError) or text.startswith("RNN input dtype")
        if precision != "fp32" and (is_asserted or (is_torchs and _DTYPES.search(text))):
            raise PlanError(
                f"the model's code does not run in {precision}",
                given=description,
                allowed=f"operators that torch has for {precision}, on tensors of one dtype",
                fix=f"leave out {precision}, or convert in the model's code: x.float() before such an operator, and "
                ".to(weight.dtype) behind it",
            ) from failure
        raise


@contextmanager
def explained_on_part_of_batch(layout: Layout, targets: Any, *, meets: bool) -> Iterator[None]:
    """Returns a context that turns errors of a loss into PlanErrors if they may come of its getting a part of a batch.

    If samples are known to meet in the loss (``meets``), these are all errors about sizes. Otherwise they are indices
    out of bounds if ``targets`` are the places of samples in the whole batch, as those of a contrastive loss.
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
    """Returns whether a tensor holds the numbers of consecutive samples that follow those of another part."""
    if not isinstance(leaf, Tensor) or leaf.dim() != 1 or leaf.is_floating_point() or not len(leaf):
        return False
    numbers = leaf.tolist()
    return numbers[0] > 0 and numbers == [*range(numbers[0], numbers[0] + len(numbers))]


_DTYPES = re.compile(r"BFloat16|bfloat16|\bHalf\b|float16|same dtype|mixed dtype|\.dtype\b|\bdtypes match")
"""Words of torch's errors for an operator that does not run in bf16 or fp16, or not on tensors of two dtypes."""


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
    with torch._C.DisableTorchFunctionSubclass():  # parameters that ZeRO marks between steps answer slowly
        changed_dtypes = {name: p.dtype for name, p in parameters.items() if p.dtype != dtypes.get(name, p.dtype)}
    if changed_dtypes:
        name, dtype = next(iter(changed_dtypes.items()))
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
        for name, value in dict[str, Any].items(held)  # the method of dict itself, which unshards no parameter
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
"""A module's path, the module, and the ``forward`` that was assigned to it; None if it has that of its class."""


def code_of(model: nn.Module) -> tuple[Code, ...]:
    """Returns each module of a model with the ``forward`` that it has now, for :func:`check_code` to compare with."""
    return tuple((path, module, vars(module).get("forward")) for path, module in model.named_modules())


def check_code(code: Iterable[Code]) -> None:
    """Raises PlanError if a module's ``forward`` was replaced since :func:`code_of`, and not by this library."""
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
    off = [path for path, module in model.named_modules() if not module.training and _share_dropped(module) > 0]
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
    idle = (name for name, tensor in stored.items() if id(tensor) not in computing and has_hook_of_user(tensor))
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
