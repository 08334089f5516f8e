"""Whether all ranks were given the same model: copies that start apart stay apart, and nothing else would say so."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from shardwright.comm.axis import Axis
from shardwright.comm.values import difference
from shardwright.comm.world import World
from shardwright.errors import PlanError

_WIDTH, _ROWS = 512, 64
"""The numbers in a row, and the rows that are summed both ways while the processor still has them at hand."""


def check_same_start(everyone: Axis, world: World, model: nn.Module, seed: int) -> None:
    """Returns if all ranks begin with the same parameters, buffers and seed; sparse tensors count by their shape.

    Traffic: one all-reduce of two numbers; where ranks are threads, another, unless they share the tensors themselves.
    Raises: PlanError: on every rank, with the first tensor that differs.

    >>> from shardwright import launch
    >>> model = nn.Linear(2, 2)
    >>> launch(lambda world: check_same_start(world.everyone(), world, model, seed=0), 2, ranks="threads")
    [None, None]
    """
    if everyone.size == 1 or everyone.device.type == "meta":  # a rehearsal has no values
        return
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kinds = {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items()}
    start = [f"seed {seed}"]
    shared = [f"{name}: {kinds[name]}, {_place(tensor)}" for name, tensor in tensors.items()]
    if world.local and difference(everyone, start + shared) is None:
        return
    told = [f"{name}: {kinds[name]}, {_values(tensor)}" for name, tensor in tensors.items()]
    if (found := difference(everyone, start + told)) is None:
        return
    raise PlanError(
        "ranks were given different models, and would train copies that are none, or mix parts of several",
        given=found,
        allowed="the same parameters, buffers and seed on every rank",
        fix="build the model under sw.without_values(), which starts alike anywhere, or once before launch(), or "
        "load one checkpoint on every rank; where ranks are processes, torch.manual_seed(0) before building does",
    )


def digest(tensor: Tensor) -> str:
    """A short stand-in for the bits of a tensor, in which their places count; reads 1 GB in a tenth of a second.

    >>> a, b = torch.arange(2000.0), torch.arange(2000.0)
    >>> b[[0, 1999]] = b[[1999, 0]]
    >>> digest(a) == digest(torch.arange(2000.0)) != digest(b)
    True
    """
    found = hashlib.blake2b(digest_size=6)
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    while True:
        num_whole = len(flat) - len(flat) % (8 * _WIDTH)
        found.update(bytes(flat[num_whole:].tolist()))
        if not num_whole:
            return found.hexdigest()
        columns, rows = _sums(flat[:num_whole])
        found.update(bytes(columns.tolist()))
        flat = rows


def _sums(flat: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of the sums of each column and each row of a matrix of whole numbers: to move one changes both."""
    columns = torch.zeros(_WIDTH, dtype=torch.int64, device=flat.device)
    rows = []
    for part in flat.split(8 * _WIDTH * _ROWS):
        aligned = part if part.storage_offset() % 8 == 0 else part.clone()
        matrix = aligned.view(torch.int64).view(-1, _WIDTH)
        columns += matrix.sum(0)
        rows.append(matrix.sum(1))
    return columns.view(torch.uint8), torch.cat(rows).view(torch.uint8)


def _has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.layout is torch.strided


def _place(tensor: Tensor) -> str:
    return f"{tensor.device} {tensor.data_ptr()} {tensor.stride()}" if _has_values(tensor) else "without values"


def _values(tensor: Tensor) -> str:
    return f"values {digest(tensor)}" if _has_values(tensor) else "without values"
