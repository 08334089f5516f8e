"""New global tensors: from a value, and from random numbers that do not depend on the layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.current_world import everyone_here, here
from shardwright.errors import LayoutError
from shardwright.global_tensor import sbp as words
from shardwright.global_tensor.geometry import GlobalLayout, boxes, local_shape, terms
from shardwright.global_tensor.placement import Placement, check_placement
from shardwright.global_tensor.tensor import GlobalTensor, Sbps, wrap


def full(
    size: Sequence[int], value: complex, *, placement: Placement, sbp: Sbps, dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> GlobalTensor:  # fmt: skip
    """A tensor of one value. Of a sum in parts, the first member holds it and the others hold zeros.

    >>> from shardwright.global_tensor import sbp
    >>> from shardwright.global_tensor.placement import placement
    >>> full((2,), 7, placement=placement("cpu", ranks=[0]), sbp=sbp.split(0)).tolist()
    [7, 7]
    """
    return _made(size, lambda shape: torch.full(shape, value, dtype=dtype), placement, sbp, requires_grad)


def zeros(
    *size: Any, placement: Placement, sbp: Sbps, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """A tensor of zeros.

    >>> from shardwright.global_tensor import sbp
    >>> from shardwright.global_tensor.placement import placement
    >>> zeros(2, placement=placement("cpu", ranks=[0]), sbp=sbp.split(0)).tolist()
    [0.0, 0.0]
    """
    return _made(_size(size), lambda shape: torch.zeros(shape, dtype=dtype), placement, sbp, requires_grad)


def ones(
    *size: Any, placement: Placement, sbp: Sbps, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """A tensor of ones.

    >>> from shardwright.global_tensor import sbp
    >>> from shardwright.global_tensor.placement import placement
    >>> ones(2, placement=placement("cpu", ranks=[0]), sbp=sbp.partial_sum).tolist()
    [1.0, 1.0]
    """
    return _made(_size(size), lambda shape: torch.ones(shape, dtype=dtype), placement, sbp, requires_grad)


def empty(
    *size: Any, placement: Placement, sbp: Sbps, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """A tensor of whatever was there; copies of it are equal only once something is written.

    >>> from shardwright.global_tensor import sbp
    >>> from shardwright.global_tensor.placement import placement
    >>> empty(2, 3, placement=placement("cpu", ranks=[0]), sbp=sbp.broadcast).shape
    torch.Size([2, 3])
    """
    return _made(_size(size), lambda shape: torch.empty(shape, dtype=dtype), placement, sbp, requires_grad)


def arange(
    *bounds: float, placement: Placement, sbp: Sbps, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """``torch.arange(*bounds)``; each rank computes its own slice.

    >>> from shardwright.global_tensor import sbp
    >>> from shardwright.global_tensor.placement import placement
    >>> arange(1, 7, 2, placement=placement("cpu", ranks=[0]), sbp=sbp.split(0)).tolist()
    [1, 3, 5]
    """
    whole = torch.arange(*bounds, dtype=dtype)
    return _cut(whole, placement, sbp, requires_grad)


def randn(
    *size: Any, placement: Placement, sbp: Sbps, dtype: torch.dtype | None = None, requires_grad: bool = False,
    seed: int | None = None,
) -> GlobalTensor:  # fmt: skip
    """Normal random numbers: the same tensor under any placement and sbp, for one seed.

    Without ``seed`` one is drawn from torch's default generator, and the first rank's counts.

    >>> from shardwright.global_tensor import sbp
    >>> from shardwright.global_tensor.placement import placement
    >>> everywhere = dict(placement=placement("cpu", ranks=[0]), seed=3)
    >>> a, b = randn(4, sbp=sbp.split(0), **everywhere), randn(4, sbp=sbp.partial_sum, **everywhere)
    >>> torch.equal(a.full_tensor(), b.full_tensor())
    True
    """
    return _drawn("normal_", size, placement, sbp, dtype, requires_grad, seed)


def rand(
    *size: Any, placement: Placement, sbp: Sbps, dtype: torch.dtype | None = None, requires_grad: bool = False,
    seed: int | None = None,
) -> GlobalTensor:  # fmt: skip
    """Random numbers from 0 to 1, in all else as :func:`randn`.

    >>> from shardwright.global_tensor import sbp
    >>> from shardwright.global_tensor.placement import placement
    >>> x = rand(9, placement=placement("cpu", ranks=[0]), sbp=sbp.split(0))
    >>> 0 <= x.min().item() <= x.max().item() < 1
    True
    """
    return _drawn("uniform_", size, placement, sbp, dtype, requires_grad, seed)


def agreed_seed() -> int:
    """A seed from torch's default generator; where ranks would draw different ones, the first rank's.

    >>> 0 <= agreed_seed() < 2**62
    True
    """
    mine = torch.randint(2**62, (1,))
    return int(everyone_here().broadcast(mine.to(here().device)).item())


def _drawn(
    fill: str, size: Any, placement: Placement, sbp: Sbps, dtype: torch.dtype | None, requires_grad: bool,
    seed: int | None,
) -> GlobalTensor:  # fmt: skip
    shape = _size(size)
    _checked(shape, placement, sbp)  # before the first collective
    generator = torch.Generator().manual_seed(agreed_seed() if seed is None else seed)
    # the whole is drawn on every rank: a stream of numbers cannot be entered in its middle
    whole = getattr(torch.empty(shape, dtype=dtype), fill)(generator=generator)
    return _cut(whole, placement, sbp, requires_grad)


def _size(size: tuple[Any, ...]) -> tuple[int, ...]:
    if len(size) == 1 and isinstance(size[0], Sequence):
        size = tuple(size[0])
    return size


def _checked(shape: Sequence[int], placement: Placement, sbp: Sbps) -> GlobalLayout:
    check_placement(placement)
    if any(not isinstance(size, int) or size < 0 for size in shape):
        raise LayoutError("no such shape", given=shape, allowed="sizes from 0 on", fix="give whole numbers")
    return GlobalLayout(placement, words.checked(sbp, placement, len(shape)))


def _made(
    size: Sequence[int], make: Callable[[tuple[int, ...]], Tensor], placement: Placement, sbp: Sbps,
    requires_grad: bool,
) -> GlobalTensor:  # fmt: skip
    shape = tuple(size)
    where = _checked(shape, placement, sbp)
    local = make(local_shape(shape, where, here().rank)).to(_device(placement))
    if terms(where).get(here().rank, 0):
        local = torch.zeros_like(local)
    return wrap(local, shape, where).requires_grad_(requires_grad)


def _cut(whole: Tensor, placement: Placement, sbp: Sbps, requires_grad: bool) -> GlobalTensor:
    where, shape = _checked(whole.shape, placement, sbp), tuple(whole.shape)
    held = boxes(shape, where).get(here().rank)
    local = whole.new_empty(local_shape(shape, where, here().rank)) if held is None else whole[held.slices].clone()
    if terms(where).get(here().rank, 0):
        local = torch.zeros_like(local)
    return wrap(local.to(_device(placement)), shape, where).requires_grad_(requires_grad)


def _device(placement: Placement) -> torch.device:
    return here().device if here().device.type == placement.type else torch.device(placement.type)
