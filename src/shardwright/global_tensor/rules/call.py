"""One call of an operator on global tensors, and what a rule decides about it.

A rule names, for one axis of the placement, ways in which the members may compute: how each input lies, how each
output then lies. Letters are B (everyone has all), P (a term of a sum), or the number of the dim that is cut. Each axis
takes the way that moves least; that all inputs are whole is always a way.
"""

from __future__ import annotations

import cmath
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shardwright.comm.current_world import here
from shardwright.errors import LayoutError, PlanError
from shardwright.global_tensor import sbp as words
from shardwright.global_tensor.geometry import GlobalLayout, local_shape
from shardwright.global_tensor.placement import Placement
from shardwright.global_tensor.sbp import Sbp, broadcast, partial_sum, split
from shardwright.global_tensor.tensor import GlobalTensor

Letter = str | int
Way = tuple[tuple[Letter, ...], tuple[Letter, ...]]
"""How each input lies along an axis, and how each output does."""


@dataclass
class OperatorCall:
    """An operator and its arguments; ``tensors`` are the global ones among them, in order."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Any]
    placement: Placement
    outputs: list[Tensor | None] = field(default_factory=list)
    """What it returns, as meta tensors of the whole shapes."""
    key: Any = None
    """What else is of the same kind: shapes, dtypes and plain arguments; None where no rule is known."""

    @property
    def name(self) -> str:
        """The operator's name, as torch has it."""
        return str(self.func._schema.name).removeprefix("aten::")

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The inputs' shapes."""
        return [tuple(x.shape) for x in self.tensors]

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The first output's shape."""
        first = self.outputs[0]
        assert first is not None
        return tuple(first.shape)

    def arg(self, name: str) -> Any:
        """An argument by its name in torch's schema, or its default."""
        for place, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                if name in self.kwargs:
                    return self.kwargs[name]
                return self.args[place] if place < len(self.args) else argument.default_value
        raise AssertionError(f"{self.func} has no argument {name}")

    def place(self, name: str) -> int | None:
        """Which of ``tensors`` an argument is, or begins with; None when it is no tensor."""
        at = 0
        for number, argument in enumerate(self.func._schema.arguments):
            given = self.args[number] if number < len(self.args) else self.kwargs.get(argument.name)
            num = sum(isinstance(leaf, DTensor) for leaf in tree_flatten(given)[0])
            if argument.name == name:
                return at if num else None
            at += num
        return None

    def letters(self, /, **of: Letter) -> tuple[Letter, ...]:
        """One letter for each input: those named, and B for the others."""
        found: list[Letter] = ["B"] * len(self.tensors)
        for name, letter in of.items():
            place = self.place(name)
            if place is not None:
                found[place] = letter
        return tuple(found)

    def with_arg(self, name: str, value: Any, args: Sequence[Any]) -> tuple[Any, ...]:
        """``args`` with another value for one of them, a positional one; torch leaves defaults at the end out."""
        arguments = self.func._schema.arguments
        changed = [*args, *(each.default_value for each in arguments[len(args) :] if not each.kwarg_only)]
        changed[[each.name for each in arguments].index(name)] = value
        return tuple(changed)


Run = Callable[[OperatorCall, "Decision", tuple[Any, ...], dict[str, Any]], Any]


@dataclass
class Decision:
    """How the inputs must lie and how the outputs then do; ``run`` where it is not the operator itself."""

    ins: list[tuple[Sbp, ...]]
    outs: list[tuple[Sbp, ...]]
    run: Run | None = None
    talks: bool = False
    """Whether ``run`` sends something: then every member runs it, with nothing too."""

    def local_shape_of(self, call: OperatorCall, output: int = 0) -> tuple[int, ...]:
        """The shape of this rank's part of an output."""
        given = call.outputs[output]
        assert given is not None
        return local_shape(tuple(given.shape), GlobalLayout(call.placement, self.outs[output]), here().rank)


def to_sbp(letter: Letter) -> Sbp:
    """A letter as torch has it."""
    return broadcast if letter == "B" else partial_sum if letter == "P" else split(int(letter))


def to_letter(one: Sbp) -> Letter:
    """The letter of an sbp."""
    return one.dim if isinstance(one, Shard) else "B" if one.is_replicate() else "P"


def everyone_whole(call: OperatorCall) -> Way:
    """The way that is always right: every member computes everything."""
    return ("B",) * len(call.tensors), ("B",) * max(len(call.outputs), 1)


def decide(call: OperatorCall, ways: Sequence[Way], run: Run | None = None, *, in_place: bool = False) -> Decision:
    """For each axis the way that moves least; where several tie, the first.

    ``in_place``: the first input is written to, so a way in which it stays as it lies is taken where there is one.
    """
    ways = [everyone_whole(call), *ways]
    chosen: list[Way] = []
    for axis, size in enumerate(call.placement.shape):
        now = [to_letter(x.sbp[axis]) for x in call.tensors]
        as_it_lies = [w for w in ways if in_place and w[0][0] == w[1][0] == now[0]]
        left = as_it_lies or ways  # else it is computed as it may be, and brought back
        costs = [_cost(call, size, now, way) for way in left]
        chosen.append(left[costs.index(min(costs))])
    ins = [tuple(to_sbp(way[0][i]) for way in chosen) for i in range(len(call.tensors))]
    outs = [tuple(to_sbp(way[1][i]) for way in chosen) for i in range(max(len(call.outputs), 1))]
    return Decision(ins, outs, run)


def _cost(call: OperatorCall, size: int, now: Sequence[Letter], way: Way) -> float:
    """Elements that go from one member to another, about."""
    cost = 0.0
    for x, before, after in zip(call.tensors, now, way[0], strict=True):
        if before == after or before == "B":
            continue
        cost += 1e-6  # a layout that moves nothing is kept, too
        share = (size - 1) / size * x.numel()
        cost += {"P": 2.0 if after == "B" else 1.0}.get(str(before), 1.0 if after == "B" else 1.0 / size) * share
        if after == "P":
            cost += 4 * x.numel() + 1  # never worth it
    return cost


def run_here(call: OperatorCall, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator itself on local tensors, or what the rule runs in its place."""
    if decision.run is not None:
        return decision.run(call, decision, args, kwargs)
    return call.func(*args, **kwargs)


def nothing(call: OperatorCall, decision: Decision) -> Any:
    """The results of a rank that is no member, or holds an empty slice: empty ones, and zeros for terms.

    None where it must compute. A member whose slice is empty does not: not every operator takes an empty tensor.
    """
    if here().rank not in call.placement:
        return results(call, decision)
    if decision.talks or not decision.outs or not any(
        x.numel() and 0 in local_shape(tuple(x.shape), GlobalLayout(call.placement, sbp), here().rank)
        for x, sbp in zip(call.tensors, decision.ins, strict=True)
    ):  # fmt: skip
        return None
    terms_given = any(one.is_partial() for sbp in decision.ins for one in sbp)
    for number, meta in enumerate(call.outputs):
        is_term = not terms_given and any(one.is_partial() for one in decision.outs[number])
        if meta is not None and 0 not in decision.local_shape_of(call, number) and not is_term:
            return None
    return results(call, decision)


def results(call: OperatorCall, decision: Decision) -> Any:
    """Zeros of the local shapes, as the operator returns them."""
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


def meta_outputs(func: Any, args: Any, kwargs: Any) -> Any:
    """What the operator returns, computed without values on the whole shapes."""

    def bare(x: Any) -> Any:
        if isinstance(x, Tensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return torch.device("meta") if isinstance(x, torch.device) else x

    return func(*tree_map(bare, args), **tree_map(bare, kwargs))


def flattened(args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """The arguments as a flat list, and how to put them together again."""
    return tree_flatten((args, kwargs))


def put_together(leaves: list[Any], spec: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments from a flat list."""
    args, kwargs = tree_unflatten(leaves, spec)
    return args, kwargs


def refusal(call: OperatorCall, why: str, instead: str = "tensors that every member has whole") -> PlanError:
    """The error for what has no rule."""
    lies = ", ".join(f"{list(x.shape)} {words.text(x.sbp)}" for x in call.tensors)
    return PlanError(
        f"'{call.name}' has no rule for global tensors that lie so: {why}",
        given=f"{lies} on {call.placement}",
        allowed=instead,
        fix=f"write x.to_global(sbp={_whole(call.placement)}) for them first",
    )


def check_dtypes(call: OperatorCall) -> None:
    """Raises PlanError where inputs differ in dtype: on every rank, where only members would meet torch's own error."""
    if len({x.dtype for x in call.tensors}) > 1:
        raise PlanError(
            f"'{call.name}' takes tensors of one dtype",
            given=", ".join(f"{list(x.shape)} {x.dtype}" for x in call.tensors),
            allowed="one dtype for all of them",
            fix=f"write x.to({call.tensors[0].dtype}) for the others",
        )


def number_of(given: Any) -> Any:
    """The number that an argument is: a plain one, or one in a plain tensor, the same on every rank; else None."""
    if isinstance(given, Tensor):
        held = given._plain if isinstance(given, GlobalTensor) else None
        return None if held is None or held.ndim else held.item()
    return given


def is_finite(number: Any) -> bool:
    """Whether zero times it is zero."""
    return cmath.isfinite(number)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What a mean of this dtype is summed in: the sum may be too large for a narrow float where the mean is not."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def is_wider(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Whether every number of the other type is one of this type, too."""
    return torch.promote_types(dtype, than) == dtype


def mixed(func: Any, what: str, fix: str) -> LayoutError:
    """The error for tensors that cannot meet in one operator."""
    return LayoutError(
        f"'{func._schema.name.removeprefix('aten::')}' is given tensors that do not lie on one placement",
        given=what,
        allowed="global tensors of one placement, and plain numbers",
        fix=fix,
    )


def _whole(where: Placement) -> str:
    return "sbp.broadcast" if where.ndim == 1 else f"({', '.join(['sbp.broadcast'] * where.ndim)})"
