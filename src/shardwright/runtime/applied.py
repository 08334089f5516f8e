"""``AppliedStrategy``, what a strategy's ``apply`` returns: event listeners, stored parameters and hooks of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwright.plan.plan import ForwardFrame
from shardwright.runtime.executor import Events, ModelPart
from shardwright.runtime.offload_storage import OffloadStorage

Saving = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""A pair of functions for ``saved_tensors_hooks``: one packs a tensor that autograd saves, one unpacks it."""


class Offload(Protocol):
    """Parameter shards and optimizer state in host memory or on disk, updated one param group after the other."""

    @property
    def place(self) -> str:
        """The kind of storage: ``host`` or ``disk``."""
        ...

    @property
    def storage(self) -> OffloadStorage:
        """The storage in which all offloaded tensors are allocated."""
        ...

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All offloaded parameters and optimizer state, in host memory or on disk."""
        ...

    def attach(self, optimizer: torch.optim.Optimizer, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        """Makes ``optimizer.step`` update one param group at a time, with its state offloaded.

        ``make`` creates an optimizer of the same kind over other parameters.

        Raises: PlanError, on every rank: there is too little memory or disk space for the state.
        """
        ...

    def home(self, parameter: nn.Parameter, key: str, dtype: torch.dtype) -> Tensor:
        """Returns the tensor that stores the entry ``key``, such as ``exp_avg``, of a parameter's optimizer state.

        For a parameter that is not offloaded it is a new tensor beside the parameter.
        """
        ...

    def put_away(self) -> None:
        """Releases the host memory of tensors that are stored on disk, until they are used again."""
        ...

    def begin(self, optimizer: torch.optim.Optimizer, factor: Tensor) -> None:
        """Begins a backward in which ``optimizer`` updates each param group once its gradients are complete.

        Gradients are first scaled by ``factor``.
        """
        ...

    def end(self) -> None:
        """Waits for the updates since :meth:`begin`; the optimizer's own step then skips the updated groups."""
        ...


@dataclass(frozen=True, kw_only=True)
class AppliedStrategy:
    """A strategy's additions to a rank's run, beside the modules that its ``apply`` has changed; all are optional.

    - ``events``: listeners of the executor.
    - ``parameters``: stored parameters, by the name of the model's parameter that they replace for the optimizer and
      for gradients, where a parameter is stored in another form than in computation.
    - ``work``: this rank's part of the model, for pipeline stages.
    - ``frame``: code to run around the model's forward. Pipeline stages call it, because they do not call the model's
      own forward; without a pipeline the model's hooks call it.
    - ``late``: parameters whose gradients autograd does not accumulate; they are final after ``after_backward``.
    - ``summed``: returns whether the stored gradients of the named param group are final in this step, so that gradient
      sync may send them.
    - ``offload``: the state that is stored in host memory or on disk.
    - ``kept``: returns tensors beside parameters that stay on the device between steps, such as unshard buffers.
    - ``receiving``: returns tensors into which messages are received, and which stay on the device between steps.
    - ``summing``: returns tensors in which gradients are summed until they are the ``.grad`` of stored parameters.
    - ``saving``: the strategy's saved-tensor hooks, to be called by hooks that are set inside of them.
    - ``check(values)``: raises PlanError if other code has written to parameters of the model where that would be
      lost. A run calls it before each update of its optimizer, and in the steps in which it compares its ranks with
      ``values`` True: then values are read too, which shows a write that no version counter does.
    """

    events: Events = field(default_factory=Events)
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    work: ModelPart | None = None
    frame: ForwardFrame | None = None
    late: frozenset[str] = frozenset()
    summed: Callable[[str], bool] = lambda group: True
    offload: Offload | None = None
    kept: Callable[[], Iterable[Tensor]] = tuple
    receiving: Callable[[], Iterable[Tensor]] = tuple
    summing: Callable[[], Iterable[Tensor]] = tuple
    saving: Saving | None = None
    check: Callable[[bool], None] = lambda values: None
