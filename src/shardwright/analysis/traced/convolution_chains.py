"""Finds chains of convolutions whose channels can be sharded: the first by out-channels, the last by in-channels.

::

    conv -> batch norm -> relu -> depthwise conv -> batch norm -> relu -> conv
    |first|   between     between      |middle|       between     between |last|

A shard is a number of whole *units*: single channels, or the groups of a grouped convolution or GroupNorm.
"""

from __future__ import annotations

from collections.abc import Collection
from math import gcd
from typing import Any, NamedTuple, cast

import torch
from torch import fx, nn
from torch.nn import functional

from shardwright.analysis.traced.callers import AllowedCallers, called_elsewhere
from shardwright.analysis.traced.structure import (
    BATCH_NORMS,
    CONTAINERS,
    has_choices,
    is_elementwise,
    is_exactly,
    module_of,
    registered_twice,
    trace,
)

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CHANNELWISE_MODULES = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.Upsample,
)  # fmt: skip
CHANNELWISE_FUNCTIONS = frozenset((
    functional.max_pool1d, functional.max_pool2d, functional.max_pool3d, functional.avg_pool1d, functional.avg_pool2d,
    functional.avg_pool3d, functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d,
    functional.adaptive_avg_pool3d, functional.interpolate,
))  # fmt: skip


class ConvolutionChain(NamedTuple):
    """A chain of layers, by name, between which channels can be sharded.

    ``firsts`` are cut by their out-channels, ``middles`` are grouped convolutions that keep the cut, and ``last`` (a
    convolution, or a ``Linear`` after a flatten) is cut by its in-channels. ``between`` lists the norms and dropouts
    inside the chain, which must know about the cut. ``units`` is the largest number of shards, and ``channels`` gives
    the number of channels that are cut in each layer. ``allowed_callers`` gives the code that may call each layer.
    """

    firsts: tuple[str, ...]
    middles: tuple[str, ...]
    between: tuple[str, ...]
    last: str
    units: int
    channels: dict[str, int]
    allowed_callers: dict[str, AllowedCallers]


def find_convolution_chains(
    model: nn.Module, taken: Collection[str] = (), parts: int = 2
) -> tuple[ConvolutionChain, ...]:
    """Returns the chains of convolutions in a model whose channels can be sharded.

    A layer belongs to one chain at most, and to none if its name is in ``taken``. A chain contains a GroupNorm only if
    each of ``parts`` shards gets at least one whole group. Chains are found only in forwards that can be traced and
    have no optional arguments. A layer that is called or registered twice is in no chain, and a chain is left out if
    code elsewhere calls one of its layers.

    >>> block = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    >>> (chain,) = find_convolution_chains(block)
    >>> chain.firsts, chain.middles, chain.between, chain.last, chain.units
    (('0',), ('1',), (), '3', 8)
    """
    if not any(map(_is_convolution, model.modules())):
        return ()
    used = set(taken)
    twice = registered_twice(model)
    names = {path for path, _ in model.named_modules()}
    used |= {
        path for path, module in model.named_modules(remove_duplicate=False) if id(module) in twice or path not in names
    }
    chains: list[ConvolutionChain] = []
    traced: list[str] = []
    for path, module in model.named_modules():
        inside = any(not root or path.startswith(f"{root}.") for root in traced)
        if inside or has_choices(module) or not any(_is_convolution(child) for child in module.modules()):
            continue
        graph = trace(module, deep=True) if not _is_convolution(module) else None
        if graph is not None:
            traced.append(path)
            chains += _ChainSearch(module, path, graph, used, parts).chains()
    allowed_callers = {layer: allowed for chain in chains for layer, allowed in chain.allowed_callers.items()}
    elsewhere = called_elsewhere(model, allowed_callers)
    return tuple(chain for chain in chains if not elsewhere.intersection(chain.allowed_callers))


def _is_convolution(module: nn.Module | None) -> bool:
    return any(is_exactly(module, kind) for kind in CONVOLUTIONS)


class _NoChainError(Exception):
    """Raised in the search, backwards from a last layer, at a node that cannot be part of a chain."""


class _ChainPart(NamedTuple):
    """The part of a chain from its first convolutions to one node."""

    firsts: tuple[fx.Node, ...]
    middles: tuple[fx.Node, ...]
    between: tuple[fx.Node, ...]
    channels: int
    units: int

    def with_between(self, node: fx.Node) -> _ChainPart:
        return self._replace(between=(*self.between, node))


class _ChainSearch:
    """Searches the graph of one module for chains, backwards from each possible last layer."""

    def __init__(self, root: nn.Module, path: str, graph: fx.Graph, used: set[str], parts: int) -> None:
        self.root, self.path, self.graph, self.used, self.parts = root, path, graph, used, parts
        self.calls = [node.target for node in graph.nodes if node.op == "call_module"]

    def chains(self) -> list[ConvolutionChain]:
        # ungrouped last layers first: a grouped convolution is better used in the middle of a longer chain
        ends = [node for node in self.graph.nodes if self._convolution(node) is not None]
        ends.sort(key=lambda node: cast(Any, self._convolution(node)).groups > 1)
        ends += [node for node in self.graph.nodes if is_exactly(module_of(node, self.root), nn.Linear)]
        chains = []
        for node in ends:
            try:
                chain = self._chain_to(node)
            except _NoChainError:
                continue
            self.used.update((*chain.firsts, *chain.middles, chain.last))
            chains.append(chain)
        return chains

    def _name(self, node: fx.Node) -> str:
        return f"{self.path}.{node.target}".lstrip(".")

    def _convolution(self, node: fx.Node) -> Any:
        module = module_of(node, self.root)
        return module if _is_convolution(module) else None

    def _check_free(self, node: fx.Node) -> None:
        if self._name(node) in self.used or self.calls.count(node.target) > 1:
            raise _NoChainError

    def _chain_to(self, last: fx.Node) -> ConvolutionChain:
        self._check_free(last)
        convolution = self._convolution(last)
        if len(last.all_input_nodes) != 1:
            raise _NoChainError
        if convolution is None:
            part = self._flat_part(last.all_input_nodes[0], cast(nn.Linear, module_of(last, self.root)).in_features)
        else:
            part = self._part(last.all_input_nodes[0])
            part = part._replace(units=gcd(part.units, convolution.groups if convolution.groups > 1 else part.units))
        inside = {*part.firsts, *part.middles, *part.between, last}
        if any(not inside.issuperset(node.users) for node in inside - {last}):
            raise _NoChainError  # a user outside of the chain would get a shard of the channels
        if any(before in inside for node in part.firsts for before in node.all_input_nodes):
            raise _NoChainError  # a first layer needs all in-channels, but would get a shard from another layer
        calls = (node for node in dict.fromkeys(part.between) if node.op == "call_module")
        between = tuple(node for node in calls if self._depends_on_channels(node))
        for node in between:
            self._check_free(node)
        channels = {self._name(node): node.meta["channels"] for node in (*part.firsts, *part.middles, *between)}
        channels[self._name(last)] = part.channels
        names = [tuple(self._name(n) for n in dict.fromkeys(ns)) for ns in (part.firsts, part.middles, between)]
        layers = (*part.firsts, *part.middles, *between, last)
        allowed_callers = {self._name(node): self._allowed_callers(node) for node in layers}
        return ConvolutionChain(names[0], names[1], names[2], self._name(last), part.units, channels, allowed_callers)

    def _allowed_callers(self, node: fx.Node) -> AllowedCallers:
        """Returns the only allowed caller of a layer: the innermost running module that is not a plain container."""
        running = [path for path in node.meta["within"] if type(self.root.get_submodule(path)) not in CONTAINERS]
        caller = f"{self.path}.{running[-1]}".lstrip(".") if running else self.path
        return AllowedCallers(self.path, frozenset([caller]))

    def _part(self, node: fx.Node) -> _ChainPart:
        """Returns the part of a chain that ends with ``node``; raises _NoChainError if there is none."""
        convolution = self._convolution(node)
        if convolution is not None:
            return self._part_to_convolution(node, convolution)
        if not self._is_channelwise(node):
            raise _NoChainError
        parts = [self._part(before) for before in node.all_input_nodes]
        if not parts or len({part.channels for part in parts}) > 1:
            raise _NoChainError
        module = module_of(node, self.root)
        groups = (module.num_groups,) if isinstance(module, nn.GroupNorm) else ()
        node.meta["channels"] = parts[0].channels
        joined = _ChainPart(
            tuple(n for part in parts for n in part.firsts),
            tuple(n for part in parts for n in part.middles),
            tuple(n for part in parts for n in part.between),
            parts[0].channels,
            gcd(*(part.units for part in parts), *groups),
        )
        if groups and joined.units < self.parts:
            raise _NoChainError  # some rank would hold no whole group
        return joined.with_between(node)

    def _part_to_convolution(self, node: fx.Node, convolution: Any) -> _ChainPart:
        self._check_free(node)
        out, groups = convolution.out_channels, convolution.groups
        node.meta["channels"] = out
        if groups > 1 and len(node.all_input_nodes) == 1:
            try:
                part = self._part(node.all_input_nodes[0])
                units = gcd(part.units, groups)
                if units > 1:
                    return part._replace(middles=(*part.middles, node), channels=out, units=units)
            except _NoChainError:
                pass  # no chain leads here, so this convolution is a first layer
        return _ChainPart((node,), (), (), out, groups if groups > 1 else out)

    def _flat_part(self, node: fx.Node, in_features: int) -> _ChainPart:
        """Returns the part of a chain up to a flattened value, in which each channel has become several features.

        The number of features is noted in the ``meta`` of the nodes after the flatten. Raises _NoChainError if there is
        no such part.
        """
        if _is_flatten(node, self.root):
            part = self._part(node.all_input_nodes[0])
            if in_features % part.channels:
                raise _NoChainError
        elif is_elementwise(node, self.root) and len(node.all_input_nodes) == 1:
            part = self._flat_part(node.all_input_nodes[0], in_features)
        else:
            raise _NoChainError
        node.meta["channels"] = in_features
        return part.with_between(node)._replace(channels=in_features)

    def _depends_on_channels(self, node: fx.Node) -> bool:
        """Whether a module must know which channels its shard holds."""
        module = module_of(node, self.root)
        assert module is not None
        return isinstance(module, nn.Dropout) or bool(module._parameters or module._buffers)

    def _is_channelwise(self, node: fx.Node) -> bool:
        module = module_of(node, self.root)
        is_module = any(is_exactly(module, kind) for kind in (*BATCH_NORMS, nn.GroupNorm, *CHANNELWISE_MODULES))
        if is_module or (node.op == "call_function" and node.target in CHANNELWISE_FUNCTIONS):
            return len(node.all_input_nodes) == 1
        return is_elementwise(node, self.root)


def _is_flatten(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node flattens all dims but the first."""
    module = module_of(node, root)
    if is_exactly(module, nn.Flatten):
        return (cast(nn.Flatten, module).start_dim, cast(nn.Flatten, module).end_dim) == (1, -1)
    if node.target is torch.flatten or (node.op == "call_method" and node.target == "flatten"):
        return (*node.args[1:], *node.kwargs.items()) in [(1,), (1, -1), (("start_dim", 1),)]
    return False
