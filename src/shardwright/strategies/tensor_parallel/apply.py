"""Replaces the forwards of this rank's modules by tensor-parallel ones, according to how the plan cuts each module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.analysis.traced.batch_norms import batch_norms
from shardwright.analysis.traced.callers import plain_containers
from shardwright.comm.autograd import cut_to_whole
from shardwright.comm.axis import Axis
from shardwright.forward_stack import Forward, Rung, record, set_forward
from shardwright.models.gpt import Positions
from shardwright.operators.batch_norm import share_statistics
from shardwright.operators.linear import GridProduct, PendingGradients, WeightFetch, WeightPrefetch
from shardwright.operators.operand_moves import OperandMove
from shardwright.operators.weight_guard import CallGuard, ForwardFlag, guard
from shardwright.plan.batch_shard import BatchShard
from shardwright.plan.plan import LOSS, OUTPUT, Job, Plan
from shardwright.runtime.applied import AppliedStrategy
from shardwright.runtime.executor import Events
from shardwright.strategies.tensor_parallel.features import Features
from shardwright.strategies.tensor_parallel.mode import Mode
from shardwright.strategies.tensor_parallel.moves import AxisMove
from shardwright.strategies.tensor_parallel.note import notes_of
from shardwright.strategies.tensor_parallel.plan_draft import own_names


def apply(
    job: Job, axes: Mapping[str, Axis], plan: Plan, mode: Mode, later: PendingGradients | None = None
) -> AppliedStrategy:
    """Replaces the forwards of this rank's modules and loss by tensor-parallel ones, as ``plan`` cuts each of them.

    Returns callbacks of the training step that finish collectives which overlap with computation, and the names of the
    weights whose gradients are only then final. ``later`` collects the reduce-scatters of the gradients of weights that
    are all-gathered before use; ``PendingGradients(limit=0)`` waits for each at once.
    """
    assert job.batch_shard is not None, "a job on a rank has its batch shard"
    ahead = WeightPrefetch(always=plan.stages is not None)
    applying = Applying(job, axes, plan, mode, job.batch_shard, ahead, later or PendingGradients())
    applying.everything()
    late = frozenset(
        own_names(job.model, path)[own]
        for path, note in notes_of(plan)
        for own, fetches in note.fetched()
        if fetches and job.model.get_submodule(path)._parameters[own] is not None
    )

    def restart() -> None:
        applying.later.finish()
        ahead.finish()

    events = Events(restart=restart, after_backward=applying.later.finish, after_action=ahead.finish)
    return AppliedStrategy(events=events, late=late)


@dataclass
class Applying:
    """A rank on which the plan's notes (its entries for modules) replace forwards, and what all its operators share.

    ``ahead`` all-gathers weights before they are used, and ``later`` collects the reduce-scatters of their gradients.
    """

    job: Job
    axes: Mapping[str, Axis]
    plan: Plan
    mode: Mode
    shard: BatchShard
    ahead: WeightPrefetch
    later: PendingGradients

    @property
    def coord(self) -> dict[str, int]:
        """The rank's index along each axis of the grid."""
        return {axis.name: self.axes[axis.name].index for axis in self.mode.axes}

    @property
    def compiles(self) -> bool:
        """Whether the layout has ``compile``, so that the local work between collectives is compiled."""
        return self.plan.layout.compile is not None

    def everything(self) -> None:
        """Replaces the forwards of all modules that this rank runs."""
        model = self.job.model
        forwarding = ForwardFlag()
        forwarding.watch(model)
        self.ahead.watch(model)
        record(model, Rung.FRAME, "notes when a forward begins and ends", by=self.mode.name)
        _leave_fast_path(model)
        over = [self.axes[axis.name] for axis in self.mode.row_axes]
        share_statistics((norm for _, norm in batch_norms(model)), over, by=self.mode.name)
        for module in model.modules() if self.mode.dim == 1 else ():
            if isinstance(module, Positions):
                self._positions(module)
        used = {use.module for use in self.plan.uses}
        # collected before forwards are replaced: modules with code of their own, which may call others
        custom = [(p, m) for p, m in model.named_modules() if not type(m).__module__.startswith("torch.nn.")]
        for path, note in notes_of(self.plan):
            module = self._module(path)
            if path in used and not any(p is not None for p in module._parameters.values()):
                continue  # its parameters belong to another pipeline stage
            note.apply(self, path, module)
            if note.guarded:
                guard(module, path, forwarding, readable=("in_proj_bias",))
                record(module, Rung.GUARD, "its parameters refuse other readers", by=self.mode.name)
        self._restrict_callers(custom)

    def _module(self, path: str) -> Any:
        """Returns what the plan's note (entry) at ``path`` is about: a module, the loss, or the whole model.

        The model stands for its output.
        """
        special = {LOSS: self.job.loss, OUTPUT: self.job.model}
        return special[path] if path in special else self.job.model.get_submodule(path)

    def _restrict_callers(self, custom: Sequence[tuple[str, nn.Module]]) -> None:
        """Makes modules with cut weights refuse calls from untraced code; ``custom`` are modules not of torch.nn."""
        model, allowed_callers, stages = self.job.model, self.plan.allowed_callers, self.plan.stages
        containers = plain_containers(model)
        apart = {"", *stages.opened, *containers} if stages is not None else ()
        running = CallGuard(containers, apart, self.mode.name)
        named = {path for home in allowed_callers.values() for path in (home.owner, *home.callers)}
        for path, module in {**dict(custom), **{path: model.get_submodule(path) for path in named}}.items():
            running.follow(module, path)
        for path, home in allowed_callers.items():
            running.restrict(model.get_submodule(path), path, home)

    def moves(self, moves: Sequence[AxisMove]) -> tuple[OperandMove, ...]:
        """Returns the plan's gathers and reductions of operands, bound to this rank's axes and sizes."""
        operand_moves = []
        for move in moves:
            axis = self.axes[move.axis]
            if move.kind == "rows":
                operand_moves.append(
                    OperandMove(axis, "rows", partial(self.shard.sizes, move.rows, move.axis), self.mode.dim)
                )
            elif move.kind == "features":
                sizes = move.feature_sizes(self.coord)
                operand_moves.append(OperandMove(axis, "features", partial(tuple[int, ...], sizes)))
            else:
                operand_moves.append(OperandMove(axis, "whole"))
        return tuple(operand_moves)

    def product(
        self, take: tuple[OperandMove, ...], fetch: tuple[WeightFetch, ...], weight: Callable[[], Tensor]
    ) -> GridProduct:
        """Returns a product of a linear layer on the grid, with the mode's settings, whose output is not yet summed."""
        return GridProduct(
            take=take,
            fetch=fetch,
            keep=self.mode.keep,
            overlap=self.mode.overlap,
            pending_gradients=self.later,
            deferred=self.job.deferred,
            prefetch=self.ahead,
            weight=weight,
        )

    def fetch(self, name: str, axes: Sequence[str]) -> tuple[WeightFetch, ...]:
        """Returns the all-gathers of a weight along ``axes``, each with the rows that its ranks hold before it."""
        layout, here = self.plan.compute[name], self.shard.coord
        fetches = []
        for number, axis in enumerate(axes):
            inner = self.plan.mesh.coords(axes[:number])
            sizes = tuple(
                sum(layout.local_shape({**here, axis: index, **there})[0] for there in inner)
                for index in range(self.plan.mesh[axis])
            )
            fetches.append(WeightFetch(self.axes[axis], sizes))
        return tuple(fetches)

    def operator(self, module: nn.Module, name: str, forward: Forward) -> None:
        """Replaces the module's forward, which ``run.explain`` then calls ``name``."""
        set_forward(module, Rung.OPERATOR, name, by=self.mode.name, forward=forward)

    def _positions(self, module: Positions) -> None:
        """Makes a position embedding start at the first token of this rank's slice of the sequence."""

        def forward(tokens_BT: Tensor) -> Tensor:
            module.check(self.shard.num_tokens)
            span = self.shard.span(())
            return torch.arange(span.start, span.stop, device=tokens_BT.device)

        self.operator(module, "positions of this rank's tokens", forward)

    def whole(self, x: Tensor, features: Features | None) -> Tensor:
        """Returns ``x`` with its features all-gathered over every axis that cuts them."""
        for name, sizes in features.joins(self.coord) if features is not None else ():
            x = cut_to_whole(x, self.axes[name], -1, sizes)
        return x


def _leave_fast_path(model: nn.Module) -> None:
    """Turns off the inference fast path of torch's transformer layers, which would read all weights whole."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # only the choice of that path reads it
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
