"""Unshards each param group before the modules that use it and prefetches the next; stage 3 reshards it after.

::

    forward    | unshard 0 | compute 0 | compute 1 | compute 2 |          ahead:1, one param group is prefetched
               |           | unshard 1 | unshard 2 |
                                       | reshard 0 | reshard 1 | reshard 2

    backward   | unshard 2 | backward 2 | backward 1 | ...
               |           | unshard 1  | unshard 0  |

Stage 3 records the order of the groups in each forward and prefetches in that order the next time, reversed in the
backward. All-gathers match by their order alone, so all ranks must use the same groups in the same order; each rank's
calls are listed, so that ranks can compare them. In the backward autograd triggers the unshard, when it unpacks a
weight that it has saved: it saves only the weight's position in the unsharded buffer, because a saved weight would keep
the buffer in memory.

Stages 1 and 2 unshard all of a chunk's groups in its first forward, in the order of the plan: a rank whose samples use
only some groups, or use them in another order, still makes the same calls as the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.comm.autograd import outside_transforms, refuses_hooks
from shardwright.errors import PlanError
from shardwright.plan.schedule import Action
from shardwright.strategies.zero.flat_parameter import FlatParameter, UpdateState


class UnshardStatus(Enum):
    """The status of a param group: sharded, being unsharded by all-gathers, or unsharded.

    ::

        SHARDED -- unshard() --> UNSHARDING -- wait_for_unshard() --> UNSHARDED -- reshard() --> SHARDED
    """

    SHARDED = auto()
    UNSHARDING = auto()  # the all-gather is under way
    UNSHARDED = auto()


class UnshardHold(IntEnum):
    """How long a param group stays unsharded while other groups are used; of several holds the longest counts."""

    NONE = 0
    UNTIL_NEXT_MODULE = 1  # an expression outside its modules has read it, and may read other groups as well
    UNTIL_ACTION_ENDS = 2  # the model has listed its parameters and may still use the list
    EVERY_ACTION = 3  # it is used again after other groups: it is held anew in every action


@dataclass(eq=False)
class ShardedGroup:
    """The flat parameters of one param group, which are unsharded and resharded together.

    The group stays unsharded while others are used if ``hold`` says so, or while forwards run that have read one of its
    parameters: ``num_readers`` counts these.
    """

    name: str
    flats: tuple[FlatParameter, ...]
    hold: UnshardHold = UnshardHold.NONE
    state: UnshardStatus = UnshardStatus.SHARDED
    num_readers: int = 0  # forwards that run and have read a parameter of it

    @property
    def is_held(self) -> bool:
        """Whether the group stays unsharded while other groups are used."""
        return self.hold is not UnshardHold.NONE or self.num_readers > 0

    def unshard(self) -> None:
        """Starts the all-gathers of the parameters, unless they are under way or done."""
        if self.state is UnshardStatus.SHARDED:
            for flat in self.flats:
                flat.unshard()
            self.state = UnshardStatus.UNSHARDING

    def wait_for_unshard(self) -> None:
        """Unshards the group and waits until its parameters have their values."""
        self.unshard()
        if self.state is UnshardStatus.UNSHARDING:
            for flat in self.flats:
                flat.wait_for_unshard()
        self.state = UnshardStatus.UNSHARDED

    def reshard(self) -> None:
        """Frees the unsharded parameters; in stages 1 and 2, which keep the buffer, marks the buffer as out of date.

        A running all-gather is waited for first.
        """
        if self.state is UnshardStatus.UNSHARDING:
            self.wait_for_unshard()  # an all-gather cannot be cancelled, and it writes into the buffer
        if self.state is UnshardStatus.UNSHARDED:
            for flat in self.flats:
                flat.reshard()
        self.state = UnshardStatus.SHARDED

    def release(self, hold: UnshardHold) -> None:
        """Ends the hold that keeps the group unsharded, unless it lasts longer than ``hold``."""
        if self.hold <= hold:
            self.hold = UnshardHold.NONE


class _FlatView(NamedTuple):
    """A view of an unsharded buffer in the form that autograd saves: the view's position, not the view.

    The view may be of another dtype, as the complex view of a real parameter is, and conjugated or negated lazily.
    """

    group: ShardedGroup
    flat: FlatParameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool

    def view(self) -> Tensor:
        """Returns the view of the buffer, which is unsharded now."""
        buffer = self.flat.unsharded
        assert buffer is not None, "unsharded before"
        if self.dtype is buffer.dtype:
            view = buffer.as_strided(self.size, self.stride, self.offset)
        else:
            view = torch.empty(0, dtype=self.dtype, device=buffer.device)
            view.set_(buffer.untyped_storage(), self.offset, self.size, self.stride)
        view = view.conj() if self.is_conj else view
        return torch._neg_view(view) if self.is_neg else view


@dataclass(eq=False)
class Prefetcher:
    """Unshards one rank's param groups ahead of use; in stage 3 at most ``num_prefetch + 1`` at once, beside held ones.

    With ``reshard_after_use`` False (stages 1 and 2) groups stay unsharded until :meth:`shards_changed`, and are
    unsharded in the order of ``chunks``, which lists each chunk's groups. ``calls`` lists the collectives of stage 3 in
    order, for ranks to compare. ``in_action`` is true while an action (a forward or backward) runs. ``marked`` are the
    flat parameters of which code has read some between steps (:meth:`FlatParameter.mark_read`).
    """

    groups: Sequence[ShardedGroup]
    num_prefetch: int
    reshard_after_use: bool
    chunks: Mapping[int, Sequence[ShardedGroup]]
    calls: list[str] = field(default_factory=list)
    in_action: bool = False
    marked: list[FlatParameter] = field(default_factory=list)
    _current: ShardedGroup | None = None
    _expected: Sequence[ShardedGroup] = ()  # the groups in the order in which this action will use them
    _position: int = 0  # in _expected: the groups before it have been unsharded in this action
    _used: list[ShardedGroup] = field(default_factory=list)
    _orders: dict[tuple[bool, int], tuple[ShardedGroup, ...]] = field(default_factory=dict)  # by forward or not, chunk

    @contextmanager
    def during(self, action: Action) -> Iterator[None]:
        """Returns a context around a forward or backward, in which groups are unsharded when they are used.

        Stage 3 reshards all groups at the end, and its backwards unshard also those groups that only the forward has
        used, so that every rank makes the same calls. A forward of stage 3 that uses ``torch.func.grad`` raises
        PlanError.
        """
        while self.marked:
            self.marked.pop().unmark()
        forward = action.kind == "F"
        if self.reshard_after_use:  # weight gradients (W) are computed without weights
            self._expected = () if action.kind == "W" else self._orders.get((forward, action.chunk), ())
        else:
            self._expected = self.chunks.get(action.chunk, ()) if forward else ()
        self._current, self._position, self._used, self.in_action = None, 0, [], True
        packs = forward and self.reshard_after_use and torch.is_grad_enabled()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack) if packs else nullcontext():
                yield
        except RuntimeError as failure:
            if packs and refuses_hooks(failure):
                raise PlanError(
                    "stage 3 of ZeRO keeps hooks on saved tensors, beside which torch takes no gradient in a forward",
                    given="torch.func.grad, vjp, jacrev or hessian in the model's forward, under zero3",
                    allowed="zero1, zero2, or torch.autograd.grad",
                    fix="write zero2 in the place of zero3",
                ) from failure
            raise
        finally:
            self.in_action = False
        if forward:
            self._orders[True, action.chunk] = tuple(dict.fromkeys(self._used))
            # Groups that are held come first, because the order of the forward does not tell when the backward first
            # uses them.
            backward = sorted(
                dict.fromkeys(reversed(self._used)), key=lambda group: group.hold is not UnshardHold.EVERY_ACTION
            )
            self._orders[False, action.chunk] = tuple(backward)
        elif self.reshard_after_use:
            # A backward may need fewer groups than its forward. The others are unsharded all the same, so that every
            # rank makes the same calls and the traffic is a formula of the plan.
            while self._position < len(self._expected):
                self._advance()
        self.end_action()

    def ensure_unsharded(self, group: ShardedGroup, hold: UnshardHold = UnshardHold.NONE) -> None:
        """Makes ``group`` unsharded: if it is not, unshards it, waits for it, and prefetches the groups expected next.

        ``hold`` says how long the group then stays unsharded while others are used, unless it has a longer hold. Stage
        3 expects the order of the last forward, reversed in a backward. It prefetches nothing for a group that is not
        in the rest of this order.

        Raises: PlanError: the optimizer has updated the group during this backward, which still needs the old values.
        """
        sharded = group.state is UnshardStatus.SHARDED
        if any(
            flat.update_state is UpdateState.UNSHARDED_UPDATED
            or (sharded and flat.update_state is UpdateState.SHARD_UPDATED)
            for flat in group.flats
        ):
            raise PlanError(
                f"the parameters of '{group.name}' are used after their gradients were complete",
                given="an update beside the backward",
                allowed="models whose parameters get their gradients from all their uses",
                fix="call optimizer.step() after the step, in place of update=optimizer",
            )
        group.hold = max(group.hold, hold)
        if group is self._current:
            return
        self._used.append(group)
        with outside_transforms():  # code inside a transform may read parameters too
            self._make_current(group)

    def _make_current(self, group: ShardedGroup) -> None:
        if group.state is UnshardStatus.UNSHARDED:
            self._current = group
        elif not self.reshard_after_use:
            if group in self._expected:  # with the groups before it, in the plan's order
                self._unshard_until(self._expected.index(group) + 1 + self.num_prefetch)
            self._wait_for_unshard(group)
        elif group in self._expected[self._position :]:
            # Groups that are passed over this time are unsharded as well: other ranks may use them, and need the call.
            end = self._expected.index(group, self._position)
            while self._position <= end:
                self._advance()
        else:  # the first time, or in another order than the last time: there is no order to prefetch by
            self._reshard_all_but((group,))
            self._wait_for_unshard(group)

    def on_module_call(self) -> None:
        """Ends the holds that last until the next module call, since the code that read the parameters has run."""
        for group in self.groups:
            group.release(UnshardHold.UNTIL_NEXT_MODULE)

    def shards_changed(self) -> None:
        """Reshards every group, because its unsharded values are out of date: called after an optimizer step."""
        self.end_action()
        for group in self.groups:
            group.reshard()

    def end_action(self) -> None:
        """Ends a forward or backward: waits for running all-gathers, ends its holds; stage 3 reshards all groups.

        Stages 1 and 2 first unshard the groups of the chunk that this rank did not use, because other ranks may have
        used them. It is called after a failure too.
        """
        if not self.reshard_after_use:
            self._unshard_until(len(self._expected))  # other ranks may have used groups that this rank did not
        for group in self.groups:
            group.release(UnshardHold.UNTIL_ACTION_ENDS)
            if self.reshard_after_use:
                group.reshard()
            elif group.state is UnshardStatus.UNSHARDING:
                group.wait_for_unshard()
        self._current, self._expected, self._position, self._used = None, (), 0, []

    def _advance(self) -> None:
        """Makes the next group in the expected order the current one, and prefetches those that follow."""
        group = self._expected[self._position]
        self._position += 1
        upcoming = self._expected[self._position : self._position + self.num_prefetch]
        self._reshard_all_but((group, *upcoming))  # first, so that the peak is not one group higher
        self._wait_for_unshard(group)
        for next_group in upcoming:
            self._unshard(next_group)
        self._check_limit()

    def _unshard_until(self, end: int) -> None:
        """Starts, in order, the all-gathers of the expected groups before position ``end``."""
        for group in self._expected[self._position : end]:
            self._unshard(group)
        self._position = max(self._position, end)

    def _unshard(self, group: ShardedGroup) -> None:
        if group.state is UnshardStatus.SHARDED and self.reshard_after_use:
            self.calls.append(f"a gather of '{group.name}'")
        group.unshard()

    def _wait_for_unshard(self, group: ShardedGroup) -> None:
        self._unshard(group)
        group.wait_for_unshard()
        self._current = group
        self._check_limit()

    def _reshard_all_but(self, kept: Sequence[ShardedGroup]) -> None:
        for group in self.groups if self.reshard_after_use else ():
            if group not in kept and not group.is_held:
                group.reshard()

    def _check_limit(self) -> None:
        if self.reshard_after_use:
            num = sum(group.state is not UnshardStatus.SHARDED and not group.is_held for group in self.groups)
            assert num <= self.num_prefetch + 1, f"{num} groups are unsharded, at most {self.num_prefetch + 1} may be"

    # ---- what autograd saves

    def pack(self, tensor: Tensor) -> Any:
        """Returns what autograd saves: for a view of an unsharded buffer its position, for other tensors the tensor."""
        if tensor.layout != torch.strided:  # a sparse one has no storage
            return tensor
        key = tensor.untyped_storage()._cdata  # not the address, which tensors on the meta device do not have
        for group in self.groups:
            if group.state is UnshardStatus.UNSHARDED:
                for flat in group.flats:
                    if flat.unsharded is not None and flat.unsharded.untyped_storage()._cdata == key:
                        return _FlatView(
                            group, flat, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype,
                            tensor.is_conj(), tensor.is_neg(),
                        )  # fmt: skip
        return tensor

    def unpack(self, packed: Any) -> Tensor:
        """Returns the tensor that was given to :meth:`pack`; its group is unsharded again if need be.

        Raises: PlanError: as in :meth:`ensure_unsharded`.
        """
        if not isinstance(packed, _FlatView):
            tensor: Tensor = packed
            return tensor
        self.ensure_unsharded(packed.group)
        return packed.view()
