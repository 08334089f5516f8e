"""The bytes of a tensor, to compare, hash or write them: equal bytes also where two NaN are not equal numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def bytes_of(tensor: Tensor) -> Tensor:
    """Returns the elements of ``tensor``, in order, as a flat uint8 tensor on its device: a view where it can be one.

    >>> bytes_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.int16).t()).tolist()
    [1, 0, 3, 0, 2, 0, 4, 0]
    """
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1:  # a view with gaps, or of one element many times
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
