"""Computes random bits for a tensor's elements, on the tensor's device, by hashing each element's global index.

A rank that holds a shard computes the bits of its own elements alone, and they equal those on one device. The index of
an element has two parts: a row (its sample, and its index in the outer dims) and a column (its index in the last dims).
Each row is hashed into two words of 32 bits, and each element mixes these words with its column by two rounds of
xor-shift and multiply. On the CPU this is done in blocks that fit a cache, and on a GPU in one compiled kernel if
possible. Only torch's operators on int32 and int64 are used: they wrap around on every device.

N elements along dim 0, O outer places, R rows, C columns
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._triton import has_triton

FEWEST_COLUMNS = 256
"""The smallest number of columns: last dims are joined into columns until they have this many places."""
BLOCK, DEVICE_BLOCK = 2**17, 2**22
"""The number of elements that one CPU thread, or another device, mixes at a time."""

_UNFUSED = ("cpu", "meta")

_SAMPLE, _OUTER = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64
"""Odd factors of sample and outer index; sums collide only for samples or outer indices that are 2**29 apart."""
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_FIRST, _SECOND, _HIGH = 0x7FEB352D, 0x846CA68B - 2**32, 0x9E3779B1 - 2**32


class HeldDim(NamedTuple):
    """The elements of a dim that this rank holds: pairs (start, stop) of indices, and the whole dim's ``size``."""

    ranges: Sequence[tuple[int, int]]
    size: int

    @property
    def num_held(self) -> int:
        """The number of elements of the dim that this rank holds."""
        return sum(stop - start for start, stop in self.ranges)

    def indices(self, like: Tensor) -> Tensor:
        """Returns the indices in the whole dim of the held elements, as a tensor of the dtype and device of ``like``.

        >>> HeldDim([(0, 2), (5, 8)], 9).indices(torch.zeros(0))
        tensor([0., 1., 5., 6., 7.])
        """
        ranges = self.ranges or ((0, 0),)
        made = [torch.arange(start, stop, dtype=like.dtype, device=like.device) for start, stop in ranges]
        return made[0] if len(made) == 1 else torch.cat(made)


def random_bits(
    words: Sequence[int | Tensor],
    sample_N: Tensor,
    within_N: Tensor,
    dims: Sequence[HeldDim],
    least: int | None = None,
) -> Tensor:
    """Returns 24 random bits for each element that this rank holds, as an int32 tensor.

    With ``least`` it returns a bool tensor instead: for each element, whether a random int32 is at least ``least``. For
    the same key, an element with the same index in the whole tensor gets the same bits on every rank.

    ``words`` are the key: integers of 64 bits, or tensors that hold one each. For each index along dim 0, ``sample_N``
    has the number of the sample, and ``within_N`` the index within the sample. ``dims`` are the other dims, with the
    elements of each that this rank holds.

    Shapes: returns (N, number of elements held of each dim), on the device of ``sample_N``.

    >>> samples, within = torch.arange(2), torch.zeros(2, dtype=torch.int64)
    >>> whole = random_bits([7], samples, within, [HeldDim([(0, 6)], 6)])
    >>> torch.equal(random_bits([7], samples, within, [HeldDim([(4, 6)], 6)]), whole[:, 4:])
    True
    """
    first = len(dims)
    while first and prod([dim.size for dim in dims[first:]]) < FEWEST_COLUMNS:
        first -= 1
    outer, inner = dims[:first], dims[first:]
    shape, device = [len(sample_N), *(dim.num_held for dim in dims)], sample_N.device
    key_N = sample_N * _SAMPLE
    for word in words:
        key_N = key_N + word
    outer_NO = _raveled(within_N, outer).view(shape[0], prod(shape[1 : 1 + first]))
    row_R1 = (key_N.view(-1, 1) + outer_NO * _OUTER).view(-1, 1)
    has_high = prod([dim.size for dim in inner]) > 2**31
    mix = _whole if torch.compiler.is_dynamo_compiling() else _fused(device)
    if mix is not None:
        return mix(row_R1, _raveled(_start(has_high, device), inner), least).view(shape)
    dtype = torch.int32 if least is None else torch.int8
    bits_RC = torch.empty((len(row_R1), prod(shape[1 + first :])), dtype=dtype, device=device)
    if not bits_RC.is_meta:
        _fill(bits_RC, row_R1, inner, _start(has_high, device), least)
    else:  # on the meta device: allocate the temporary memory of one block, so that a rehearsal counts it
        torch.empty((2, min(bits_RC.numel(), BLOCK)), dtype=torch.int32, device=device)
    return (bits_RC if least is None else bits_RC.view(torch.bool)).view(shape)


def _fill(bits_RC: Tensor, row_R1: Tensor, inner: Sequence[HeldDim], start: Tensor, least: int | None) -> None:
    """Writes the bits into ``bits_RC`` by blocks, with two words of temporary memory for each element of a block."""
    device = bits_RC.device
    block = BLOCK * torch.get_num_threads() if device.type == "cpu" else DEVICE_BLOCK
    for rows_R1, into_RC in zip(row_R1.split(block), bits_RC.split(block), strict=True):
        words, at = _row_words(rows_R1), 0
        for index_C in _columns(start, inner, block):
            column, width = _column_words(index_C), len(index_C)
            count = max(1, block // max(1, width))
            scratch = torch.empty((2, min(count, len(rows_R1)), width), dtype=torch.int32, device=device).unbind()
            out_RC = into_RC[:, at : at + width]
            for first, second, part in zip(*(tensor.split(count) for tensor in (*words, out_RC)), strict=True):
                if len(part) < len(scratch[0]):
                    scratch = tuple(buffer[: len(part)] for buffer in scratch)
                mixed = _mixed(first, second, *column, *scratch)
                # int32 is compared into int32 and copied to int8 in vectors, but compared into bool one by one
                part.copy_(_upper_bits(mixed) if least is None else mixed.ge_(least))
            at += width


def _whole(row_R1: Tensor, index_C: Tensor, least: int | None) -> Tensor:
    """Computes all bits at once, for a compiler that fuses the passes."""
    mixed = _mixed(*_row_words(row_R1), *_column_words(index_C))
    return _upper_bits(mixed) if least is None else mixed >= least


@cache
def _fused(device: torch.device) -> Callable[..., Tensor] | None:
    """Returns a compiled kernel for an accelerator if its bits are equal to those of torch's operators, else None."""
    if device.type in _UNFUSED or not has_triton():
        return None
    fused = torch.compile(_whole, dynamic=True)
    rows_R1 = torch.arange(9, device=device).view(-1, 1) * _OUTER
    index_C = torch.arange(70, dtype=torch.int32, device=device)
    try:
        if all(torch.equal(fused(rows_R1, index_C, least), _whole(rows_R1, index_C, least)) for least in (None, 9)):
            return fused
        problem = "its bits are other than those of torch's operators"
    except Exception as error:  # such as a machine without a compiler of C
        problem = f"{type(error).__name__}: {error}"
    warnings.warn(f"dropout on {device} takes several kernels, not one compiled: {problem}", stacklevel=2)
    return None


def _mixed(
    first_R1: Tensor, second_R1: Tensor, column_C: Tensor, high_C: Tensor | None,
    x: Tensor | None = None, t: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns 32 bits for each element, of which the upper ones are mixed best; ``x`` and ``t`` are memory for that.

    Arithmetic shifts save a pass, but give x and ~x the same result. In the first round x and ~x cannot both occur in a
    row, since columns are below 2**31.
    """
    x = torch.bitwise_xor(first_R1, column_C, out=x)
    t = torch.bitwise_right_shift(x, 16, out=t)
    x = torch.add(second_R1, x.bitwise_xor_(t), alpha=_FIRST, out=x)
    if high_C is not None:
        x = x.add_(high_C)
    t = torch.bitwise_right_shift(x, 15, out=t)
    return x.bitwise_xor_(t).mul_(_SECOND)


def _upper_bits(mixed: Tensor) -> Tensor:
    """Returns 24 evenly mixed bits of each word, from its upper bits."""
    upper = (mixed >> 8) & 0xFFFFFF
    return upper ^ (upper >> 12)


def _row_words(row_R1: Tensor) -> tuple[Tensor, Tensor]:
    """Mixes the index of each row, by a bijection (Stafford's mix 13), into two words."""
    for shift, factor in _ROUNDS:
        row_R1 = (row_R1 ^ ((row_R1 >> shift) & (2 ** (64 - shift) - 1))) * factor
    row_R1 = row_R1 ^ ((row_R1 >> 31) & (2**33 - 1))
    return (row_R1 >> 32).to(torch.int32), row_R1.to(torch.int32)


def _column_words(index_C: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns the lower 31 bits of each column and, if columns may have more bits, a word of the upper ones."""
    if index_C.dtype == torch.int32:
        return index_C, None
    return (index_C & (2**31 - 1)).to(torch.int32), (index_C >> 31).to(torch.int32) * _HIGH


def _columns(start: Tensor, inner: Sequence[HeldDim], most: int) -> Iterator[Tensor]:
    """Yields the indices of all columns, in parts of about ``most`` or fewer."""
    if prod([dim.num_held for dim in inner]) <= most:
        yield _raveled(start, inner)
        return
    first, *others = inner
    step = max(1, most // prod([dim.num_held for dim in others]))
    for low, high in first.ranges:
        for at in range(low, high, step):
            yield _raveled(start, [HeldDim(((at, min(at + step, high)),), first.size), *others])


def _start(has_high: bool, device: torch.device) -> Tensor:
    """Returns the index 0 as a tensor, of the dtype that can hold all column indices."""
    return torch.zeros(1, dtype=torch.int64 if has_high else torch.int32, device=device)


def _raveled(index: Tensor, dims: Sequence[HeldDim]) -> Tensor:
    """Returns the row-major indices of the elements held in ``dims``, within each of the outer indices ``index``."""
    for dim in dims:
        index = (index.view(-1, 1) * dim.size + dim.indices(index)).view(-1)
    return index
