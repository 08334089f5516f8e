"""A model's code as a list of calls, cut into chunks; and the part of it that one chunk runs.

A trace of the model gives its calls in order. Each call of a module belongs to a chunk; what lies between modules (an
addition, a reshape) goes with the last of the values it takes. What depends on the model's inputs alone every chunk
computes for itself, from the microbatch. All other values that a later chunk uses are sent to it, straight from the
chunk that made them, so a skip connection crosses as many stages as it likes::

    tokens --> token --> + --> blocks.0 | blocks.1 --> blocks.2 | norm --> head
                    chunk 0             |        chunk 1        |   chunk 2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from shardwright.analysis.device_moves import ignore_device_moves
from shardwright.analysis.in_place_writes import follow_writes, name_of, written_by
from shardwright.analysis.structure import trace
from shardwright.analysis.tracer import ATTRIBUTES, NO_GRADIENT, line_of
from shardwright.errors import LayoutError

Repeat = Callable[[str, int, int], None]
"""Told of a module, how often earlier chunks have called it, and how often all chunks do."""


class CallSite(NamedTuple):
    """One call of a module: its name, and the how-manieth call of it this is."""

    module: str
    number: int = 0


class Edge(NamedTuple):
    """Values that one chunk makes and a later one uses, by their names in the code."""

    source: int
    target: int
    values: tuple[str, ...]


@dataclass(frozen=True)
class Chunked:
    """A model's calls, each in a chunk.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> chunk_of = {CallSite("0"): 0, CallSite("1"): 0, CallSite("2"): 1}
    >>> chunked = Chunked(read_graph(model), chunk_of, 2, weights_by_module(model))
    >>> chunked.edges
    (Edge(source=0, target=1, values=('_1',)),)
    >>> chunked.weights_of(1)
    ('2.bias', '2.weight')
    """

    graph: fx.Graph = field(compare=False)
    chunk_of: Mapping[CallSite, int]
    num_chunks: int
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> Mapping[fx.Node, int | None]:
        """Every node's chunk; None where each chunk computes it for itself."""
        found: dict[fx.Node, int | None] = {}
        for node, site in sites(self.graph):
            before = [found[each] for each in node.all_input_nodes]
            latest = max((chunk for chunk in before if chunk is not None), default=None)
            if node.op == "output":
                found[node] = self.num_chunks - 1
            elif site is not None and site in self.chunk_of:
                found[node] = max(self.chunk_of[site], latest or 0)
            else:
                found[node] = latest
        for node in reversed(self.graph.nodes):  # what reads a weight goes where the weight is used
            users = [chunk for user in node.users if (chunk := found[user]) is not None]
            if node.op == "get_attr" and users:
                found[node] = min(users)
        return found

    @cached_property
    def arguments(self) -> tuple[tuple[str, str], ...]:
        """The model's arguments in the order of its forward: what the code calls each, and its name."""
        return tuple((node.name, str(node.target)) for node in self.graph.nodes if node.op == "placeholder")

    @property
    def attributes(self) -> tuple[tuple[str, str], ...]:
        """The modules' own values that the code reads, each by the module's path and its name."""
        (output,) = (node for node in self.graph.nodes if node.op == "output")
        found: tuple[tuple[str, str], ...] = output.meta.get(ATTRIBUTES, ())
        return found

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """What crosses from chunk to chunk, in order."""
        crossing: dict[tuple[int, int], dict[str, None]] = {}
        for node, chunk in self.nodes.items():
            for value in node.all_input_nodes:
                source = self.nodes[value]
                if chunk is not None and source is not None and source != chunk and value.op != "get_attr":
                    crossing.setdefault((source, chunk), {})[value.name] = None
        return tuple(Edge(*key, tuple(names)) for key, names in sorted(crossing.items()))

    @cached_property
    def learning(self) -> frozenset[str]:
        """The values from which gradients may be asked: those that reach the output, as far as the code shows."""
        found: set[fx.Node] = set()
        for node in reversed(self.graph.nodes):
            reached = node.op == "output" or node in found
            if reached and not node.meta.get(NO_GRADIENT, False) and name_of(node) != "detach":
                found.update(node.all_input_nodes)
        return frozenset(node.name for node in found)

    def nodes_of(self, chunk: int) -> tuple[fx.Node, ...]:
        """The calls of one chunk, in order, with what it computes for itself and the weights that it reads."""
        needed: set[fx.Node] = set()
        mine: list[fx.Node] = []
        for node in reversed(self.graph.nodes):
            own = self.nodes[node] == chunk
            if own or (node in needed and (self.nodes[node] is None or node.op == "get_attr")):
                mine.append(node)
                needed.update(node.all_input_nodes)
        return tuple(reversed(mine))

    @cached_property
    def _numbers(self) -> Mapping[fx.Node, int]:
        return {node: site.number for node, site in sites(self.graph) if site is not None}

    @cached_property
    def _totals(self) -> Mapping[str, int]:
        return {path: len(makers) for path, makers in self._made.items()}

    def before(self, repeat: Repeat) -> Callable[[fx.Node], None]:
        """For one run of one chunk: tells ``repeat`` of the calls that chunks before it made of a module it calls."""
        called: Counter[str] = Counter()

        def look(node: fx.Node) -> None:
            path, number = str(node.target), self._numbers[node]
            if number > called[path]:
                repeat(path, number, self._totals[path])
                called[path] = number
            called[path] += 1

        return look

    @cached_property
    def _made(self) -> Mapping[str, Sequence[frozenset[int]]]:
        """By module that the code calls, for each call the chunks that make it."""
        makers: dict[fx.Node, set[int]] = {node: set() for node, site in sites(self.graph) if site is not None}
        for chunk in range(self.num_chunks):
            for node in makers.keys() & set(self.nodes_of(chunk)):
                makers[node].add(chunk)
        found: dict[str, list[frozenset[int]]] = {}
        for node, chunks in makers.items():
            found.setdefault(str(node.target), []).append(frozenset(chunks))
        return found

    def times(self, module: str, num_calls: int, chunks: Collection[int]) -> tuple[int, ...]:
        """How many of ``chunks`` make each of the calls that the model makes of a module, or of one inside it.

        >>> model = nn.Sequential(nn.ReLU(), nn.Linear(2, 3))
        >>> chunked = Chunked(read_graph(model), {CallSite("0"): 0, CallSite("1"): 1}, 2)
        >>> chunked.times("0", 1, [0]), chunked.times("0", 1, [1])
        ((1,), (0,))
        """
        caller = next((path for path in self._made if f"{module}.".startswith(f"{path}.")), None)
        if caller is None:
            return (0,) * num_calls
        makers = self._made[caller]
        each = max(num_calls // len(makers), 1)  # calls of a module inside, for each call of the one around it
        return tuple(len(makers[min(call // each, len(makers) - 1)] & set(chunks)) for call in range(num_calls))

    def calls_of(self, chunk: int) -> tuple[str, ...]:
        """The modules that one chunk calls, each once."""
        return tuple(dict.fromkeys(str(n.target) for n in self.nodes_of(chunk) if n.op == "call_module"))

    def weights_of(self, chunk: int) -> tuple[str, ...]:
        """The names of the parameters and buffers that one chunk uses."""
        found = {str(node.target) for node in self.nodes_of(chunk) if node.op == "get_attr"}
        for module in self.calls_of(chunk):
            found.update(self.names.get(module, ()))
        return tuple(sorted(found))


def sites(graph: fx.Graph) -> Iterator[tuple[fx.Node, CallSite | None]]:
    """Every node, with the call that it is, where it calls a module."""
    calls: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op != "call_module":
            yield node, None
            continue
        path = str(node.target)
        yield node, CallSite(path, calls[path])
        calls[path] += 1


def read_graph(model: nn.Module, opened: Collection[str] = (), given: Collection[str] = ()) -> fx.Graph:
    """The model's calls; weights that its code reads itself are ``get_attr`` nodes by their names.

    Moves to devices are left out: a rank has one.

    Raises: LayoutError: code that depends on values, so that a trace cannot show it.

    >>> [node.name for node in read_graph(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).nodes]
    ['input_1', '_0', '_1', 'output']
    """
    told: list[Exception] = []
    graph = trace(model, opened=opened, given=given, shows_weights=True, told=told)
    if graph is None:
        raise LayoutError(
            f"the code of {type(model).__name__} cannot be followed, so it cannot be cut into stages",
            given="calls that depend on values, on random numbers or on attributes that the code sets itself, or "
            "that are no calls of torch" + "".join(line_of(failure) for failure in told),
            allowed="a forward that makes the same calls for any values; loops over lists of modules are fine",
            fix="move what depends on values into a module of its own, or use nn.Sequential",
        )
    ignore_device_moves(graph)
    names = {id(each): name for name, each in _tensors(model)}
    for node in list(graph.nodes):
        for tensor in _constants(node):
            name = names.get(id(tensor))
            if name is None:
                continue
            with graph.inserting_before(node):
                read = graph.get_attr(name)
            _replace(node, tensor, read)
    follow_writes(graph, model)
    for node in graph.nodes:
        _check_writes_no_weight(model, node)
    return graph


def _check_writes_no_weight(model: nn.Module, node: fx.Node) -> None:
    written = written_by(node, model)
    if written is None or written.op != "get_attr":
        return
    raise LayoutError(
        f"the code of {type(model).__name__} writes into '{written.target}', so it cannot be cut into stages",
        given=f"a call of {name_of(node)} on '{written.target}', outside of the layers",
        allowed="parameters and buffers that only a layer's own code writes into",
        fix="move the call into a module of its own",
    )


def weights_by_module(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """By module, the names of all parameters and buffers in it; a tied parameter has one name.

    >>> weights_by_module(nn.Sequential(nn.Linear(1, 1, bias=False)))
    {'': ('0.weight',), '0': ('0.weight',)}
    """
    names = {id(each): name for name, each in _tensors(model)}
    return {
        path: tuple(dict.fromkeys(names[id(each)] for _, each in _tensors(module)))
        for path, module in model.named_modules(remove_duplicate=False)
    }


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from reversed(list(model.named_parameters(remove_duplicate=False)))  # the first of tied names counts
    yield from reversed(list(model.named_buffers(remove_duplicate=False)))


def _constants(node: fx.Node) -> list[Tensor]:
    found: list[Tensor] = []
    fx.node.map_aggregate((node.args, node.kwargs), lambda a: found.append(a) if isinstance(a, Tensor) else None)
    return found


def _replace(node: fx.Node, tensor: Tensor, by: fx.Node) -> None:
    def swap(argument: Any) -> Any:
        return by if argument is tensor else argument

    node.args = fx.node.map_aggregate(node.args, swap)
    node.kwargs = fx.node.map_aggregate(node.kwargs, swap)


class Ready(NamedTuple):
    """A node, ready to run: what it calls, its arguments, and the values that nobody needs after it."""

    node: fx.Node
    call: Callable[..., Any] | None
    done_with: tuple[str, ...]


def prepare(model: nn.Module, chunked: Chunked, chunk: int) -> tuple[Ready, ...]:
    """The nodes of one chunk with the modules that they call, to be run again and again by :func:`run`."""
    nodes = chunked.nodes_of(chunk)
    kept = {value for edge in chunked.edges if edge.source == chunk for value in edge.values}
    last_use: dict[str, fx.Node] = {}
    for node in nodes:
        for value in node.all_input_nodes:
            last_use[value.name] = node
    return tuple(
        Ready(
            node,
            _callee(model, node),
            tuple(name for name, user in last_use.items() if user is node and name not in kept),
        )
        for node in nodes
    )


def _callee(model: nn.Module, node: fx.Node) -> Callable[..., Any] | None:
    call = _plain_callee(model, node)
    return torch.no_grad()(call) if call is not None and node.meta.get(NO_GRADIENT, False) else call


def _plain_callee(model: nn.Module, node: fx.Node) -> Callable[..., Any] | None:
    if node.op == "call_module":
        return model.get_submodule(str(node.target))
    if node.op == "call_function":
        assert callable(node.target)
        return node.target
    if node.op == "get_attr":
        path, _, own = str(node.target).rpartition(".")
        module = model.get_submodule(path)
        return lambda: getattr(module, own)
    if node.op == "call_method":
        method = str(node.target)
        return lambda self, *args, **named: getattr(self, method)(*args, **named)
    return None


def run(ready: Sequence[Ready], values: dict[str, Any], before: Callable[[fx.Node], None] | None = None) -> Any:
    """Runs a chunk's nodes on ``values``, which holds the model's inputs and what came in; new ones are added to it.

    Returns the model's output where the chunk makes it. ``before`` is called ahead of each module.

    >>> import torch
    >>> model = nn.Sequential(nn.ReLU(), nn.Flatten())
    >>> chunked = Chunked(read_graph(model), {CallSite("0"): 0, CallSite("1"): 0}, 1)
    >>> run(prepare(model, chunked, 0), {"input_1": torch.ones(1, 2)})
    tensor([[1., 1.]])
    """

    def look(argument: fx.Node) -> Any:
        return values[argument.name]

    result = None
    for node, call, done_with in ready:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            result = fx.node.map_arg(node.args[0], look)
        else:
            assert call is not None
            if before is not None and node.op == "call_module":
                before(node)
            if len(node.args) == 1 and type(node.args[0]) is fx.Node and not node.kwargs:
                values[node.name] = call(values[node.args[0].name])
            else:
                values[node.name] = call(*fx.node.map_arg(node.args, look), **fx.node.map_arg(node.kwargs, look))
        for name in done_with:
            values.pop(name, None)
    return result


__all__ = [
    "CallSite", "Chunked", "Edge", "Ready", "Repeat", "prepare", "read_graph", "run", "sites", "weights_by_module",
]  # fmt: skip
