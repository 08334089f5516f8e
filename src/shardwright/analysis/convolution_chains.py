"""Which convolutions form chains whose channels can be cut: the first by out-channels, the last by in-channels.

::

    conv -> batch norm -> relu -> depthwise conv -> batch norm -> relu -> conv
    |first|   between     between      |middle|       between     between |last|

A *unit* is the smallest run of channels that can be dealt: where a convolution has groups, these stay whole.
"""

from __future__ import annotations

from collections.abc import Collection
from math import gcd
from typing import Any, NamedTuple, cast

import torch
from torch import fx, nn
from torch.nn import functional

from shardwright.analysis.callers import AllowedCallers, called_elsewhere
from shardwright.analysis.structure import (
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
CHANNELWISE_FUNCTIONS = frozenset(
    (
        functional.max_pool1d, functional.max_pool2d, functional.max_pool3d, functional.avg_pool1d,
        functional.avg_pool2d, functional.avg_pool3d, functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d,
        functional.adaptive_avg_pool3d, functional.interpolate,
    )
)  # fmt: skip


class ConvolutionChain(NamedTuple):
    """Layers between which channels may lie cut in ``units`` runs.

    ``last`` is a convolution, or a ``Linear`` after a flatten. ``between`` are the norms and the dropouts; what else
    lies there need not know of the cut. ``channels`` are those that come out of each layer, of ``last`` that go in.
    """

    firsts: tuple[str, ...]
    middles: tuple[str, ...]
    between: tuple[str, ...]
    last: str
    units: int
    channels: dict[str, int]
    allowed_callers: dict[str, AllowedCallers]
    """Where the calls of these layers come from."""


def find_convolution_chains(
    model: nn.Module, taken: Collection[str] = (), parts: int = 2
) -> tuple[ConvolutionChain, ...]:
    """Every chain of convolutions, by the layers' names; a layer is in one chain at most, and in none if ``taken``.

    A GroupNorm is in one only if each of ``parts`` can have some of its groups whole.

    >>> block = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    >>> (chain,) = find_convolution_chains(block)
    >>> chain.firsts, chain.middles, chain.between, chain.last, chain.units
    (('0',), ('1',), (), '3', 8)
    """
    used = set(taken)
    twice = registered_twice(model)
    names = {path for path, _ in model.named_modules()}
    used |= {
        path for path, module in model.named_modules(remove_duplicate=False) if id(module) in twice or path not in names
    }
    found: list[ConvolutionChain] = []
    traced: list[str] = []
    for path, module in model.named_modules():
        inside = any(not root or path.startswith(f"{root}.") for root in traced)
        if inside or has_choices(module) or not any(_is_convolution(child) for child in module.modules()):
            continue
        graph = trace(module, deep=True) if not _is_convolution(module) else None
        if graph is not None:
            traced.append(path)
            found += _Search(model, module, path, graph, used).chains(parts)
    elsewhere = called_elsewhere(
        model, {layer: home for chain in found for layer, home in chain.allowed_callers.items()}
    )
    return tuple(chain for chain in found if not elsewhere.intersection(chain.allowed_callers))


def _is_convolution(module: nn.Module | None) -> bool:
    """Whether it is torch's own, as it is."""
    return any(is_exactly(module, kind) for kind in CONVOLUTIONS)


class _NoChainError(Exception):
    """What was found on the way back is no part of a chain."""


class _Part(NamedTuple):
    """What lies before a value, back to the first convolutions, and how its channels may be cut."""

    firsts: tuple[fx.Node, ...]
    middles: tuple[fx.Node, ...]
    between: tuple[fx.Node, ...]
    channels: int
    units: int

    def then(self, node: fx.Node) -> _Part:
        """The same with a node more between."""
        return self._replace(between=(*self.between, node))


class _Search:
    """The chains of one traced module."""

    def __init__(self, model: nn.Module, root: nn.Module, path: str, graph: fx.Graph, used: set[str]) -> None:
        self.model, self.root, self.path, self.graph, self.used = model, root, path, graph, used
        self.calls = [node.target for node in graph.nodes if node.op == "call_module"]

    def chains(self, parts: int) -> list[ConvolutionChain]:
        """Ungrouped last layers first: a grouped convolution is rather in the middle of a chain than its end."""
        self.parts = parts
        ends = [node for node in self.graph.nodes if self._convolution(node) is not None]
        ends.sort(key=lambda node: cast(Any, self._convolution(node)).groups > 1)
        ends += [node for node in self.graph.nodes if is_exactly(module_of(node, self.root), nn.Linear)]
        found = []
        for node in ends:
            try:
                chain = self._chain_to(node)
            except _NoChainError:
                continue
            self.used.update((*chain.firsts, *chain.middles, chain.last))
            found.append(chain)
        return found

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
        for node in inside - {last}:
            if not inside.issuperset(node.users):
                raise _NoChainError  # somebody else looks at cut channels
        if any(before in inside for node in part.firsts for before in node.all_input_nodes):
            raise _NoChainError  # a first layer that takes another's cut output
        calls = (node for node in dict.fromkeys(part.between) if node.op == "call_module")
        between = tuple(node for node in calls if self._is_changed_by_a_cut(node))
        for node in between:
            self._check_free(node)
        channels = {self._name(node): node.meta["channels"] for node in (*part.firsts, *part.middles, *between)}
        channels[self._name(last)] = part.channels
        names = [tuple(self._name(n) for n in dict.fromkeys(ns)) for ns in (part.firsts, part.middles, between)]
        allowed_callers = dict(self._home(node) for node in (*part.firsts, *part.middles, *between, last))
        return ConvolutionChain(names[0], names[1], names[2], self._name(last), part.units, channels, allowed_callers)

    def _home(self, node: fx.Node) -> tuple[str, AllowedCallers]:
        """Whose code calls a layer: of those running the innermost that is no mere container."""
        running = [path for path in node.meta["within"] if type(self.root.get_submodule(path)) not in CONTAINERS]
        caller = f"{self.path}.{running[-1]}".lstrip(".") if running else self.path
        return self._name(node), AllowedCallers(self.path, frozenset([caller]))

    def _part(self, node: fx.Node) -> _Part:
        """What lies before ``node`` and with it, back to the first convolutions."""
        convolution = self._convolution(node)
        if convolution is not None:
            return self._part_to_convolution(node, convolution)
        if not self._is_channelwise(node):
            raise _NoChainError
        parts = [self._part(before) for before in node.all_input_nodes]
        if not parts or len({part.channels for part in parts}) > 1:
            raise _NoChainError
        node.meta["channels"] = parts[0].channels
        joined = _Part(
            tuple(n for part in parts for n in part.firsts),
            tuple(n for part in parts for n in part.middles),
            tuple(n for part in parts for n in part.between),
            parts[0].channels,
            gcd(*(part.units for part in parts), *self._groups(node)),
        )
        if self._groups(node) and joined.units < self.parts:
            raise _NoChainError  # some rank would hold no whole group
        return joined.then(node)

    def _part_to_convolution(self, node: fx.Node, convolution: Any) -> _Part:
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
                pass  # then the chain begins here
        return _Part((node,), (), (), out, groups if groups > 1 else out)

    def _flat_part(self, node: fx.Node, in_features: int) -> _Part:
        """The same, back through elementwise work to a flatten, which puts each channel's pixels side by side."""
        if _is_flatten(node, self.root):
            part = self._part(node.all_input_nodes[0])
            if in_features % part.channels:
                raise _NoChainError
        elif is_elementwise(node, self.root) and len(node.all_input_nodes) == 1:
            part = self._flat_part(node.all_input_nodes[0], in_features)
        else:
            raise _NoChainError
        node.meta["channels"] = in_features
        return part.then(node)._replace(channels=in_features)

    def _groups(self, node: fx.Node) -> tuple[int, ...]:
        """How many groups of channels a GroupNorm normalises, each by itself."""
        module = module_of(node, self.root)
        return (module.num_groups,) if isinstance(module, nn.GroupNorm) else ()

    def _is_changed_by_a_cut(self, node: fx.Node) -> bool:
        """Whether a module must know which channels it sees; any other may be called elsewhere on whole ones."""
        module = module_of(node, self.root)
        assert module is not None
        return isinstance(module, nn.Dropout) or bool(module._parameters or module._buffers)

    def _is_channelwise(self, node: fx.Node) -> bool:
        module = module_of(node, self.root)
        if any(is_exactly(module, kind) for kind in (*BATCH_NORMS, nn.GroupNorm)):
            return len(node.all_input_nodes) == 1
        pools = any(is_exactly(module, kind) for kind in CHANNELWISE_MODULES)
        if pools or (node.op == "call_function" and node.target in CHANNELWISE_FUNCTIONS):
            return len(node.all_input_nodes) == 1
        return is_elementwise(node, self.root)


def _is_flatten(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node joins all dims but the samples', in order."""
    module = module_of(node, root)
    if is_exactly(module, nn.Flatten):
        return (cast(nn.Flatten, module).start_dim, cast(nn.Flatten, module).end_dim) == (1, -1)
    if node.target is torch.flatten or (node.op == "call_method" and node.target == "flatten"):
        return (*node.args[1:], *node.kwargs.items()) in [(1,), (1, -1), (("start_dim", 1),)]
    return False
