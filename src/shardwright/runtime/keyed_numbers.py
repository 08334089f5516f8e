"""The random numbers of one draw, computed from a key for each sample and each element's index within its sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import pi
from typing import Any

import torch
from torch import Tensor

from shardwright.analysis.draws import SamplePlace
from shardwright.errors import PlanError
from shardwright.rng import DimSlice, RngTracker, hashed

Tokens = Callable[[Sequence[int]], tuple[DimSlice, ...]]
Like = Sequence[int] | Tensor

_BITS = {torch.float16: 11, torch.bfloat16: 8}
"""The bits of a uniform number, where fewer than 24: it stays below 1 when it is rounded."""


@dataclass
class KeyedNumbers:
    """The random numbers of one draw: each method returns one for each element of a tensor ``like``, or of its shape.

    Where ``like`` is a part of a whole tensor, they are those of this part, and so is the result.
    """

    rng: RngTracker
    key: str
    place: SamplePlace | None
    samples: Sequence[int]
    device: torch.device
    tokens: Tokens | None = None

    def words(self, like: Like, stream: int = 0) -> Tensor:
        """Returns 24 random bits for each element; ``stream`` tells several for one element apart."""
        layer = f"{self.key}~{stream}" if stream else self.key
        part, shape = None, like
        if isinstance(like, Tensor):
            part, shape = self.rng.part_of(like), like.shape
        with torch._C.DisableTorchFunction():
            found = self._words(layer, tuple(shape), () if part is None else part[0])
            if part is not None:
                part[1](found)
            return found

    def _words(self, layer: str, shape: tuple[int, ...], cuts: tuple[DimSlice, ...]) -> Tensor:
        at = None if self.place is None or not shape else self.place.dim
        samples = (-1,) if at is None else self.samples
        keys = torch.tensor(self.rng.keys(layer, samples), dtype=torch.int64, device=self.device)
        keys = keys.to(torch.int32).view(len(samples), 2)
        cuts += () if self.tokens is None else self.tokens(shape)
        held = {cut.dim % len(shape): cut for cut in cuts}
        index = torch.zeros((1,) * len(shape), dtype=torch.int64, device=self.device)
        stride = 1
        for dim in range(len(shape) - 1, -1, -1):  # row-major index within the sample
            here, size = self._indices(shape[dim], held.get(dim))
            along = (-1, *(1,) * (len(shape) - 1 - dim))
            if dim == at:
                here, size, row = self._within(here, size)
                keys = keys[row]
                here = here[:1] if size == 1 else here  # all samples have one index: it is broadcast
            index = index + (here * stride).view(along)
            stride *= size
        if at is None:
            return hashed(index, keys[0, 0], keys[0, 1])
        first, second = (keys[:, i].view(-1, *(1,) * (len(shape) - 1 - at)) for i in (0, 1))
        return hashed(index, first, second)

    def _indices(self, size: int, cut: DimSlice | None) -> tuple[Tensor, int]:
        """Returns the indices of a dim's elements in the whole tensor, and the size of the dim there."""
        if cut is None:
            return torch.arange(size, device=self.device), size
        return torch.cat([torch.arange(start, stop, device=self.device) for start, stop in cut.ranges]), cut.size

    def _within(self, index: Tensor, size: int) -> tuple[Tensor, int, Tensor]:
        """Returns the indices without the samples, the number of these indices, and the sample of each."""
        assert self.place is not None
        count, (_, outside, inside) = len(self.samples), self.place
        if not count:
            return index, size, index
        if inside > 1 and outside == 1:  # a number of tokens may be another than the example's
            inside = size // count
        elif outside > 1 and inside == 1:
            outside = size // count
        if outside * count * inside != size:
            raise PlanError(
                f"the random numbers '{self.key}' are not drawn for each sample",
                given=f"{size} elements in dim {self.place.dim} for {count} samples",
                allowed="tensors whose samples are where the example's forward has them, or in dim 0",
                fix="give parallelize an example of the inputs, like the batches",
            )
        row = index // inside % count
        return index // (inside * count) * inside + index % inside, outside * inside, row

    def uniform(self, like: Like, dtype: torch.dtype, stream: int = 0) -> Tensor:
        """Returns numbers in [0, 1)."""
        bits = _BITS.get(dtype, 24)
        found: Tensor = (self.words(like, stream) >> (24 - bits)).to(dtype) / 2**bits
        return found

    def positive(self, like: Like) -> Tensor:
        """Returns numbers in (0, 1), in float64."""
        return (self.words(like).double() + 0.5) / 2**24

    def normal(self, like: Like, dtype: torch.dtype) -> Tensor:
        """Returns numbers of the normal distribution, by the method of Box and Muller."""
        radius = self.positive(like).log().mul(-2).sqrt()
        return (radius * (self.words(like, 1).double() * (2 * pi / 2**24)).cos()).to(dtype)

    def exponential(self, like: Like) -> Tensor:
        """Returns numbers of the exponential distribution of rate 1, in float64."""
        return self.positive(like).log().neg()

    def integers(self, like: Like, low: int, high: int) -> Tensor:
        """Returns integers from ``low`` to below ``high``."""
        fine = self.words(like).double() / 2**24 + self.words(like, 1).double() / 2**48
        return (fine * (high - low)).floor().to(torch.int64).clamp(max=high - low - 1) + low

    def bernoulli(self, like: Like, p: Any) -> Tensor:
        """Returns True with probability ``p``, a number or a tensor."""
        words = self.words(like)
        return words.double() / 2**24 < p if isinstance(p, Tensor) else words < round(p * 2**24)

    def kept(self, like: Like, p: float) -> Tensor:
        """Returns True where dropout of probability ``p`` keeps an element."""
        return self.words(like) >= round(p * 2**24)
