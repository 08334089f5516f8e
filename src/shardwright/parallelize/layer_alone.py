"""``layer_alone``: shards one ``nn.Linear`` over tensor-parallel ranks, for training code that you write yourself."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from shardwright.analysis.traced.structure import is_exactly, runs_as
from shardwright.comm.autograd import cut_to_whole, whole_to_cut
from shardwright.comm.axis import Axis
from shardwright.comm.world import World
from shardwright.errors import LayoutError, PlanError, check_at_least
from shardwright.layout import Layout
from shardwright.operators.linear import PendingGradients, weight_of
from shardwright.parallelize.auto import settle
from shardwright.parallelize.checks import check_model, check_world
from shardwright.parallelize.initialization import place_parameters
from shardwright.parallelize.planning import structural_copy, without_storage
from shardwright.parallelize.same_start import check_same_start
from shardwright.plan.batch_shard import BatchShard
from shardwright.plan.plan import NUM_TOKENS, Job, Plan
from shardwright.plan.traffic import summed_axes
from shardwright.runtime.gradient_sync import GradientSync
from shardwright.sharding.box import width
from shardwright.strategies import choose
from shardwright.strategies.tensor_parallel.apply import apply
from shardwright.strategies.tensor_parallel.linear import LinearNote
from shardwright.strategies.tensor_parallel.mode import SEQ, Mode
from shardwright.strategies.tensor_parallel.place import place_alone, sent


class LayerAlone:
    """One ``nn.Linear`` sharded over tensor-parallel ranks, with sharded inputs and outputs; from :func:`layer_alone`.

    :meth:`cut` returns this rank's shard of a whole input, calling the layer multiplies that shard by the weight, and
    :meth:`gather` all-gathers the output; all three are differentiable. After a backward, :meth:`sum_gradients`
    all-reduces the gradients of parameters that several ranks hold. ``layer`` has this rank's parameters, and ``plan``
    their layouts.

    >>> import torch, shardwright as sw
    >>> layer = nn.Linear(6, 5)
    >>> def work(world):
    ...     alone = layer_alone(layer, "tp2x2/2d", world)
    ...     x = torch.arange(18.0).view(3, 6)
    ...     part = alone.cut(x)
    ...     y = alone.gather(alone(part))
    ...     return tuple(part.shape), tuple(y.shape), tuple(alone.layer.weight.shape)
    >>> sw.launch(work, 4, ranks="threads")[3]
    ((1, 3), (3, 5), (2, 3))
    """

    def __init__(self, layer: nn.Linear, plan: Plan, axes: Mapping[str, Axis], shard: BatchShard) -> None:
        self.layer, self.plan = layer, plan
        self._axes, self._shard = axes, shard
        note = plan.notes[""]
        assert isinstance(note, LinearNote)
        self._note = note
        self._sync = GradientSync(layer, plan, shard.coord, lambda names: axes["+".join(names)])
        self._summed: tuple[Tensor, ...] = ()

    def cut(self, x: Tensor) -> Tensor:
        """Returns this rank's shard of an input that every rank holds whole: some of its samples and features.

        Shapes: x (samples, ..., in_features); returns this rank's samples and features.
        Traffic: backward, one all-gather over each axis that cuts the input.
        Raises: PlanError: the input has one dim only, or another number of features or dtype than the layer takes.
        """
        self._check("an input", x, (None, self._note.x.size))
        self._shard.set_microbatch(x.shape[0])
        x = self._shard.cut(x, self._axes)
        features = self._note.x
        for number, name in enumerate(features.names):
            sizes = features.sizes(self._shard.coord, name, over=features.names[number + 1 :])
            x = whole_to_cut(x, self._axes[name], -1, sizes)
        return x

    def __call__(self, x: Tensor) -> Tensor:
        """Applies the layer to this rank's shard of the input that was cut last; returns its shard of the output.

        Traffic: that of the mode's roles, see :mod:`shardwright.operators.linear`.
        Raises: PlanError: ``x`` has other numbers of samples and features, or another dtype, than that shard.
        """
        self._check(
            "this rank's part of an input", x, (self._num_samples(), width(self._note.x.held(self._shard.coord)))
        )
        y: Tensor = self.layer(x)
        return y

    def gather(self, y: Tensor) -> Tensor:
        """Returns the whole output on every rank, all-gathered from the ranks' shards ``y``.

        Traffic: forward, one all-gather over each axis that cuts the output.
        Raises: PlanError: ``y`` has other numbers of samples and features, or another dtype, than the layer's output
            for the shard that was cut last.
        """
        self._check(
            "this rank's part of an output", y, (self._num_samples(), width(self._note.y.held(self._shard.coord)))
        )
        features = self._note.y
        joined: tuple[str, ...] = ()
        for name in reversed(features.names):
            y = cut_to_whole(y, self._axes[name], -1, features.sizes(self._shard.coord, name, over=joined))
            joined = (*joined, name)
        return self._shard.join(y, self._axes)

    def sum_gradients(self) -> None:
        """All-reduces, in place, the gradients of which each rank has only a partial sum.

        These are gradients of parameters that several ranks hold. All ranks call it once a step, after the last
        backward.

        Traffic: up to two all-reduces for each set of ranks that have gradients in common: of whole tensors, and of
            parts.
        Raises: PlanError: the gradients are summed already.
        """
        gradients = tuple(p.grad for p in self.layer.parameters() if p.grad is not None)
        if any(gradient is summed for gradient in gradients for summed in self._summed):
            raise PlanError(
                "the gradients are summed over ranks already, and would be summed twice",
                given="sum_gradients() after sum_gradients(), on the same gradients",
                allowed="one call a step: backward, as often as you like, then sum_gradients()",
                fix="leave one out, or call alone.layer.zero_grad() before the backward of the next step",
            )
        for param_group in self._sync.param_groups:
            for message in self._sync.messages[param_group.name]:
                message.start()()
        self._summed = tuple(p.grad for p in self.layer.parameters() if p.grad is not None)

    def _num_samples(self) -> int | None:
        """Returns the number of this rank's samples in the current batch; None if no axis cuts samples."""
        return len(self._shard.samples(())) if self.plan.row_axes else None

    def _check(self, what: str, x: Tensor, sizes: tuple[int | None, int]) -> None:
        """Raises PlanError unless ``x`` has these numbers of samples (None: any) and features, in the layer's dtype."""
        num_samples, features = sizes
        dtype = weight_of(self.layer).dtype
        fits = x.dim() > 1 and x.shape[-1] == features and num_samples in (None, x.shape[0])
        if fits and x.dtype == dtype:
            return
        raise PlanError(
            f"{what} has another shape or dtype than the layer takes",
            given=f"{tuple(x.shape)} in {x.dtype}",
            allowed=f"({'samples' if num_samples is None else num_samples}, ..., {features}) in {dtype}",
            fix="call cut() on a whole input, the layer on the result, gather() on the output, then cut the next",
        )


def layer_alone(
    layer: nn.Linear, layout: Layout | str, world: World, *, num_tokens: int = NUM_TOKENS, seed: int = 0
) -> LayerAlone:
    """Returns this rank's shard of one ``nn.Linear`` under a layout of ``tp`` alone, to call from your own code.

    All ranks call it. Use it to parallelize a layer by hand; ``parallelize`` takes whole models. A layer on the meta
    device is drawn as ``parallelize`` draws it, from ``seed``; one with values is copied and sharded. In 1D (``tp4``)
    the layer is column-parallel: its input is whole and its output is sharded by features. ``num_tokens`` is the usual
    number of tokens of a batch; some modes use it to compare the cost of sending activations with that of sending
    weights.

    Traffic: that of :func:`check_same_start`, which compares the layers that the ranks were given.
    Raises: LayoutError: the layout has other axes than ``tp``, microbatches, a precision, activation checkpointing,
        ``compile`` or the option ``seq``, or does not fit the layer or the ranks, or ``num_tokens`` is less than 1;
        PlanError: the layer is not exactly an ``nn.Linear``, has hooks, or differs between ranks.
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    if not is_exactly(layer, nn.Linear):
        raise PlanError(
            "a layer alone is one nn.Linear, and no more",
            given=type(layer).__name__ + (" with hooks" if runs_as(layer, nn.Linear) else ""),
            allowed="nn.Linear itself: no subclass, no hooks, no parametrization",
            fix="give layer_alone the nn.Linear inside and do the rest around it, or use parallelize",
        )
    check_model(layer)
    check_at_least(
        "num_tokens",
        num_tokens,
        1,
        fix="write the tokens of one batch: samples times the dims between samples and features",
    )
    if [factor.axis for factor in layout.factors] != ["tp"] or layout.num_microbatches > 1:
        raise LayoutError(
            "a layer alone is laid out over tp alone",
            given=str(layout),
            allowed="one tp factor: tp4, tp2x2/2d, tp2x2x2/3d",
            fix="use parallelize for whole models",
        )
    whole_models = {
        layout.precision: layout.precision != "fp32",
        f"recompute:{layout.recompute}": layout.recompute is not None,
        f"compile:{layout.compile}": layout.compile is not None,
    }
    if ignored := [name for name, asked in whole_models.items() if asked]:
        raise LayoutError(
            "a layer alone computes in its own dtype, and as it is",
            given=str(layout),
            allowed="one tp factor, without options of whole models: precision, recompute, compile",
            fix=f"leave out {' and '.join(ignored)}; for another precision, give a layer of that dtype",
        )
    if layout.factors[0].option(SEQ) is not None:
        raise LayoutError(
            "a layer alone has samples, and no sequences",
            given=str(layout),
            allowed="a mode whose rows are samples",
            fix=f"leave out /{SEQ}",
        )
    on_meta = Job(without_storage(layer), nn.Identity(), num_tokens)
    layout = settle(layout, lambda tried: sent(_planned(on_meta, tried)[0]))
    plan, mode = _planned(on_meta, layout)
    check_world(plan, world)
    coord = plan.mesh.coord(world.rank)
    shard = plan.batch_shard(coord)
    job = Job(structural_copy(layer), nn.Identity(), num_tokens, batch_shard=shard)
    place_parameters(job.model, plan.compute, coord, seed, world.device)
    check_same_start(world.everyone().for_strategy("core"), world, layer, str(layout), seed)
    axes = {name: axis.for_strategy(mode.name) for name, axis in world.axes(plan.mesh).items()}
    for names in sorted({summed_axes(plan, name) for name in plan.compute}):
        if len(names) > 1:
            axes["+".join(names)] = world.axis("+".join(names), plan.mesh.groups(names)).for_strategy(mode.name)
    apply(job, axes, plan, mode, PendingGradients(limit=0))
    assert isinstance(job.model, nn.Linear)
    return LayerAlone(job.model, plan, axes, shard)


def _planned(job: Job, layout: Layout) -> tuple[Plan, Mode]:
    (strategy,) = choose(layout)
    plan = Plan.of(job, layout)
    mode: Mode = strategy.mode(plan)  # type: ignore[attr-defined]
    return place_alone(job, plan, mode), mode
