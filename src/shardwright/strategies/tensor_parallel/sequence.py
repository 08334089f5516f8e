"""Decides whether tensor parallelism cuts tokens instead of samples (``/seq``), and checks that the model allows it.

::

    samples cut            sequences cut
    row 0 | s0 s0 s0 |     row 0 | s0 s0 . |      one sample on two rows: its first tokens, its last ones
    row 1 | s1 s1 s1 |     row 1 | . . s0 |

Most layers treat each token alone and work on any slice of a sequence. Attention gathers keys and values, and learned
positions begin where the slice begins. Every operation on tokens in the traced code of the model must be one that is
known here; for any other the error names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn

from shardwright.analysis.on_meta.module_calls import ModuleCall
from shardwright.analysis.traced.structure import (
    COMBINING,
    COMBINING_METHODS,
    ELEMENTWISE_FUNCTIONS,
    ELEMENTWISE_METHODS,
    has_choices,
    is_elementwise_module,
    is_exactly,
    trace_once,
)
from shardwright.errors import LayoutError
from shardwright.forward_stack import Rung, record
from shardwright.models.attention import Attention
from shardwright.models.gpt import Positions
from shardwright.models.losses import CrossEntropy, MeanSquaredError
from shardwright.operators.attention import attend_gathered
from shardwright.operators.norms import FEATURE_NORMS, feature_norm_of
from shardwright.plan.batch_shard import RowMoves, rows_after
from shardwright.plan.plan import Job, Plan
from shardwright.plan.traffic import Traffic
from shardwright.sharding.box import width
from shardwright.strategies.tensor_parallel.apply import Applying
from shardwright.strategies.tensor_parallel.features import Features
from shardwright.strategies.tensor_parallel.mode import SEQ, Mode
from shardwright.strategies.tensor_parallel.moves import AxisMove
from shardwright.strategies.tensor_parallel.note import OperatorNote
from shardwright.strategies.tensor_parallel.roles import LayerBoundary, States, joined_elements
from shardwright.strategies.tensor_parallel.traffic import RankTraffic

KNOWN = "Linear, Embedding, LayerNorm, RMSNorm, elementwise layers, shardwright's Attention and Positions"
LOSSES = (CrossEntropy, MeanSquaredError)


# ---- samples or tokens


def with_rows(job: Job, plan: Plan, mode: Mode) -> Mode:
    """Returns the mode with ``dim`` 1 (tokens cut) if the layout has ``/seq``, or if samples are fewer than ranks.

    In the second case every layer must treat each token alone, and a sample must have at least as many tokens as there
    are ranks; otherwise ``mode`` is returned unchanged. Ranks are counted along the axes that cut rows; if there is
    only one, ``mode`` is always unchanged.

    Raises: LayoutError: the layout has ``/seq``, and some layer or the loss may mix tokens.
    """
    parts = prod(axis.size for axis in mode.row_axes)
    if parts == 1:
        return mode
    asked = is_asked(plan)
    # some ranks would have no sample, and sequences are long enough for every rank to have a token
    samples = job.num_samples
    if not asked and (samples is None or not samples < parts <= job.num_tokens // max(samples, 1)):
        return mode
    mixing = mixes(job)
    if mixing is None:
        return replace(mode, dim=1)
    if not asked:
        return mode  # samples stay cut, and some ranks have none
    raise LayoutError(
        f"'{mixing.path or 'the model'}' is not known to treat each token alone, and '{SEQ}' cuts sequences",
        given=f"{mixing.what} under {plan.layout}",
        allowed=f"{KNOWN}, and code made of these; the losses {' and '.join(k.__name__ for k in LOSSES)}",
        fix=f"leave out /{SEQ}, so that samples are cut",
    )


def is_asked(plan: Plan) -> bool:
    """Returns whether the layout has the option ``/seq``, by which tokens are cut instead of samples."""
    factor = plan.layout.factor("tp")
    return factor is not None and factor.option(SEQ) is not None


def cut_rows(plan: Plan, mode: Mode) -> Plan:
    """Returns the plan with the model's inputs cut, by samples or by tokens, over every axis that cuts rows."""
    for axis in mode.row_axes:
        plan = plan.cut_inputs(axis.name, dim=mode.dim)
    return plan


# ---- what attention needs


@dataclass(frozen=True)
class TokensNote(OperatorNote):
    """The all-gathers of keys and values for an attention whose sequences are sharded by tokens.

    ``rows`` says how the tokens of a query are cut. ``kv`` is the cut of the keys' features, which the values share;
    ``causal``: a query sees no later tokens. ``makers`` are the layers that compute keys and values, and ``elements``
    is the number of elements that a rank sends for both in a microbatch.
    """

    rows: RowMoves
    gathers: tuple[AxisMove, ...]
    kv: Features
    causal: bool
    makers: tuple[str, ...]
    elements: float

    def apply(self, rank: Applying, path: str, module: Any) -> None:
        """Makes an attention gather other tokens' keys and values; its rotary embedding starts at its first token."""
        assert isinstance(module, Attention)
        shard = rank.shard

        def positions(num_tokens: int, device: torch.device) -> Tensor:
            span = shard.span(self.rows)
            return torch.arange(span.start, span.stop, device=device)

        def num_seen() -> int:
            return shard.span(self.rows).stop if self.causal else shard.num_tokens

        if module.rotary is not None:
            module.rotary.positions = positions  # type: ignore[method-assign]
        if self.gathers:
            moves = rank.moves(self.gathers)
            module.attend = partial(attend_gathered, module.attend, moves, num_seen)  # type: ignore[method-assign]
            record(module, Rung.ATTEND, "keys and values of other tokens gathered", by=rank.mode.name)

    def traffic(self, here: RankTraffic, path: str, call: ModuleCall) -> Iterator[Traffic]:
        """Yields the all-gathers of other tokens' keys and values, and the reduce-scatters of their gradients."""
        elements = call.x_shape[0] * 2 * width(self.kv.kept(here.coord))
        learns = call.needs_gradient or any(maker in here.trained for maker in self.makers)
        for move in self.gathers:
            num_bytes = sum(here.shard.sizes(move.rows, move.axis)) * elements * call.element_bytes
            size = here.plan.mesh[move.axis]
            yield Traffic("all_gather", move.axis, num_bytes, size, call.num_forwards)
            if learns:
                yield Traffic("reduce_scatter", move.axis, num_bytes, size)

    def num_sent(self) -> float:
        """Returns the elements sent for keys and values."""
        return self.elements


def tokens_note(
    attention: Attention, path: str, kv: Features, rows: RowMoves, states: States, job: Job, mode: Mode
) -> TokensNote:
    """Returns the all-gathers by which the attention at ``path`` gets the keys and values of all tokens.

    ``kv`` is the cut of the features of its keys; ``rows`` and ``states`` are the cut of its activations after the
    projections.
    """
    order = [axis for what, axis in reversed(rows) if what == "cut"]
    order += [axis.name for axis in reversed(mode.row_axes) if ("gather", axis.name) not in rows]
    gathers, held = [], rows
    for name in order:
        gathers.append(AxisMove(name, "rows", held))
        held = rows_after(held, "gather", [name])
    makers = tuple(f"{path}.{own}".lstrip(".") for own in (("qkv",) if attention.fused else ("k", "v")))
    elements = joined_elements(LayerBoundary(0, joined=2 * kv.size), states, mode.axes, job.num_tokens)
    return TokensNote(rows, tuple(gathers), kv, attention.causal, makers, elements)


# ---- what may mix tokens


class TokenMixing(NamedTuple):
    """A module or loss that may mix the tokens of a sample: its path and, for the error, the operation in question."""

    path: str
    what: str


class _TokenValue(NamedTuple):
    """A value of the traced code, by where its tokens are: in dim 1 (``tokens``), in dim 0 (``positions``), or unknown.

    ``features``: whether its last dim is features; None for the model's input, which may be token numbers.
    """

    layout: Literal["tokens", "positions", "unknown"] = "unknown"
    features: bool | None = False


_INPUT = _TokenValue("tokens", None)


class _MixesError(Exception):
    """Raised where a module may mix tokens; the arguments are those of :class:`TokenMixing`."""


def mixes(job: Job) -> TokenMixing | None:
    """Returns the first layer, or the loss, that may mix the tokens of a sample; None if all treat each token alone.

    >>> mixes(Job(nn.Sequential(nn.Linear(4, 8), nn.GELU()), CrossEntropy())) is None
    True
    >>> mixes(Job(nn.Sequential(nn.Linear(4, 8), nn.Flatten()), CrossEntropy()))
    TokenMixing(path='1', what='Flatten')
    """
    if not any(is_exactly(job.loss, kind) for kind in LOSSES):
        return TokenMixing("(loss)", type(job.loss).__name__)
    try:
        result = _TokenFlow(job.model).visit("", job.model, None)
    except _MixesError as error:
        return TokenMixing(*error.args)
    return None if result.layout == "tokens" else TokenMixing("", "its output is not known to be one tensor of tokens")


@dataclass(frozen=True)
class _TokenFlow:
    """One trace of a model, which raises :class:`_MixesError` at the first operation that may mix tokens."""

    root: nn.Module

    def visit(self, path: str, module: nn.Module, args: Sequence[_TokenValue] | None) -> _TokenValue:
        """Returns the output value of a module called on ``args``; None stands for the inputs of the model itself."""
        kind = type(module).__name__
        leaf = self._leaf(path, module, _INPUT if args is None else args[0] if args else _TokenValue())
        if leaf is not None:
            return leaf
        if next(module.children(), None) is None and type(module).__module__.startswith("torch.nn."):
            raise _MixesError(path, kind)
        graph = None if has_choices(module) else trace_once(module)
        if graph is None:
            raise _MixesError(path, f"{kind}, whose code cannot be followed")
        return self._run(path, module, graph, args)

    def _leaf(self, path: str, module: nn.Module, x: _TokenValue) -> _TokenValue | None:
        """Returns the output value of a known layer; None for a module whose code has to be traced."""
        if isinstance(module, nn.Embedding) and is_exactly(module, nn.Embedding):
            plain = module.max_norm is None and not module.scale_grad_by_freq
            known = plain and not x.features and x.layout != "unknown"
            return self._given(path, module, _TokenValue(x.layout, True), known=known)
        if is_exactly(module, Positions):
            return self._given(path, module, _TokenValue("positions"), known=x.layout == "tokens")
        if is_exactly(module, nn.Linear) or is_exactly(module, Attention):
            return self._given(path, module, _TokenValue("tokens", True), known=x.layout == "tokens")
        norm = feature_norm_of(module)
        if norm is not None:
            known = x.layout != "unknown" and FEATURE_NORMS[norm].num_features(module) is not None
            return self._given(path, module, x._replace(features=True), known=known)
        if is_elementwise_module(module):
            drops = isinstance(module, nn.Dropout) and x.layout == "positions"  # dropout would take dim 0 as samples
            return self._given(path, module, x, known=x.layout != "unknown" and not drops)
        return None

    def _given(self, path: str, module: nn.Module, value: _TokenValue, *, known: bool) -> _TokenValue:
        if not known:
            raise _MixesError(path, f"{type(module).__name__} of a value that is not known to have tokens in dim 1")
        return value

    def _run(self, path: str, module: nn.Module, graph: fx.Graph, args: Sequence[_TokenValue] | None) -> _TokenValue:
        env: dict[fx.Node, _TokenValue] = {}
        inputs = iter(args) if args is not None else None
        for node in graph.nodes:
            values = [env[arg] for arg in node.all_input_nodes]
            if node.op == "placeholder":
                env[node] = _INPUT if inputs is None else next(inputs, _TokenValue())
            elif node.op == "call_module":
                child = f"{path}.{node.target}".lstrip(".")
                if list(node.args) != list(node.all_input_nodes) or node.kwargs:
                    raise _MixesError(path, f"a call of '{child}' with other arguments than values in order")
                env[node] = self.visit(child, module.get_submodule(str(node.target)), values)
            elif node.op == "output":
                alone = len(values) == 1 and node.args[0] is node.all_input_nodes[0]
                return values[0] if alone else _TokenValue()
            else:
                env[node] = self._function(path, node, values)
        raise AssertionError("a trace ends in its output")

    def _function(self, path: str, node: fx.Node, values: Sequence[_TokenValue]) -> _TokenValue:
        name = getattr(node.target, "__name__", str(node.target))
        combines = node.target in COMBINING or node.target in COMBINING_METHODS
        simple = node.target in ELEMENTWISE_FUNCTIONS or node.target in ELEMENTWISE_METHODS
        constants = [a for a in (*node.args, *node.kwargs.values()) if not isinstance(a, fx.Node)]
        features = {value.features for value in values} - {None}
        alike = bool(values) and len(features) < 2
        known = alike and all(value.layout != "unknown" for value in values) and not node.kwargs.get("out")
        if not (known and (combines or (simple and len(values) == 1))):
            raise _MixesError(path, f"a call of {name}" if node.target is not getattr else "a look at a value's shape")
        for constant in constants:
            if isinstance(constant, Tensor) and constant.dim() > int(True in features):
                raise _MixesError(path, f"a call of {name} with a tensor of shape {list(constant.shape)}")
        layout: Literal["tokens", "positions"] = "tokens" if any(v.layout == "tokens" for v in values) else "positions"
        return _TokenValue(layout, features.pop() if features else None)
