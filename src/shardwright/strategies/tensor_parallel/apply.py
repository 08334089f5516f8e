"""Replaces the forwards of this rank's modules by tensor-parallel ones, according to how the plan cuts each module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.analysis.batch_norms import batch_norms
from shardwright.analysis.callers import plain_containers
from shardwright.comm.autograd import cut_to_whole
from shardwright.comm.axis import Axis
from shardwright.errors import PlanError
from shardwright.forward_stack import Forward, Rung, record, set_forward, wrap
from shardwright.models.attention import Attention
from shardwright.models.gpt import Positions
from shardwright.models.losses import CrossEntropy
from shardwright.operators.attention import attend_gathered, attend_inside, attend_selected
from shardwright.operators.batch_norm import share_statistics
from shardwright.operators.linear import (
    GridProduct,
    PendingGradients,
    WeightFetch,
    WeightPrefetch,
    compilable,
    weight_of,
)
from shardwright.operators.multihead_attention import HeadShard, multihead
from shardwright.operators.norms import cut_norm
from shardwright.operators.operand_moves import OperandMove
from shardwright.operators.traced_take import gathering
from shardwright.operators.vocabulary import cut_cross_entropy, cut_embedding
from shardwright.operators.weight_guard import CallGuard, ForwardFlag, guard
from shardwright.plan.batch_shard import BatchShard
from shardwright.plan.plan import LOSS, OUTPUT, Job, Plan
from shardwright.runtime.applied import AppliedStrategy
from shardwright.runtime.executor import Events
from shardwright.strategies.tensor_parallel.convolution import (
    ChannelsNote,
    ConvolutionNote,
    apply_convolution,
)
from shardwright.strategies.tensor_parallel.features import Features, width
from shardwright.strategies.tensor_parallel.mode import (
    AxisMove,
    EmbeddingNote,
    EntryNote,
    GatherNote,
    HeadsNote,
    LinearNote,
    LossNote,
    Mode,
    NormNote,
    TokensNote,
)
from shardwright.strategies.tensor_parallel.multihead_attention import MultiheadNote
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
    applying = _Applying(job, axes, plan, mode, job.batch_shard, ahead, later or PendingGradients())
    applying.everything()
    late = frozenset(
        own_names(job.model, path)[own]
        for path, note in plan.notes.items()
        for own, fetches in _fetched(note)
        if fetches and job.model.get_submodule(path)._parameters[own] is not None
    )

    def restart() -> None:
        applying.later.finish()
        ahead.finish()

    events = Events(restart=restart, after_backward=applying.later.finish, after_action=ahead.finish)
    return AppliedStrategy(events=events, late=late)


def _fetched(note: object) -> Iterator[tuple[str, Sequence[str]]]:
    """Yields the names of a module's weights that are all-gathered before use, each with the axes of the all-gather.

    The gradients of these weights are reduce-scattered outside of autograd, so gradient sync waits for them.
    """
    if isinstance(note, LinearNote):
        yield "weight", note.fetches
    if isinstance(note, MultiheadNote):
        yield from ((own, axes) for own, _, axes in note.projections if own == "in_proj_weight")


@dataclass
class _Applying:
    job: Job
    axes: Mapping[str, Axis]
    plan: Plan
    mode: Mode
    shard: BatchShard
    ahead: WeightPrefetch
    later: PendingGradients

    @property
    def coord(self) -> dict[str, int]:
        return {axis.name: self.axes[axis.name].index for axis in self.mode.axes}

    def everything(self) -> None:
        forwarding = ForwardFlag()
        forwarding.watch(self.job.model)
        self.ahead.watch(self.job.model)
        record(self.job.model, Rung.FRAME, "notes when a forward begins and ends", by=self.mode.name)
        _leave_fast_path(self.job.model)
        over = [self.axes[axis.name] for axis in self.mode.row_axes]
        share_statistics((norm for _, norm in batch_norms(self.job.model)), over, by=self.mode.name)
        for module in self.job.model.modules() if self.mode.dim == 1 else ():
            if isinstance(module, Positions):
                self._positions(module)
        used = {use.module for use in self.plan.uses}
        # collected before forwards are replaced: modules with code of their own, which may call others
        custom = [(p, m) for p, m in self.job.model.named_modules() if not type(m).__module__.startswith("torch.nn.")]
        for path, note in self.plan.notes.items():
            if path == LOSS:
                self._loss(note)
                continue
            if path == OUTPUT:
                self._gate_end(note)
                continue
            module = self.job.model.get_submodule(path)
            if path in used and not any(p is not None for p in module._parameters.values()):
                continue  # its parameters belong to another pipeline stage
            if isinstance(note, LinearNote):
                self._linear(path, module, note)
            elif isinstance(note, EntryNote):
                self._entry(module, note)
            elif isinstance(note, HeadsNote):
                self._heads(path, module, note)
            elif isinstance(note, TokensNote):
                self._tokens(module, note)
            elif isinstance(note, NormNote):
                self._norm(module, note)
            elif isinstance(note, EmbeddingNote):
                self._table(path, module, note)
            elif isinstance(note, GatherNote):
                self._gate(path, module, note)
            elif isinstance(note, MultiheadNote):
                self._multihead(module, note)
            elif isinstance(note, ConvolutionNote | ChannelsNote):
                apply_convolution(module, note, self.axes, self.mode.name)
            if isinstance(note, LinearNote | NormNote | EmbeddingNote | ConvolutionNote | ChannelsNote | MultiheadNote):
                guard(module, path, forwarding, readable=("in_proj_bias",))
                record(module, Rung.GUARD, "its parameters refuse other readers", by=self.mode.name)
        self._restrict_callers(custom)

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

    def _moves(self, moves: Sequence[AxisMove]) -> tuple[OperandMove, ...]:
        """Returns the plan's gathers and reductions of operands, bound to this rank's axes and sizes."""
        found = []
        for each in moves:
            axis = self.axes[each.axis]
            if each.kind == "rows":
                found.append(OperandMove(axis, "rows", partial(self.shard.sizes, each.rows, each.axis), self.mode.dim))
            elif each.kind == "features":
                sizes = each.feature_sizes(self.coord)
                found.append(OperandMove(axis, "features", partial(tuple[int, ...], sizes)))
            else:
                found.append(OperandMove(axis, "whole"))
        return tuple(found)

    def _product(
        self, take: tuple[OperandMove, ...], fetch: tuple[WeightFetch, ...], weight: Callable[[], Tensor]
    ) -> GridProduct:
        """Returns a grid product with the mode's settings, whose output is not yet summed."""
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

    def _linear(self, path: str, module: nn.Module, note: LinearNote) -> None:
        fetch = self._fetch(own_names(self.job.model, path)["weight"], note.fetches) if note.fetches else ()
        terms = [a.name for a, role in zip(note.axes, note.step.roles, strict=True) if role == "k"]
        product = replace(
            self._product(self._moves(note.input_moves()), fetch, partial(weight_of, module)),
            give=self._moves(note.output_moves()),
            # of the terms of a sum, one adds the bias
            bias_here=all(self.coord[name] == 0 for name in terms),
        )
        product = compilable(module, product) if self.plan.layout.compile is not None else product
        joined = [a.name for a, role in zip(note.axes, note.step.roles, strict=True) if role == "h"]
        num_given = width(note.x.held(self.coord, over=() if note.enters else joined))
        forward = partial(_linear_forward, path, module, product, (num_given, note.x.size))
        roles = " ".join(f"{axis.name}:{role}" for axis, role in zip(note.axes, note.step.roles, strict=True))
        self._operator(module, f"product, {roles}", forward)

    def _fetch(self, name: str, axes: Sequence[str]) -> tuple[WeightFetch, ...]:
        """Returns the all-gathers of a weight, each with its members' rows after the all-gathers before it."""
        layout, here = self.plan.compute[name], self.shard.coord
        found = []
        for number, axis in enumerate(axes):
            inner = self.plan.mesh.coords(axes[:number])
            sizes = tuple(
                sum(layout.local_shape({**here, axis: index, **there})[0] for there in inner)
                for index in range(self.plan.mesh[axis])
            )
            found.append(WeightFetch(self.axes[axis], sizes))
        return tuple(found)

    def _entry(self, module: nn.Module, note: EntryNote) -> None:
        around = gathering(module, self._moves(note.input_moves()), compiles=self.plan.layout.compile is not None)
        wrap(module, Rung.ENTRY, "gathers its input for all its layers at once", by=self.mode.name, around=around)

    def _operator(self, module: nn.Module, name: str, forward: Forward) -> None:
        set_forward(module, Rung.OPERATOR, name, by=self.mode.name, forward=forward)

    def _heads(self, path: str, attention: nn.Module, note: HeadsNote) -> None:
        assert isinstance(attention, Attention)
        if note.entry is not None:
            self._entry(attention, note.entry)
        number = note.heads.number(self.coord)
        own, parts = note.held[number], note.slices[number]
        kv = note.held_kv(self.coord)
        joint = len(note.heads.parts)
        group = attention.num_heads // attention.num_kv_heads
        kv_of_head = [kv.index(head // group) for head in own]
        attention.num_heads, attention.num_kv_heads = len(own), len(kv)
        if note.inside:
            if attention.rotary is not None:
                attention.rotary.pairs = tuple(range(*parts))
            attention.head_dim = (parts[1] - parts[0]) * (2 if attention.rotary is not None else 1)
            axis = self.axes[note.heads.names[0]].subset([i for i in range(joint) if note.held[i] == own])
            attention.attend = partial(attend_inside, attention, axis)  # type: ignore[method-assign]
            record(attention, Rung.ATTEND, "scores summed over the parts of a head", by=self.mode.name)
        elif len(own) % len(kv) or kv_of_head != [i * len(kv) // len(own) for i in range(len(own))]:
            attention.attend = partial(attend_selected, attention, kv_of_head)  # type: ignore[method-assign]
            record(attention, Rung.ATTEND, "keys and values chosen for the heads held", by=self.mode.name)
        if note.tokens is not None:
            self._tokens(attention, note.tokens)

    def _tokens(self, attention: nn.Module, note: TokensNote) -> None:
        """Makes an attention gather other tokens' keys and values; its rotary embedding starts at its first token."""
        assert isinstance(attention, Attention)
        shard = self.shard

        def positions(num_tokens: int, device: torch.device) -> Tensor:
            span = shard.span(note.rows)
            return torch.arange(span.start, span.stop, device=device)

        def num_seen() -> int:
            return shard.span(note.rows).stop if note.causal else shard.num_tokens

        if attention.rotary is not None:
            attention.rotary.positions = positions  # type: ignore[method-assign]
        if note.gathers:
            moves = self._moves(note.gathers)
            attention.attend = partial(attend_gathered, attention.attend, moves, num_seen)  # type: ignore[method-assign]
            record(attention, Rung.ATTEND, "keys and values of other tokens gathered", by=self.mode.name)

    def _multihead(self, module: nn.Module, note: MultiheadNote) -> None:
        assert isinstance(module, nn.MultiheadAttention)
        heads = tuple(h for a, b in note.heads.held(self.coord) for h in range(a, b))
        fetch = {own: self._fetch(name, axes) for own, name, axes in note.projections}
        take, together, shares = self._moves(note.input_moves()), None, None
        if "in_proj_weight" in fetch:
            weight = partial(weight_of, module, "in_proj_weight")
            together = self._product(take, fetch["in_proj_weight"], weight)
        if note.inside:
            (axis,) = note.heads.names
            shares = self.axes[axis].subset(note.sharing(self.coord))
        part = HeadShard(heads, take, self._moves(note.output_moves()), fetch, together, shares)
        self._operator(module, "attention over this rank's heads", partial(multihead, module, part))

    def _norm(self, module: nn.Module, note: NormNote) -> None:
        splits = tuple((self.axes[name], note.features.sizes(self.coord, name)) for name in note.features.names)
        self._operator(module, "norm of cut features", partial(cut_norm, module, note.features.size, splits))

    def _table(self, path: str, module: nn.Module, note: EmbeddingNote) -> None:
        assert isinstance(module, nn.Embedding)
        start = note.vocabulary.held(self.coord)[0][0]
        take_moves, give_moves = self._moves(note.gathers), self._moves(note.sums)

        def forward(input: Tensor) -> Tensor:
            size, padding = note.vocabulary.size, module.padding_idx
            return cut_embedding(input, weight_of(module), start, size, take_moves, give_moves, padding)

        self._operator(module, "table of cut rows or features", forward)

    def _loss(self, note: LossNote) -> None:
        loss = self.job.loss
        assert isinstance(loss, CrossEntropy)
        start = note.vocabulary.held(self.coord)[0][0]
        gathers = self._moves(note.gathers)
        over = tuple(self.axes[name] for name in reversed(note.vocabulary.names))

        def forward(logits_V: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            return cut_cross_entropy(
                logits_V, targets, start, note.vocabulary.size, over, ignore_index=loss.ignore_index,
                label_smoothing=loss.label_smoothing, take=gathers,
            )  # fmt: skip

        self._operator(loss, "cross entropy of cut classes", forward)

    def _whole(self, x: Tensor, features: Features | None) -> Tensor:
        """Returns ``x`` with its features all-gathered over every axis that cuts them."""
        for name, sizes in features.joins(self.coord) if features is not None else ():
            x = cut_to_whole(x, self.axes[name], -1, sizes)
        return x

    def _gate(self, path: str, module: nn.Module, note: GatherNote) -> None:
        gathered: list[tuple[Any, int]] = []

        def version(x: Any) -> int:
            return -1 if x.is_inference() else int(x._version)

        def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            whole = tuple(self._whole(arg, features) for arg, features in zip(args, note.arguments, strict=True))
            kept = (arg for arg, features in zip(whole, note.arguments, strict=True) if features is not None)
            gathered[:] = [(arg, version(arg)) for arg in kept]
            return whole

        def leave(*_: Any) -> None:
            overwritten = any(version(arg) != before for arg, before in gathered)
            gathered.clear()
            if overwritten:
                raise PlanError(
                    f"'{path}' writes into its input, which is a gathered copy: the features are cut over tp",
                    given="an input changed in place",
                    allowed="modules that do not change inputs, or a layout that does not cut features between layers",
                    fix="write x = x * 2 for x.mul_(2), or lay tp out without rows and columns: tp4",
                )

        module.register_forward_pre_hook(enter, prepend=True)  # before other hooks, which then see whole features
        module.register_forward_hook(leave)
        record(module, Rung.GATHER, "gathers the features of its inputs", by=self.mode.name)

    def _positions(self, module: Positions) -> None:
        """Makes a position embedding start at the first token of this rank's slice of the sequence."""

        def forward(tokens_BT: Tensor) -> Tensor:
            module.check(self.shard.num_tokens)
            span = self.shard.span(())
            return torch.arange(span.start, span.stop, device=tokens_BT.device)

        self._operator(module, "positions of this rank's tokens", forward)

    def _gate_end(self, note: GatherNote) -> None:
        (features,) = note.arguments
        hook = lambda _, args, output: self._whole(output, features)  # noqa: E731
        self.job.model.register_forward_hook(hook, prepend=True)
        record(self.job.model, Rung.GATHER, "gathers the features of the output", by=self.mode.name)


def _leave_fast_path(model: nn.Module) -> None:
    """Turns off the inference fast path of torch's transformer layers, which would read all weights whole."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # only the choice of that path reads it
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _linear_forward(
    path: str, module: nn.Module, product: GridProduct, sizes: tuple[int, int], input: Tensor
) -> Tensor:
    if input.shape[-1] != sizes[0]:
        raise PlanError(
            f"'{path}' is called with other features than this rank's part",
            given=f"{input.shape[-1]} features, where this rank multiplies {sizes[0]} of {sizes[1]}",
            allowed="a column-parallel layer, elementwise operations, then its row-parallel layer",
            fix=f'let what is called first be the column-parallel one, or keep both: roles={{"{path}": "copied"}}',
        )
    return product(input, weight_of(module), module._parameters["bias"])
