"""The one executor: it runs any list of actions, pipeline or not, and fires the events that strategies wait for.

A rank's part of the model has two *ends*. The first end takes in a microbatch, or what the stage before sent;
the last end computes the loss, or sends to the stage after. Without a pipeline both are on the same rank.

One backward, and when each event fires (a *unit* is a block of layers whose parameters travel together)::

    before_forward(u)  after_forward(u)  ...  before_backward(u)  after_weight_gradients(u, m)  after_action(a)

``after_backward(m)`` comes when autograd is through, before the units that it did not finish: what a strategy has under
way for weights is put in place there. Once a step come ``after_sync``, when the core has summed what it sums, and
``after_optimizer``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shardwright.draws import Draws, RefusesDraws
from shardwright.errors import PlanError, explain
from shardwright.models.structure import call_model
from shardwright.pipeline.actions import Action
from shardwright.pipeline.samples import Samples


class Unit(NamedTuple):
    """A block: its parameters, and the modules that use them, in forward order."""

    name: str
    modules: tuple[str, ...]
    parameters: tuple[str, ...]


class Microbatch(NamedTuple):
    """A share of one step's samples, their places in the global batch, and how many that has.

    ``num_tokens`` is how many tokens each sample has on all ranks together, where these cut sequences.
    """

    inputs: Any
    targets: Any
    samples: range
    num_global: int
    num_tokens: int = 0


def _nothing(*_: Any) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Events:
    """What to do at the edges of units and actions. All are optional; ranks fire them in the same order."""

    before_forward: Callable[[Unit], None] = _nothing
    after_forward: Callable[[Unit], None] = _nothing
    before_backward: Callable[[Unit], None] = _nothing
    after_backward: Callable[[int], None] = _nothing
    after_weight_gradients: Callable[[Unit, int], None] = _nothing
    after_action: Callable[[Action], None] = _nothing
    after_sync: Callable[[], None] = _nothing
    after_optimizer: Callable[[], None] = _nothing


class End(Protocol):
    """Where a rank's part of the model begins."""

    def take(self, number: int, microbatch: Microbatch) -> Any:
        """The inputs of one microbatch, for :func:`~shardwright.models.structure.call_model`."""
        ...

    def give_gradient(self, number: int) -> None:
        """Called when the gradient of these inputs is there."""
        ...


class Ends(Protocol):
    """Where a rank's part of the model stops."""

    def give(self, number: int, microbatch: Microbatch, output: Any) -> Tensor:
        """Passes an output on; returns the tensor that backward starts from."""
        ...

    def take_gradient(self, number: int) -> Tensor | None:
        """The gradient of that tensor; None where it is the loss."""
        ...


class MicrobatchEnd:
    """The first end of a model that begins here: the microbatch itself."""

    def take(self, number: int, microbatch: Microbatch) -> Any:
        """See :class:`End`."""
        return microbatch.inputs

    def give_gradient(self, number: int) -> None:
        """Nobody waits for it."""


@dataclass
class LossEnd:
    """The last end of a model that stops here: adds up the loss and what it counts.

    Backward runs on the sum times ``scale``, a number that all ranks know beforehand.
    """

    loss: Callable[[Any, Any], tuple[Tensor, Tensor]]
    scale: float = 1.0
    sums: list[Tensor] = field(default_factory=list)

    def give(self, number: int, microbatch: Microbatch, output: Any) -> Tensor:
        """See :class:`Ends`."""
        result = self.loss(output, microbatch.targets)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise PlanError(
                explain(
                    "a loss gives the sum over its targets and their count",
                    given=type(result).__name__,
                    allowed="a pair (sum, count)",
                    fix="return loss.sum(), targets.numel(): the mean is taken once, over all ranks",
                )
            )
        loss_sum, count = result
        count = torch.as_tensor(count, device=loss_sum.device)
        self.sums.append(torch.stack([loss_sum.detach().double(), count.double()]))
        return loss_sum * self.scale if self.scale != 1 else loss_sum

    def take_gradient(self, number: int) -> Tensor | None:
        """See :class:`Ends`."""
        return None


def held_units(units: Sequence[Unit], held: Collection[str]) -> tuple[Unit, ...]:
    """The units with the parameters that a rank holds; those of which it holds none are left out.

    >>> held_units([Unit("a", ("a",), ("a.w",)), Unit("b", ("b",), ("b.w",))], {"b.w"})
    (Unit(name='b', modules=('b',), parameters=('b.w',)),)
    """
    found = (unit._replace(parameters=tuple(n for n in unit.parameters if n in held)) for unit in units)
    return tuple(unit for unit in found if unit.parameters)


class Executor:
    """Runs the actions of one step on this rank's part of the model.

    ``late`` are the parameters whose gradients a strategy puts in place itself, before ``after_backward`` has returned.
    A microbatch without samples runs like any other, on tensors of no rows: another rank's may have some, and the
    two meet in the same calls.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        events: Iterable[Events],
        draws: Draws,
        samples: Samples | None = None,
        late: Collection[str] = (),
    ) -> None:
        self.model, self.draws, self.samples, self.late = model, draws, samples, frozenset(late)
        self.events = tuple(events)
        self.parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        self.units = held_units(units, self.parameters)
        self._microbatch = 0
        self._has_run = False
        self._fired: set[str] = set()
        self._missing: dict[str, set[str]] = {}
        self._watch()

    def run(self, actions: Sequence[Action], microbatches: Sequence[Microbatch], first: End, last: Ends) -> None:
        """One step from zero gradients to summed ones."""
        starts: dict[int, Tensor] = {}
        for action in actions:
            number, microbatch = action.microbatch, microbatches[action.microbatch]
            if action.kind == "F":
                self.draws.samples = microbatch.samples
                if self.samples is not None:
                    self.samples.begin(microbatch.num_global, number, len(microbatches))
                inputs = first.take(number, microbatch)
                with nullcontext() if self._has_run else RefusesDraws():
                    output = call_model(self.model, inputs)
                self._has_run = True
                starts[number] = last.give(number, microbatch, output)
            elif action.kind == "B":
                self._backward(number, starts.pop(number), first, last)
            for events in self.events:
                events.after_action(action)

    def _backward(self, number: int, start: Tensor, first: End, last: Ends) -> None:
        self._microbatch, self._fired = number, set()
        self._missing = {unit.name: set(unit.parameters) for unit in self.units}
        start.backward(last.take_gradient(number))
        for events in self.events:
            events.after_backward(number)
        first.give_gradient(number)
        for unit in reversed(self.units):  # what autograd did not reach has no gradient to wait for
            self._fire_gradients(unit)

    def _watch(self) -> None:
        """Hooks where units begin and end, and on every parameter, for whoever listens."""
        for unit in self.units:
            for name in unit.parameters:
                parameter = self.parameters[name]
                if parameter.requires_grad and name not in self.late:  # autograd calls hooks of no gradient too
                    parameter.register_post_accumulate_grad_hook(self._on_gradient(unit, name))
            edges = [self.model.get_submodule(module) for module in unit.modules]
            if any(e.before_forward is not _nothing or e.before_backward is not _nothing for e in self.events):
                for module in edges:
                    module.register_forward_pre_hook(self._on_forward(unit))
                    module.register_forward_hook(self._on_output(unit))

    def _on_gradient(self, unit: Unit, name: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            missing = self._missing[unit.name]
            missing.discard(name)
            if not missing:
                self._fire_gradients(unit)

        return hook

    def _fire_gradients(self, unit: Unit) -> None:
        if unit.name not in self._fired:
            self._fired.add(unit.name)
            for events in self.events:
                events.after_weight_gradients(unit, self._microbatch)

    def _on_forward(self, unit: Unit) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            for events in self.events:
                events.before_forward(unit)

        return hook

    def _on_output(self, unit: Unit) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda _: self._fire_backward(unit))
            for events in self.events:
                events.after_forward(unit)

        return hook

    def _fire_backward(self, unit: Unit) -> None:
        for events in self.events:
            events.before_backward(unit)
