"""Updates offloaded parameter shards and optimizer state by param group, so that only one group's are in memory.

::

    backward     | group 2 | group 1 | group 0 |
    optimizer                                  | group 0: read, update, write | group 1 ... | group 2 ... |

    update=optimizer, in the backward:

    backward     | group 2 | group 1             | group 0 |
    optimizer              | group 2: read, update, write | group 1 ... | group 0 ... |

The user's own optimizer makes the updates: its ``step`` is called once for each group, with that group's parameters
alone. Updates wait for the end of the backward where all gradients are needed before the first update: for a gradient
norm, a loss scale, or a stop at NaN. Updates during the backward run in a thread of their own, one group at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.runtime.copy_stream import host_arrival
from shardwright.runtime.mixed_precision import scale_gradients
from shardwright.runtime.offload_storage import OffloadStorage
from shardwright.runtime.optimizer_step import step_without_hooks
from shardwright.strategies.zero.flat_parameter import FlatParameter, UpdateState

_StateKey = tuple[FlatParameter, str, torch.dtype]
"""The key of one tensor of optimizer state: the flat parameter, the state's name (``exp_avg``), the dtype."""

_NO_GROUP = -1
"""In place of a group's index: the parameters that the optimizer steps and that are not offloaded."""


class _BackwardUpdates:
    """The thread that runs the optimizer's updates of param groups during one backward, one at a time."""

    def __init__(self, optimizer: Optimizer, factor: Tensor) -> None:
        self.optimizer, self.factor = optimizer, factor
        self.pool = ThreadPoolExecutor(1)
        self.running: Future[None] | None = None

    def wait(self) -> None:
        """Waits until no update is running; raises its exception if it failed."""
        running, self.running = self.running, None
        if running is not None:
            running.result()


class OffloadedState:
    """A rank's parameter shards and optimizer state in host memory or on disk, updated one param group at a time.

    ``groups`` are the flat parameters of each param group, without the frozen ones, by its name. ``place`` says where
    ``storage`` is: ``host`` or ``disk``.
    """

    def __init__(self, storage: OffloadStorage, groups: Mapping[str, Sequence[FlatParameter]]) -> None:
        self.storage = storage
        self.place: str = storage.target
        self._groups = list(groups.values())
        self._indices = {name: index for index, name in enumerate(groups)}
        self._states: dict[_StateKey, Tensor] = {}
        self._homes: dict[tuple[nn.Parameter, str], Tensor] = {}  # views of _states, one for each parameter
        self._group_of: dict[nn.Parameter, int] = {}
        self._flat_of: dict[nn.Parameter, tuple[FlatParameter, tuple[int, int]]] = {}
        self._updates: _BackwardUpdates | None = None
        self._updated: set[tuple[Optimizer, int]] = set()  # in this step's backward; step() skips them
        for index, flats in enumerate(self._groups):
            for flat in flats:
                for name, parameter in flat.sharded_parameters.items():
                    self._group_of[parameter] = index
                    self._flat_of[parameter] = flat, flat.ranges[name]

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All offloaded tensors: parameter shards and optimizer state."""
        return self.storage.tensors

    def attach(self, optimizer: Optimizer, make: Callable[[Any], Optimizer]) -> None:
        """Makes ``optimizer.step`` update one param group at a time, with its state offloaded.

        All ranks call it: they all-gather whether any of them lacks space for the state.

        ``make`` takes a list of parameter groups and returns a new optimizer of the same kind for them. Hooks of
        ``step`` run once a step, around all groups. A new optimizer for the same parameters reuses the storage of the
        one before.

        Raises: PlanError, on every rank: there is no space on disk for the state.
        """
        keys: dict[_StateKey, None] = {}  # a set that keeps its order: space is allocated in the same way every time
        for group in optimizer.param_groups:
            by_dtype: dict[torch.dtype, list[tuple[str, torch.dtype]]] = {}
            for flat, dtype in ((self._flat_of[p][0], p.dtype) for p in group["params"] if p in self._flat_of):
                if dtype not in by_dtype:
                    by_dtype[dtype] = _state_of(make, group, dtype)
                keys |= {(flat, *state): None for state in by_dtype[dtype]}
        new = [key for key in keys if key not in self._states]
        self.storage.reserve(flat.shard.numel() * dtype.itemsize for flat, _, dtype in new)
        self._states |= {key: self.storage.empty(key[0].shard.numel(), key[2]) for key in new}
        self._move_state(optimizer, self._group_of)  # some, such as Adagrad, allocate state in __init__
        self.put_away()

        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            with torch.enable_grad():
                loss = None if closure is None else closure()
            for index in (*range(len(self._groups)), _NO_GROUP):
                if (optimizer, index) not in self._updated:
                    self._step(optimizer, index)
            self._updated.clear()
            return loss

        optimizer.step = MethodType(Optimizer.profile_hook_step(step), optimizer)  # type: ignore[method-assign]

    def _step(self, optimizer: Optimizer, index: int) -> None:
        """Runs the optimizer's own step with one group's parameters alone in ``optimizer.param_groups``."""
        groups = optimizer.param_groups
        every = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [p for p in group["params"] if self._group_of.get(p, _NO_GROUP) == index]
            mine = [parameter for group in groups for parameter in group["params"]]
            if mine:
                step_without_hooks(optimizer)  # they run once a step, around all param groups
        finally:
            for group, parameters in zip(groups, every, strict=True):
                group["params"] = parameters
        if index != _NO_GROUP:
            self._move_state(optimizer, mine)
            flats = self._groups[index]
            states = (tensor for (flat, *_), tensor in self._states.items() if flat in flats)
            self.storage.put_away([*(flat.shard for flat in flats), *states])

    # ---- updates in the backward

    def begin(self, optimizer: Optimizer, factor: Tensor) -> None:
        """Begins a backward in which ``optimizer`` updates each param group as soon as its gradients are complete.

        Gradients are first multiplied by ``factor``, a tensor of one element, and set to None after the update.
        """
        self._updated.clear()
        factor = factor if factor.is_meta else factor.to("cpu", non_blocking=True)  # copied before the gradients are
        self._updates = _BackwardUpdates(optimizer, factor)

    def gradients_published(self, name: str) -> None:
        """Starts, in a thread, the optimizer's update of the param group ``name``, whose gradients are complete.

        It first waits for the update of the group before, and raises that update's exception if it failed. Outside of
        :meth:`begin` and :meth:`end` it does nothing.
        """
        if self._updates is not None:
            index = self._indices[name]
            for flat in self._groups[index]:  # before the thread writes the next step's values
                flat.update_state = UpdateState.SHARD_UPDATED
            self._updates.wait()
            arrived = host_arrival(self.storage.device)
            self._updates.running = self._updates.pool.submit(self._update, self._updates, index, arrived)
            self._updated.add((self._updates.optimizer, index))

    def _update(self, updates: _BackwardUpdates, index: int, arrived: Callable[[], None]) -> None:
        arrived()
        every = (p for group in updates.optimizer.param_groups for p in group["params"])
        mine = [p for p in every if self._group_of.get(p) == index and p.grad is not None]
        scale_gradients(mine, updates.factor)
        self._step(updates.optimizer, index)
        for parameter in mine:
            parameter.grad = None

    def end(self) -> None:
        """Waits for the last update that :meth:`gradients_published` has started; raises its exception if it failed."""
        updates, self._updates = self._updates, None
        if updates is not None:
            try:
                updates.wait()
            finally:
                updates.pool.shutdown()

    # ---- where optimizer state is

    def _move_state(self, optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """Moves optimizer state that the optimizer has allocated itself, as in its first step, into the storage."""
        for parameter in parameters:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.numel():
                    home = self.home(parameter, key, value.dtype)
                    if value is not home:
                        state[key] = home.copy_(value)

    def home(self, parameter: nn.Parameter, key: str, dtype: torch.dtype) -> Tensor:
        """Returns the tensor that stores entry ``key``, such as ``exp_avg``, of a parameter's optimizer state.

        For an offloaded parameter every call with the same dtype returns the same memory. For any other parameter each
        call returns a new, uninitialized tensor.
        """
        if parameter not in self._flat_of:
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        home = self._homes.get((parameter, key))
        if home is None or home.dtype != dtype:
            flat, (start, stop) = self._flat_of[parameter]
            state = flat, key, dtype
            if state not in self._states:  # the trial step in attach() did not make this state
                self._states[state] = self.storage.empty(flat.shard.numel(), dtype)
            home = self._homes[parameter, key] = self._states[state][start:stop]
        return home

    def put_away(self) -> None:
        """Releases the process memory of the offloaded tensors that are on disk, until they are used again.

        It also marks all param groups as not updated in this step. It is called whenever stored parameters have
        changed, as after an optimizer step, and when the tensors of a checkpoint's file have been copied.
        """
        self._updated.clear()
        self.storage.put_away(self.tensors)
        for flats in self._groups:
            for flat in flats:
                flat.update_state = UpdateState.NOT_UPDATED


def _state_of(
    make: Callable[[Any], Optimizer], group: Mapping[str, Any], dtype: torch.dtype
) -> list[tuple[str, torch.dtype]]:
    """Returns the names and dtypes of an optimizer's per-element state, found by a step of a two-element parameter."""
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
