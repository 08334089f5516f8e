"""Row numbers: if code has selected rows by values, they say which token of which sample each row of a tensor is.

Random numbers for such rows are keyed by these numbers (``runtime/selected_rows.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = "_shardwright_rows"
"""The attribute that holds a tensor's row numbers; it is None if the tensor was made of such rows in an unknown way."""


def is_of_rows(tensor: object) -> bool:
    """Returns whether a tensor is computed from rows that code has selected."""
    return hasattr(tensor, _ROWS)


def rows_of(tensor: object) -> Tensor | None:
    """Returns an integer for each row of a tensor, which says which token the row is, or None if that is not known.

    Shapes: returns (..., 1) for a tensor of shape (..., D).
    """
    rows: Tensor | None = getattr(tensor, _ROWS, None)
    return rows


def give_rows(tensor: Tensor, rows: Tensor | None) -> None:
    """Attaches row numbers to a tensor, as :func:`rows_of` returns them; ``rows`` must be constant along its last dim.

    If they are not constant, if their other dims are not those of the tensor, or with None, the tensor's rows count as
    not known.

    >>> x = torch.ones(2, 3)
    >>> give_rows(x, torch.tensor([[4], [7]]))
    >>> rows_of(x).tolist()
    [[4], [7]]
    """
    column = None
    if rows is not None and tensor.dim() >= 2 and rows.dim() and rows.shape[:-1] == tensor.shape[:-1]:
        is_alike = rows.shape[-1] <= 1 or rows.stride(-1) == 0 or not rows.numel()
        column = rows[..., :1] if is_alike else None
    setattr(tensor, _ROWS, column)


def equal_before(numbers: Tensor) -> Tensor:
    """Returns, for each of ``numbers``, how many equal numbers come before it.

    >>> equal_before(torch.tensor([7, 3, 7, 7, 3])).tolist()
    [0, 0, 1, 2, 1]
    """
    order = numbers.argsort(stable=True)
    ordered, places = numbers[order], torch.arange(len(numbers), device=numbers.device)
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    counts = torch.empty_like(numbers)
    counts[order] = places - (places * begins).cummax(0).values if len(numbers) else places
    return counts
