"""Random numbers for one call of a random function, hashed from a key, the sample and the element's index in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import pi
from typing import Any

import torch
from torch import Tensor

from shardwright.analysis.random_numbers.draws import ALONE, SamplePlace
from shardwright.element_hash import HeldDim, random_bits
from shardwright.errors import EXAMPLE, PlanError
from shardwright.keyed_dropout import dropout_factors
from shardwright.rng import DimSlice, RngTracker, held_of, least_kept, sample_indices

Tokens = Callable[[Sequence[int]], tuple[DimSlice, ...]]
Like = Sequence[int] | Tensor

_BITS = {torch.float16: 11, torch.bfloat16: 8}
"""The number of random bits in a uniform number of a narrow dtype, so that rounding keeps it below 1."""


@dataclass
class KeyedNumbers:
    """A counter-based random number generator for one draw: a number depends only on its key, sample and element.

    Each method returns a tensor on ``device`` of the shape of ``like``, a tensor or a shape. ``key`` identifies the
    draw, ``samples`` are the indices of the tensor's samples in the global batch, and ``place`` says in which dim, or
    factor of a dim, the tensor has them; :data:`ALONE` if it is of one sample. Without a ``place``, a number depends on
    the key and the element's index in the tensor. If ``like`` is a rank's shard of a whole tensor, the result is the
    same shard of the whole tensor's numbers. Where sequences are sharded, ``tokens(shape)`` returns which slice of the
    whole a tensor of this shape is. ``cuts`` are slices of dims, for tensors that are not tagged as shards themselves.

    Raises: PlanError, from each method: the size of the dim in ``place`` does not fit the number of samples.
    """

    rng: RngTracker
    key: str
    place: SamplePlace | None
    samples: Sequence[int]
    device: torch.device
    tokens: Tokens | None = None
    cuts: tuple[DimSlice, ...] = ()

    def words(self, like: Like, stream: int = 0) -> Tensor:
        """Returns random integers from 0 to 2**24 - 1; different ``stream`` values give independent integers."""
        return self._drawn(like, lambda shape, cuts: self._bits(shape, cuts, stream=stream))

    def kept(self, like: Like, p: float) -> Tensor:
        """Returns a mask that is True for the elements that dropout of probability ``p`` keeps."""
        return self._drawn(like, lambda shape, cuts: self._mask(shape, cuts, p))

    def factors(self, like: Like, p: float, dtype: torch.dtype) -> Tensor:
        """Returns the factors by which dropout of probability ``p`` multiplies the elements: 0 or 1 / (1 - p)."""
        return self._drawn(like, lambda shape, cuts: dropout_factors(self._mask(shape, cuts, p), p, dtype))

    def _drawn(self, like: Like, draw: Callable[[tuple[int, ...], tuple[DimSlice, ...]], Tensor]) -> Tensor:
        part, shape = None, like
        if isinstance(like, Tensor):
            part, shape = self.rng.shard_of(like), like.shape
        with torch._C.DisableTorchFunction():
            values = draw(tuple(shape), self.cuts if part is None else part[0])
            if part is not None:
                part[1](values)
            return values

    def _mask(self, shape: tuple[int, ...], cuts: tuple[DimSlice, ...], p: float) -> Tensor:
        if 0 < p < 1:
            return self._bits(shape, cuts, least_kept(p))
        return torch.full(shape, p <= 0, device=self.device)

    def _bits(
        self, shape: tuple[int, ...], cuts: tuple[DimSlice, ...], least: int | None = None, stream: int = 0
    ) -> Tensor:
        is_alone = self.place == ALONE
        at = None if self.place is None or is_alone or not shape else self.place.dim
        dims = held_of(shape, (*cuts, *(() if self.tokens is None else self.tokens(shape))))
        if at is None:
            within = sample = torch.zeros(1, dtype=torch.int64, device=self.device)
            sample = sample_indices(self.samples, self.device) if is_alone else sample
        else:
            sample, within = self._within(dims.pop(at))
        words = self.rng.words(f"{self.key}~{stream}" if stream else self.key)
        bits = random_bits(words, sample, within, dims, least)
        return bits[0] if at is None else bits.movedim(0, at)

    def _within(self, dim: HeldDim) -> tuple[Tensor, Tensor]:
        """Returns, for each index along the dim of samples, the sample's global index and the index in the sample."""
        assert self.place is not None
        count, size, (_, outside, inside) = len(self.samples), dim.size, self.place
        index = dim.indices(torch.empty(0, dtype=torch.int64, device=self.device))
        if not count:
            return index, index
        if inside > 1 and outside == 1:  # the number of tokens may differ from the example's
            inside = size // count
        elif outside > 1 and inside == 1:
            outside = size // count
        if outside * count * inside != size:
            raise PlanError(
                f"the random numbers '{self.key}' are not drawn for each sample",
                given=f"{size} elements in dim {self.place.dim} for {count} samples",
                allowed="tensors whose samples are where the example's forward has them, or in dim 0",
                fix=self.rng.fix_for_samples(EXAMPLE),
            )
        sample = sample_indices(self.samples, self.device)[index // inside % count]
        return sample, index // (inside * count) * inside + index % inside

    def uniform(self, like: Like, dtype: torch.dtype, stream: int = 0) -> Tensor:
        """Returns uniform random numbers in [0, 1), in ``dtype``."""
        bits = _BITS.get(dtype, 24)
        values: Tensor = (self.words(like, stream) >> (24 - bits)).to(dtype) / 2**bits
        return values

    def positive(self, like: Like) -> Tensor:
        """Returns uniform random numbers in (0, 1), in float64."""
        return (self.words(like).double() + 0.5) / 2**24

    def normal(self, like: Like, dtype: torch.dtype) -> Tensor:
        """Returns standard normal random numbers, in ``dtype``, by the Box-Muller method."""
        radius = self.positive(like).log().mul(-2).sqrt()
        return (radius * (self.words(like, 1).double() * (2 * pi / 2**24)).cos()).to(dtype)

    def exponential(self, like: Like) -> Tensor:
        """Returns exponential random numbers of rate 1, in float64."""
        return self.positive(like).log().neg()

    def integers(self, like: Like, low: int, high: int) -> Tensor:
        """Returns uniform random integers from ``low`` to ``high`` - 1."""
        fine = self.words(like).double() / 2**24 + self.words(like, 1).double() / 2**48
        return (fine * (high - low)).floor().to(torch.int64).clamp(max=high - low - 1) + low

    def bernoulli(self, like: Like, p: Any) -> Tensor:
        """Returns a mask whose elements are True with probability ``p``, a number or a tensor of probabilities."""
        return self.words(like).double() / 2**24 < p if isinstance(p, Tensor) else self.kept(like, 1 - p)


@dataclass
class RowNumbers(KeyedNumbers):
    """A random number generator for a tensor of selected rows: a number depends on key, row and index in the row.

    ``rows`` has the number of each row, in the shape of the tensor with a last dim of 1. ``draws_before`` has, for each
    row (flattened), how many draws for a row of the same number came before.
    """

    rows: Tensor = field(kw_only=True)
    draws_before: Tensor = field(kw_only=True)

    def _bits(
        self, shape: tuple[int, ...], cuts: tuple[DimSlice, ...], least: int | None = None, stream: int = 0
    ) -> Tensor:
        words = self.rng.words(f"{self.key}~{stream}" if stream else self.key)
        features = held_of(shape, cuts)[self.rows.dim() - 1 :]
        bits = random_bits(words, self.rows.flatten(), self.draws_before, features, least)
        return bits.view(*self.rows.shape[:-1], *bits.shape[1:])
