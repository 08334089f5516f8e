"""Trains a model on one device with plain torch, as the reference of ``verify``, and measures its rounding errors.

A model may compute in float32 inside, in its norms for instance, though its parameters are float64. Then one device is
determined only up to float32 rounding: an error of 1e-16 before the cast moves a number to the neighboring float32,
6e-8 away, or does not move it at all. A layout sums in another order, and so rounds some numbers otherwise. How much
that matters is measured on one device alone, as the second difference of three runs, whose parameters are ``p (1 + h
s)``, ``p`` and ``p (1 - h s)``, with random signs ``s`` and ``h`` one rounding of the narrow dtype::

    f(p + h s p) + f(p - h s p) - 2 f(p)  =  h^2 f''  +  rounding of three runs

The first order cancels, and the second is 1e-14 for float32. What is left is rounding, drawn anew in each run since
every number before a cast has moved by about a rounding. Its size over sqrt(3) is that of the difference of two runs.

The reference is trained on the CPU. An accelerator's kernels may round a function such as ``cos`` to another
neighboring float32. So where ranks were on one, training on one such device is compared with the reference too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import itemgetter
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.analysis.objects.copying import check_apart
from shardwright.analysis.objects.marked_inputs import map_samples, unmarked
from shardwright.analysis.on_meta.device_moves import IgnoresDeviceMoves
from shardwright.analysis.on_meta.module_calls import call_plainly
from shardwright.analysis.on_meta.operator_results import cloned
from shardwright.analysis.random_numbers.draws import Draws
from shardwright.models.losses import mean_of, sum_and_count
from shardwright.models.model_loss import loss_dtype
from shardwright.parallelize.initialization import place_parameters
from shardwright.parallelize.loss_watch import reads_of
from shardwright.parallelize.planning import copied_loss, num_rows, structural_copy
from shardwright.parallelize.step_checks import torch_errors_explained
from shardwright.plan.batch_shard import microbatch_samples
from shardwright.plan.plan import Plan
from shardwright.rng import RngTracker
from shardwright.runtime.keyed_draws import key_draws
from shardwright.runtime.mixed_precision import LEAST_SCALE, LossScale

FLOOR = 1e-3
"""The least divisor of a tensor's error, as a share of the largest absolute entry of all tensors compared."""

EPS = 0.1
"""AdamW's ``eps`` as a share of the largest absolute entry of the first step's gradients.

An update then follows its gradient, and is no more uncertain than it: with a small ``eps``, which divides each gradient
by its own size, the update of an entry near zero is mostly rounding.
"""

LEARNING_RATE = 1e-3
_NUM_PAIRS = 3
"""The number of pairs of runs beside the reference. The median of their differences counts.

So a single pair in which a number crosses a kink of the model has no effect.
"""

_MOST_PAIRS = 10
"""The most pairs that are run if the first ones show no rounding in a tensor that differs on the ranks."""

Batch = tuple[Any, Any]
_TensorKey = tuple[str, str]
"""The kind of a tensor ("gradients", or "later" for parameters and buffers after the steps) and its name."""

Named = dict[str, Tensor]


@dataclass
class TrainingOutcome:
    """The results of training steps on one device or one rank: losses, gradients, parameters and buffers.

    Gradients are those of the first step; one is None if the loss does not depend on the parameter. Parameters and
    buffers are those after the last step. On a rank, tensors are its shards. ``eps`` is AdamW's, and ``loss_dtype`` is
    the dtype in which the model computes its loss; only the outcome of :func:`reference` has them and ``changed``.
    """

    losses: list[float]
    gradients: dict[str, Tensor | None]
    parameters: Named
    buffers: Named = field(default_factory=dict)
    eps: float = 0.0
    loss_dtype: torch.dtype = torch.float64
    changed: frozenset[str] = frozenset()
    """The names of the floating-point and complex buffers that the steps have changed."""
    device: str = "cpu"
    """The type of the device that computed it."""


def reference(
    plain: nn.Module,
    loss: nn.Module,
    batches: Sequence[Batch],
    seed: int,
    plan: Plan,
    draws: Draws | None,
    *,
    unrecorded: str = "",
    eps: float | None = None,
    shift: Callable[[str, Tensor], None] = lambda name, value: None,
    forward: AbstractContextManager[Any] | None = None,
    narrow: torch.dtype | None = None,
    scale: float = 1.0,
    device: str = "cpu",
) -> TrainingOutcome:
    """Returns the outcome of training a copy of the plain model with plain torch in this process, on one ``device``.

    The outcome's tensors are on the CPU. A loss that refers to ``plain`` refers to the copy that is trained.

    AdamW makes a step for each of ``batches``, which are not written to. ``seed`` determines dropout and initial values
    that the model lacks. ``plan`` says how batches are cut if microbatches have batch statistics of their own.
    ``draws`` are the random function calls that a recorded forward of the model has made, and ``unrecorded`` says why
    it could not be recorded. ``eps`` is AdamW's; by default it is ``EPS`` times the largest absolute entry of the first
    step's gradients. ``shift(name, value)`` may change each parameter's initial value, in place. ``forward`` is a
    context in which the forwards run. ``narrow`` is a dtype in which all is computed, as under a layout in bf16; in
    fp16 the loss is computed in float32, since sums of losses soon become infinite in fp16. The loss is multiplied by
    ``scale`` before the backward, and gradients are divided by it: if the model computes in a narrower dtype, a scale
    changes the rounding, and keeps fp16 gradients from underflowing.

    Raises: PlanError: the copy still holds a module, parameter or buffer of ``plain``, torch refuses a microbatch of
        the plan, or the loss reads an attribute of a model outside, which the forward has set in the copy.
    """
    copies = dict[int, Any]()
    model, rng, place = _on_cpu(plain, seed, shift, copies), RngTracker(seed), torch.device(device)
    rng.unrecorded = unrecorded
    on_several = len({p.device for p in plain.parameters()}) > 1
    if place.type == "cpu":
        loss = copied_loss(loss, memo=copies)  # a copy for each run, so that each begins with the same buffers
    else:
        model.to(place)
        loss = structural_copy(loss, partial(Tensor.to, device=place, copy=True), copies).to(place)
        batches = [tree_map_only(Tensor, partial(Tensor.to, device=place), batch) for batch in batches]
    reads = reads_of(loss)
    key_draws(model, rng, draws)
    if narrow is not None:
        _narrow(model, narrow)
        batches = [tree_map_only(Tensor, partial(_narrowed, narrow), batch) for batch in batches]
    before = copied_buffers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    outcome = TrainingOutcome([], {}, {}, device=device)
    for step, batch in enumerate(map(cloned, batches)):
        rng.step, sums = step, []
        optimizer.zero_grad()
        for rng.samples, (inputs, targets) in _parts(plan, batch):
            moves = IgnoresDeviceMoves(place) if on_several else nullcontext()
            with moves, forward or nullcontext(), torch_errors_explained(plan):
                output = call_plainly(model, inputs)
                if reads is not None:
                    reads.check(model, is_cut=False)
                if narrow == torch.float16:
                    output, targets = tree_map_only(Tensor, partial(_narrowed, torch.float32), (output, targets))
                sums.append(sum_and_count(loss(output, unmarked(targets))))
        times = _backward(sums, model, scale, outcome)
        if step == 0:
            scaled = copied_gradients(dict(model.named_parameters()))
            outcome.gradients = {name: None if grad is None else _divided(grad, times) for name, grad in scaled.items()}
            largest = EPS * _largest(outcome.gradients)
            usable = largest if 0.0 < largest < math.inf else 1e-8  # NaN is not usable; the comparison reports it
            outcome.eps = usable if eps is None else eps
            optimizer.param_groups[0]["eps"] = outcome.eps
        for parameter in model.parameters():
            if parameter.grad is not None:  # not divided in place, since parameters may share a gradient
                parameter.grad = parameter.grad / times
        optimizer.step()
    outcome.parameters = {name: p.detach().cpu() for name, p in model.named_parameters()}
    # buffers that the steps have added are left out: they are caches
    outcome.buffers = {name: buffer for name, buffer in copied_buffers(model).items() if name in before}
    outcome.changed = _changed(before, outcome.buffers)
    return outcome


def _on_cpu(plain: nn.Module, seed: int, shift: Callable[[str, Tensor], None], copies: dict[int, Any]) -> nn.Module:
    """Returns a copy of a model on the CPU, with values that ``shift`` has changed; missing ones are drawn by ``seed``.

    ``copies`` gets the copy of each object of the model, by the id of the original.

    Raises: PlanError: the copy still holds a module, parameter or buffer of ``plain``.
    """
    model = structural_copy(plain, torch.clone, copies)
    check_apart(plain, model)
    if any(tensor.is_meta for tensor in (*plain.parameters(), *plain.buffers())):
        place_parameters(model, {}, {}, seed, torch.device("cpu"))
    model.to("cpu")
    for name, parameter in model.named_parameters():
        shift(name, parameter.data)
    return model


def _backward(sums: Sequence[tuple[Tensor, Tensor]], model: nn.Module, scale: float, outcome: TrainingOutcome) -> float:
    """Runs the backward of a step's loss, notes the loss in ``outcome``, and returns what divides the gradients.

    ``sums`` are the loss and the count of targets of each part of the batch. The loss is multiplied by ``scale``.
    """
    loss_sum = torch.stack([part_sum for part_sum, _ in sums]).sum()
    mean, divisor = mean_of(loss_sum, sum(float(count.detach()) for _, count in sums))
    if any(count.requires_grad for _, count in sums):  # a mean by weights that the model computes
        mean, _ = mean_of(loss_sum, torch.stack([count for _, count in sums]).sum())
    outcome.losses.append(mean.item())
    outcome.loss_dtype = loss_dtype(sums[0][0])
    # a loss in float32 would round 1 / divisor, and with it every gradient
    is_wide = _bits([loss_sum]) >= _bits(model.parameters())
    ((mean if is_wide else loss_sum) * scale).backward()
    return scale if is_wide else divisor * scale


def _changed(before: Named, after: Named) -> frozenset[str]:
    """Returns the names of the floating-point and complex buffers whose values differ."""
    different = (name for name, buffer in after.items() if not torch.equal(buffer, before[name]))
    return frozenset(name for name in different if before[name].is_floating_point() or before[name].is_complex())


def _narrow(model: nn.Module, dtype: torch.dtype) -> None:
    """Rounds a model's floating-point parameters and buffers to ``dtype``, in place."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data = _narrowed(dtype, parameter.data)
        buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        module._buffers.update({name: _narrowed(dtype, buffer) for name, buffer in buffers.items()})


def _narrowed(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _divided(gradient: Tensor, scale: float) -> Tensor:
    """Returns a gradient divided by the loss's scale; in float64 for an fp16 gradient, which could become 0 in fp16."""
    return (gradient.double() if gradient.dtype == torch.float16 else gradient) / scale


def _bits(tensors: Iterable[Tensor]) -> int:
    """Returns the largest number of bits of a floating-point element in these tensors."""
    return max((torch.finfo(t.dtype).bits for t in tensors if t.is_floating_point() or t.is_complex()), default=0)


def _parts(plan: Plan, batch: Batch) -> Iterator[tuple[Sequence[int], Batch]]:
    """Yields the parts of a batch that the reference runs one after the other, each with its samples' indices.

    There is one part, the whole batch; with batch statistics per microbatch, a part is a microbatch of all ranks
    together.
    """
    num_microbatches, num_samples = plan.layout.num_microbatches, num_rows(batch)
    if not plan.layout.own_statistics:
        yield range(num_samples), batch
        return
    shards = (plan.batch_shard(at).local_samples(num_samples) for at in plan.mesh.coords(plan.row_axes))
    for by_shard in zip(*(microbatch_samples(shard, num_microbatches) for shard in shards), strict=True):
        samples = sorted(chain.from_iterable(by_shard))
        yield samples, map_samples(batch, itemgetter(samples))


def copied_gradients(named: Mapping[str, nn.Parameter]) -> dict[str, Tensor | None]:
    """Returns copies of the gradients of trained parameters, by name, on the CPU; None for one without a gradient."""
    trained = {name: p.grad for name, p in named.items() if p.requires_grad}
    return {name: None if grad is None else grad.detach().to("cpu", copy=True) for name, grad in trained.items()}


def copied_buffers(model: nn.Module) -> Named:
    """Returns copies of a model's buffers that have values, by name, on the CPU."""
    return {name: buffer.detach().to("cpu", copy=True) for name, buffer in model.named_buffers() if not buffer.is_meta}


def scales(named: Mapping[str, Tensor | None], floor: float) -> dict[str, float]:
    """Returns the divisor that makes each tensor's error relative: its largest absolute entry, but at least a bound.

    The bound is ``floor`` times the largest absolute entry of all tensors. The divisor is 1 where both are 0. Entries
    that are not finite do not count.
    """
    least = floor * _largest(named)
    return {name: max(_largest({name: tensor}), least) or 1.0 for name, tensor in named.items()}


def first_not_finite(named: Mapping[str, Tensor | None]) -> str:
    """Returns the name of the first tensor that has a NaN or infinite element, or ""."""
    return next((name for name, tensor in named.items() if tensor is not None and not tensor.isfinite().all()), "")


def _largest(named: Mapping[str, Tensor | None]) -> float:
    held = (tensor for tensor in named.values() if tensor is not None and tensor.numel())
    return max((float(tensor.abs().nan_to_num(0.0, 0.0).max()) for tensor in held), default=0.0)


# ---- by how much one device differs from itself


class RoundingRecorder(TorchDispatchMode):
    """A dispatch mode that finds the narrowest dtype to which operators round tensors of ``dtype``.

    That dtype is the attribute ``narrowest``, which stays ``dtype`` if no operator rounds.

    >>> with RoundingRecorder(torch.float64) as inside:
    ...     torch.ones(2, dtype=torch.float64).softmax(0, dtype=torch.float32)
    tensor([0.5000, 0.5000])
    >>> inside.narrowest
    torch.float32
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.narrowest = dtype, dtype

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        dtypes = _dtypes((args, kwargs or {}))
        output = function(*args, **(kwargs or {}))
        if self.dtype in dtypes:
            self.narrowest = min((self.narrowest, *_dtypes(output)), key=lambda dtype: torch.finfo(dtype).bits)
        return output


def _dtypes(tree: Any) -> set[torch.dtype]:
    """Returns the floating-point dtypes of a tree's tensors; for complex ones, the dtype of their parts."""
    dtypes = {leaf.dtype for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
    real = {dtype.to_real() if dtype.is_complex else dtype for dtype in dtypes}
    return {dtype for dtype in real if dtype.is_floating_point}


@dataclass
class DeviceDifference:
    """The relative errors between training runs on one device that differ by rounding alone.

    ``narrowest`` is the narrowest dtype to which operators of the model round: that of the comparison if none is
    narrower.
    """

    narrowest: torch.dtype
    loss: float
    gradients: dict[str, float]
    later: dict[str, float]
    """The relative errors of parameters and buffers after the steps, by name."""


def own_errors(
    plain: nn.Module, loss: nn.Module, batches: Sequence[Batch], seed: int, plan: Plan,
    draws: Draws | None, dtype: torch.dtype, expected: TrainingOutcome, device: str,
    differing: Mapping[_TensorKey, float],
) -> DeviceDifference:  # fmt: skip
    """Returns the relative errors by which runs on one device differ from each other, due to rounding alone.

    If ``device``, the device type of the ranks, is not the CPU, one more run is on such a device, with unchanged
    initial values.

    In each pair of runs, every initial value is shifted by one rounding of the narrowest dtype of the model, in one run
    up where it is down in the other. If that dtype is narrower than ``dtype``, the second difference of the results
    counts: the effect of the shift itself cancels in it. Otherwise the larger first difference counts: the effect of
    one rounding of ``dtype``. ``differing`` are the errors, by kind and name, of the tensors that differ on the ranks.
    More pairs are run if the first ones show no rounding in one of these tensors, and that differs by less than a
    rounding. ``expected`` is the result of :func:`reference` for the same arguments; this function calls
    :func:`reference` several times more.
    """
    recorder = RoundingRecorder(dtype)
    reference(plain, loss, batches[:1], seed, plan, draws, eps=expected.eps, forward=recorder)
    h = torch.finfo(recorder.narrowest).eps
    differences = _first if recorder.narrowest == dtype else _second
    shifted = partial(reference, plain, loss, batches, seed, plan, draws, eps=expected.eps)
    changed = {name: expected.buffers[name] for name in expected.changed}
    small = {key: error for key, error in differing.items() if error <= h}
    pairs: list[tuple[TrainingOutcome, TrainingOutcome]] = []
    pair_errors: list[dict[_TensorKey, float]] = []
    while len(pairs) < _NUM_PAIRS or (
        len(pairs) < _MOST_PAIRS
        and any(max(errors.get(key, 0.0) for errors in pair_errors) < error for key, error in small.items())
    ):
        # as ranks do, which divide their losses by the expected number of targets; each odd divisor rounds differently
        scales_of_pair = (1 / (4 * len(pairs) + odd) for odd in (3, 5))
        steps = zip((h, -h), scales_of_pair, strict=True)
        up, down = (shifted(shift=partial(_shift, step, len(pairs)), scale=scale) for step, scale in steps)
        pairs.append((up, down))
        of = {
            "gradients": _differences(differences, up.gradients, down.gradients, expected.gradients),
            "later": _differences(differences, up.parameters, down.parameters, expected.parameters)
            | _differences(differences, up.buffers, down.buffers, changed),
        }
        pair_errors.append(_by_key(of))
    own = _medians(h, pair_errors)
    losses = [max(_differences(differences, *map(_losses_of, (*pair, expected))).values()) for pair in pairs]
    of_loss = [torch.finfo(expected.loss_dtype).eps]  # a number of few digits, which two runs often round alike
    if device != "cpu":
        there = reference(plain, loss, batches, seed, plan, draws, eps=expected.eps, device=device)
        of = {
            "gradients": _differences(_first, there.gradients, there.gradients, expected.gradients),
            "later": _differences(_first, there.parameters, there.parameters, expected.parameters)
            | _differences(_first, there.buffers, there.buffers, changed),
        }
        for key, error in _by_key(of).items():
            own[key] = max(own.get(key, 0.0), error)
        of_loss += _differences(_first, *map(_losses_of, (there, there, expected))).values()
    return DeviceDifference(
        recorder.narrowest,
        max(median(losses), *of_loss),
        {name: error for (kind, name), error in own.items() if kind == "gradients"},
        {name: error for (kind, name), error in own.items() if kind == "later"},
    )


def narrow_errors(
    plain: nn.Module, loss: nn.Module, batches: Sequence[Batch], seed: int, plan: Plan, draws: Draws | None,
    expected: TrainingOutcome, narrow: torch.dtype, floor: float, device: str,
) -> DeviceDifference:  # fmt: skip
    """Returns the largest relative errors of a step that plain torch computes in ``narrow`` on one device.

    The step is computed from the initial values, and from values that differ from them by a quarter of a rounding and
    so round differently. If ``device``, the device type of the ranks, is not the CPU, the step is also computed there,
    from the initial values.
    ``expected`` is the result of :func:`reference` for the same arguments, and ``floor`` the least divisor of an error
    as for :func:`scales`.
    """
    quarter = torch.finfo(narrow).eps / 4
    errors, losses = dict[str, float](), []
    loss_scale = LossScale()
    steps = [(0.0, "cpu"), (quarter, "cpu"), (-quarter, "cpu"), *([(0.0, device)] if device != "cpu" else [])]
    for number, (step, place) in enumerate(steps):
        run = partial(
            reference, plain, loss, batches[:1], seed, plan, draws, eps=expected.eps,
            shift=partial(_shift, step, number), narrow=narrow, device=place,
        )  # fmt: skip
        outcome = _with_loss_scale(run, loss_scale) if narrow == torch.float16 else run()
        for name, scale in scales(expected.gradients, floor).items():
            a, b = outcome.gradients.get(name), expected.gradients[name]
            if a is not None and b is not None and b.numel():
                errors[name] = max(errors.get(name, 0.0), float((a.to(b.dtype) - b).abs().max()) / scale)
        losses.append(abs(outcome.losses[0] - expected.losses[0]) / max(abs(expected.losses[0]), 1e-30))
    return DeviceDifference(narrow, max(losses), errors, {})


def _with_loss_scale(run: Callable[..., TrainingOutcome], scale: LossScale) -> TrainingOutcome:
    """Returns the outcome of a run in fp16; ``scale`` is halved until no gradient overflows, as in training."""
    while True:
        outcome = run(scale=scale.value)
        if not first_not_finite(outcome.gradients) or scale.value <= LEAST_SCALE:
            return outcome
        scale.update(finite=False)


def _shift(step: float, number: int, name: str, value: Tensor) -> None:
    """Multiplies a parameter's values by 1 + ``step`` or 1 - ``step``, with random signs that pair ``number`` seeds."""
    if value.is_floating_point() or value.is_complex():
        generator = torch.Generator().manual_seed(number)
        signs = torch.randint(2, value.shape, generator=generator).to(value.dtype) * 2 - 1
        value.mul_(1 + step * signs)


def _losses_of(outcome: TrainingOutcome) -> Named:
    """Returns the losses as tensors, each under the number of its step."""
    return {str(step): torch.tensor(loss, dtype=torch.float64) for step, loss in enumerate(outcome.losses)}


def _first(up: Tensor, down: Tensor, middle: Tensor) -> Tensor:
    """Returns the largest absolute difference of the results ``up`` and ``down`` from ``middle``."""
    return torch.maximum((up - middle).abs(), (down - middle).abs()).max()


def _second(up: Tensor, down: Tensor, middle: Tensor) -> Tensor:
    """Returns the largest second difference (up + down - 2 middle) of three results, divided by sqrt(3)."""
    return (up + down - 2 * middle).abs().max() / 3**0.5


def _differences(
    difference: Callable[[Tensor, Tensor, Tensor], Tensor], up: Mapping[str, Tensor | None],
    down: Mapping[str, Tensor | None], middle: Mapping[str, Tensor | None],
) -> dict[str, float]:  # fmt: skip
    """Returns the difference of each tensor in three runs, as a relative error."""
    errors = {}
    for name, scale in scales(middle, FLOOR).items():
        a, b, c = up.get(name), down.get(name), middle[name]
        if a is not None and b is not None and c is not None and c.numel():
            errors[name] = float(difference(a, b, c)) / scale
    return errors


def _by_key(of: Mapping[str, Mapping[str, float]]) -> dict[_TensorKey, float]:
    """Returns errors, which are listed by kind and then by name, in one dict by (kind, name)."""
    return {(kind, name): error for kind, errors in of.items() for name, error in errors.items()}


def _medians(rounding: float, pair_errors: Sequence[Mapping[_TensorKey, float]]) -> dict[_TensorKey, float]:
    """Returns each tensor's median error over the pairs, or its largest, up to a third of a rounding, if that is more.

    The median alone may be 0 by chance for a gradient that rounds: if the gradient comes from one rounded number, and
    that number moves up in one run of a pair as far as it moves down in the other, the second difference is 0.
    """
    values = {name: [errors.get(name, 0.0) for errors in pair_errors] for name in pair_errors[0]}
    return {name: max(median(errors), min(max(errors), rounding / 3)) for name, errors in values.items()}
