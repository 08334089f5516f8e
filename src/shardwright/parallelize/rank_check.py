"""Compares the ranks of a run every few steps, by 8 bytes from each rank, and raises an error that names a difference.

A rank that skips an update, changes a rate or a weight, or feeds other samples to a tensor-parallel group than its
peers do, would train on silently. So each rank packs digests into one number, with a few bits for each thing that some
ranks must have alike::

    | step, samples | updates, rates | batch              | global batch | parameters, copied along dp | ... along tp |
      all ranks       of one stage     that share samples,  along dp       that differ on dp alone       on tp alone
                                       stages too

With pipeline stages there is one more digest, of the updates by optimizers that all ranks have made with the same
groups. Every rank gets the numbers of all ranks, so all find the same differences, and gather the texts to name them.
Copies along tensor-parallel axes are computed by each rank, and may differ by rounding: if their digests differ, the
copies themselves are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.axes import mesh_axes
from shardwright.comm.agreement import gather_json, tensor_digest, text_digest
from shardwright.comm.axis import Axis
from shardwright.errors import RankDifferenceError
from shardwright.plan.plan import Plan
from shardwright.plan.traffic import Traffic
from shardwright.runtime.executor import Microbatch

CHECK_EVERY = 100
"""The default number of steps from one comparison of the ranks to the next."""

_FIRST_POWER = 8
"""The first step after step 0 that is compared because its number is a power of two."""

_TOLERANCE = 1e-3
"""The most by which copies along tensor-parallel axes may differ, as a share of the largest element."""

PARAMETERS = "the parameters"
GLOBAL_BATCH = "the global batch"
_LOADER = "write DataLoader(data, batch_size, shuffle=True, generator=torch.Generator().manual_seed(0))"
_FIXES = {
    "the step": "let every rank take the same steps, on global batches of as many samples",
    "the updates": "let every rank call optimizer.step() after each step, and set the same rates and options",
    "the batch": f"give every rank the same global batches: the same order of the samples, from one seed: {_LOADER}",
    GLOBAL_BATCH: f"let all ranks load equal global batches, shuffled by a generator with one seed: {_LOADER}; "
    "or let each load its own samples, run.part(inputs, targets, num_global) of run.share(num_global)",
    PARAMETERS: "write to parameters on every rank alike, or load a checkpoint on all ranks",
}
_NUM_COMPARED = 256
"""The most elements of a tensor by which ranks compare a global batch."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RankText(NamedTuple):
    """Lines of text, by name, that must be equal on ranks whose coordinates differ only along ``axes``.

    ``what`` names the subject of these lines in errors, such as "the batch". A rank without lines is not compared. For
    example, a rank has no lines on updates if it has stepped none of the optimizers that all ranks have made alike: it
    may train nothing, or use an optimizer of its own.
    """

    what: str
    axes: tuple[str, ...]
    lines: dict[str, str]


def is_compared(number: int, check_every: int) -> bool:
    """Returns whether ranks are compared before the step of this number, counted from 0.

    They are compared in every ``check_every``-th step, and in steps whose numbers are powers of two from 8 on. So a
    loader that ranks shuffle differently from its second epoch on is found in runs shorter than ``check_every`` too.

    >>> [number for number in range(300) if is_compared(number, 100)]
    [0, 8, 16, 32, 64, 100, 128, 200, 256]
    """
    is_power = number >= _FIRST_POWER and number & (number - 1) == 0
    return bool(check_every) and (number % check_every == 0 or is_power)


def check_traffic(plan: Plan) -> tuple[Traffic, ...]:
    """Returns the traffic of a comparison of ranks that finds no difference: an all-gather of 8 bytes from each rank.

    On a single rank there is none.
    """
    return (Traffic("all_gather", "world", 8 * plan.mesh.size, plan.mesh.size),) if plan.mesh.size > 1 else ()


def check_ranks(
    plan: Plan,
    axes: Mapping[str, Axis],
    parameters: Mapping[str, nn.Parameter],
    values: Mapping[str, str],
    batch: Microbatch,
    number: int,
    earlier: str,
    updates: tuple[Mapping[str, str], Mapping[str, str]],
) -> None:
    """Raises RankDifferenceError, on every rank, if ranks differ in step, updates, batch or copies of parameters.

    Copies along a tensor-parallel axis may differ, for rounding, by 1/1000 of the tensor's largest absolute element.
    On a mesh of n axes each comparison finds a difference with a probability of 1 - 2**-(63 // (n + 4)), such as 0.999
    for two axes; a difference that lasts is found in a later comparison.

    ``values`` are the parameters' :func:`bit_sums`, ``number`` is the number of the step, and ``earlier`` a digest of
    the numbers of samples of all steps so far. ``updates`` describes updates as text, as :meth:`UpdateLog.lines`
    returns it: those of this rank's optimizers, and those of optimizers that all ranks have made with the same groups.
    All ranks call it; ``axes`` has the axis of all ranks as "world".

    Traffic: one all-gather of 8 bytes from each rank. Only if these differ, more is sent to name the difference: the
        digests of each tensor, and an all-reduce of each differing parameter that tensor parallelism copies.
    """
    everyone = axes["world"].for_strategy("core")
    texts = list(_lines(plan, values, batch, (number, earlier), updates))
    num_bits = 63 // len(texts)
    word = 0
    for text in texts:
        word = word << num_bits | (1 + text_digest(str(text.lines)) % (2**num_bits - 1) if text.lines else 0)
    words = everyone.all_gather(torch.tensor([word], device=everyone.device)).tolist()
    differ = []
    for place, text in enumerate(reversed(texts)):
        if _differs(plan, text, [word >> num_bits * place & 2**num_bits - 1 for word in words]):
            differ.append(text)
    for text in reversed(differ):  # in the order of texts: the first difference explains the others
        every = gather_json(everyone, text.lines)
        if text.axes[0] in mesh_axes("operators") and text.what == PARAMETERS:
            every = _beyond_rounding(every, axes, parameters, text)
        _check_lines(plan, text, every, number)


def batch_number(batch: Microbatch) -> int:
    """Returns a number from 1 to 2**16 - 1 that tells global batches apart; 0 if they are not to be compared.

    It is so small that the sum of its squares over 1,024 ranks, times the number of ranks, is exact in float64.
    """
    if not batch.of_global or any(tensor.is_meta for tensor in batch.of_global):
        return 0
    text = f"{batch.num_global} {[tensor_digest(tensor) for tensor in batch.of_global]}"
    return 1 + text_digest(text) % (2**16 - 1)


def check_one_batch(sums: Sequence[float], size: int, plan: Plan) -> None:
    """Raises RankDifferenceError unless ``size`` ranks have one :func:`batch_number`.

    ``sums`` has the sum of the numbers, and the sum of their squares, over the ranks. All of these ranks raise.
    """
    total, squares = sums
    if total * total != size * squares:
        raise RankDifferenceError(
            "ranks evaluate different global batches",
            given=f"batches that are not equal on {size} ranks, under {plan.layout}",
            allowed="the global batch alike on ranks that share its samples",
            fix=_FIXES[GLOBAL_BATCH],
        )


def some_elements(batch: Any) -> tuple[Tensor, ...]:
    """Returns copies of at most 256 elements of each tensor of a batch, evenly spaced, without blocking the host.

    >>> [each.tolist() for each in some_elements((torch.arange(3), {"mask": torch.ones(2, 2)}))]
    [[0, 1, 2], [1.0, 1.0, 1.0, 1.0]]
    """
    return tuple(_some_of(leaf.detach()) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _some_of(tensor: Tensor) -> Tensor:
    """Returns at most 256 elements, evenly spaced, at places that change from one sample to the next."""
    step, in_sample = max(1, -(-tensor.numel() // _NUM_COMPARED)), tensor[:1].numel()
    while step > 1 and gcd(step, in_sample) > 1:
        step += 1
    return tensor.reshape(-1)[::step].clone(memory_format=torch.contiguous_format)


def _lines(
    plan: Plan,
    values: Mapping[str, str],
    batch: Microbatch,
    step: tuple[int, str],
    updates: tuple[Mapping[str, str], Mapping[str, str]],
) -> Iterator[RankText]:
    held = tuple(axis for axis in plan.mesh.axes if axis not in mesh_axes("stages"))
    steps = {"step": f"{step[0]}", "samples": f"{batch.num_global}", "samples of all steps": step[1]}
    yield RankText("the step", plan.mesh.axes, steps)
    of_stage, of_all = updates
    yield RankText("the updates", held, dict(of_stage))
    if held != plan.mesh.axes:
        yield RankText("the updates", plan.mesh.axes, dict(of_all) if int(of_all["number of updates"]) else {})
    # compared along stages too: the first stage reads the inputs, and the last the targets, of the same samples
    alike = tuple(axis for axis in plan.mesh.axes if axis not in plan.row_axes | plan.token_axes)
    tensors = [leaf for leaf in tree_leaves((batch.inputs, batch.targets)) if isinstance(leaf, Tensor)]
    digests = [tensor_digest(tensor.contiguous()) for tensor in tensors] if alike and len(batch.samples) else []
    yield RankText("the batch", alike, {f"tensor {place}": text for place, text in enumerate(digests)})
    cut = tuple(axis for axis in held if axis not in alike)
    order = {f"tensor {place}": tensor_digest(tensor) for place, tensor in enumerate(batch.of_global)}
    yield RankText(GLOBAL_BATCH, cut, order if cut else {})
    for axis in held:
        copied = {name: text for name, text in values.items() if axis not in plan.state[name].parameter.axes}
        yield RankText(PARAMETERS, (axis,), copied)


def bit_sums(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns, by name, a checksum of each tensor as text: the sum of its elements' bits, read as integers."""
    flat = [_real(parameter).reshape(-1) for parameter in parameters.values()]
    sums = [tensor.view(_BITS[tensor.element_size()]).sum(dtype=torch.int64) for tensor in flat]
    return dict(zip(parameters, map(str, torch.stack(sums).tolist() if sums else ()), strict=True))


def _differs(plan: Plan, rank_text: RankText, digests: Sequence[int]) -> bool:
    """Returns whether ranks whose coordinates differ only along ``rank_text.axes`` have different digests.

    A digest of 0 is that of a rank without lines, and counts as equal to any other.
    """
    return any(len({digests[rank] for rank in group} - {0}) > 1 for group in plan.mesh.groups(rank_text.axes))


def _check_lines(plan: Plan, rank_text: RankText, every: Sequence[dict[str, str]], number: int) -> None:
    """Raises RankDifferenceError if the ranks' lines (``every``) differ; it names the ranks and the first such line."""
    for members in plan.mesh.groups(rank_text.axes):
        group = [rank for rank in members if every[rank]]
        for key in sorted({key for rank in group for key in every[rank]}):
            texts = {rank: every[rank].get(key, "nothing") for rank in group}
            if len(set(texts.values())) == 1:
                continue
            ((usual, _),) = Counter(texts.values()).most_common(1)
            odd = [rank for rank in group if texts[rank] != usual]
            others = [rank for rank in group if texts[rank] == usual]
            raise RankDifferenceError(
                f"rank {_listed(odd)} differs from rank {_listed(others)} in {rank_text.what}: {key}",
                given=f"{texts[odd[0]]} on rank {odd[0]}, {usual} on rank {others[0]}, before step {number}, "
                f"under {plan.layout}",
                allowed=f"{rank_text.what} alike on ranks that differ on {' '.join(rank_text.axes)} alone",
                fix=_FIXES[rank_text.what],
            )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _beyond_rounding(
    every: Sequence[dict[str, str]], axes: Mapping[str, Axis], parameters: Mapping[str, nn.Parameter],
    rank_text: RankText,
) -> list[dict[str, str]]:  # fmt: skip
    """Returns the lines of all ranks without those of tensor-parallel copies that differ only by rounding."""
    (axis,), everyone = rank_text.axes, axes["world"].for_strategy("core")
    names = sorted({key for lines in every for key in lines if len({other.get(key) for other in every}) > 1})
    same = []
    for name in names:
        if name not in parameters:
            continue  # the parameter is on another stage, for all ranks of this axis alike
        value = _real(parameters[name]).double()
        most = axes[axis].for_strategy("core").all_reduce(torch.stack([value, -value]), "max")
        spread, largest = most[0] + most[1], most.abs()
        if not most.numel() or bool(spread.max() <= _TOLERANCE * largest.max()):
            same.append(name)
    without = zip(every, gather_json(everyone, same), strict=True)
    return [{name: text for name, text in lines.items() if name not in gone} for lines, gone in without]


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
