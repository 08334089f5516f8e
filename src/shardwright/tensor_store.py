"""Lets ``global_tensor.save`` and ``load`` call the checkpoint functions, which are in a higher layer.

A lower layer does not import a higher one. So this file declares the functions, and ``shardwright/__init__.py``, which
imports every layer, provides them.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol


class TensorStore(Protocol):
    """The checkpoint functions for global tensors; :mod:`shardwright.checkpoint.tensors` provides them."""

    def save_tensors(
        self, tensors: Mapping[str, Any], folder: str | Path, *, step: int = 0, extra: Mapping[str, Any] | None = None
    ) -> Path:
        """Saves global tensors as a checkpoint, with the user data ``extra``, and returns its path; all ranks call it.

        The path is ``folder/step-00000003`` for step 3. Raises: as :func:`shardwright.checkpoint.tensors.save_tensors`.
        """

    def load_tensors(self, path: str | Path, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fills ``tensors`` in place from a checkpoint, and returns ``extra``, the user data saved with them.

        All ranks call it. ``path`` is a checkpoint, or a folder of which the newest checkpoint is taken. Raises: as
        :func:`shardwright.checkpoint.tensors.load_tensors`.
        """


_PROVIDER: list[Callable[[], TensorStore]] = []


def provide_tensor_store(load_store: Callable[[], TensorStore]) -> None:
    """Sets the function by which :func:`tensor_store` imports the checkpoint functions; ``shardwright`` calls it."""
    _PROVIDER[:] = [load_store]


def tensor_store() -> TensorStore:
    """Returns the checkpoint functions for global tensors, which are imported at the first call."""
    return _PROVIDER[0]()
