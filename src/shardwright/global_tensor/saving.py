"""``save`` and ``load``: write global tensors to a checkpoint, and fill tensors of any layout from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.global_tensor.tensor import GlobalTensor
from shardwright.tensor_store import tensor_store


def save(
    tensors: Mapping[str, GlobalTensor], folder: str | Path, *, step: int = 0, extra: Mapping[str, Any] | None = None
) -> Path:
    """Saves global tensors as the checkpoint ``folder/step-N``, with N from ``step``, and returns its path.

    N has eight digits or more. Every rank of the world calls it. Every element is written once, by the first rank that
    holds it; partial sums are reduced first. ``extra`` is user data to store with the tensors, which must be JSON.

    Raises: CheckpointError, on every rank: an entry is no global tensor, ``extra`` is not JSON, or the disk is full or
        not writable. LayoutError: ranks pass different tensors. PlanError: a gathered view whose base was written to
        since.

    >>> import tempfile
    >>> from shardwright.global_tensor import arange, placement, sbp
    >>> x = arange(4, placement=placement("cpu", ranks=[0]), sbp=sbp.split(0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     extra = load(save({"x": x}, folder, extra={"epoch": 3}), {"x": x.zero_()})
    >>> x.tolist(), extra
    ([0, 1, 2, 3], {'epoch': 3})
    """
    return tensor_store().save_tensors(tensors, folder, step=step, extra=extra)


def load(path: str | Path, tensors: Mapping[str, GlobalTensor]) -> Mapping[str, Any]:
    """Fills global tensors in place from a checkpoint of any layout; returns ``extra``, the user data saved in it.

    ``path`` is a checkpoint, or a folder of which the newest checkpoint is read. Every rank of the world calls the
    function. Tensors keep their layouts; floating-point values are converted to the dtypes of ``tensors``.

    Raises: CheckpointError, on every rank: the checkpoint is missing or broken, is of another format, or lacks a tensor
        of this name, shape and kind of dtype; or a tensor is a gathered view.
    """
    return tensor_store().load_tensors(path, tensors)
