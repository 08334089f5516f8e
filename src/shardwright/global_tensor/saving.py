"""Global tensors saved to a folder and loaded from it, through the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.global_tensor.tensor import GlobalTensor
from shardwright.tensor_store import tensor_store


def save(
    tensors: Mapping[str, GlobalTensor], folder: str | Path, *, step: int = 0, extra: Mapping[str, Any] | None = None
) -> Path:
    """Writes ``folder/step-N`` with these tensors, all ranks of the world together; returns its path.

    Every element is written once, by the first rank that holds it; a sum in parts is added up first.

    Raises: CheckpointError, on every rank, as :func:`shardwright.save`.

    >>> import tempfile
    >>> from shardwright.global_tensor import sbp
    >>> from shardwright.global_tensor.creation import arange
    >>> from shardwright.global_tensor.placement import placement
    >>> x = arange(4, placement=placement("cpu", ranks=[0]), sbp=sbp.split(0))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     extra = load(save({"x": x}, folder, extra={"epoch": 3}), {"x": x.zero_()})
    >>> x.tolist(), extra
    ([0, 1, 2, 3], {'epoch': 3})
    """
    return tensor_store().save_tensors(tensors, folder, step=step, extra=extra)


def load(path: str | Path, tensors: Mapping[str, GlobalTensor]) -> Mapping[str, Any]:
    """Fills these tensors, under any placement and sbp, from a checkpoint that any layout wrote; returns its ``extra``.

    Raises: CheckpointError, on every rank: missing, broken or foreign; or without one of the tensors.
    """
    return tensor_store().load_tensors(path, tensors)
