"""``tp8/auto``: the tensor-parallel mode and the grid that send least for this model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

from shardwright.axes import mesh_axes
from shardwright.errors import LayoutError
from shardwright.layout import Factor, Layout, Option
from shardwright.plan.batch_shard import is_sequence

AUTO = "auto"


def candidates(factor: Factor) -> Iterator[Factor]:
    """Every mode that cuts weights over all of so many ranks, on every grid, the simplest first.

    2.5D is not among them: it copies weights over its depth, so with enough tokens a depth of all ranks would always
    send least, and hold the whole model.

    >>> [str(each) for each in candidates(Factor("tp", (4,), (Option("auto"),)))][:5]
    ['tp4', 'tp4/sp', 'tp1x4/2d', 'tp2x2/2d', 'tp4x1/2d']
    """
    size = factor.size
    others = tuple(option for option in factor.options if option.name != AUTO)
    yield Factor("tp", (size,), others)
    yield Factor("tp", (size,), (*others, Option("sp")))
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    for rows in divisors:
        yield Factor("tp", (rows, size // rows), (*others, Option("2d")))
    for depth in divisors[1:]:
        for rows in (n for n in divisors if size // depth % n == 0):
            yield Factor("tp", (depth, rows, size // depth // rows), (*others, Option("3d")))


def settle(layout: Layout, price: Callable[[Layout], float]) -> Layout:
    """The layout with ``auto`` replaced by the mode of the lowest price; the simplest of equal ones.

    ``price`` plans a layout and says what it sends. Raises: LayoutError: no mode fits the model; the text of the
    plainest.
    """
    factor = layout.factor("tp")
    auto = factor.option(AUTO) if factor is not None else None
    if factor is None or auto is None:
        return layout
    if auto.value is not None or len(factor.sizes) > 1 or factor.option("sp") is not None:
        raise LayoutError(
            "'auto' chooses the mode and the grid itself",
            given=str(layout),
            allowed=f"tp{factor.size}/auto",
            fix=f"write tp{factor.size}/auto",
        )
    best: tuple[float, Layout] | None = None
    refusal: LayoutError | None = None
    for candidate in candidates(factor):
        others = tuple(f for f in layout.factors if f.axis != "tp")
        tried = replace(layout, factors=(*others, candidate))
        try:
            sent = price(tried)
        except LayoutError as error:
            refusal = refusal or error
            continue
        if best is None or sent < best[0] * (1 - 1e-9):
            best = (sent, tried)
    if best is None:
        assert refusal is not None, "there is always the plainest"
        raise refusal
    return best[1]


def tokens_of(inputs: Any, layout: Layout) -> int:
    """The tokens of one microbatch of one model copy: of integers each one, of numbers all but their last dim.

    >>> import torch
    >>> tokens_of(torch.zeros(8, 16, dtype=torch.int64), Layout.parse("dp2 mb2 tp4"))
    32
    """
    tensors = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]
    if not tensors:
        return 1
    first = tensors[0]
    shape = first.shape[:-1] if first.is_floating_point() and first.dim() > 1 else first.shape
    return max(1, prod(shape) // num_shares(layout))


def samples_of(inputs: Any, layout: Layout) -> int | None:
    """The samples of the smallest microbatch of one model copy; None where they are not sequences of tokens.

    >>> import torch
    >>> tokens, pictures = torch.zeros(5, 16, dtype=torch.int64), torch.zeros(5, 16)
    >>> samples_of(tokens, Layout.parse("dp2 tp4")), samples_of(pictures, Layout.parse("tp4"))
    (2, None)
    """
    tensors = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]
    if not tensors or not all(map(is_sequence, tensors)):
        return None
    return max(1, tensors[0].shape[0] // num_shares(layout))


def num_shares(layout: Layout) -> int:
    """In how many parts, microbatches of all model copies, a global batch goes through the model."""
    return layout.num_microbatches * prod(layout.mesh[axis] for axis in mesh_axes("copies"))
