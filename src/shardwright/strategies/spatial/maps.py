"""Finds which feature maps of a model can be sharded by rows, by tracing the model's code call by call.

Each traced call of a module or a function is a *step*. A map is *cut* when each rank holds some of its rows (dim 2),
as evenly as possible. Convolutions, pools, norms and elementwise operations read and return cut maps; anything else
needs whole maps. A cut map is then all-gathered before the module that needs it whole or, if a function needs it, after
the module that computed the map.

The plan is made without the height of the pictures, for a picture that is large enough. Each forward, and each
computation of traffic, settles which maps are cut for the actual height: a map with fewer rows than ranks stays whole.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from shardwright.analysis.traced.convolution_chains import CONVOLUTIONS
from shardwright.analysis.traced.structure import (
    BATCH_NORMS,
    COMBINING,
    COMBINING_METHODS,
    ELEMENTWISE_FUNCTIONS,
    ELEMENTWISE_METHODS,
    is_elementwise_module,
    is_exactly,
    module_of,
    trace,
)
from shardwright.operators.picture_rows import Resize, SlidingWindow, TransposedWindow, Upsampling

MapKind = Literal["input", "resize", "batch norm", "group norm", "dropout", "alone", "mean", "ends", "output"]
"""The kind of a step: how its output rows depend on its input rows.

``resize`` reads neighbouring rows; norms combine statistics over rows; ``alone`` and ``dropout`` treat each row by
itself; ``mean`` averages over rows. ``input`` and ``output`` stand for the model's arguments and its output. ``ends``
is anything else, and needs whole maps.
"""

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
AVERAGE_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
MEANS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
MARGINS = {"nearest": 0, "nearest-exact": 0, "linear": 1, "bilinear": 1, "trilinear": 1, "bicubic": 2}
"""The number of rows on either side of a row that each upsampling mode reads."""
ALONE_FUNCTIONS = frozenset(
    (*ELEMENTWISE_FUNCTIONS, *COMBINING, operator.truediv, operator.pow, torch.div, torch.maximum, torch.minimum)
)
ALONE_METHODS = ELEMENTWISE_METHODS | COMBINING_METHODS
JOINS = (torch.cat, torch.concat, torch.concatenate)


@dataclass(frozen=True)
class MapStep:
    """One traced call of a module or function: how it treats feature maps, and the steps whose values it reads.

    ``takes`` are these steps' numbers. ``path`` is the module called, or the name of a function; ``call`` counts the
    earlier calls of that module, None if the step calls no module. ``resize`` says which input rows an output row
    reads, for a step of that kind. ``arguments`` gives, by position or name, the number of the step whose value is that
    argument of a module, or that tensor of the output; it is None for a function, and where a module's argument is a
    list or a dict with a value inside. ``joins`` is True for a concatenation. ``num_groups`` is that of a
    ``GroupNorm``; 0 stands for as many as channels.
    """

    kind: MapKind
    takes: tuple[int, ...] = ()
    path: str = ""
    call: int | None = None
    resize: Resize | None = None
    num_groups: int = 0
    joins: bool = False
    arguments: Mapping[int | str, int] | None = None

    def num_rows(self, size: int | None) -> int | None:
        """Returns the number of output rows for ``size`` input rows; None if it is unknown.

        A mean over rows gives one row for any input. The number is unknown for the kind ``ends``, and else if ``size``
        is None.
        """
        if self.kind == "mean":
            return 1
        if self.kind == "ends" or size is None:
            return None
        return size if self.resize is None else self.resize.num_outputs(size)


@dataclass(frozen=True)
class CutMaps:
    """Which feature maps are cut by rows, and which are all-gathered at which step, for pictures of one height.

    ``rows`` has the number of rows of the value of each step (traced call), None if it is unknown; the other fields
    have numbers of steps. The values of ``cut`` are cut, and the steps ``work`` run on cut maps. The steps
    ``take`` all-gather their inputs, and the steps ``give`` their outputs. The steps ``share`` return a whole value of
    one row, such as weights of channels, which each rank combines with its own rows: the gradient of this value is
    summed over the ranks.
    """

    rows: tuple[int | None, ...]
    cut: frozenset[int]
    work: frozenset[int]
    take: frozenset[int]
    give: frozenset[int]
    share: frozenset[int]
    blame: Mapping[int, int]
    """For each value that must be whole as soon as it is computed, the step that needs it so; for texts to the user."""

    def touches(self, number: int) -> bool:
        """Returns whether a traced call runs otherwise than on one device: on cut maps, or with a collective."""
        return number in self.work or number in self.take or number in self.give or number in self.share


@dataclass(frozen=True)
class FeatureMaps:
    """The traced calls (steps) of a model in order; :meth:`settled` decides which feature maps are cut by rows.

    The first step stands for the model's first input, the last for its output. ``parts`` is the number of ranks over
    which maps are cut, ``inputs`` the names of the forward's arguments.
    """

    steps: tuple[MapStep, ...]
    parts: int
    inputs: tuple[str, ...]
    _known: dict[int | None, CutMaps] = field(default_factory=dict, init=False, compare=False, repr=False)

    @cached_property
    def calls(self) -> Mapping[str, tuple[int, ...]]:
        """The numbers of the steps that call each module, by module path."""
        by_path: dict[str, tuple[int, ...]] = {}
        for number, step in enumerate(self.steps):
            if step.call is not None:
                by_path[step.path] = (*by_path.get(step.path, ()), number)
        return by_path

    @cached_property
    def takers(self) -> tuple[tuple[int, ...], ...]:
        """For each step, the numbers of the steps that read its value."""
        return tuple(
            tuple(n for n, step in enumerate(self.steps) if value in step.takes) for value in range(len(self.steps))
        )

    def settled(self, height: int | None = None) -> CutMaps:
        """Returns which maps are cut by rows for pictures of ``height`` rows, or of any large height if it is None."""
        if height not in self._known:
            self._known[height] = _settle(self, height)
        return self._known[height]


def _settle(maps: FeatureMaps, height: int | None) -> CutMaps:
    """Returns which maps are cut, after repeated passes over the steps until no further value has to be whole."""
    wanted: dict[int, int] = {}
    while True:
        settling_pass = _SettlingPass(maps, height, dict(wanted))
        for number in range(len(maps.steps)):
            settling_pass.visit(number)
        settling_pass.check_shared()
        if settling_pass.wanted.keys() == wanted.keys():
            return settling_pass.settled()
        wanted = settling_pass.wanted


class _SettlingPass:
    """One pass over the steps that decides which values are cut, and may find more values that are needed whole."""

    def __init__(self, maps: FeatureMaps, height: int | None, wanted: dict[int, int]) -> None:
        self.maps, self.height, self.wanted = maps, height, wanted
        self.rows: list[int | None] = []
        self.cut: set[int] = set()
        self.work: set[int] = set()
        self.take: set[int] = set()
        self.give: set[int] = set()
        self.share: set[int] = set()
        self.mixed: set[int] = set()

    def settled(self) -> CutMaps:
        return CutMaps(
            tuple(self.rows),
            cut=frozenset(self.cut),
            work=frozenset(self.work),
            take=frozenset(self.take),
            give=frozenset(self.give),
            share=frozenset(self.share),
            blame=self.wanted,
        )

    def want(self, values: Collection[int], number: int) -> None:
        for value in values:
            self.wanted.setdefault(value, number)

    def visit(self, number: int) -> None:
        step = self.maps.steps[number]
        mine = [value for value in step.takes if value in self.cut]
        size = self.rows[(mine or step.takes)[0]] if step.takes else None
        self.rows.append(self.height if number == 0 else step.num_rows(size))
        if step.kind == "input":
            if number == 0 and number not in self.wanted:
                self.cut.add(number)
        elif step.arguments is not None or step.kind == "output":
            self._module(number, step, mine)
        elif mine:
            self._function(number, step, mine)

    def _module(self, number: int, step: MapStep, mine: list[int]) -> None:
        rows = self.rows[number]
        large = rows is None or rows >= self.maps.parts or step.kind == "mean"
        if mine and step.kind not in ("ends", "output") and large:
            self.work.add(number)
            if step.kind != "mean":  # a mean over rows is one row, equal on every rank
                (self.give if number in self.wanted else self.cut).add(number)
        elif mine:
            self.take.add(number)

    def _function(self, number: int, step: MapStep, mine: list[int]) -> None:
        whole = [value for value in step.takes if value not in mine]
        alike = len({self.rows[value] for value in mine}) == 1
        spots = all(self.rows[value] == 1 for value in whole) and not (step.joins and whole)
        if step.kind == "ends" or not alike or not spots or number in self.wanted:
            self.want(mine, self.wanted.get(number, number))
            return
        self.cut.add(number)
        self.work.add(number)
        if whole:
            self.mixed.add(number)

    def check_shared(self) -> None:
        """Finds whole values that are combined with cut ones: each rank's gradient of them is one term of a sum.

        The module that computed such a value sums the gradient, so the value, and all between it and the module, must
        have no other use. If it has one, the cut values are needed whole.
        """
        for number in sorted(self.mixed):
            takes = self.maps.steps[number].takes
            for value in takes:
                if value not in self.cut:
                    makers = self._makers(value)
                    self.share |= makers or set()
                    if makers is None:
                        self.want([cut_value for cut_value in takes if cut_value in self.cut], number)

    def _makers(self, value: int) -> set[int] | None:
        step = self.maps.steps[value]
        if not self._is_used_with_rows_alone(value) or step.kind == "input":
            return None
        if step.call is not None:
            return {value}
        makers = [self._makers(operand) for operand in step.takes] if step.kind == "alone" else []
        return None if None in makers or not makers else set().union(*(part for part in makers if part is not None))

    def _is_used_with_rows_alone(self, value: int) -> bool:
        steps = self.maps.steps
        return all(
            taker in self.mixed
            or (steps[taker].kind == "alone" and steps[taker].call is None and self._is_used_with_rows_alone(taker))
            for taker in self.maps.takers[value]
        )


# ---- from the model's code to steps


def follow(model: nn.Module, parts: int, copied: Collection[str] = ()) -> FeatureMaps | None:
    """Returns a model's traced calls, from which row sharding is planned (:class:`FeatureMaps`); None if not traceable.

    The result is also None if the code differs between training and evaluation. ``parts`` is the number of ranks over
    which feature maps are cut; the modules whose paths are in ``copied`` take whole maps. If the code of any submodule
    cannot be traced, none is followed: each call of a direct child, or of a child inside containers such as
    ``nn.Sequential``, is then one step.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    >>> maps = follow(model, 2)
    >>> [step.kind for step in maps.steps]
    ['input', 'resize', 'alone', 'ends', 'ends', 'output']
    >>> sorted(maps.settled().work), sorted(maps.settled().take), sorted(maps.settled(height=3).work)
    ([1, 2], [3], [])
    """
    for deep in (True, False):  # into submodules if all can be traced, else the top level only
        graph, other = (_traced(model, deep, training) for training in (model.training, not model.training))
        if graph is not None and other is not None and _spelled(graph) == _spelled(other):
            return _maps_of(model, graph, parts, frozenset(copied))
    return None


def _traced(model: nn.Module, deep: bool, training: bool) -> fx.Graph | None:
    return trace(copy.deepcopy(model).train(training), deep=deep)


def _spelled(graph: fx.Graph) -> list[tuple[str, ...]]:
    return [(node.op, str(node.target), *(source.name for source in node.all_input_nodes)) for node in graph.nodes]


def _maps_of(model: nn.Module, graph: fx.Graph, parts: int, copied: frozenset[str]) -> FeatureMaps:
    first_names = {id(module): path for path, module in model.named_modules()}
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    calls: Counter[str] = Counter()
    steps = []
    for node in graph.nodes:
        takes = tuple(numbers[source] for source in node.all_input_nodes)
        module = module_of(node, model)
        if node.op in ("placeholder", "output"):
            leaves = enumerate(tree_flatten(node.args)[0]) if node.op == "output" else ()
            places: dict[int | str, int] = {at: numbers[leaf] for at, leaf in leaves if isinstance(leaf, fx.Node)}
            steps.append(
                MapStep("output" if node.op == "output" else "input", takes, str(node.target), arguments=places)
            )
        elif module is not None:
            path = first_names[id(module)]
            steps.append(_module_step(node, module, path, calls[path], takes, numbers, path in copied))
            calls[path] += 1
        else:
            joins = node.target in JOINS
            kind: MapKind = "alone" if (_is_join(node) if joins else _is_alone(node)) else "ends"
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            steps.append(MapStep(kind, takes, name, joins=joins))
    return FeatureMaps(tuple(steps), parts, tuple(str(n.target) for n in graph.nodes if n.op == "placeholder"))


def _module_step(
    node: fx.Node, module: nn.Module, path: str, call: int, takes: tuple[int, ...], numbers: Any, copied: bool
) -> MapStep:
    pairs: list[tuple[int | str, Any]] = [*enumerate(node.args), *node.kwargs.items()]
    arguments: dict[int | str, int] = {place: numbers[value] for place, value in pairs if isinstance(value, fx.Node)}
    alone = [place for place, _ in pairs] in ([0], ["input"]) and len(arguments) == 1
    kind, resize = known(module) if alone and not copied else ("ends", None)
    nested = set(takes) != set(arguments.values())
    num_groups = module.num_groups if isinstance(module, nn.GroupNorm) else 0
    return MapStep(kind, takes, path, call, resize, num_groups, arguments=None if nested else arguments)


def _is_plain(node: fx.Node) -> bool:
    """Returns whether all arguments that are no traced values are numbers or scalar tensors that are not trained."""
    constants = [leaf for leaf in tree_flatten((node.args, node.kwargs))[0] if not isinstance(leaf, fx.Node)]
    return not any(isinstance(leaf, Tensor) and (leaf.dim() or leaf.requires_grad) for leaf in constants)


def _is_alone(node: fx.Node) -> bool:
    known_functions = node.op == "call_function" and node.target in ALONE_FUNCTIONS
    known_methods = node.op == "call_method" and node.target in ALONE_METHODS
    return (known_functions or known_methods) and _is_plain(node)


def _is_join(node: fx.Node) -> bool:
    """Returns whether the call concatenates the channels of several maps."""
    dims = [*node.args[1:], *node.kwargs.values()]
    return isinstance(node.args[0] if node.args else None, list | tuple) and dims == [1] and _is_plain(node)


# ---- the kinds of modules


def known(module: nn.Module) -> tuple[MapKind, Resize | None]:
    """Returns how a module treats a feature map (:data:`Kind`), and for "resize" which input rows an output row reads.

    The second value is None for all other kinds. Modules that need whole maps are of the kind "ends".

    >>> known(nn.Conv2d(3, 4, 5, stride=2, padding=1))[1]
    SlidingWindow(kernel=5, stride=2, padding=1, dilation=1, after=1, border='constant', ceil=False)
    >>> known(nn.Flatten()), known(nn.Dropout())
    (('ends', None), ('dropout', None))
    """
    kinds = {type(module)} if is_exactly(module, type(module)) else set()
    one: Any = module
    resize: Resize | None = None
    if kinds.intersection(CONVOLUTIONS) and "weight" in module._parameters:
        before, after = one._reversed_padding_repeated_twice[-2:]
        border: Any = "constant" if one.padding_mode == "zeros" else one.padding_mode
        resize = SlidingWindow(_first(one.kernel_size), _first(one.stride), before, _first(one.dilation), after, border)
    elif kinds.intersection(TRANSPOSED) and "weight" in module._parameters:
        resize = TransposedWindow(
            *map(_first, (one.kernel_size, one.stride, one.padding, one.dilation, one.output_padding))
        )
    elif kinds.intersection(MAX_POOLS) and not one.return_indices:
        kernel, stride, padding, dilation = map(_first, (one.kernel_size, one.stride, one.padding, one.dilation))
        resize = SlidingWindow(kernel, stride, padding, dilation, ceil=one.ceil_mode)
    elif kinds.intersection(AVERAGE_POOLS):
        kernel, stride, padding = map(_first, (one.kernel_size, one.stride, one.padding))
        resize = SlidingWindow(kernel, stride, padding, ceil=one.ceil_mode)
    elif kinds.intersection((nn.Upsample, nn.UpsamplingNearest2d)):
        factor = _first(one.scale_factor) if one.size is None else 0
        if factor and factor == int(factor) and one.mode in MARGINS and not one.align_corners:
            resize = Upsampling(int(factor), MARGINS[one.mode])
    return ("resize" if resize is not None else _kind(module, kinds)), resize


def _kind(module: nn.Module, kinds: set[type[nn.Module]]) -> MapKind:
    one: Any = module
    if kinds.intersection(BATCH_NORMS):
        return "batch norm"
    if nn.GroupNorm in kinds or (kinds.intersection(INSTANCE_NORMS) and not one.track_running_stats):
        return "group norm"
    if kinds.intersection(MEANS) and _first(one.output_size) == 1:
        return "mean"
    if nn.Dropout in kinds:
        return "dropout"
    mixes_channels = kinds.intersection((nn.Softmax, nn.LogSoftmax, nn.GLU)) and one.dim == 1
    by_channel = kinds.intersection((nn.PReLU, nn.Softmax2d, nn.LocalResponseNorm, nn.CrossMapLRN2d))
    return "alone" if is_elementwise_module(module) or mixes_channels or by_channel else "ends"


def _first(value: Any) -> Any:
    """Returns a layer's setting for the first spatial dim, the rows."""
    return value[0] if isinstance(value, tuple | list) else value
