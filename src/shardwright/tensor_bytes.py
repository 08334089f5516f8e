"""Gives the bytes of a tensor, to compare, hash or write them; NaNs of the same bits have equal bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the bytes of a tensor's elements, in row-major order, as a flat uint8 tensor on the same device.

    It is a view of the tensor's memory if possible, or else a copy.

    >>> bytes_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.int16).t()).tolist()
    [1, 0, 3, 0, 2, 0, 4, 0]
    """
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1:  # a view with gaps, or one that repeats a single element
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
