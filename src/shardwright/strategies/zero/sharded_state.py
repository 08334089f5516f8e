"""One rank's ZeRO state at run time: what is unsharded, resharded and reduce-scattered at each event of a step.

::

    event                        stage 1                    stage 2                   stage 3
    a module's forward begins    unshard its group, once    as stage 1                unshard its group, reshard others
    autograd unpacks a weight    -                          -                         as a forward
    after_weight_gradients       reduce-scatter the last    reduce-scatter each       as stage 2
                                 microbatch's sum           microbatch's gradients
    all are reduced              publish: set .grad of the group's sharded parameters (before_sync: of all others)
    an action ends               -                          -                         reshard all
    after_sync                   reshard all, so that their .grad, which is in shards, is not read as None
    after_optimizer              unsharded parameters are out of date
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardwright.analysis.traced.structure import owners
from shardwright.comm.agreement import Difference, PendingDifference, compare_async
from shardwright.comm.axis import Axis
from shardwright.comm.pending import Pending
from shardwright.errors import PlanError
from shardwright.forward_stack import Rung, record, wrap
from shardwright.mesh import balanced
from shardwright.plan.param_groups import ParamGroup
from shardwright.plan.plan import Plan
from shardwright.plan.schedule import Action
from shardwright.runtime.applied import AppliedStrategy
from shardwright.runtime.copy_stream import host_arrival
from shardwright.runtime.executor import Events
from shardwright.runtime.mixed_precision import versions_of
from shardwright.runtime.offload_storage import OffloadStorage
from shardwright.strategies.zero.flat_groups import FlatGroup, chunks_using
from shardwright.strategies.zero.flat_parameter import FlatParameter, UpdateState
from shardwright.strategies.zero.offloaded_update import OffloadedState
from shardwright.strategies.zero.prefetch import Prefetcher, ShardedGroup, UnshardHold

_Flats = dict[str, list[FlatParameter]]
"""The flat parameters of each param group, by its name."""


class _UnshardingParameters(dict[str, Any]):
    """A module's ``_parameters`` dict that unshards a parameter's group before the parameter is read as an attribute.

    What the module's own forward reads stays unsharded until that forward ends, since it may call other modules before
    it uses it. Other code that reads a parameter holds its group until the next module is called, since one expression
    may read several. Code that lists all parameters during an action holds the groups until the action ends, since it
    may keep the list. ``get`` reads a parameter without unsharding it.
    """

    def __init__(
        self, parameters: Mapping[str, Any], groups: Mapping[str, ShardedGroup], prefetcher: Prefetcher
    ) -> None:
        super().__init__(parameters)
        self.groups, self.prefetcher = groups, prefetcher
        self.read: list[set[ShardedGroup]] = []  # for each running forward: the groups it has read

    def __getitem__(self, name: str) -> Any:
        if name in self.groups and not torch.compiler.is_dynamo_compiling():  # a compiled block holds its groups
            group = self.groups[name]
            self.prefetcher.ensure_unsharded(group, UnshardHold.NONE if self.read else UnshardHold.UNTIL_NEXT_MODULE)
            if self.read and group not in self.read[-1]:
                self.read[-1].add(group)
                group.num_readers += 1
            if not self.read and not self.prefetcher.in_action:
                parameter = super().__getitem__(name)
                self.prefetcher.marked += [flat for flat in group.flats if flat.mark_read(parameter)]
        return super().__getitem__(name)

    def items(self) -> Any:
        self._unshard_all()
        return super().items()

    def values(self) -> Any:
        self._unshard_all()
        return super().values()

    def _unshard_all(self) -> None:
        if self.prefetcher.in_action:  # between steps, model.parameters() gives them resharded
            for group in self.groups.values():
                self.prefetcher.ensure_unsharded(group, UnshardHold.UNTIL_ACTION_ENDS)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse_whole("a copy of the model")

    def pre_forward(self) -> None:
        self.read.append(set())
        self.prefetcher.on_module_call()
        for group in dict.fromkeys(self.groups.values()):
            self.prefetcher.ensure_unsharded(group)

    def post_forward(self) -> None:
        for group in self.read.pop():
            group.num_readers -= 1


class FSDPState:
    """One rank's parameters, gradients and optimizer state, sharded over one axis by ZeRO stage 1, 2 or 3.

    The constructor flattens and shards the parameters of ``model`` and hooks its modules, in place. Stage 1
    reduce-scatters gradients once a step, 2 after each microbatch; 3 also reshards parameters after use. With
    ``storage`` shards and optimizer state are offloaded there. ``num_prefetch`` is how many param groups are
    prefetched, and how many reduce-scatters stay under way. Param groups are reduce-scattered in an order that the plan
    fixes, because autograd's own order depends on the code that the samples take. In stage 3 all ranks of ``world``,
    the axis of all ranks, raise PlanError if ranks that share shards unshard or reduce param groups in different
    orders.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        axis: Axis,
        flat_groups: tuple[FlatGroup, ...],
        stage: int,
        num_prefetch: int,
        world: Axis,
        storage: OffloadStorage | None = None,
    ) -> None:
        self.stage, self.num_prefetch, self.num_microbatches = stage, num_prefetch, plan.layout.num_microbatches
        self.reshard_after_use, self.compiled = stage == 3 and axis.size > 1, plan.compiled
        flats, self.trained = _flatten(model, plan, axis, flat_groups, storage, keeps_buffer=not self.reshard_after_use)
        self.groups = _sharded_groups(model, plan, flats)
        self.offloaded = None if storage is None else OffloadedState(storage, self.trained)
        coord = plan.mesh.coord(axis.ranks[axis.index])
        mine = (0,) if plan.schedule is None else plan.schedule.chunks_of(coord["pp"])
        chunks = {name: chunks_using(plan, name, coord) or mine[:1] for name in self.groups}
        groups_of = {
            chunk: [group for name, group in self.groups.items() if chunk in chunks[name]]
            for chunk in sorted(set().union(*chunks.values()))
        }
        self.prefetcher = Prefetcher(tuple(self.groups.values()), num_prefetch, self.reshard_after_use, groups_of)
        # Backwards run through a group's chunks from the last to the first, which completes its gradients.
        self._completed_in = {name: min(chunks[name]) for name, members in reversed(self.trained.items()) if members}
        self._world, self._groups = world, plan.mesh.groups(axis.name)
        self._last_forward = Action("F", self.num_microbatches - 1) if plan.schedule is None else None
        self._comparisons: list[PendingDifference] = []  # all-reduces under way
        self._reads_early = world.device.type in ("cpu", "meta")  # an accelerator's host waits once a step, at its end
        self._due: list[str] = []  # groups of this action's chunk that are still to be reduced, in order
        self._ready: list[str] = []  # groups with gradients that wait for groups before them in the order
        self._microbatches_left: dict[str, int] = {}  # by group, until its gradients are complete
        self._reducing: list[tuple[str, list[tuple[FlatParameter, Pending[Tensor]]]]] = []
        self._published: set[str] = set()
        self._may_be_stale = self._evaluated = False
        self._versions = self._versions_now()
        self._hook(model)

    def applied(self) -> AppliedStrategy:
        """Returns this state's additions to the run: event listeners, sharded parameters by name, offloaded state.

        With them come functions that return whether a param group's gradients are final and which unsharded buffers
        exist, and in stage 3 the hooks for tensors that autograd saves.
        """
        flats = [flat for group in self.groups.values() for flat in group.flats]
        events = Events(
            restart=self._restart,
            during=self._during,
            after_weight_gradients=self._after_weight_gradients,
            before_sync=self._before_sync,
            after_sync=self._after_sync,
            after_optimizer=self._after_optimizer,
        )
        return AppliedStrategy(
            events=events,
            parameters={name: p for flat in flats for name, p in flat.sharded_parameters.items()},
            offload=self.offloaded,
            summed=self._published.__contains__,
            kept=lambda: (flat.unsharded for flat in flats if flat.unsharded is not None),
            summing=lambda: (tensor for flat in flats for tensor in flat.summing()),
            saving=(self.prefetcher.pack, self.prefetcher.unpack) if self.reshard_after_use else None,
        )

    def _hook(self, model: nn.Module) -> None:
        """Makes each module unshard its param group before its forward, and before other code reads its parameters."""
        group_of = {name: group for group in self.groups.values() for flat in group.flats for name in flat.parameters}
        by_module: dict[nn.Module, dict[str, ShardedGroup]] = {}
        for _, module, own, name in owners(model):
            if name in group_of:
                by_module.setdefault(module, {})[own] = group_of[name]
        what = "unshards its group, resharded after use" if self.reshard_after_use else "waits for its group's unshard"
        compiled = {m: path for path in self.compiled for m in model.get_submodule(path).modules()}
        of_block: dict[str, list[_UnshardingParameters]] = {}
        for module, groups in by_module.items():
            parameters = _UnshardingParameters(module._parameters, groups, self.prefetcher)
            module._parameters = parameters
            module.register_state_dict_pre_hook(lambda *_: _refuse_whole("state_dict() of the model"))
            if module in compiled:
                of_block.setdefault(compiled[module], []).append(parameters)
                continue
            module.register_forward_pre_hook(_hook_of(parameters.pre_forward), prepend=True)
            module.register_forward_hook(_hook_of(parameters.post_forward), always_call=True)
            record(module, Rung.UNSHARD, what, by="zero")
        for path, inside in of_block.items():
            around = partial(partial, _with_unsharded, inside)
            wrap(model.get_submodule(path), Rung.UNSHARD_BLOCK, what, by="zero", around=around)

    @contextmanager
    def _during(self, action: Action) -> Iterator[None]:
        self._due = [name for name, chunk in self._completed_in.items() if chunk == action.chunk]
        with self.prefetcher.during(action):
            yield
            # These groups waited for an earlier group in the order, which this rank's samples did not use.
            self._start_reductions(sorted(self._ready, key=list(self._completed_in).index))
        if not torch.is_grad_enabled():
            self._evaluated = True
            if self.offloaded is not None:
                host_arrival(self._world.device)()  # later code may write into shards that are still copied
        elif action == self._last_forward:
            # On a CPU the comparison is finished before the first reduce-scatter: else that could sum gradients of
            # different groups.
            self._start_comparison()

    # ---- comparing the ranks' calls

    def _start_comparison(self) -> None:
        """Starts to compare between ranks the unshards made since the last comparison (stage 3).

        Each rank unshards the groups that its own forward uses. Ranks whose forwards differ would compute with other
        groups' values of the same size, and no collective would fail.
        """
        if self.reshard_after_use:  # in stages 1 and 2 the plan fixes the order
            started = compare_async(self._world, self.prefetcher.calls, self._groups)
            self._comparisons += [] if started is None else [started]
            self.prefetcher.calls.clear()

    def _finish_comparisons(self) -> None:
        """Waits for the running comparisons; raises PlanError on every rank if two ranks differ."""
        comparisons, self._comparisons = self._comparisons, []
        if comparisons and bool(torch.stack([comparison.differs() for comparison in comparisons]).any()):
            raise _different_orders(next(comparison for comparison in comparisons if comparison.differs()).find())

    # ---- between steps

    def _after_optimizer(self) -> None:
        self._may_be_stale = False
        self._take_assigned()
        self._versions = self._versions_now()
        self.prefetcher.shards_changed()
        if self.offloaded is not None:
            self.offloaded.put_away()

    def _take_assigned(self) -> None:
        """Takes over what code has assigned to ``.data`` of sharded parameters."""
        if self.offloaded is None:
            for group in self.groups.values():
                for flat in group.flats:
                    flat.take_assigned()

    def _restart(self) -> None:
        """Clears the state that a failed step has left, on all ranks alike, and reshards stale parameters.

        An evaluation has no ``before_sync`` event: the unshards that it made are compared here, before the next step.
        """
        for _, reducing in self._reducing:
            for _, pending in reducing:
                pending.wait()  # until then other ranks may read its memory
        self._reducing.clear()
        self._ready.clear()
        self._microbatches_left.clear()
        self._published.clear()
        trained = [flat for flats in self.trained.values() for flat in flats]
        for flat in trained:
            flat.discard_gradients()
        self.prefetcher.end_action()
        self._take_assigned()
        before, self._versions = self._versions, self._versions_now()
        if any(flat.update_state is not UpdateState.NOT_UPDATED for flat in trained):
            self._after_optimizer()  # groups that the failed step has updated stay so
        elif self._may_be_stale or self._versions != before or self._steps_after_evaluation():
            self.prefetcher.shards_changed()
        if self._evaluated:
            self._evaluated = False
            self._start_comparison()
        self.prefetcher.calls.clear()
        self._finish_comparisons()

    def _versions_now(self) -> list[int]:
        """Returns numbers of which one changes when code writes to a shard, as to ``run.parameters`` after a step."""
        flats = (flat for group in self.groups.values() for flat in group.flats)
        return [version for flat in flats for version, _ in versions_of(flat.sharded_parameters)]

    def _steps_after_evaluation(self) -> bool:
        """Returns whether a step follows an evaluation, since which code may have written through ``.data``."""
        return self._evaluated and torch.is_grad_enabled()

    # ---- gradients

    def _after_weight_gradients(self, group: ParamGroup, microbatch: int) -> None:
        if not self.trained.get(group.name):
            return
        if self.stage == 1 and self._microbatches_left.get(group.name, self.num_microbatches) > 1:
            self._count(group.name)  # until the last microbatch, autograd accumulates gradients in .grad
            for flat in self.trained[group.name]:
                flat.accumulate_wide()
            return
        self._ready.append(group.name)
        while self._due and self._due[0] in self._ready:
            self._start_reductions([self._due.pop(0)])

    def _start_reductions(self, names: Sequence[str]) -> None:
        """Starts the reduce-scatters of groups that have gradients; at most ``num_prefetch`` stay under way."""
        if self._reads_early:
            self._finish_comparisons()
        for name in names:
            self._ready.remove(name)
            self._count(name)
            if self.reshard_after_use:
                self.prefetcher.calls.append(f"a sum of '{name}'")
            self._reducing.append((name, [(flat, flat.reduce_scatter()) for flat in self.trained[name]]))
            while len(self._reducing) > self.num_prefetch:
                self._finish_reduction()

    def _count(self, name: str) -> None:
        self._microbatches_left[name] = self._microbatches_left.get(name, self.num_microbatches) - 1

    def _finish_reduction(self) -> None:
        """Waits for the oldest reduce-scatter under way, and sets ``.grad`` if the group's gradients are complete."""
        name, reducing = self._reducing.pop(0)
        for flat, pending in reducing:
            flat.accumulate_shard(pending.wait())
        if not self._microbatches_left[name] and all(name != other for other, _ in self._reducing):
            self._publish(name)

    def _publish(self, name: str) -> None:
        """Sets ``.grad`` of a group's shards, summed over the axis, for gradient sync and the optimizer."""
        for flat in self.trained[name]:
            flat.publish_gradients()
        self._published.add(name)
        if self.offloaded is not None:
            self.offloaded.gradients_published(name)

    def _before_sync(self) -> None:
        if self._reads_early:
            self._finish_comparisons()
        self._start_comparison()
        while self._reducing:
            self._finish_reduction()
        if self._reads_early:
            self._finish_comparisons()
        for name in self.trained:  # groups that no sample of this rank has reached
            if name not in self._published:
                self._publish(name)
        self._microbatches_left.clear()
        self._published.clear()
        self._may_be_stale = True  # an optimizer that the user has made fires no after_optimizer

    def _after_sync(self) -> None:
        """Ends a step: waits for the comparison between ranks and for offloaded gradients, and reshards parameters.

        Stages 1 and 2 reshard here too, though the next step would: until then a parameter's ``grad``, which is in
        shards, could be read as None.
        """
        self.prefetcher.shards_changed()
        reads = bool(self._comparisons)
        self._finish_comparisons()
        if self.offloaded is not None and not reads:
            host_arrival(self._world.device)()


def _flatten(
    model: nn.Module,
    plan: Plan,
    axis: Axis,
    flat_groups: Sequence[FlatGroup],
    storage: OffloadStorage | None,
    *,
    keeps_buffer: bool,
) -> tuple[_Flats, _Flats]:
    """Returns this rank's flat parameters by param group, and those of them that are trained."""
    named = dict(model.named_parameters())
    held = [(group, {name: named[name] for name in group.parameters if name in named}) for group in flat_groups]
    held = [(group, mine) for group, mine in held if mine]  # the others belong to other pipeline stages
    if storage is not None:
        storage.reserve(_shard_bytes(mine, axis) for _, mine in held)
    flats: _Flats = {}
    trained: _Flats = {}
    for group, mine in held:
        first = group.parameters[0]  # all parameters of a flat group have one dtype
        dtype, wide = plan.compute_dtypes[first], first in plan.fp32_sums
        flat = FlatParameter(mine, axis, keeps_buffer=keeps_buffer, dtype=dtype, fp32_sums=wide, storage=storage)
        flats.setdefault(group.param_group, []).append(flat)
        trained.setdefault(group.param_group, []).extend([flat] if group.trained else [])
    return flats, trained


def _sharded_groups(model: nn.Module, plan: Plan, flats: _Flats) -> Mapping[str, ShardedGroup]:
    """Returns the param groups by name; one with a parameter of several modules stays unsharded during each action."""
    users: dict[str, set[str]] = {}
    for path, _, _, name in owners(model):
        users.setdefault(name, set()).add(path)
    groups = {name: ShardedGroup(name, tuple(members)) for name, members in flats.items()}
    held_names = {group.name for group in plan.param_groups if group.is_held}
    for group in groups.values():
        if group.name in held_names or any(len(users[name]) > 1 for flat in group.flats for name in flat.parameters):
            group.hold = UnshardHold.EVERY_ACTION
    return groups


def _different_orders(difference: Difference) -> PlanError:
    line, rank, call, other, other_call = difference
    return PlanError(
        "ranks use the model's param groups in different orders, so their all-gathers do not match",
        given=f"call {line} of rank {rank} is {call}, of rank {other} {other_call}",
        allowed="under zero3, models that use the same param groups in the same order on every rank",
        fix="write zero2 in place of zero3, or use every param group in each forward; the step's gradients are wrong, "
        "and so are the buffers that its forward has written",
    )


def _refuse_whole(what: str) -> NoReturn:
    raise PlanError(
        f"{what} would hold NaN, since between steps this rank has its shards only",
        given="a model whose parameters ZeRO shards",
        allowed="run.state_dict() for the whole state, run.parameters for this rank's shards",
        fix="write run.state_dict(full=True), full=False for this rank's part, or sw.save_weights(run, path); to "
        "average parameters, averages = run.average(optimizer, decay=0.999), and with averages.applied(): to use them",
    )


def _with_unsharded(
    inside: Sequence[_UnshardingParameters], forward: Callable[..., Any], *args: Any, **named: Any
) -> Any:
    """Runs a compiled block's forward with all its parameters unsharded, because compiled code cannot unshard them."""
    with ExitStack() as stack:
        for parameters in inside:
            parameters.pre_forward()
            stack.callback(parameters.post_forward)
            for name in parameters.groups:
                parameters[name]  # reading it holds the group until the forward ends
        return forward(*args, **named)


def _hook_of(function: Callable[[], None]) -> Callable[..., None]:
    """Returns a hook that calls ``function``; deep copies of the module share it, since functions are not copied."""
    return lambda *_: function()


def _shard_bytes(parameters: Mapping[str, nn.Parameter], axis: Axis) -> int:
    cuts = balanced(sum(p.numel() for p in parameters.values()), axis.size)
    return (cuts[axis.index + 1] - cuts[axis.index]) * next(iter(parameters.values())).element_size()
