"""Creates global tensors: constants, ranges, and random numbers that do not depend on the layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.current_world import current_world, everyone_here
from shardwright.errors import LayoutError
from shardwright.global_tensor.geometry import GlobalLayout, boxes, local_shape, terms
from shardwright.global_tensor.placement import Placement, check_placement
from shardwright.global_tensor.sbp import Sbps, checked_sbp
from shardwright.global_tensor.tensor import GlobalTensor, wrap


def full(
    size: Sequence[int], value: complex, *, placement: Placement, sbp: Sbps, dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> GlobalTensor:  # fmt: skip
    """Returns a global tensor of shape ``size`` filled with one value; nothing is sent.

    Under ``partial_sum`` the first term of the sum holds the value and the others hold zeros.

    Raises: LayoutError: a size that is negative or no integer, or a placement or sbp that does not fit.

    >>> from shardwright.global_tensor import placement, sbp
    >>> full((2,), 7, placement=placement("cpu", ranks=[0]), sbp=sbp.split(0)).tolist()
    [7, 7]
    """
    return _filled(size, lambda shape: torch.full(shape, value, dtype=dtype), placement, sbp, requires_grad)


def zeros(
    *size: Any, placement: Placement, sbp: Sbps, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """Returns a global tensor of zeros of shape ``size``. Each rank allocates only its own shard, and nothing is sent.

    Raises: LayoutError: a size that is negative or no integer, or a placement or sbp that does not fit.

    >>> from shardwright.global_tensor import placement, sbp
    >>> zeros(2, placement=placement("cpu", ranks=[0]), sbp=sbp.split(0)).tolist()
    [0.0, 0.0]
    """
    return _filled(_size(size), lambda shape: torch.zeros(shape, dtype=dtype), placement, sbp, requires_grad)


def ones(
    *size: Any, placement: Placement, sbp: Sbps, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """Returns a global tensor of ones of shape ``size``. Each rank allocates only its own shard, and nothing is sent.

    Under ``partial_sum`` the first term of the sum holds the ones and the others hold zeros.

    Raises: LayoutError: a size that is negative or no integer, or a placement or sbp that does not fit.

    >>> from shardwright.global_tensor import placement, sbp
    >>> ones(2, placement=placement("cpu", ranks=[0]), sbp=sbp.partial_sum).tolist()
    [1.0, 1.0]
    """
    return _filled(_size(size), lambda shape: torch.ones(shape, dtype=dtype), placement, sbp, requires_grad)


def empty(
    *size: Any, placement: Placement, sbp: Sbps, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """Returns an uninitialized global tensor of shape ``size``; nothing is sent.

    Until it is written to, the copies that ranks of a ``broadcast`` axis hold may differ. Under ``partial_sum`` all
    terms but the first are zeros.

    Raises: LayoutError: a size that is negative or no integer, or a placement or sbp that does not fit.

    >>> from shardwright.global_tensor import placement, sbp
    >>> empty(2, 3, placement=placement("cpu", ranks=[0]), sbp=sbp.broadcast).shape
    torch.Size([2, 3])
    """
    return _filled(_size(size), lambda shape: torch.empty(shape, dtype=dtype), placement, sbp, requires_grad)


def arange(
    *bounds: float, placement: Placement, sbp: Sbps, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """Returns ``torch.arange(*bounds)`` as a global tensor.

    Every rank computes the whole range and keeps its own part, so nothing is sent. Under ``partial_sum`` the first term
    of the sum holds the values and the others hold zeros.

    Raises: LayoutError: a placement or sbp that does not fit.

    >>> from shardwright.global_tensor import placement, sbp
    >>> arange(1, 7, 2, placement=placement("cpu", ranks=[0]), sbp=sbp.split(0)).tolist()
    [1, 3, 5]
    """
    whole = torch.arange(*bounds, dtype=dtype)
    return _cut(whole, _checked(whole.shape, placement, sbp), requires_grad)


def randn(
    *size: Any, placement: Placement, sbp: Sbps, dtype: torch.dtype | None = None, requires_grad: bool = False,
    seed: int | None = None,
) -> GlobalTensor:  # fmt: skip
    """Returns a global tensor of standard normal random numbers, the same for one seed under any placement and sbp.

    Every rank draws the numbers of the whole tensor on the CPU and keeps its own part. Without ``seed``, every rank of
    the world must call the function: the first rank draws a seed from torch's default generator and broadcasts it.

    Traffic: without ``seed``, one broadcast of one number.
    Raises: LayoutError: a size that is negative or no integer, or a placement or sbp that does not fit.

    >>> from shardwright.global_tensor import placement, sbp
    >>> everywhere = dict(placement=placement("cpu", ranks=[0]), seed=3)
    >>> a, b = randn(4, sbp=sbp.split(0), **everywhere), randn(4, sbp=sbp.partial_sum, **everywhere)
    >>> torch.equal(a.full_tensor(), b.full_tensor())
    True
    """
    return _random("normal_", size, placement, sbp, dtype, requires_grad, seed)


def rand(
    *size: Any, placement: Placement, sbp: Sbps, dtype: torch.dtype | None = None, requires_grad: bool = False,
    seed: int | None = None,
) -> GlobalTensor:  # fmt: skip
    """Returns a global tensor of uniform random numbers in [0, 1), the same for one seed under any placement and sbp.

    Every rank draws the numbers of the whole tensor on the CPU and keeps its own part. Without ``seed``, every rank of
    the world must call the function: the first rank draws a seed from torch's default generator and broadcasts it.

    Traffic: without ``seed``, one broadcast of one number.
    Raises: LayoutError: a size that is negative or no integer, or a placement or sbp that does not fit.

    >>> from shardwright.global_tensor import placement, sbp
    >>> x = rand(9, placement=placement("cpu", ranks=[0]), sbp=sbp.split(0))
    >>> 0 <= x.min().item() <= x.max().item() < 1
    True
    """
    return _random("uniform_", size, placement, sbp, dtype, requires_grad, seed)


def draw(shape: Sequence[int], dtype: torch.dtype | None, fill: str, *numbers: Any, seed: int | None = None) -> Tensor:
    """Returns a plain CPU tensor of random numbers that is equal on every rank, from which each rank can cut its shard.

    ``fill`` is the name of the in-place tensor method that draws the numbers, such as ``normal_``, and ``numbers`` are
    its arguments. Without ``seed``, every rank of the world must call the function: the first rank draws a seed from
    torch's default generator and broadcasts it.

    Traffic: without ``seed``, one broadcast of one number.
    """
    if seed is None:
        own = torch.randint(2**62, (1,))
        seed = int(everyone_here().broadcast(own.to(current_world().device)).item())
    generator = torch.Generator().manual_seed(seed)
    # every rank draws all numbers and keeps its slice: torch's generator cannot start in the middle of its stream
    values: Tensor = getattr(torch.empty(shape, dtype=dtype), fill)(*numbers, generator=generator)
    return values


def local_part(whole: Tensor, layout: GlobalLayout, device: torch.device) -> Tensor:
    """Returns this rank's local tensor, on ``device``, cut from the tensor ``whole``, which is equal on all ranks.

    Under ``partial_sum`` the first term has the values, and all other terms are zeros. A rank outside of the placement
    gets an empty tensor.
    """
    shape = tuple(whole.shape)
    box = boxes(shape, layout).get(current_world().rank)
    local = (
        whole.new_empty(local_shape(shape, layout, current_world().rank)) if box is None else whole[box.slices].clone()
    )
    return (torch.zeros_like(local) if terms(layout).get(current_world().rank, 0) else local).to(device)


def _random(
    fill: str, size: Any, placement: Placement, sbp: Sbps, dtype: torch.dtype | None, requires_grad: bool,
    seed: int | None,
) -> GlobalTensor:  # fmt: skip
    shape = _size(size)
    layout = _checked(shape, placement, sbp)  # before the broadcast of the seed, so that all ranks raise alike
    return _cut(draw(shape, dtype, fill, seed=seed), layout, requires_grad)


def _size(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size


def _checked(shape: Sequence[int], placement: Placement, sbp: Sbps) -> GlobalLayout:
    check_placement(placement)
    if any(not isinstance(size, int) or size < 0 for size in shape):
        raise LayoutError("no such shape", given=shape, allowed="sizes from 0 on", fix="give whole numbers")
    return GlobalLayout(placement, checked_sbp(sbp, placement, len(shape)))


def _filled(
    size: Sequence[int], make: Callable[[tuple[int, ...]], Tensor], placement: Placement, sbp: Sbps,
    requires_grad: bool,
) -> GlobalTensor:  # fmt: skip
    shape = tuple(size)
    layout = _checked(shape, placement, sbp)
    local = make(local_shape(shape, layout, current_world().rank)).to(device_of(placement))
    if terms(layout).get(current_world().rank, 0):
        local = torch.zeros_like(local)
    return wrap(local, shape, layout).requires_grad_(requires_grad)


def _cut(whole: Tensor, layout: GlobalLayout, requires_grad: bool) -> GlobalTensor:
    local = local_part(whole, layout, device_of(layout.placement))
    return wrap(local, whole.shape, layout).requires_grad_(requires_grad)


def device_of(placement: Placement) -> torch.device:
    """Returns the device of this rank that holds its parts of tensors on ``placement``."""
    return current_world().device if current_world().device.type == placement.type else torch.device(placement.type)
