"""What a strategy adds to one rank's run: events, parameters at rest, a part of the model, offloaded state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwright.plan.plan import ForwardFrame
from shardwright.runtime.executor import Events, ModelPart


class Offload(Protocol):
    """State that rests in host memory or on disk while nobody works on it: which, and how an optimizer updates it."""

    @property
    def place(self) -> str:
        """Where: ``host`` or ``disk``."""
        ...

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All that rests there."""
        ...

    def attach(self, optimizer: torch.optim.Optimizer, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        """From now on the optimizer steps unit by unit, its state there; ``make`` gives one like it over other groups.

        Raises: PlanError, on every rank: there is no room.
        """
        ...

    def home(self, parameter: nn.Parameter, key: str, dtype: torch.dtype) -> Tensor:
        """Where a value of the optimizer's state rests that has an entry for each of the parameter's."""
        ...

    def put_away(self) -> None:
        """Nobody works on any of it now."""
        ...

    def begin(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """From now on a unit is updated as soon as its gradients are there, times ``factor``: until :meth:`end`."""
        ...

    def end(self) -> None:
        """Waits for what :meth:`begin` has started; the optimizer's own step leaves out what is done."""
        ...


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What a strategy adds to a rank's run beside changed modules; each is optional.

    ``events`` are fired by the executor. ``parameters`` take the place of the model's for the optimizer, where a
    parameter rests in another form than it computes in; they carry the gradients too. ``work`` is this rank's part of
    the model, where it is not the whole. ``frame`` is what is done around the model's forward, for stages, which run
    the modules inside; without stages it is done by hooks. ``late`` are parameters whose gradients do not come from
    autograd: they are in place when ``after_backward`` has returned. ``summed`` says of a unit whether its gradients,
    where they rest elsewhere, are ready in this step for what else is to be summed.
    ``offload`` is where state rests, if that is not this rank's device. ``kept`` gives what stays on the device between
    steps and is no parameter: buffers that parameters become views of. ``saving`` is what it does with what
    autograd saves, and undoes: for those who have hooks of their own inside.
    """

    events: Events = field(default_factory=Events)
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    work: ModelPart | None = None
    frame: ForwardFrame | None = None
    late: frozenset[str] = frozenset()
    summed: Callable[[str], bool] = lambda unit: True
    offload: Offload | None = None
    kept: Callable[[], Iterable[Tensor]] = tuple
    saving: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = None
