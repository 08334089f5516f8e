"""Checks that all ranks start alike: the same model and code, values and seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.analysis.on_meta.operator_results import tensors_of
from shardwright.comm.agreement import Difference, check_agreement, first_difference_async, tensor_digest, text_digest
from shardwright.comm.axis import Axis
from shardwright.comm.world import World
from shardwright.errors import PlanError
from shardwright.initial_values import recorded_values

_EXAMPLE, _LAYOUT = "the example's tensor", "layout "


def check_same_start(
    everyone: Axis, world: World, model: nn.Module, layout: str, seed: int, example: Any = None
) -> None:  # fmt: skip
    """Raises PlanError, on every rank, unless all ranks have been given the same parameters, buffers, layout and seed.

    Copies that start different stay different, and sums of their gradients mean nothing. Strided tensors with values
    are compared by all their bits, tensors on the meta device by the record of how a constructor fills them, and sparse
    tensors by shape and dtype only. The tensors of ``example`` are compared in the same way, if the plan depends on
    their values; otherwise ``example`` is None. On a single rank, and if ranks are on the meta device, nothing is
    compared.

    All ranks call it.

    Traffic: one all-reduce of two numbers; two if ranks are threads and do not share the tensors. Where ranks differ, a
        description of each tensor is gathered as text too.
    """
    if everyone.size == 1 or everyone.device.type == "meta":  # no peers or no values: no digests are needed
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors |= {f"{_EXAMPLE} {number}": tensor for number, tensor in enumerate(tensors_of(example))}

    def address(tensor: Tensor) -> str:
        return f"{tensor.device} {tensor.data_ptr()} {tensor.stride()}"

    first = [f"{_LAYOUT}{layout}", f"seed {seed}"]
    if world.local and first_difference_async(everyone, [*first, *_lines(tensors, address)])() is None:
        return  # threads that share one model: its values need not be read
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


def _different_models(difference: Difference) -> PlanError:
    if _EXAMPLE in str(difference):
        return PlanError(
            "ranks were given different examples, and the model's code needs values of its inputs",
            given=str(difference),
            allowed="the same example on every rank, by which all plan alike",
            fix="give every rank the inputs of the same global batch, as it is before run.shard cuts it",
        )
    if f"'{_LAYOUT}" in str(difference):
        return PlanError(
            "ranks were given different layouts",
            given=str(difference),
            allowed="the same line of layout on every rank",
            fix="give every rank the same line: it says how all of them share the work",
        )
    return PlanError(
        "ranks were given different models, and would train copies that are none, or mix parts of several",
        given=str(difference),
        allowed="the same parameters, buffers and seed on every rank",
        fix="build the model under sw.without_values(), which starts alike anywhere, or once before launch(), or "
        "load one checkpoint on every rank; where ranks are processes, torch.manual_seed(0) before building does",
    )
