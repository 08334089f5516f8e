"""Updates of state that rests in a storage: unit by unit, so that one unit's state is in hand at once.

::

    backward     | unit 2 | unit 1 | unit 0 |
    optimizer                               | unit 0 out, update, away | unit 1 ... | unit 2 ... |

    beside it:   | unit 2 | unit 1          | unit 0 |
                          | unit 2 out, update, away | unit 1 ... | unit 0 ... |

The person's own optimizer does it, told each time of one unit's parameters alone. A norm over all gradients, a loss
scale and a stop at NaN need every gradient before the first update: then the updates follow the backward. Beside the
backward they run in a thread of their own, one unit at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.runtime.offload_storage import OffloadStorage
from shardwright.strategies.zero.flat_parameter import Flat

_Place = tuple[Flat, str, torch.dtype]
"""One of the states of a slice: its key, and its dtype."""

_REST = -1
"""The number of what an optimizer steps that is in no unit."""


class _Early:
    """Updates beside a backward, one at a time."""

    def __init__(self, optimizer: Optimizer, factor: float) -> None:
        self.optimizer, self.factor = optimizer, factor
        self.pool = ThreadPoolExecutor(1)
        self.running: Future[None] | None = None

    def wait(self) -> None:
        """Until nothing is under way; raises what went wrong there."""
        running, self.running = self.running, None
        if running is not None:
            running.result()


class Offloaded:
    """The state of a rank's slices in a storage, by units; see :class:`shardwright.plan.Offload`."""

    def __init__(self, storage: OffloadStorage, units: Mapping[str, Sequence[Flat]]) -> None:
        self.storage = storage
        self.place: str = storage.place
        self._units = list(units.values())
        self._numbers = {name: number for number, name in enumerate(units)}
        self._homes: dict[tuple[nn.Parameter, str], Tensor] = {}
        self._states: dict[_Place, Tensor] = {}
        self._unit_of: dict[nn.Parameter, int] = {}
        self._flat_of: dict[nn.Parameter, tuple[Flat, tuple[int, int]]] = {}
        self._early: _Early | None = None
        self._done: set[tuple[Optimizer, int]] = set()
        for number, unit in enumerate(self._units):
            for flat in unit:
                for name, parameter in flat.resting.items():
                    self._unit_of[parameter] = number
                    self._flat_of[parameter] = flat, flat.ranges[name]

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All that rests there: slices, and the optimizer's state."""
        return self.storage.tensors

    def attach(self, optimizer: Optimizer, make: Callable[[Any], Optimizer]) -> None:
        """From now on the optimizer steps unit by unit, and its state rests here. All ranks call it.

        ``make`` gives another one like it, over other groups. Hooks of its step run once a step, around all units. An
        optimizer takes over the room of one that had the same parameters before.

        Raises: PlanError, on every rank: there is no room for the state.
        """
        wanted: dict[_Place, None] = {}  # in order
        for group in optimizer.param_groups:
            kept: dict[torch.dtype, list[tuple[str, torch.dtype]]] = {}
            for flat, dtype in ((self._flat_of[p][0], p.dtype) for p in group["params"] if p in self._flat_of):
                if dtype not in kept:
                    kept[dtype] = _state_of(make, group, dtype)
                wanted |= {(flat, *each): None for each in kept[dtype]}
        new = [place for place in wanted if place not in self._states]
        self.storage.reserve(flat.slice.numel() * dtype.itemsize for flat, _, dtype in new)
        self._states |= {place: self.storage.empty(place[0].slice.numel(), place[2]) for place in new}
        self._bring_home(optimizer, self._unit_of)  # what it began with
        self.put_away()

        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            with torch.enable_grad():
                loss = None if closure is None else closure()
            for number in (*range(len(self._units)), _REST):
                if (optimizer, number) not in self._done:
                    self._step(optimizer, number)
            self._done.clear()
            return loss

        optimizer.step = MethodType(Optimizer.profile_hook_step(step), optimizer)  # type: ignore[method-assign]

    def _step(self, optimizer: Optimizer, number: int) -> None:
        """The optimizer's own step, of one unit."""
        groups = optimizer.param_groups
        every = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [p for p in group["params"] if self._unit_of.get(p, _REST) == number]
            mine = [parameter for group in groups for parameter in group["params"]]
            if mine:
                _plain_step(optimizer)
        finally:
            for group, parameters in zip(groups, every, strict=True):
                group["params"] = parameters
        if number != _REST:
            self._bring_home(optimizer, mine)
            unit = self._units[number]
            states = (tensor for (flat, *_), tensor in self._states.items() if flat in unit)
            self.storage.put_away([*(flat.slice for flat in unit), *states])

    # ---- beside the backward

    def begin(self, optimizer: Optimizer, factor: float) -> None:
        """See :class:`shardwright.plan.Offload`."""
        self._done.clear()
        self._early = _Early(optimizer, factor)

    def gradients_are_there(self, unit: str) -> None:
        """The unit's gradients are summed and shown; the next one waits until this is updated."""
        if self._early is not None:
            number = self._numbers[unit]
            for flat in self._units[number]:
                flat.is_updated = True
            self._early.wait()
            self._early.running = self._early.pool.submit(self._update, self._early, number)
            self._done.add((self._early.optimizer, number))

    def _update(self, early: _Early, number: int) -> None:
        every = (p for group in early.optimizer.param_groups for p in group["params"])
        mine = [p for p in every if self._unit_of.get(p) == number and p.grad is not None]
        if mine and early.factor != 1:
            torch._foreach_mul_([p.grad for p in mine if p.grad is not None], early.factor)
        self._step(early.optimizer, number)
        for parameter in mine:
            parameter.grad = None

    def end(self) -> None:
        """See :class:`shardwright.plan.Offload`."""
        early, self._early = self._early, None
        if early is not None:
            try:
                early.wait()
            finally:
                early.pool.shutdown()

    # ---- where state rests

    def _bring_home(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """State that the optimizer has made itself, as in its first step, goes where it will rest."""
        for parameter in parameters:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.numel():
                    home = self.home(parameter, key, value.dtype)
                    if value is not home:
                        state[key] = home.copy_(value)

    def home(self, parameter: nn.Parameter, key: str, dtype: torch.dtype) -> Tensor:
        """Where a value of the optimizer's state rests that has an entry for each of the parameter's."""
        if parameter not in self._flat_of:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        found = self._homes.get((parameter, key))
        if found is None or found.dtype != dtype:
            flat, (start, stop) = self._flat_of[parameter]
            place = flat, key, dtype
            if place not in self._states:
                self._states[place] = self.storage.empty(flat.slice.numel(), dtype)
            found = self._homes[parameter, key] = self._states[place][start:stop]
        return found

    def put_away(self) -> None:
        """Parameters have changed, and nobody works on any of it now."""
        self._done.clear()
        self.storage.put_away(self.tensors)
        for unit in self._units:
            for flat in unit:
                flat.is_updated = False


def _plain_step(optimizer: Optimizer) -> None:
    """The step of the optimizer's class, without the hooks that it calls: these are called once, around all units."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        type(optimizer).step(optimizer)
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks


def _state_of(
    make: Callable[[Any], Optimizer], group: Mapping[str, Any], dtype: torch.dtype
) -> list[tuple[str, torch.dtype]]:
    """What an optimizer keeps for each element of a group's parameters, by key and dtype: found out by a step."""
    probe = nn.Parameter(torch.zeros(2, dtype=dtype))
    options = {key: value for key, value in group.items() if key != "params"}
    same = make([{**options, "params": [probe]}])
    probe.grad = torch.ones_like(probe)
    same.step()
    return [
        (key, value.dtype)
        for key, value in same.state[probe].items()
        if isinstance(value, Tensor) and value.shape == probe.shape
    ]
