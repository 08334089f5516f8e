"""Plans one call of a function on tensor shards: the operators that run on shards, and the collectives.

The function is run once on meta tensors of the whole shapes; the dims of its operators are read from the table of
``analysis/dims/operator_dims.py``. For each operator the plan says what happens to its operands before it runs:

    copy     a whole operand of cut work: its gradient is a partial sum, which the backward adds up
    slice    a whole operand where a shard is needed
    gather   a shard where the operator needs the whole

and whether its result is a partial sum, which is all-reduced. Sizes among the arguments become those of this rank's
shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.analysis.dims.dim_letters import DimLetters, Dims, Role
from shardwright.analysis.dims.operator_dims import DimRelation, relation_of
from shardwright.analysis.recorded.recording import PRODUCTS, Recorded, RecordedCall, TensorUse
from shardwright.dispatch_mode import without_dispatch_modes
from shardwright.operators.partly_shared import partly_shared_product
from shardwright.sharding.tensor_shard import ALL, TensorShard, num_held, shard_of
from shardwright.strategies.tensor_parallel.norms_of_shards import norm_of_shards
from shardwright.strategies.tensor_parallel.tensor_shards import LetterCutError, cut_of, letters_of

SUMMABLE = frozenset(["mm", "bmm", "addmm", "baddbmm", "linear", "convolution", "sum", "mean", "dot", "mv"])
"""The operators for which a contraction over shards gives partial sums, whose sum over ranks is the result."""

# fmt: off
_PARTLY_CUT = frozenset((
    "view", "_unsafe_view", "reshape", "t", "transpose", "permute", "unsqueeze", "squeeze", "slice", "narrow",
    "split", "split_with_sizes", "clone", "expand", "_to_copy", "linear", "addmm", "mm", "add", "convolution",
))
# fmt: on
"""Operators that run on a dim of which some elements are this rank's and others are on all ranks.

They move elements, or treat each alone. A product's or a convolution's own output features may be such a dim, but not
one that it sums over.
"""


class NotOnShardsError(Exception):
    """Raised where a call cannot run on tensor shards; its tensors are then all-gathered, and it runs on whole ones."""


class WriteToShardError(Exception):
    """Raised where a call writes in place to a shard of a tensor that it needs whole; the text names the operator."""


class Slot(NamedTuple):
    """A placeholder for a tensor in a call plan, by number: first the call's arguments, then operators' results."""

    number: int


class OperandChange(NamedTuple):
    """A change that is made to one operand, the tensor number ``slot``, before an operator runs on shards.

    The kind ``copy`` leaves a whole operand as it is, and its partial gradients are all-reduced in the backward;
    ``slice`` keeps this rank's shard along ``dim``; ``gather`` all-gathers the shards along ``dim``. ``cut`` gives the
    rank that holds each index of ``dim``, 255 for all ranks.
    """

    slot: int
    kind: Literal["copy", "slice", "gather"]
    dim: int = 0
    cut: bytes = b""


class OperatorStep(NamedTuple):
    """One operator of a call plan; ``args`` and ``named`` have a :class:`Slot` in place of each tensor.

    ``changes`` are made to operands before; ``results`` are the slots of the results. ``summed``: the results are
    partial sums, which are all-reduced. ``addend``: the slot of a term, such as a bias, that is added once after the
    sum; ``addend_dim`` is the dim of the result along which a 1-D term lies, -1 if it is added as it is. ``written``:
    the slots of operands that the operator writes to.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    named: dict[str, Any]
    changes: tuple[OperandChange, ...]
    results: tuple[int, ...]
    summed: bool = False
    addend: Slot | None = None
    addend_dim: int = -1
    written: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CallPlan:
    """The operators on this rank's shards that run in place of one call, and the shards of its results.

    ``results`` is what the call returns, with a :class:`Slot` in place of each tensor. ``shards`` is the shard that
    each of the ``num_slots`` slots holds, None for a whole tensor; ``given`` are the slots of the arguments, ``made``
    those of the results. ``runs_as_is``: the function itself does the same on shards, without a message.
    """

    steps: tuple[OperatorStep, ...]
    results: Any
    shards: Mapping[int, TensorShard | None]
    num_slots: int
    given: tuple[int, ...]
    made: tuple[int, ...]
    runs_as_is: bool


class ShardUse(NamedTuple):
    """A tensor argument of a planned call: its whole shape (a meta tensor), and this rank's shard, None if it is whole.

    ``learns`` is True if the tensor needs a gradient.
    """

    whole: Tensor
    shard: TensorShard | None
    learns: bool


def plan_call(function: Any, args: Any, named: Any, tensors: Sequence[ShardUse], rank: int,
              device: torch.device) -> CallPlan:  # fmt: skip
    """Returns the plan of one call for one rank: the operators on the rank's shards and the collectives between them.

    ``args`` and ``named`` hold meta tensors of whole shapes, which ``tensors`` lists with the shard held of each.
    ``rank`` is the rank's index on the axis; ``device`` takes the place of the meta device in operators' arguments.

    Raises: NotOnShardsError, ValueReadError: the call cannot run on shards. WriteToShardError: it writes in place to a
        shard of a tensor that it needs whole.
    """
    function = norm_of_shards(function, args, named, tensors[0].shard if tensors else None)
    recorded = Recorded()
    uses = [recorded.use(tensor.whole, "input") for tensor in tensors]
    with torch.no_grad(), without_dispatch_modes(), recorded:
        result = function(*args, **named)
    planning = _Planning(rank, device)
    argument_slots = [
        planning.slot(use, tensor.shard, tensor.learns) for use, tensor in zip(uses, tensors, strict=True)
    ]
    for call in recorded.recording.calls:
        if call.name == "empty" and torch.device(call.named.get("device") or "cpu").type != "meta":
            raise NotOnShardsError("a tensor that C++ code fills")
        planning.call(call)

    def place(leaf: Any) -> Any:
        return Slot(planning.slot(recorded.use(leaf))) if isinstance(leaf, Tensor) else leaf

    results = tree_map(place, result)
    _check_known(planning.steps, argument_slots)
    result_slots = tuple(leaf.number for leaf in tree_leaves(results, is_leaf=_is_slot) if _is_slot(leaf))
    flat = results if isinstance(results, tuple | list) and not _is_slot(results) else [results]
    # A function in Python may compute with sizes in ways that its recorded operators do not show.
    as_is = planning.as_is and (len(planning.steps) == 1 or not isinstance(function, FunctionType))
    # If an argument is a shard that no operator takes, the function may read this shard's size where the size of the
    # whole tensor is meant, as in x.expand_as(shard): then the function itself must not run. A function without
    # operators, such as x.detach() or x.data, reads no size and always runs itself.
    taken = {id(use) for call in recorded.recording.calls for use in call.operands}
    as_is = as_is and all(tensor.shard is None or id(use) in taken for use, tensor in zip(uses, tensors, strict=True))
    as_is = as_is or not planning.steps
    # x[:, [0, 1]] was recorded as a slice, and indexes a shard by numbers of the whole
    as_is = as_is and not (function is Tensor.__getitem__ and _has_list(args[1]))
    return CallPlan(
        tuple(planning.steps), results, planning.shards, len(planning.shards), tuple(argument_slots), result_slots,
        as_is and all(map(_is_slot, flat)),
    )  # fmt: skip


def _check_known(steps: Sequence[OperatorStep], given: Sequence[int]) -> None:
    """Raises NotOnShardsError if a step takes a tensor with values that torch's C++ code wrote, which no step makes.

    Torch makes such tensors of a list of indices in ``x[:, [2, 0]]``, and of the lengths that ``ctc_loss`` is given.
    """
    known = {*given}
    for step in steps:
        leaves = tree_leaves((step.args, step.named, step.addend), is_leaf=_is_slot)
        if any(_is_slot(leaf) and leaf.number not in known for leaf in leaves):
            raise NotOnShardsError("a tensor that C++ code fills")
        known.update(step.results)


def _has_list(index: Any) -> bool:
    """Returns whether an index has a list of numbers in it, as ``x[:, [0, 1]]``."""
    return isinstance(index, list) or (isinstance(index, tuple) and any(isinstance(place, list) for place in index))


def _is_slot(leaf: Any) -> bool:
    return isinstance(leaf, Slot)


class _GatherFirstError(Exception):
    """Raised where operands must be all-gathered before an operator: the slot of one, or None for all."""

    def __init__(self, slot: int | None = None) -> None:
        super().__init__()
        self.slot = slot


class _Planning:
    """Plans the operators of one call, one after the other, and tracks the shard that each slot holds."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self.slots: dict[TensorUse, int] = {}
        self.shards: dict[int, TensorShard | None] = {}
        self.steps: list[OperatorStep] = []
        self.learning: set[int] = set()
        self.lost: set[int] = set()  # views of all-gathered copies: what is written there is lost
        self.as_is = True

    def slot(self, use: TensorUse, shard: TensorShard | None = None, learns: bool = False) -> int:
        if use not in self.slots:
            self.slots[use] = len(self.slots)
            self.shards[self.slots[use]] = shard
        if learns:
            self.learning.add(self.slots[use])
        return self.slots[use]

    def call(self, call: RecordedCall) -> None:
        slots = [self.slot(use) for use in call.operands]
        if self.lost.intersection(self.slot(use) for use in (*call.written, *call.statistics)):
            raise WriteToShardError(call.name)
        cut = {slot for slot in slots if self.shards[slot] is not None}
        if not cut:
            self._add(call, OperatorStep(call.function, call.args, call.named, (), ()), [None] * len(call.results))
            self._note_views(call, set())
            return
        relation = relation_of(call)
        gathered: set[int] = set()
        while True:
            try:
                self._on_shards(call, relation, slots, gathered)
                self._note_views(call, gathered)
                return
            except _GatherFirstError as error:
                more = cut - gathered if error.slot is None else {error.slot} - gathered
                if not more:
                    raise NotOnShardsError(call.name) from None
                gathered |= more
            except LetterCutError:
                if gathered >= cut:
                    raise NotOnShardsError(call.name) from None
                gathered |= cut

    def _note_views(self, call: RecordedCall, gathered: set[int]) -> None:
        """Adds the results of a call to ``lost`` (views of all-gathered copies) if they are such views.

        What is written to a tensor in ``lost`` is lost.
        """
        if (self.lost | gathered).intersection(map(self.slot, call.viewed)):
            self.lost.update(map(self.slot, call.results))

    def _on_shards(self, call: RecordedCall, relation: DimRelation, slots: Sequence[int], gathered: set[int]) -> None:
        written = {self.slot(use) for use in (*call.written, *call.statistics)}
        if written & gathered:
            raise WriteToShardError(call.name)
        shards = {slot: None if slot in gathered else self.shards[slot] for slot in slots}
        labels = _labels(call, relation, [(slot, shards[slot]) for slot in slots])
        letters = relation.letters
        cuts = [tuple(cut_of(dim, labels, letters) for dim in dims) for dims in relation.results]
        summed = any(letters.roles[letter] is Role.SUM for letter in labels)
        some = [cut for dim_cuts in cuts for cut in dim_cuts if cut is not None]
        if (
            any(sum(cut is not None for cut in dim_cuts) > 1 for dim_cuts in cuts)
            or (summed and some)
            or (call.name == "cat" and any(ALL in cut for cut in some))
            or (call.name == "convolution" and summed and call.args[8] > 1)
        ):
            # a layer's output features that come back to it as its input: the input is gathered, not the weight
            number = PRODUCTS.get(call.name, 0 if call.name == "convolution" else None)
            operand = slots[number] if summed and some and number is not None else None
            raise _GatherFirstError(operand if operand is not None and shards[operand] is not None else None)
        changes = [
            OperandChange(slot, "gather", dim, cut)
            for slot in sorted(gathered)
            for dim, cut in _dims_cut(self.shards[slot])
        ]
        if labels:
            changes += _changes(relation, slots, shards, labels, written, summed)
            changes = [change for change in changes if change.kind != "copy" or change.slot in self.learning]
        copies = {change.slot for change in changes if change.kind == "copy"}
        shared = next((cut for cut in some if ALL in cut), None)
        if shared is not None and copies and (call.name not in PRODUCTS or copies != {slots[PRODUCTS[call.name]]}):
            raise _GatherFirstError  # features on all ranks would count once for each rank
        result_shards = [shard_of(use.shape, cut) for use, cut in zip(call.results, cuts, strict=True)]
        function = _INSTEAD.get(call.name, call.function)
        step = OperatorStep(function, call.args, call.named, tuple(changes), (), summed)
        step = _localized(_LocalCall(call, step, relation, labels, result_shards, self.rank)) if labels else step
        if shared is not None and copies:
            step = _partly_shared(call, step, shared, self.rank)
        same = step.function is call.function and step.args == call.args and step.named == call.named
        self.as_is = self.as_is and same and not (changes or summed or written)
        self._add(call, step, result_shards)

    def _add(self, call: RecordedCall, step: OperatorStep, shards: Iterable[TensorShard | None]) -> None:
        results, learns = [], any(self.slot(use) in self.learning for use in call.operands)
        for use, shard in zip(call.results, shards, strict=True):
            results.append(self.slot(use, learns=learns))
            self.shards[results[-1]] = shard

        def place(leaf: Any) -> Any:
            if isinstance(leaf, TensorUse):
                return Slot(self.slot(leaf))
            return self.device if isinstance(leaf, torch.device) and leaf.type == "meta" else leaf

        args, named, addend = tree_map(place, (step.args, step.named, step.addend))
        written = tuple(self.slot(use) for use in call.written)
        self.steps.append(step._replace(args=args, named=named, addend=addend, results=tuple(results), written=written))


def _dims_cut(shard: TensorShard | None) -> list[tuple[int, bytes]]:
    return [(dim, cut) for dim, cut in enumerate(shard.cuts) if cut is not None] if shard is not None else []


def _labels(
    call: RecordedCall, relation: DimRelation, operands: Sequence[tuple[int, TensorShard | None]]
) -> dict[int, bytes]:
    """Returns which rank holds each index of an operator's cut dims, by letter, from the cuts of its operands."""
    by_letter: dict[int, bytes] = {}
    for (slot, shard), dims in zip(operands, relation.operands, strict=True):
        if shard is None or dims is None:
            continue
        for dim, cut in zip(dims, shard.cuts, strict=True):
            if cut is None:
                continue
            try:
                dim_labels = letters_of(dim, cut, relation.letters)
            except LetterCutError:
                raise _GatherFirstError(slot) from None
            for letter, labels in dim_labels.items():
                role, partly = relation.letters.roles[letter], ALL in labels
                if (
                    role in (Role.WHOLE, Role.NORM)
                    or (role is Role.SUM and (partly or call.name not in SUMMABLE))
                    or (role is Role.LOOKUP)
                    or (partly and call.name not in _PARTLY_CUT)
                    or by_letter.setdefault(letter, labels) != labels
                ):
                    raise _GatherFirstError(slot)
    return by_letter


def _changes(
    relation: DimRelation, slots: Sequence[int], shards: Mapping[int, TensorShard | None], labels: Mapping[int, bytes],
    written: set[int], summed: bool,
) -> list[OperandChange]:  # fmt: skip
    """Returns the changes that an operator's operands need, so that all agree with the cuts in ``labels``."""
    by_slot: dict[int, list[OperandChange]] = {}
    for number, (slot, dims) in enumerate(zip(slots, relation.operands, strict=True)):
        if dims is None or (summed and number == relation.addend):
            continue
        need = _cuts(dims, labels, relation.letters)
        shard = shards[slot]
        has = shard.cuts if shard is not None else (None,) * len(dims)
        changes = [OperandChange(slot, "copy")] if shard is None and need == has else []
        for dim, (new_cut, old_cut) in enumerate(zip(need, has, strict=True)):
            if new_cut != old_cut:
                if old_cut is not None or new_cut is None:
                    raise _GatherFirstError(slot)
                if ALL in new_cut:  # gradients of elements on all ranks would be added up
                    raise _GatherFirstError
                changes.append(OperandChange(slot, "slice", dim, new_cut))
        if (changes and slot in written) or by_slot.setdefault(slot, changes) != changes:
            raise _GatherFirstError  # it would write to a copy, or the operand is needed in two ways
    return [change for slot_changes in by_slot.values() for change in slot_changes]


def _cuts(dims: Dims, labels: Mapping[int, bytes], letters: DimLetters) -> tuple[bytes | None, ...]:
    return tuple(cut_of(dim, labels, letters) for dim in dims)


# ---- arguments of this rank's shard


class _LocalCall(NamedTuple):
    """A call of an operator on this rank's shards, whose arguments may still be sizes of the whole tensors.

    ``step`` is the planned call with the arguments of the recorded one, ``labels`` gives the rank of each index of the
    cut letters, and ``made`` are the shards of the results.
    """

    call: RecordedCall
    step: OperatorStep
    relation: DimRelation
    labels: Mapping[int, bytes]
    made: Sequence[TensorShard | None]
    rank: int

    def with_args(self, *args: Any, **changes: Any) -> OperatorStep:
        """Returns the step with other positional arguments, and other fields in ``changes``."""
        return self.step._replace(args=args, **changes)


def _localized(local: _LocalCall) -> OperatorStep:
    """Returns an operator's step with the size arguments of this rank's shard in place of the whole's."""
    localize = _LOCAL_ARGUMENTS.get(local.call.name)
    return local.step if localize is None else localize(local)


def _reshaped(local: _LocalCall) -> OperatorStep:
    args, shard = list(local.call.args), local.made[0]
    if shard is not None:
        args[1] = list(shard.local_shape(local.rank))
    return local.with_args(*args)


def _viewed(local: _LocalCall) -> OperatorStep:
    if isinstance(local.call.args[1], torch.dtype):
        return local.step
    return _reshaped(local)._replace(function=viewed)  # a shard's strides may allow no view


def _squeezed(local: _LocalCall) -> OperatorStep:
    shard = local.made[0]  # a shard may have one element in a dim of which the whole has more
    if shard is None:
        return local.step
    return local.with_args(local.call.args[0], list(shard.local_shape(local.rank)), named={}, function=viewed)


def _sliced(local: _LocalCall) -> OperatorStep:
    call, step, dims = local.call, local.step, local.relation.operands[0]
    dim = call.argument(1, "dim", 0) % len(call.operands[0].shape)
    assert dims is not None, "a slice has a rule"
    cut = cut_of(dims[dim], local.labels, local.relation.letters)
    if cut is None:
        return step
    start, size = call.argument(2, "start") or 0, call.results[0].shape[dim]
    start = max(start + len(cut) if start < 0 else start, 0)  # as torch's own kernel does
    every = call.argument(4, "step", 1) if call.name == "slice" else 1
    if every != 1:  # the factor that ``every`` steps over is not cut
        return local.with_args(call.args[0], dim, start, 2**62, every, named={})
    first, last = num_held(cut[:start], local.rank), num_held(cut[: start + size], local.rank)
    return local.with_args(call.args[0], dim, first, last, named={}, function=torch.ops.aten.slice.Tensor)


def _split(local: _LocalCall) -> OperatorStep:
    call = local.call
    dim = call.argument(2, "dim", 0) % len(call.operands[0].shape)
    # a number or size of parts is that of the whole tensor, so the shard is split by an explicit list of sizes
    sizes = [
        (own.local_shape(local.rank) if own is not None else use.shape)[dim]
        for own, use in zip(local.made, call.results, strict=True)
    ]
    return local.with_args(call.args[0], sizes, dim, named={}, function=torch.ops.aten.split_with_sizes.default)


def _convolved(local: _LocalCall) -> OperatorStep:
    args, labels, letters = list(local.call.args), local.labels, local.relation.letters
    group = next((p for dim in (local.relation.operands[0] or ())[1:2] for p in dim if p in labels), None)
    if group is not None and args[8] > 1 and letters.sizes[_letter(group)] == args[8]:  # whole groups on each rank
        args[8] = num_held(labels[_letter(group)], local.rank)
    if not local.step.summed:
        return local.with_args(*args)
    bias, args[2] = args[2], None  # added once, after the all-reduce
    return local.with_args(*args, addend=bias, addend_dim=1)


def _group_normed(local: _LocalCall) -> OperatorStep:
    args, shard, groups = list(local.call.args), local.made[0], local.made[1]
    if shard is None:
        return local.step
    args[3:5] = shard.local_shape(local.rank)[:2]
    args[6] = groups.local_shape(local.rank)[1] if groups is not None else args[6]
    return local.with_args(*args)


def _averaged(local: _LocalCall) -> OperatorStep:
    if not local.step.summed:
        return local.step
    count = prod(local.call.operands[0].shape) // max(prod(local.call.results[0].shape), 1)  # on all ranks
    return local.step._replace(function=partial(_share_of_mean, count))


def _added_product(local: _LocalCall) -> OperatorStep:
    call, aten = local.call, torch.ops.aten
    if not local.step.summed:
        return local.step
    if any(value != 1 for value in call.named.values()):
        raise NotOnShardsError(f"{call.name} with factors")
    function = aten.mm.default if call.name == "addmm" else aten.bmm.default
    return local.with_args(*call.args[1:], function=function, named={}, addend=call.args[0])


def _linear(local: _LocalCall) -> OperatorStep:
    call = local.call
    if not local.step.summed:
        return local.step
    named = {key: value for key, value in call.named.items() if key != "bias"}
    return local.with_args(*call.args[:2], named=named, addend=call.argument(2, "bias"))


_LOCAL_ARGUMENTS: Mapping[str, Callable[[_LocalCall], OperatorStep]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), _viewed),
    **dict.fromkeys(("expand", "broadcast_to"), _reshaped),
    **dict.fromkeys(("squeeze", "squeeze_dims"), _squeezed),
    **dict.fromkeys(("slice", "narrow"), _sliced),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unsafe_split"), _split),
    **dict.fromkeys(("addmm", "baddbmm"), _added_product),
    "convolution": _convolved,
    "native_group_norm": _group_normed,
    "mean": _averaged,
    "linear": _linear,
}
"""Functions that adapt an operator's step to this rank's shard, by the operator's name.

They replace arguments that are sizes or counts of the whole tensor, and take out a bias that must be added only once,
to the sum over all ranks.
"""


def _partly_shared(call: RecordedCall, step: OperatorStep, cut: bytes, rank: int) -> OperatorStep:
    """Returns the step of a product whose output features are partly this rank's own and partly on all ranks.

    Raises NotOnShardsError for an ``addmm`` with factors.
    """
    mine = [label == ALL for label in cut if label in (rank, ALL)]
    edges = [at for at in range(len(mine) + 1) if (at > 0 and mine[at - 1]) != (at < len(mine) and mine[at])]
    shared = tuple(zip(edges[::2], edges[1::2], strict=True))
    if call.name == "addmm":
        if any(value != 1 for value in step.named.values()):
            raise NotOnShardsError("addmm with factors")
        bias, x, weight = step.args
    else:
        x, weight = step.args[:2]
        bias = call.argument(2, "bias") if call.name == "linear" else None
    function = partial(
        partly_shared_product, shared=shared, is_first=rank == 0, transposed=call.name == "linear"
    )  # shared features' gradient counts on rank 0 only
    return step._replace(function=function, args=(x, weight, bias), named={})


COPIED = "_shardwright_copied_view"
"""The attribute that marks a tensor which would be a view on one device, but is a copy on shards."""


def viewed(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns a shard ``x`` in another shape: a view if its strides allow one, else a copy that is marked as such.

    >>> x = torch.ones(2, 6)[:, :4]
    >>> viewed(x, [8]).shape, hasattr(viewed(x, [8]), COPIED), hasattr(viewed(x, [2, 2, 2]), COPIED)
    (torch.Size([8]), True, False)
    """
    try:
        return x.view(shape)
    except RuntimeError:
        copied = x.reshape(shape)
        copied.__dict__[COPIED] = True
        return copied


def _group_norm(x: Tensor, *args: Any, **named: Any) -> Any:
    return torch.ops.aten.native_group_norm.default(x.contiguous(), *args, **named)


_INSTEAD: Mapping[str, Any] = {
    "native_group_norm": _group_norm,
    "_embedding_bag_forward_only": torch.ops.aten._embedding_bag.default,  # recorded, as calls are, without gradients
}
"""What runs on shards in place of an operator, by the operator's name."""


def _letter(part: Any) -> int:
    assert isinstance(part, int), "a letter"
    return part


def _share_of_mean(count: int, x: Tensor, *args: Any, **named: Any) -> Tensor:
    """Returns this rank's term of a mean over ``count`` elements: the sum of its own elements, divided by ``count``."""
    total: Tensor = torch.ops.aten.sum(x, *args, **named)  # over all dims, or those in ``args``
    return total / count


def like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns a meta tensor of ``shape`` with the memory format of ``tensor``: the same order of strides."""
    if tuple(shape) == tuple(tensor.shape):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if tensor.is_contiguous():  # a dim of one element has any stride
        return torch.empty(shape, dtype=tensor.dtype, device="meta")
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    made = torch.empty([shape[dim] for dim in order], dtype=tensor.dtype, device="meta")
    return made.permute([order.index(dim) for dim in range(tensor.dim())])
