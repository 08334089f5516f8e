"""Describes a model's classes, settings and shapes as bytes, by which the file of its kept rehearsals is found.

Models of equal bytes and equal code give equal rehearsals. The bytes are a pickle that is only compared: the library
never unpickles it.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn

MOST_VALUES = 1 << 20
"""The most elements of a buffer whose values can be described. For a model with a larger one nothing is kept."""


def described(*values: Any) -> bytes:
    """Returns bytes that are equal for values (modules and plain data) for which plans find the same.

    Raises: ValueError: the values cannot be described: they hold functions without a name, large buffers with values,
        or modules that refuse to be pickled, as those with a parametrization do.

    >>> described(nn.Linear(2, 3)) == described(nn.Linear(2, 3)) != described(nn.Linear(2, 4))
    True
    """
    file = io.BytesIO()
    try:
        _ModelSnapshot(file).dump(values)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"values that cannot be told from others: {error}") from error
    return file.getvalue()


class _ModelSnapshot(pickle.Pickler):
    """A pickler that writes a number and the shape in place of a tensor, and of buffers also the values.

    A tensor that occurs again has the same number.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        number = self._numbers.setdefault(id(value), len(self._numbers))
        values = b"" if value.is_meta or isinstance(value, nn.Parameter) else _values_of(value)
        kind = type(value).__qualname__
        return number, kind, tuple(value.shape), value.stride(), str(value.dtype), value.requires_grad, values


def _values_of(tensor: Tensor) -> bytes:
    if tensor.numel() > MOST_VALUES:
        raise pickle.PicklingError("a tensor with too many values")
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
