"""Tensor parallelism for convolutions and BatchNorms: chains of convolutions are cut by channels.

::

    x, whole --> | conv: some out-channels | --> norm, pool --> | conv: the same in-channels | --> sum --> y, whole

Every axis that does not cut rows between layers cuts the channels of a chain; over an axis that cuts samples, weights
are copied and BatchNorms share their statistics. Channels are dim 1 of an activation. Even so the plan writes their cut
as ``Shard(-1)``, as it does for features.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional

from shardwright.analysis.on_meta.module_calls import ModuleCall
from shardwright.analysis.traced.batch_norms import batch_norms
from shardwright.analysis.traced.convolution_chains import ConvolutionChain, find_convolution_chains
from shardwright.analysis.traced.structure import owners
from shardwright.forward_stack import Rung
from shardwright.operators.batch_norm import share_statistics
from shardwright.operators.convolution import CutConvolution
from shardwright.plan.plan import ActivationCut, Job, Plan, Replicate, Shard
from shardwright.plan.traffic import Traffic
from shardwright.sharding.box import width
from shardwright.strategies.tensor_parallel.apply import Applying
from shardwright.strategies.tensor_parallel.features import Features
from shardwright.strategies.tensor_parallel.linear import LinearNote
from shardwright.strategies.tensor_parallel.mode import Mode
from shardwright.strategies.tensor_parallel.note import OperatorNote
from shardwright.strategies.tensor_parallel.roles import Layer, RoleStep, sent_elements
from shardwright.strategies.tensor_parallel.traffic import RankTraffic


@dataclass(frozen=True)
class ConvolutionNote(OperatorNote):
    """The cut of one convolution: by out-channels (``y``) or in-channels (``x``); with groups, by both.

    ``enters``: it is the first of a chain, and its input has all channels; ``leaves``: it is the last, and its output
    is summed or all-gathered to all channels.
    """

    guarded: ClassVar[bool] = True

    x: Features
    y: Features
    enters: bool
    leaves: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the mesh axes over which the channels are cut."""
        return self.x.names or self.y.names

    def apply(self, rank: Applying, path: str, module: Any) -> None:
        """Replaces the convolution by one on this rank's channels; a grouped one then has this rank's groups."""
        coord = {name: rank.axes[name].index for name in self.names}
        over = tuple(rank.axes[name] for name in reversed(self.names))
        grouped = bool(self.x.names and self.y.names)
        run = CutConvolution(
            shares=over if self.enters else (),
            held=self.x.held(coord)[0] if self.enters and grouped else None,
            sums=over if self.leaves and not grouped else (),
            joins=tuple((rank.axes[name], sizes) for name, sizes in self.y.joins(coord) if self.leaves),
        )
        if grouped:
            module.groups = width(self.x.held(coord)) * module.groups // self.x.size

        def forward(input: Any) -> Any:
            return run(module._conv_forward, input, module._parameters["weight"], module._parameters["bias"])

        rank.operator(module, "convolution of this rank's channels", forward)

    def traffic(self, here: RankTraffic, path: str, call: ModuleCall) -> Iterator[Traffic]:
        """Yields the all-reduces and all-gathers of one call of the convolution, forward and backward."""
        mesh = here.plan.mesh
        for axis in self.names:
            if self.enters and call.needs_gradient:
                yield Traffic("all_reduce", axis, prod(call.x_shape) * call.element_bytes, mesh[axis])
            if self.leaves and not self.y.names:
                num_bytes = prod(call.y_shape) * call.element_bytes
                yield Traffic("all_reduce", axis, num_bytes, mesh[axis], call.num_forwards)
        pixels = prod(call.y_shape) // self.y.size
        for axis, sizes in self.y.joins(here.coord) if self.leaves else ():
            num_bytes = pixels * sum(sizes) * call.element_bytes
            yield Traffic("all_gather", axis, num_bytes, mesh[axis], call.num_forwards)


@dataclass(frozen=True)
class ChannelsNote(OperatorNote):
    """The cut of a BatchNorm by channels, or of a GroupNorm by groups; no statistics are exchanged."""

    guarded: ClassVar[bool] = True

    features: Features

    def apply(self, rank: Applying, path: str, module: Any) -> None:
        """Replaces the forward of a norm; a GroupNorm then has this rank's groups and channels."""
        if not isinstance(module, nn.GroupNorm):
            share_statistics([module], [], always=True, by=rank.mode.name)
            return
        held = self.features.held(rank.coord)
        module.num_groups, module.num_channels = width(held) * module.num_groups // self.features.size, width(held)
        rank.operator(module, "norm of this rank's channels", partial(_group_norm, module))


# ---- what is cut


def place_convolutions(job: Job, mode: Mode, plan: Plan, shared: Collection[str], head: str | None) -> Plan:
    """Returns the plan with chains of convolutions cut by channels, where there are enough channels.

    Over axes that cut rows nothing is cut: there BatchNorms get the role "statistics". Layers with parameters in
    ``shared``, the layer ``head`` and layers for which the plan already has a role, such as column-parallel or copied,
    are left out; so is every ``nn.Linear`` if some axis cuts rows or features between layers. Chains and GroupNorms
    with too few channels or groups stay whole, with a reason for ``show``.
    """
    over = [axis.name for axis in mode.axes if axis.stream == "T"]
    busy = {*plan.roles, *plan.notes}
    for path in plan.statistics if over else ():
        plan = plan.role(path, mode.name, "statistics", f"of all samples, combined over {' '.join(over)}")
    taken = {path for path, _, _, name in owners(job.model) if name in shared} | busy
    if any(axis.stream != "C" for axis in mode.axes):  # there the mode cuts each Linear by itself
        taken |= {path for path, module in job.model.named_modules() if isinstance(module, nn.Linear)}
    axes = tuple((axis.name, axis.size) for axis in mode.axes if axis.stream != "T")
    if axes:
        parts, heads = prod(size for _, size in axes), {head} if head is not None else set()
        for chain in find_convolution_chains(job.model, taken | heads, parts):
            plan = _ChainCut(job, mode, plan, chain, axes).placed()
        sizes = " ".join(f"{name}={size}" for name, size in axes)
        for path, norm in job.model.named_modules():
            if isinstance(norm, nn.GroupNorm) and path not in plan.roles and norm.num_groups < parts:
                why = f"{norm.num_groups} groups cannot be dealt over {sizes}, nor the channels around it"
                plan = plan.role(path, mode.name, "copied", why)
    return plan


@dataclass
class _ChainCut:
    """Plans the cut of one chain of convolutions; ``plan`` is replaced by a refined one at each layer."""

    job: Job
    mode: Mode
    plan: Plan
    chain: ConvolutionChain
    axes: tuple[tuple[str, int], ...]

    def placed(self) -> Plan:
        chain, parts = self.chain, prod(size for _, size in self.axes)
        if chain.units < parts:
            sizes = " ".join(f"{name}={size}" for name, size in self.axes)
            for path in (*chain.firsts, *chain.middles, chain.last):
                why = f"{chain.units} runs of channels before '{chain.last}' cannot be dealt over {sizes}"
                self.plan = self.plan.role(path, self.mode.name, "copied", why)
            return self.plan
        for path in chain.firsts:
            self._convolution(path, enters=True)
        for path in chain.middles:
            self._convolution(path)
        for path in chain.between:
            self._between(path)
        if isinstance(self._module(chain.last), nn.Linear):
            self._linear(chain.last)
        else:
            self._convolution(chain.last, leaves=True)
        return self.plan.allow_callers(chain.allowed_callers)

    def _module(self, path: str) -> Any:
        return self.job.model.get_submodule(path)

    def _dealt(self, size: int) -> Features:
        """Returns the cut of ``size`` channels, or of the pixels of channels, into balanced runs of whole units.

        A unit of the chain is a channel, or a group of a grouped convolution or norm.
        """
        dealt, block = Features.balanced(self.chain.units, self.axes), size // self.chain.units
        return Features(size, self.axes, tuple(tuple((a * block, b * block) for a, b in part) for part in dealt.parts))

    def _cut(self, path: str, own: str, dim: int, features: Features) -> None:
        name = f"{path}.{own}".lstrip(".")
        for axis in features.names:
            if name in self.plan.compute:
                self.plan = self.plan.cut(name, axis, dim, features.along(axis))
            else:
                self.plan = self.plan.cut_buffer(name, features.size, axis, features.along(axis))

    def _convolution(self, path: str, *, enters: bool = False, leaves: bool = False) -> None:
        layer = self._module(path)
        grouped = layer.groups > 1
        whole_x, whole_y = enters and not grouped, leaves and not grouped
        x = Features.balanced(layer.in_channels, ()) if whole_x else self._dealt(layer.in_channels)
        y = Features.balanced(layer.out_channels, ()) if whole_y else self._dealt(layer.out_channels)
        self._cut(path, "weight", 1 if whole_y else 0, x if whole_y else y)
        if layer.bias is not None and not whole_y:
            self._cut(path, "bias", 0, y)
        cut = {name: Shard(-1) for name, _ in self.axes}
        whole = {name: Replicate() for name, _ in self.axes}
        self.plan = self.plan.use(path, x=whole if whole_x else cut, dy=whole if whole_y else cut)
        self.plan = self.plan.note(path, ConvolutionNote(x, y, enters, leaves), by=self.mode.name)
        role = "h" if whole_x else "k" if whole_y else "groups"
        roles = " ".join(f"{name}:{role}" for name, _ in self.axes)
        what = f"{layer.in_channels} channels to {layer.out_channels}"
        what += f" in {layer.groups} groups" if grouped else ""
        self.plan = self.plan.role(path, self.mode.name, roles, f"{what}, those between dealt")

    def _between(self, path: str) -> None:
        module = self._module(path)
        features = self._dealt(self.chain.channels[path])
        for axis in features.names:
            activation = ActivationCut(axis, 1, features.size, features.along(axis))
            self.plan = self.plan.cut_activation(path, activation)
        if not isinstance(module, nn.GroupNorm) and path not in dict(batch_norms(self.job.model)):
            return
        for own in ("weight", "bias", "running_mean", "running_var"):
            if getattr(module, own, None) is not None:
                self._cut(path, own, 0, features)
        spec = {axis: Shard(-1) for axis in features.names}
        rung = Rung.OPERATOR if isinstance(module, nn.GroupNorm) else Rung.STATISTICS
        note = ChannelsNote(features)
        self.plan = self.plan.use(path, x=spec, dy=spec).note(path, note, by=self.mode.name, rung=rung)
        why = f"{features.size} channels, each normalised on its rank"
        before = self.plan.roles.get(path)
        self.plan = self.plan.role(path, self.mode.name, "channels", f"{why}; {before.why}" if before else why)

    def _linear(self, path: str) -> None:
        """Cuts a ``Linear`` after the chain; its in-features are all pixels of the first channel, then of the next."""
        layer, axes = self._module(path), self.mode.axes
        x, y = self._dealt(layer.in_features), Features.balanced(layer.out_features, ())
        step = RoleStep(("F",), ("k",), ("C",))  # 1D, one axis: other modes cut each Linear by itself
        elements = sent_elements(Layer(x.size, y.size), step, axes, self.job.num_tokens)
        self._cut(path, "weight", 1, x)
        spec = {axis: Shard(-1) for axis in x.names}
        self.plan = self.plan.use(path, x=spec, dy={axis: Replicate() for axis in x.names})
        self.plan = self.plan.note(path, LinearNote(step, x, y, axes, elements=elements), by=self.mode.name)
        roles = " ".join(f"{name}:k" for name, _ in self.axes)
        self.plan = self.plan.role(path, self.mode.name, roles, f"pixels of the channels to {y.size} features")


def _group_norm(module: nn.GroupNorm, input: Tensor) -> Tensor:
    own = module._parameters
    return functional.group_norm(input, module.num_groups, own["weight"], own["bias"], module.eps)
