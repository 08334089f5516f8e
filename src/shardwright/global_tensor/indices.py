"""Lists as an index, ``x[[0, 2]]``: the same on every rank, as the program is, so they become copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardwright.comm.current_world import here
from shardwright.errors import explain
from shardwright.global_tensor.geometry import GlobalLayout
from shardwright.global_tensor.sbp import broadcast

if TYPE_CHECKING:
    from shardwright.global_tensor.tensor import GlobalTensor


def with_lists(x: GlobalTensor, index: Any) -> Any:
    """``index`` with global tensors in place of lists of numbers or of truths.

    Raises: IndexError: a list that the dim does not fit. On every rank: a member that raised alone would be waited for.

    >>> from shardwright.global_tensor import sbp
    >>> from shardwright.global_tensor.creation import arange
    >>> from shardwright.global_tensor.placement import placement
    >>> x = arange(5, placement=placement("cpu", ranks=[0]), sbp=sbp.split(0))
    >>> x[[0, -1]].tolist(), x[[True, False, False, True, False]].tolist()
    ([0, 4], [0, 3])
    """
    given = index if isinstance(index, tuple) else (index,)
    if isinstance(index, list) and any(isinstance(each, list) for each in index):
        return index  # torch is about to change what lists of lists mean
    if not any(isinstance(each, list) and _is_flat(each) for each in given):
        return index
    takes, found, dim = [_num_dims(each) for each in given], [], 0
    for number, each in enumerate(given):
        if each is Ellipsis:
            dim = x.ndim - sum(takes[number:])
        elif isinstance(each, list) and _is_flat(each):
            found += _tensors(x, torch.tensor(each, dtype=None if each else torch.int64), dim)
            dim += takes[number]
            continue
        found.append(each)
        dim += takes[number]
    return tuple(found)


def _is_flat(each: Sequence[Any]) -> bool:
    return all(isinstance(leaf, int) for leaf in tree_leaves(each))


def _num_dims(each: Any) -> int:
    """How many dims of the tensor an entry of an index stands for."""
    if each is None or each is Ellipsis or isinstance(each, bool):
        return 0
    if isinstance(each, list) and _is_flat(each) and each:
        each = torch.tensor(each)
    return each.ndim if isinstance(each, Tensor) and each.dtype == torch.bool else 1


def _tensors(x: GlobalTensor, table: Tensor, dim: int) -> list[Tensor]:
    from shardwright.global_tensor.tensor import wrap  # that file imports this one, for its __getitem__

    sizes = tuple(x.shape[dim : dim + (table.ndim if table.dtype == torch.bool else 1)])
    if table.dtype == torch.bool:
        if tuple(table.shape) != sizes:
            raise _misfit(f"truths of shape {list(table.shape)}", f"{list(sizes)} from dim {dim} on")
        tables = table.nonzero(as_tuple=True)
    else:
        tables = (table,)
        if sizes and table.numel() and not -sizes[0] <= int(table.min()) <= int(table.max()) < sizes[0]:
            raise _misfit(f"{int(table.min())} to {int(table.max())}", f"{-sizes[0]} to {sizes[0] - 1} in dim {dim}")
    where, device = GlobalLayout(x.placement, (broadcast,) * x.placement.ndim), x._local_tensor.device
    member = here().rank in x.placement
    return [
        wrap(each.to(device) if member else each.new_empty((0,) * each.ndim, device=device), each.shape, where)
        for each in tables
    ]


def _misfit(given: str, allowed: str) -> IndexError:
    text = explain("a list does not fit as an index", given=given, allowed=allowed, fix="choose what is there")
    return IndexError(text)
