"""Handles Python lists as an index, as in ``x[[0, 2]]``, by turning each list into a replicated global tensor.

Every rank runs the same program and so has the same list, so nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardwright.errors import explain
from shardwright.global_tensor.geometry import GlobalLayout
from shardwright.global_tensor.sbp import broadcast

if TYPE_CHECKING:
    from shardwright.global_tensor.tensor import GlobalTensor


def with_lists(x: GlobalTensor, index: Any) -> Any:
    """Returns ``index``, the index of ``x[index]``, with its lists replaced by replicated global tensors of integers.

    A list of booleans is a mask, and is replaced by one index tensor for each dim that it covers. Lists of anything but
    integers and booleans stay as they are, and so does an index that is itself a list of lists.

    Raises: IndexError: a list that does not fit its dim. It is raised on every rank, so that no rank waits for another.
    """
    entries = index if isinstance(index, tuple) else (index,)
    if isinstance(index, list) and any(isinstance(entry, list) for entry in index):
        return index  # left to torch, which is changing what nested lists mean
    if not any(isinstance(entry, list) and _is_flat(entry) for entry in entries):
        return index
    # ``dim``: the dim of x that the next entry indexes
    takes, new_entries, dim = [_num_dims(entry) for entry in entries], [], 0
    for number, entry in enumerate(entries):
        if entry is Ellipsis:
            dim = x.ndim - sum(takes[number:])
        elif isinstance(entry, list) and _is_flat(entry):
            new_entries += _replicated(x, torch.tensor(entry, dtype=None if entry else torch.int64), dim)
            dim += takes[number]
            continue
        new_entries.append(entry)
        dim += takes[number]
    return tuple(new_entries)


def _is_flat(entry: Sequence[Any]) -> bool:
    return all(isinstance(leaf, int) for leaf in tree_leaves(entry))


def _num_dims(entry: Any) -> int:
    """Returns the number of dims of the tensor that one entry of an index consumes."""
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    if isinstance(entry, list) and _is_flat(entry) and entry:
        entry = torch.tensor(entry)
    return entry.ndim if isinstance(entry, Tensor) and entry.dtype == torch.bool else 1


def _replicated(x: GlobalTensor, table: Tensor, dim: int) -> list[Tensor]:
    from shardwright.global_tensor.creation import local_part
    from shardwright.global_tensor.tensor import wrap  # tensor.py imports this file

    sizes = tuple(x.shape[dim : dim + (table.ndim if table.dtype == torch.bool else 1)])
    if table.dtype == torch.bool:
        if tuple(table.shape) != sizes:
            raise _misfit(f"a mask of shape {list(table.shape)}", f"{list(sizes)} from dim {dim} on")
        tables = table.nonzero(as_tuple=True)
    else:
        tables = (table,)
        if sizes and table.numel() and not -sizes[0] <= int(table.min()) <= int(table.max()) < sizes[0]:
            raise _misfit(f"{int(table.min())} to {int(table.max())}", f"{-sizes[0]} to {sizes[0] - 1} in dim {dim}")
    layout, device = GlobalLayout(x.placement, (broadcast,) * x.placement.ndim), x._local_tensor.device
    return [wrap(local_part(tensor, layout, device), tensor.shape, layout) for tensor in tables]


def _misfit(given: str, allowed: str) -> IndexError:
    text = explain("a list does not fit as an index", given=given, allowed=allowed, fix="give indices within the dim")
    return IndexError(text)
