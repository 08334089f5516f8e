"""The numbers of a tensor's rows that code has selected by values, by which random numbers are drawn for them."""

from __future__ import annotations

from torch import Tensor

_ROWS = "_shardwright_rows"
"""The attribute of a tensor that has them; None for one whose rows are not known, but depend on such rows."""


def is_of_rows(tensor: object) -> bool:
    """Returns whether a tensor is computed from rows that code has selected."""
    return hasattr(tensor, _ROWS)


def rows_of(tensor: object) -> Tensor | None:
    """Returns the numbers of a tensor's rows, of its shape but for a last dim of 1; None if they are not known."""
    found: Tensor | None = getattr(tensor, _ROWS, None)
    return found


def give_rows(tensor: Tensor, rows: Tensor | None) -> None:
    """Gives a tensor the numbers of its rows, if they have its shape but for a last dim, along which they are alike.

    With None, or where they do not, its rows count as not known.

    >>> import torch
    >>> x = torch.ones(2, 3)
    >>> give_rows(x, torch.tensor([[4], [7]]))
    >>> rows_of(x).tolist()
    [[4], [7]]
    """
    known = rows is not None and tensor.dim() >= 2 and rows.dim() == tensor.dim()
    if known and rows is not None:
        alike = rows.shape[-1] <= 1 or rows.stride(-1) == 0 or not rows.numel()
        known = alike and rows.shape[:-1] == tensor.shape[:-1]
    setattr(tensor, _ROWS, rows[..., :1] if known and rows is not None else None)
