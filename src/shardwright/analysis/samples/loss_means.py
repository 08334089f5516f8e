"""Finds means in a loss that divide by another number than the count that the loss returns, such as a mask's sum.

Each rank takes the mean over its own samples. The library averages the ranks' means, weighted by their counts of
targets. If the loss divided by another number, that average differs from the mean over the whole batch.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from torch.utils._pytree import tree_leaves

from shardwright.analysis.dims.run_axes import RunAxes, leaves
from shardwright.analysis.objects.marked_inputs import sample_tensors
from shardwright.analysis.recorded.recording import RecordedCall, Recording, TensorUse

_CLASS_LOSSES = ("nll_loss2d_forward", "nll_loss_forward")
"""Operators that may take their mean over weights of classes, or over the targets that are not ignored."""

_MEAN, _SUM = 1, 2
"""The values of the argument ``reduction`` of losses for a mean and for a sum."""

_REDUCTION_AT = {
    "binary_cross_entropy": 3, "huber_loss": 2, "mse_loss": 2, "nll_loss2d_forward": 3, "nll_loss_forward": 3,
    "smooth_l1_loss": 2,
}  # fmt: skip
"""Operators that are losses, with the place of their argument ``reduction``."""

_OF_TERMS = frozenset(("add", "neg", "sub"))
"""Operators whose operands are terms of the loss, if their result is the loss."""

_SAME_NUMBER = frozenset((
    "_to_copy", "_unsafe_view", "alias", "clamp", "clamp_min", "clone", "contiguous", "detach", "flatten", "maximum",
    "permute", "reshape", "squeeze", "t", "transpose", "unsqueeze", "view",
))  # fmt: skip
"""Operators whose result is the same count as their operand, if it is not 0, or the same targets in another order."""


def other_means(
    recording: Recording, axes: RunAxes, sums: Collection[TensorUse], trained: Collection[TensorUse], *,
    targets: Any = None, counted: tuple[int | None] | None = None,
) -> list[RecordedCall]:  # fmt: skip
    """Returns the operators by which a recorded loss divides a sum over samples by another number than is counted.

    Such a number is a sum of weights, or the number of samples that a mask keeps, while the loss counts the targets.
    Not returned is a division that the loss undoes, by multiplying its mean by that number again, as :class:`MeanLoss`
    does with the number of targets that it does not ignore.

    ``sums`` are the values that were summed over samples, and ``trained`` those that depend on the model's output.
    ``targets`` show whether there are classes to be ignored. ``counted`` is for a model that computes its loss itself
    and returns no count: it has the class of labels that the caller does not count, or None if the caller counts
    samples. With it, a second mean over other targets is returned too, if not all labels count.
    """
    numbers = _LossNumbers(recording, axes, counted)
    means: list[RecordedCall] = []
    counts = set[int]()  # the numbers of the targets that the means so far were taken over
    for call in recording.calls:
        is_other = False
        if call.name in _CLASS_LOSSES and call.argument(3, "reduction") == _MEAN and call.results[0] in sums:
            times = numbers.multiplied_by(call.results[0])
            if call.argument(2, "weight") is not None:
                is_other = not any(use.dtype.is_floating_point and use.kind != "constant" for use in times)
            else:
                ignored, classes = int(call.argument(4, "ignore_index", -100)), call.argument(1, "target")
                count = _ClassCount(ignored, numbers.number(classes))
                is_other = numbers.leaves_out(count, times, targets)
                if counted is not None:
                    is_other |= bool(counts - {count.targets}) and _has_class(targets, ignored)
                    counts.add(count.targets)
        elif call.name.removesuffix("_") == "div" and len(call.operands) == 2:
            whole, divisor = call.operands
            is_mean = whole in sums and whole in trained and divisor not in trained and numbers.sums_samples(divisor)
            if not is_mean:
                continue
            of_classes, times = numbers.class_count(divisor), numbers.multiplied_by(call.results[0])
            if of_classes is None:
                is_other = all(numbers.number(use) != numbers.number(divisor) for use in times)
            else:
                is_other = numbers.leaves_out(of_classes, times, targets)
        if is_other:
            means.append(call)
    return means


def sum_call(recording: Recording, axes: RunAxes, loss: TensorUse) -> RecordedCall | None:
    """Returns the operator whose undivided sum over samples is the ``loss`` or a term of it; None for a mean."""
    return _LossNumbers(recording, axes, None).undivided(loss)


class _ClassCount(NamedTuple):
    """A count of all targets but those of the class ``ignored``; ``targets`` is :meth:`_LossNumbers.number` of them."""

    ignored: int
    targets: int


class _LossNumbers:
    """The values of a recorded loss and the operators that made them; tells which are sums, counts, or made alike."""

    def __init__(self, recording: Recording, axes: RunAxes, counted: tuple[int | None] | None) -> None:
        self._axes, self._calls, self._counted = axes, recording.calls, counted
        making = [call for call in recording.calls if call.results and call.results[0] not in call.operands]
        self._maker = {use: call for call in making for use in call.results}
        self._batch, self._count = axes.of_samples(recording.inputs), recording.num_samples
        self._numbers: dict[TensorUse, int] = {}
        by_key, args_of = dict[Any, int](), dict[RecordedCall, Any]()
        for call in recording.calls:
            arguments = tree_leaves(call.args, is_leaf=lambda leaf: isinstance(leaf, TensorUse))
            args = tuple(self.number(leaf) if isinstance(leaf, TensorUse) else repr(leaf) for leaf in arguments)
            for place, use in enumerate(call.results):
                if _keeps_number(call):
                    self._numbers[use] = self.number(call.operands[0])
                else:
                    equal = self._equal(call)
                    key = (call.name, args, place) if equal is None else ("ne", args_of[equal], place)
                    self._numbers[use] = by_key.setdefault(key, len(by_key))
                    args_of[call] = args

    def number(self, use: TensorUse) -> int:
        """Returns a number that is equal for values computed in the same way, such as two counts of one mask."""
        return self._numbers.setdefault(use, -1 - len(self._numbers))

    def sums_samples(self, use: TensorUse) -> bool:
        """Returns whether a value is a sum over samples of a tensor that is no constant, such as the sum of a mask."""
        call = self._maker.get(self._source(use))
        if call is None or call.name not in ("count_nonzero", "mean", "sum"):
            return False
        return (
            call.operands[0].kind != "constant" and self._has_samples(call.operands[0]) and not self._has_samples(use)
        )

    def class_count(self, use: TensorUse) -> _ClassCount | None:
        """Returns which class is left out if a value is a count of all targets but those of one class; else None."""
        call = self._maker.get(self._source(use))
        kept = None if call is None or call.name != "sum" else self._maker.get(self._source(call.operands[0]))
        compared = None if kept is None else kept if kept.name == "ne" else self._equal(kept)
        number = None if compared is None else compared.args[1]
        return _ClassCount(number, self.number(compared.operands[0])) if compared and isinstance(number, int) else None

    def leaves_out(self, count: _ClassCount, times: Collection[TensorUse], targets: Any) -> bool:
        """Returns whether a mean over the targets of ``count`` leaves out targets that the loss or the caller counts.

        That is not so if the mean is multiplied by the same count again; ``times`` are the tensors by which it is
        multiplied. A class below 0 counts as left out only if a target has it.
        """
        if any(self.class_count(use) == count for use in times):
            return False
        if self._counted is not None:  # nothing is lost if the caller leaves out the same class, or no label has it
            return self._counted != (count.ignored,) and _has_class(targets, count.ignored)
        return count.ignored >= 0 or _has_class(targets, count.ignored)

    def undivided(self, use: TensorUse) -> RecordedCall | None:
        """Returns the operator whose undivided sum over samples is ``use`` or a term of it.

        The result is None if the sum is divided, or if ``use`` is no sum over samples.
        """
        call = self._maker.get(self._source(use))
        if call is None:
            return None
        if call.name.removesuffix("_") in _OF_TERMS:
            return next((term for term in map(self.undivided, call.operands) if term is not None), None)
        at = _REDUCTION_AT.get(call.name)
        is_sum = call.name == "sum" if at is None else call.argument(at, "reduction", _MEAN) == _SUM
        maker = self._maker.get(self._source(call.operands[0])) if call.operands else None
        is_sum &= maker is None or maker.name.removesuffix("_") != "div"  # a sum of divided terms is a mean
        # after an operator without a rule, such as CTC, the axes show no samples, but the size does, a prime number
        has_samples = call.operands and (
            self._has_samples(call.operands[0]) or (self._count > 1 and self._count in call.operands[0].shape)
        )
        return call if is_sum and has_samples and not self._has_samples(use) else None

    def multiplied_by(self, mean: TensorUse) -> list[TensorUse]:
        """Returns the tensors by which a mean, or a value computed from it, is multiplied later on."""
        derived, factors = {mean}, list[TensorUse]()
        for call in self._calls:
            if not derived.isdisjoint(call.operands):
                if call.name.removesuffix("_") == "mul":
                    factors += [use for use in call.operands if use not in derived]
                derived.update(call.results)
        return factors

    def _equal(self, call: RecordedCall) -> RecordedCall | None:
        """Returns the ``eq`` operator whose result an operator negates, or None for any other operator."""
        compared = self._maker.get(call.operands[0]) if call.name in ("bitwise_not", "logical_not") else None
        return compared if compared is not None and compared.name == "eq" else None

    def _source(self, use: TensorUse) -> TensorUse:
        call = self._maker.get(use)
        while call is not None and _keeps_number(call):
            use = call.operands[0]
            call = self._maker.get(use)
        return use

    def _has_samples(self, use: TensorUse) -> bool:
        return any(leaf in self._batch for axis in self._axes.of(use) for leaf in leaves(axis))


def _keeps_number(call: RecordedCall) -> bool:
    """Returns whether an operator's result counts as the same number as its operand, as after adding an epsilon."""
    name = call.name.removesuffix("_")
    return name in _SAME_NUMBER or (name == "add" and len(call.operands) == 1 and not call.results[0].shape)


def _has_class(targets: Any, number: int) -> bool:
    classes = [tensor for tensor in sample_tensors(targets) if not tensor.is_floating_point() and not tensor.is_meta]
    return any(bool((labels == number).any()) for labels in classes)
