"""Mixed precision: fp32 master weights of parameters that compute in bf16 or fp16, and the fp16 loss scale.

Under ZeRO the stored shards are the master weights; :class:`MasterWeights` is for parameters that are not sharded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from shardwright.comm.agreement import gather_json
from shardwright.comm.axis import Axis
from shardwright.errors import PlanError
from shardwright.plan.param_groups import ParamGroup
from shardwright.plan.plan import Plan, compute_dtype
from shardwright.runtime.applied import AppliedStrategy
from shardwright.runtime.executor import Events
from shardwright.runtime.proxy_parameter import DATA, DROP_GRAD, GRAD, SET_GRAD, ProxyParameter, ReadOnlyData

LEAST_SCALE = 1.0

BLOCK_BYTES = 2**25
"""How many bytes of narrow gradients are scaled together on an accelerator, in a copy of twice the size: 32 MiB."""


class MasterWeights:
    """Holds fp32 master weights of this rank's parameters, and casts the model's own to the compute dtype, in place.

    Left out are the parameters named in ``sharded``, whose master weights ZeRO has, and those that compute in their own
    dtype. The optimizer updates ``masters``, and the model computes with their rounded values. Gradients move from the
    model's parameters to the masters at the end of a step. For the parameters in the plan's ``fp32_sums`` they move
    after each microbatch, so that gradient accumulation is in the masters' dtype.

    What other code writes to the model's parameters would be lost in the next rounding, and their gradients are those
    of the masters: both are errors (see :class:`CopiedParameter`), the first at the next step or update.
    """

    def __init__(self, model: nn.Module, plan: Plan, sharded: Collection[str]) -> None:
        self.parameters: Mapping[str, nn.Parameter] = {
            name: p
            for name, p in model.named_parameters()
            if name not in sharded and plan.compute_dtypes[name] != p.dtype
        }
        self.fp32_sums = plan.fp32_sums & self.parameters.keys()
        self._groups = [[name for name in group.parameters if name in self.parameters] for group in plan.param_groups]
        self.masters = {
            name: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for name, p in self.parameters.items()
        }
        self._dtypes = {name: plan.compute_dtypes[name] for name in self.parameters}
        for name, parameter in self.parameters.items():
            parameter.data = parameter.data.to(self._dtypes[name])
        self._kinds = [(parameter, type(parameter)) for parameter in self.parameters.values()]
        self._marked = copied_parameter(self)
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._versions, self._may_be_stale = versions_of(self.masters), False
        self._written = versions_of(self.parameters)

    def applied(self) -> AppliedStrategy:
        """Returns the master weights, as the parameters that the optimizer updates, and callbacks for the executor.

        The callbacks move gradients to the master weights, and round these into the model's parameters after an update.
        """
        events = Events(restart=self._restart, after_sync=self._after_sync, after_optimizer=self._after_optimizer)
        if self.fp32_sums:
            events = replace(events, after_weight_gradients=self._after_weight_gradients)
        return AppliedStrategy(events=events, parameters=self.masters, check=self._check)

    def path_of(self, parameter: nn.Parameter) -> str:
        """Returns the name of a parameter of the model."""
        return self._names[id(parameter)]

    def _restart(self) -> None:
        for parameter, kind in self._kinds:
            parameter.__class__ = kind
            parameter.grad = None  # left by a step that failed
        self._check_versions()
        # The user's own optimizer fires no after_optimizer; the version counters show that it has stepped.
        if self._may_be_stale or self._versions != versions_of(self.masters):
            self._round()

    def _after_weight_gradients(self, group: ParamGroup, microbatch: int) -> None:
        self._move_gradients(self.fp32_sums.intersection(group.parameters))

    def _after_sync(self) -> None:
        self._move_gradients(self.parameters.keys() - self.fp32_sums)
        self._may_be_stale = True  # an optimizer may write through .data, which no version counter shows
        for parameter, _ in self._kinds:
            parameter.__class__ = self._marked

    def _after_optimizer(self) -> None:
        self._may_be_stale = True  # code may write through .data after the update too: the next step rounds anew
        self._round()

    @torch.no_grad()
    def _move_gradients(self, names: Collection[str]) -> None:
        for group in self._groups:
            some = [name for name in group if name in names and self.parameters[name].grad is not None]
            if not some:
                continue
            narrow = [cast(Tensor, self.parameters[name].grad) for name in some]
            gradients = [
                torch.empty_like(grad, dtype=self.masters[n].dtype) for n, grad in zip(some, narrow, strict=True)
            ]
            torch._foreach_copy_(gradients, narrow)  # one call for all: few kernels on an accelerator
            for name, gradient in zip(some, gradients, strict=True):
                master = self.masters[name]
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                self.parameters[name].grad = None
            del narrow

    @torch.no_grad()
    def _round(self) -> None:
        """Copies the master weights into the model's parameters, rounded to the compute dtype."""
        if self.parameters:
            torch._foreach_copy_(list(self.parameters.values()), [self.masters[name] for name in self.parameters])
        self._versions, self._written = versions_of(self.masters), versions_of(self.parameters)

    def _check_versions(self) -> None:
        """Raises PlanError, once, if other code has written to a parameter of the model since it was rounded."""
        versions = versions_of(self.parameters)
        if versions == self._written:
            return
        with torch._C.DisableTorchFunctionSubclass():
            names = [
                name
                for (name, p), now, before in zip(self.parameters.items(), versions, self._written, strict=True)
                if now != before and p.dtype == self._dtypes[name]  # the step refuses other dtypes
            ]
        if names:
            self._written, self._may_be_stale = versions, True
            raise _lost_write(names[0])

    @torch.no_grad()
    def _check(self, values: bool) -> None:
        """Raises PlanError as :meth:`_check_versions`; with ``values`` also for writes that no counter shows."""
        self._check_versions()
        if not values or self._may_be_stale or self._versions != versions_of(self.masters):
            return  # the model's parameters are rounded anew before they are used
        names, differ = list[str](), list[Tensor]()
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter in self.parameters.items():
                rounded = self.masters[name].to(self._dtypes[name])
                if parameter.dtype == rounded.dtype:  # the step refuses other dtypes
                    names.append(name)
                    differ.append((rounded != parameter).any() & ~rounded.isnan().any())
        # all results are read together, because on an accelerator the host waits for each read
        for name, differs in zip(names, torch.stack(differ).tolist() if differ else [], strict=True):
            if differs:
                self._may_be_stale = True
                raise _lost_write(name)


class CopiedParameter(ProxyParameter):
    """A parameter of a run's model after a step, while its gradient is that of its master weight.

    Its own ``grad`` is None between two steps. Reading it raises a PlanError if the master weight has a gradient.
    Setting a gradient, or writing into ``data``, raises a PlanError too. Setting ``grad = None`` drops the gradient of
    the master weight. In all else it is like any parameter.
    """

    owner: Callable[[], MasterWeights | None] = staticmethod(lambda: None)
    """Returns the master weights, or None once the run is gone."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Runs ``func``. Raises PlanError if it reads or sets ``grad``, which the master weight has in its place."""
        with torch._C.DisableTorchFunctionSubclass():
            owner = args[0].owner() if args and isinstance(args[0], CopiedParameter) else None
            if owner is not None and func in (SET_GRAD, DROP_GRAD):
                name = owner.path_of(args[0])
                if func == SET_GRAD and args[1] is not None:
                    raise _not_its_own(name)
                owner.masters[name].grad = None
            result = func(*args, **(kwargs or {}))
            if func == DATA and owner is not None:
                return ReadOnlyData.of(result, partial(_lost_write, owner.path_of(args[0])))
            if func != GRAD or result is not None or sys._getframe(1).f_code.co_name == "_apply":  # nn.Module._apply
                return result
            owner = args[0].owner()
            name = owner.path_of(args[0]) if owner is not None else ""
            if owner is None or owner.masters[name].grad is None:
                return None
            raise _not_its_own(name)


def _not_its_own(name: str) -> PlanError:
    return PlanError(
        f"the gradient of '{name}' of run.model is that of its master weight",
        given="a parameter of run.model, which is a rounded copy under bf16 or fp16",
        allowed="gradients of run.parameters, between a step and the optimizer's",
        fix=f"write run.parameters['{name}'].grad; to clip, write run.clip_grad_norm_(max_norm)",
    )


def copied_parameter(owner: MasterWeights) -> type[CopiedParameter]:
    """Returns the class of the parameters of which ``owner`` has the master weights, between its steps."""
    owner_ref = ref(owner)

    class CopiedRunParameter(CopiedParameter):
        owner = staticmethod(lambda: owner_ref())

    return CopiedRunParameter


def versions_of(parameters: Mapping[str, nn.Parameter]) -> list[tuple[int, int]]:
    """Returns numbers that change when code writes to a parameter or sets ``data``, but not on writes into ``data``."""
    with torch._C.DisableTorchFunctionSubclass():  # ten times as fast for CopiedParameters
        return [(0 if p.is_inference() else p._version, p.data_ptr()) for p in parameters.values()]


def _lost_write(name: str) -> PlanError:
    return PlanError(
        f"what was written to '{name}' of run.model would be lost: it is rounded from its master weight",
        given="a write to a parameter of run.model under bf16 or fp16, of which the optimizer updates an fp32 copy",
        allowed="writes to the plain model before sw.parallelize, and to run.parameters",
        fix=f"write to run.parameters['{name}'], then run.changed(); or run.load_state_dict({{...}}, strict=False), "
        "which takes whole tensors by name",
    )


def cast_buffers(model: nn.Module, plan: Plan) -> None:
    """Casts a model's floating-point buffers to the layout's compute dtype, in place.

    Running statistics of batch and instance norms keep their dtype: they average many steps, whose small changes would
    be lost in bf16 or fp16. So do buffers without dims, such as counts: beside tensors with dims they change no dtype.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dim() and not isinstance(module, _NormBase):
                module._buffers[name] = cast_to_compute(buffer, plan)


def cast_to_compute(tensor: Tensor, plan: Plan) -> Tensor:
    """Returns a floating-point tensor in bf16 or fp16 if the layout computes in that, and any other tensor as it is.

    >>> from shardwright.layout import Layout
    >>> from shardwright.plan.plan import Job
    >>> cast_to_compute(torch.ones(1), Plan.of(Job(nn.ReLU(), nn.Identity()), Layout.parse("bf16"))).dtype
    torch.bfloat16
    """
    return tensor.to(compute_dtype(tensor.dtype, plan.layout))


@dataclass
class LossScale:
    """The factor by which the loss is multiplied before backward, so that small gradients are not zero in fp16.

    When a gradient overflows, the step is skipped and the scale is halved, down to 1 at the least. After ``grow_after``
    finite steps in a row it is doubled. ``value`` is the scale, ``num_good`` the number of finite steps in a row since
    the scale last changed, and ``num_skipped`` the number of all steps skipped so far.

    Source: Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740.

    >>> scale = LossScale(grow_after=2)
    >>> for finite in (False, True, True):
    ...     scale.update(finite)
    ...     print(scale.value, scale.num_skipped)
    32768.0 1
    32768.0 1
    65536.0 1
    """

    value: float = 2.0**16
    grow_after: int = 2000
    num_good: int = 0
    num_skipped: int = 0

    def update(self, finite: bool) -> None:
        """Counts a skipped step and halves the scale, down to 1, unless the gradients were ``finite``.

        After ``grow_after`` finite steps in a row the scale is doubled.
        """
        if not finite:
            self.num_skipped += 1
            self.num_good, self.value = 0, max(self.value / 2, LEAST_SCALE)
            return
        self.num_good += 1
        if self.num_good == self.grow_after:
            self.num_good, self.value = 0, self.value * 2


def _are_finite(parameters: Mapping[str, nn.Parameter], world: Axis) -> bool:
    """Returns whether the gradients of all ranks are finite; True on the meta device.

    Traffic: one all-reduce of one number.
    """
    bad = torch.zeros((), device=world.device)
    for parameter in parameters.values():
        if parameter.grad is not None:
            bad = torch.maximum(bad, (~parameter.grad.isfinite()).any().to(torch.float32))
    bad = world.all_reduce(bad, "max")
    return bad.device.type == "meta" or not bool(bad)


def _raise_if_not_finite(parameters: Mapping[str, nn.Parameter], world: Axis, step: int) -> None:
    """Raises PlanError, on every rank, with the name of a parameter whose gradient is not finite, if there is one."""
    bad = [name for name, p in parameters.items() if p.grad is not None and not bool(p.grad.isfinite().all())]
    bad_names = [name for names in gather_json(world, bad[:1]) for name in names]
    if bad_names:
        raise PlanError(
            f"the gradient of '{bad_names[0]}' is not finite in step {step}",
            given="NaN or infinity",
            allowed="finite gradients",
            fix="use a lower learning rate, or check the batch; the parameters are as they were before the step",
        )


def finish_gradients(
    parameters: Mapping[str, nn.Parameter], world: Axis, scale: LossScale | None, factor: Tensor, step: int,
    *, stops_at_nan: bool,
) -> None:  # fmt: skip
    """Multiplies gradients by ``factor``, in place, or sets them to None if one of them overflowed in fp16.

    An optimizer then skips the step. ``factor`` turns gradients of the scaled loss over an expected number of targets
    into those of the mean loss. ``scale`` is the fp16 loss scale, which is updated, or None in other precisions, in
    which gradients that are not finite are kept. ``world`` is the axis of all ranks: with ``scale``, ranks agree on
    whether gradients are finite.

    All ranks call it. ``step`` is the step's number, for the error.

    Traffic: with ``scale``, one all-reduce of one number and, if a gradient overflows at the least scale, a gather of
        names; without, with ``stops_at_nan``, a gather of names; else none.
    Raises: PlanError, on every rank: a gradient is not finite, and ``stops_at_nan`` is set without ``scale``, or
        ``scale`` has its least value, 1.
    """
    if stops_at_nan and scale is None:
        _raise_if_not_finite(parameters, world, step)
    if scale is not None:
        finite = _are_finite(parameters, world)
        if not finite and scale.value <= LEAST_SCALE:
            _raise_if_not_finite(parameters, world, step)
        scale.update(finite)
        if not finite:
            for parameter in parameters.values():
                parameter.grad = None  # an optimizer skips parameters without a gradient
            return
    scale_gradients(parameters.values(), factor)


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiplies the parameters' gradients by ``factor``, a scalar tensor, in place.

    If ``factor`` and all gradients are on an accelerator, the host does not wait for the value of ``factor``.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> weight.grad = torch.ones(2)
    >>> scale_gradients([weight], torch.tensor(0.5, dtype=torch.float64))
    >>> weight.grad
    tensor([0.5000, 0.5000])
    """
    gradients = [p.grad for p in parameters if p.grad is not None and not p.is_meta]
    if not gradients:
        return
    if any(tensor.device.type == "cpu" for tensor in (factor, *gradients)):
        if (number := factor.item()) != 1:
            torch._foreach_mul_(gradients, number)
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for dtype, some in by_dtype.items():
        # torch multiplies a list in few kernels only by a number of the list's dtype
        if dtype.itemsize >= 4:
            torch._foreach_mul_(some, factor.to(dtype))
            continue
        for block in _in_blocks(some):  # in fp32: a narrow factor would be rounded
            wide = [grad.float() for grad in block]
            torch._foreach_mul_(wide, factor.float())
            torch._foreach_copy_(block, wide)


def _in_blocks(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields the gradients in order, in lists that end with the gradient by which they reach ``BLOCK_BYTES``."""
    block, num_bytes = list[Tensor](), 0
    for gradient in gradients:
        block.append(gradient)
        num_bytes += gradient.nbytes
        if num_bytes >= BLOCK_BYTES:
            yield block
            block, num_bytes = [], 0
    if block:
        yield block
