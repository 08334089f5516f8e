"""Analyzes the code of a plain model: parameter uses, traces, pairs of linear layers to shard, and the output head.

:func:`trace` runs a module's forward on proxies and records its calls as an ``fx.Graph``. The other functions search
such graphs. Strategies use the results to decide which layers can be column- and row-parallel.
"""

from __future__ import annotations

import inspect
import operator
from ast import literal_eval
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from shardwright.analysis.calls.draw_calls import RefusesRandomNumbers, draws_by_method
from shardwright.analysis.calls.reentrant_checkpoints import without_reentry
from shardwright.analysis.objects.copying import copied
from shardwright.analysis.traced.kept_traces import kept
from shardwright.analysis.traced.torch_loops import KNOWN_LOOPS, loop_of
from shardwright.analysis.traced.traced_names import NO_TENSOR, ResultClass, class_of_result, traceable_forward
from shardwright.analysis.traced.tracer import (
    ATTRIBUTES,
    AttributeReads,
    Tracer,
    WeightReadTracer,
    refusing_own_functions,
)

ELEMENTWISE_MODULES = (
    nn.GELU, nn.ReLU, nn.ReLU6, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.Softplus,
    nn.Mish, nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid, nn.Softsign, nn.Dropout, nn.Identity,
)  # fmt: skip
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""The exact classes of BatchNorm whose statistics can be synchronized; a subclass may compute anything."""

ELEMENTWISE_FUNCTIONS = frozenset((
    functional.gelu, functional.relu, functional.silu, functional.tanh, functional.sigmoid, functional.elu,
    functional.leaky_relu, functional.softplus, functional.mish, functional.hardswish, functional.logsigmoid,
    torch.relu, torch.tanh, torch.sigmoid, torch.mul, torch.square, operator.mul, operator.neg,
))  # fmt: skip
ELEMENTWISE_METHODS = frozenset(["relu", "tanh", "sigmoid", "mul", "square", "contiguous", "clone"])
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules without code of their own: a call of one counts as a call of its children by the same caller."""


def is_inside(path: str, module: str) -> bool:
    """Returns whether the module at ``path`` is the module at path ``module``, or inside of it; "" is the whole model.

    >>> is_inside("layers.1.up", "layers.1"), is_inside("layers.10", "layers.1"), is_inside("head", "")
    (True, False, True)
    """
    return not module or f"{path}.".startswith(f"{module}.")


def is_known(module: nn.Module) -> bool:
    """Returns whether a module is of a class of torch's or shardwright's own, whose code is known.

    >>> is_known(nn.Linear(2, 2)), is_known(type("Mine", (nn.Linear,), {"__module__": "mine"})(2, 2))
    (True, False)
    """
    return type(module).__module__.startswith(("torch.nn.", "shardwright.models."))


def owners(model: nn.Module, *, every_path: bool = False) -> Iterator[tuple[str, nn.Module, str, str]]:
    """Yields every use of a parameter: the module's name, the module, its attribute, and the parameter's full name.

    A tied parameter is one parameter with several uses; the first of its names counts as its full name. A module that
    is registered under several names is listed under the first name, or with ``every_path`` under each name.

    >>> tied = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    >>> tied[1].weight = tied[0].weight
    >>> [(module, name) for module, _, _, name in owners(tied)]
    [('0', '0.weight'), ('1', '0.weight')]
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for path, module in model.named_modules(remove_duplicate=not every_path):
        for own, parameter in module._parameters.items():
            if parameter is not None:
                yield path, module, own, names[id(parameter)]


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module, *, inside: bool = False) -> bool:
    """Returns whether a module has forward or backward hooks; with ``inside``, its submodules are searched too.

    >>> layer = nn.Linear(2, 2)
    >>> handle = layer.register_forward_hook(print)
    >>> has_hooks(layer), has_hooks(nn.Sequential(layer)), has_hooks(nn.Sequential(layer), inside=True)
    (True, False, True)
    """
    return any(getattr(submodule, name) for submodule in (module.modules() if inside else (module,)) for name in HOOKS)


def has_backward_hooks(module: nn.Module) -> bool:
    """Returns whether a module has backward hooks or backward pre-hooks, which need the gradients of its whole call.

    >>> layer = nn.Linear(2, 2)
    >>> handle = layer.register_forward_hook(print)
    >>> has_backward_hooks(layer)
    False
    """
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_hooks_of_user(module: nn.Module) -> bool:
    """Returns whether a module has a hook other than this library's.

    >>> layer = nn.Linear(2, 2)
    >>> handle = layer.register_forward_hook(print)
    >>> has_hooks_of_user(layer)
    True
    """
    hooks = (getattr(hook, "func", hook) for name in HOOKS for hook in getattr(module, name).values())
    return any(not str(getattr(hook, "__module__", "")).startswith("shardwright.") for hook in hooks)


GUARDED = "guarded_kind"
"""The attribute in which a class that refuses reads of sharded parameters holds the module's original class."""


def kind_of(module: nn.Module) -> type[nn.Module]:
    """Returns a module's class; if it was replaced by one that refuses reads of sharded parameters, the original class.

    >>> kind_of(nn.ReLU()).__name__
    'ReLU'
    """
    kind: type[nn.Module] = vars(type(module)).get(GUARDED, type(module))
    return kind


def runs_as(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Returns whether a module runs the forward of class ``kind``, not that of a subclass or a replacement."""
    return type(module) is kind and "forward" not in vars(module)


def is_exactly(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Returns whether a module runs the forward of class ``kind`` unchanged and has no hooks.

    >>> is_exactly(nn.Linear(2, 2), nn.Linear), is_exactly(nn.Bilinear(2, 2, 2), nn.Linear)
    (True, False)
    """
    return module is not None and runs_as(module, kind) and not has_hooks(module)


def is_elementwise_module(module: nn.Module | None) -> bool:
    """Returns whether a module is known, by its exact class, to compute each output element from one input element.

    >>> class Mixing(nn.ReLU):
    ...     def forward(self, x):
    ...         return x.sum(-1, keepdim=True) * x
    >>> is_elementwise_module(nn.ReLU()), is_elementwise_module(Mixing())
    (True, False)
    """
    return any(is_exactly(module, kind) for kind in ELEMENTWISE_MODULES)


def registered_twice(model: nn.Module) -> set[int]:
    """Returns the ids of modules that are registered in two or more places, so that several callers may use them.

    >>> layer = nn.Linear(2, 2)
    >>> registered_twice(nn.Sequential(layer, nn.ReLU(), layer)) == {id(layer)}
    True
    """
    places = Counter(id(child) for module in model.modules() for child in module._modules.values() if child is not None)
    return {key for key, count in places.items() if count > 1}


IS_NONE = " is None"
"""A suffix to an argument's name in ``given`` of :func:`trace`: the argument is None, for code with ``x is None``."""
IS_NO_TENSOR = " is no tensor"
"""A suffix to an argument's name in ``given`` of :func:`trace`: neither a tensor nor None, but of unknown class."""
IS_VALUE = " is always "
"""A suffix to an argument's name in ``given`` of :func:`trace`, before a literal: code may branch on this value."""
OPEN_ENDED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class LayerChain(NamedTuple):
    """A chain ``Linear -> elementwise operators -> Linear``, whose layers can be column- and then row-parallel.

    ``columns`` names the first layers, and ``row`` the last layer, to which several first layers may lead. ``between``
    names the modules between them.
    """

    columns: tuple[str, ...]
    between: tuple[str, ...]
    row: str
    entry: str | None
    """The module whose first argument is the input of all ``columns`` and is not used otherwise.

    It is None if there is one column or no such module."""
    owner: str | None = None
    """The module in whose forward the chain was found; None if the user named the chain."""


def trace(
    module: nn.Module,
    *,
    deep: bool = False,
    opened: Collection[str] = (),
    whole: Collection[str] = (),
    given: Collection[str] = (),
    shows_weights: bool = False,
    failures: list[Exception] | None = None,
) -> fx.Graph | None:
    """Returns the graph of the calls that a module's forward makes, or None if its Python code cannot be traced.

    Code cannot be traced if it depends on tensor values, draws random numbers itself, runs under autocast or, with
    ``shows_weights``, changes an attribute that it reads or sets one of a module that it calls.

    A call of a submodule is a single node. The code is followed, however, into plain containers, into modules named in
    ``opened``, and with ``deep`` into all modules that are not torch's own, but never into a module with hooks.
    Containers in ``whole`` stay single calls too, unless they are opened.
    ``node.meta["within"]`` lists the followed modules that were running at a call, outermost first.
    Optional arguments keep their defaults unless ``given`` names them. A suffix after such a name says what is passed:
    :data:`IS_NONE`, :data:`IS_NO_TENSOR`, or :data:`IS_VALUE` and a literal.

    With ``shows_weights``, a call of a torch function on a parameter or buffer is a node too. Without it, code that
    reads a parameter of a submodule that is a single node cannot be traced; unless ``deep`` is set, this concerns only
    parameters of an ``nn.Linear`` or ``nn.Embedding``. An exception that the traced code raises is appended to
    ``failures``.

    torch's own tracer replaces ``nn.Module.__call__`` in the whole process. This function changes only a copy of the
    module, so other threads can run models meanwhile.

    Raises: PlanError: the module cannot be copied (:func:`copied`).

    >>> [node.op for node in trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).nodes]
    ['placeholder', 'call_module', 'call_module', 'output']
    """
    graph = fx.Graph()
    tracer = Tracer(graph)
    # only the structure is copied: weights are shared, and WeightReadTracer recognizes them by their ids
    copy = copied(module, {id(t): t for t in (*module.parameters(), *module.buffers())})

    def result_class(path: str) -> type | None:
        return class_of_result(module.get_submodule(path), partial(trace, shows_weights=True))

    submodules = [*_submodules(copy, deep=deep, opened=opened, whole=whole)]
    _replace_forwards(iter(submodules), tracer, result_class, deep=deep, shows_weights=shows_weights)
    try:
        inputs = {name: _input(tracer, name, given) for name in _argument_names(copy.forward, given)}
        weights = [*module.parameters(), *module.buffers()] if shows_weights else []
        if shows_weights and type(copy) in KNOWN_LOOPS:
            copy.forward = loop_of(copy)
        reads = AttributeReads(copy) if shows_weights else None
        buffers = [(child, dict(child._buffers)) for child in copy.modules()] if shows_weights else []
        forward = traceable_forward(copy, result_class, tracer)
        bound = inspect.signature(copy.forward).bind_partial()
        bound.arguments.update(inputs)
        full_precision = torch.autocast("cpu", enabled=False)
        reading = WeightReadTracer(tracer, weights)
        with (
            refusing_own_functions(), without_reentry(), RefusesRandomNumbers(), reading, torch.enable_grad(),
            full_precision,
        ):  # fmt: skip
            output = graph.output(tracer.create_arg(forward(*bound.args, **bound.kwargs)))
        if any(node.op == "call_method" and draws_by_method(str(node.target)) for node in graph.nodes):
            return None  # RefusesRandomNumbers does not see methods of proxies that draw
        if any(child._buffers.get(name) is not buffer for child, kept in buffers for name, buffer in kept.items()):
            return None  # a graph does not replace a module's buffers
        if reads is not None and reads.has_changed():
            return None  # the code changes what it reads, so the next step would read another value
        called = [path for path, _, is_entered in submodules if not is_entered]
        if reads is not None and any(is_inside(path, whole) for path in reads.changed() for whole in called):
            return None  # the code sets something in a module before its call, and the graph has the call alone
        output.meta[ATTRIBUTES] = tuple(reads.found) if reads is not None else ()
    except Exception as failure:  # any Python code may run here; a module that cannot be traced stays one call
        if failures is not None:
            failures.append(failure)
        return None
    return graph


def _replace_forwards(
    submodules: Iterator[tuple[str, nn.Module, bool]],
    tracer: Tracer,
    result_class: ResultClass,
    *,
    deep: bool,
    shows_weights: bool,
) -> None:
    """Makes the submodules that a trace enters run on proxies, and turns a call of any other into a graph node."""
    running: list[str] = []
    patched = set[nn.Module]()
    for path, child, is_entered in submodules:
        if child in patched:
            continue  # a module with several names is traced under the first name
        patched.add(child)
        if is_entered:
            is_loop = shows_weights and type(child) in KNOWN_LOOPS
            forward = loop_of(child) if is_loop else traceable_forward(child, result_class)
            child.forward = partial(_enter, running, path, forward)
            continue
        child.forward = partial(_call, tracer, running, path)
        for name in HOOKS:
            setattr(child, name, {})
        for layer in child.modules():
            if not shows_weights and (deep or isinstance(layer, nn.Linear | nn.Embedding)):
                layer._parameters = {}  # so that outside code that reads a weight fails: it could not use a sharded one


def trace_once(module: nn.Module) -> fx.Graph | None:
    """Returns ``trace(module)``, computed only once in a :func:`traces_kept` context, in which a plan is made.

    The caller must not change the graph.
    """
    return kept(module, trace)


def _argument_names(forward: Callable[..., Any], given: Collection[str]) -> Iterator[str]:
    """Yields the names of a forward's required arguments and of those in ``given``."""
    for name, parameter in inspect.signature(forward).parameters.items():
        is_given = any(name + suffix in given for suffix in ("", IS_NONE, IS_NO_TENSOR))
        is_given |= any(entry.startswith(name + IS_VALUE) for entry in given)
        if (is_given or parameter.default is inspect.Parameter.empty) and parameter.kind not in OPEN_ENDED:
            yield name


def _input(tracer: Tracer, name: str, given: Collection[str]) -> Any:
    if name + IS_NONE in given:
        return None
    for entry in given:
        if entry.startswith(name + IS_VALUE):
            return literal_eval(entry.removeprefix(name + IS_VALUE))
    node = tracer.graph.placeholder(name)
    node.meta[NO_TENSOR] = name + IS_NO_TENSOR in given
    return tracer.proxy(node)


def _call(tracer: fx.proxy.TracerBase, running: list[str], path: str, *args: Any, **named: Any) -> fx.Proxy:
    proxy = tracer.create_proxy("call_module", path, args, named)
    proxy.node.meta["within"] = tuple(running)
    return proxy


def _enter(running: list[str], path: str, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    running.append(path)
    result = forward(*args, **named)
    running.pop()
    return result


def _submodules(
    module: nn.Module,
    prefix: str = "",
    *,
    deep: bool = False,
    opened: Collection[str] = (),
    whole: Collection[str] = (),
) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yields (path, module, whether a trace enters it) for each submodule, but for those inside modules not entered."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        is_entered = path in opened or (type(child) in CONTAINERS and path not in whole)
        is_entered = is_entered or (deep and not type(child).__module__.startswith("torch.nn."))
        is_entered = is_entered and not has_hooks(child)
        yield path, child, is_entered
        if is_entered:
            yield from _submodules(child, f"{path}.", deep=deep, opened=opened, whole=whole)


def find_chains(model: nn.Module) -> tuple[LayerChain, ...]:
    """Returns every chain ``Linear -> elementwise -> Linear`` of a model; a layer is in one chain at most.

    Chains are found in forwards that can be traced and have no optional arguments. A layer that is called or registered
    twice is in none, and neither is one whose output is also used outside of the chain.

    >>> gelu = nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 2))
    >>> find_chains(nn.Sequential(gelu, gelu))
    (LayerChain(columns=('0.0',), between=('0.1',), row='0.2', entry=None, owner='0'),)
    """
    chains: list[LayerChain] = []
    taken: set[str] = set()
    shared, names = registered_twice(model), {path for path, _ in model.named_modules()}
    for path, module in model.named_modules():
        calls = (child for _, child, is_entered in _submodules(module) if not is_entered)
        if not any(is_exactly(child, nn.Linear) for child in calls) or has_choices(module):
            continue
        graph = trace_once(module)
        for node in graph.nodes if graph is not None else ():
            chain = _chain_to(node, module, path)
            layers = (*chain.columns, *chain.between, chain.row) if chain is not None else ()
            if not names.issuperset(layers) or any(id(model.get_submodule(layer)) in shared for layer in layers):
                continue  # a second caller would pass whole features, not shards
            if chain is not None and not taken.intersection((*chain.columns, chain.row)):
                chains.append(chain)
                taken.update((*chain.columns, chain.row))
    return tuple(chains)


def has_choices(module: nn.Module) -> bool:
    """Returns whether a module's forward has optional arguments. A trace with their defaults shows one case only."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.default is not inspect.Parameter.empty for parameter in parameters)


def module_of(node: fx.Node, root: nn.Module) -> nn.Module | None:
    """Returns the module that a node of a trace calls, or None for any other node; ``root`` is the traced module."""
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


def is_elementwise(node: fx.Node, root: nn.Module) -> bool:
    """Returns whether a node of a trace is known to compute each output element from one element of each input.

    Known are common activations, dropout, products, negation and copies; any other node gives False. So does a node
    with a constant tensor that has dims or is trained, because such a tensor would have to be sharded, or its gradient
    summed. ``root`` is the traced module.
    """
    tensors = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, Tensor)]
    if any(tensor.dim() or tensor.requires_grad for tensor in tensors):
        return False  # one number per feature would have to be sharded, and a trained number's gradient summed
    if node.op == "call_module":
        return is_elementwise_module(module_of(node, root))
    if node.op == "call_function":
        return node.target in ELEMENTWISE_FUNCTIONS
    return node.op == "call_method" and node.target in ELEMENTWISE_METHODS


def _chain_to(row: fx.Node, root: nn.Module, path: str) -> LayerChain | None:
    """Returns the chain that ends in ``row``, or None if features between its layers are used elsewhere."""
    if not is_exactly(module_of(row, root), nn.Linear):
        return None
    columns: list[fx.Node] = []
    between: list[fx.Node] = []
    waiting = list(row.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node in columns or node in between:
            continue
        if is_exactly(module_of(node, root), nn.Linear):
            columns.append(node)
        elif is_elementwise(node, root):
            between.append(node)
            waiting.extend(node.all_input_nodes)
        else:
            return None
    inside = {*columns, *between, row}
    calls = [node.target for node in row.graph.nodes if node.op == "call_module"]
    if not columns or any(user not in inside for node in (*columns, *between) for user in node.users):
        return None
    if any(calls.count(node.target) > 1 for node in inside if node.op == "call_module"):
        return None
    if any(before in inside for node in columns for before in node.all_input_nodes):
        return None  # a column-parallel layer needs whole input features, but a layer of the chain makes sharded ones
    widths = {layer.out_features for node in columns if isinstance(layer := module_of(node, root), nn.Linear)}
    if len(widths) > 1:
        return None  # broadcasting between shards would pair the wrong features
    inputs = {arg for node in columns for arg in node.all_input_nodes[:1]}  # a layer called on a buffer has none
    entry = next(node for node in row.graph.nodes if node.op == "placeholder")
    # only then can one all-reduce of the module's input gradient serve all columns
    shared = len(columns) > 1 and inputs == {entry} and set(entry.users) == set(columns) and not has_hooks(root)
    names = [
        tuple(f"{path}.{node.target}".lstrip(".") for node in nodes if node.op == "call_module")
        for nodes in (reversed(columns), reversed(between), [row])
    ]
    return LayerChain(names[0], names[1], names[2][0], path if shared else None, path)


def find_head(model: nn.Module) -> str | None:
    """Returns the name of the ``Linear`` layer whose output is the model's output and is not used otherwise, or None.

    >>> find_head(nn.Sequential(nn.ReLU(), nn.Linear(2, 8)))
    '1'
    """
    graph = trace_once(model) if not has_hooks(model) else None
    if graph is None:
        return None
    (output,) = (node for node in graph.nodes if node.op == "output")
    if len(output.all_input_nodes) != 1 or output.args[0] is not output.all_input_nodes[0]:
        return None
    last = output.all_input_nodes[0]
    single_use = len(last.users) == 1 and [n.target for n in graph.nodes].count(last.target) == 1
    head = module_of(last, model)
    once = single_use and sum(module is head for _, module in model.named_modules(remove_duplicate=False)) == 1
    return str(last.target) if is_exactly(head, nn.Linear) and once else None


COMBINING = frozenset(
    (operator.add, operator.iadd, operator.sub, operator.mul, operator.imul, torch.add, torch.sub, torch.mul)
)
COMBINING_METHODS = frozenset(("add", "sub", "mul", "add_", "mul_"))
