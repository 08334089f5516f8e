"""What one rank does with its slices, as the events of a run: gather, drop, sum gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.analysis.structure import owners
from shardwright.comm.axis import Axis, Pending
from shardwright.mesh import Coord, balanced
from shardwright.plan.param_groups import ParamGroup
from shardwright.plan.plan import Plan
from shardwright.plan.schedule import Action
from shardwright.runtime.applied import Applied
from shardwright.runtime.executor import Events
from shardwright.runtime.offload_storage import OffloadStorage
from shardwright.strategies.zero.flat_groups import Group, chunks_with
from shardwright.strategies.zero.flat_parameter import Flat
from shardwright.strategies.zero.offloaded_update import Offloaded
from shardwright.strategies.zero.prefetch import Block, Window
from shardwright.strategies.zero.unshard_order import compare


class _Watched(dict[str, Any]):
    """A module's parameters: whoever reads one as an attribute makes its unit whole first.

    Read by other code than its forward, which runs ``num_running`` times just now, it is lent: one expression may read
    several. So does who reads all of them while an action runs; they may be kept in a list, and stay until it ends.
    ``get`` reads them as they are, for code that has asked for the unit.
    """

    def __init__(self, parameters: Mapping[str, Any], homes: Mapping[str, Block], window: Window) -> None:
        super().__init__(parameters)
        self.homes, self.window = homes, window
        self.num_running = 0

    def __getitem__(self, name: str) -> Any:
        if name in self.homes:
            self.window.need(self.homes[name], lend=not self.num_running)
        return super().__getitem__(name)

    def items(self) -> Any:
        self._need_all()
        return super().items()

    def values(self) -> Any:
        self._need_all()
        return super().values()

    def _need_all(self) -> None:
        if self.window.is_running:
            for block in self.homes.values():
                self.window.need(block, keep=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Watched:
        return _Watched({name: deepcopy(each, memo) for name, each in super().items()}, self.homes, self.window)

    def enter(self) -> None:
        """Its module's forward begins."""
        self.num_running += 1
        self.window.take_back()
        for block in dict.fromkeys(self.homes.values()):
            self.window.need(block)

    def leave(self) -> None:
        """Its module's forward is over."""
        self.num_running -= 1


class SlicedState:
    """A rank's parameters in slices over one axis.

    ``stage`` 1 sums gradients once a step, 2 after each microbatch; 3 drops the whole parameters after use as well.
    What rests does so in ``storage``, where there is one. Gradients are summed in the order of the units, the same on
    all ranks: autograd has an order of its own where samples go different ways. ``everyone`` are all ranks, who are
    told where gathers would have to follow those ways.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        axis: Axis,
        chosen: tuple[Group, ...],
        stage: int,
        ahead: int,
        everyone: Axis,
        storage: OffloadStorage | None = None,
    ) -> None:
        self.stage, self.ahead, self.num_microbatches = stage, ahead, plan.layout.num_microbatches
        self.drops = stage == 3 and axis.size > 1
        named = dict(model.named_parameters())
        flats: dict[str, list[tuple[Group, Flat]]] = {}
        held = [(group, {name: named[name] for name in group.parameters if name in named}) for group in chosen]
        if storage is not None:
            storage.reserve(_slice_bytes(mine, axis) for _, mine in held if mine)
        for group, mine in held:
            if mine:
                first = group.parameters[0]
                dtype, wide = plan.dtypes[first], first in plan.wide_sums
                flat = Flat(mine, axis, keeps=not self.drops, dtype=dtype, wide=wide, storage=storage)
                flats.setdefault(group.unit, []).append((group, flat))
        users: dict[str, set[str]] = {}
        for path, _, _, name in owners(model):
            users.setdefault(name, set()).add(path)
        self.blocks = {
            unit: Block(
                unit,
                tuple(flat for _, flat in each),
                stays=any(len(users[name]) > 1 for _, flat in each for name in flat.parameters),
            )
            for unit, each in flats.items()
        }
        self.trained = {unit: [flat for group, flat in each if group.trained] for unit, each in flats.items()}
        self.offloaded = None if storage is None else Offloaded(storage, self.trained)
        chunks = _chunks(plan, self.blocks, plan.mesh.coord(axis.ranks[axis.index]))
        in_chunks = {
            chunk: [block for unit, block in self.blocks.items() if chunk in chunks[unit]]
            for chunk in sorted(set().union(*chunks.values()))
        }
        self.window = Window(tuple(self.blocks.values()), ahead, self.drops, in_chunks)
        self._completed_in = {unit: min(chunks[unit]) for unit, each in reversed(self.trained.items()) if each}
        self._compare = partial(compare, self.window.made, everyone, plan.mesh.groups(axis.name))
        self._last_forward = Action("F", self.num_microbatches - 1) if plan.schedule is None else None
        self._answers: list[Callable[[], None]] = []
        self._waiting: list[str] = []
        self._ready: list[str] = []
        self._left: dict[str, int] = {}
        self._sent: list[tuple[str, list[tuple[Flat, Pending[Tensor]]]]] = []
        self._summed: set[str] = set()
        self._is_in_doubt = self._evaluated = False
        self._watch(model)

    def applied(self) -> Applied:
        """What a run needs to know."""
        flats = [flat for block in self.blocks.values() for flat in block.flats]
        resting = {name: parameter for flat in flats for name, parameter in flat.resting.items()}
        events = Events(
            restart=self._restart,
            during=self._during,
            after_weight_gradients=self._after_weight_gradients,
            before_sync=self._before_sync,
            after_optimizer=self._after_optimizer,
        )
        return Applied(
            events=events,
            parameters=resting,
            offload=self.offloaded,
            summed=self._is_summed,
            kept=lambda: _wholes(flats),
            saving=(self.window.save, self.window.take_out) if self.drops else None,
        )

    def _watch(self, model: nn.Module) -> None:
        """Before a module runs, and before anyone else reads its parameters, they are there."""
        homes = {name: block for block in self.blocks.values() for flat in block.flats for name in flat.parameters}
        by_module: dict[nn.Module, dict[str, Block]] = {}
        for _, module, own, name in owners(model):
            if name in homes:
                by_module.setdefault(module, {})[own] = homes[name]
        for module, own_homes in by_module.items():
            watched = _Watched(module._parameters, own_homes, self.window)
            module._parameters = watched
            module.register_forward_pre_hook(_calling(watched.enter), prepend=True)
            module.register_forward_hook(_calling(watched.leave), always_call=True)

    @contextmanager
    def _during(self, action: Action) -> Iterator[None]:
        self._waiting = [unit for unit, chunk in self._completed_in.items() if chunk == action.chunk]
        with self.window.during(action):
            yield
            self._send(sorted(self._ready, key=list(self._completed_in).index))
        if not torch.is_grad_enabled():
            self._evaluated = True
        elif action == self._last_forward:
            self._answers.append(self._compare_calls())  # heard before a backward sums what the others do not

    def _hear(self) -> None:
        while self._answers:
            self._answers.pop()()

    def _compare_calls(self) -> Callable[[], None]:
        """Starts to ask whether all ranks have made the same; returns what waits, and raises where they have not."""
        if not self.drops:
            return lambda: None
        wait = self._compare()
        self.window.made.clear()
        return wait

    def _after_optimizer(self) -> None:
        self._is_in_doubt = False
        self.window.changed()
        if self.offloaded is not None:
            self.offloaded.put_away()

    def _restart(self) -> None:
        """Lets go of what a step has left that raised, on all ranks alike; and of wholes that nobody vouches for.

        Forwards alone have no end of a step: what they made is compared here.
        """
        for _, sent in self._sent:
            for _, pending in sent:
                pending.wait()  # others hold it until then
        self._sent.clear()
        self._ready.clear()
        self._left.clear()
        self._summed.clear()
        for flat in (flat for flats in self.trained.values() for flat in flats):
            flat.forget_gradient()
        self.window.end()
        if any(flat.is_updated for flats in self.trained.values() for flat in flats):
            self._after_optimizer()  # its units that have been updated stay so
        elif self._is_in_doubt:
            self.window.changed()
        if self._evaluated:
            self._evaluated = False
            self._answers.append(self._compare_calls())
        self.window.made.clear()
        self._hear()

    # ---- gradients

    def _after_weight_gradients(self, unit: ParamGroup, microbatch: int) -> None:
        if not self.trained.get(unit.name):
            return
        if self.stage == 1 and self._left.get(unit.name, self.num_microbatches) > 1:
            self._count(unit.name)
            for flat in self.trained[unit.name]:
                flat.keep_gradients()
            return
        self._ready.append(unit.name)
        while self._waiting and self._waiting[0] in self._ready:
            self._send([self._waiting.pop(0)])

    def _send(self, names: Sequence[str]) -> None:
        """Starts the sums of units whose gradients are there."""
        self._hear()
        for name in names:
            self._ready.remove(name)
            self._count(name)
            if self.drops:
                self.window.made.append(f"a sum of '{name}'")
            self._sent.append((name, [(flat, flat.send_gradients()) for flat in self.trained[name]]))
            while len(self._sent) > self.ahead:
                self._receive()

    def _count(self, name: str) -> None:
        self._left[name] = self._left.get(name, self.num_microbatches) - 1

    def _receive(self) -> None:
        name, sent = self._sent.pop(0)
        for flat, pending in sent:
            flat.add_gradient(pending.wait())
        if not self._left[name] and all(name != other for other, _ in self._sent):
            self._show(name)

    def _show(self, name: str) -> None:
        """The unit's gradients are summed over the axis: others may go on with them."""
        for flat in self.trained[name]:
            flat.show_gradient()
        self._summed.add(name)
        if self.offloaded is not None:
            self.offloaded.gradients_are_there(name)

    def _is_summed(self, name: str) -> bool:
        return name in self._summed

    def _before_sync(self) -> None:
        self._hear()
        self._answers.append(self._compare_calls())
        while self._sent:
            self._receive()
        self._hear()
        for name in self.trained:
            if name not in self._summed:
                self._show(name)
        self._left.clear()
        self._summed.clear()
        self._is_in_doubt = True  # an optimizer made by hand tells nobody that it has stepped


def _chunks(plan: Plan, units: Iterable[str], coord: Coord) -> Mapping[str, Sequence[int]]:
    """The chunks that use each unit; what none uses belongs to the first that is here."""
    mine = (0,) if plan.schedule is None else plan.schedule.chunks_of(coord["pp"])
    return {unit: chunks_with(plan, unit, coord) or mine[:1] for unit in units}


def _calling(what: Callable[[], None]) -> Callable[..., None]:
    """A hook; a copy of the module has the same one, and not a copy of what it calls."""
    return lambda *_: what()


def _wholes(flats: Iterable[Flat]) -> Iterator[Tensor]:
    return (flat.whole for flat in flats if flat.whole is not None)


def _slice_bytes(parameters: Mapping[str, nn.Parameter], axis: Axis) -> int:
    """What this rank's slice of a sequence takes."""
    cuts = balanced(sum(p.numel() for p in parameters.values()), axis.size)
    some = next(iter(parameters.values()))
    return (cuts[axis.index + 1] - cuts[axis.index]) * some.element_size()
