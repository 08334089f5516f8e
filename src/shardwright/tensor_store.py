"""Where ``global_tensor.save`` and ``load`` find the checkpoint, which is a layer above global tensors.

A lower layer does not import a higher one. It says here what it needs, and ``shardwright/__init__.py``, which knows
every layer, says what provides it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol


class TensorStore(Protocol):
    """What writes global tensors into files and reads them back; :mod:`shardwright.checkpoint.tensors` is one."""

    def save_tensors(
        self, tensors: Mapping[str, Any], folder: str | Path, *, step: int = 0, extra: Mapping[str, Any] | None = None
    ) -> Path:
        """Writes ``folder/step-N`` with these tensors; returns its path."""

    def load_tensors(self, path: str | Path, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fills these tensors; returns the ``extra`` that was saved with them."""


_PROVIDER: list[Callable[[], TensorStore]] = []


def provide_tensor_store(load_store: Callable[[], TensorStore]) -> None:
    """Sets the function that loads the store at its first use; ``import shardwright`` calls this once."""
    _PROVIDER[:] = [load_store]


def tensor_store() -> TensorStore:
    """Returns the store that was provided."""
    return _PROVIDER[0]()
