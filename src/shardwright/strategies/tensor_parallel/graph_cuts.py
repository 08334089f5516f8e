"""Chooses which dims of a model's parameters tensor parallelism cuts, from a recorded forward's operators alone.

A candidate is an axis (dims that operators tie together) of some parameter that no operator needs whole and that is no
dim of the inputs: the heads of attentions, the inner features of MLPs, the groups of convolutions. Two candidates that
are different dims of one tensor exclude each other, because a rank holds a shard of one dim only. Candidates that send
the fewest elements for each parameter element are taken first. A taken candidate is exchanged for others that it
excludes, if these cut clearly more elements.

What a cut costs: heads, one sum after the output projection; the features of a head, a sum of all attention scores; the
features between blocks, a sum after every layer that reads them; the rows of a table, a sum of the looked-up rows; the
classes of a cross entropy, three numbers a token. Tables are cut by rows if they have many rows, or are the output head
too. Linear layers that are still whole are cut by their outputs if gathering these costs little. If less than half of
the model is cut in these ways, each remaining module is cut by itself, and its output is gathered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import prod
from typing import NamedTuple

from torch import nn

from shardwright.analysis.dims.dim_letters import Role
from shardwright.analysis.dims.run_axes import CLASSES, AxisUse, DimAxis, RunAxes, axes_of, labels_of, leaves, root
from shardwright.analysis.objects.reached import tensors_outside
from shardwright.analysis.recorded.recording import PRODUCTS, RecordedCall, Recording, TensorUse
from shardwright.analysis.recorded.weight_readers import readers_of
from shardwright.analysis.traced.batch_norms import batch_norms
from shardwright.analysis.traced.structure import has_hooks
from shardwright.mesh import balanced
from shardwright.plan.shares import LEAST
from shardwright.sharding.tensor_shard import ALL, TensorShard, shard_of
from shardwright.strategies.tensor_parallel.gather_output import gather_output_layers

LARGE_TABLE = 2
"""A table that is not the output head is cut if it has at least this many rows for each token that a sample looks up.

Chosen, not measured: a vocabulary has many times more rows than a sample has tokens, and a table of token types has a
few rows. A table of positions is not cut, because all samples look up the same rows.
"""

WORTH_MORE = 0.05
"""Cuts that send more than the cheapest ones are taken if they cut more parameter elements by at least this share.

Under the same condition, the linear layers that are still whole are cut and have their outputs gathered: all or none.

Chosen, not measured.
"""

MOST_FOR_MORE = 10
"""The most elements sent for each parameter element that an exchange gains, as a multiple of the cheapest cuts' ratio.

Chosen between the ratios of exchanges in models: 0.4 in a U-Net of diffusers and 3 in a Conformer, which pay, and 96
where eight heads that share one key head would be exchanged for the features of a head, which does not.
"""

WORTH_GATHERING = 0.2
"""Ways to cut that gather activations for layers are used if they cut this share more of all parameters. Chosen."""

_FEATURES = {
    ("linear", 1): 0, ("linear", 2): 0, ("mm", 1): 1, ("addmm", 0): 0, ("addmm", 2): 1, ("add", 0): 0, ("add", 1): 0,
    ("convolution", 1): 0, ("convolution", 2): 0,
}  # fmt: skip
"""The dim of output features in a weight or bias, by the operator and the number of the operand."""


@dataclass(frozen=True, slots=True)
class GraphCuts:
    """The shards of parameters and buffers on each rank, by name, and the modules that read each parameter.

    A module that asks for the shape of a parameter counts as one that reads it. ``held`` are the parameters that no
    forward may replace by other tensors: those that other code refers to directly, which also stay whole, and those of
    recurrent layers, which keep their own list of them. ``gathered`` are the paths of modules whose outputs are
    all-gathered at once.
    """

    shards: Mapping[str, TensorShard]
    readers: Mapping[str, set[str]]
    held: frozenset[str] = frozenset()
    gathered: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Candidate:
    axis: DimAxis
    num_elements: int = 0
    num_sent: int = 0
    in_output: bool = False
    is_normed: bool = False
    is_tied: bool = False
    """Whether it is an axis of both the output and the input features of a layer."""
    excludes: set[DimAxis] = field(default_factory=set)


_Candidates = dict[DimAxis, _Candidate]


class _CutShards(NamedTuple):
    """The shard of each parameter and buffer that is cut, by name, and how many elements the cut parameters have.

    ``most_sent`` is the number of elements that a step of the recorded run sends, divided by the number of elements of
    the cut parameters; 0 if none is cut.
    """

    shards: dict[str, TensorShard]
    num_elements: int = 0
    most_sent: float = 0.0


def graph_cuts(model: nn.Module, recording: Recording, axes: RunAxes, size: int) -> GraphCuts:
    """Returns how ``size`` ranks cut a model's parameters and buffers, as the operators of a recorded run allow.

    ``axes`` are the dims of the run's tensors that its operators tie together. On one rank nothing is cut.

    >>> import torch
    >>> from shardwright.analysis.model_graph import ModelGraph
    >>> model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).to("meta")
    >>> run = ModelGraph(model, torch.empty(2, 6)).run
    >>> cuts = graph_cuts(model, run.recording, run.axes, 2)
    >>> {name: shard.local_shape(0) for name, shard in cuts.shards.items()}
    {'0.weight': (4, 6), '0.bias': (4,), '2.weight': (6, 4)}
    """
    held = tensors_outside(model)
    kept = frozenset(name for name, parameter in model.named_parameters() if id(parameter) in held)
    # a parameter stays whole if code replaces it by a constant or a buffer, since these are whole
    kept |= {parameter.name for parameter, value in recording.assigned if value.kind}
    in_lists = kept
    for path, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            names = frozenset(name for name, _ in module.named_parameters(path))
            in_lists |= names
            kept |= names if module.proj_size else frozenset()  # projected states have fewer units than gates
    readers = readers_of(recording)
    if size == 1:
        return GraphCuts({}, readers, in_lists)
    # A norm that this forward does not call stays whole: the record does not tie its weights to its statistics.
    used = recording.parameters_used
    uncalled = {name for name, _ in model.named_parameters() if name not in used}
    norms = {f"{path}.{name}".lstrip(".") for path, norm in batch_norms(model) for name, _ in norm.named_parameters()}
    cut = _cut(recording, axes, size, kept | (uncalled & norms))
    shards = cut.shards
    gathered = gather_output_layers(model, recording, axes, size, {*shards, *kept}, readers, cut.most_sent)
    more = {f"{path}.{name}": p for path, layer in gathered.items() for name, p in layer.named_parameters()}
    num_more = sum(p.numel() for p in more.values())
    if num_more > WORTH_MORE * cut.num_elements:
        for name, p in more.items():
            shard = shard_of(p.shape, (_balanced(len(p), size), *(None,) * (p.dim() - 1)))
            if shard is not None:
                shards[name] = shard
    else:
        gathered, num_more = {}, 0
    if cut.num_elements + num_more >= LEAST * sum(prod(use.shape) for use in recording.parameters.values()):
        return GraphCuts(shards, readers, in_lists, frozenset(gathered))
    by_module = _cut_by_module(model, recording, size, {*kept, *in_lists}, shards, gathered, readers)
    for module_shards in by_module.values():
        shards |= module_shards
    return GraphCuts(shards, readers, in_lists, frozenset((*gathered, *by_module)))


def _cut_by_module(
    model: nn.Module, recording: Recording, size: int, kept: Collection[str], cut: Collection[str],
    gathered: Collection[str], readers: Mapping[str, Collection[str]],
) -> dict[str, dict[str, TensorShard]]:  # fmt: skip
    """Cuts modules one by one, each as if it were a whole model; returns each module's shards, by its path.

    Ranks gather the output of each such module, so it does not matter what the model computes from it. A module is cut
    if less than half of the elements of its own matrices and tables is ``cut`` already, and at least one more of these
    can be cut. Parameters that other modules read, and those in ``kept``, stay whole.
    """
    inside, by_module = recording.of_modules(), {}
    for path, module in model.named_modules():
        own = {f"{path}.{name}": p.numel() for name, p in module.named_parameters(recurse=False) if p.dim() > 1}
        is_cut = sum(number for name, number in own.items() if name in cut) >= LEAST * sum(own.values())
        if path not in inside or path in gathered or is_cut or has_hooks(module):
            continue
        others = {name for name in inside[path].parameters if name in kept or readers.get(name) != {path}}
        shards = _cut(inside[path], axes_of(inside[path]), size, others).shards
        if any(name in shards and name not in cut for name in own):
            by_module[path] = shards
    return by_module


def _balanced(num_elements: int, size: int) -> bytes:
    return b"".join(
        bytes((rank,)) * (stop - start) for rank, (start, stop) in enumerate(pairwise(balanced(num_elements, size)))
    )


def _cut(recording: Recording, axes: RunAxes, size: int, kept: Collection[str]) -> _CutShards:
    """Returns the shards that ``size`` ranks hold, where operators allow it; parameters in ``kept`` are not cut.

    Three ways are tried, and a later one is taken if it cuts clearly more parameters:

    1. No layer needs its input gathered.
    2. Layers that read a concatenation, of which only some parts are cut, gather it, and their weights stay whole
       (``gathers``).
    3. In addition, layers whose output features come back to them as an input, as in a recurrent cell, are cut by their
       output features and gather that input (``ties``).
    """
    features, outputs = _dims_of_features(recording), _dims_of_features(recording, all_convolutions=True)
    total = sum(prod(use.shape) for use in recording.parameters.values())
    best, candidates = _CutShards({}), _candidates(recording, axes, size, kept, {})
    for gathers, ties, least in (
        (False, False, 0.0),
        (True, False, WORTH_GATHERING * total),
        (True, True, WORTH_GATHERING * total),
    ):
        if best.num_elements + least >= total:
            break
        if ties:
            candidates = _candidates(recording, axes, size, kept, outputs)
        alone = {axis: candidate for axis, candidate in candidates.items() if not candidate.is_normed}
        taken = _chosen(recording, axes, alone, features, gathers=gathers)
        # A norm over cut features sends statistics. At this price the layers around it may be cut, if they are not yet.
        more = _beside(candidates, taken)
        if more:
            taken = _chosen(
                recording, axes, {candidate.axis: candidate for candidate in taken} | more, features, gathers=gathers
            )
        cut = {candidate.axis: _balanced(candidate.axis.size, size) for candidate in taken}
        shards = {}
        for name, use in {**recording.parameters, **recording.buffers}.items():
            cuts = _cuts_of(use, axes, cut, outputs if ties else {})
            shard = shard_of(use.shape, cuts)
            stays_whole = name in recording.parameters and _partly_summed(cuts, features.get(use))
            if shard is not None and not stays_whole:
                shards[name] = shard
        num_elements = sum(prod(use.shape) for name, use in recording.parameters.items() if name in shards)
        if num_elements > best.num_elements + least:
            best = _CutShards(shards, num_elements, sum(candidate.num_sent for candidate in taken) / num_elements)
    return best


def _cuts_of(
    use: TensorUse, axes: RunAxes, cut: Mapping[DimAxis, bytes], features: Mapping[TensorUse, int | None]
) -> list[bytes | None]:
    """Returns the cut of each dim of a parameter.

    ``features`` has the dim of output features of some parameters. An axis that is in this dim cuts no other dim.
    """
    dims, own = axes.of(use), features.get(use)
    elsewhere = cut
    if own is not None:
        inside = set(leaves(dims[own]))
        elsewhere = {axis: labels for axis, labels in cut.items() if axis not in inside}
    return [labels_of(axis, cut if number == own else elsewhere) for number, axis in enumerate(dims)]


def _chosen(
    recording: Recording,
    axes: RunAxes,
    candidates: _Candidates,
    features: Mapping[TensorUse, int | None],
    *,
    gathers: bool,
) -> list[_Candidate]:
    """Returns the axes to cut: the best candidates that leave no tensor with a dim of which only some elements are cut.

    With ``gathers``, weights of two dims or more may have such a dim, since they then stay whole. Buffers that
    operators write to, such as the statistics of a batch norm, may not.
    """
    uses = [use for use in recording.parameters.values() if len(use.shape) == 1 or not gathers]
    uses += [use for call in recording.calls for use in (*call.written, *call.statistics) if use.kind == "buffer"]
    while True:
        taken = _taken(candidates)
        labels = {axis: bytes(axis.size) for axis in taken}
        refused = set[DimAxis]()
        for use in uses:
            dims = axes.of(use)
            partly = _partly_summed([labels_of(axis, labels) for axis in dims], features.get(use))
            refused.update(leaf for number in partly for leaf in leaves(dims[number]))
        if refused.isdisjoint(candidates):
            break
        candidates = {axis: candidate for axis, candidate in candidates.items() if axis not in refused}
    # if all the axes are only in the model's outputs, cutting is in vain: these are gathered at once
    inner = any(candidate.is_tied or not candidate.in_output for candidate in taken.values())
    return list(taken.values()) if inner else []


def _beside(candidates: _Candidates, taken: Sequence[_Candidate]) -> _Candidates:
    """Returns the candidates that are dims of norms, unless a candidate in ``taken`` excludes them."""
    axes = {candidate.axis for candidate in taken}
    free = (option for option in candidates.values() if option.is_normed and option.axis not in option.excludes)
    return {candidate.axis: candidate for candidate in free if candidate.excludes.isdisjoint(axes)}


def _taken(candidates: _Candidates) -> _Candidates:
    """Returns candidates (axes) that do not exclude each other: the cheapest first, or others that cut clearly more."""
    cheapest = _cheapest(candidates)
    most, least_gain = _most(candidates, cheapest), WORTH_MORE * _num_elements(cheapest)
    return most if _num_elements(most) > _num_elements(cheapest) + least_gain else cheapest


def _num_elements(candidates: _Candidates) -> int:
    return sum(candidate.num_elements for candidate in candidates.values())


def _cheapest(candidates: _Candidates) -> _Candidates:
    by_cost = sorted(
        candidates.values(),
        key=lambda option: (option.in_output, option.num_sent / option.num_elements, -option.num_elements),
    )
    taken: _Candidates = {}
    for candidate in by_cost:
        if candidate.axis not in candidate.excludes and candidate.excludes.isdisjoint(taken):
            taken[candidate.axis] = candidate
    return taken


def _most(candidates: _Candidates, taken: _Candidates) -> _Candidates:
    """Exchanges a chosen axis for those that it alone excludes, as long as that cuts more elements; returns the result.

    In a network of convolutions, for example, the channels between blocks cost the least for each element, but exclude
    the inner channels of every block. An exchange may send only so much more for each element that it gains
    (``MOST_FOR_MORE``): heads that all share one key head are not exchanged for the features of a head, which would
    cost a sum of all attention scores.
    """
    num_elements, num_sent = _num_elements(taken), sum(candidate.num_sent for candidate in taken.values())

    def is_better(instead: _Candidates, before: _Candidate) -> bool:
        gained = _num_elements(instead) - before.num_elements
        more = sum(candidate.num_sent for candidate in instead.values()) - before.num_sent
        return gained > 0 and more * num_elements <= MOST_FOR_MORE * num_sent * gained

    while True:
        excluded_by = defaultdict[DimAxis, _Candidates](dict)
        for axis, candidate in candidates.items():
            by = [other for other in candidate.excludes if other in taken]
            if axis not in taken and axis not in candidate.excludes and len(by) == 1 and not candidate.in_output:
                excluded_by[by[0]][axis] = candidate
        for axis, others in excluded_by.items():
            instead = _cheapest(others)
            if is_better(instead, taken[axis]):
                taken = {other: candidate for other, candidate in taken.items() if other is not axis} | instead
                break
        else:
            return taken


def _partly_summed(cuts: Sequence[bytes | None], features: int | None) -> list[int]:
    """Returns the dims of which some elements are cut and others are on all ranks, except the dim ``features``.

    ``features`` is the dim of output features. Any other such dim is a problem: operators either do not run on it, or
    sum over it, and elements on all ranks would then count several times.
    """
    return [dim for dim, cut in enumerate(cuts) if cut is not None and ALL in cut and dim != features]


def _candidates(
    recording: Recording, axes: RunAxes, size: int, kept: Collection[str], tied: Mapping[TensorUse, int | None]
) -> _Candidates:
    """Returns the axes that could be cut, with their elements, traffic and conflicts; none of ``kept`` parameters.

    ``tied`` has the dim of output features of some parameters. An axis in this dim may be in other dims of the
    parameter as well, without excluding itself.
    """
    whole_uses = (*recording.inputs, *recording.marked_inputs, *recording.measured_in_backward)
    refused = {leaf for use in whole_uses for axis in axes.of(use) for leaf in leaves(axis)}
    lookups = [axis_use for axis_use in axes.uses if axis_use.role is Role.LOOKUP]
    refused |= {leaf for use in lookups if any(use.call.args[3:]) for leaf in leaves(use.axis)}  # scaled, or sparse
    refused |= {leaf for name in kept for axis in axes.of(recording.parameters[name]) for leaf in leaves(axis)}
    by_leaf: _Candidates = {}
    for use in (parameter for parameter in recording.parameters.values() if prod(parameter.shape)):
        for axis in axes.of(use):
            for leaf in dict.fromkeys(leaves(axis)):  # in order: every rank makes the same choice
                if leaf.whole in ("", CLASSES) and leaf.size >= size and leaf not in refused:
                    num_elements = prod(use.shape) * _num_along(leaf, axis) // axis.size
                    by_leaf.setdefault(leaf, _Candidate(leaf)).num_elements += num_elements
    for axis_use in axes.uses:
        for leaf in set(leaves(axis_use.axis)) & by_leaf.keys():
            by_leaf[leaf].num_sent += 2 * sum(prod(sent.shape) for sent in _sent(axis_use))
            by_leaf[leaf].is_normed |= axis_use.role is Role.NORM
    for leaf in {leaf for use in recording.outputs for axis in axes.of(use) for leaf in leaves(axis)} & by_leaf.keys():
        by_leaf[leaf].in_output = True  # gathered at the end, so inner axes are preferred
    samples = axes.of_samples(recording.inputs)
    for lookup in lookups:
        index = lookup.call.operands[1]
        sizes = [root(axis).size for axis in axes.of(index) if not samples.isdisjoint(leaves(axis))]
        is_large = sizes and lookup.axis.size >= LARGE_TABLE * prod(index.shape) // prod(sizes)
        for leaf in [leaf for leaf in set(leaves(lookup.axis)) & by_leaf.keys() if not is_large]:
            if not (by_leaf[leaf].in_output or leaf.whole == CLASSES):
                del by_leaf[leaf]  # a small table, or one of positions: a sum of all tokens would save little
    for use, dims in axes.dims.items():
        groups = [set(leaves(axis)) & by_leaf.keys() for axis in dims]
        dim = tied.get(use)
        if dim is not None:
            for leaf in groups[dim]:
                by_leaf[leaf].is_tied |= sum(leaf in group for group in groups) > 1
            groups = [group if number == dim else group - groups[dim] for number, group in enumerate(groups)]
        _exclude(groups, by_leaf)
        for axis in dims:
            _exclude_inside(axis, by_leaf)
    return by_leaf


def _sent(use: AxisUse) -> Sequence[TensorUse]:
    """Returns the tensors that are sent if the axis is cut; each element is sent twice, as an all-reduce does."""
    call = use.call
    if use.role is Role.NORM:
        return (call.results[1:] or call.results) * 2  # two statistics, and their gradients
    if use.role is Role.GATHER:
        return [call.operands[PRODUCTS[call.name]]]  # all-gathered, and its gradient reduce-scattered
    return call.results


def _dims_of_features(recording: Recording, *, all_convolutions: bool = False) -> dict[TensorUse, int | None]:
    """Returns, for each parameter that operators use, the dim of its output features; None if it has other uses too.

    A rank may hold two kinds of such features: some of its own, and some that all ranks hold, such as those of the key
    head of multi-query attention in a fused layer. In other uses of a parameter, elements on all ranks would be
    gathered, or count several times. Of all convolutions only depthwise ones can hold both kinds, so the result has no
    others, except with ``all_convolutions``.
    """
    feature_dims: dict[TensorUse, int | None] = {}
    views = {use: (use, tuple(range(len(use.shape)))) for use in recording.parameters.values()}
    read = {use for call in recording.calls for use in call.operands} | set(recording.outputs)
    for call in recording.calls:
        if read.isdisjoint(call.results) and not call.written:
            continue  # no one reads the result, e.g. of a branch not taken
        for number, operand in enumerate(call.operands):
            if operand not in views:
                continue
            parameter, dims = views[operand]
            if call.name in _TURNS:
                turned = _TURNS[call.name](dims, operand.shape, *call.args[1:])
                views.setdefault(call.results[0], (parameter, turned))
                continue
            dim = _dim_of_features(call, number, all_convolutions)
            feature_dim = None if dim is None else dims[dim]
            feature_dims[parameter] = feature_dim if feature_dims.get(parameter, feature_dim) == feature_dim else None
    return feature_dims


def _dim_of_features(call: RecordedCall, number: int, all_convolutions: bool) -> int | None:
    """Returns the dim of an operand of a product or a depthwise convolution that has output features, else None."""
    if call.name == "convolution" and call.args[6]:
        return None  # transposed: dim 0 has the input channels
    if call.name == "convolution" and not all_convolutions and call.args[8] != call.operands[1].shape[0]:
        return None
    if call.name == "add" and len(call.operands[number].shape) != 1:
        return None
    return _FEATURES.get((call.name, number))


def _squeezed(
    dims: tuple[int, ...], shape: tuple[int, ...], chosen: int | Sequence[int] | None = None
) -> tuple[int, ...]:
    of = range(len(dims)) if chosen is None or not dims else [chosen] if isinstance(chosen, int) else chosen
    gone = {dim % len(dims) for dim in of if shape[dim] == 1}
    return tuple(weight_dim for dim, weight_dim in enumerate(dims) if dim not in gone)


def _unsqueezed(dims: tuple[int, ...], shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    dim %= len(dims) + 1
    return (*dims[:dim], -1, *dims[dim:])


def _transposed(dims: tuple[int, ...], shape: tuple[int, ...], one: int, other: int) -> tuple[int, ...]:
    turned = list(dims)
    if dims:  # torch allows dims 0 and -1 of a number too
        turned[one], turned[other] = dims[other], dims[one]
    return tuple(turned)


_TURNS: Mapping[str, Callable[..., tuple[int, ...]]] = {
    "t": lambda dims, _: dims[::-1],
    "squeeze": _squeezed,
    "unsqueeze": _unsqueezed,
    "transpose": _transposed,
    "permute": lambda dims, _, order: tuple(dims[dim] for dim in order),
}
"""Functions that follow the dims of a weight through operators that make views of it, by the operator's name.

A function takes the dims of the weight that the dims of the operand are, the operand's shape, and the call's other
arguments. It returns the dims of the weight that the dims of the view are.
"""


def _num_along(leaf: DimAxis, axis: DimAxis) -> int:
    """Returns how many elements of an axis lie in the concatenated parts of it that contain ``leaf``."""
    axis = root(axis)
    if axis.parts is not None:
        return sum(_num_along(leaf, part) for part in axis.parts)
    return axis.size if leaf in set(leaves(axis)) else 0


def _exclude_inside(axis: DimAxis, candidates: _Candidates) -> None:
    """Makes two factors of one dim exclude each other; two parts of a dim may both be cut."""
    axis = root(axis)
    if axis.factors is not None:
        _exclude([set(leaves(factor)) & candidates.keys() for factor in axis.factors], candidates)
    for inner in axis.inner:
        _exclude_inside(inner, candidates)


def _exclude(groups: Sequence[set[DimAxis]], candidates: _Candidates) -> None:
    several = [group for group in groups if group]
    if len(several) < 2:
        return
    times: defaultdict[DimAxis, int] = defaultdict(int)
    for leaf in chain.from_iterable(several):
        times[leaf] += 1
    every = set(times)
    for group in several:
        others = {leaf for leaf in every if times[leaf] > (leaf in group)}
        for leaf in group:
            candidates[leaf].excludes |= others
