"""``OperatorCall``, the input of a sharding rule, and ``ShardingDecision``, its output: how each tensor is sharded.

A rule lists the ways in which the ranks along one axis of the placement can compute the operator. A way has a letter
for each input and each output: B (broadcast), P (partial sum), or the number of the dim that is split. For each axis
:func:`decide` chooses the way whose inputs are cheapest to redistribute. All inputs broadcast is always a way. For
``mm`` some of the ways are::

    ((0, "B"), (0,))      rows of the first split: rows of the product
    (("B", 1), (1,))      columns of the second split: columns of the product
    ((1, 0), ("P",))      the contraction split: terms of the product
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_flatten, tree_map

from shardwright.comm.current_world import current_world
from shardwright.errors import PlanError
from shardwright.global_tensor.geometry import GlobalLayout, local_shape
from shardwright.global_tensor.placement import Placement
from shardwright.global_tensor.sbp import Sbp, broadcast, partial_sum, sbp_text, split
from shardwright.global_tensor.tensor import GlobalTensor

Letter = str | int
Way = tuple[tuple[Letter, ...], tuple[Letter, ...]]
"""One way to shard an operator along one axis: the letter of each input, and the letter of each output."""


@dataclass
class OperatorCall:
    """One call of an aten operator on global tensors: the operator, its arguments, and their placement.

    ``tensors`` lists the global tensors among the arguments, in order.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Any]
    placement: Placement
    outputs: list[Tensor | None] = field(default_factory=list)
    """The results as meta tensors of the global shapes; None for a result that is no tensor."""
    key: Any = None
    """A hash key, equal for calls that differ only in the values of tensors; None if the operator has no rule."""

    @property
    def name(self) -> str:
        """The operator's name without torch's prefix ``aten::``."""
        return str(self.func._schema.name).removeprefix("aten::")

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The global shapes of the input tensors."""
        return [tuple(x.shape) for x in self.tensors]

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The global shape of the operator's first output."""
        return tuple(self.output.shape)

    @property
    def output(self) -> Tensor:
        """The operator's first output, as a meta tensor of its global shape."""
        first = self.outputs[0]
        assert first is not None
        return first

    def arg(self, name: str) -> Any:
        """Returns the argument ``name`` of torch's schema, or its default if it was not given."""
        if name in self.kwargs:
            return self.kwargs[name]
        place = self.names.index(name)
        return self.args[place] if place < len(self.args) else self.func._schema.arguments[place].default_value

    @property
    def names(self) -> list[str]:
        """The names of the operator's arguments in torch's schema, in order."""
        return [argument.name for argument in self.func._schema.arguments]

    def dim(self, name: str = "dim", num_dims: int | None = None) -> int:
        """Returns the dim that the argument ``name`` gives, where a negative number counts from the last dim.

        ``num_dims`` is the tensor's number of dims, by default that of the first input.
        """
        num = len(self.shapes[0]) if num_dims is None else num_dims
        return int(self.arg(name)) % max(num, 1)

    def place(self, name: str) -> int | None:
        """Returns the index in ``tensors`` of the tensor passed as the argument ``name``, or None if none was passed.

        Rules use it to find an operand by its name in torch's schema. For a list of tensors it is the index of the
        first.
        """
        at = 0
        for number, argument in enumerate(self.func._schema.arguments):
            value = self.args[number] if number < len(self.args) else self.kwargs.get(argument.name)
            num = sum(isinstance(leaf, DTensor) for leaf in tree_flatten(value)[0])
            if argument.name == name:
                return at if num else None
            at += num
        return None

    def letters(self, /, **of: Letter) -> tuple[Letter, ...]:
        """Returns one letter for each input tensor: those in ``of`` by argument name, and B for all others.

        Letters are B (broadcast), P (partial sum), or the number of the dim that is split.
        """
        letters: list[Letter] = ["B"] * len(self.tensors)
        for name, letter in of.items():
            place = self.place(name)
            if place is not None:
                letters[place] = letter
        return tuple(letters)

    def with_arg(self, name: str, value: Any, args: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the positional arguments ``args`` of the call with the argument ``name`` replaced by ``value``.

        Positional arguments that were left out are filled with their defaults.
        """
        arguments = self.func._schema.arguments
        changed = [*args, *(argument.default_value for argument in arguments[len(args) :] if not argument.kwarg_only)]
        changed[self.names.index(name)] = value
        return tuple(changed)


RunOperator = Callable[[OperatorCall, "ShardingDecision", tuple[Any, ...], dict[str, Any]], Any]


@dataclass
class ShardingDecision:
    """How an operator call is sharded: the sbp that each input must have (``ins``) and each output gets (``outs``).

    An sbp says for each axis of the placement whether the tensor is split, broadcast or a partial sum. ``outs`` is
    empty if the shapes of the outputs depend on values. If ``run`` is given, ``run(call, decision, args, kwargs)`` is
    called in place of the operator, with the local tensors among ``args`` and ``kwargs``.
    """

    ins: list[tuple[Sbp, ...]]
    outs: list[tuple[Sbp, ...]]
    run: RunOperator | None = None
    communicates: bool = False
    """Whether ``run`` calls collectives, so that every rank must run it, even with an empty slice."""

    def local_shape_of(self, call: OperatorCall, output: int = 0) -> tuple[int, ...]:
        """Returns the shape of this rank's local tensor of output number ``output`` of the call."""
        meta = call.outputs[output]
        assert meta is not None
        return local_shape(tuple(meta.shape), GlobalLayout(call.placement, self.outs[output]), current_world().rank)


def to_sbp(letter: Letter) -> Sbp:
    """Returns the sbp of a rule's letter: B is broadcast, P is partial sum, a number is a split of that dim."""
    return broadcast if letter == "B" else partial_sum if letter == "P" else split(int(letter))


def to_letter(one: Sbp) -> Letter:
    """Returns a rule's letter for an sbp: B for broadcast, P for partial sum, the number of the dim for a split."""
    return one.dim if isinstance(one, Shard) else "B" if one.is_replicate() else "P"


def decide(
    call: OperatorCall, ways: Sequence[Way], run: RunOperator | None = None, *, in_place: bool = False
) -> ShardingDecision:
    """Returns how to shard an operator: for each axis, the choice that moves the fewest elements of the inputs.

    A choice says how each input and output is sharded along the axis. The candidates are ``ways``, and one that
    broadcasts all tensors. Among equally cheap candidates the broadcast is preferred, and then the first of ``ways``.
    ``run`` is called in place of the operator. With ``in_place`` the first input is written to: if some candidates keep
    its layout, the others are left out.
    """
    num_outputs = max(len(call.outputs), 1)
    ways = [(("B",) * len(call.tensors), ("B",) * num_outputs), *ways]  # every member computes all
    chosen: list[Way] = []
    for axis, size in enumerate(call.placement.shape):
        now = [to_letter(x.sbp[axis]) for x in call.tensors]
        # if no rule keeps the input's layout, the result is redistributed to it and written back
        candidates = [way for way in ways if in_place and way[0][0] == way[1][0] == now[0]] or ways
        chosen.append(min(candidates, key=lambda way: _cost(call, size, now, way)))
    ins = [tuple(to_sbp(way[0][i]) for way in chosen) for i in range(len(call.tensors))]
    outs = [tuple(to_sbp(way[1][i]) for way in chosen) for i in range(num_outputs)]
    return ShardingDecision(ins, outs, run)


def _cost(call: OperatorCall, size: int, now: Sequence[Letter], way: Way) -> float:
    """Returns about how many elements the ranks of the axis send to redistribute the inputs as the way needs them."""
    cost = 0.0
    for x, before, after in zip(call.tensors, now, way[0], strict=True):
        if before == after or before == "B":
            continue
        cost += 1e-6  # breaks ties for a way that redistributes nothing, also with empty tensors
        share = (size - 1) / size * x.numel()
        cost += {"P": 2.0 if after == "B" else 1.0}.get(str(before), 1.0 if after == "B" else 1.0 / size) * share
        if after == "P":
            cost += 4 * x.numel() + 1  # splitting a tensor into terms is never worth it
    return cost


def empty_results(call: OperatorCall, decision: ShardingDecision) -> Any:
    """Returns empty or zero local results if this rank need not run the operator, and None if it must run it.

    A rank outside the placement need not run it. Nor need a rank with an empty slice of an input, since not every
    operator takes empty tensors, with two exceptions: it must run the operator if ``decision.run`` calls collectives,
    and if its slice of an output has elements that are not just the zeros of a partial sum.
    """
    if current_world().rank not in call.placement:
        return _zero_results(call, decision)
    if decision.communicates or not decision.outs or not any(
        x.numel() and 0 in local_shape(tuple(x.shape), GlobalLayout(call.placement, sbp), current_world().rank)
        for x, sbp in zip(call.tensors, decision.ins, strict=True)
    ):  # fmt: skip
        return None
    # an output with elements must still be computed, unless it is a term of a sum: without inputs the term is zero
    terms_given = any(one.is_partial() for sbp in decision.ins for one in sbp)
    for number, meta in enumerate(call.outputs):
        is_term = not terms_given and any(one.is_partial() for one in decision.outs[number])
        if meta is not None and 0 not in decision.local_shape_of(call, number) and not is_term:
            return None
    return _zero_results(call, decision)


def _zero_results(call: OperatorCall, decision: ShardingDecision) -> Any:
    """Returns zeros of the local shapes, in the tuple or list that the operator returns."""
    zeros = [
        None if meta is None else torch.zeros(
            decision.local_shape_of(call, number), dtype=meta.dtype, device=call.tensors[0]._local_tensor.device
        )
        for number, meta in enumerate(call.outputs)
    ]  # fmt: skip
    returns = call.func._schema.returns
    if len(returns) > 1:
        return tuple(zeros)
    if returns and str(returns[0].type) == "List[Tensor]":
        return zeros
    return zeros[0] if zeros else None


_MOST_ELEMENTS_TRIED = 2**20
"""The largest call, in elements, that :func:`try_out` runs. Errors of larger ones reach other ranks late."""

_TRIED: set[Any] = set()


def try_out(call: OperatorCall) -> None:
    """Runs an operator on tensors of ones, so that a rank with nothing to compute raises the same errors as others.

    It is for errors of shapes and dtypes. The ones have the global shapes of the inputs; integers are zeros if ones are
    not valid, for example as indices. Equal calls are tried once. A call without a rule, or with more than 2**20
    elements in all, is not tried.
    """
    num = sum(x.numel() for x in (*call.tensors, *call.outputs) if x is not None)
    if call.key is None or call.key in _TRIED or num > _MOST_ELEMENTS_TRIED:
        return
    try:
        _run_on_ones(call, 1)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        pass  # an error of these values, not of shapes and dtypes
    except Exception:
        if all(x.dtype.is_floating_point for x in call.tensors):
            raise
        _run_on_ones(call, 0)
    if len(_TRIED) > 10_000:
        _TRIED.clear()
    _TRIED.add(call.key)


def _run_on_ones(call: OperatorCall, integer: int) -> None:
    def plain(x: Any) -> Any:
        if not isinstance(x, DTensor):
            return x
        original: Tensor | None = getattr(x, "_plain", None)
        if original is not None:
            return original.clone()
        value = 1 if x.dtype.is_floating_point else integer
        return torch.full(x.shape, value, dtype=x.dtype, device=x._local_tensor.device)

    call.func(*tree_map(plain, call.args), **tree_map(plain, call.kwargs))


def refusal(call: OperatorCall, why: str, instead: str = "broadcast tensors") -> PlanError:
    """Returns the PlanError for an operator without a rule for its inputs' layouts.

    ``why`` is the reason and ``instead`` says what is allowed, for the error's text.
    """
    layouts = ", ".join(f"{list(x.shape)} {sbp_text(x.sbp)}" for x in call.tensors)
    num = call.placement.ndim
    all_axes = "sbp.broadcast" if num == 1 else f"({', '.join(['sbp.broadcast'] * num)})"
    return PlanError(
        f"'{call.name}' has no rule for global tensors of these layouts: {why}",
        given=f"{layouts} on {call.placement}",
        allowed=instead,
        fix=f"write x.to_global(sbp={all_axes}) for them first",
    )


def check_dtypes(call: OperatorCall) -> None:
    """Raises PlanError on every rank if inputs differ in dtype.

    torch's own error would be raised only on the ranks of the placement.
    """
    if len({x.dtype for x in call.tensors}) > 1:
        raise PlanError(
            f"'{call.name}' takes tensors of one dtype",
            given=", ".join(f"{list(x.shape)} {x.dtype}" for x in call.tensors),
            allowed="one dtype for all of them",
            fix=f"write x.to({call.tensors[0].dtype}) for the others",
        )


def number_of(given: Any) -> Any:
    """Returns the number that an argument stands for, or None if it is a tensor whose values are not known here.

    A plain 0-d tensor that was made global for this call gives its value. An argument that is no tensor is returned as
    it is.
    """
    if isinstance(given, Tensor):
        plain = given._plain if isinstance(given, GlobalTensor) else None
        return None if plain is None or plain.ndim else plain.item()
    return given


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which ranks add up the elements of a mean of tensors of ``dtype``.

    It is float32 for 16-bit floats, whose sum could overflow, and otherwise ``dtype``.
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Returns whether a result of ``dtype`` is at least as wide as values of ``other``, by torch's type promotion."""
    return torch.promote_types(dtype, other) == dtype
