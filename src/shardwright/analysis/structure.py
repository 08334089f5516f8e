"""What a plain model is made of: who uses which parameter, which layers form chains, what flows where."""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from shardwright.analysis.copying import copied
from shardwright.analysis.torch_loops import KNOWN_LOOPS, loop_of
from shardwright.analysis.traced_names import NO_TENSOR, class_given, standing_in
from shardwright.analysis.tracer import ATTRIBUTES, AttributeReads, ShowsReads, Tracer
from shardwright.rng import RefusesRandomNumbers

ELEMENTWISE_MODULES = (
    nn.GELU, nn.ReLU, nn.ReLU6, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.CELU, nn.LeakyReLU, nn.Softplus,
    nn.Mish, nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid, nn.Softsign, nn.Dropout, nn.Identity,
)  # fmt: skip
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""The kinds that compute statistics over the samples in a way that is known; what is made from them may do anything."""

ELEMENTWISE_FUNCTIONS = frozenset(
    (
        functional.gelu, functional.relu, functional.silu, functional.tanh, functional.sigmoid, functional.elu,
        functional.leaky_relu, functional.softplus, functional.mish, functional.hardswish, functional.logsigmoid,
        torch.relu, torch.tanh, torch.sigmoid, torch.mul, torch.square, operator.mul, operator.neg,
    )
)  # fmt: skip
ELEMENTWISE_METHODS = frozenset(["relu", "tanh", "sigmoid", "mul", "square", "contiguous", "clone"])
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""What has no code of its own worth a name: whoever calls it calls what is in it."""


def owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, str]]:
    """Every use of a parameter: the module's name, the module, its own name for it, and the one global name.

    A tied parameter is one parameter with several uses; its first name is the global one.

    >>> tied = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    >>> tied[1].weight = tied[0].weight
    >>> [(module, name) for module, _, _, name in owners(tied)]
    [('0', '0.weight'), ('1', '0.weight')]
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for path, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield path, module, own, names[id(parameter)]


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: nn.Module, *, inside: bool = False) -> bool:
    """Whether somebody's code sees what goes into a module or comes out of it, or, ``inside``, of one in it.

    >>> layer = nn.Linear(2, 2)
    >>> handle = layer.register_forward_hook(print)
    >>> has_hooks(layer), has_hooks(nn.Sequential(layer)), has_hooks(nn.Sequential(layer), inside=True)
    (True, False, True)
    """
    return any(getattr(each, name) for each in (module.modules() if inside else (module,)) for name in HOOKS)


GUARDED = "guarded_kind"
"""Where a class that is made for one module, to watch who reads its parameters, keeps the class that it had."""


def kind_of(module: nn.Module) -> type[nn.Module]:
    """A module's class, or the one that it had before it was guarded.

    >>> kind_of(nn.ReLU()).__name__
    'ReLU'
    """
    kind: type[nn.Module] = vars(type(module)).get(GUARDED, type(module))
    return kind


def runs_as(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether a module's own code is its kind's: no subclass, no parametrization, no other forward."""
    return type(module) is kind and "forward" not in vars(module)


def is_exactly(module: nn.Module | None, kind: type[nn.Module]) -> bool:
    """Whether a module does what its kind does and nothing else: its code is its kind's, and it has no hooks.

    >>> is_exactly(nn.Linear(2, 2), nn.Linear), is_exactly(nn.Bilinear(2, 2, 2), nn.Linear)
    (True, False)
    """
    return module is not None and runs_as(module, kind) and not has_hooks(module)


def is_elementwise_module(module: nn.Module | None) -> bool:
    """Whether a module treats each element alone, as its exact type says; a subclass may do anything.

    >>> class Mixing(nn.ReLU):
    ...     def forward(self, x):
    ...         return x.sum(-1, keepdim=True) * x
    >>> is_elementwise_module(nn.ReLU()), is_elementwise_module(Mixing())
    (True, False)
    """
    return any(is_exactly(module, kind) for kind in ELEMENTWISE_MODULES)


def registered_twice(model: nn.Module) -> set[int]:
    """The ids of modules that two parents hold, or one parent twice: they may be called from anywhere.

    >>> layer = nn.Linear(2, 2)
    >>> registered_twice(nn.Sequential(layer, nn.ReLU(), layer)) == {id(layer)}
    True
    """
    places = Counter(id(child) for module in model.modules() for child in module._modules.values() if child is not None)
    return {key for key, count in places.items() if count > 1}


IS_NONE = " is None"
"""After an argument's name: it is given, and has no value, which code may ask for."""
IS_NO_TENSOR = " is no tensor"
"""After an argument's name: it is given, and is something else, of which code may ask what it is."""
OPEN_ENDED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
"""The kinds of parameters that take any number of arguments."""


class LayerChain(NamedTuple):
    """``Linear -> elementwise -> Linear``: the first layers, all that lies between, and the last layer."""

    columns: tuple[str, ...]
    between: tuple[str, ...]
    row: str
    entry: str | None
    """The module whose only input the columns share, when there are several."""
    owner: str | None = None
    """The module in whose forward the chain was seen; none where a person answers for it."""


def trace(
    module: nn.Module,
    *,
    deep: bool = False,
    opened: Collection[str] = (),
    given: Collection[str] = (),
    shows_weights: bool = False,
    told: list[Exception] | None = None,
) -> fx.Graph | None:
    """The calls that one module makes, or None where its Python code depends on values.

    The children stay calls, but for plain sequences and those named in ``opened``, whose own children do; ``deep``
    looks into all modules that are not torch's own. What has hooks stays a call, which will run them. Arguments that
    may be left out are, but for those in ``given``, which tells of a None by :data:`IS_NONE` after the name, and so on.
    ``node.meta["within"]`` says which of those looked into were running, the outermost first. Code that reads a layer's
    weight from outside cannot be traced, unless ``shows_weights``. What the code raised, where it did, is added to
    ``told``.

    torch's own tracer replaces ``nn.Module.__call__`` for the whole process while it works; this one changes a copy of
    the module and nothing else, so that other threads may run models meanwhile.

    >>> [node.op for node in trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).nodes]
    ['placeholder', 'call_module', 'call_module', 'output']
    """
    graph = fx.Graph()
    tracer = Tracer(graph)
    apart = copied(module, {id(t): t for t in (*module.parameters(), *module.buffers())})
    running: list[str] = []
    gives = partial(_class_given, module)
    patched = set[nn.Module]()
    for path, child, opens in _inside(apart, deep=deep, opened=opened):
        if child in patched:
            continue  # its first name is its name
        patched.add(child)
        if opens:
            is_loop = shows_weights and type(child) in KNOWN_LOOPS
            child.forward = partial(_enter, running, path, loop_of(child) if is_loop else standing_in(child, gives))
            continue
        child.forward = partial(_call, tracer, running, path)
        for name in HOOKS:
            setattr(child, name, {})
        for layer in child.modules():
            if not shows_weights and (deep or isinstance(layer, nn.Linear | nn.Embedding)):
                layer._parameters = {}  # who looks at a weight from outside would not see it cut
    try:
        inputs = {name: _input(tracer, name, given) for name in _asked(apart.forward, given)}
        weights = [*module.parameters(), *module.buffers()] if shows_weights else []
        if shows_weights and type(apart) in KNOWN_LOOPS:
            apart.forward = loop_of(apart)
        reads = AttributeReads(apart) if shows_weights else None
        with (
            RefusesRandomNumbers(),
            ShowsReads(tracer, weights),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            output = graph.output(tracer.create_arg(_called_by_name(apart, standing_in(apart, gives, tracer), inputs)))
        if reads is not None and reads.has_changed():
            return None  # the next step would read something else
        output.meta[ATTRIBUTES] = tuple(reads.found) if reads is not None else ()
    except Exception as failure:  # any Python code may run here; what cannot be traced is simply not taken apart
        if told is not None:
            told.append(failure)
        return None
    return graph


def _asked(forward: Callable[..., Any], given: Collection[str]) -> Iterator[str]:
    """The names of the arguments that must be given, and of those in ``given``."""
    for name, parameter in inspect.signature(forward).parameters.items():
        is_given = any(name + said in given for said in ("", IS_NONE, IS_NO_TENSOR))
        is_asked = parameter.default is inspect.Parameter.empty or is_given
        if is_asked and parameter.kind not in OPEN_ENDED:
            yield name


def _class_given(module: nn.Module, path: str) -> type | None:
    """The class of what a module inside gives, as far as its code tells."""
    return class_given(module.get_submodule(path), partial(trace, shows_weights=True))


def _input(tracer: Tracer, name: str, given: Collection[str]) -> fx.Proxy | None:
    """What stands for an argument."""
    if name + IS_NONE in given:
        return None
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


def _called_by_name(module: nn.Module, forward: Callable[..., Any], inputs: Mapping[str, fx.Proxy | None]) -> Any:
    """A forward on these arguments; in the module's order those that have no other way in."""
    bound = inspect.signature(module.forward).bind_partial()
    bound.arguments.update(inputs)
    return forward(*bound.args, **bound.kwargs)


def _inside(
    module: nn.Module, prefix: str = "", *, deep: bool = False, opened: Collection[str] = ()
) -> Iterator[tuple[str, nn.Module, bool]]:
    """The modules inside, by path, and whether they are looked into: plain containers, ``opened``, if ``deep`` more."""
    for name, child in module.named_children():
        opens = type(child) in CONTAINERS or f"{prefix}{name}" in opened
        opens = opens or (deep and not type(child).__module__.startswith("torch.nn."))
        opens = opens and not has_hooks(child)
        yield f"{prefix}{name}", child, opens
        if opens:
            yield from _inside(child, f"{prefix}{name}.", deep=deep, opened=opened)


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    """The children, those of plain containers in their place."""
    return (child for _, child, opens in _inside(module) if not opens)


def find_chains(model: nn.Module) -> tuple[LayerChain, ...]:
    """Every chain ``Linear -> elementwise -> Linear``, by the layers' names; a layer is in one chain at most.

    >>> gelu = nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 2))
    >>> find_chains(nn.Sequential(gelu, gelu))
    (Chain(columns=('0.0',), between=('0.1',), row='0.2', entry=None, owner='0'),)
    """
    found: list[LayerChain] = []
    taken: set[str] = set()
    shared, names = registered_twice(model), {path for path, _ in model.named_modules()}
    for path, module in model.named_modules():
        if not any(is_exactly(child, nn.Linear) for child in _leaves(module)) or has_choices(module):
            continue
        graph = trace(module)
        for node in graph.nodes if graph is not None else ():
            chain = _chain_to(node, module, path)
            layers = (*chain.columns, *chain.between, chain.row) if chain is not None else ()
            if not names.issuperset(layers) or any(id(model.get_submodule(layer)) in shared for layer in layers):
                continue  # somebody else may call it, on whole features
            if chain is not None and not taken.intersection((*chain.columns, chain.row)):
                found.append(chain)
                taken.update((*chain.columns, chain.row))
    return tuple(found)


def has_choices(module: nn.Module) -> bool:
    """Whether callers may leave arguments out: a trace shows what happens when they do, and no more."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.default is not inspect.Parameter.empty for parameter in parameters)


def module_of(node: fx.Node, root: nn.Module) -> nn.Module | None:
    """The module that a node of a trace calls, if it calls one."""
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


def is_elementwise(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node of a trace treats each element alone, with nothing that would have to be cut."""
    tensors = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, Tensor)]
    if any(tensor.dim() or tensor.requires_grad for tensor in tensors):
        return False  # one number per feature would have to be cut, and a trained one summed
    if node.op == "call_module":
        return is_elementwise_module(module_of(node, root))
    if node.op == "call_function":
        return node.target in ELEMENTWISE_FUNCTIONS
    return node.op == "call_method" and node.target in ELEMENTWISE_METHODS


def _chain_to(row: fx.Node, root: nn.Module, path: str) -> LayerChain | None:
    """The chain that ends in ``row``, if one does and nothing else looks inside it."""
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
        return None  # a column that takes another's cut output
    widths = {layer.out_features for node in columns if isinstance(layer := module_of(node, root), nn.Linear)}
    if len(widths) > 1:
        return None
    inputs = {node.all_input_nodes[0] for node in columns}
    entry = next(node for node in row.graph.nodes if node.op == "placeholder")
    # one sum for all columns, where the module's first argument goes to them and nowhere else
    shared = len(columns) > 1 and inputs == {entry} and set(entry.users) == set(columns) and not has_hooks(root)
    names = [
        tuple(f"{path}.{node.target}".lstrip(".") for node in nodes if node.op == "call_module")
        for nodes in (reversed(columns), reversed(between), [row])
    ]
    return LayerChain(names[0], names[1], names[2][0], path if shared else None, path)


def find_head(model: nn.Module) -> str | None:
    """The ``Linear`` whose output is the model's, and nobody else's, by name; None where there is none to be seen.

    >>> find_head(nn.Sequential(nn.ReLU(), nn.Linear(2, 8)))
    '1'
    """
    graph = trace(model) if not has_hooks(model) else None
    if graph is None:
        return None
    (output,) = (node for node in graph.nodes if node.op == "output")
    if len(output.all_input_nodes) != 1 or output.args[0] is not output.all_input_nodes[0]:
        return None
    last = output.all_input_nodes[0]
    single_use = len(last.users) == 1 and [n.target for n in graph.nodes].count(last.target) == 1
    head = module_of(last, model)
    once = single_use and sum(each is head for _, each in model.named_modules(remove_duplicate=False)) == 1
    return str(last.target) if is_exactly(head, nn.Linear) and once else None


COMBINING = frozenset(
    (operator.add, operator.iadd, operator.sub, operator.mul, operator.imul, torch.add, torch.sub, torch.mul)
)


COMBINING_METHODS = frozenset(("add", "sub", "mul", "add_", "mul_"))
