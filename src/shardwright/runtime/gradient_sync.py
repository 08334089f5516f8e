"""Gradient sync: all-reduces each param group's gradients, during the backward, over the ranks that share parameters.

Over which axes gradients are summed is derived from the plan. A group is sent as soon as its gradients are final, in
the same order on every rank. Each set of ranks with gradients in common makes up to two all-reduces for a group: one of
gradients that are the same tensors on all of these ranks, and one of the parts of other gradients that all of them
have.

The sum also shows whether any rank's backward has reached a parameter, by the sign of its zeros::

    reached by     rank 0   rank 1      rank 0 sends   rank 1 sends   sum
                   no       no          -0.0           -0.0           -0.0    no gradient, as on one device
                   yes      no          +0.0           -0.0           +0.0    a gradient of zeros

The two differ: with a gradient of zeros an optimizer still applies weight decay and momentum. A sum of floating-point
numbers is a negative zero only if all its terms are. So a rank without a gradient sends negative zeros, and a rank with
one turns a negative zero into a positive one at one element of each part: no message is added. Of a complex number the
real part counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.axes import mesh_axes
from shardwright.comm.axis import Axis
from shardwright.forward_stack import Forward, Rung, wrap
from shardwright.mesh import Coord
from shardwright.plan.param_groups import ParamGroup, held_param_groups
from shardwright.plan.plan import Plan
from shardwright.plan.traffic import is_shared_whole, sync_groups, whole_uses
from shardwright.runtime.executor import Events
from shardwright.sharding.box import Box, Piece, read

UNREACHED = -0.0
"""The value (-0.0) of all elements that a rank sends for a parameter that its backward has not reached."""


@torch.no_grad()
def mark_reached(gradients: Iterable[tuple[Tensor, Sequence[int]]]) -> None:
    """Marks gradients as reached by a backward: negative zeros at some positions become positive, in place.

    ``gradients`` are pairs of a contiguous gradient and the positions in it, counted as if it were flat.
    """
    marks = [flat[place] for flat, places in ((g.view(-1), places) for g, places in gradients) for place in places]
    if marks:
        torch._foreach_add_(marks, 0.0)


def is_reached(summed: Tensor) -> bool:
    """Returns whether any rank's backward has reached a parameter, by the signs of its summed gradient.

    Only a gradient whose elements are all negative zeros was not reached. On the meta device the result is True.

    >>> unreached, gradient = torch.full((3,), UNREACHED), torch.zeros(3)
    >>> mark_reached([(gradient, [0])])
    >>> is_reached(gradient + unreached), is_reached(unreached + unreached)
    (True, False)
    """
    signed = summed.real if summed.is_complex() else summed
    return summed.device.type == "meta" or bool((summed.any() | ~signed.signbit().all()).item())


@dataclass
class _GroupAllReduce:
    """One all-reduce of a param group's gradients over one axis: of whole local gradients, or of boxes of them.

    ``filled``, which all instances share, are parameters with boxes that this rank's backward has not reached. One
    gradient may have boxes in several messages, so only when all are summed is it read whether any rank has reached it.
    """

    name: str
    names: tuple[str, ...]
    axis: Axis
    parameters: list[nn.Parameter]
    boxes: list[tuple[nn.Parameter, Piece, Box]]
    filled: set[nn.Parameter]

    def start(self) -> Callable[[], None]:
        """Starts the all-reduce; returns a function that waits for it and writes the sum into the gradients."""
        if not self.parameters:
            return self._start_boxes()
        unreached = {parameter for parameter in self.parameters if parameter.grad is None}
        gradients = [_contiguous_gradient(parameter) for parameter in self.parameters]
        sent = [gradient.to(self.axis.device) for gradient in gradients]  # offloaded ones are in host memory
        reached = [grad for grad, p in zip(sent, self.parameters, strict=True) if p not in unreached and p.numel()]
        mark_reached((grad, [0]) for grad in reached)
        pending = self.axis.all_reduce_together_async(sent)
        away = [pair for pair in zip(gradients, sent, strict=True) if pair[0] is not pair[1]]

        def finish() -> None:
            pending.wait()
            for gradient, summed in away:
                gradient.copy_(summed)
            away.clear()  # frees the copies on the device
            for parameter in unreached:
                if parameter.grad is not None and parameter.numel() and not is_reached(parameter.grad):
                    with torch._C.DisableTorchFunctionSubclass():
                        parameter.grad = None  # no rank has used it: as on one device

        return finish

    def _start_boxes(self) -> Callable[[], None]:
        self.filled.update(p for p, _, _ in self.boxes if p.grad is None)
        parts = [read(_contiguous_gradient(p), piece, box) for p, piece, box in self.boxes]
        # moved to the device on the stream, before they are read: a part may still be on its way to host memory
        moved = [part.reshape(-1).to(self.axis.device, non_blocking=True) for part in parts]
        message = torch.cat(moved)
        starts = accumulate((part.numel() for part in parts), initial=0)
        boxes = zip(starts, parts, self.boxes, strict=False)
        mark_reached([(message, [at for at, part, (p, *_) in boxes if part.numel() and p not in self.filled])])
        pending = self.axis.all_reduce_async(message)

        def finish() -> None:
            for part, summed in zip(parts, pending.wait().split([p.numel() for p in parts]), strict=True):
                part.copy_(summed.view_as(part))

        return finish


def _contiguous_gradient(parameter: nn.Parameter) -> Tensor:
    """Returns a parameter's gradient as a contiguous tensor; negative zeros if the backward did not reach it."""
    if parameter.grad is None:
        parameter.grad = torch.full_like(parameter, UNREACHED, memory_format=torch.contiguous_format)
    elif not parameter.grad.is_contiguous():
        parameter.grad = parameter.grad.contiguous()
    return parameter.grad


class GradientSync:
    """All-reduces the gradients of each param group over the ranks that share its parameters, overlapping the backward.

    ``joined(names)`` returns the one axis that joins the axes of these names. ``stored`` are the parameters that ZeRO
    stores in another form: their gradients are summed in that form, once ``summed(group)`` is true, that is after
    ZeRO's own reduce-scatters. A parameter that no rank's backward has reached gets no gradient, as on one device.

    Where all indices of an axis compute the same whole gradient, only index 0 may contribute to the sum: on the other
    indices the constructor wraps the modules' forwards in place, so that they see the parameter as a constant.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        coord: Coord,
        joined: Callable[[tuple[str, ...]], Axis],
        stored: Mapping[str, nn.Parameter] = MappingProxyType({}),
        summed: Callable[[str], bool] = lambda group: True,
    ) -> None:
        self.parameters: Mapping[str, nn.Parameter] = {
            name: stored.get(name, p) for name, p in model.named_parameters() if p.requires_grad
        }
        self.sliced = frozenset(name for name in stored if plan.state[name].gradient != plan.compute[name])
        self.param_groups = held_param_groups(plan.param_groups, dict(model.named_parameters()))
        self._filled: set[nn.Parameter] = set()
        self.messages = {group.name: self._messages(plan, group, coord, joined) for group in self.param_groups}
        self._num_left: Counter[str] = Counter()
        self._sent: list[Callable[[], None]] = []
        self._unsent: list[ParamGroup] = []
        self._summed = summed
        self._sliced: list[tuple[str, _GroupAllReduce]] = []
        self._across_stages: list[_GroupAllReduce] = []
        _contribute_once(model, plan, coord)

    def _messages(
        self, plan: Plan, group: ParamGroup, coord: Coord, joined: Callable[[tuple[str, ...]], Axis]
    ) -> list[_GroupAllReduce]:
        messages = []
        for (axes, ranks, _), shares in sync_groups(plan, group, coord).items():
            axis = joined(axes)
            if ranks != axis.ranks:
                axis = axis.subset([axis.ranks.index(rank) for rank in ranks])
            names = tuple(shares)
            whole = _GroupAllReduce(f"{group.name} whole", names, axis, [], [], self._filled)
            parts = _GroupAllReduce(f"{group.name} parts", names, axis, [], [], self._filled)
            for name, boxes in shares.items():
                if name not in self.parameters:
                    continue  # frozen
                parameter, pieces = self.parameters[name], plan.state[name].gradient.pieces(coord)
                if is_shared_whole(plan, name, axes):
                    whole.parameters.append(parameter)
                    continue
                for box in boxes:
                    # a flat slice of a parameter of which this rank has several ranges holds a box row by row
                    inside = ((parameter, piece, piece.whole.intersect(box)) for piece in pieces)
                    held = [(own, piece, part) for own, piece, part in inside if part is not None]
                    parts.boxes += sorted(held, key=lambda share: share[2].start)
            messages += [message for message in (whole, parts) if message.parameters or message.boxes]
        return messages

    def begin(self, param_groups: Sequence[ParamGroup], num_microbatches: int) -> None:
        """Starts a step, in which the param groups are all-reduced in the order given.

        Each is sent after the backward of its last microbatch. Gradients that are sharded in storage are sent when ZeRO
        has summed them. Gradients that pipeline stages share are sent in :meth:`finish`, because stages complete them
        in different orders. If the step before has raised, its messages are waited for first, because other ranks keep
        them until then.
        """
        self._wait()
        self._num_left = Counter({group.name: num_microbatches for group in param_groups})
        self._unsent, self._sliced, self._across_stages = list(param_groups), [], []

    def events(self) -> Events:
        """Returns callbacks for the executor that start the all-reduces during the backward.

        If this rank shares no gradient with another rank, the callbacks do nothing.
        """
        if not any(self.messages.values()):
            return Events()  # the executor then also allows a gradient that comes twice
        return Events(after_weight_gradients=self._after_weight_gradients)

    def _after_weight_gradients(self, group: ParamGroup, microbatch: int) -> None:
        self._num_left[group.name] -= 1
        while self._unsent and not self._num_left[self._unsent[0].name]:
            name = self._unsent.pop(0).name
            for message in self.messages[name]:
                if any(axis in mesh_axes("stages") for axis in message.axis.name.split("+")):
                    self._across_stages.append(message)
                elif self.sliced.intersection(message.names):
                    self._sliced.append((name, message))
                else:
                    self._sent.append(message.start())
        while self._sliced and self._summed(self._sliced[0][0]):
            self._sent.append(self._sliced.pop(0)[1].start())

    def finish(self) -> None:
        """Starts the remaining all-reduces and waits for all of the step, after which gradients are complete.

        The gradient of a parameter that no rank's backward has reached becomes None.
        """
        self._sent += [message.start() for _, message in self._sliced]
        self._sent += [message.start() for message in sorted(self._across_stages, key=lambda message: message.name)]
        self._wait()

    def _wait(self) -> None:
        while self._sent:
            self._sent.pop(0)()
        for parameter in self._filled:
            if parameter.grad is not None and parameter.numel() and not is_reached(parameter.grad):
                with torch._C.DisableTorchFunctionSubclass():
                    parameter.grad = None  # no rank has used it: as on one device
        self._filled.clear()


def _contribute_once(model: nn.Module, plan: Plan, coord: Coord) -> None:
    """Makes only index 0 of an axis contribute a gradient that every index computes whole, and gradient sync sums."""
    names = {id(p): name for name, p in model.named_parameters()}
    constants: dict[nn.Module, dict[str, str]] = {}
    for use, axes in whole_uses(plan):
        if not any(coord[axis] for axis in axes):
            continue
        module = model.get_submodule(use.module)
        keys = [key for key, p in module._parameters.items() if p is not None and names[id(p)] == use.parameter]
        constants.setdefault(module, {}).update(dict.fromkeys(keys, " ".join(axes)))
    for module, axes_by_key in constants.items():
        what = ", ".join(f"{key} a constant: index 0 of {axes} contributes it" for key, axes in axes_by_key.items())
        around = partial(partial, _without, module, tuple(axes_by_key))
        wrap(module, Rung.CONTRIBUTE_ONCE, what, by="core", around=around)


def _without(module: nn.Module, own: Sequence[str], forward: Forward, *args: Any, **named: Any) -> Any:
    """Runs a forward with some parameters detached; unlike a hook, also when the forward is recomputed."""
    kept = {key: module._parameters[key] for key in own}
    for key, parameter in kept.items():
        assert parameter is not None
        module._parameters[key] = parameter.detach()  # type: ignore[assignment]
    try:
        return forward(*args, **named)
    finally:
        module._parameters.update(kept)
