"""``OperatorCall`` and ``Decision``: a sharding rule's input (the call) and output (how each tensor is sharded).

A rule lists, for a single axis of the placement, the ways in which its members can compute the operator: a letter for
each input and each output. Letters are B (broadcast), P (partial sum), or the number of the dim that is split.
:func:`decide` expands this to all axes: each takes the way whose inputs are cheapest to redistribute. All inputs
broadcast is always a way. For ``mm`` some of the ways are::

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

from shardwright.comm.current_world import here
from shardwright.errors import PlanError
from shardwright.global_tensor.geometry import GlobalLayout, local_shape
from shardwright.global_tensor.placement import Placement
from shardwright.global_tensor.sbp import Sbp, broadcast, partial_sum, sbp_text, split
from shardwright.global_tensor.tensor import GlobalTensor

Letter = str | int
Way = tuple[tuple[Letter, ...], tuple[Letter, ...]]
"""The letter of each input along one axis, and the letter of each output."""


@dataclass
class OperatorCall:
    """One operator call, as sharding rules see it; ``tensors`` are the global tensors in its arguments, in order."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Any]
    placement: Placement
    outputs: list[Tensor | None] = field(default_factory=list)
    """The results as meta tensors of the global shapes."""
    key: Any = None
    """Equal for calls with the same shapes, dtypes and plain arguments; None for an operator without a rule."""

    @property
    def name(self) -> str:
        """The operator's name without the ``aten::`` of torch."""
        return str(self.func._schema.name).removeprefix("aten::")

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The global shapes of the input tensors."""
        return [tuple(x.shape) for x in self.tensors]

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The global shape of the first output."""
        return tuple(self.output.shape)

    @property
    def output(self) -> Tensor:
        """The first output, as a meta tensor of its global shape."""
        first = self.outputs[0]
        assert first is not None
        return first

    def arg(self, name: str) -> Any:
        """Returns an argument by its name in torch's schema, or its default."""
        if name in self.kwargs:
            return self.kwargs[name]
        place = self.names.index(name)
        return self.args[place] if place < len(self.args) else self.func._schema.arguments[place].default_value

    @property
    def names(self) -> list[str]:
        """The names of the arguments in torch's schema."""
        return [argument.name for argument in self.func._schema.arguments]

    def dim(self, name: str = "dim", num_dims: int | None = None) -> int:
        """Returns the value of a ``dim`` argument, negatives made positive: by default for the first input's dims."""
        num = len(self.shapes[0]) if num_dims is None else num_dims
        return int(self.arg(name)) % max(num, 1)

    def place(self, name: str) -> int | None:
        """Returns the index in ``tensors`` of a named argument (of a list, its first); None if it is no tensor."""
        at = 0
        for number, argument in enumerate(self.func._schema.arguments):
            given = self.args[number] if number < len(self.args) else self.kwargs.get(argument.name)
            num = sum(isinstance(leaf, DTensor) for leaf in tree_flatten(given)[0])
            if argument.name == name:
                return at if num else None
            at += num
        return None

    def letters(self, /, **of: Letter) -> tuple[Letter, ...]:
        """Returns a letter for each input (B broadcast, P partial sum, or its split dim): as named, else B."""
        found: list[Letter] = ["B"] * len(self.tensors)
        for name, letter in of.items():
            place = self.place(name)
            if place is not None:
                found[place] = letter
        return tuple(found)

    def with_arg(self, name: str, value: Any, args: Sequence[Any]) -> tuple[Any, ...]:
        """Returns ``args`` with ``value`` for the positional argument ``name``; trailing defaults are filled in."""
        arguments = self.func._schema.arguments
        changed = [*args, *(each.default_value for each in arguments[len(args) :] if not each.kwarg_only)]
        changed[self.names.index(name)] = value
        return tuple(changed)


Run = Callable[[OperatorCall, "Decision", tuple[Any, ...], dict[str, Any]], Any]


@dataclass
class Decision:
    """How an operator is sharded: the sbp that inputs need and outputs get; ``run`` replaces it on local tensors."""

    ins: list[tuple[Sbp, ...]]
    outs: list[tuple[Sbp, ...]]
    run: Run | None = None
    communicates: bool = False
    """Whether ``run`` communicates: then every member runs it, even with an empty slice."""

    def local_shape_of(self, call: OperatorCall, output: int = 0) -> tuple[int, ...]:
        """Returns the shape of this rank's local tensor of an output."""
        given = call.outputs[output]
        assert given is not None
        return local_shape(tuple(given.shape), GlobalLayout(call.placement, self.outs[output]), here().rank)


def to_sbp(letter: Letter) -> Sbp:
    """Returns the sbp that a rule's letter means: B is broadcast, P partial sum, a number the dim of a split."""
    return broadcast if letter == "B" else partial_sum if letter == "P" else split(int(letter))


def to_letter(one: Sbp) -> Letter:
    """Returns the letter by which rules write an sbp: B for broadcast, P for partial sum, the dim for a split."""
    return one.dim if isinstance(one, Shard) else "B" if one.is_replicate() else "P"


def decide(call: OperatorCall, ways: Sequence[Way], run: Run | None = None, *, in_place: bool = False) -> Decision:
    """Returns how to shard an operator: on each axis, the way whose inputs move the fewest elements; first of equals.

    ``in_place``: the first input is written to, so ways that keep its layout are preferred.
    """
    num_outputs = max(len(call.outputs), 1)
    ways = [(("B",) * len(call.tensors), ("B",) * num_outputs), *ways]  # always right: every member computes everything
    chosen: list[Way] = []
    for axis, size in enumerate(call.placement.shape):
        now = [to_letter(x.sbp[axis]) for x in call.tensors]
        # if no rule keeps the input's layout, the result is redistributed to it and written back
        candidates = [way for way in ways if in_place and way[0][0] == way[1][0] == now[0]] or ways
        chosen.append(min(candidates, key=lambda way: _cost(call, size, now, way)))
    ins = [tuple(to_sbp(way[0][i]) for way in chosen) for i in range(len(call.tensors))]
    outs = [tuple(to_sbp(way[1][i]) for way in chosen) for i in range(num_outputs)]
    return Decision(ins, outs, run)


def _cost(call: OperatorCall, size: int, now: Sequence[Letter], way: Way) -> float:
    """An estimate of the elements that members of the axis send to bring the inputs into the way's layout."""
    cost = 0.0
    for x, before, after in zip(call.tensors, now, way[0], strict=True):
        if before == after or before == "B":
            continue
        cost += 1e-6  # breaks ties, also of empty tensors, for a way that redistributes nothing
        share = (size - 1) / size * x.numel()
        cost += {"P": 2.0 if after == "B" else 1.0}.get(str(before), 1.0 if after == "B" else 1.0 / size) * share
        if after == "P":
            cost += 4 * x.numel() + 1  # splitting a tensor into terms is never worth it
    return cost


def empty_results(call: OperatorCall, decision: Decision) -> Any:
    """Returns empty tensors, or zeros for ``partial_sum``, if this rank need not run the operator; None if it must.

    A rank that is not a member computes nothing, nor does a member with an empty slice, since not every operator takes
    empty tensors.
    """
    if here().rank not in call.placement:
        return _zero_results(call, decision)
    if decision.communicates or not decision.outs or not any(
        x.numel() and 0 in local_shape(tuple(x.shape), GlobalLayout(call.placement, sbp), here().rank)
        for x, sbp in zip(call.tensors, decision.ins, strict=True)
    ):  # fmt: skip
        return None
    # an output with elements must still be computed, unless it is a term whose inputs here are empty: that is zero
    terms_given = any(one.is_partial() for sbp in decision.ins for one in sbp)
    for number, meta in enumerate(call.outputs):
        is_term = not terms_given and any(one.is_partial() for one in decision.outs[number])
        if meta is not None and 0 not in decision.local_shape_of(call, number) and not is_term:
            return None
    return _zero_results(call, decision)


def _zero_results(call: OperatorCall, decision: Decision) -> Any:
    """Zeros of the local shapes, in the tuple or list that the operator returns."""
    found = [
        None if meta is None else torch.zeros(
            decision.local_shape_of(call, number), dtype=meta.dtype, device=call.tensors[0]._local_tensor.device
        )
        for number, meta in enumerate(call.outputs)
    ]  # fmt: skip
    returns = call.func._schema.returns
    if len(returns) > 1:
        return tuple(found)
    if returns and str(returns[0].type) == "List[Tensor]":
        return found
    return found[0] if found else None


_MOST_ELEMENTS_TRIED = 2**20
"""Of larger tensors, other ranks see a member's error only when its process is gone."""

_TRIED: set[Any] = set()


def try_out(call: OperatorCall) -> None:
    """Runs the operator on ones, on a rank that has no data to compute, so that it raises the errors of other ranks.

    The inputs are ones of the global shapes, or zeros if ones are no valid indices; equal calls are tried once.
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
    """Returns the PlanError for an operator that has no rule for its inputs' layouts."""
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
    """Raises PlanError on every rank if inputs differ in dtype; torch's own error would reach members only."""
    if len({x.dtype for x in call.tensors}) > 1:
        raise PlanError(
            f"'{call.name}' takes tensors of one dtype",
            given=", ".join(f"{list(x.shape)} {x.dtype}" for x in call.tensors),
            allowed="one dtype for all of them",
            fix=f"write x.to({call.tensors[0].dtype}) for the others",
        )


def number_of(given: Any) -> Any:
    """Returns a scalar argument's value, from a number or a plain 0-d tensor; None for other tensors."""
    if isinstance(given, Tensor):
        plain = given._plain if isinstance(given, GlobalTensor) else None
        return None if plain is None or plain.ndim else plain.item()
    return given


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which a mean of ``dtype`` is summed: 16-bit floats would overflow before the division."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether ``dtype`` represents every value of the dtype ``other`` exactly."""
    return torch.promote_types(dtype, other) == dtype
