"""When a mode cuts sequences instead of samples, and which models it can do that to.

::

    samples cut            sequences cut
    row 0 | s0 s0 s0 |     row 0 | s0 s0 . |      one sample on two rows: its first tokens, its last ones
    row 1 | s1 s1 s1 |     row 1 | . . s0 |

Most of a model treats each token alone and works on those it has. Attention gathers keys and values, learned positions
begin at the slice's place. Code that may mix tokens in other ways is refused by name: a walk through the model's own
code has to know every operation that tokens meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple

from torch import Tensor, fx, nn

from shardwright.analysis.structure import (
    COMBINING,
    COMBINING_METHODS,
    ELEMENTWISE_FUNCTIONS,
    ELEMENTWISE_METHODS,
    has_choices,
    is_elementwise_module,
    is_exactly,
    trace,
)
from shardwright.errors import LayoutError
from shardwright.models import CrossEntropy, MeanSquaredError
from shardwright.models.attention import Attention
from shardwright.models.gpt import Positions
from shardwright.plan.batch_shard import RowMoves, rows_after
from shardwright.plan.plan import Job, Plan
from shardwright.strategies.tensor_parallel.feature_flow import NORMS
from shardwright.strategies.tensor_parallel.features import Features
from shardwright.strategies.tensor_parallel.mode import SEQ, Gathering, Mode, TokensNote
from shardwright.strategies.tensor_parallel.roles import Boundary, States, joined_elements

KNOWN = "Linear, Embedding, LayerNorm, RMSNorm, elementwise layers, shardwright's Attention and Positions"
LOSSES = (CrossEntropy, MeanSquaredError)


# ---- samples or tokens


def with_rows(job: Job, plan: Plan, mode: Mode) -> Mode:
    """The mode with what its axes cut: tokens where that is asked for, or where samples are known to be too few.

    Raises: LayoutError: asked for, and some layer may mix tokens in ways that are not known here.
    """
    parts = prod(axis.size for axis in mode.row_axes)
    if parts == 1:
        return mode
    asked = is_asked(plan)
    if not asked and not _too_few(job, parts):
        return mode
    found = mixes(job)
    if found is None:
        return replace(mode, dim=1)
    if not asked:
        return mode  # then some ranks idle
    raise LayoutError(
        f"'{found.path or 'the model'}' is not known to treat each token alone, and '{SEQ}' cuts sequences",
        given=f"{found.what} under {plan.layout}",
        allowed=f"{KNOWN}, and code made of these; the losses {' and '.join(k.__name__ for k in LOSSES)}",
        fix=f"leave out /{SEQ}, so that samples are cut",
    )


def is_asked(plan: Plan) -> bool:
    """Whether the layout says that sequences are cut."""
    factor = plan.layout.factor("tp")
    return factor is not None and factor.option(SEQ) is not None


def _too_few(job: Job, parts: int) -> bool:
    """Whether some ranks would have no sample, and sequences are long enough for all to have a token."""
    return job.num_samples is not None and job.num_samples < parts <= job.num_tokens // max(job.num_samples, 1)


def cut_rows(plan: Plan, mode: Mode) -> Plan:
    """The plan with the inputs cut over every axis that cuts rows."""
    for axis in mode.row_axes:
        plan = plan.cut_inputs(axis.name, dim=mode.dim)
    return plan


# ---- what attention needs


def tokens_note(
    attention: Attention, path: str, kv: Features, rows: RowMoves, states: States, job: Job, mode: Mode
) -> TokensNote:
    """How an attention whose tokens lie like this, after its projections, comes to the keys and values of all."""
    order = [axis for what, axis in reversed(rows) if what == "cut"]
    order += [axis.name for axis in reversed(mode.row_axes) if ("gather", axis.name) not in rows]
    gathers, held = [], rows
    for name in order:
        gathers.append(Gathering(name, "rows", held))
        held = rows_after(held, "gather", [name])
    makers = tuple(f"{path}.{own}".lstrip(".") for own in (("qkv",) if attention.fused else ("k", "v")))
    elements = joined_elements(Boundary(0, joined=2 * kv.size), states, mode.axes, job.num_tokens)
    return TokensNote(rows, tuple(gathers), kv, attention.causal, makers, elements)


# ---- what may mix tokens


class Mixing(NamedTuple):
    """A module that may mix tokens, and what it does."""

    path: str
    what: str


class _Value(NamedTuple):
    """What is known of a value: it has a place for each token in dim 1, or in dim 0 (a table's rows); or nothing is.

    ``features``: whether its last dim is features; None of the model's input, where nobody knows yet.
    """

    lies: Literal["tokens", "places", "unknown"] = "unknown"
    features: bool | None = False


_INPUT = _Value("tokens", None)


class _MixesError(Exception):
    """Its arguments: the path of a module, and what it does."""


def mixes(job: Job) -> Mixing | None:
    """The first layer, or the loss, that may do more to a sequence than treat each token alone.

    >>> mixes(Job(nn.Sequential(nn.Linear(4, 8), nn.GELU()), CrossEntropy())) is None
    True
    >>> mixes(Job(nn.Sequential(nn.Linear(4, 8), nn.Flatten()), CrossEntropy()))
    Mixing(path='1', what='Flatten')
    """
    if not any(is_exactly(job.loss, kind) for kind in LOSSES):
        return Mixing("(loss)", type(job.loss).__name__)
    try:
        result = _Walk(job.model).visit("", job.model, None)
    except _MixesError as found:
        return Mixing(*found.args)
    return None if result.lies == "tokens" else Mixing("", "its output is not known to be one tensor of tokens")


@dataclass(frozen=True)
class _Walk:
    root: nn.Module

    def visit(self, path: str, module: nn.Module, args: Sequence[_Value] | None) -> _Value:
        """What a module makes of values; the whole model's own are its inputs, whatever their number."""
        kind = type(module).__name__
        leaf = self._leaf(path, module, _INPUT if args is None else args[0] if args else _Value())
        if leaf is not None:
            return leaf
        if next(module.children(), None) is None and type(module).__module__.startswith("torch.nn."):
            raise _MixesError(path, kind)
        graph = None if has_choices(module) else trace(module)
        if graph is None:
            raise _MixesError(path, f"{kind}, whose code cannot be followed")
        return self._run(path, module, graph, args)

    def _leaf(self, path: str, module: nn.Module, x: _Value) -> _Value | None:
        """The value a known layer gives; None where there is code to be followed."""
        if isinstance(module, nn.Embedding) and is_exactly(module, nn.Embedding):
            plain = module.max_norm is None and not module.scale_grad_by_freq
            known = plain and not x.features and x.lies != "unknown"
            return self._given(path, module, _Value(x.lies, True), known=known)
        if is_exactly(module, Positions):
            return self._given(path, module, _Value("places"), known=x.lies == "tokens")
        if is_exactly(module, nn.Linear) or is_exactly(module, Attention):
            return self._given(path, module, _Value("tokens", True), known=x.lies == "tokens")
        if any(is_exactly(module, norm) for norm in NORMS):
            known = x.lies != "unknown" and len(module.normalized_shape) == 1  # type: ignore[arg-type]
            return self._given(path, module, x._replace(features=True), known=known)
        if is_elementwise_module(module):
            drops = isinstance(module, nn.Dropout) and x.lies == "places"  # it looks for samples in dim 0
            return self._given(path, module, x, known=x.lies != "unknown" and not drops)
        return None

    def _given(self, path: str, module: nn.Module, value: _Value, *, known: bool) -> _Value:
        if not known:
            raise _MixesError(path, f"{type(module).__name__} of a value that is not known to lie by tokens")
        return value

    def _run(self, path: str, module: nn.Module, graph: fx.Graph, args: Sequence[_Value] | None) -> _Value:
        env: dict[fx.Node, _Value] = {}
        inputs = iter(args) if args is not None else None
        for node in graph.nodes:
            given = [env[arg] for arg in node.all_input_nodes]
            if node.op == "placeholder":
                env[node] = _INPUT if inputs is None else next(inputs, _Value())
            elif node.op == "call_module":
                child = f"{path}.{node.target}".lstrip(".")
                if list(node.args) != list(node.all_input_nodes) or node.kwargs:
                    raise _MixesError(path, f"a call of '{child}' with other things than values in order")
                env[node] = self.visit(child, module.get_submodule(str(node.target)), given)
            elif node.op == "output":
                alone = len(given) == 1 and node.args[0] is node.all_input_nodes[0]
                return given[0] if alone else _Value()
            else:
                env[node] = self._function(path, node, given)
        raise AssertionError("a trace ends in its output")

    def _function(self, path: str, node: fx.Node, given: Sequence[_Value]) -> _Value:
        name = getattr(node.target, "__name__", str(node.target))
        combines = node.target in COMBINING or node.target in COMBINING_METHODS
        simple = node.target in ELEMENTWISE_FUNCTIONS or node.target in ELEMENTWISE_METHODS
        constants = [a for a in (*node.args, *node.kwargs.values()) if not isinstance(a, fx.Node)]
        features = {value.features for value in given} - {None}
        alike = bool(given) and len(features) < 2
        known = alike and all(value.lies != "unknown" for value in given) and not node.kwargs.get("out")
        if not (known and (combines or (simple and len(given) == 1))):
            raise _MixesError(path, f"a call of {name}" if node.target is not getattr else "a look at a value's shape")
        for constant in constants:
            if isinstance(constant, Tensor) and constant.dim() > int(True in features):
                raise _MixesError(path, f"a call of {name} with a tensor of shape {list(constant.shape)}")
        lies: Literal["tokens", "places"] = "tokens" if any(v.lies == "tokens" for v in given) else "places"
        return _Value(lies, features.pop() if features else None)
