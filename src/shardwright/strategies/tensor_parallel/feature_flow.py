"""Finds where features may stay sharded between layers (2D, 2.5D, 3D), by tracing the model module by module.

A value is *cut* when its last dim holds a part of the features. Layers, norms, tables and elementwise operations take
cut values. A module whose code does anything else with one, or that has hooks, takes and gives whole features (a gate),
and is traced again inside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from torch import Tensor, fx, nn

from shardwright.analysis.traced.structure import (
    COMBINING,
    COMBINING_METHODS,
    ELEMENTWISE_FUNCTIONS,
    ELEMENTWISE_METHODS,
    LayerChain,
    has_choices,
    has_hooks,
    is_elementwise_module,
    is_exactly,
    trace_once,
)
from shardwright.models.attention import Attention
from shardwright.operators.norms import FEATURE_NORMS, feature_norm_of


class Value(NamedTuple):
    """A traced activation: whether its features are cut and, if they are, how many the whole activation has (``size``).

    ``size`` means nothing if the features are whole. ``producer`` is the path of the linear layer, attention or pair
    that computed the value, empty for any other. ``chain`` is the row-parallel layer of the pair of layers that the
    value is inside of, empty outside of pairs. ``is_input`` is True for the model's input.
    """

    cut: bool = False
    size: int = 0
    chain: str = ""
    producer: str = ""
    is_input: bool = False


@dataclass(frozen=True)
class FeatureUse:
    """The call of one module as traced: its kind, and whether its input (``takes_cut``) and output features are cut.

    ``size`` is a number of features, whose meaning depends on the kind. For a layer, pair or table it is that of the
    output, cut or not; for the loss's head, that of the input; for a norm or elementwise module, that of the input if
    the input is cut, else 0. ``from_input``: the input is the model's own, which needs no gradient. Of the kinds, a
    ``chain`` is a pair of a column- and a row-parallel layer, a ``gate`` gets whole features, and ``inside`` is a
    module whose inner calls are traced.
    """

    kind: Literal["linear", "chain", "attention", "norm", "table", "elementwise", "gate", "inside"]
    takes_cut: bool = False
    gives_cut: bool = False
    size: int = 0
    from_input: bool = False
    sizes: tuple[int, ...] = ()
    """For a gate: the number of features of each argument that is cut, else 0."""


@dataclass
class Flow:
    """The calls of a model's modules as traced, by path: ``uses`` has those that differ from the calls on one device.

    ``output_size`` is the number of features of the model's output if they are left cut, else 0.
    """

    uses: dict[str, FeatureUse] = field(default_factory=dict)
    output_size: int = 0
    callers: dict[str, set[str]] = field(default_factory=dict)
    """By module path, the modules whose code calls that module."""


class _UnknownError(Exception):
    """Raised where traced code applies an operation to cut features that may be wrong on a shard of them."""


class _ConflictError(Exception):
    """Raised where one module is called in two ways that disagree; the argument is its path."""


@dataclass
class _FeatureFlow:
    """One trace of a model; ``kept_whole`` modules take and return whole features, ``never_cut`` refuse cut ones."""

    model: nn.Module
    parts: int
    chains: Mapping[str, LayerChain]
    columns: Mapping[str, str]
    kept_whole: frozenset[str]
    head: str | None
    never_cut: frozenset[str]
    names: Mapping[nn.Module, str]
    uses: dict[str, FeatureUse] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    callers: dict[str, set[str]] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)

    def note(self, path: str, use: FeatureUse) -> None:
        before = self.uses.get(path, use)
        if before.kind != "table" and before.from_input != use.from_input:  # one call needs an input gradient
            before, use = replace(before, from_input=False), replace(use, from_input=False)
        self.uses[path] = before
        if before != use:
            raise _ConflictError(path)

    def new(self, **fields: object) -> Value:
        value = Value(**fields)  # type: ignore[arg-type]
        self.values.append(value)  # kept alive: values are compared by identity
        return value

    def visit(self, path: str, module: nn.Module, args: Sequence[Value], may_cut: bool) -> Value:
        x = args[0] if args else Value()
        if path in self.never_cut and any(value.cut for value in args):
            raise _UnknownError
        if path in self.kept_whole and path:
            return self._gate(path, args)
        if isinstance(module, nn.MultiheadAttention) and any(value.cut for value in args):
            raise _UnknownError  # then the caller becomes a gate, so its features are whole
        leaf = self._leaf(path, module, x, args, may_cut)
        if leaf is not None:
            return leaf
        graph = None if has_choices(module) or not _has_children(module) else trace_once(module)
        if graph is not None and not (path and has_hooks(module)):
            before = dict(self.uses)  # restored if the code inside cannot take cut features
            try:
                result = self._run(path, module, graph, args, may_cut)
                self.note(path, FeatureUse("inside", takes_cut=any(value.cut for value in args)))
                return result
            except _UnknownError:
                self.uses = before
        self._gate(path, args)
        if graph is not None:
            self._run(path, module, graph, [value._replace(cut=False) for value in args], may_cut=False)
        return self.new()

    def _leaf(self, path: str, module: nn.Module, x: Value, args: Sequence[Value], may_cut: bool) -> Value | None:
        if x.chain and path != x.chain:
            return x
        if path in self.columns:
            row = self.columns[path]
            size = int(self.model.get_submodule(row).out_features)  # type: ignore[arg-type]
            self.note(row, FeatureUse("chain", x.cut, may_cut and size >= self.parts, size, x.is_input))
            return self.new(chain=row)
        if path in self.chains:
            use = self.uses.get(path)
            if use is None:
                raise _ConflictError(path)  # the row layer is called before its columns
            return self.new(cut=use.gives_cut, size=use.size, producer=path)
        if path == self.head:
            self.note(path, FeatureUse("linear", x.cut, False, x.size, x.is_input))
            return self.new()
        if isinstance(module, Attention) and is_exactly(module, Attention):  # those kept whole returned in visit()
            return self._layer(path, "attention", x, module.o.out_features, may_cut)
        if is_exactly(module, nn.Linear):
            width: int = min(module.in_features, module.out_features)  # type: ignore[type-var, assignment]
            if width < self.parts:
                return self._gate(path, args)
            return self._layer(path, "linear", x, module.out_features, may_cut)  # type: ignore
        if is_exactly(module, nn.Embedding):
            return self._table(path, module, x, may_cut)  # type: ignore[arg-type]
        norm = feature_norm_of(module)
        if norm is not None and FEATURE_NORMS[norm].num_features(module) is not None:
            self.note(path, FeatureUse("norm", x.cut, x.cut, x.size * x.cut))
            return self.new(cut=x.cut, size=x.size)
        if is_elementwise_module(module):
            self.note(path, FeatureUse("elementwise", x.cut, x.cut, x.size * x.cut))
            return self.new(cut=x.cut, size=x.size)
        cut = any(value.cut for value in args)
        return self._gate(path, args) if cut and not _has_children(module) else None

    def _layer(self, path: str, kind: Literal["linear", "attention"], x: Value, size: int, may_cut: bool) -> Value:
        if size < self.parts:
            return self._gate(path, [x])
        self.note(path, FeatureUse(kind, x.cut, may_cut, size, x.is_input))
        if not (may_cut or x.cut):
            return self.new()
        return self.new(cut=may_cut, size=size, producer=path)

    def _table(self, path: str, table: nn.Embedding, x: Value, may_cut: bool) -> Value:
        if not_to_cut(table):
            return self.new()
        cut = may_cut and table.embedding_dim >= self.parts
        self.note(path, FeatureUse("table", False, cut, table.embedding_dim, x.is_input))
        return self.new(cut=cut, size=table.embedding_dim)

    def _gate(self, path: str, args: Sequence[Value]) -> Value:
        cut = any(value.cut for value in args)
        self.note(
            path, FeatureUse("gate", sizes=tuple(value.size if value.cut else 0 for value in args) if cut else ())
        )
        return self.new()

    def _run(self, path: str, module: nn.Module, graph: fx.Graph, args: Sequence[Value], may_cut: bool) -> Value:
        env: dict[fx.Node, Value] = {}
        inputs = iter(args)
        result = self.new()
        for node in graph.nodes:
            values = [env[arg] for arg in node.all_input_nodes]
            for value in values if node.op != "output" else ():
                self.used[id(value)] = self.used.get(id(value), 0) + 1
            if node.op == "placeholder":
                env[node] = next(inputs, Value())
            elif node.op == "call_module":
                called = module.get_submodule(str(node.target))
                child = self.names[called]
                in_order = list(node.args) == list(node.all_input_nodes) and not node.kwargs
                if not in_order and any(value.cut for value in values):
                    raise _UnknownError
                self.callers.setdefault(child, set()).add(path)
                env[node] = self.visit(child, called, values, may_cut)
            elif node.op == "output":
                if any(value.cut for value in values) and node.args[0] is not node.all_input_nodes[0]:
                    raise _UnknownError
                result = values[0] if len(values) == 1 and node.args[0] is node.all_input_nodes[0] else self.new()
            else:
                env[node] = self._function(node, values)
        return result

    def _function(self, node: fx.Node, values: Sequence[Value]) -> Value:
        for value in values:
            if value.chain:
                return value
        if not any(value.cut for value in values):
            return self.new()
        constants = [a for a in (*node.args, *node.kwargs.values()) if not isinstance(a, fx.Node)]
        plain = not any(
            isinstance(c, Tensor) and (c.dim() or c.requires_grad) for c in constants
        ) and not node.kwargs.get("out")
        sizes = {value.size if value.cut else None for value in values}
        alike = len(sizes) == 1 and plain
        combines = node.target in COMBINING or node.target in COMBINING_METHODS
        simple = node.target in ELEMENTWISE_FUNCTIONS or node.target in ELEMENTWISE_METHODS
        if alike and (combines or (simple and len(values) == 1)):
            return self.new(cut=True, size=values[0].size)
        raise _UnknownError


def not_to_cut(table: nn.Embedding) -> str:
    """Returns why an embedding table cannot be cut, as text for ``show``; an empty text if it can be cut.

    >>> not_to_cut(nn.Embedding(9, 3, padding_idx=2)), not_to_cut(nn.Embedding(9, 3, max_norm=1.0))
    ('', 'max_norm changes whole rows')
    """
    if table.max_norm is not None:
        return "max_norm changes whole rows"
    if table.scale_grad_by_freq:
        return "scale_grad_by_freq counts all tokens of a row"
    return "its gradients are sparse" if table.sparse else ""


def _does_something(use: FeatureUse) -> bool:
    """Returns whether a call involves cut features, unlike the same call on one device."""
    changed = use.kind not in ("linear", "gate", "inside") or use.gives_cut or any(use.sizes)
    return changed or (use.kind == "linear" and use.takes_cut)


def _has_children(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def follow(
    model: nn.Module, parts: int, chains: Sequence[LayerChain], kept_whole: frozenset[str], head: str | None
) -> Flow:
    """Returns which modules take and return cut features, if features are cut in ``parts`` between layers.

    With ``parts`` 1 features are whole between layers. ``chains`` are the pairs of column- and row-parallel layers,
    ``kept_whole`` the modules that are not cut, and ``head`` is the layer whose classes the loss takes cut.

    >>> from shardwright.analysis.traced.structure import find_chains
    >>> model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.LayerNorm(4))
    >>> for path, use in follow(model, 2, find_chains(model), frozenset(), None).uses.items():
    ...     print(path, use.kind, use.takes_cut, use.gives_cut)
    0 norm False False
    3 chain False True
    4 norm True True
    """
    whole, never_cut = kept_whole, frozenset[str]()
    names = {module: path for path, module in model.named_modules()}
    while True:
        by_row = {chain.row: chain for chain in chains if not whole.intersection((*chain.columns, chain.row))}
        columns = {column: chain.row for chain in by_row.values() for column in chain.columns}
        walk = _FeatureFlow(model, parts, by_row, columns, whole, head, never_cut, names)
        try:
            result = walk.visit("", model, [Value(is_input=True)] * 8, may_cut=parts > 1)
        except _ConflictError as conflict:
            # A module that is called in two ways is kept whole; if that still conflicts, it never gets cut features.
            path = str(conflict)
            never_cut |= whole & {path}
            whole |= {path}
            continue
        break
    flow = Flow({path: use for path, use in walk.uses.items() if _does_something(use)}, callers=walk.callers)
    if result.cut:
        use = walk.uses.get(result.producer)
        once = sum(value.producer == result.producer for value in walk.values) == 1
        if use is not None and once and walk.used.get(id(result), 0) == 0:
            flow.uses[result.producer] = replace(use, gives_cut=False)
            if use.kind == "linear" and not use.takes_cut:
                del flow.uses[result.producer]  # whole input and whole output: nothing is cut
        else:
            flow.output_size = result.size
    return flow
