"""The results of a strategy's ``apply``, from which a run is built: events, stored parameters, a part of the model."""

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
"""A pair of ``saved_tensors_hooks``: packs a tensor that autograd saves, and unpacks it."""


class Offload(Protocol):
    """Parameters and optimizer state that are stored in host memory or on disk between uses, and their update."""

    @property
    def place(self) -> str:
        """Where the offloaded state is stored: ``host`` or ``disk``."""
        ...

    @property
    def storage(self) -> OffloadStorage:
        """The storage that all offloaded tensors are allocated in."""
        ...

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All offloaded parameters and optimizer state, in host memory or on disk."""
        ...

    def attach(self, optimizer: torch.optim.Optimizer, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        """Makes the optimizer step one param group at a time, with its state offloaded.

        ``make`` creates an optimizer of the same kind over other parameters.
        Raises: PlanError, on every rank: too little room.
        """
        ...

    def home(self, parameter: nn.Parameter, key: str, dtype: torch.dtype) -> Tensor:
        """Returns the offloaded tensor for one entry (``key``, as ``exp_avg``) of a parameter's optimizer state."""
        ...

    def put_away(self) -> None:
        """Releases the host memory of tensors that are stored on disk, until their next use."""
        ...

    def begin(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Lets the optimizer step each param group as soon as its gradients, scaled by ``factor``, are final."""
        ...

    def end(self) -> None:
        """Waits for the steps on param groups since :meth:`begin`; the optimizer's own step then skips these."""
        ...


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What a strategy's ``apply`` adds to a rank's run beside changed modules; each field is optional.

    - ``events``: listeners of the executor.
    - ``parameters``: stored parameters, by the name of the model's parameter that they replace for the optimizer and
      for gradients, where a parameter is stored in another form than it computes in.
    - ``work``: this rank's part of the model, for pipeline stages.
    - ``frame``: what is done around the model's forward. Stages, which run the modules inside, call it; else hooks do.
    - ``late``: parameters whose gradients autograd does not accumulate; they are final after ``after_backward``.
    - ``summed``: whether the stored gradients of a param group are final in this step, ready for gradient sync.
    - ``offload``: the state that is stored off this rank's device.
    - ``kept``: returns what stays on the device between steps and is no parameter, such as unshard buffers.
    - ``saving``: the strategy's saved-tensor hooks, to be called by hooks that are set inside of them.
    """

    events: Events = field(default_factory=Events)
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    work: ModelPart | None = None
    frame: ForwardFrame | None = None
    late: frozenset[str] = frozenset()
    summed: Callable[[str], bool] = lambda group: True
    offload: Offload | None = None
    kept: Callable[[], Iterable[Tensor]] = tuple
    saving: Saving | None = None
