"""Gives each module of this rank's part the forward that its note in the plan asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.analysis.callers import plain_containers
from shardwright.comm.autograd import cut_to_whole
from shardwright.comm.axis import Axis
from shardwright.errors import PlanError
from shardwright.forward_stack import Forward, Rung, record, set_forward, wrap
from shardwright.models.attention import Attention
from shardwright.models.gpt import Positions
from shardwright.models.losses import CrossEntropy
from shardwright.operators.attention import attend_gathered, attend_inside, attend_selected
from shardwright.operators.linear import Ahead, GridProduct, Later, WeightFetch, weight_of
from shardwright.operators.norms import Split, cut_layer_norm, cut_rms_norm
from shardwright.operators.operand_moves import OperandMove, take
from shardwright.operators.vocabulary import cut_cross_entropy, cut_embedding
from shardwright.operators.weight_guard import Forwarding, Running, guard
from shardwright.plan.batch_shard import BatchShard
from shardwright.plan.plan import LOSS, OUTPUT, Job, Plan
from shardwright.runtime.applied import Applied
from shardwright.runtime.executor import Events
from shardwright.strategies.tensor_parallel.convolution import (
    ChannelsNote,
    ConvolutionNote,
    apply_convolution,
    apply_statistics,
)
from shardwright.strategies.tensor_parallel.features import Features, width
from shardwright.strategies.tensor_parallel.mode import (
    EntryNote,
    GateNote,
    Gathering,
    HeadsNote,
    LinearNote,
    LossNote,
    Mode,
    NormNote,
    TableNote,
    TokensNote,
)
from shardwright.strategies.tensor_parallel.multihead_attention import MultiheadNote, apply_multihead, leave_fast_path
from shardwright.strategies.tensor_parallel.plan_draft import own_names


def apply(job: Job, axes: Mapping[str, Axis], plan: Plan, mode: Mode, later: Later | None = None) -> Applied:
    """Changes the model and the loss as :func:`~shardwright.strategies.tensor_parallel.place.place` has planned.

    ``later`` collects the gradients of fetched weights; ``Later(ahead=0)`` puts each in place at once.
    """
    assert job.batch_shard is not None, "a job on a rank has its batch shard"
    ahead = Ahead(always=plan.stages is not None)
    applying = _Applying(job, axes, plan, mode, job.batch_shard, ahead, later or Later())
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
    return Applied(events=events, late=late)


def _fetched(note: object) -> Iterator[tuple[str, Sequence[str]]]:
    """A module's own names for the weights whose gradients are summed behind autograd's back, and over what."""
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
    ahead: Ahead
    later: Later

    @property
    def coord(self) -> dict[str, int]:
        return {axis.name: self.axes[axis.name].index for axis in self.mode.axes}

    def everything(self) -> None:
        forwarding = Forwarding()
        forwarding.watch(self.job.model)
        self.ahead.watch(self.job.model)
        record(self.job.model, Rung.FRAME, "notes when a forward begins and ends", by=self.mode.name)
        leave_fast_path(self.job.model)
        apply_statistics(self.job.model, self.axes, self.mode)
        for module in self.job.model.modules() if self.mode.dim == 1 else ():
            if isinstance(module, Positions):
                self._positions(module)
        used = {use.module for use in self.plan.uses}
        theirs = [(p, m) for p, m in self.job.model.named_modules() if not type(m).__module__.startswith("torch.nn.")]
        for path, note in self.plan.notes.items():
            if path == LOSS:
                self._loss(note)
                continue
            if path == OUTPUT:
                self._gate_end(note)
                continue
            module = self.job.model.get_submodule(path)
            if path in used and not any(p is not None for p in module._parameters.values()):
                continue  # another stage has it
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
            elif isinstance(note, TableNote):
                self._table(path, module, note)
            elif isinstance(note, GateNote):
                self._gate(path, module, note)
            elif isinstance(note, MultiheadNote):
                apply_multihead(self, module, note)
            elif isinstance(note, ConvolutionNote | ChannelsNote):
                apply_convolution(module, note, self.axes, self.mode.name)
            if isinstance(note, LinearNote | NormNote | TableNote | ConvolutionNote | ChannelsNote | MultiheadNote):
                guard(module, path, forwarding, readable=("in_proj_bias",))
                record(module, Rung.GUARD, "its parameters refuse other readers", by=self.mode.name)
        self._keep_home(theirs)

    def _keep_home(self, theirs: Sequence[tuple[str, nn.Module]]) -> None:
        """Lets no code call what is cut but that which was followed; ``theirs`` are the modules that torch has not."""
        model, allowed_callers, stages = self.job.model, self.plan.allowed_callers, self.plan.stages
        containers = plain_containers(model)
        apart = {"", *stages.opened, *containers} if stages is not None else ()
        running = Running(containers, apart, self.mode.name)
        named = {path for home in allowed_callers.values() for path in (home.owner, *home.callers)}
        for path, module in {**dict(theirs), **{path: model.get_submodule(path) for path in named}}.items():
            running.follow(module, path)
        for path, home in allowed_callers.items():
            running.keep(model.get_submodule(path), path, home)

    def moves(self, gatherings: Sequence[Gathering]) -> tuple[OperandMove, ...]:
        """The messages with what their sizes are found by."""
        found = []
        for each in gatherings:
            axis = self.axes[each.axis]
            if each.lies == "rows":
                found.append(OperandMove(axis, "rows", partial(self.shard.sizes, each.rows, each.axis), self.mode.dim))
            elif each.lies == "features":
                sizes = each.feature_sizes(self.coord)
                found.append(OperandMove(axis, "features", partial(tuple[int, ...], sizes)))
            else:
                found.append(OperandMove(axis, "whole"))
        return tuple(found)

    def product(
        self, take: tuple[OperandMove, ...], fetch: tuple[WeightFetch, ...], weight: Callable[[], Tensor]
    ) -> GridProduct:
        """A product as the mode runs all of them, whose output is not summed."""
        return GridProduct(
            take=take,
            fetch=fetch,
            keep=self.mode.keep,
            overlap=self.mode.overlap,
            later=self.later,
            leaves=self.job.deferred,
            ahead=self.ahead,
            weight=weight,
        )

    def _linear(self, path: str, module: nn.Module, note: LinearNote) -> None:
        terms = [a.name for a, role in zip(note.axes, note.step.roles, strict=True) if role == "k"]
        product = replace(
            self.product(self.moves(note.takes()), self._fetches(path, note.fetches), partial(weight_of, module)),
            give=self.moves(note.gives()),
            bias_here=all(self.coord[name] == 0 for name in terms),
        )
        joined = [a.name for a, role in zip(note.axes, note.step.roles, strict=True) if role == "h"]
        num_given = width(note.x.held(self.coord, over=() if note.enters else joined))
        forward = partial(_linear_forward, path, module, product, (num_given, note.x.size))
        roles = " ".join(f"{axis.name}:{role}" for axis, role in zip(note.axes, note.step.roles, strict=True))
        self._operator(module, f"product, {roles}", forward)

    def _fetches(self, path: str, names: Sequence[str]) -> tuple[WeightFetch, ...]:
        if not names:
            return ()
        lies = self.plan.compute[own_names(self.job.model, path)["weight"]]
        found = []
        for number, name in enumerate(names):
            inner, here = self.plan.mesh.coords(names[:number]), self.shard.coord
            sizes = tuple(
                sum(lies.local_shape({**here, name: index, **there})[0] for there in inner)
                for index in range(self.plan.mesh[name])
            )
            found.append(WeightFetch(self.axes[name], sizes))
        return tuple(found)

    def _entry(self, module: nn.Module, note: EntryNote) -> None:
        moves = self.moves(note.takes())

        def around(forward: Forward) -> Forward:
            @wraps(forward)
            def entered(*args: Any, **named: Any) -> Any:
                if args:
                    return forward(take(args[0], moves), *args[1:], **named)
                name, x = next(iter(named.items()))
                return forward(**{**named, name: take(x, moves)})

            return entered

        wrap(module, Rung.ENTRY, "takes its input for all its layers at once", by=self.mode.name, around=around)

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
            self._attends(attention, "scores summed over the parts of a head")
        elif len(own) % len(kv) or kv_of_head != [i * len(kv) // len(own) for i in range(len(own))]:
            attention.attend = partial(attend_selected, attention, kv_of_head)  # type: ignore[method-assign]
            self._attends(attention, "keys and values chosen for the heads held")
        if note.tokens is not None:
            self._tokens(attention, note.tokens)

    def _tokens(self, attention: nn.Module, note: TokensNote) -> None:
        """Queries, keys and values are those of some tokens; each query sees those of all, or of all before it."""
        assert isinstance(attention, Attention)
        shard = self.shard

        def places(num_tokens: int, device: torch.device) -> Tensor:
            span = shard.span(note.rows)
            return torch.arange(span.start, span.stop, device=device)

        def num_seen() -> int:
            return shard.span(note.rows).stop if note.causal else shard.num_tokens

        if attention.rotary is not None:
            attention.rotary.positions = places  # type: ignore[method-assign]
        if note.gathers:
            moves = self.moves(note.gathers)
            attention.attend = partial(attend_gathered, attention.attend, moves, num_seen)  # type: ignore[method-assign]
            self._attends(attention, "keys and values of other tokens gathered")

    def _attends(self, attention: nn.Module, name: str) -> None:
        record(attention, Rung.ATTEND, name, by=self.mode.name)

    def _norm(self, module: nn.Module, note: NormNote) -> None:
        splits = tuple((self.axes[name], note.features.sizes(self.coord, name)) for name in note.features.names)
        self._operator(module, "norm of cut features", partial(_norm_forward, module, note.features.size, splits))

    def _table(self, path: str, module: nn.Module, note: TableNote) -> None:
        assert isinstance(module, nn.Embedding)
        start = note.vocabulary.held(self.coord)[0][0]
        take_moves, give_moves = self.moves(note.gathers), self.moves(note.sums)

        def forward(input: Tensor) -> Tensor:
            size, padding = note.vocabulary.size, module.padding_idx
            return cut_embedding(input, weight_of(module), start, size, take_moves, give_moves, padding)

        self._operator(module, "table of cut rows or features", forward)

    def _loss(self, note: LossNote) -> None:
        loss = self.job.loss
        assert isinstance(loss, CrossEntropy)
        start = note.vocabulary.held(self.coord)[0][0]
        gathers = self.moves(note.gathers)
        over = tuple(self.axes[name] for name in reversed(note.vocabulary.names))

        def forward(logits_V: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            return cut_cross_entropy(
                logits_V, targets, start, note.vocabulary.size, over, ignore_index=loss.ignore_index,
                label_smoothing=loss.label_smoothing, take=gathers,
            )  # fmt: skip

        self._operator(loss, "cross entropy of cut classes", forward)

    def _whole(self, x: Tensor, features: Features | None) -> Tensor:
        """A cut value joined over every axis that cuts features between layers."""
        joined: tuple[str, ...] = ()
        for name in reversed(features.names) if features is not None else ():
            assert features is not None
            x = cut_to_whole(x, self.axes[name], -1, features.sizes(self.coord, name, joined))
            joined += (name,)
        return x

    def _gate(self, path: str, module: nn.Module, note: GateNote) -> None:
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
                raise _overwritten(path)

        module.register_forward_pre_hook(enter, prepend=True)  # before those of others, who see whole features
        module.register_forward_hook(leave)
        record(module, Rung.GATHER, "gathers the features of its inputs", by=self.mode.name)

    def _positions(self, module: Positions) -> None:
        """A sequence's tokens begin at their place in it."""

        def forward(tokens_BT: Tensor) -> Tensor:
            module.check(self.shard.num_tokens)
            span = self.shard.span(())
            return torch.arange(span.start, span.stop, device=tokens_BT.device)

        self._operator(module, "positions of this rank's tokens", forward)

    def _gate_end(self, note: GateNote) -> None:
        (features,) = note.arguments
        hook = lambda _, args, output: self._whole(output, features)  # noqa: E731
        self.job.model.register_forward_hook(hook, prepend=True)
        record(self.job.model, Rung.GATHER, "gathers the features of the output", by=self.mode.name)


def _overwritten(path: str) -> PlanError:
    return PlanError(
        f"'{path}' writes into its input, of which it has a copy: the features lie cut, and were gathered for it",
        given="an input changed in place",
        allowed="modules that leave their inputs alone, or a layout that does not cut features between layers",
        fix="write x = x * 2 for x.mul_(2), or lay tp out without rows and columns: tp4",
    )


def _linear_forward(
    path: str, module: nn.Module, product: GridProduct, sizes: tuple[int, int], input: Tensor
) -> Tensor:
    if input.shape[-1] != sizes[0]:
        raise _not_its_part(path, input.shape[-1], *sizes)
    return product(input, weight_of(module), module._parameters["bias"])


def _not_its_part(path: str, given: int, part: int, whole: int) -> PlanError:
    return PlanError(
        f"'{path}' is called with other features than the part that it multiplies",
        given=f"{given} features, where this rank multiplies {part} of {whole}",
        allowed="a column called before its row, with what treats each element alone between them",
        fix=f'let the layer that is called first be the column, or keep both whole: roles={{"{path}": "copied"}}',
    )


def _norm_forward(module: nn.Module, size: int, splits: Sequence[Split], input: Tensor) -> Tensor:
    weight = module._parameters["weight"]
    if isinstance(module, nn.LayerNorm):
        return cut_layer_norm(input, weight, module._parameters["bias"], eps=module.eps, size=size, splits=splits)
    assert isinstance(module, nn.RMSNorm)
    return cut_rms_norm(input, weight, eps=module.eps, size=size, splits=splits)
