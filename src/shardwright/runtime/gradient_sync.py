"""Gradient sync, derived from the plan: each unit's partial gradients become whole while backward goes on.

A unit is sent as soon as its gradients are there, in the same order on every rank: one message for the gradients that
the same ranks share whole, one for the boxes of those that they share in part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.comm.axis import Axis
from shardwright.forward_stack import Forward, Rung, wrap
from shardwright.mesh import Coord
from shardwright.plan.param_groups import ParamGroup, held_param_groups
from shardwright.plan.plan import Plan
from shardwright.plan.traffic import is_shared_whole, sync_groups, whole_uses
from shardwright.runtime.executor import Events
from shardwright.runtime.unused_parameters import UNREACHED, is_reached, mark_reached
from shardwright.sharding.box import Box, Piece, read


@dataclass
class _Group:
    """What one unit sums over one axis, in one message: whole local gradients, or boxes of them."""

    name: str
    names: tuple[str, ...]
    axis: Axis
    parameters: list[nn.Parameter]
    boxes: list[tuple[nn.Parameter, Piece, Box]]

    def start(self) -> Callable[[], None]:
        """Sends the message; returns what waits for the sum and puts it where it belongs."""
        if not self.parameters:
            return self._start_boxes()
        unreached = {parameter for parameter in self.parameters if parameter.grad is None}
        gradients = [_contiguous_gradient(parameter) for parameter in self.parameters]
        sent = [gradient.to(self.axis.device) for gradient in gradients]  # what is offloaded has left the device
        reached = [each for each, p in zip(sent, self.parameters, strict=True) if p not in unreached and p.numel()]
        mark_reached((each, [0]) for each in reached)
        pending = self.axis.all_reduce_together_async(sent)
        away = [pair for pair in zip(gradients, sent, strict=True) if pair[0] is not pair[1]]

        def finish() -> None:
            pending.wait()
            for gradient, summed in away:
                gradient.copy_(summed)
            away.clear()  # nothing is held that the step does not need
            for parameter in unreached:
                if parameter.grad is not None and parameter.numel() and not is_reached(parameter.grad):
                    parameter.grad = None  # no rank's forward did: as on one device

        return finish

    def _start_boxes(self) -> Callable[[], None]:
        parts = [read(_contiguous_gradient(p), piece, box) for p, piece, box in self.boxes]
        message = torch.cat([part.reshape(-1) for part in parts]).to(self.axis.device)
        pending = self.axis.all_reduce_async(message)

        def finish() -> None:
            for part, summed in zip(parts, pending.wait().split([p.numel() for p in parts]), strict=True):
                part.copy_(summed.view_as(part))

        return finish


def _contiguous_gradient(parameter: nn.Parameter) -> Tensor:
    """The parameter's gradient, to be overwritten with a sum; zeros where backward did not reach it."""
    if parameter.grad is None:
        parameter.grad = torch.full_like(parameter, UNREACHED, memory_format=torch.contiguous_format)
    elif not parameter.grad.is_contiguous():
        parameter.grad = parameter.grad.contiguous()
    return parameter.grad


class GradientSync:
    """Sums every unit's gradients over those who share them; ``finish`` waits for all.

    Those that rest elsewhere than they are computed, ``resting``, are summed there, once ``summed`` says of their unit
    that they have come.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        coord: Coord,
        joined: Callable[[tuple[str, ...]], Axis],
        resting: Mapping[str, nn.Parameter] = MappingProxyType({}),
        summed: Callable[[str], bool] = lambda unit: True,
    ) -> None:
        self.parameters: Mapping[str, nn.Parameter] = {
            name: resting.get(name, p) for name, p in model.named_parameters() if p.requires_grad
        }
        self.sliced = frozenset(name for name in resting if plan.state[name].gradient != plan.compute[name])
        self.param_groups = held_param_groups(plan.param_groups, dict(model.named_parameters()))
        self.groups = {unit.name: self._groups(plan, unit, coord, joined) for unit in self.param_groups}
        self._left: Counter[str] = Counter()
        self._sent: list[Callable[[], None]] = []
        self._waiting: list[ParamGroup] = []
        self._summed = summed
        self._in_slices: list[tuple[str, _Group]] = []
        self._at_the_end: list[_Group] = []
        _contribute_once(model, plan, coord)

    def _groups(
        self, plan: Plan, unit: ParamGroup, coord: Coord, joined: Callable[[tuple[str, ...]], Axis]
    ) -> list[_Group]:
        found = []
        for (axes, ranks, _), shares in sync_groups(plan, unit, coord).items():
            axis = joined(axes)
            if ranks != axis.ranks:
                axis = axis.subset([axis.ranks.index(rank) for rank in ranks])
            names = tuple(shares)
            whole = _Group(f"{unit.name} whole", names, axis, [], [])
            parts = _Group(f"{unit.name} parts", names, axis, [], [])
            for name, boxes in shares.items():
                if name not in self.parameters:
                    continue  # frozen
                parameter, pieces = self.parameters[name], plan.state[name].gradient.pieces(coord)
                if is_shared_whole(plan, name, axes):
                    whole.parameters.append(parameter)
                    continue
                for box in boxes:
                    (piece,) = (piece for piece in pieces if piece.whole.intersect(box) is not None)
                    parts.boxes.append((parameter, piece, box))
            found += [each for each in (whole, parts) if each.parameters or each.boxes]
        return found

    def begin(self, param_groups: Sequence[ParamGroup], num_microbatches: int) -> None:
        """Starts a step: the param_groups' gradients are sent in this order, each after its last microbatch's backward.

        Gradients in slices are sent as their own sums come in. What stages share is sent at the end, since they come to
        it in different orders. What a step that raised has sent is waited for, since others hold it until then.
        """
        self._wait()
        self._left = Counter({unit.name: num_microbatches for unit in param_groups})
        self._waiting, self._in_slices, self._at_the_end = list(param_groups), [], []

    def events(self) -> Events:
        """What the executor tells it."""
        if not any(self.groups.values()):
            return Events()  # nothing is sent, and so nothing too early
        return Events(after_weight_gradients=self._after_weight_gradients)

    def _after_weight_gradients(self, unit: ParamGroup, microbatch: int) -> None:
        self._left[unit.name] -= 1
        while self._waiting and not self._left[self._waiting[0].name]:
            name = self._waiting.pop(0).name
            for group in self.groups[name]:
                if "pp" in group.axis.name.split("+"):
                    self._at_the_end.append(group)
                elif self.sliced.intersection(group.names):
                    self._in_slices.append((name, group))
                else:
                    self._sent.append(group.start())
        while self._in_slices and self._summed(self._in_slices[0][0]):
            self._sent.append(self._in_slices.pop(0)[1].start())

    def finish(self) -> None:
        """Waits for every sum."""
        self._sent += [group.start() for _, group in self._in_slices]
        self._sent += [group.start() for group in sorted(self._at_the_end, key=lambda group: group.name)]
        self._wait()

    def _wait(self) -> None:
        while self._sent:
            self._sent.pop(0)()


def _contribute_once(model: nn.Module, plan: Plan, coord: Coord) -> None:
    """Where a use gives a whole gradient that will be summed with terms, lets one index alone contribute it."""
    uses: Sequence[tuple[Any, tuple[str, ...]]] = whole_uses(plan)
    names = {id(p): name for name, p in model.named_parameters()}
    constants: dict[nn.Module, dict[str, str]] = {}
    for use, axes in uses:
        if not any(coord[axis] for axis in axes):
            continue
        module = model.get_submodule(use.module)
        own = [key for key, p in module._parameters.items() if p is not None and names[id(p)] == use.parameter]
        constants.setdefault(module, {}).update(dict.fromkeys(own, " ".join(axes)))
    for module, found in constants.items():
        what = ", ".join(f"{key} a constant: index 0 of {axes} contributes it" for key, axes in found.items())
        around = partial(partial, _without, module, tuple(found))
        wrap(module, Rung.CONTRIBUTE_ONCE, what, by="core", around=around)


def _without(module: nn.Module, own: Sequence[str], forward: Forward, *args: Any, **named: Any) -> Any:
    """A forward to which these parameters are constants. No hook: what is computed again is computed like this too."""
    kept = {key: module._parameters[key] for key in own}
    for key, parameter in kept.items():
        assert parameter is not None
        module._parameters[key] = parameter.detach()  # type: ignore[assignment]
    try:
        return forward(*args, **named)
    finally:
        module._parameters.update(kept)
