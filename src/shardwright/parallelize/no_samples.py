"""Refuses a batch that leaves ranks or microbatches without samples, if the model's code fails without any."""

from __future__ import annotations

from math import prod
from typing import Any
from weakref import ref

import torch
from torch import nn

from shardwright.analysis.objects.marked_inputs import map_samples, packed_in
from shardwright.analysis.on_meta.meta_device import on_meta
from shardwright.analysis.on_meta.module_calls import call_model
from shardwright.analysis.on_meta.operator_results import map_tensors
from shardwright.errors import PlanError
from shardwright.formatting import first_line
from shardwright.parallelize.planning import narrow_model, without_storage
from shardwright.plan.plan import Plan
from shardwright.runtime.empty_batches import support_empty_batches


class NoSampleChecker:
    """Tries a plain model's forward without samples, once and on the meta device, and keeps the error that it raises.

    Most models take such batches. ``plain`` is not kept alive; once it is gone, nothing is refused here.
    """

    def __init__(self, plain: nn.Module | None, plan: Plan) -> None:
        self._plain, self._plan = None if plain is None else ref(plain), plan
        self._failure: str | None = None

    def check(self, inputs: Any, num_global: int, num_microbatches: int) -> None:
        """Raises PlanError, on every rank, if a batch of ``num_global`` samples leaves the model without samples.

        ``inputs`` are this rank's; of them only shapes and dtypes are read.
        """
        copies = prod(self._plan.mesh[axis] for axis in self._plan.row_axes)
        least = copies * num_microbatches
        if num_global >= least:
            return
        if self._failure is None:
            self._failure = self._found(inputs)
        if self._failure:
            counts = {"ranks": copies, "microbatches": num_microbatches}
            parts = " of ".join(f"{count} {what}" for what, count in counts.items() if count > 1)
            raise PlanError(
                "the model's code fails on a part of a batch that has no samples",
                given=f"a batch of {num_global} samples for {parts}, under {self._plan.layout}; without samples the "
                f"model raises {self._failure}",
                allowed=f"{least} samples or more in every batch, the last one too",
                fix=f"write DataLoader(..., batch_size={least}, drop_last=True), or a multiple of {least}; or a layout "
                "of fewer ranks or microbatches",
            )

    def _found(self, inputs: Any) -> str:
        """Returns the model's error text on no samples; "" without an error, or if it fails on samples too."""
        if packed_in(inputs):
            return "what is not known of packed rows and lists of samples"
        plain = None if self._plain is None else self._plain()
        if plain is None:
            return ""
        model = narrow_model(without_storage(plain), self._plan)
        support_empty_batches(model)
        failures = []
        for number in (2, 0):
            try:
                with torch.no_grad(), on_meta(model, guess=True):
                    call_model(model, _like(inputs, number))
                failures.append("")
            except Exception as failure:  # any code of the user's runs here
                failures.append(f"{type(failure).__name__}: {first_line(failure)}")
        return "" if failures[0] else failures[1]


def _like(inputs: Any, number: int) -> Any:
    """Returns inputs like these on the meta device, with ``number`` samples."""
    on_meta = map_tensors(inputs, lambda tensor: tensor.to("meta"))
    return map_samples(on_meta, lambda tensor: tensor.new_empty((number, *tensor.shape[1:])))
