"""Cuts a model's graph of calls into chunks for pipeline stages, and runs the nodes of one chunk.

Each call of a module is assigned to a chunk. An operator between modules (an addition, a reshape) joins the latest
chunk among its inputs. An operator that depends only on the model's inputs is computed by every chunk that needs it,
from the microbatch, and a parameter that the model's own code reads is read by each of them. Any other value used by a
later chunk is sent to it directly by the chunk that made it, so a skip connection may cross any number of stages::

    tokens --> token --> + --> blocks.0 | blocks.1 --> blocks.2 | norm --> head
                    chunk 0             |        chunk 1        |   chunk 2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from shardwright.analysis.chunks.in_place_writes import follow_writes, name_of, writes_first, written_by
from shardwright.analysis.on_meta.device_moves import ignore_device_moves
from shardwright.analysis.traced.structure import trace
from shardwright.analysis.traced.tracer import ATTRIBUTES, NO_GRADIENT, line_of
from shardwright.errors import LayoutError, UnknownCodeError

Repeat = Callable[[str, int, int], None]
"""A callback ``repeat(module, times, total)`` that is told the number of a module's calls made by earlier chunks.

Those chunks made ``times`` of the ``total`` calls.
"""


class CallSite(NamedTuple):
    """One call of a module: the module's name, and the number of the call among all calls of that module, from 0."""

    module: str
    number: int = 0


class Edge(NamedTuple):
    """The names of the activations that the pipeline chunk ``source`` sends to the later chunk ``target``."""

    source: int
    target: int
    values: tuple[str, ...]


@dataclass(frozen=True)
class ChunkedModel:
    """A model's traced graph in which every module call is assigned to a pipeline chunk.

    ``chunk_of`` gives the chunk of each call. A call without an entry, or one that takes a result of a later chunk,
    runs in the latest chunk among its inputs. ``names`` gives the parameters and buffers inside each module.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> chunk_of = {CallSite("0"): 0, CallSite("1"): 0, CallSite("2"): 1}
    >>> chunked = ChunkedModel(read_graph(model), chunk_of, 2, weights_by_module(model))
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
        """The chunk that runs each node of the graph; None if every chunk that needs a node's result runs the node."""
        chunks: dict[fx.Node, int | None] = {}
        for node, site in sites(self.graph):
            before = [chunks[value] for value in node.all_input_nodes]
            latest = max((chunk for chunk in before if chunk is not None), default=None)
            if node.op == "output":
                chunks[node] = self.num_chunks - 1
            elif site is not None and site in self.chunk_of:
                chunks[node] = max(self.chunk_of[site], latest or 0)
            else:
                chunks[node] = latest
        for node in reversed(self.graph.nodes):  # backwards: a weight read depends on no input, but has a user
            users = [chunk for user in node.users if (chunk := chunks[user]) is not None]
            if node.op == "get_attr" and users:
                chunks[node] = min(users)
        return chunks

    @cached_property
    def arguments(self) -> tuple[tuple[str, str], ...]:
        """The model's arguments in the order of its forward, as pairs of placeholder node name and argument name."""
        return tuple((node.name, str(node.target)) for node in self.graph.nodes if node.op == "placeholder")

    @property
    def attributes(self) -> tuple[tuple[str, str], ...]:
        """The attributes of modules that the model's code reads, as pairs of module path and attribute name.

        Left out are parameters, buffers, submodules, ``training``, ``forward`` and names that begin with an underscore.
        """
        (output,) = (node for node in self.graph.nodes if node.op == "output")
        attributes: tuple[tuple[str, str], ...] = output.meta.get(ATTRIBUTES, ())
        return attributes

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """The values that pipeline chunks send to later chunks: one :class:`Edge` for each pair of chunks, sorted."""
        crossing: dict[tuple[int, int], dict[str, None]] = {}
        for node, chunk in self.nodes.items():
            for value in node.all_input_nodes:
                source = self.nodes[value]
                if chunk is not None and source is not None and source != chunk and value.op != "get_attr":
                    crossing.setdefault((source, chunk), {})[value.name] = None
        return tuple(Edge(*key, tuple(names)) for key, names in sorted(crossing.items()))

    @cached_property
    def learning(self) -> frozenset[str]:
        """The names of the graph nodes that may receive a gradient.

        These nodes lead to the model's output by a path without ``no_grad`` and ``detach``.
        """
        nodes: set[fx.Node] = set()
        for node in reversed(self.graph.nodes):
            reached = node.op == "output" or node in nodes
            if reached and not node.meta.get(NO_GRADIENT, False) and name_of(node) != "detach":
                nodes.update(node.all_input_nodes)
        return frozenset(node.name for node in nodes)

    def nodes_of(self, chunk: int) -> tuple[fx.Node, ...]:
        """Returns the graph nodes that one chunk runs, in order.

        These are the nodes assigned to the chunk, and needed nodes that every chunk runs for itself: reads of
        parameters and buffers, and operators that depend on the model's inputs alone.
        """
        needed: set[fx.Node] = set()
        nodes: list[fx.Node] = []
        for node in reversed(self.graph.nodes):
            is_assigned = self.nodes[node] == chunk
            if is_assigned or (node in needed and (self.nodes[node] is None or node.op == "get_attr")):
                nodes.append(node)
                needed.update(node.all_input_nodes)
        return tuple(reversed(nodes))

    @cached_property
    def _numbers(self) -> Mapping[fx.Node, int]:
        return {node: site.number for node, site in sites(self.graph) if site is not None}

    def before(self, repeat: Repeat) -> Callable[[fx.Node], None]:
        """Returns a function to pass to :func:`run` as ``before``; it tells ``repeat`` of the calls of earlier chunks.

        Before a chunk calls a module that earlier chunks have called too, the function calls ``repeat(path, times,
        total)``: earlier chunks made ``times`` of the ``total`` calls of the module. Random numbers and buffers can
        then continue as if one device had made all the calls. The function counts, so each run needs a new one.
        """
        called: Counter[str] = Counter()

        def before_call(node: fx.Node) -> None:
            path, number = str(node.target), self._numbers[node]
            if number > called[path]:
                repeat(path, number, len(self._chunks_by_call[path]))
                called[path] = number
            called[path] += 1

        return before_call

    @cached_property
    def _called(self) -> Mapping[int, tuple[str, ...]]:
        """Maps each chunk to the names of the modules that it calls, each once."""
        return {
            chunk: tuple(dict.fromkeys(str(n.target) for n in self.nodes_of(chunk) if n.op == "call_module"))
            for chunk in range(self.num_chunks)
        }

    @cached_property
    def _chunks_by_call(self) -> Mapping[str, Sequence[frozenset[int]]]:
        """Maps each module to the chunks that make each of its calls.

        Several chunks may make a call that depends on model inputs alone.
        """
        ran = [set(self.nodes_of(chunk)) for chunk in range(self.num_chunks)]
        by_module: dict[str, list[frozenset[int]]] = {}
        for node in self._numbers:
            chunks = frozenset(chunk for chunk, nodes in enumerate(ran) if node in nodes)
            by_module.setdefault(str(node.target), []).append(chunks)
        return by_module

    @cached_property
    def _first_calls(self) -> Mapping[str, int]:
        return {path: number for number, path in enumerate(self._chunks_by_call)}

    @cached_property
    def _callers(self) -> dict[str, str | None]:
        """A cache that maps a module to the module in the graph whose call runs it: itself, one around it, or None."""
        return {}

    def times(self, module: str, num_calls: int, chunks: Collection[int]) -> tuple[int, ...]:
        """Returns, for each of ``num_calls`` calls of ``module``, how many of ``chunks`` make that call.

        ``module`` may also be inside a module of the graph. All numbers are 0 if the graph calls neither it nor a
        module around it.

        >>> model = nn.Sequential(nn.ReLU(), nn.Linear(2, 3))
        >>> chunked = ChunkedModel(read_graph(model), {CallSite("0"): 0, CallSite("1"): 1}, 2)
        >>> chunked.times("0", 1, [0]), chunked.times("0", 1, [1])
        ((1,), (0,))
        """
        if module not in self._callers:
            parts = module.split(".")
            around = [path for n in range(len(parts) + 1) if (path := ".".join(parts[:n])) in self._chunks_by_call]
            self._callers[module] = min(around, key=self._first_calls.__getitem__, default=None)
        caller = self._callers[module]
        if caller is None:
            return (0,) * num_calls
        by_call = self._chunks_by_call[caller]
        inner_calls = max(num_calls // len(by_call), 1)  # calls of ``module`` in one call of the module in the graph
        return tuple(len(by_call[min(n // inner_calls, len(by_call) - 1)] & set(chunks)) for n in range(num_calls))

    def calls_of(self, chunk: int) -> tuple[str, ...]:
        """Returns the names of the modules that one chunk calls, each once."""
        return self._called[chunk]

    def weights_of(self, chunk: int) -> tuple[str, ...]:
        """Returns the names of the parameters and buffers that one chunk uses."""
        weights = {str(node.target) for node in self.nodes_of(chunk) if node.op == "get_attr"}
        for module in self.calls_of(chunk):
            weights.update(self.names.get(module, ()))
        return tuple(sorted(weights))


def sites(graph: fx.Graph) -> Iterator[tuple[fx.Node, CallSite | None]]:
    """Yields each node of a graph with the module call that it makes (:class:`CallSite`), or None if it makes none."""
    calls: Counter[str] = Counter()
    for node in graph.nodes:
        if node.op != "call_module":
            yield node, None
            continue
        path = str(node.target)
        yield node, CallSite(path, calls[path])
        calls[path] += 1


def read_graph(
    model: nn.Module, opened: Collection[str] = (), given: Collection[str] = (), whole: Collection[str] = ()
) -> fx.Graph:
    """Traces a model and returns its graph of calls, ready to be cut into pipeline chunks.

    Parameters and buffers that the model's own code reads become ``get_attr`` nodes. Moves between devices are removed,
    since a rank has one device, and reads after an in-place write use the result of the write (:func:`follow_writes`).
    ``opened`` names modules whose code is traced too, ``whole`` containers that stay one call each, and ``given`` the
    optional arguments that are passed; all are handed to :func:`trace`.

    Raises: UnknownCodeError: the code cannot be traced, for instance because it depends on tensor values.
        LayoutError: code outside of the layers writes into a parameter or buffer.
        PlanError: the model cannot be copied.

    >>> [node.name for node in read_graph(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).nodes]
    ['input_1', '_0', '_1', 'output']
    """
    failures: list[Exception] = []
    graph = trace(model, opened=opened, whole=whole, given=given, shows_weights=True, failures=failures)
    if graph is None:
        raise UnknownCodeError(
            f"the code of {type(model).__name__} cannot be followed, so it cannot be cut into stages",
            given="calls that depend on values, on random numbers or on attributes that the code sets itself, or "
            "that are no calls of torch" + "".join(line_of(failure) for failure in failures),
            allowed="a forward that makes the same calls for any values; loops over lists of modules are fine",
            fix="move what depends on values into a module of its own, or use nn.Sequential",
        )
    ignore_device_moves(graph)
    names = {id(tensor): name for name, tensor in _tensors(model)}
    for node in list(graph.nodes):
        _read_weights(node, names)
    for node in graph.nodes:  # a constant is made once, when the code is traced, and would keep what a forward writes
        if node.args and isinstance(node.args[0], Tensor) and writes_first(node):
            raise UnknownCodeError(
                f"the code of {type(model).__name__} writes into a tensor that it makes without the inputs",
                given=f"a call of {name_of(node)} on a constant",
                allowed="such a write on a tensor made from the inputs, as x.new_zeros(...) makes it",
                fix="write x.new_zeros(...) in place of torch.zeros(...), or the result into a new tensor",
            )
    follow_writes(graph, model)
    for node in graph.nodes:
        written = written_by(node, model)
        if written is not None and written.op == "get_attr":
            raise LayoutError(
                f"the code of {type(model).__name__} writes into '{written.target}', so it cannot be cut into stages",
                given=f"a call of {name_of(node)} on '{written.target}', outside of the layers",
                allowed="parameters and buffers that only a layer's own code writes into",
                fix="move the call into a module of its own",
            )
    return graph


def weights_by_module(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns the names of all parameters and buffers inside each module, by module name.

    A tied parameter appears under one name everywhere.

    >>> weights_by_module(nn.Sequential(nn.Linear(1, 1, bias=False)))
    {'': ('0.weight',), '0': ('0.weight',)}
    """
    names = {id(tensor): name for name, tensor in _tensors(model)}
    return {
        path: tuple(dict.fromkeys(names[id(tensor)] for _, tensor in _tensors(module)))
        for path, module in model.named_modules(remove_duplicate=False)
    }


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    # reversed, so that in a dict by id the first of several tied names wins
    yield from reversed(list(model.named_parameters(remove_duplicate=False)))
    yield from reversed(list(model.named_buffers(remove_duplicate=False)))


def _read_weights(node: fx.Node, names: Mapping[int, str]) -> None:
    """Replaces the weights among a node's arguments by ``get_attr`` nodes."""

    def read(argument: Any) -> Any:
        if not isinstance(argument, Tensor) or id(argument) not in names:
            return argument
        with node.graph.inserting_before(node):
            return node.graph.get_attr(names[id(argument)])

    node.args = fx.node.map_aggregate(node.args, read)
    node.kwargs = fx.node.map_aggregate(node.kwargs, read)


class PreparedNode(NamedTuple):
    """A graph node together with the function that it calls, and with the values that can be freed after it.

    ``call`` is None for the model's inputs and output, which call nothing. ``done_with`` names the values.
    """

    node: fx.Node
    call: Callable[..., Any] | None
    done_with: tuple[str, ...]


def prepare(model: nn.Module, chunked: ChunkedModel, chunk: int) -> tuple[PreparedNode, ...]:
    """Returns the graph nodes of one chunk with their functions looked up, for any number of calls of :func:`run`."""
    nodes = chunked.nodes_of(chunk)
    edge_values = {value for edge in chunked.edges if edge.source == chunk for value in edge.values}
    last_use: dict[str, fx.Node] = {}
    for node in nodes:
        for value in node.all_input_nodes:
            last_use[value.name] = node
    return tuple(
        PreparedNode(
            node,
            _callee(model, node),
            tuple(name for name, user in last_use.items() if user is node and name not in edge_values),
        )
        for node in nodes
    )


def _callee(model: nn.Module, node: fx.Node) -> Callable[..., Any] | None:
    call: Callable[..., Any] | None = None
    if node.op == "call_module":
        call = model.get_submodule(str(node.target))
    elif node.op == "call_function":
        assert callable(node.target)
        call = node.target
    elif node.op == "get_attr":
        path, _, name = str(node.target).rpartition(".")
        call = partial(getattr, model.get_submodule(path), name)  # looked up in each run, since it may be replaced
    elif node.op == "call_method":
        call = partial(_call_method, str(node.target))
    return torch.no_grad()(call) if call is not None and node.meta.get(NO_GRADIENT, False) else call


def _call_method(method: str, self: Any, /, *args: Any, **named: Any) -> Any:
    return getattr(self, method)(*args, **named)


def run(ready: Sequence[PreparedNode], values: dict[str, Any], before: Callable[[fx.Node], None] | None = None) -> Any:
    """Runs the nodes of one chunk and returns the model's output, or None if another chunk computes the output.

    ``ready`` is the chunk as :func:`prepare` returns it. ``values`` holds, by node name, the model's inputs and the
    values received from other chunks. Results are added to it, and each value is removed after its last use unless it
    is sent to another chunk. ``before`` is called with the node of each module call just before the call.

    >>> import torch
    >>> model = nn.Sequential(nn.ReLU(), nn.Flatten())
    >>> chunked = ChunkedModel(read_graph(model), {CallSite("0"): 0, CallSite("1"): 0}, 1)
    >>> run(prepare(model, chunked, 0), {"input_1": torch.ones(1, 2)})
    tensor([[1., 1.]])
    """

    def value_of(argument: fx.Node) -> Any:
        return values[argument.name]

    result = None
    for node, call, done_with in ready:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            result = fx.node.map_arg(node.args[0], value_of)
        else:
            assert call is not None
            if before is not None and node.op == "call_module":
                before(node)
            if len(node.args) == 1 and type(node.args[0]) is fx.Node and not node.kwargs:
                values[node.name] = call(values[node.args[0].name])  # the usual case: map_arg is slow
            else:
                values[node.name] = call(
                    *fx.node.map_arg(node.args, value_of), **fx.node.map_arg(node.kwargs, value_of)
                )
        for name in done_with:
            values.pop(name, None)
    return result
