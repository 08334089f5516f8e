"""Gives ranks that are threads inputs of their own, where code of the model or the loss writes to them in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardwright.analysis.on_meta.operator_results import cloned
from shardwright.runtime.executor import Microbatch


class BatchCopy:
    """Copies a rank's batches if several ranks may hold the same tensors (``is_shared``) and code writes to these.

    The first training step shows whether code writes to them; until then every batch is copied. A prediction takes the
    inputs of all samples on every rank, so ranks that are threads (``are_threads``) always get copies of them.

    >>> import torch
    >>> inputs, given = BatchCopy(is_shared=True), Microbatch(torch.ones(2), torch.zeros(2), range(2), 2)
    >>> for _ in range(2):
    ...     own = inputs.copied(given)
    ...     _ = own.inputs.sub_(1)
    ...     inputs.note_writes([own])
    >>> given.inputs, own.inputs
    (tensor([1., 1.]), tensor([0., 0.]))
    """

    def __init__(self, *, is_shared: bool, are_threads: bool = False) -> None:
        self._copies, self._are_threads = is_shared, are_threads
        self._is_known = not is_shared

    def copied(self, batch: Microbatch) -> Microbatch:
        """Returns a batch for a step, with copies of its tensors unless it is known that no code writes to them."""
        return replace(batch, inputs=cloned(batch.inputs), targets=cloned(batch.targets)) if self._copies else batch

    def copies_of(self, inputs: Any) -> Any:
        """Returns the inputs for a prediction: copies if ranks are threads, otherwise ``inputs`` themselves."""
        return cloned(inputs) if self._are_threads else inputs

    def note_writes(self, microbatches: Sequence[Microbatch]) -> None:
        """Notes, after the first step, whether it has written to the tensors of its microbatches."""
        if not self._is_known:
            tensors = tree_leaves([(microbatch.inputs, microbatch.targets) for microbatch in microbatches])
            written = (leaf._version for leaf in tensors if isinstance(leaf, Tensor) and not leaf.is_inference())
            self._is_known, self._copies = True, any(written)
